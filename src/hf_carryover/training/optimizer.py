"""What makes a step? Muon for matrices, AdamW for the rest, as one optimizer that checkpoints as one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_carryover.targets import default_dtype

# Coefficients of the quintic iteration in Keller Jordan's Muon (kellerjordan.github.io/posts/muon).
QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.AdamW):
    """AdamW whose groups with ``orthogonal=True`` take Muon's step: the momentum's nearest orthogonal matrix.

    `torch.optim.Muon` orthogonalises in bf16 and takes matrices alone; on a processor without bf16 instructions that
    is slower than the whole training step, and a Trainer wants one optimizer. The update's size is AdamW's
    (``match_rms_adamw``, arXiv 2502.16982, equation 4), so learning rates are comparable.
    """

    def __init__(self, params: Any, *, lr: float, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95))
        self.momentum = momentum
        for group in self.param_groups:
            group.setdefault("orthogonal", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; gradients of orthogonal groups are used up."""
        for group in self.param_groups:
            for parameter in group["params"] if group["orthogonal"] else ():
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:  # AdamW expects a step count of every parameter that has a state
                    state |= {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(parameter)}
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - self.momentum)
                update = orthogonalize(parameter.grad.lerp(buffer, self.momentum))  # Nesterov
                size = 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * size)
                parameter.grad = None
        return super().step(closure)


def orthogonalize(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration: a matrix ``[n, m]`` with its singular values moved to about 1.

    bf16, as in the original, where the hardware multiplies in it, else fp32. There a long matrix's iteration runs on
    its Gram matrix alone: every polynomial in ``G = X X'`` commutes, so five products of the long side become two. In
    bf16 that would not converge: the Gram matrix has the squares of the singular values, and small ones are lost.
    """
    dtype = default_dtype(matrix.device)
    x = matrix.to(dtype) / matrix.norm().clamp(min=1e-7).to(dtype)
    x = x.T if x.shape[0] > x.shape[1] else x  # [n, m], n <= m
    a, b, c = QUINTIC
    if x.shape[1] < 2 * x.shape[0] or dtype == torch.bfloat16:
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
    else:
        eye = torch.eye(x.shape[0], dtype=dtype, device=x.device)
        gram, whole = x @ x.T, eye
        for _ in range(steps):
            factor = a * eye + b * gram + c * gram @ gram
            gram, whole = factor @ gram @ factor, factor @ whole
        x = whole @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x

"""Is the text the target's own? Greedy ids beside plain `generate`, and whether rounding explains a difference."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.evaluation.runs import System, generate

# A near-tie in a 16-bit type: so many steps of the type, at the size of the logit.
NEAR_TIE_STEPS = 4


@dataclass
class Difference:
    """Where a system's greedy text first parts from plain `generate`'s.

    Attributes:
        system: Its name.
        position: Index of the first new token that differs, or that one of the texts lacks.
        gap: The target's largest logit there minus the smaller one of the two tokens: its top-2 gap, if these are its
            top two.
        explained: Whether rounding explains it: in 16 bit, the gap is at most four steps; else, float64 agrees.
    """

    system: str
    position: int
    gap: float
    explained: bool


def find_difference(
    system: System, target: PreTrainedModel, prompt: Tensor, *, plain_ids: list[int], ids: list[int], **decoding: Any
) -> Difference | None:
    """Compare a system's new ``ids`` after a prompt ``[1, T]`` with plain `generate`'s; None if they are equal."""
    if ids == plain_ids:
        return None
    both = list(zip(plain_ids, ids, strict=False))
    position = next((i for i, (theirs, other) in enumerate(both) if theirs != other), len(both))
    text = torch.cat([prompt, torch.tensor([plain_ids[:position]], dtype=prompt.dtype, device=prompt.device)], dim=1)
    with torch.no_grad():
        logits = target(input_ids=text).logits[0, -1].float()  # [V]
    gap = (logits.max() - logits[[new[position] for new in (plain_ids, ids) if position < len(new)]].min()).item()
    if torch.finfo(target.dtype).bits == 16:
        step = torch.finfo(target.dtype).eps / 2 * logits.max().abs().item()  # bf16: 2^-8 of the logit
        # A text that stops too early has no token here: no rounding explains that.
        explained = position < len(both) and gap <= NEAR_TIE_STEPS * step
    else:
        explained = _float64_agrees(system, target, prompt, **decoding)
    return Difference(system.name, position, gap, explained)


def _float64_agrees(system: System, target: PreTrainedModel, prompt: Tensor, **decoding: Any) -> bool:
    with in_float64(target), in_float64(system.options.get("assistant_model")):
        plain = generate(System("plain", {}), target, prompt, seed=0, **decoding)
        return torch.equal(plain, generate(system, target, prompt, seed=0, **decoding))


@contextmanager
def in_float64(model: PreTrainedModel | None) -> Iterator[None]:
    """Compute in float64 for a while; a model in fp32 comes back bit by bit, also after an error."""
    if model is None or model.dtype == torch.float64:
        yield
        return
    before = model.dtype
    model.double()
    try:
        yield
    finally:
        model.to(before)

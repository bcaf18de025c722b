"""Is the text the target's own? Greedy ids beside plain `generate`, and whether rounding explains a difference."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.evaluation.runs import System, generate

# A near-tie in a 16-bit type, without looking closer: so many steps of the type, at the size of the logit.
NEAR_TIE_STEPS = 4


@dataclass
class Difference:
    """Where a system's greedy text first parts from plain `generate`'s.

    Attributes:
        system: Its name.
        position: Index of the first new token that differs, or that one of the texts lacks.
        gap: The target's largest logit there minus the smaller one of the two tokens: its top-2 gap, if these are its
            top two.
        explained: Whether rounding explains it: float64 agrees; in 16 bit, the gap is at most four steps, or at most
            what rounding was seen to move in this text (`rounding_of`), and then float64 must agree, too.
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
        explained = position < len(both) and (
            gap <= NEAR_TIE_STEPS * step
            or (gap <= rounding_of(target, prompt, **decoding) and _float64_agrees(system, target, prompt, **decoding))
        )
    else:
        explained = _float64_agrees(system, target, prompt, **decoding)
    return Difference(system.name, position, gap, explained)


@torch.no_grad()
def rounding_of(target: PreTrainedModel, prompt: Tensor, **decoding: Any) -> float:
    """How far rounding alone moves the gap of the two likeliest tokens: the largest change over plain's own text.

    The target writes it token by token and reads it in one pass; exact arithmetic would give the same logits. No
    drafter takes part. The errors come from the hidden state, so they need not be in proportion to these two logits.
    """
    told = System("plain", {"output_logits": True, "return_dict_in_generate": True})
    written: Any = generate(told, target, prompt, seed=0, **decoding)
    one_by_one = torch.stack(written.logits, dim=1)[0].float()  # [T, V]
    at_once = target(input_ids=written.sequences).logits[0, prompt.shape[1] - 1 : -1].float()  # [T, V]
    likeliest = one_by_one.topk(2).indices  # [T, 2]
    gaps = (logits.gather(1, likeliest) for logits in (one_by_one, at_once))
    before, after = (pair[:, 0] - pair[:, 1] for pair in gaps)
    return (before - after).abs().max().item()


def _float64_agrees(system: System, target: PreTrainedModel, prompt: Tensor, **decoding: Any) -> bool:
    try:
        with in_float64(target), in_float64(system.options.get("assistant_model")):
            plain = generate(System("plain", {}), target, prompt, seed=0, **decoding)
            return torch.equal(plain, generate(system, target, prompt, seed=0, **decoding))
    except RuntimeError:  # no memory, or a kernel that knows no float64: what was not computed explains nothing
        return False


@contextmanager
def in_float64(model: PreTrainedModel | None) -> Iterator[None]:
    """Compute in float64 for a while; a model comes back bit by bit, in its own types, also after an error."""
    if model is None or model.dtype == torch.float64:
        yield
        return
    before = {name: tensor.dtype for name, tensor in _tensors(model)}  # a model in 16 bit has buffers in fp32
    try:
        model.double()
        yield
    finally:
        for name, tensor in _tensors(model):
            tensor.data = tensor.data.to(before[name])


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())

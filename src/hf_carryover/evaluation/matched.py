"""What do carried rows say? Every round drafted again without them, at the same anchor and from the same memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from hf_carryover.acceptance import Round
from hf_carryover.cache_carryover import CarryoverCache
from hf_carryover.drafting import CarryoverCandidateGenerator
from hf_carryover.evaluation.runs import Run, drafting, run
from hf_carryover.modeling_carryover import CarryoverDrafterModel


@dataclass
class Matched:
    """What one greedy call with carry on showed; the first three lists have one entry a drafted round.

    Attributes:
        carried: Carried rows that the draft saw.
        on: For each position after the anchor that the final text reaches, 1 where the draft is what stands there.
        off: The same for the draft made without carried rows.
        reconvergence: A round that rejected two drafts or more has an entry: of the rejected positions after the
            first, the share whose draft is what finally stands there.
        attention: A round that carries has an entry: the share of the block's attention probability that falls on
            carried rows, mean over layers, heads and slots.
    """

    carried: list[int] = field(default_factory=list)
    on: list[list[int]] = field(default_factory=list)
    off: list[list[int]] = field(default_factory=list)
    reconvergence: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)


@torch.no_grad()
def run_matched(
    drafter: CarryoverDrafterModel, target: PreTrainedModel, prompt: Tensor, *, seed: int, **decoding: Any
) -> tuple[Run, Matched]:
    """A greedy call with carry on, and what the extra passes saw. Its text and rounds count, its times do not."""
    generator = CarryoverCandidateGenerator(
        drafter, target, generation_config=GenerationConfig(do_sample=False), logits_processor=LogitsProcessorList()
    )
    system = drafting("carry-on", drafter, carry=True)
    with Probe(drafter) as probe:
        result = run(system, target, prompt, seed=seed, **decoding)
    new = torch.tensor([result.ids], device=prompt.device)
    matched = Matched(attention=probe.attention)
    slots, length = iter(probe.slots), prompt.shape[1] + len(result.ids) - sum(result.tokens)
    for record in drafter.last_stats.rounds:
        if len(record.drafts):
            _compare(matched, record, next(slots), generator, torch.cat([prompt, new], dim=1), length)
        length += record.num_accepted + 1
    return result, matched


def _compare(
    matched: Matched,
    record: Round,
    slots: Tensor | None,
    generator: CarryoverCandidateGenerator,
    text: Tensor,
    length: int,
) -> None:
    """Enter one round: its drafts, and those of the slots ``[1, B, D]`` without carry, beside the text ``[1, T]``.

    ``length`` counts the tokens before the drafts, anchor included. Without slots nothing was carried: off is on.
    """
    num_drafts = len(record.drafts)
    final = text[0, length : length + num_drafts].tolist()
    on = off = record.drafted_ids
    if slots is not None:
        first = 0 if generator.drafter.config.sample_from_anchor else 1
        # The method that drafts, so that a Markov head is walked the same way.
        off = generator._propose(text[:, :length], slots[:, first : first + num_drafts])[0][0].tolist()
    matched.carried.append(record.num_carried)
    matched.on.append([int(a == b) for a, b in zip(on, final, strict=False)])
    matched.off.append([int(a == b) for a, b in zip(off, final, strict=False)])
    after_first_rejected = matched.on[-1][record.num_accepted + 1 :]
    if after_first_rejected:
        matched.reconvergence.append(sum(after_first_rejected) / len(after_first_rejected))


class Probe:
    """Runs each drafter pass twice more, on copies of its memory: without carried rows, and to see attention.

    The call's own pass is not touched, so nothing that it proposes changes.

    Attributes:
        slots: The block's last hidden states without carried rows, ``[1, B, D]``; None where nothing was carried.
        attention: The attention mass on carried rows, for each pass that carries.
    """

    def __init__(self, drafter: CarryoverDrafterModel) -> None:
        self.drafter = drafter
        self.slots: list[Tensor | None] = []
        self.attention: list[float] = []

    def __enter__(self) -> Self:
        self._hook = self.drafter.register_forward_pre_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _look(self, drafter: CarryoverDrafterModel, args: tuple[()], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        if kwargs["num_carried"] == 0:
            self.slots.append(None)
            return
        # `forward` itself, because calling the drafter would call this hook.
        self.slots.append(drafter.forward(**_without_carried(kwargs)).last_hidden_state)
        self.attention.append(_attention_mass(drafter, kwargs | {"cache": _branch(kwargs["cache"])}))


def _branch(cache: CarryoverCache) -> CarryoverCache:
    """A memory that starts with the same rows and grows apart: `update` replaces tensors, so none is copied."""
    branched = copy(cache)
    branched.layers = [copy(layer) for layer in cache.layers]
    return branched


def _without_carried(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the same pass without its carried rows; they stand between new committed rows and block."""
    memory, positions, num_carried = kwargs["context_hidden_states"], kwargs["position_ids"], kwargs["num_carried"]
    num_accepted = memory.shape[1] - num_carried
    return (
        kwargs
        | {
            "context_hidden_states": memory[:, :num_accepted],  # [1, A, F]
            "position_ids": torch.cat(
                [positions[:, :num_accepted], positions[:, memory.shape[1] :]], dim=1
            ),  # [1, A + B]
            "cache": _branch(kwargs["cache"]),
            "num_carried": 0,
        }
    )


@contextmanager
def attention_probabilities(drafter: CarryoverDrafterModel) -> Iterator[list[Tensor]]:
    """Attend by the eager kernel, which shows its probabilities: of each layer's passes, ``[N, H, B, keys]``."""
    shown: list[Tensor] = []
    layers = [layer.get_submodule("self_attn") for layer in drafter.layers]
    hooks = [layer.register_forward_hook(lambda *passed: shown.append(passed[2][1])) for layer in layers]
    implementation = drafter.config._attn_implementation
    drafter.set_attn_implementation("eager")
    try:
        yield shown
    finally:
        drafter.set_attn_implementation(implementation)
        for hook in hooks:
            hook.remove()


def _attention_mass(drafter: CarryoverDrafterModel, kwargs: dict[str, Any]) -> float:
    """Mean mass of a pass's attention on carried rows."""
    num_slots, num_carried = kwargs["noise_embeds"].shape[1], kwargs["num_carried"]
    with attention_probabilities(drafter) as shown:
        drafter.forward(**kwargs)
    on_carried = [layer[..., -num_slots - num_carried : -num_slots].sum(dim=-1) for layer in shown]  # each [1, H, B]
    return torch.stack(on_carried).mean().item()

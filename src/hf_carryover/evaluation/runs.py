"""What does one `generate` call give? Its text, its rounds, counted at the target's own passes, and its time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from itertools import pairwise
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.draft_length import AUTO, longest_draft
from hf_carryover.modeling_carryover import CarryoverDrafterModel

# Prompt lookup drafts this many tokens at most: the number in Transformers' own documentation.
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class System:
    """A way to generate: its name in the results, what it adds to `generate`'s arguments, and our drafter, if any.

    ``draft_length`` is the drafter's; a system that is there for its speed runs only where time is taken.
    """

    name: str
    options: dict[str, Any]
    drafter: CarryoverDrafterModel | None = None
    carry: bool = False
    draft_length: int | str | None = None
    timed_only: bool = False


def systems_for(
    target: PreTrainedModel,
    drafter: CarryoverDrafterModel,
    control: CarryoverDrafterModel | None,
    draft_lengths: Sequence[int] = (),
) -> list[System]:
    """What is compared, plain `generate` first. The control is trained without carried rows and runs without them.

    Transformers' own DFlash generator runs the same weights; it drops the anchor's slot, knows no Markov head, and
    needs a target with positions (Bloom has none). Beside all drafts, carry on hands over as many as pay
    (``carry-auto``), and ``draft_lengths`` of them, where that is fewer.
    """
    lookup = System("lookup", {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, timed_only=True)
    systems = [System("plain", {}), lookup]
    has_positions = "position_ids" in signature(target.forward).parameters
    if not drafter.config.sample_from_anchor and drafter.markov_head is None and has_positions:
        options = {"assistant_model": drafter, "speculation_type": "dflash"}
        systems.append(System("library-dflash", options, timed_only=True))  # its drafts are those of carry-off
    systems.append(drafting("carry-off", drafter))
    systems.append(drafting("carry-on", drafter, carry=True))
    if control is not None:
        systems.append(drafting("control", control))
    systems.append(drafting("carry-auto", drafter, carry=True, draft_length=AUTO, timed_only=True))
    for length in sorted({length for length in draft_lengths if length < longest_draft(drafter)}):
        systems.append(drafting(f"carry-{length}", drafter, carry=True, draft_length=length, timed_only=True))
    return systems


def drafting(name: str, drafter: CarryoverDrafterModel, **settings: Any) -> System:
    """Generation with a drafter of ours; unless told otherwise, it hands over all drafts, or those its user allows."""
    allowed = None if drafter.draft_length == AUTO else drafter.draft_length
    return System(name, {"assistant_model": drafter}, drafter, **({"draft_length": allowed} | settings))


@dataclass
class Run:
    """One call. A round is a pass of the target after the prompt's; lists have one entry a round.

    Attributes:
        ids: The new tokens.
        tokens: Tokens that the round kept, the target's own included.
        drafts: Drafts that it verified.
        seconds: Of the whole call.
        prompt_seconds: Of it, until the prompt's pass was done.
        verify_seconds: In the target's passes of rounds.
        draft_seconds: In drafting, where the drafter is ours; on a GPU, in launching it.
        recycle_seconds: In gathering and splitting the verified rows, likewise.
    """

    ids: list[int]
    tokens: list[int]
    drafts: list[int]
    seconds: float
    prompt_seconds: float
    verify_seconds: float
    draft_seconds: float = 0.0
    recycle_seconds: float = 0.0


def run(system: System, target: PreTrainedModel, prompt: Tensor, *, seed: int, **decoding: Any) -> Run:
    """Generate from a prompt ``[1, T]`` with a system, watched by a `PassClock`."""
    with PassClock(target) as clock:
        text = generate(system, target, prompt, seed=seed, **decoding)
        synchronize(target.device)
        seconds = perf_counter() - clock.start
    lengths = [num_cached + 1 for num_cached in clock.num_cached[1:]] + [text.shape[1]]  # before each round, and after
    stats = system.drafter.last_stats.seconds if system.drafter is not None else {"draft": 0.0, "recycle": 0.0}
    return Run(
        ids=text[0, prompt.shape[1] :].tolist(),
        tokens=[after - before for before, after in pairwise(lengths)],
        drafts=[rows - 1 for rows in clock.rows[1:]],
        seconds=seconds,
        prompt_seconds=clock.ends[0] - clock.start,
        verify_seconds=sum(clock.ends[1:]) - sum(clock.starts[1:]),
        draft_seconds=stats["draft"],
        recycle_seconds=stats["recycle"],
    )


def generate(system: System, target: PreTrainedModel, prompt: Tensor, *, seed: int, **decoding: Any) -> Tensor:
    """Text ``[1, T]`` of a prompt: ``decoding`` are arguments of `generate`, the same for every system."""
    torch.manual_seed(seed)
    with switched(system):
        return target.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **decoding, **system.options)


def decoding_options(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Arguments of `generate`: greedy, or the model's whole distribution at a temperature; never with penalties."""
    options = {"max_new_tokens": max_new_tokens, "repetition_penalty": 1.0, "do_sample": temperature > 0}
    return options | ({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {})


@contextmanager
def switched(system: System) -> Iterator[None]:
    """Set a drafter as the system says, and put it back; a carry that is "not set" is a value too: the inner name."""
    drafter = system.drafter
    if drafter is None:
        yield
        return
    before = drafter._carry_enabled, drafter.draft_length
    drafter.carry_enabled, drafter.draft_length = system.carry, system.draft_length
    try:
        yield
    finally:
        drafter._carry_enabled, drafter.draft_length = before


@dataclass
class PassClock:
    """Watches the target's passes: tokens cached before each, its rows, its start and end.

    That is two readings of a clock a pass, for every system alike. On a GPU a pass ends when the device is done, which
    the decoding loop waits for anyway; work that was still queued when the pass began counts as the pass's.
    """

    target: PreTrainedModel
    num_cached: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    start: float = 0.0

    def __enter__(self) -> Self:
        self._hooks = (
            self.target.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.target.register_forward_hook(self._end),
        )
        synchronize(self.target.device)
        self.start = perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, target: PreTrainedModel, args: tuple[()], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        self.num_cached.append(kwargs["cache"].get_seq_length())
        self.rows.append(kwargs["input_ids"].shape[1])
        self.starts.append(perf_counter())

    def _end(self, target: PreTrainedModel, args: tuple[()], output: Any) -> None:  # noqa: ARG002
        synchronize(self.target.device)
        self.ends.append(perf_counter())


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

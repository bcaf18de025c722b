"""How fast is it, where does a round's time go, and how fast could it be? Ratios taken side by side in one process."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.evaluation.acceptance import Rows, bootstrap_interval, summarize_acceptance
from hf_carryover.evaluation.runs import Run, System, run

WARM_UP_TOKENS = 8
# The systems that carry on has to beat, and those of ours that are shown everywhere; fixed draft lengths are not.
RIVALS = ("carry-off", "control")
OURS = ("carry-off", "carry-on", "control", "carry-auto")


def warm_up(systems: Sequence[System], target: PreTrainedModel, prompt: Tensor, **decoding: Any) -> None:
    """Run every system once on a few tokens, so that no measured call pays for what only a first call does."""
    for system in systems:
        run(system, target, prompt, seed=0, **(decoding | {"max_new_tokens": WARM_UP_TOKENS}))


def run_in_turn(
    systems: Sequence[System], target: PreTrainedModel, prompt: Tensor, *, turn: int, seed: int, **decoding: Any
) -> dict[str, Run]:
    """Run the systems one after the other on a prompt ``[1, T]``; the order rotates by ``turn``.

    So each system runs first, second, .. equally often, and a machine that warms up or slows down favours none.
    """
    first = turn % len(systems)
    order = [*systems[first:], *systems[:first]]
    return {system.name: run(system, target, prompt, seed=seed, **decoding) for system in order}


def summarize_ratio(system: Sequence[Sequence[Run]], base: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Median over prompts of the speed (tokens a second of `generate`) of one system relative to another's.

    Both are lists of prompts, each a list of repeats. A prompt's ratio is the median over its repeats, whose two calls
    ran in the same turn.
    """
    ratios = [
        median(_seconds_a_token(b) / _seconds_a_token(s) for s, b in zip(runs, bases, strict=True))
        for runs, bases in zip(system, base, strict=True)
    ]
    rows = np.array(ratios, dtype=float).reshape(-1, 1)  # [N, 1]
    return {
        "prompts": len(ratios),
        "ratio": median(ratios) if ratios else None,
        "interval": bootstrap_interval(rows, _median),
    }


def summarize_lengths(runs: Mapping[str, Sequence[Sequence[Run]]]) -> dict[str, Any]:
    """How automatic draft lengths compare with fixed ones: ``carry-on`` (all drafts) and ``carry-1``, ``carry-2`` ..

    ``systems`` has, for each, mean drafts a round and the share of rounds without any; ``auto_to`` its speed as
    `summarize_ratio`; ``best_fixed`` is the fixed one whose speed relative to plain is highest, found afterwards.
    """
    fixed = [name for name in runs if name == "carry-on" or name.removeprefix("carry-").isdigit()]
    systems = {}
    for name in [*fixed, "carry-auto"]:
        drafts = [count for repeats in runs[name] for run in repeats for count in run.drafts]
        systems[name] = {
            "drafts_a_round": sum(drafts) / max(len(drafts), 1),
            "plain_rounds": drafts.count(0) / max(len(drafts), 1),
        }
    return {
        "systems": systems,
        "auto_to": {name: summarize_ratio(runs["carry-auto"], runs[name]) for name in fixed},
        "best_fixed": max(fixed, key=lambda name: summarize_ratio(runs[name], runs["plain"])["ratio"] or 0.0),
    }


def _seconds_a_token(run: Run) -> float:
    return run.seconds / len(run.ids)


def _median(rows: Rows) -> Rows:
    return np.median(rows[..., 0], axis=-1)


def summarize_rounds(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any] | None:
    """Where the time of a round of ours goes, in seconds, and the speed that drafting this well could reach.

    All times are means over rounds (so after the prompt's pass) of the same runs: ``draft`` (drafter pass, head,
    choice), ``recycle`` (gather and split the verified rows), ``verify`` (the target's pass), and the rest, ``loop``.
    ``one_token`` is a token of plain `generate`, its loop included. With these, relative to plain:

    - ``limit`` = tau * one_token / (verify + draft): recycling and the loop cost nothing;
    - ``limit_free_drafter`` = tau * one_token / verify: drafting costs nothing either;
    - ``reached`` = tau * one_token / round, and ``share_of_limit`` = reached / limit.
    """
    num_rounds, num_plain = sum(len(run.tokens) for run in runs), sum(len(run.tokens) for run in plain)
    if not num_rounds or not num_plain:
        return None
    one_token = sum(run.seconds - run.prompt_seconds for run in plain) / num_plain
    whole = sum(run.seconds - run.prompt_seconds for run in runs) / num_rounds
    verify = sum(run.verify_seconds for run in runs) / num_rounds
    draft = sum(run.draft_seconds for run in runs) / num_rounds
    recycle = sum(run.recycle_seconds for run in runs) / num_rounds
    tau = sum(sum(run.tokens) for run in runs) / num_rounds
    return {
        "draft": draft,
        "recycle": recycle,
        "verify": verify,
        "loop": whole - draft - recycle - verify,
        "one_token": one_token,
        "limit": tau * one_token / (verify + draft),
        "limit_free_drafter": tau * one_token / verify,
        "reached": tau * one_token / whole,
        "share_of_limit": (verify + draft) / whole,
    }


def summarize_speed(timed: Sequence[Mapping[str, Sequence[Run]]]) -> dict[str, Any]:
    """Everything about time, from the timed prompts: for each, the repeats of every system.

    ``accepted_length`` is tau on these prompts, where systems that ran on them alone can be compared with the others.
    """
    runs = {name: [prompt[name] for prompt in timed] for name in timed[0]}
    flat = {name: [run for repeats in runs[name] for run in repeats] for name in runs}
    return {
        "accepted_length": {
            name: summarize_acceptance([repeats[0] for repeats in runs[name]])["accepted_length"] for name in runs
        },
        "to_plain": {name: summarize_ratio(runs[name], runs["plain"]) for name in runs},
        "carry_on_to": {name: summarize_ratio(runs["carry-on"], runs[name]) for name in RIVALS if name in runs},
        "lengths": summarize_lengths(runs),
        "rounds": {name: summarize_rounds(flat[name], flat["plain"]) for name in OURS if name in runs},
    }

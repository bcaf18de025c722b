"""How many drafts are accepted, how sure is that, and what do carried rows add? Sums and intervals over prompts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_carryover.evaluation.matched import Matched
from hf_carryover.evaluation.runs import Run

Rows = NDArray[np.float64]
RESAMPLES = 4000
RESAMPLING_SEED = 0
# Prompts that an interval takes. A bootstrap's is too narrow for few: of two it covers the truth in half of all cases.
FEWEST = 8


def bootstrap_interval(rows: Rows, statistic: Callable[[Rows], Rows]) -> list[float] | None:
    """95 % percentile interval of a statistic when prompts are drawn again with replacement (Efron, 1979).

    Args:
        rows: One row a prompt, ``[N, C]``. Systems that are compared share a row, so that they are resampled together.
        statistic: Maps rows ``[..., N, C]`` to values ``[...]``.

    Returns:
        Low and high end; None for fewer prompts than `FEWEST`, which say too little about others.
    """
    if len(rows) < FEWEST:
        return None
    draws = np.random.default_rng(RESAMPLING_SEED).integers(len(rows), size=(RESAMPLES, len(rows)))
    return np.percentile(statistic(rows[draws]), [2.5, 97.5]).tolist()


def _tokens_a_round(rows: Rows) -> Rows:
    """Rows of (tokens, rounds) into tau, pooled over rounds; 0 without rounds."""
    sums = rows.sum(axis=-2)  # [..., 2]
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def _difference(rows: Rows) -> Rows:
    """Rows of (tokens, rounds) of two systems into the difference of their tau."""
    return _tokens_a_round(rows[..., :2]) - _tokens_a_round(rows[..., 2:])


def _counts(runs: Sequence[Run]) -> Rows:
    """Tokens and rounds of each prompt, ``[N, 2]``."""
    return np.array([(sum(run.tokens), len(run.tokens)) for run in runs], dtype=float).reshape(-1, 2)


def summarize_acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """Accepted length of one system on a list of prompts, one run each; rounds are pooled.

    ``accepted_length`` is tau, the target's own token included, ``accepted_drafts`` the same without it. ``histogram``
    counts rounds by accepted drafts, from 0. ``acceptance_by_position`` is, for each k, the share of rounds that
    accept draft k among those that verified k drafts or more.
    """
    counts = _counts(runs)
    accepted = np.array([kept - 1 for run in runs for kept in run.tokens], dtype=int)
    drafted = np.array([drafts for run in runs for drafts in run.drafts], dtype=int)
    most = int(drafted.max(initial=0))
    return {
        "prompts": len(runs),
        "rounds": len(accepted),
        "tokens": int(counts[:, 0].sum()),
        "accepted_length": float(_tokens_a_round(counts)),
        "accepted_length_interval": bootstrap_interval(counts, _tokens_a_round),
        "accepted_drafts": float(accepted.mean()) if len(accepted) else 0.0,
        "histogram": np.bincount(accepted, minlength=most + 1).tolist(),
        "acceptance_by_position": [
            float((accepted >= k).sum() / (drafted >= k).sum()) for k in range(1, most + 1)
        ],
    }  # fmt: skip


def summarize_difference(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, Any]:
    """Tau of one system minus tau of another on the same prompts in the same order, with its paired interval."""
    rows = np.concatenate([_counts(runs), _counts(others)], axis=1)  # [N, 4]
    return {"difference": float(_difference(rows)), "interval": bootstrap_interval(rows, _difference)}


def summarize_matched(matched: Sequence[Matched]) -> dict[str, Any]:
    """Recall at position k with carry on and off at matched anchors, re-convergence and attention mass.

    Recall at k is the share of anchors whose draft for position k is the token that finally stands there; all anchors,
    and those alone whose draft saw carried rows (elsewhere on and off are the same). `Matched` says what the other two
    are; both are means over rounds.
    """
    carries = [num_carried > 0 for m in matched for num_carried in m.carried]
    on, off = [right for m in matched for right in m.on], [right for m in matched for right in m.off]
    reconvergence = [share for m in matched for share in m.reconvergence]
    attention = [mass for m in matched for mass in m.attention]
    return {
        "anchors": len(on),
        "anchors_carrying": sum(carries),
        "recall_on": _recall(on),
        "recall_off": _recall(off),
        "recall_on_carrying": _recall(right for right, carry in zip(on, carries, strict=True) if carry),
        "recall_off_carrying": _recall(right for right, carry in zip(off, carries, strict=True) if carry),
        "reconvergence": float(np.mean(reconvergence)) if reconvergence else None,
        "attention_mass": float(np.mean(attention)) if attention else None,
    }


def _recall(rounds: Iterable[list[int]]) -> list[float]:
    """Share of ones at each position, over the rounds that reach it."""
    rounds = list(rounds)
    longest = max((len(right) for right in rounds), default=0)
    return [float(np.mean([right[k] for right in rounds if len(right) > k])) for k in range(longest)]

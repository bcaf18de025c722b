"""How many drafts pay? As many as give the most tokens a second, from what the rounds show as they go."""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import cached_assets_path
from torch import nn

AUTO = "auto"
# Rounds that the guess before any acceptance is worth, and what a round weighs less when the next one comes.
PRIOR_ROUNDS, DECAY = 4.0, 0.97
# Measurements of each length that are looked at, and those it takes before a length is trusted.
KEPT, NEEDED = 9, 2
# Plain rounds before drafting is tried again; doubled after each try that does not pay.
FIRST_WAIT, LONGEST_WAIT = 16, 256


def best_draft_length(acceptance: Sequence[float], seconds: Sequence[float]) -> int:
    """The k in 0..K that maximises ``(1 + sum_{i <= k} a_1 .. a_i) / seconds[k]``; of equal ones the shortest.

    Args:
        acceptance: a_j, the probability that draft j is accepted if all before it are, ``[K]``.
        seconds: Of a whole round that hands over 0, 1, .., K drafts, ``[K + 1]``.
    """
    tokens = accumulate(accumulate(acceptance, mul), initial=1.0)  # [K + 1]
    rates = [expected / spent for expected, spent in zip(tokens, seconds, strict=True)]
    return rates.index(max(rates))


@dataclass
class Acceptance:
    """How often draft j was accepted after all before it were, recent rounds counting more; ``prior`` ``[K]``."""

    prior: Sequence[float]
    tried: list[float] = field(init=False)
    accepted: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.tried = [PRIOR_ROUNDS] * len(self.prior)
        self.accepted = [PRIOR_ROUNDS * guess for guess in self.prior]

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """A round: only drafts up to the first rejected one were judged."""
        for j in range(min(num_drafts, num_accepted + 1)):
            self.tried[j] = DECAY * self.tried[j] + 1
            self.accepted[j] = DECAY * self.accepted[j] + (j < num_accepted)

    def estimate(self) -> list[float]:
        """Acceptance by position, ``[K]``."""
        return [accepted / tried for accepted, tried in zip(self.accepted, self.tried, strict=True)]


class RoundSeconds:
    """Seconds of whole rounds by drafts handed over: medians of the last few, straight lines between them."""

    def __init__(self, given: Mapping[Any, float] | None = None) -> None:
        """Nothing known; or, with seconds ``given`` by length, these for ever."""
        self.is_frozen = given is not None
        self.found: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        for length, seconds in (given or {}).items():
            self.found[int(length)].extend([seconds] * NEEDED)

    def record(self, num_drafts: int, seconds: float) -> None:
        """One round."""
        if not self.is_frozen:
            self.found[num_drafts].append(seconds)

    def to_measure(self, longest: int) -> int | None:
        """A length that must be tried before any is chosen; None: enough is known."""
        wanted = dict.fromkeys((longest, 0, (longest + 1) // 2))
        return next((length for length in wanted if len(self.found[length]) < NEEDED), None)

    def curve(self, longest: int) -> list[float]:
        """Seconds of a round with 0, 1, .., ``longest`` drafts."""
        known = sorted((length, median(seconds)) for length, seconds in self.found.items() if seconds)
        if len(known) == 1:
            known.append((known[0][0] + 1, known[0][1]))
        lines = list(pairwise(known))
        values = []
        for length in range(longest + 1):
            (a, at_a), (b, at_b) = next((line for line in lines if length <= line[1][0]), lines[-1])
            values.append(max(at_a + (at_b - at_a) * (length - a) / (b - a), 1e-9))
        return values


# What rounds of a target with a drafter took in this process.
TIMES: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[str, RoundSeconds]]] = WeakKeyDictionary()


def measured_times(target: Any, drafter: Any) -> RoundSeconds:
    """Seconds of this pair's rounds on this device and in this number type, taken as calls go on."""
    place = f"{target.device} {target.dtype} {drafter.device} {drafter.dtype} {torch.get_num_threads()}"
    by_place = TIMES.setdefault(target, WeakKeyDictionary()).setdefault(drafter, {})
    return by_place.setdefault(place, RoundSeconds())


def frozen_times(target: Any, drafter: Any, measure: Callable[[], object]) -> RoundSeconds:
    """The same, measured once on this machine and then read from the cache folder, so that choices repeat."""
    place = f"{target.device.type} {target.dtype} {drafter.device.type} {drafter.dtype} {torch.get_num_threads()}"
    facts = [target.config.to_json_string(), drafter.config.to_json_string(), place]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    path = cached_assets_path("hf_carryover", namespace="timings") / f"{name}.json"
    if not path.exists():
        measure()
        known = measured_times(target, drafter).found
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({length: median(seconds) for length, seconds in known.items() if seconds}))
        unfinished.replace(path)
    return RoundSeconds(json.loads(path.read_text()))


@dataclass
class DraftLength:
    """Chooses a call's draft lengths, round by round. The choice never looks at what a draft will be."""

    longest: int
    acceptance: Acceptance
    times: RoundSeconds
    wait: int = FIRST_WAIT
    num_plain: int = 0

    def learn(self, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """What the last round was."""
        self.acceptance.record(num_drafts, num_accepted)
        self.times.record(num_drafts, seconds)

    def choose(self) -> int:
        """Drafts of the next round; where none pay, a few are tried again at growing intervals."""
        missing = None if self.times.is_frozen else self.times.to_measure(self.longest)
        if missing is not None:
            return missing
        seconds = self.times.curve(self.longest)
        best = best_draft_length(self.acceptance.estimate(), seconds)
        if best > 0:
            self.wait, self.num_plain = FIRST_WAIT, 0
            return best
        self.num_plain += 1
        if self.num_plain < self.wait:
            return 0
        self.wait, self.num_plain = min(2 * self.wait, LONGEST_WAIT), 0
        return 1 + best_draft_length(self.acceptance.estimate()[1:], seconds[1:])

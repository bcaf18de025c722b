"""How many drafts pay? As many as give the most tokens a second, from what the rounds show as they go."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

from .round_seconds import RoundSeconds, curve

AUTO = "auto"
# Rounds that the first guess is worth (few: early bad luck would end drafting), and a round's weight one round on.
PRIOR_ROUNDS, DECAY = 16.0, 0.97
# Plain rounds before drafting, which first has to read them, is tried again; doubled after a try that does not pay.
FIRST_WAIT, LONGEST_WAIT = 64, 256


def longest_draft(drafter: Any) -> int:
    """Most drafts a round may hand over, from the block and ``drafter.draft_length``."""
    wanted, longest = drafter.draft_length, drafter.config.num_drafts
    if wanted is None or wanted == AUTO:
        return longest
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        expected = "None (all drafts), 'auto' or an integer from 1 on"
        raise ValueError(f"`drafter.draft_length` must be {expected}, got {wanted!r}.")
    return min(wanted, longest)


def best_draft_length(acceptance: Sequence[float], seconds: Sequence[float]) -> int:
    """The k in 0..K that maximises ``(1 + sum_{i <= k} a_1 .. a_i) / seconds[k]``; of equal ones the shortest.

    Args:
        acceptance: a_j, the probability that draft j is accepted if all before it are, ``[K]``.
        seconds: Of a whole round that hands over 0, 1, .., K drafts, ``[K + 1]``.
    """
    tokens = accumulate(accumulate(acceptance, mul), initial=1.0)  # [K + 1]
    rates = [expected / spent for expected, spent in zip(tokens, seconds, strict=True)]
    return rates.index(max(rates))


class Acceptance:
    """How often draft j was accepted after all before it were, recent rounds counting more; ``prior`` ``[K]``."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior, self.tried = prior, [PRIOR_ROUNDS] * len(prior)
        self.accepted = [PRIOR_ROUNDS * guess for guess in prior]

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """A round: only drafts up to the first rejected one were judged."""
        for j in range(min(num_drafts, num_accepted + 1)):
            self.tried[j] = DECAY * self.tried[j] + 1
            self.accepted[j] = DECAY * self.accepted[j] + (j < num_accepted)

    def estimate(self) -> list[float]:
        """Acceptance by position, ``[K]``."""
        return [accepted / tried for accepted, tried in zip(self.accepted, self.tried, strict=True)]


@dataclass
class DraftLength:
    """Chooses a call's draft lengths, round by round; the choice never looks at what a draft will be."""

    longest: int
    acceptance: Acceptance
    times: RoundSeconds
    has_judge: bool = False
    wait: int = FIRST_WAIT
    num_plain: int = 0
    is_open: bool = False
    seconds: list[float] = field(default_factory=list)
    words: list[float] = field(default_factory=list)
    usual: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.acceptance.prior) != self.longest or not all(0 <= a <= 1 for a in self.acceptance.prior):
            raise ValueError(f"`drafter.acceptance_prior` must have {self.longest} numbers from 0 to 1, one a draft, "
                             f"got {self.acceptance.prior}.")  # fmt: skip

    def learn(self, num_drafts: int, num_accepted: int, seconds: float | None) -> None:
        """What the last round was; without ``seconds`` it took longer than others will, as a call's first one does."""
        estimate = self.acceptance.estimate()
        for j, word in enumerate(self.words[: min(num_drafts, num_accepted + 1)]):
            self.usual[j] = DECAY * self.usual.get(j, estimate[j]) + (1 - DECAY) * word
        self.words = []
        self.acceptance.record(num_drafts, num_accepted)
        if seconds is not None:
            self.times.record(num_drafts, seconds)

    def choose(self, room: int) -> int:
        """Drafts of the next round, at most ``room``; where none pay, a few are tried again at growing intervals.

        Where some pay, a plain round is timed now and then. If `is_open`, `goes_on` may end a round's drafts earlier.
        """
        self.is_open = False
        most, known = min(self.longest, room), self.times.known()
        if most <= 0:
            return 0
        longest = self.longest if self.times.is_frozen or self.longest in known else most
        missing = [length for length in (longest, 0, 1, (longest + 1) // 2) if length not in known]
        if missing and not self.times.is_frozen:  # no choice before it is known what these take, measured in turn
            return min(min(missing, key=lambda length: len(self.times.found.get(length, ()))), most)
        self.seconds, acceptance = curve(known, longest)[: most + 1], self.acceptance.estimate()[:most]
        best = best_draft_length(acceptance, self.seconds)
        if best > 0:
            self.wait, self.num_plain, self.is_open = FIRST_WAIT, 0, self.has_judge
            return most if self.has_judge else best
        self.num_plain += 1
        if self.num_plain < self.wait:
            return 0
        self.wait, self.num_plain = min(2 * self.wait, LONGEST_WAIT), 0
        return 1 + best_draft_length(acceptance[1:], self.seconds[1:])

    def goes_on(self, word: float) -> bool:
        """Whether the round's next draft k pays, after a confidence head's word on it and on those before (DSpark).

        An estimate counts as much more or less as the word is above or below what it was where drafts were judged.
        """
        self.words.append(word)
        acceptance = self.acceptance.estimate()[: len(self.seconds) - 1]
        for j, said in enumerate(self.words):
            acceptance[j] = min(acceptance[j] * said / max(self.usual.get(j, acceptance[j]), 1e-9), 1.0)
        return best_draft_length(acceptance, self.seconds) >= len(self.words)

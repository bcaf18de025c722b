"""Which rows of the target's pass stay, and which are carried? The verdict, and the record of a call's verdicts."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Verdict(NamedTuple):
    """Rows of a target pass: anchor and accepted drafts (or prompt) ``[1, A, F]``; rejected ``[1, R, F]``."""

    accepted: Tensor
    rejected: Tensor


def split_at_acceptance(features: Tensor, num_rejected: int) -> Verdict:
    """Split a pass's rows ``[1, S, F]`` at the first rejection; the two parts, joined, are the rows.

    Of K drafts with n accepted, ``R = K - n`` rows are rejected and ``A = n + 1`` stay; the prompt's pass rejects 0.
    """
    num_accepted = features.shape[1] - num_rejected
    if not 0 <= num_accepted <= features.shape[1]:
        raise ValueError(f"`num_rejected` must be in 0..{features.shape[1]}, the rows there are, got {num_rejected}.")
    return Verdict(accepted=features[:, :num_accepted], rejected=features[:, num_accepted:])


@dataclass
class Round:
    """One round: drafts handed over ``[K]``, carried rows that its drafter saw, drafts kept, seconds of its parts."""

    drafts: Tensor
    num_carried: int
    num_accepted: int = 0
    recycle_seconds: float = 0.0
    draft_seconds: float = 0.0

    @property
    def drafted_ids(self) -> list[int]:
        """The drafts as a list; read from the device only when asked for."""
        return self.drafts.tolist()


@dataclass
class DraftStats:
    """What drafting did in one ``generate`` call; a round is a target pass after the prompt's."""

    rounds: list[Round] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of rounds that the text kept; the prompt's pass commits one more, which is not counted."""
        return sum(r.num_accepted + 1 for r in self.rounds)

    @property
    def accepted_length(self) -> float:
        """Tokens a round, the target's own included (tau); 0.0 without rounds."""
        return self.num_tokens / len(self.rounds) if self.rounds else 0.0

    @property
    def accepted_drafts(self) -> float:
        """Accepted drafts a round: `accepted_length` without the target's own token."""
        return max(self.accepted_length - 1, 0.0)

    @property
    def histogram(self) -> list[int]:
        """Rounds by accepted drafts, from 0 to the most drafts handed over; sums to the number of rounds."""
        accepted = [r.num_accepted for r in self.rounds]
        return [accepted.count(n) for n in range(1 + max((len(r.drafts) for r in self.rounds), default=0))]

    @property
    def carried_rows(self) -> int:
        """Rejected rows that the round after them saw."""
        return sum(r.num_carried for r in self.rounds)

    @property
    def seconds(self) -> dict[str, float]:
        """Time to ``recycle`` (gather, split, mark rows) and ``draft`` (pass, head, choice); on a GPU, to launch."""
        return {part: sum(vars(r)[f"{part}_seconds"] for r in self.rounds) for part in ("recycle", "draft")}

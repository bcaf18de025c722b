"""What does the drafter remember? Committed rows for good, carried rows for one round."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache


class CarryoverCache(DynamicCache):
    """The drafter's memory: keys and values of every layer, ``[1, H, committed | carried | block, head_dim]``.

    A round announces its rows with `commit` and `carry`, then one drafter pass appends them, together with the
    block's, in a single `update` a layer. So recycling needs no launch of its own, and the next `commit` trims what a
    round left behind by a slice. Between rounds one sentence holds: the committed rows are the committed tokens minus
    the anchor.

    Attributes:
        num_committed: Rows that stay.
        num_carried: Rows of rejected drafts, visible in the current round only.
        waiting: Features ``[1, A, F]`` and positions ``[1, A]`` of committed tokens that no pass has projected yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_committed = 0
        self.num_carried = 0
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def postpone(self, features: Tensor, positions: Tensor) -> None:
        """Keep committed rows ``[1, A, F]`` at positions ``[1, A]`` for the next pass."""
        self.waiting.append((features, positions))

    def take(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that waited, then these: features ``[1, A, F]`` and positions ``[1, A + ...]``."""
        rows, self.waiting = [*self.waiting, (features, positions)], []
        return torch.cat([row for row, _ in rows], dim=1), torch.cat([places for _, places in rows], dim=1)

    def truncate(self, num_rows: int) -> None:
        """Forget what comes after the first ``num_rows`` committed rows, as the target's cache did."""
        while self.waiting and self.num_committed + sum(row.shape[1] for row, _ in self.waiting) > num_rows:
            features, positions = self.waiting.pop()
            room = num_rows - self.num_committed - sum(row.shape[1] for row, _ in self.waiting)
            if room > 0:
                self.waiting.append((features[:, :room], positions[:, :room]))
        self.num_committed = min(self.num_committed, num_rows)

    def commit(self, num_rows: int) -> None:
        """Forget the last round's carried and block rows; the next ``num_rows`` rows that arrive stay for good."""
        self.crop(self.num_committed - self.get_seq_length())
        self.num_committed += num_rows
        self.num_carried = 0

    def carry(self, num_rows: int) -> None:
        """The ``num_rows`` rows that arrive after the committed ones live until the next `commit`."""
        self.num_carried = num_rows


# Kept for the next turn of a chat, beside the target's cache: a memory goes when that cache or its drafter goes.
MEMORIES: WeakKeyDictionary[Cache, WeakKeyDictionary[nn.Module, CarryoverCache]] = WeakKeyDictionary()


def recall(cache: Cache, drafter: nn.Module) -> CarryoverCache:
    """A drafter's memory of a target's cache, new for a new one; taken out until its call has ended well."""
    memory: CarryoverCache = MEMORIES.get(cache, WeakKeyDictionary()).pop(drafter, CarryoverCache())
    memory.truncate(int(cache.get_seq_length()))  # a static cache answers with the counter that it goes on writing to
    return memory

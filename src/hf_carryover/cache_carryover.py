"""What does the drafter remember? Committed rows for good, carried rows for one round."""

from torch import Tensor
from transformers import DynamicCache


class CarryoverCache(DynamicCache):
    """The drafter's memory: keys and values of every layer, ``[1, H, committed | carried | block, head_dim]``.

    A round announces its rows with `commit` and `carry`, then one drafter pass appends them, together with the
    block's, in a single `update` a layer. So recycling needs no launch of its own, and the next `commit` trims what a
    round left behind by a slice. Between rounds one sentence holds: the committed rows are the committed tokens minus
    the anchor.

    Attributes:
        num_committed: Rows that stay.
        num_carried: Rows of rejected drafts, visible in the current round only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_committed = 0
        self.num_carried = 0

    def commit(self, num_rows: int) -> None:
        """Forget the last round's carried and block rows; the next ``num_rows`` rows that arrive stay for good."""
        self.crop(self.num_committed - self.get_seq_length())
        self.num_committed += num_rows
        self.num_carried = 0

    def carry(self, num_rows: int) -> None:
        """The ``num_rows`` rows that arrive after the committed ones live until the next `commit`."""
        self.num_carried = num_rows

    def visible(self, layer_idx: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values that a layer's block sees besides itself, ``[1, H, committed + carried, head_dim]`` each."""
        layer, num_visible = self.layers[layer_idx], self.num_committed + self.num_carried
        return layer.keys[:, :, :num_visible], layer.values[:, :, :num_visible]

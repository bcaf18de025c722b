"""Who sees what, when many blocks and branches of a text share one pass? The rules of decoding, by position."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.modeling_carryover import CarryoverAttention, CarryoverDrafterModel

NO_ANCHOR = -1


class Texts(NamedTuple):
    """Recorded texts, right-padded: ids and mask ``[N, T]``; tokens from ``ends`` ``[N]`` on are padding."""

    input_ids: Tensor
    ends: Tensor

    @property
    def mask(self) -> Tensor:
        """True for text, ``[N, T]``."""
        return torch.arange(self.input_ids.shape[1], device=self.ends.device) < self.ends[:, None]


class Rejected(NamedTuple):
    """Rows of N x M branches: features ``[N, M, K, F]``, positions and which of them are rejected, ``[N, M, K]``."""

    features: Tensor
    positions: Tensor
    is_rejected: Tensor


def block_masks(
    drafter: CarryoverDrafterModel, texts: Texts, anchors: Tensor, rejected: Rejected | None
) -> dict[str, Tensor]:
    """What each block's slots see, for each layer type, ``[N, 1, M B, keys]``: memory, rejected rows, blocks.

    The same rules as in decoding, by position: memory before the anchor, in sliding layers less than a window away;
    the branch's own rejected rows always; the own block, in causal layers not the slots after.
    """
    config, device = drafter.config, anchors.device
    num_texts, num_blocks = anchors.shape
    slot = torch.arange(config.block_size, device=device)
    own = torch.eye(num_blocks, dtype=torch.bool, device=device)  # [M, M]
    memory = torch.arange(texts.input_ids.shape[1], device=device)
    before = (memory < anchors[..., None]) & texts.mask[:, None]  # [N, M, T]
    before = before[:, :, None].expand(-1, -1, config.block_size, -1)  # [N, M, B, T]
    carried = before[..., :0]
    if rejected is not None:
        carried = own[None, :, :, None] & rejected.is_rejected[:, None]  # [N, M, M, K]
        carried = carried.flatten(2)[:, :, None].expand(-1, -1, config.block_size, -1)
    masks = {}
    for layer_type, layer in attentions(drafter).items():
        window = layer.sliding_window or texts.input_ids.shape[1] + config.block_size
        distance = slot[:, None] - slot  # [B, B]
        near = distance.abs() < window
        if layer.block_is_causal:
            near &= distance >= 0
        inside = (own[:, None, :, None] & near[None, :, None]).flatten(2)  # [M, B, M B]
        seen = before & ((anchors[..., None] + slot)[..., None] - memory < window)  # [N, M, B, T]
        whole = torch.cat([seen, carried, inside.expand(num_texts, -1, -1, -1)], dim=-1)
        masks[layer_type] = whole.flatten(1, 2)[:, None]
    return masks


def attentions(drafter: CarryoverDrafterModel) -> dict[str, CarryoverAttention]:
    """An attention of each layer type."""
    found = [layer.get_submodule("self_attn") for layer in drafter.layers]
    return {module.layer_type: module for module in found if isinstance(module, CarryoverAttention)}


def branch_masks(target: PreTrainedModel, texts: Texts, positions: Tensor) -> Tensor | dict[str, Tensor]:
    """What branches' rows at positions ``[N, M, S]`` see of text and branches, additive ``[N, 1, M S, T + M S]``.

    The text before the branch and the branch up to the row; targets with sliding layers get a mask for each kind.
    """
    num_texts, num_blocks, num_rows = positions.shape
    memory = torch.arange(texts.input_ids.shape[1], device=positions.device)
    before = ((memory < positions[..., :1]) & texts.mask[:, None])[:, :, None].expand(-1, -1, num_rows, -1)
    own = torch.eye(num_blocks, dtype=torch.bool, device=positions.device)[:, None, :, None]
    row = torch.arange(num_rows, device=positions.device)
    ago = row[:, None] - row  # [S, S]

    def additive(window: int) -> Tensor:
        near = positions[..., None] - memory < window  # [N, M, S, T]
        inside = (own & (ago >= 0)[None, :, None] & (ago < window)[None, :, None]).flatten(2)  # [M, S, M S]
        visible = torch.cat([before & near, inside.expand(num_texts, -1, -1, -1)], dim=-1).flatten(1, 2)[:, None]
        hidden = torch.finfo(target.dtype).min
        return torch.zeros_like(visible, dtype=target.dtype).masked_fill(~visible, hidden)

    config = target.config.get_text_config().to_dict()
    window, kinds = config.get("sliding_window"), set(config.get("layer_types") or ["sliding_attention"])
    if window is None or kinds == {"full_attention"}:
        return additive(int(positions.max()) + 1)
    if kinds == {"sliding_attention"}:
        return additive(window)
    return {"full_attention": additive(int(positions.max()) + 1), "sliding_attention": additive(window)}

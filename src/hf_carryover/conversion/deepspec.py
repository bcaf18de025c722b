"""How does DeepSpec write its drafters? Everything at the top, with frozen copies of the target's embedding and head.

DSpark (arXiv 2607.05147) and DeepSpec's "DFlash" are one class, the second with `markov_rank` 0; in both the anchor's
slot drafts, too.
"""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.conversion.fields import (
    DRAFT_FIELDS,
    HEAD_FIELDS,
    make_config,
    read_fields,
    read_heads,
    refuse_beyond_qwen3,
    refuse_unexpressed,
    refuse_windows,
    write_heads,
    write_layers,
)
from hf_carryover.conversion.lending import lent_weight, need_target, target_depth
from hf_carryover.modeling_carryover import CarryoverDrafterModel

ARCHITECTURE = "Qwen3DSparkModel"
# DeepSpec's class demands the number of anchors of a training sequence; this is its recipes' number.
NUM_ANCHORS = 512


def read_config(raw: dict[str, Any], path: Path) -> CarryoverDrafterConfig:
    """The configuration of a DeepSpec checkpoint as ours; a field is used, known bookkeeping, or refused by name."""
    kept = read_fields(raw, path, kind="DeepSpec", used={*DRAFT_FIELDS, *HEAD_FIELDS}, ignored={"num_anchors"})
    refuse_windows(kept, path, kind="DeepSpec")
    facts = {"sample_from_anchor": True, "input_embedding_scale": 1.0}
    return make_config(kept | read_heads(raw, path) | facts, path)


def write(drafter: CarryoverDrafterModel, target: PreTrainedModel | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a DeepSpec folder; refuses what the format has no field for."""
    config, target = drafter.config, need_target("DeepSpec", target)
    refuse_unexpressed(
        "DeepSpec",
        (not config.sample_from_anchor, "an anchor that does not draft (`sample_from_anchor` false)"),
        (config.draft_vocab_size is not None, "a draft vocabulary (`draft_vocab_size`)"),
    )
    refuse_beyond_qwen3("DeepSpec", config, target)
    fields = {
        "architectures": [ARCHITECTURE],
        **{name: vars(config)[name] for name in DRAFT_FIELDS},
        "num_target_layers": target_depth(target),
        "num_anchors": NUM_ANCHORS,
        **write_heads(config),
        **write_layers(config),
    }
    copies = {name: lent_weight(target, name).to(drafter.dtype) for name in ("embed_tokens.weight", "lm_head.weight")}
    return fields, drafter.state_dict() | copies

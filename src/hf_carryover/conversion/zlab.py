"""How does z-lab write a DFlash drafter? One Qwen3 configuration, with the facts of drafting in `dflash_config`."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.conversion.fields import (
    DRAFT_FIELDS,
    make_config,
    read_fields,
    refuse_unexpressed,
    write_layers,
)
from hf_carryover.conversion.lending import embedding_scale, need_target, target_depth
from hf_carryover.modeling_carryover import CarryoverDrafterModel

ARCHITECTURE = "DFlashDraftModel"
# Drafting facts, at the top or nested in `dflash_config`; a conflict between the two is an error.
NESTED_FIELDS = {*DRAFT_FIELDS, "input_embedding_scale", "output_multiplier", "final_logit_softcapping"}


def read_config(raw: dict[str, Any], path: Path) -> CarryoverDrafterConfig:
    """The configuration of a z-lab checkpoint as ours; a field is used, known bookkeeping, or refused by name."""
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"Expected an object as `dflash_config` in {path}, got {nested!r}; download the file again.")
    fields = merge_nested(raw, nested, path)
    kept = read_fields(fields, path, kind="DFlash", used=NESTED_FIELDS, ignored={"dflash_config"})
    # DFlash takes raw embedding rows, times a factor where the checkpoint names one.
    kept.setdefault("input_embedding_scale", 1.0)
    return make_config({"sample_from_anchor": False} | kept, path)


def merge_nested(raw: dict[str, Any], nested: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of ``dflash_config`` beside those at the top; the two must not contradict each other."""
    if unknown := sorted(nested.keys() - NESTED_FIELDS - {"num_target_layers"}):
        raise ValueError(
            f"Expected known fields in `dflash_config` of {path}, got {unknown}; they may change the result."
        )
    for name in nested.keys() & raw.keys():
        if nested[name] != raw[name]:
            raise ValueError(
                f"Expected one `{name}` in {path}, got {raw[name]} at the top and {nested[name]} in `dflash_config`; "
                "remove the wrong one."
            )
    return raw | nested


def write(drafter: CarryoverDrafterModel, target: PreTrainedModel | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a z-lab folder; refuses what the format has no field for."""
    config = drafter.config
    refuse_unexpressed(
        "z-lab",
        (config.sample_from_anchor, "a draft from the anchor's slot (`sample_from_anchor`)"),
        (config.markov_head_type is not None, "a Markov head"),
        (config.enable_confidence_head, "a confidence head"),
        (config.draft_vocab_size is not None, "a draft vocabulary (`draft_vocab_size`)"),
    )
    nested: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    optional = {
        "input_embedding_scale": (embedding_scale(config, target), 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcapping, None),
    }
    nested |= {name: value for name, (value, usual) in optional.items() if value != usual}
    fields = {"architectures": [ARCHITECTURE], "block_size": config.block_size, **write_layers(config)}
    if config.is_causal is not None:
        fields["is_causal"] = config.is_causal
    depth = config.num_target_layers or target_depth(need_target("z-lab", target))
    return fields | {"num_target_layers": depth, "dflash_config": nested}, dict(drafter.state_dict())

"""What do public configurations share with ours? Fields of the Qwen3 layers, of the heads, and what to refuse."""

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.conversion.lending import embedding_scale, lent_weight

# Fields that every format writes about the layers, in the order in which we write them.
LAYER_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "initializer_range",
    "attention_bias", "attention_dropout", "layer_types", "rope_parameters", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
# Fields that mean the same in ours.
SAME_FIELDS = {
    *LAYER_FIELDS, "is_causal", "num_target_layers", "rope_theta", "rope_scaling", "dtype", "torch_dtype",
}  # fmt: skip
# Bookkeeping, and fields without a part in the result: embeddings are borrowed, `layer_types` says which layers slide.
IGNORED_FIELDS = {
    "architectures", "auto_map", "model_type", "transformers_version", "tie_word_embeddings", "use_cache",
    "use_sliding_window", "sliding_window", "max_window_layers", "return_dict", "output_hidden_states",
    "chunk_size_feed_forward", "is_encoder_decoder", "_name_or_path",
}  # fmt: skip
DTYPES = (None, "float64", "float32", "float16", "bfloat16")
DRAFT_FIELDS = ("block_size", "mask_token_id", "target_layer_ids")
REQUIRED_FIELDS = (
    *DRAFT_FIELDS, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
HEAD_FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def read_fields(
    fields: dict[str, Any], path: Path, *, kind: str, used: AbstractSet[str], ignored: AbstractSet[str] = frozenset()
) -> dict[str, Any]:
    """The fields that our configuration takes; every other one is known bookkeeping or refused by name.

    Args:
        fields: Of the public configuration, with nested ones beside those at the top.
        path: Of its file, for messages.
        kind: Name of the format, for messages.
        used: Fields of this format, beside those of the layers, that ours takes under the same name.
        ignored: Fields of this format that have no part in the result.
    """
    if unknown := sorted(fields.keys() - SAME_FIELDS - IGNORED_FIELDS - used - ignored):
        raise ValueError(
            f"Expected fields of a {kind} drafter in {path}, got also {unknown}; they may change the result."
        )
    require(fields, REQUIRED_FIELDS, path)
    if fields.get("use_sliding_window") and not fields.get("layer_types"):
        raise ValueError(
            f"Expected `layer_types` in {path} beside `use_sliding_window`, found none; say which layers slide."
        )
    kept = {name: fields[name] for name in fields.keys() & (SAME_FIELDS | used)}
    if "sliding_attention" in (kept.get("layer_types") or []):
        kept["sliding_window"] = fields.get("sliding_window")
    return kept


def make_config(fields: dict[str, Any], path: Path) -> CarryoverDrafterConfig:
    """The configuration that a file's fields describe, or an error that names the file and the field."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    # The older name of `rope_type` is `type`.
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    dtype, act = fields.get("dtype", fields.get("torch_dtype")), fields.get("hidden_act", "silu")
    ropes = ("default", *ROPE_INIT_FUNCTIONS)
    known = {"hidden_act": (act, tuple(ACT2FN)), "rope_type": (rope_type, ropes), "dtype": (dtype, DTYPES)}
    for name, (found, choices) in known.items():
        if found not in choices:
            raise ValueError(f"Expected `{name}` in {path} to be one of {sorted(map(str, choices))}, got {found!r}.")
    try:
        return CarryoverDrafterConfig.from_dict(fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"Expected a drafter's settings in {path}, got: {error}") from error


def require(fields: dict[str, Any], names: tuple[str, ...], path: Path) -> None:
    """Refuse a configuration that leaves facts of training out."""
    if missing := [name for name in names if fields.get(name) is None]:
        raise ValueError(f"Expected the fields {missing} in {path}, found none; facts of training are not guessed.")


def read_heads(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Fields of the Markov and the confidence head (DeepSpec's and speculators' names are ours); off means none."""
    require(fields, ("markov_rank", "enable_confidence_head"), path)
    rank, is_confident = fields["markov_rank"], fields["enable_confidence_head"]
    require(fields, ("markov_head_type",) * bool(rank) + ("confidence_head_with_markov",) * bool(is_confident), path)
    return {
        "markov_rank": rank,
        "markov_head_type": fields["markov_head_type"] if rank else None,
        "enable_confidence_head": is_confident,
        "confidence_head_with_markov": is_confident and fields["confidence_head_with_markov"],
    }


def refuse_windows(kept: dict[str, Any], path: Path, *, kind: str) -> None:
    """Refuse layers whose slots do not all see the whole memory and block; only z-lab's windows are ours."""
    if "sliding_attention" in (kept.get("layer_types") or []) or kept.get("is_causal"):
        raise ValueError(
            f"Expected full attention in every layer of {path}, got sliding or causal layers; {kind} places their "
            "windows otherwise than our drafters, so the result would not be the same."
        )


def write_layers(config: CarryoverDrafterConfig) -> dict[str, Any]:
    """Fields of the layers as a Qwen3 configuration has them."""
    slides = "sliding_attention" in (config.layer_types or [])
    return {
        "model_type": "qwen3",
        **{name: vars(config)[name] for name in LAYER_FIELDS},
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window if slides else None,
        "tie_word_embeddings": False,
    }


def write_heads(config: CarryoverDrafterConfig) -> dict[str, Any]:
    """Fields of the heads; without a Markov head there is no type to name."""
    heads = {name: vars(config)[name] for name in HEAD_FIELDS}
    return {name: value for name, value in heads.items() if value is not None}


def refuse_unexpressed(kind: str, *rules: tuple[bool, str]) -> None:
    """Refuse to write a drafter with something that the format has no place for."""
    for is_there, what in rules:
        if is_there:
            raise ValueError(
                f"Expected a drafter that the {kind} format can express, got one with {what}; export it to another "
                "format or keep ours."
            )


def refuse_beyond_qwen3(kind: str, config: CarryoverDrafterConfig, target: PreTrainedModel) -> None:
    """Refuse what DeepSpec and speculators compute otherwise: raw embedding rows, plain logits, full attention."""
    full = set(config.layer_types or []) == {"full_attention"} and not config.is_causal
    refuse_unexpressed(
        kind,
        (not full, "sliding or causal layers (`layer_types`, `is_causal`)"),
        (embedding_scale(config, target) != 1.0, "scaled embeddings (`input_embedding_scale`)"),
        (config.output_multiplier != 1.0, "scaled logits (`output_multiplier`)"),
        (config.final_logit_softcapping is not None, "capped logits (`final_logit_softcapping`)"),
    )
    lent_weight(target, "lm_head.weight")

"""How do public drafters get in? Read z-lab's DFlash format: nothing is guessed, every tensor and field used or refused."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.decoding import check_pair
from hf_carryover.modeling_carryover import CarryoverDrafterModel

# Fields of a z-lab config that mean the same in ours.
SAME_FIELDS = frozenset(
    {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "initializer_range",
        "attention_bias", "attention_dropout", "layer_types", "is_causal", "num_target_layers", "rope_parameters",
        "rope_theta", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
    }
)  # fmt: skip
# Drafting facts, at top level or nested in `dflash_config`; a conflict between the two is an error.
DRAFT_FIELDS = frozenset(
    {
        "block_size", "mask_token_id", "target_layer_ids", "input_embedding_scale", "output_multiplier",
        "final_logit_softcapping",
    }
)  # fmt: skip
# Bookkeeping, and fields that say nothing about the mathematics: embeddings are borrowed, `layer_types` holds the windows.
IGNORED_FIELDS = frozenset(
    {
        "architectures", "auto_map", "model_type", "transformers_version", "tie_word_embeddings", "use_cache",
        "use_sliding_window", "sliding_window", "max_window_layers", "dflash_config", "return_dict",
        "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "_name_or_path",
    }
)  # fmt: skip
REQUIRED_FIELDS = (
    "block_size", "mask_token_id", "target_layer_ids", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip


def load_dflash(
    folder_or_hub_id: str | Path,
    *,
    target: PreTrainedModel | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> CarryoverDrafterModel:
    """Load a public DFlash drafter (z-lab's ``DFlashDraftModel``) as ours.

    Args:
        folder_or_hub_id: A local folder or a Hub id.
        target: The model that it drafts for; checked to fit, and the drafter is put on its device.
        dtype: Of the drafter; None: the checkpoint's own.
        revision: Branch, tag or commit of the Hub repository.

    Returns:
        The drafter. Without a ``carry_embedding`` in the checkpoint it is zero and `carry_enabled` starts False.

    Raises:
        FileNotFoundError: There is no ``config.json`` or no safetensors file.
        ValueError: A field or tensor is missing, unknown or of the wrong shape, or the target does not fit.
    """
    folder = Path(folder_or_hub_id)
    if not folder.is_dir():
        allowed = ["config.json", "*.safetensors", "*.safetensors.index.json"]
        folder = Path(snapshot_download(str(folder_or_hub_id), revision=revision, allow_patterns=allowed))
    config = read_dflash_config(folder / "config.json")
    tensors = read_tensors(folder)
    with torch.device("meta"):
        drafter = CarryoverDrafterModel(config)
    expected = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    tensors.setdefault("carry_embedding", torch.zeros(expected["carry_embedding"]))
    check_tensors(tensors, expected, folder)
    drafter = CarryoverDrafterModel(config)
    drafter.load_state_dict(tensors)
    drafter.to(dtype=dtype or tensors["fc.weight"].dtype).eval()
    if target is not None:
        check_pair(target, drafter)
        drafter.to(target.device)
    return drafter


def read_dflash_config(path: Path) -> CarryoverDrafterConfig:
    """The configuration of a z-lab checkpoint as ours; every field is used, known to be bookkeeping, or refused by name."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected a drafter's config.json at {path}, found none; check the folder or Hub id.")
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Expected UTF-8 JSON in {path}, got: {error}. Download the file again.") from error
    found = raw.get("architectures")
    if found != ["DFlashDraftModel"]:
        raise ValueError(
            f"Expected `architectures` ['DFlashDraftModel'] (z-lab's format) in {path}, got {found}; other drafters, "
            "DFlash2DraftModel among them, are not read yet."
        )
    nested = raw.get("dflash_config") or {}
    fields = dict(raw)
    for name, value in nested.items():
        if name not in DRAFT_FIELDS | {"num_target_layers"}:
            raise ValueError(
                f"Unknown field `dflash_config.{name}` in {path}: it may change the mathematics; refused."
            )
        if name in raw and raw[name] != value:
            raise ValueError(f"`{name}` is {raw[name]} at the top of {path} but {value} in `dflash_config`; keep one.")
        fields[name] = value
    unknown = fields.keys() - SAME_FIELDS - DRAFT_FIELDS - IGNORED_FIELDS
    if unknown:
        raise ValueError(f"Unknown fields {sorted(unknown)} in {path}: they may change the mathematics; refused.")
    missing = [name for name in REQUIRED_FIELDS if name not in fields]
    if missing:
        raise ValueError(
            f"Expected the fields {missing} in {path}, found none; they are facts of training, not guessed."
        )
    kept = {name: fields[name] for name in fields.keys() & (SAME_FIELDS | DRAFT_FIELDS)}
    if "sliding_attention" in (kept.get("layer_types") or []):
        kept["sliding_window"] = fields.get("sliding_window")
    # DFlash takes raw embedding rows, times a factor where the checkpoint names one.
    kept.setdefault("input_embedding_scale", 1.0)
    return CarryoverDrafterConfig(sample_from_anchor=False, **kept)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"Expected a *.safetensors file in {folder}, found none; pickled weights are not read."
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            shard = load_file(file)
        except SafetensorError as error:
            raise ValueError(
                f"Expected a whole safetensors file at {file}, got: {error}. Download it again."
            ) from error
        if twice := tensors.keys() & shard.keys():
            raise ValueError(f"Expected each tensor once in {folder}, found {sorted(twice)} in two files; remove one.")
        tensors |= shard
    return tensors


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, torch.Size], folder: Path) -> None:
    """Refuse missing, unknown, misshapen and non-finite tensors by name."""
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"Expected exactly the drafter's tensors in {folder}; missing: {missing or 'none'}, unknown: "
            f"{unknown or 'none'}. The checkpoint is damaged or of another kind."
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            raise ValueError(
                f"Expected `{name}` of shape {list(expected[name])} in {folder}, got {list(tensor.shape)}."
            )
        if not tensor.isfinite().all():
            raise ValueError(f"Expected finite weights, found NaN or infinity in `{name}` in {folder}.")

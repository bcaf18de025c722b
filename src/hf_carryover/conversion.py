"""How do public drafters get in? From z-lab's format: nothing guessed, every tensor and field used or refused."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.decoding import check_pair
from hf_carryover.modeling_carryover import CarryoverDrafterModel

# Fields of a z-lab config that mean the same in ours.
SAME_FIELDS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "initializer_range",
    "attention_bias", "attention_dropout", "layer_types", "is_causal", "num_target_layers", "rope_parameters",
    "rope_theta", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
}  # fmt: skip
# Drafting facts, at the top or nested in `dflash_config`; a conflict between the two is an error.
DRAFT_FIELDS = {
    "block_size", "mask_token_id", "target_layer_ids", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping",
}  # fmt: skip
# Bookkeeping, and fields without a part in the result: embeddings are borrowed, `layer_types` says which layers slide.
IGNORED_FIELDS = {
    "architectures", "auto_map", "model_type", "transformers_version", "tie_word_embeddings", "use_cache",
    "use_sliding_window", "sliding_window", "max_window_layers", "dflash_config", "return_dict",
    "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "_name_or_path",
}  # fmt: skip
DTYPES = (None, "float64", "float32", "float16", "bfloat16")
# What the Hub allows; everything else is a path.
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
REQUIRED_FIELDS = (
    "block_size", "mask_token_id", "target_layer_ids", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip


def load_drafter(
    folder_or_hub_id: str | Path, *, target: PreTrainedModel | None = None, dtype: torch.dtype | None = None
) -> CarryoverDrafterModel:
    """Load one of our drafters, or a public one; arguments and errors are those of `load_dflash`."""
    folder = find_folder(folder_or_hub_id)
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type") != CarryoverDrafterConfig.model_type:
        return load_dflash(folder_or_hub_id, target=target, dtype=dtype)
    drafter = build_drafter(make_config(raw, path), folder, target=target, dtype=dtype)
    drafter.config.name_or_path = str(folder_or_hub_id)
    return drafter


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
        target: The model that it drafts for; checked to fit. The drafter is put on its device and, where it names no
            special tokens, gets the target's, which Transformers' pipelines compare.
        dtype: Of the drafter; None: the checkpoint's own.
        revision: Branch, tag or commit of the Hub repository.

    Returns:
        The drafter. Without a ``carry_embedding`` in the checkpoint it is zero and `carry_enabled` starts False.

    Raises:
        FileNotFoundError: There is no such folder, no ``config.json`` or no safetensors file.
        ValueError: A field or tensor is missing, unknown or of the wrong shape, or the target does not fit.
    """
    folder = find_folder(folder_or_hub_id, revision)
    config = read_dflash_config(folder / "config.json")
    drafter = build_drafter(config, folder, target=target, dtype=dtype)
    drafter.config.name_or_path = str(folder_or_hub_id)
    return drafter


def find_folder(folder_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a drafter, downloaded from the Hub if it is not one: settings and safetensors only."""
    folder = Path(folder_or_hub_id)
    if folder.is_dir():
        return folder
    if isinstance(folder_or_hub_id, Path) or folder.is_absolute() or not HUB_ID.fullmatch(folder_or_hub_id):
        raise FileNotFoundError(f"Expected a drafter's folder or Hub id, found no {folder_or_hub_id}; check the path.")
    allowed = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    return Path(snapshot_download(folder_or_hub_id, revision=revision, allow_patterns=allowed))


def build_drafter(
    config: CarryoverDrafterConfig, folder: Path, *, target: PreTrainedModel | None, dtype: torch.dtype | None
) -> CarryoverDrafterModel:
    """The drafter of a configuration and a folder's weights, which must fit before they take memory a second time."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in CarryoverDrafterModel(config).state_dict().items()}
    tensors = read_tensors(folder)
    tensors.setdefault("carry_embedding", torch.zeros(expected["carry_embedding"]))
    check_tensors(tensors, expected, folder)
    ids = tensors.get("draft_vocab_ids", torch.zeros(1))
    if not torch.equal(ids, ids.clamp(0, config.vocab_size - 1)) or (ids.diff() <= 0).any():
        raise ValueError(
            f"Expected increasing token ids below {config.vocab_size} as `draft_vocab_ids` in {folder}, got "
            f"{ids.tolist()[:8]}, ...; make the drafter again."
        )
    # Not `.to(dtype)`: the rotary table stays in fp32, as when one of our own folders is loaded.
    dtype = dtype or tensors["fc.weight"].dtype
    drafter = CarryoverDrafterModel.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype).eval()
    if target is not None:
        check_pair(target, drafter)
        drafter.to(target.device)
        theirs = target.config.get_text_config(decoder=True)
        names = [
            name for name in ("bos_token_id", "eos_token_id", "pad_token_id") if vars(drafter.config)[name] is None
        ]
        drafter.config.update({name: vars(theirs).get(name) for name in names})
    return drafter


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected a drafter's config.json at {path}, found none; check the folder or Hub id.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Expected UTF-8 JSON in {path}, got: {error}; download the file again.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"Expected a JSON object in {path}, got {type(raw).__name__}; download the file again.")
    return raw


def read_dflash_config(path: Path) -> CarryoverDrafterConfig:
    """The configuration of a z-lab checkpoint as ours; a field is used, known bookkeeping, or refused by name."""
    raw = read_json(path)
    if raw.get("architectures") != ["DFlashDraftModel"]:
        raise ValueError(
            f"Expected `architectures` ['DFlashDraftModel'] (z-lab's format) in {path}, got "
            f"{raw.get('architectures')}; other drafters, DFlash2DraftModel among them, are not read yet."
        )
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"Expected an object as `dflash_config` in {path}, got {nested!r}; download the file again.")
    fields = merge_nested(raw, nested, path)
    if unknown := sorted(fields.keys() - SAME_FIELDS - DRAFT_FIELDS - IGNORED_FIELDS):
        raise ValueError(
            f"Expected fields of a DFlash drafter in {path}, got also {unknown}; they may change the result."
        )
    if missing := [name for name in REQUIRED_FIELDS if name not in fields]:
        raise ValueError(f"Expected the fields {missing} in {path}, found none; facts of training are not guessed.")
    if fields.get("use_sliding_window") and not fields.get("layer_types"):
        raise ValueError(
            f"Expected `layer_types` in {path} beside `use_sliding_window`, found none; say which layers slide."
        )
    kept = {name: fields[name] for name in fields.keys() & (SAME_FIELDS | DRAFT_FIELDS)}
    if "sliding_attention" in (kept.get("layer_types") or []):
        kept["sliding_window"] = fields.get("sliding_window")
    # DFlash takes raw embedding rows, times a factor where the checkpoint names one.
    kept.setdefault("input_embedding_scale", 1.0)
    return make_config({"sample_from_anchor": False} | kept, path)


def make_config(fields: dict[str, Any], path: Path) -> CarryoverDrafterConfig:
    """The configuration that a file's fields describe, or an error that names file and field."""
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


def merge_nested(raw: dict[str, Any], nested: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of ``dflash_config`` beside those at the top; the two must not contradict each other."""
    if unknown := sorted(nested.keys() - DRAFT_FIELDS - {"num_target_layers"}):
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
        if name != "draft_vocab_ids" and not tensor.is_floating_point():
            raise ValueError(
                f"Expected floating-point weights, found {tensor.dtype} in `{name}` in {folder}; de-quantise them."
            )
        if not tensor.isfinite().all():
            raise ValueError(f"Expected finite weights, found NaN or infinity in `{name}` in {folder}.")

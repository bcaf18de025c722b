"""How do drafters get in? Ours, or a public one: nothing guessed, every tensor and field used or refused."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.conversion import deepspec, speculators, zlab
from hf_carryover.conversion.fields import lent_weight
from hf_carryover.decoding import check_pair
from hf_carryover.modeling_carryover import CarryoverDrafterModel

# What engines must not take for weights of the drafter: the carry embedding of a folder that `convert_drafter` wrote.
SIDE_FILE = "carryover.safetensors"
# Frozen copies that some formats hold of what our drafters borrow from their target.
COPIES = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"}


def load_drafter(
    folder_or_hub_id: str | Path, *, target: PreTrainedModel | None = None, dtype: torch.dtype | None = None
) -> CarryoverDrafterModel:
    """Load one of our drafters, or a public one; arguments and errors are those of `load_dflash`."""
    path = Path(folder_or_hub_id) / "config.json"
    if not Path(folder_or_hub_id).is_dir():
        path = Path(hf_hub_download(str(folder_or_hub_id), "config.json"))
    if read_json(path).get("model_type") != CarryoverDrafterConfig.model_type:
        return load_dflash(folder_or_hub_id, target=target, dtype=dtype)
    try:
        drafter: CarryoverDrafterModel = CarryoverDrafterModel.from_pretrained(folder_or_hub_id, dtype=dtype or "auto")
    except SafetensorError as error:
        raise ValueError(
            f"Expected whole weights in {folder_or_hub_id}, got: {error}; download them again."
        ) from error
    if target is not None:
        check_pair(target, drafter)
        drafter.to(target.device)
    return drafter.eval()


def load_dflash(
    folder_or_hub_id: str | Path,
    *,
    target: PreTrainedModel | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> CarryoverDrafterModel:
    """Load a public DFlash or DSpark drafter as ours: z-lab's, DeepSpec's or one of the package speculators.

    Args:
        folder_or_hub_id: A local folder or a Hub id.
        target: The model that it drafts for; checked to fit, and the drafter is put on its device. Needed where the
            folder holds copies of the target's embedding or head: they must equal the target's own, and are dropped.
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
    raw = read_json(folder / "config.json")
    config = read_config(raw, folder / "config.json")
    tensors = read_tensors(folder)
    if "speculators_model_type" in raw:
        tensors = speculators.read_draft_vocab(tensors, config, folder)
    with torch.device("meta"):
        empty = CarryoverDrafterModel(config)
    if target is not None:
        check_pair(target, empty)
    tensors = drop_copies(tensors, target, folder)
    expected = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    tensors.setdefault("carry_embedding", torch.zeros(expected["carry_embedding"]))
    check_tensors(tensors, expected, folder)
    # Not `.to(dtype)`: the rotary table stays in fp32, as when one of our own folders is loaded.
    dtype = dtype or tensors["fc.weight"].dtype
    drafter = CarryoverDrafterModel.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype).eval()
    drafter.config.name_or_path = str(folder_or_hub_id)
    return drafter if target is None else drafter.to(target.device)


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


def read_config(raw: dict[str, Any], path: Path) -> CarryoverDrafterConfig:
    """The configuration of a public checkpoint as ours, by the format that it names."""
    if "speculators_model_type" in raw:
        return speculators.read_config(raw, path)
    if raw.get("architectures") == [deepspec.ARCHITECTURE]:
        return deepspec.read_config(raw, path)
    if raw.get("architectures") == [zlab.ARCHITECTURE]:
        return zlab.read_config(raw, path)
    raise ValueError(
        f"Expected `architectures` ['{zlab.ARCHITECTURE}'] (z-lab) or ['{deepspec.ARCHITECTURE}'] (DeepSpec) or a "
        f"`speculators_model_type` in {path}, got {raw.get('architectures')}; other drafters, DFlash2DraftModel and "
        "Gemma4DSparkModel among them, compute otherwise and are not read."
    )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not [file for file in files if file.name != SIDE_FILE]:
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
        if file.name == SIDE_FILE:
            shard.pop("carry_embedding_folded", None)  # follows from the carry embedding
        tensors |= shard
    return tensors


def drop_copies(tensors: dict[str, Tensor], target: PreTrainedModel | None, folder: Path) -> dict[str, Tensor]:
    """The tensors without frozen copies of the target's embedding and head, which must equal the target's own.

    Target and copy may be stored in different precision; they are compared in the coarser one.
    """
    names = sorted(tensors.keys() & COPIES)
    for name in names:
        if target is None:
            raise ValueError(
                f"Expected a target to compare {names} in {folder} with (our drafters borrow them from it), got none; "
                "pass the target that the drafter was made for, on the command line with --target."
            )
        own = lent_weight(target, name)  # [V, D]
        copy = tensors[name].to(own.device)
        if name != "embed_tokens.weight" and "draft_vocab_ids" in tensors:
            own = own[tensors["draft_vocab_ids"].to(own.device)]  # [Vd, D]
        coarser = min(own.dtype, copy.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(own.to(coarser), copy.to(coarser)):
            raise ValueError(
                f"Expected `{name}` in {folder} to equal the target's own {list(own.shape)}, got another "
                f"{list(copy.shape)}; pass the target that the drafter was made for."
            )
    return {name: tensor for name, tensor in tensors.items() if name not in COPIES}


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

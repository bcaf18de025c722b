"""What stands in a drafter's folder? Settings and whole tensors, each once; nothing that could run code."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

# What engines must not take for weights of the drafter: the carry embedding of a folder that `convert_drafter` wrote.
SIDE_FILE = "carryover.safetensors"
# What the Hub allows; everything else is a path.
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def find_folder(folder_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a drafter, downloaded from the Hub if it is not one: settings and safetensors only."""
    folder = Path(folder_or_hub_id)
    if folder.is_dir():
        return folder
    if isinstance(folder_or_hub_id, Path) or folder.is_absolute() or not HUB_ID.fullmatch(folder_or_hub_id):
        raise FileNotFoundError(f"Expected a drafter's folder or Hub id, found no {folder_or_hub_id}; check the path.")
    allowed = ["config.json", "*.safetensors", "*.safetensors.index.json", "evaluation.json"]
    return Path(snapshot_download(folder_or_hub_id, revision=revision, allow_patterns=allowed))


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

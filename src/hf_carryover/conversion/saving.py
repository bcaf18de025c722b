"""How does a drafter get out? Into a new folder, ours or one that stock engines read, whole or not at all."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.conversion import deepspec, speculators, zlab
from hf_carryover.conversion.folders import SIDE_FILE
from hf_carryover.conversion.loading import load_drafter
from hf_carryover.conversion.vocabulary import restrict_vocabulary
from hf_carryover.modeling_carryover import CarryoverDrafterModel

WRITERS = {"z-lab": zlab.write, "deepspec": deepspec.write, "speculators": speculators.write}
FORMATS = ("carryover", *WRITERS)


def convert_drafter(
    source: str | Path,
    out: str | Path,
    *,
    to: str = "carryover",
    target: PreTrainedModel | None = None,
    token_ids: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> CarryoverDrafterModel:
    """Read a drafter of any known format and write it in another.

    Args:
        source: Folder or Hub id; what `load_drafter` reads.
        out: The folder to make; it must not exist.
        to: One of `FORMATS`. Stock engines know no ``carry_embedding``: in their formats it stands in a side file,
            ``carryover.safetensors``, beside its folded form ``fc(E)``.
        target: The model that the drafter is for. Needed where a format holds parts of it.
        token_ids: The only tokens that it shall propose, as for `restrict_vocabulary`; None: those that it does.
        dtype: What it is written in; None: as it was.

    Returns:
        The drafter, as it was written.

    Raises:
        FileExistsError: ``out`` is there already.
        ValueError: The drafter cannot be read, or the format cannot express it; the message names what.
    """
    out = Path(out)
    if to not in FORMATS:
        raise ValueError(f"Expected a format among {', '.join(FORMATS)}, got {to!r}; choose one of them.")
    refuse_existing(out)
    drafter = load_drafter(source, target=target, dtype=dtype or "auto")
    drafter = drafter if token_ids is None else restrict_vocabulary(drafter, token_ids)
    with new_folder(out) as folder:
        if to == "carryover":
            drafter.save_pretrained(folder)
        else:
            config, tensors = WRITERS[to](drafter, target)
            write_folder(folder, config | {"dtype": str(drafter.dtype).removeprefix("torch.")}, tensors)
            write_side_file(folder, drafter)
    return drafter


def refuse_existing(out: Path) -> None:
    """Nothing is overwritten, an empty folder neither."""
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"Expected a new folder, found {out} already there; name another one or remove it.")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out`` that becomes it when the block ends well, and goes away when it does not."""
    partial = out.with_name(f".{out.name}.partial-{uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        yield partial
        refuse_existing(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """``config.json``, ``model.safetensors`` and its index: engines load what the index names, not the side file."""
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    kept.pop("carry_embedding", None)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    size = sum(tensor.nbytes for tensor in kept.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(kept), "model.safetensors")}
    for name, content in (("config.json", config), ("model.safetensors.index.json", index)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_side_file(folder: Path, drafter: CarryoverDrafterModel) -> None:
    """A trained carry embedding ``[F]``, and what an engine adds after ``fc``, ``[D]``."""
    embedding = drafter.carry_embedding.detach()
    if embedding.any():
        folded = (drafter.fc.weight.detach().float() @ embedding.float()).to(embedding.dtype)
        pair = {"carry_embedding": embedding, "carry_embedding_folded": folded}
        save_file({name: tensor.cpu() for name, tensor in pair.items()}, folder / SIDE_FILE, {"format": "pt"})

"""How do drafters get in? Ours, or a public one: nothing guessed, every tensor and field used or refused."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.conversion import deepspec, speculators, zlab
from hf_carryover.conversion.fields import make_config
from hf_carryover.conversion.folders import check_tensors, find_folder, read_json, read_tensors
from hf_carryover.conversion.lending import drop_copies
from hf_carryover.decoding import check_pair
from hf_carryover.modeling_carryover import CarryoverDrafterModel

logger = logging.getLogger(__name__)
MEASURED = "evaluation.json"
PLACE = {"set": "all", "system": "carry-on", "temperature": 0.0}  # whose acceptance automatic draft lengths start from


def load_drafter(
    folder_or_hub_id: str | Path,
    *,
    target: PreTrainedModel | None = None,
    dtype: torch.dtype | Literal["auto"] | None = None,
) -> CarryoverDrafterModel:
    """Load one of our drafters, or a public one; arguments and errors are those of `load_dflash`, less ``revision``.

    A folder's ``evaluation.json`` tells automatic draft lengths what acceptance to start from, which
    `AutoModel.from_pretrained` does not read.
    """
    folder = find_folder(folder_or_hub_id)
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type") != CarryoverDrafterConfig.model_type:
        return load_dflash(folder_or_hub_id, target=target, dtype=dtype)
    drafter = build_drafter(make_config(raw, path), read_tensors(folder), folder, target=target, dtype=dtype)
    drafter.config.name_or_path = str(folder_or_hub_id)
    if (folder / MEASURED).is_file():
        drafter.acceptance_prior = measured_acceptance(folder / MEASURED, drafter.config.num_drafts)
    return drafter


def measured_acceptance(path: Path, num_drafts: int) -> list[float] | None:
    """Acceptance of each draft given those before it, ``[K]``, greedy and all sets; None if the file does not say.

    Rounds at the end of a text hand over fewer drafts, so a later position's share can be the larger one.
    """
    try:
        rows = read_json(path)["acceptance"]
        reached = next(
            row["acceptance_by_position"] for row in rows if [row[name] for name in PLACE] == [*PLACE.values()]
        )
        given = [min(after / before, 1.0) if before else 0.0 for before, after in pairwise([1.0, *reached])]
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        logger.warning("%s tells automatic draft lengths nothing: %r", path, error)
        return None
    return given if len(given) == num_drafts else None


def load_dflash(
    folder_or_hub_id: str | Path,
    *,
    target: PreTrainedModel | None = None,
    dtype: torch.dtype | Literal["auto"] | None = None,
    revision: str | None = None,
) -> CarryoverDrafterModel:
    """Load a public DFlash or DSpark drafter as ours: z-lab's, DeepSpec's or one of the package speculators.

    Args:
        folder_or_hub_id: A local folder or a Hub id.
        target: The model that it drafts for; checked to fit. The drafter is put on its device and, where it names no
            special tokens, gets the target's, which Transformers' pipelines compare. Needed where the folder holds
            copies of the target's embedding or head: they must equal the target's own, and are dropped.
        dtype: Of the drafter; None: the target's, which is fastest; ``"auto"``, or no target: the checkpoint's.
        revision: Branch, tag or commit of the Hub repository.

    Returns:
        The drafter. Without a ``carry_embedding`` in the checkpoint it is zero and `carry_enabled` starts False.

    Raises:
        FileNotFoundError: There is no such folder, no ``config.json`` or no safetensors file.
        ValueError: A field or tensor is missing, unknown or of the wrong shape, or the target does not fit.
    """
    folder = find_folder(folder_or_hub_id, revision)
    raw = read_json(folder / "config.json")
    config = read_config(raw, folder / "config.json")
    tensors = read_tensors(folder)
    if "speculators_model_type" in raw:
        tensors = speculators.read_draft_vocab(tensors, config, folder)
    drafter = build_drafter(config, tensors, folder, target=target, dtype=dtype)
    drafter.config.name_or_path = str(folder_or_hub_id)
    return drafter


def build_drafter(
    config: CarryoverDrafterConfig,
    tensors: dict[str, Tensor],
    folder: Path,
    *,
    target: PreTrainedModel | None,
    dtype: torch.dtype | Literal["auto"] | None,
) -> CarryoverDrafterModel:
    """The drafter of a configuration and a folder's tensors, which must be exactly its own (and the target's)."""
    with torch.device("meta"):
        empty = CarryoverDrafterModel(config)
    if target is not None:
        check_pair(target, empty)
    tensors = drop_copies(tensors, target, folder)
    expected = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    tensors.setdefault("carry_embedding", torch.zeros(expected["carry_embedding"]))
    check_tensors(tensors, expected, folder)
    ids = tensors.get("draft_vocab_ids", torch.zeros(1))
    if not torch.equal(ids, ids.clamp(0, config.vocab_size - 1)) or (ids.diff() <= 0).any():
        raise ValueError(
            f"Expected increasing token ids below {config.vocab_size} as `draft_vocab_ids` in {folder}, got "
            f"{ids.tolist()[:8]}, ...; make the drafter again."
        )
    # Not `.to(dtype)`: the rotary table stays in fp32, as when one of our own folders is loaded.
    if dtype is None and target is not None:
        dtype = target.dtype
    dtype = tensors["fc.weight"].dtype if dtype in (None, "auto") else dtype
    drafter = CarryoverDrafterModel.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype).eval()
    if target is not None:
        drafter.to(target.device)
        theirs = target.config.get_text_config(decoder=True)
        names = [
            name for name in ("bos_token_id", "eos_token_id", "pad_token_id") if vars(drafter.config)[name] is None
        ]
        drafter.config.update({name: vars(theirs).get(name) for name in names})
    return drafter


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

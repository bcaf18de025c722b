"""What do formats say about the target, or hold of it? Our drafters borrow its embedding and head."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_carryover.configuration_carryover import CarryoverDrafterConfig

# Frozen copies that some formats hold of what our drafters borrow from their target.
COPIES = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"}


def need_target(kind: str, target: PreTrainedModel | None) -> PreTrainedModel:
    """The target, which some formats name or hold copies of."""
    if target is None:
        raise ValueError(
            f"Expected the target, which a {kind} folder describes or holds copies of, got none; pass it, on the "
            "command line with --target."
        )
    return target


def target_depth(target: PreTrainedModel) -> int:
    """Layers of the target."""
    return int(target.config.get_text_config(decoder=True).num_hidden_layers)


def embedding_scale(config: CarryoverDrafterConfig, target: PreTrainedModel | None) -> float:
    """The factor on the target's raw embedding rows, which public formats name and ours may leave to the target."""
    if config.input_embedding_scale is not None:
        return config.input_embedding_scale
    if target is None:
        raise ValueError(
            "Expected the target, to see whether it scales its embeddings (`input_embedding_scale` is None), got "
            "none; pass it, on the command line with --target."
        )
    embedding = target.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        raise ValueError(
            f"Expected plain embeddings or a factor, got {type(embedding).__name__} and `input_embedding_scale` "
            "None; write the target's factor into the drafter's config.json."
        )
    return 1.0


def lent_weight(target: PreTrainedModel, name: str) -> Tensor:
    """The target's embedding (``embed_tokens.weight``) or else output head, ``[V, D]``, if it is one plain weight."""
    is_embedding = name == "embed_tokens.weight"
    module = target.get_input_embeddings() if is_embedding else target.get_output_embeddings()
    if not isinstance(module, nn.Embedding if is_embedding else nn.Linear):
        raise ValueError(f"Expected a target with plain weights, got {type(module).__name__}; load it unquantized.")
    if isinstance(module, nn.Linear) and module.bias is not None:
        raise ValueError(
            "Expected a target whose output head has no bias, got one with; only z-lab borrows the whole head."
        )
    return module.weight


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

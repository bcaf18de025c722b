"""Which tokens may a drafter propose? Fewer make its head cheaper; its logits of those that stay do not change."""

import torch
from torch import Tensor

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.modeling_carryover import CarryoverDrafterModel

PER_TOKEN = "markov_head.markov_w2.weight"


def restrict_vocabulary(drafter: CarryoverDrafterModel, token_ids: Tensor) -> CarryoverDrafterModel:
    """A drafter like this one that proposes only ``token_ids``, increasing, ``[Vd]``; the others are never guessed.

    Raises:
        ValueError: The ids are not increasing ids of the vocabulary, or the drafter cannot propose some of them now.
    """
    config, tensors = drafter.config, drafter.state_dict()
    known = tensors.get("draft_vocab_ids", torch.arange(config.vocab_size)).cpu()
    if not len(token_ids) or (token_ids.diff() <= 0).any() or not torch.isin(token_ids, known).all():
        raise ValueError(
            f"Expected increasing ids of tokens that the drafter can propose ({len(known)} of {config.vocab_size}), "
            f"got {len(token_ids)}: {token_ids.tolist()[:8]}, ...; choose others."
        )
    tensors["draft_vocab_ids"] = token_ids
    if PER_TOKEN in tensors:
        tensors[PER_TOKEN] = tensors[PER_TOKEN][torch.searchsorted(known, token_ids).to(drafter.device)]
    changed = CarryoverDrafterConfig(**(config.to_dict() | {"draft_vocab_size": len(token_ids)}))
    # Not `.to(dtype)`: the rotary table stays in fp32, as when a folder is loaded.
    restricted = CarryoverDrafterModel.from_pretrained(None, config=changed, state_dict=tensors, dtype=drafter.dtype)
    return restricted.to(drafter.device).train(drafter.training)

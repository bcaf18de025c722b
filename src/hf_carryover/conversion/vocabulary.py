"""Which tokens may a drafter propose? Fewer make its head cheaper; its logits of those that stay do not change."""

import torch
from torch import Tensor

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.modeling_carryover import CarryoverDrafterModel

PER_TOKEN = "markov_head.markov_w2.weight"


def restrict_vocabulary(drafter: CarryoverDrafterModel, token_ids: Tensor) -> CarryoverDrafterModel:
    """A copy of a drafter, settings included, that proposes only ``token_ids``, increasing, ``[Vd]``.

    Raises:
        ValueError: The ids are not increasing ids of the vocabulary, or a Markov head has no row for some of them.
    """
    config, token_ids = drafter.config, token_ids.cpu()
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    known = tensors.get("draft_vocab_ids", torch.arange(config.vocab_size)).cpu()
    known = known if PER_TOKEN in tensors else torch.arange(config.vocab_size)  # else all rows are the target's head's
    if not len(token_ids) or (token_ids.diff() <= 0).any() or not torch.isin(token_ids, known).all():
        raise ValueError(
            f"Expected increasing ids of tokens that the drafter has rows for ({len(known)} of {config.vocab_size}), "
            f"got {len(token_ids)}: {token_ids.tolist()[:8]}, ...; take those of the drafter that this one came from."
        )
    tensors["draft_vocab_ids"] = token_ids
    if PER_TOKEN in tensors:
        tensors[PER_TOKEN] = tensors[PER_TOKEN][torch.searchsorted(known, token_ids).to(drafter.device)]
    changed = CarryoverDrafterConfig(**(config.to_dict() | {"draft_vocab_size": len(token_ids)}))
    # Not `.to(dtype)`: the rotary table stays in fp32, as when a folder is loaded.
    copy = CarryoverDrafterModel.from_pretrained(None, config=changed, state_dict=tensors, dtype=drafter.dtype)
    for name in ("draft_length", "timings", "acceptance_prior", "_carry_enabled"):
        setattr(copy, name, getattr(drafter, name))
    return copy.to(drafter.device).train(drafter.training)

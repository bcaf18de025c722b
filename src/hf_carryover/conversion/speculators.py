"""How does the package speculators write drafters? Layers nested, layer ids from the embedding on, vocabulary mapped.

Its id i of an auxiliary hidden state is ``hidden_states[i]``, our target layer id i - 1. A draft vocabulary comes as
`d2t` (what to add to a draft index to get the token id) and `t2d` (which token ids are in it).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.conversion.fields import (
    HEAD_FIELDS,
    IGNORED_FIELDS,
    make_config,
    read_fields,
    read_heads,
    refuse_beyond_qwen3,
    refuse_unexpressed,
    refuse_windows,
    require,
    write_heads,
    write_layers,
)
from hf_carryover.conversion.lending import lent_weight, need_target
from hf_carryover.modeling_carryover import CarryoverDrafterModel

# The release whose folders `write` makes.
VERSION = "0.9.0"
REQUIRED_FIELDS = (
    "transformer_layer_config", "aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor",
    "draft_vocab_size",
)  # fmt: skip
# Beside them: bookkeeping, facts of training, and the causality of sliding layers, which are refused.
OTHER_FIELDS = {
    "speculators_model_type", "speculators_version", "speculators_config", "target_hidden_size", "max_anchors",
    "sliding_window_non_causal", "dtype", "torch_dtype",
}  # fmt: skip
# Of a LlamaConfig around the layers, which are Qwen3's all the same and have no such biases.
LLAMA_FIELDS = {"mlp_bias", "pretraining_tp"}


def read_config(raw: dict[str, Any], path: Path) -> CarryoverDrafterConfig:
    """The configuration of a speculators folder as ours; a field is used, known bookkeeping, or refused by name."""
    kind = raw["speculators_model_type"]
    if kind not in ("dflash", "dspark"):
        raise ValueError(
            f"Expected `speculators_model_type` dflash or dspark in {path}, got {kind!r}; other drafters, DFlash 2 "
            "(dflash2) among them, are not read yet."
        )
    heads = set(HEAD_FIELDS) if kind == "dspark" else set()
    if unknown := sorted(raw.keys() - IGNORED_FIELDS - {*REQUIRED_FIELDS} - OTHER_FIELDS - heads):
        raise ValueError(
            f"Expected fields of a speculators {kind} drafter in {path}, got also {unknown}; they may change the "
            "result."
        )
    require(raw, REQUIRED_FIELDS, path)
    layers, ids = raw["transformer_layer_config"], raw["aux_hidden_state_layer_ids"]
    if not isinstance(layers, dict) or not isinstance(ids, list) or {type(i) for i in ids} != {int}:
        raise ValueError(
            f"Expected an object as `transformer_layer_config` and a list of integers as `aux_hidden_state_layer_ids` "
            f"in {path}, got {type(layers).__name__} and {ids!r}; download the file again."
        )
    facts = {"target_layer_ids": [i - 1 for i in ids], "block_size": raw["block_size"],
             "mask_token_id": raw["mask_token_id"]}  # fmt: skip
    kept = read_fields(layers | facts, path, kind="speculators", used=set(facts), ignored=LLAMA_FIELDS)
    refuse_windows(kept, path, kind="speculators")
    if raw.get("target_hidden_size") not in (None, kept["hidden_size"]):
        raise ValueError(
            f"Expected a drafter as wide as its target in {path}, got `target_hidden_size` "
            f"{raw['target_hidden_size']} and `hidden_size` {kept['hidden_size']}; it cannot be read."
        )
    if kind == "dspark":
        kept |= read_heads(raw, path)
    if kept.get("markov_head_type") == "rnn" and not raw["sample_from_anchor"]:
        raise ValueError(
            f"Expected `sample_from_anchor` true beside `markov_head_type` rnn in {path}, got false; speculators "
            "starts the head's state at the anchor's slot, our drafters at the first draft's."
        )
    if raw["draft_vocab_size"] != kept["vocab_size"]:
        kept["draft_vocab_size"] = raw["draft_vocab_size"]
    kept |= {"sample_from_anchor": raw["sample_from_anchor"], "input_embedding_scale": 1.0}
    return make_config(kept, path)


def read_draft_vocab(tensors: dict[str, Tensor], config: CarryoverDrafterConfig, folder: Path) -> dict[str, Tensor]:
    """The tensors with ``draft_vocab_ids`` in place of the mappings, and without the target's norm (for training)."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", "verifier_norm.weight")}
    if "d2t" not in tensors and "t2d" not in tensors and config.draft_vocab_size is None:
        return kept
    size, vocab_size = config.draft_vocab_size or config.vocab_size, config.vocab_size
    offsets, chosen = tensors.get("d2t", torch.empty(0)), tensors.get("t2d")
    if offsets.shape != (size,) or offsets.is_floating_point():
        raise ValueError(
            f"Expected `d2t` with {size} integers in {folder}, got {list(offsets.shape)} of {offsets.dtype}; the "
            "draft vocabulary is not guessed."
        )
    ids = offsets.long() + torch.arange(size)  # [Vd]
    mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids.clamp(0, vocab_size - 1), True)
    if not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(
            f"Expected increasing token ids below {vocab_size} from `d2t` in {folder}, got others; it is damaged."
        )
    if chosen is not None and not torch.equal(chosen.bool(), mask):
        raise ValueError(f"Expected `t2d` to choose the tokens of `d2t` in {folder}, got others; one is damaged.")
    return kept if config.draft_vocab_size is None else kept | {"draft_vocab_ids": ids}


def write(drafter: CarryoverDrafterModel, target: PreTrainedModel | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a speculators folder; refuses what the format has no field for."""
    config, target = drafter.config, need_target("speculators", target)
    is_late = config.markov_head_type == "rnn" and not config.sample_from_anchor
    refuse_unexpressed(
        "speculators",
        (not target.name_or_path, "a target without a name (load it from a folder)"),
        (is_late, "a recurrent Markov head that starts after the anchor's slot"),
    )
    refuse_beyond_qwen3("speculators", config, target)
    # Engines run a drafting anchor under the name dspark only.
    is_dspark = config.sample_from_anchor or config.markov_head_type is not None or config.enable_confidence_head
    kind, model = ("dspark", "DSparkDraftModel") if is_dspark else ("dflash", "DFlashDraftModel")
    heads = {"markov_head_type": "vanilla"} | write_heads(config) if is_dspark else {}
    fields = {
        "architectures": [model],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": describe_use(kind, config.num_drafts, target),
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        **heads,
        "transformer_layer_config": write_layers(config),
    }
    tensors = dict(drafter.state_dict())
    ids = tensors.pop("draft_vocab_ids", None)
    if ids is not None:
        head = lent_weight(target, "lm_head.weight")  # [V, D]
        chosen = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)
        tensors |= {
            "d2t": ids.cpu() - torch.arange(len(ids)),
            "t2d": chosen,
            "lm_head.weight": head[ids.to(head.device)],
        }
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(drafter.dtype)
    return fields, tensors


def describe_use(kind: str, num_drafts: int, target: PreTrainedModel) -> dict[str, Any]:
    """What engines read: how many tokens to propose, and for which target."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": num_drafts, "verifier_accept_k": 1,
              "accept_tolerance": 0.0}  # fmt: skip
    verifier = {"name_or_path": target.name_or_path, "architectures": [type(target).__name__]}
    return {"algorithm": kind, "proposal_methods": [greedy], "default_proposal_method": "greedy", "verifier": verifier}

"""Folders of other formats, written by hand, and what a drafter computes for one block."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_carryover import CarryoverDrafterModel
from tests.fakes import LAYERS, make_drafter, prompt

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "layer_types")  # fmt: skip
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items() if name != "carry_embedding"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def layer_fields(drafter: CarryoverDrafterModel) -> dict[str, Any]:
    sizes = {name: getattr(drafter.config, name) for name in SIZES}
    return sizes | {
        "model_type": "qwen3",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def make_dspark(kind: str = "markov-vanilla", **overrides: Any) -> CarryoverDrafterModel:
    """A drafter that DeepSpec's and speculators' formats can express, with a confidence head."""
    confident = {"enable_confidence_head": True, "confidence_head_with_markov": kind != "dflash"}
    return make_drafter(kind, **({"input_embedding_scale": 1.0, "sample_from_anchor": True} | confident | overrides))


def write_deepspec_folder(folder: Path, drafter: CarryoverDrafterModel, target: Any, **changes: Any) -> None:
    """As DeepSpec saves a drafter: copies of the target's embedding and head beside the weights."""
    ours = drafter.config
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "dtype": "float32",
        "block_size": ours.block_size,
        "mask_token_id": ours.mask_token_id,
        "target_layer_ids": ours.target_layer_ids,
        "num_target_layers": LAYERS,
        "num_anchors": 512,
        **{name: getattr(ours, name) for name in HEADS},
    }
    if ours.markov_rank == 0:
        del config["markov_head_type"]
    copies = {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach(),
        "lm_head.weight": target.get_output_embeddings().weight.detach(),
    }
    write_folder(folder, layer_fields(drafter) | config | changes, drafter.state_dict() | copies)


def write_speculators_folder(folder: Path, drafter: CarryoverDrafterModel, target: Any, **changes: Any) -> None:
    """As speculators 0.9.0 saves a drafter; with a draft vocabulary, its rows of the head and its mappings."""
    ours = drafter.config
    kind = "dspark" if ours.sample_from_anchor else "dflash"
    config = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [i + 1 for i in ours.target_layer_ids],
        "block_size": ours.block_size,
        "draft_vocab_size": ours.draft_vocab_size or ours.vocab_size,
        "dtype": "float32",
        "mask_token_id": ours.mask_token_id,
        "sample_from_anchor": ours.sample_from_anchor,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": None, "architectures": []}},
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_fields(drafter),
        "transformers_version": "5.19.0",
    }
    if kind == "dspark":
        config |= {name: getattr(ours, name) for name in HEADS}
        config["markov_head_type"] = ours.markov_head_type or "vanilla"
    tensors = dict(drafter.state_dict())
    ids = tensors.pop("draft_vocab_ids", None)
    if ids is not None:
        chosen = torch.zeros(ours.vocab_size, dtype=torch.bool)
        chosen[ids] = True
        head = target.get_output_embeddings().weight.detach()[ids]
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": chosen, "lm_head.weight": head}
    write_folder(folder, config | changes, tensors)


def edit_tensors(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def a_block(target: Any, *, length: int = 20, anchor: int = 9) -> tuple[Any, Any, int]:
    """A text ``[1, T]``, all its hidden states (each format has its own numbers for them), and an anchor's place."""
    ids = prompt(length)
    with torch.no_grad():
        return ids, target(ids, output_hidden_states=True).hidden_states, anchor


@torch.no_grad()
def block_logits(drafter: CarryoverDrafterModel, target: Any, ids: Any, states: Any, anchor: int) -> torch.Tensor:
    """Our logits of one block, ``[1, K, V]``; a Markov head reads the text itself."""
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)  # [1, T, F]
    slots = drafter.embed_block(ids[:, anchor : anchor + 1], target.get_input_embeddings())
    hidden = drafter(
        noise_embeds=slots,
        context_hidden_states=features[:, :anchor],
        position_ids=torch.arange(anchor + drafter.config.block_size)[None],
    ).last_hidden_state[:, -drafter.config.num_drafts :]
    logits = drafter.slot_logits(hidden, drafter.proposal_head(target.get_output_embeddings()))
    if drafter.markov_head is None:
        return logits
    state, biases = None, []
    for k in range(drafter.config.num_drafts):
        bias, state = drafter.markov_head(ids[:, anchor + k], hidden[:, k], state)
        biases.append(bias)
    return logits + torch.stack(biases, dim=1)

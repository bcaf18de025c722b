"""Stand-ins: tiny targets, tiny drafters, and a drafter whose acceptance is written in a script."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_carryover import CarryoverCache, CarryoverDrafterConfig, CarryoverDrafterModel

DEFAULT_DRAFT_LENGTH = CarryoverDrafterModel.draft_length  # of users; tests hand over all drafts (conftest.py)
VOCAB = 61
MASK = 60
LAYERS = 4
# The two published pairs of layout and head, and the two other heads.
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"sample_from_anchor": False},
    "markov-vanilla": {"sample_from_anchor": True, "markov_head_type": "vanilla", "markov_rank": 6},
    "markov-gated": {"sample_from_anchor": True, "markov_head_type": "gated", "markov_rank": 6},
    "markov-rnn": {"sample_from_anchor": True, "markov_head_type": "rnn", "markov_rank": 6},
}
# What differs between architectures: sizes have the same names except for the oldest ones.
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "mistral": {"head_dim": 8, "sliding_window": 8},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 8, "sliding_window": 8},
    "gpt2": {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 512},
    "bloom": {"n_head": 4, "n_layer": LAYERS},
    "gpt_neox": {},
    "phi": {},
    "olmo2": {},
}


def make_target(kind: str = "llama", *, seed: int = 0, vocab_size: int = VOCAB, **overrides: Any) -> PreTrainedModel:
    """A random decoder-only model of four layers, with weights large enough for a varied text; it never ends."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(sizes | TARGETS[kind] | overrides))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def drafter_config(kind: str = "dflash", **overrides: Any) -> CarryoverDrafterConfig:
    """The configuration of a two-layer drafter for a tiny target."""
    fields = {
        "block_size": 5,
        "mask_token_id": MASK,
        "target_layer_ids": [0, 2],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "initializer_range": 0.3,
    }
    return CarryoverDrafterConfig(**(fields | KINDS[kind] | overrides))


def make_drafter(
    kind: str = "dflash", *, cls: type[CarryoverDrafterModel] = CarryoverDrafterModel, seed: int = 1, **overrides: Any
) -> Any:
    """A drafter of random weights, with a carry embedding that is not zero, so that carried rows tell."""
    torch.manual_seed(seed)
    drafter = cls(drafter_config(kind, **overrides)).eval()
    torch.nn.init.normal_(drafter.carry_embedding)
    return drafter


class ScriptedDrafter(CarryoverDrafterModel):
    """Runs the real network, then proposes what the script says: some right tokens, then wrong ones.

    `follow` gives it the true text and how many drafts of each round shall be right; the last count repeats.
    """

    def follow(self, truth: Tensor, counts: list[int], *, first_position: int = 0) -> None:
        self.truth, self.counts, self.first_position = truth[0].tolist(), counts, first_position
        self.num_passes = 0
        self.calls: list[dict[str, Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return super().forward(*args, **kwargs)

    def slot_logits(self, hidden: Tensor, head: Any) -> Tensor:
        logits = 1e-3 * super().slot_logits(hidden, head)
        anchor = int(self.calls[-1]["position_ids"][0, -self.config.block_size]) - self.first_position
        count = self.counts[min(self.num_passes, len(self.counts) - 1)]
        self.num_passes += 1
        for slot in range(hidden.shape[1]):
            right = self.truth[min(anchor + 1 + slot, len(self.truth) - 1)]
            logits[0, slot, right if slot < count else (right + 1) % self.config.vocab_size] += 1e6
        return logits


def plain(target: PreTrainedModel, **inputs: Any) -> Any:
    """Plain generation with the defaults of the tests: greedy, 40 new tokens."""
    return target.generate(**({"do_sample": False, "max_new_tokens": 40} | inputs))


def visible(cache: CarryoverCache, layer_idx: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values that a layer's block sees besides itself, ``[1, H, committed + carried, head_dim]`` each."""
    layer, num_visible = cache.layers[layer_idx], cache.num_committed + cache.num_carried
    return layer.keys[:, :, :num_visible], layer.values[:, :, :num_visible]


def prompt(length: int = 7, *, seed: int = 0) -> Tensor:
    """Random ids ``[1, length]``, none of them the mask token."""
    return torch.randint(0, MASK, (1, length), generator=torch.Generator().manual_seed(seed))


def write_zlab_folder(folder: Path, drafter: CarryoverDrafterModel, **changes: Any) -> dict[str, Any]:
    """Write a drafter's weights in z-lab's format (its carry embedding left out); returns the config written."""
    ours = drafter.config
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "block_size": ours.block_size,
        "num_target_layers": LAYERS,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": ours.mask_token_id, "target_layer_ids": ours.target_layer_ids},
    }
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "layer_types"):  # fmt: skip
        config[name] = getattr(ours, name)
    config = {name: value for name, value in (config | changes).items() if value is not ...}
    tensors = {name: tensor for name, tensor in drafter.state_dict().items() if name != "carry_embedding"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return config


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A real tokenizer of one character a token: token 0 is ``a``, 1 is ``b``; for stop strings and pipelines."""
    characters = (string.ascii_letters + string.digits)[:VOCAB]
    words = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(characters)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")


class Letters:
    """A tokenizer of one letter a token; two tokens of 50 make one umlaut, as bytes do."""

    chat_template = None

    def decode(self, ids, skip_special_tokens=True):
        text, pending = "", False
        for token in ids:
            if token == 50:
                text, pending = (text[:-1] + "ü", False) if pending else (text + "\ufffd", True)
            else:
                text, pending = text + chr(ord("a") + token % 26), False
        return text

    def __call__(self, text: str, return_tensors: str) -> "Encoding":
        ids = torch.tensor([[1 + ord(c) % 50 for c in text[:9]]])
        return Encoding(input_ids=ids, attention_mask=torch.ones_like(ids))


class Encoding(dict):
    def to(self, device):
        return self

    @property
    def input_ids(self):
        return self["input_ids"]

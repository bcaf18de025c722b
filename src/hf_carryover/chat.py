"""How does a conversation become ids? By the target's own chat template, or bare."""

from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Conversation = list[dict[str, str]]


def encode_prompt(prompt: Conversation, tokenizer: PreTrainedTokenizerBase, *, raw: bool = False) -> Tensor:
    """Ids of a prompt, ``[1, T]``: in the chat template up to where the answer starts, or bare if raw."""
    if raw:
        return tokenizer("\n\n".join(message["content"] for message in prompt), return_tensors="pt").input_ids
    if tokenizer.chat_template is None:
        raise ValueError(
            "Expected a tokenizer with a chat template, found none; use --raw to feed prompts as they are."
        )
    return torch.tensor([render(prompt, tokenizer, add_generation_prompt=True)])


def render(messages: Conversation, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    """Ids of a conversation in the chat template; ValueError if the template does not take it."""
    try:
        given = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except TemplateError as error:
        roles = [turn["role"] for turn in messages]
        raise ValueError(f"Expected turns that the target's chat template takes, found {roles}: {error}.") from error
    return list(given["input_ids"])

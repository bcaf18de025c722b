"""Stand-ins for evaluation: a tokenizer of words, prompt files, and drafters that follow a script prompt by prompt."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.fakes import VOCAB, ScriptedDrafter, make_target


def make_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """The words 0 to 60 are the tokens; the chat template puts 59 before a message."""
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    template = "{% for message in messages %}59 {{ message['content'] }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template if chat else None)


def write_target(folder: Path, kind: str = "llama", **overrides: Any) -> Path:
    """A random target and its tokenizer as a folder; it ends its turn with 57, and 60 is a special token unused."""
    target = make_target(kind, **overrides)
    target.generation_config.eos_token_id = target.generation_config.pad_token_id = 57
    target.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "57", "additional_special_tokens": ["60"]})
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(path: Path, texts: list[str]) -> Path:
    """A JSONL file with a prompt a line."""
    path.write_text("".join(json.dumps({"turns": [text, "1 2"]}) + "\n" for text in texts))
    return path


def script(
    monkeypatch: pytest.MonkeyPatch,
    target: PreTrainedModel,
    drafter: ScriptedDrafter,
    counts: Callable[[Tensor, bool], list[int]],
) -> None:
    """Before each call of `generate`, hand the drafter the true text and the counts for this prompt and carry."""
    generate, twin, truths = target.generate, deepcopy(target), {}  # passes of the twin are nobody's rounds

    def scripted(**kwargs: Any) -> Any:
        ids = kwargs["input_ids"]
        key = tuple(ids[0].tolist())
        if key not in truths:
            truths[key] = twin.generate(input_ids=ids, do_sample=False, max_new_tokens=64)
        if kwargs.get("assistant_model") is drafter:
            drafter.follow(truths[key], counts(ids, drafter.carry_enabled))
        return generate(**kwargs)

    monkeypatch.setattr(target, "generate", scripted)

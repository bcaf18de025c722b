"""What does a new drafter take from its target? Sizes, a token for its masks, and the base of its positions."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def sizes_of(target: PreTrainedModel) -> dict[str, Any]:
    """The target's text configuration, with `SIZES` under these names (those of older models have others)."""
    config = target.config.get_text_config(decoder=True)
    return config.to_dict() | {name: getattr(config, name) for name in SIZES}


def spaced_layers(target: PreTrainedModel, count: int) -> list[int]:
    """``count`` evenly spaced layers from 1 to the third last; fewer, if the target has not so many."""
    last = max(sizes_of(target)["num_hidden_layers"] - 3, 0)
    first = min(1, last)
    return sorted({round(first + i * (last - first) / max(count - 1, 1)) for i in range(count)})


def unused_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The last special token that neither ends, begins nor pads text, nor stands in the chat template."""
    known = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    free = [i for i, token in tokenizer.added_tokens_decoder.items()
            if token.special and i not in known and token.content not in template]  # fmt: skip
    if not free:
        raise ValueError("Expected a special token that texts do not use, found none; name one: `--mask_token_id`.")
    return max(free)


def plain_rope(theirs: dict[str, Any]) -> dict[str, Any]:
    """The target's rotary base; other kinds of scaling are not copied, since a drafter learns its own positions."""
    rope = theirs.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return {"rope_theta": rope.get("rope_theta", 10000.0), "rope_type": "default"}

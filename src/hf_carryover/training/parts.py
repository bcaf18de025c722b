"""What does a new drafter take from its target? A token for its masks, and the base of its positions."""

from typing import Any

from transformers import PreTrainedTokenizerBase


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

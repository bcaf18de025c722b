import pytest

from hf_carryover.chat import encode_prompt
from tests.evaluation_fakes import make_tokenizer


def user(text):
    return [{"role": "user", "content": text}]


def test_chat_template_is_applied_unless_raw():
    tokenizer = make_tokenizer()

    assert encode_prompt(user("3 4"), tokenizer).tolist() == [[59, 3, 4]]
    assert encode_prompt(user("3 4"), tokenizer, raw=True).tolist() == [[3, 4]]


def test_a_tokenizer_without_chat_template_is_named():
    with pytest.raises(ValueError, match="chat template, found none; use --raw"):
        encode_prompt(user("3 4"), make_tokenizer(chat=False))

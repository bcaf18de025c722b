"""Does a drafter work inside `transformers.pipeline`? As an object, in a call, with chats; not as a folder's path."""

import pytest
import torch
from transformers import pipeline

from hf_carryover import load_drafter
from tests.fakes import letters_tokenizer, make_drafter, make_target, plain

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}Z{% endif %}"
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture
def tokenizer():
    letters = letters_tokenizer()
    letters.chat_template = TEMPLATE
    return letters


@pytest.fixture
def target():
    model = make_target(eos_token_id=9, pad_token_id=0, bos_token_id=None)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 9, 0
    return model


OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.parametrize("prompt", ["abc", CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("layout", ["given-to-the-pipeline", "given-to-the-call"])
def test_a_drafter_works_in_a_pipeline(layout, prompt, target, tokenizer, tmp_path):
    make_drafter().save_pretrained(tmp_path)
    drafter = load_drafter(tmp_path, target=target)
    bare = pipeline("text-generation", model=target, tokenizer=tokenizer)

    if layout == "given-to-the-pipeline":
        answer = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)(
            prompt, **OPTIONS
        )
    else:
        answer = bare(prompt, assistant_model=drafter, **OPTIONS)

    assert drafter.last_stats.rounds
    assert answer == bare(prompt, **OPTIONS)


def test_a_loaded_drafter_takes_over_the_special_tokens_of_its_target_where_it_has_none(target, tmp_path):
    """What the pipeline compares before it accepts an assistant."""
    make_drafter(eos_token_id=[9, 4]).save_pretrained(tmp_path)

    drafter = load_drafter(tmp_path, target=target)

    config = drafter.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [9, 4], 0)
    ids = torch.tensor([[3, 5]])
    assert torch.equal(plain(target, input_ids=ids, assistant_model=drafter), plain(target, input_ids=ids))


def test_a_folders_path_is_refused_by_the_pipeline(target, tokenizer, tmp_path):
    """Transformers looks for the class among its own before it asks the Auto classes; load the drafter yourself."""
    make_drafter().save_pretrained(tmp_path)

    with pytest.raises(ValueError, match="Pipeline cannot infer suitable model classes"):
        pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=str(tmp_path))

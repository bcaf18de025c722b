"""What other software got wrong about the end of a text, beyond what `test_decoding.py` asks at every offset."""

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from tests.fakes import KINDS, ScriptedDrafter, letters_tokenizer, make_drafter, make_target, plain, prompt


def oracle(truth, kind="dflash"):
    drafter = make_drafter(kind, cls=ScriptedDrafter)
    drafter.follow(truth, [9])
    return drafter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_stop_string_ends_the_text_at_every_offset_inside_a_block(kind, size):
    """huggingface/transformers#47912 and #48039: of one token, and of two that may lie in two blocks."""
    target, ids, tokenizer = make_target(), prompt(), letters_tokenizer()
    truth = plain(target, input_ids=ids)
    for offset in range(9):
        place = ids.shape[1] + offset
        options = {"stop_strings": tokenizer.decode(truth[0, place : place + size]), "tokenizer": tokenizer}

        text = plain(target, input_ids=ids, assistant_model=oracle(truth, kind), **options)

        assert torch.equal(text, plain(target, input_ids=ids, **options))
        assert text.shape[1] <= place + size


@pytest.mark.parametrize("length", range(8, 20))
def test_max_length_counts_the_prompt(length):
    """huggingface/transformers#46993 and #47195."""
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids)

    text = plain(target, input_ids=ids, max_new_tokens=None, max_length=length, assistant_model=oracle(truth))

    assert torch.equal(text, truth[:, :length])


def test_a_time_limit_ends_the_text_after_a_round():
    """A clock is no function of the ids; it is asked once a round, and the text is a beginning of the target's own."""
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids)

    text = plain(target, input_ids=ids, max_time=0.0, assistant_model=oracle(truth))

    assert ids.shape[1] < text.shape[1] <= ids.shape[1] + 5
    assert torch.equal(text, truth[:, : text.shape[1]])


def test_a_processor_that_counts_tokens_in_the_ids_sees_none_twice():
    """osaurus-ai/vmlx-swift#357 and #361; vllm-project/vllm#33251: penalties must be functions of the ids."""
    target, ids = make_target(), prompt()

    def penalise_by_count(input_ids, scores):
        return scores - 4.0 * input_ids[0].bincount(minlength=scores.shape[1])

    options = {"input_ids": ids, "logits_processor": LogitsProcessorList([penalise_by_count])}
    truth = plain(target, **options)

    assert torch.equal(plain(target, **options, assistant_model=oracle(truth)), truth)
    assert torch.equal(plain(target, **options, assistant_model=make_drafter()), truth)


def test_criteria_that_fire_on_the_prompts_own_pass_leave_one_token():
    """huggingface/transformers#46993: no round is begun."""
    target, ids, drafter = make_target(), prompt(), make_drafter()
    at_once = StoppingCriteriaList([lambda input_ids, scores, **_: torch.tensor([True])])

    text = plain(target, input_ids=ids, stopping_criteria=at_once, assistant_model=drafter)

    assert text.shape[1] == ids.shape[1] + 1
    assert drafter.last_stats.rounds == []

import threading

import pytest
import torch

from hf_carryover import stream_tokens
from hf_carryover.streaming import TokenStreamer
from tests.fakes import Letters, ScriptedDrafter, make_drafter, make_target, plain, prompt


def scripted(counts, **options):
    """Tokens of a scripted call, with the target's own text and the drafter."""
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids, max_new_tokens=12)
    drafter = make_drafter(cls=ScriptedDrafter)
    drafter.follow(truth, counts)
    tokens = list(
        stream_tokens(
            target, Letters(), {"input_ids": ids}, drafter=drafter, do_sample=False, max_new_tokens=12, **options
        )
    )
    return tokens, truth[0, ids.shape[1] :].tolist(), drafter


def test_every_token_comes_with_its_round_and_origin():
    tokens, truth, _ = scripted([2, 0, 4])

    assert [token.id for token in tokens] == truth
    # The prompt's pass gives one own token; then 2 drafts + own, 0 + own, 4 + own, 1 + own.
    assert [token.round for token in tokens] == [0, 1, 1, 1, 2, 3, 3, 3, 3, 3, 4, 4]
    assert [token.round for token in tokens if not token.is_draft] == [0, 1, 2, 3, 4]
    assert "".join(token.text for token in tokens) == Letters().decode(truth)
    assert [token.seconds for token in tokens] == sorted(token.seconds for token in tokens)


def test_rejected_drafts_stand_with_the_own_token_that_replaced_them_and_their_rows_are_carried():
    tokens, _, drafter = scripted([2, 0, 4])
    own = {token.round: token for token in tokens if not token.is_draft}
    rounds = drafter.last_stats.rounds

    assert [len(own[n].rejected) for n in (0, 1, 2, 3)] == [0, 2, 4, 0]
    assert own[2].rejected == tuple(Letters().decode([token]) for token in rounds[1].drafted_ids)
    assert [own[n].num_carried for n in (1, 2, 3)] == [0, 2, 4]
    assert all(token.rejected == () for token in tokens if token.is_draft)


def test_plain_decoding_is_all_the_targets_own():
    target, ids = make_target(), prompt()

    tokens = list(stream_tokens(target, Letters(), {"input_ids": ids}, do_sample=False, max_new_tokens=5))

    assert [token.id for token in tokens] == plain(target, input_ids=ids, max_new_tokens=5)[0, ids.shape[1] :].tolist()
    assert not any(token.is_draft or token.round or token.rejected for token in tokens)


def test_a_character_of_several_tokens_comes_whole_and_the_rest_waits():
    tokens = []
    streamer = TokenStreamer(Letters(), None, tokens.append)

    for ids in ([9, 9], [0], [50], [50], [50]):
        streamer.put(torch.tensor(ids))

    assert [token.text for token in tokens] == ["a", "", "ü", ""]
    assert streamer.rest() == "\ufffd"


def test_leaving_early_ends_the_thread_and_leaves_the_target_usable():
    target, ids = make_target(), prompt()
    before = threading.active_count()
    answer = stream_tokens(target, Letters(), {"input_ids": ids}, do_sample=False, max_new_tokens=400)

    first = next(answer)
    answer.close()

    assert threading.active_count() == before
    assert first.id == plain(target, input_ids=ids, max_new_tokens=1)[0, -1]


def test_an_error_of_generate_reaches_the_reader():
    target, drafter = make_target(), make_drafter(vocab_size=71)

    with pytest.raises(ValueError, match="vocabulary size 71"):
        list(stream_tokens(target, Letters(), {"input_ids": prompt()}, drafter=drafter, max_new_tokens=5))

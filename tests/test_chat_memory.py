"""A drafter's memory of a target's cache lasts from one turn of a chat to the next, and no longer."""

import gc

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache, StoppingCriteria, StoppingCriteriaList

from hf_carryover import CarryoverCache
from hf_carryover.cache_carryover import MEMORIES
from tests.fakes import KINDS, ScriptedDrafter, make_drafter, make_target, plain, prompt, visible


def turn(target, cache, text, **options):
    """One turn: what the cache lacks of a text ``[1, T]``, with the whole text's mask."""
    new = text[:, int(cache.get_seq_length()) :]
    return plain(target, input_ids=new, attention_mask=torch.ones_like(text), cache=cache, **options)


def whole(text, cache, answer, seen):
    """Text and answer: `generate` returns the ids that it was given and the new ones."""
    return torch.cat([text[:, :seen], answer], dim=1)


def memory_afresh(target, drafter, text):
    """Keys and values of a text's rows in every layer, computed at once."""
    states = target(input_ids=text, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    cache = CarryoverCache()
    cache.commit(features.shape[1])
    positions = torch.arange(features.shape[1] + drafter.config.block_size)[None]
    drafter(torch.zeros(1, drafter.config.block_size, 32), features, positions, cache=cache)
    return features, cache


def check(target, drafter, cache, text):
    """The memory of the cache is that of the text, row for row."""
    memory = MEMORIES[cache][drafter]
    features, afresh = memory_afresh(target, drafter, text[:, : int(cache.get_seq_length())])
    kept = memory.num_committed
    assert bool(memory.layers) == (kept > 0)
    for i, layer in enumerate(memory.layers):
        for ours, theirs in zip((layer.keys, layer.values), visible(afresh, i), strict=True):
            torch.testing.assert_close(ours[:, :, :kept], theirs[:, :, :kept], rtol=1e-3, atol=1e-4)
    waiting = torch.cat([rows for rows, _ in memory.waiting], dim=1)
    torch.testing.assert_close(waiting, features[:, memory.num_committed :], rtol=1e-3, atol=1e-4)
    places = torch.cat([places for _, places in memory.waiting], dim=1)[0].tolist()
    assert places == list(range(memory.num_committed, int(cache.get_seq_length())))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_new", [1, 2, 17], ids=["no-round", "one-draft", "many-rounds"])
def test_a_second_and_third_turn_go_on_from_the_memory(kind, num_new):
    # z-lab: bstnxbt/dflash-mlx#19, huggingface/transformers#24841: reuse across turns with the drafter on.
    target, drafter, cache = make_target(), make_drafter(kind), DynamicCache()
    text = prompt(9)

    for seed in range(3):
        seen = cache.get_seq_length()
        answer = turn(target, cache, text, assistant_model=drafter, max_new_tokens=num_new)
        expected = plain(target, input_ids=text, max_new_tokens=num_new)
        text = whole(text, cache, answer, seen)

        assert torch.equal(text, expected)
        if num_new > 1:
            check(target, drafter, cache, text)
        text = torch.cat([text, prompt(4, seed=seed)], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_static_cache_keeps_its_memory_over_turns_also_when_passes_are_compiled(is_compiled):
    """Its length is a tensor that later passes change, and a compiled pass runs no hook that came later."""
    target, drafter = make_target(), make_drafter()
    cache, text = StaticCache(config=target.config, max_cache_len=128), prompt(9)
    compiling = CompileConfig(backend="eager", mode=None)
    compiling._compile_all_devices = is_compiled

    for seed in range(3):
        seen = int(cache.get_seq_length())
        answer = turn(target, cache, text, assistant_model=drafter, max_new_tokens=6, compile_config=compiling)
        text = whole(text, cache, answer, seen)

        check(target, drafter, cache, text)
        text = torch.cat([text, prompt(4, seed=seed)], dim=1)

    assert hasattr(target, "_compiled_call") == is_compiled


@torch.no_grad()
@pytest.mark.parametrize("offset", range(1, 7))
def test_a_turn_that_end_of_text_ends_inside_a_block_leaves_the_right_memory(offset):
    """The usual end of a turn."""
    target, drafter, cache, text = make_target(), make_drafter(cls=ScriptedDrafter), DynamicCache(), prompt(9)
    truth = plain(target, input_ids=text, max_new_tokens=12)
    drafter.follow(truth[:, 9:], [99], first_position=9)
    end = truth[0, 9 + offset].item()

    answer = turn(target, cache, text, assistant_model=drafter, eos_token_id=end, pad_token_id=end)

    assert answer.shape[1] == 10 + truth[0, 9:].tolist().index(end)
    check(target, drafter, cache, answer)
    following = torch.cat([answer, prompt(4, seed=2)], dim=1)
    second = turn(target, cache, following, assistant_model=drafter, max_new_tokens=6)
    assert torch.equal(
        torch.cat([following, second[:, -6:]], dim=1), plain(target, input_ids=following, max_new_tokens=6)
    )


@torch.no_grad()
def test_a_second_turn_accepts_as_much_as_a_call_with_the_whole_text():
    target, drafter = make_target(), make_drafter()
    cache, text = DynamicCache(), prompt(9)
    answer = turn(target, cache, text, assistant_model=drafter, max_new_tokens=12)
    text = torch.cat([answer, prompt(5, seed=3)], dim=1)

    turn(target, cache, text, assistant_model=drafter)
    second = drafter.last_stats
    plain(target, input_ids=text, attention_mask=torch.ones_like(text), assistant_model=drafter)

    assert [r.drafted_ids for r in second.rounds] == [r.drafted_ids for r in drafter.last_stats.rounds]
    assert second.histogram == drafter.last_stats.histogram


@torch.no_grad()
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("num_kept", [0, 5, 11])
def test_a_cache_that_was_cropped_takes_its_memory_along(num_kept, is_static):
    # A static cache answers with the tensor that it counts in: a memory that kept it would count along.
    target, drafter, text = make_target(), make_drafter(), prompt(9)
    cache = StaticCache(config=target.config, max_cache_len=80) if is_static else DynamicCache()
    answer = turn(target, cache, text, assistant_model=drafter, max_new_tokens=12)

    cache.crop(-(int(cache.get_seq_length()) - num_kept))
    text = torch.cat([answer[:, :num_kept], prompt(5, seed=3)], dim=1)
    seen = int(cache.get_seq_length())
    second = turn(target, cache, text, assistant_model=drafter)

    assert torch.equal(whole(text, cache, second, seen), plain(target, input_ids=text))
    check(target, drafter, cache, whole(text, cache, second, seen))


@torch.no_grad()
@pytest.mark.parametrize("length", [4, 9, 30], ids=["shorter", "as-long", "longer"])
def test_a_static_cache_that_was_reset_starts_a_new_text(length):
    target, drafter, text = make_target(), make_drafter(), prompt(length, seed=3)
    cache = StaticCache(config=target.config, max_cache_len=80)
    turn(target, cache, prompt(9), assistant_model=drafter, max_new_tokens=12)

    cache.reset()
    answer = turn(target, cache, text, assistant_model=drafter)

    assert torch.equal(answer, plain(target, input_ids=text))
    check(target, drafter, cache, answer)


@torch.no_grad()
@pytest.mark.parametrize("num_new", range(1, 7))
def test_a_text_that_a_criterion_ended_inside_a_block_leaves_the_right_memory(num_new):
    class Nth(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 9 + num_new])

    target, drafter, cache, text = make_target(), make_drafter(cls=ScriptedDrafter), DynamicCache(), prompt(9)
    drafter.follow(plain(target, input_ids=text)[:, 9:], [99], first_position=9)

    answer = turn(target, cache, text, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([Nth()]))

    assert answer.shape[1] == 9 + num_new
    assert cache.get_seq_length() == 8 + num_new
    check(target, drafter, cache, answer)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_with_holes_leaves_only_its_text(static):
    """Also where the target's passes see the mask in another shape: four dimensions, for a static cache."""
    target, drafter, text = make_target(), make_drafter(), prompt(9)
    cache = StaticCache(config=target.config, max_cache_len=20) if static else DynamicCache()
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1]])

    plain(
        target, input_ids=text, attention_mask=mask, cache=cache, assistant_model=drafter, max_new_tokens=1,
        disable_compile=True,
    )  # fmt: skip

    (rows, places) = MEMORIES[cache][drafter].waiting[0]
    assert rows.shape[1] == places.shape[1] == 6


@torch.no_grad()
def test_every_drafter_has_its_own_memory_and_it_goes_with_the_cache():
    target, one, two = make_target(), make_drafter(), make_drafter("markov-rnn", seed=4)
    cache, text = DynamicCache(), prompt(9)
    gc.collect()  # caches of earlier tests
    before = len(MEMORIES)

    answer = turn(target, cache, text, assistant_model=one, max_new_tokens=8)
    turn(target, cache, torch.cat([answer, prompt(3)], dim=1), assistant_model=two, max_new_tokens=8)

    assert set(MEMORIES[cache]) == {one, two}
    assert len(MEMORIES) == before + 1
    del cache
    gc.collect()
    assert len(MEMORIES) == before


@torch.no_grad()
def test_a_call_that_fails_leaves_no_memory():
    class Angry(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise RuntimeError("no")

    target, drafter, cache, text = make_target(), make_drafter(), DynamicCache(), prompt(9)
    text = torch.cat([turn(target, cache, text, assistant_model=drafter, max_new_tokens=8), prompt(3)], dim=1)
    assert drafter in MEMORIES[cache]

    with pytest.raises(RuntimeError, match="no"):
        turn(target, cache, text, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([Angry()]))

    assert drafter not in MEMORIES.get(cache, {})


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 40], ids=["a-shorter-text", "a-longer-text"])
def test_another_call_on_the_same_target_meanwhile_leaves_the_memory_alone(length):
    """sgl-project/sglang#36548: as from another thread; its passes run between our last one and our end."""
    target, drafter, cache = make_target(), make_drafter(), DynamicCache()

    class Meanwhile(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            plain(target, input_ids=prompt(length, seed=8), assistant_model=make_drafter(seed=4), max_new_tokens=6)
            return torch.zeros(1, dtype=torch.bool)

    text = turn(
        target, cache, prompt(9), assistant_model=drafter, max_new_tokens=12,
        stopping_criteria=StoppingCriteriaList([Meanwhile()]),
    )  # fmt: skip

    assert torch.equal(text, plain(target, input_ids=prompt(9), max_new_tokens=12))
    check(target, drafter, cache, text)

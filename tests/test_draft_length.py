import json
import random
import re
from contextlib import contextmanager
from itertools import pairwise, product
from time import perf_counter, sleep

import pytest
import torch
from transformers import DynamicCache

from hf_carryover import CarryoverCandidateGenerator, CarryoverDrafterModel
from hf_carryover.cache_carryover import MEMORIES
from hf_carryover.decoding import MEASURED_PROMPT
from hf_carryover.draft_length import FIRST_WAIT, Acceptance, DraftLength, best_draft_length
from hf_carryover.round_seconds import MEASURED_ROUNDS, TIMES, RoundSeconds, curve, frozen_times
from tests.enumeration import Tree, distance, law_of_target
from tests.fakes import DEFAULT_DRAFT_LENGTH, ScriptedDrafter, make_drafter, make_target, plain, prompt


def brute_force(acceptance, seconds):
    """Expected tokens by walking through every outcome of every draft."""
    rates = []
    for length in range(len(seconds)):
        expected = 0.0
        for outcome in product((True, False), repeat=length):
            chance, kept = 1.0, 0
            for accepted, a in zip(outcome, acceptance, strict=False):
                chance *= a if accepted else 1 - a
            for accepted in outcome:
                if not accepted:
                    break
                kept += 1
            expected += chance * (kept + 1)
        rates.append(expected / seconds[length])
    return rates.index(max(rates))


def test_the_best_length_is_that_of_a_brute_force_search():
    dice = random.Random(0)

    for _ in range(300):
        longest = dice.randint(1, 6)
        acceptance = [dice.random() for _ in range(longest)]
        seconds = [1 + dice.random() * 0.2 * k for k in range(longest + 1)]

        assert best_draft_length(acceptance, seconds) == brute_force(acceptance, seconds)


@pytest.mark.parametrize(
    ("acceptance", "seconds", "best"),
    [
        ([0.9, 0.9, 0.9], [1, 1, 1, 1], 3),
        ([0.0, 0.9, 0.9], [1, 1.1, 1.1, 1.1], 0),
        ([0.5, 0.5], [1, 1.4, 2.0], 1),
        ([0.0], [1, 1], 0),
    ],
    ids=["free-drafts", "hopeless", "one-pays", "a-tie-goes-to-the-shortest"],
)
def test_examples_by_hand(acceptance, seconds, best):
    assert best_draft_length(acceptance, seconds) == best


def test_acceptance_is_learnt_by_position_and_only_where_a_draft_was_judged():
    acceptance = Acceptance([0.5, 0.5, 0.5])

    for _ in range(200):
        acceptance.record(2, 1)

    first, second, third = acceptance.estimate()
    assert first > 0.98
    assert second < 0.02
    assert third == 0.5


def test_bad_luck_at_the_start_does_not_stop_a_drafter_that_was_measured_to_pay():
    measured = [0.33, 0.40, 0.38, 0.37]  # 1.53 tokens a round, at 1.3 times a plain round's seconds
    choice = DraftLength(4, Acceptance(measured), RoundSeconds({0: 1.0, 1: 1.25, 4: 1.3}))

    lengths = run(choice, accepted=0, seconds=[1.0] * 5, rounds=40)

    assert 0 not in lengths[:6]  # one time in eleven such a drafter begins like this
    assert lengths[30:] == [0] * 10


def test_acceptance_follows_a_text_that_changes():
    acceptance = Acceptance([0.5])
    for _ in range(200):
        acceptance.record(1, 1)

    for _ in range(60):
        acceptance.record(1, 0)

    assert acceptance.estimate()[0] < 0.2


def test_lengths_never_run_lie_on_lines_between_those_that_were():
    times = RoundSeconds()
    for length, seconds in ((0, 1.0), (0, 1.0), (4, 3.0), (4, 99.0), (4, 3.0), (8, 4.0), (8, 4.0)):
        times.record(length, seconds)

    assert curve(times.known(), 8) == pytest.approx([1, 1.5, 2, 2.5, 3, 3.25, 3.5, 3.75, 4])


def test_a_length_that_was_measured_once_is_not_trusted():
    times = RoundSeconds()
    for length, seconds in ((0, 1.0), (0, 1.0), (4, 3.0), (4, 3.0), (2, 99.0)):
        times.record(length, seconds)

    assert curve(times.known(), 4) == pytest.approx([1, 1.5, 2, 2.5, 3])


@pytest.mark.parametrize("busy", [range(12), range(8, 20), range(16, 28)], ids=["first", "amid", "last"])
def test_what_is_frozen_is_right_though_another_program_ran_for_a_while(busy):
    seconds = [1.0, 1.2, 1.3, 1.4, 1.5]
    choice = DraftLength(4, Acceptance([0.5] * 4), times := RoundSeconds(needed=MEASURED_ROUNDS // 4))
    for number in range(MEASURED_ROUNDS):
        length = choice.choose(99)
        choice.learn(length, 0, seconds[length] * (1.8 if number in busy else 1.0))

    assert times.known() == {0: 1.0, 1: 1.2, 2: 1.3, 4: 1.5}


def test_a_first_draft_is_not_thought_cheap_because_none_is():
    # The drafter's pass costs the same for one draft as for all: a line from no draft to two would miss it.
    seconds, measured = [1.0, 1.36, 1.37, 1.37, 1.38], [0.34, 0.31, 0.4, 0.25]
    choice = DraftLength(4, Acceptance(measured), times := RoundSeconds(needed=MEASURED_ROUNDS // 4))
    for _ in range(MEASURED_ROUNDS):
        length = choice.choose(99)
        times.record(length, seconds[length])

    frozen = DraftLength(4, Acceptance(measured), RoundSeconds(times.known()))

    assert frozen.choose(99) == 4  # 1.50 tokens in 1.38; one draft would give 1.34 in 1.36


@pytest.mark.parametrize("slow", [0, 1, 2, 4])
def test_a_length_that_was_slow_once_is_measured_again(slow):
    seconds = [1.0, 1.2, 1.3, 1.4, 1.5]
    busy = [*seconds[:slow], 50.0, *seconds[slow + 1 :]]  # another program ran, each time that this length did
    choice = DraftLength(4, Acceptance([0.5] * 4), RoundSeconds())
    accepted = slow or 1
    run(choice, accepted=accepted, seconds=busy, rounds=40)

    lengths = run(choice, accepted=accepted, seconds=seconds, rounds=900)

    assert lengths[-100:].count(accepted) > 90


def test_a_machine_that_gets_faster_does_not_make_drafting_look_good():
    # While one draft paid, the machine was half as fast: plain rounds of then must not stand beside drafts of now.
    slow, fast = [2.0, 2.6, 3.0, 3.5, 4.0], [1.0, 1.6, 1.9, 2.0, 2.1]
    choice = DraftLength(4, Acceptance([0.5] * 4), RoundSeconds())
    lengths = run(choice, accepted=1, seconds=slow, rounds=50)
    assert lengths[-20:].count(1) == 20

    lengths = [length for _ in range(100) for length in run_of_chance(choice, fast)]

    assert lengths[50:].count(0) > 0.9 * 150


@pytest.mark.parametrize("room", [1, 2, 3])
def test_short_calls_choose_too(room):
    choice = DraftLength(4, Acceptance([0.5] * 4), RoundSeconds())
    for _ in range(40):
        length = choice.choose(room)
        choice.learn(length, 0, [1.0, 3.0, 3.1, 3.2, 3.3][length])

    assert 0 <= length <= room
    assert [choice.choose(room) for _ in range(8)].count(0) >= 7
    assert choice.choose(0) == 0


def run(choice, *, accepted, seconds, rounds):
    """Scripted rounds: so many drafts are right, a round takes as long as the list says."""
    lengths = []
    for _ in range(rounds):
        length = choice.choose(99)
        lengths.append(length)
        choice.learn(length, min(length, accepted), seconds[length])
    return lengths


def run_of_chance(choice, seconds):
    """Two scripted rounds: in the second a first draft is right, and none after it."""
    return run(choice, accepted=0, seconds=seconds, rounds=1) + run(choice, accepted=1, seconds=seconds, rounds=1)


def test_after_measuring_the_chosen_length_is_the_best_one():
    seconds = [1.0, 1.3, 1.5, 2.5, 3.5]
    choice = DraftLength(4, Acceptance([0.5] * 4), RoundSeconds())

    lengths = run(choice, accepted=2, seconds=seconds, rounds=80)

    assert lengths[:8] == [4, 0, 1, 2, 4, 0, 1, 2]  # after these it is known how long rounds take
    # What a plain round takes is asked again when the two first ones are too long ago.
    assert (lengths[40:].count(2), lengths[40:].count(0)) == (38, 2)


@pytest.mark.parametrize(
    ("words", "handed_over"),
    [([0.5, 0.5], 2), ([0.5, 0.4], 1), ([0.1, 0.5], 1), ([0.9, 0.4], 2)],
    ids=["as-usual", "unsure", "unsure-before", "sure-before"],
)
def test_a_confidence_head_moves_the_estimates_of_a_round(words, handed_over):
    # As usual the second draft pays: 1 + 0.5 + 0.25 tokens in 1.6 s are more than 1 + 0.5 in 1.4.
    choice = DraftLength(2, Acceptance([0.5, 0.5]), RoundSeconds({0: 1.0, 1: 1.4, 2: 1.6}), has_judge=True)

    assert (choice.choose(99), choice.is_open) == (2, True)
    choice.goes_on(words[0])  # a first draft is handed over anyway

    assert choice.goes_on(words[1]) == (handed_over == 2)


def test_a_confidence_heads_word_on_a_draft_that_was_not_handed_over_is_not_learned():
    choice = DraftLength(2, Acceptance([0.5, 0.5]), RoundSeconds({0: 1.0, 1: 1.4, 2: 1.6}), has_judge=True)
    choice.choose(99)
    assert choice.goes_on(0.9)
    assert not choice.goes_on(0.01)

    choice.learn(1, 1, None)

    assert choice.usual.keys() == {0}


def test_a_confidence_head_that_sees_which_drafts_are_right_gets_only_those_handed_over():
    # Half of the first drafts are right, and after a right one half of the second. The head says 0.9 or 0.1, which is
    # not calibrated; what is usual is learned where drafts were judged, which are those that it liked.
    dice, rounds = random.Random(2), []
    choice = DraftLength(2, Acceptance([0.5, 0.5]), RoundSeconds({0: 1.0, 1: 1.2, 2: 1.6}), has_judge=True)
    for _ in range(600):
        right = [dice.random() < 0.5, dice.random() < 0.5]
        most = choice.choose(99)
        length = 0
        while length < most and (choice.goes_on(0.9 if right[length] else 0.1) or length == 0):
            length += 1
        rounds.append((right, length))
        choice.learn(length, 0 if not right[0] or length == 0 else 1 + (length == 2 and right[1]), None)

    drafted = [(right, length) for right, length in rounds[100:] if length]
    assert len(drafted) > 300
    assert sum(length == 2 for right, length in drafted if all(right)) > 0.9 * sum(all(r) for r, _ in drafted)
    assert sum(length == 2 for right, length in drafted if not all(right)) < 0.1 * len(drafted)


@pytest.mark.parametrize(
    ("timings", "prior", "sentence"),
    [
        ({}, None, "`drafter.timings` must have positive seconds of 0 and 4 drafts, got {}."),
        ({0: 1.0, 2: 1.5}, None, "must have positive seconds of 0 and 4 drafts, got {0: 1.0, 2: 1.5}."),
        ({0: 1.0, 4: -1.5}, None, "must have positive seconds of 0 and 4 drafts"),
        (
            {0: 1.0, 4: 1.5},
            [0.5],
            "`drafter.acceptance_prior` must have 4 numbers from 0 to 1, one a draft, got [0.5].",
        ),
        ({0: 1.0, 4: 1.5}, [0.5, 0.5, 0.5, 1.5], "must have 4 numbers from 0 to 1"),
    ],
)
def test_wrong_timings_and_priors_are_told(pair, timings, prior, sentence):
    drafter = pair[1]([2])
    drafter.timings, drafter.acceptance_prior = timings, prior

    with pytest.raises(ValueError, match=re.escape(sentence)):
        plain(pair[0], input_ids=prompt(), assistant_model=drafter, max_new_tokens=8)


def test_a_useless_drafter_is_tried_again_ever_more_rarely():
    """z-lab/dflash#152, antirez/ds4#676: few accepted drafts, slower than plain; here plain takes over."""
    choice = DraftLength(4, Acceptance([0.5] * 4), RoundSeconds())

    lengths = run(choice, accepted=0, seconds=[1.0, 1.5, 1.8, 2.1, 2.4], rounds=250)

    tries = [i for i, length in enumerate(lengths) if length and i > 12]
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps == sorted(gaps)
    assert len(tries) <= 6
    assert gaps[0] >= FIRST_WAIT


def test_drafting_comes_back_when_it_pays_again():
    seconds = [1.0, 1.2, 1.3, 1.4, 1.5]
    choice = DraftLength(4, Acceptance([0.5] * 4), RoundSeconds())
    run(choice, accepted=0, seconds=[1.0, 1.5, 1.8, 2.1, 2.4], rounds=100)

    for length in range(5):
        choice.times.found[length].clear()
    lengths = run(choice, accepted=4, seconds=seconds, rounds=400)

    assert set(lengths[-40:]) <= {4, 0}  # a plain round is timed now and then
    assert lengths[-40:].count(4) >= 38


def test_timings_without_the_whole_block_are_told_in_short_calls_too(pair):
    drafter = pair[1]([2])
    drafter.timings = {0: 1.0, 2: 1.5}

    with pytest.raises(ValueError, match="must have positive seconds of 0 and 4 drafts"):
        plain(pair[0], input_ids=prompt(), assistant_model=drafter, max_new_tokens=4)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A target, a drafter that is right as a script says, and a cache folder of its own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path))
    target = make_target()

    def make(counts):
        drafter = make_drafter(cls=ScriptedDrafter)
        drafter.follow(plain(target, input_ids=prompt(), max_new_tokens=80), counts)
        drafter.draft_length = "auto"
        return drafter

    return target, make


def handed(drafter):
    return [len(r.drafts) for r in drafter.last_stats.rounds]


def test_generate_hands_over_what_given_timings_make_best(pair):
    target, make = pair
    drafter = make([2])
    drafter.timings = dict(enumerate([1.0, 1.1, 1.2, 2.4, 3.6]))

    text = plain(target, input_ids=prompt(), assistant_model=drafter, max_new_tokens=60)

    assert torch.equal(text, plain(target, input_ids=prompt(), max_new_tokens=60))
    assert set(handed(drafter)[-10:-1]) == {2}


@pytest.mark.parametrize("carry", [False, True], ids=["carry-off", "carry-on"])
def test_plain_rounds_keep_the_memory_whole(pair, carry):
    target, make = pair
    drafter, cache = make([0]), DynamicCache()
    drafter.carry_enabled, drafter.timings = carry, dict(enumerate([1.0, 3.0, 3.0, 3.0, 3.0]))
    ids = prompt()

    text = plain(
        target, input_ids=ids, attention_mask=torch.ones_like(ids), cache=cache, assistant_model=drafter,
        max_new_tokens=76,
    )  # fmt: skip

    assert torch.equal(text, plain(target, input_ids=ids, max_new_tokens=76))
    assert handed(drafter).count(0) > 40
    assert 0 < sum(handed(drafter)) < 20
    memory = MEMORIES[cache][drafter]
    assert memory.num_committed + sum(rows.shape[1] for rows, _ in memory.waiting) == cache.get_seq_length()


def test_sampling_measures_once_and_then_repeats_itself(pair, tmp_path):
    target, drafter = pair[0], make_drafter()
    drafter.draft_length = "auto"
    texts, lengths = [], []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(plain(target, input_ids=prompt(), assistant_model=drafter, do_sample=True).tolist())
        lengths.append(handed(drafter))

    (file,) = tmp_path.rglob("*.json")
    assert {"0", "1", "2", "4"} <= json.loads(file.read_text()).keys()
    assert texts[0] == texts[1] != texts[2]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("content", ["", '{"0": 1.0, "2"', "{}", "[1]", '{"0": 1.0}', '{"0": 1.0, "4": "?"}'])
def test_times_that_were_kept_and_are_damaged_are_measured_again(pair, tmp_path, content):
    drafter = make_drafter()
    drafter.draft_length = "auto"
    plain(pair[0], input_ids=prompt(), assistant_model=drafter, do_sample=True)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(content)
    TIMES.clear()  # as in a new process

    plain(pair[0], input_ids=prompt(), assistant_model=drafter, do_sample=True)

    assert {"0", "1", "2", "4"} <= json.loads(file.read_text()).keys()


def test_two_processes_that_measure_at_once_go_by_the_same_times(pair, tmp_path):
    target, drafter = pair[0], make_drafter()
    frozen_times(target, drafter, lambda _: RoundSeconds({0: 1.0, 4: 2.0}))
    (file,) = tmp_path.rglob("*.json")
    file.unlink()
    TIMES.clear()

    def slower(_):
        file.write_text('{"0": 1.0, "4": 3.0}')  # the other process
        return RoundSeconds({0: 1.0, 4: 2.0})

    assert frozen_times(target, drafter, slower).known() == {0: 1.0, 4: 3.0}
    assert json.loads(file.read_text()) == {"0": 1.0, "4": 3.0}


@pytest.mark.parametrize("way", ["tf32", "tf32-by-the-newer-settings", "autocast"])
def test_greedy_text_goes_by_no_clock_where_fp32_is_not_computed_in_fp32(pair, tmp_path, way):
    drafter = make_drafter()
    drafter.draft_length = "auto"
    if way == "tf32":
        torch.set_float32_matmul_precision("high")
    elif way != "autocast":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            plain(pair[0], input_ids=prompt(), assistant_model=drafter)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")

    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_times_are_kept_for_each_way_to_compute(pair, tmp_path, monkeypatch):
    drafter = make_drafter()
    drafter.draft_length = "auto"
    monkeypatch.delenv("MKL_CBWR", raising=False)
    for way in (None, "AVX2"):
        if way is not None:
            monkeypatch.setenv("MKL_CBWR", way)
        plain(pair[0], input_ids=prompt(), assistant_model=drafter, do_sample=True)
    drafter.set_attn_implementation("eager")
    plain(pair[0], input_ids=prompt(), assistant_model=drafter, do_sample=True)

    assert len(list(tmp_path.rglob("*.json"))) == 3


def test_plain_rounds_hold_no_text(pair):
    drafter = pair[1]([0])
    drafter.timings = {0: 1.0, 4: 9.0}

    plain(pair[0], input_ids=prompt(), assistant_model=drafter, max_new_tokens=40)

    undrafted = [r.drafts for r in drafter.last_stats.rounds if not len(r.drafts)]
    assert len(undrafted) > 30
    assert {drafts.untyped_storage().nbytes() for drafts in undrafted} == {0}


def test_without_a_cache_folder_a_process_measures_once(pair, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "file"))
    target, drafter, lengths = pair[0], make_drafter(), []
    drafter.draft_length = "auto"
    with watched(target) as passes:
        for _ in range(2):
            torch.manual_seed(0)
            plain(target, input_ids=prompt(), assistant_model=drafter, do_sample=True)
            lengths.append(handed(drafter))

    assert lengths[0] == lengths[1]
    assert len(passes) == 2 * (len(lengths[0]) + 1) + (4 + 3) + (MEASURED_ROUNDS + 3)


def test_greedy_text_in_bf16_does_not_depend_on_a_clock(pair, tmp_path, monkeypatch):
    # A block of rows and single rows round differently there: another length could be another text.
    target, drafter = make_target().bfloat16(), make_drafter().bfloat16()
    drafter.draft_length = "auto"
    texts, lengths = [], []
    for factor in (1.0, -1.0):  # in the second call all rounds seem to take less than no time
        monkeypatch.setattr("hf_carryover.drafting.perf_counter", lambda f=factor: f * perf_counter())
        texts.append(plain(target, input_ids=prompt(), assistant_model=drafter).tolist())
        lengths.append(handed(drafter))

    assert len(list(tmp_path.rglob("*.json"))) == 1
    assert texts[0] == texts[1]
    assert lengths[0] == lengths[1]


@contextmanager
def watched(target):
    """Rows of the target's passes."""
    rows = []
    hook = target.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield rows
    hook.remove()


@pytest.mark.parametrize("accepted", [0, 4])
def test_measuring_takes_some_rounds_whatever_is_accepted_or_the_target_is_set_to(pair, accepted):
    target, make = pair
    drafter = make([accepted])
    truth = plain(target, input_ids=torch.zeros(1, MEASURED_PROMPT, dtype=torch.long), max_new_tokens=140)
    drafter.follow(truth, [accepted])
    target.generation_config.update(use_cache=False, guidance_scale=2.0, max_time=1e-9, num_beams=3)
    own = {"use_cache": True, "guidance_scale": 1.0, "max_time": 1e3, "num_beams": 1, "max_new_tokens": 4}
    with watched(target) as passes:
        target.generate(prompt(), assistant_model=drafter, do_sample=True, **own)

    assert passes[0] == passes[4 + 3] == MEASURED_PROMPT
    assert len(passes) <= (4 + 3) + (MEASURED_ROUNDS + 3) + 4


def test_measuring_is_no_part_of_the_time_that_a_call_may_take(pair, monkeypatch):
    target, drafter = pair[0], make_drafter()
    drafter.draft_length = "auto"
    slow = lambda *_: sleep(3) or RoundSeconds({0: 1.0, 4: 2.0})  # noqa: E731
    monkeypatch.setattr("hf_carryover.decoding.frozen_times", slow)

    text = plain(target, input_ids=prompt(), assistant_model=drafter, do_sample=True, max_new_tokens=8, max_time=2.5)

    assert text.shape[1] == prompt().shape[1] + 8


def test_ranks_that_share_a_target_go_by_no_clocks(pair, tmp_path):
    target, drafter = pair[0], make_drafter()
    drafter.draft_length = "auto"
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain(target, input_ids=prompt(), assistant_model=drafter, max_new_tokens=40)
    finally:
        torch.distributed.destroy_process_group()

    assert set(handed(drafter)[:-5]) == {4}


def test_users_get_automatic_lengths_unless_they_say_otherwise(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(CarryoverDrafterModel, "draft_length", DEFAULT_DRAFT_LENGTH)
    drafter = make_drafter()
    drafter.timings = {0: 1.0, 4: 9.0}
    text = plain(pair[0], input_ids=prompt(), assistant_model=drafter)

    assert drafter.draft_length == "auto"
    assert torch.equal(text, plain(pair[0], input_ids=prompt()))
    assert handed(drafter).count(0) > 0.8 * len(handed(drafter))


def test_greedy_calls_learn_from_each_other_how_long_rounds_take(pair):
    target, make = pair
    drafter = make([2])

    plain(target, input_ids=prompt(), assistant_model=drafter)
    first = handed(drafter)
    drafter.follow(plain(target, input_ids=prompt(), max_new_tokens=80), [2])
    plain(target, input_ids=prompt(), assistant_model=drafter)

    assert first[:9] == [4, 4, 0, 1, 2, 4, 0, 1, 2]  # the first round reads the whole prompt: its time says nothing
    assert handed(drafter)[:9] != first[:9]


def test_a_prior_sets_where_a_call_starts(pair):
    target, make = pair
    drafter = make([4])
    drafter.timings = dict(enumerate([1.0, 1.4, 1.5, 1.6, 1.7]))
    drafter.acceptance_prior = [0.95] * 4

    plain(target, input_ids=prompt(), assistant_model=drafter)
    eager = handed(drafter)[0]
    drafter.follow(plain(target, input_ids=prompt(), max_new_tokens=80), [4])
    drafter.acceptance_prior = [0.05] * 4
    plain(target, input_ids=prompt(), assistant_model=drafter)

    assert eager == 4
    assert handed(drafter)[0] == 0


def test_a_wrong_draft_length_is_told():
    drafter = make_drafter()
    drafter.draft_length = "automatic"

    with pytest.raises(
        ValueError, match=r"must be None \(all drafts\), 'auto' or an integer from 1 on, got 'automatic'"
    ):
        plain(make_target(), input_ids=prompt(), assistant_model=drafter)


class LooksAtTheToken(CarryoverCandidateGenerator):
    """Hands over no draft after a 1: a rule that must not be."""

    def get_candidates(self, input_ids, **kwargs):
        candidates, logits = super().get_candidates(input_ids, **kwargs)
        drafts = candidates[0, input_ids.shape[1] :].tolist()
        if 1 not in drafts:
            return candidates, logits
        keep = drafts.index(1)
        return candidates[:, : input_ids.shape[1] + keep], logits[:, :keep] if keep else None


@pytest.mark.parametrize("kind", ["dflash", "markov-rnn"])
@pytest.mark.parametrize("generator", [CarryoverCandidateGenerator, LooksAtTheToken], ids=["ours", "looking"])
def test_sampled_text_follows_the_targets_law_unless_a_rule_looks_at_the_drafted_token(kind, generator, monkeypatch):
    target = make_target(vocab_size=3, num_hidden_layers=3, initializer_range=0.1)
    small = {"vocab_size": 3, "mask_token_id": 2, "target_layer_ids": [0], "initializer_range": 0.1}
    drafter = make_drafter(kind, block_size=2 + (kind == "dflash"), **small)
    drafter.draft_length, drafter.timings = "auto", {0: 1.0, 1: 1.45, 2: 1.68}
    ids, lengths = torch.tensor([[0, 1, 1, 2]]), set()
    monkeypatch.setattr("hf_carryover.decoding.CarryoverCandidateGenerator", generator)

    def sample():
        out = plain(target, input_ids=ids, assistant_model=drafter, do_sample=True, max_new_tokens=4)
        lengths.add(tuple(handed(drafter)))
        return tuple(out[0, 4:].tolist())

    found = distance(Tree(monkeypatch).run(sample), law_of_target(target, ids, 4))

    assert (found < 1e-6) == (generator is CarryoverCandidateGenerator)
    assert {0, 2} <= {length for call in lengths for length in call}


class Words(torch.nn.Linear):
    """A confidence head that is sure or not, as a sign says: of the slot, or of the embedding of the token before."""

    def forward(self, hidden):
        return 6 * torch.sign(hidden[..., :1] if self.in_features == 32 else hidden[..., -1:])


@pytest.mark.parametrize(
    ("kind", "reads"), [("dflash", False), ("markov-vanilla", True), ("markov-rnn", True)], ids=str
)
def test_sampled_text_follows_the_targets_law_where_a_confidence_head_ends_blocks(kind, reads, monkeypatch):
    target = make_target(vocab_size=3, num_hidden_layers=3, initializer_range=0.1)
    small = {"vocab_size": 3, "mask_token_id": 2, "target_layer_ids": [0], "initializer_range": 0.1}
    drafter = make_drafter(
        kind,
        block_size=2 + (kind == "dflash"),
        enable_confidence_head=True,
        confidence_head_with_markov=reads,
        **small,
    )
    drafter.confidence_head["proj"] = Words(drafter.confidence_head["proj"].in_features, 1)
    if reads:
        drafter.markov_head.markov_w1.weight.data[:, -1] = torch.tensor([1.0, -1.0, 1.0])
    drafter.draft_length, drafter.timings = "auto", {0: 1.0, 1: 1.2, 2: 1.3}
    ids, lengths = torch.tensor([[0, 1, 1, 2]]), set()

    def sample():
        out = plain(target, input_ids=ids, assistant_model=drafter, do_sample=True, max_new_tokens=4)
        lengths.update(len(r.drafts) for r in drafter.last_stats.rounds[:1])
        return tuple(out[0, 4:].tolist())

    assert distance(Tree(monkeypatch).run(sample), law_of_target(target, ids, 4)) < 1e-6
    assert lengths == ({1, 2} if reads else {1})


def test_a_confidence_head_that_is_not_used_changes_nothing(pair):
    target, _ = pair
    drafters = [make_drafter(enable_confidence_head=heads) for heads in (False, True)]
    drafters[1].load_state_dict(drafters[0].state_dict(), strict=False)

    texts = [plain(target, input_ids=prompt(), assistant_model=drafter, max_new_tokens=20) for drafter in drafters]

    assert torch.equal(*texts)
    assert handed(drafters[0]) == handed(drafters[1])

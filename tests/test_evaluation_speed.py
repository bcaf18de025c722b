from collections import Counter

import pytest

from hf_carryover.evaluation import speed, visits
from hf_carryover.evaluation.matched import Matched
from hf_carryover.evaluation.runs import Run, decoding_options, systems_for
from hf_carryover.evaluation.speed import (
    run_in_turn,
    summarize_ratio,
    summarize_rounds,
    summarize_speed,
    warm_up,
)
from hf_carryover.evaluation.visits import Step, visit
from tests.fakes import make_drafter, make_target, prompt


def timed(seconds, *, tokens=(2, 2), prompt_seconds=0.0, verify=0.1, draft=0.0, recycle=0.0):
    return Run(
        [0] * (1 + sum(tokens)), list(tokens), [3] * len(tokens), seconds, prompt_seconds, verify, draft, recycle
    )


def test_order_rotates_so_that_each_system_runs_in_every_place_once(monkeypatch):
    systems, places = systems_for(make_target(), make_drafter(), None), Counter()
    monkeypatch.setattr(speed, "run", lambda system, *args, **kwargs: order.append(system.name))

    for turn in range(len(systems)):
        order = []
        run_in_turn(systems, None, None, turn=turn, seed=0)
        places.update(enumerate(order))

    assert len(places) == len(systems) ** 2
    assert set(places.values()) == {1}


def test_speed_is_the_median_over_prompts_of_each_prompts_median_ratio():
    plain = [[timed(4.0), timed(9.0), timed(4.0)], *[[timed(10.0)] * 3] * 4, *[[timed(1.0)] * 3] * 4]
    system = [[timed(2.0), timed(1.0), timed(1.0)], *[[timed(2.0)] * 3] * 4, *[[timed(1.0)] * 3] * 4]  # 2 9 4; 5; 1

    found = summarize_ratio(system, plain)

    assert (found["prompts"], found["ratio"]) == (9, 4.0)
    assert found["interval"] == [1.0, 5.0]


def test_speed_is_per_token_where_texts_differ_in_length():
    found = summarize_ratio([[timed(1.0, tokens=(4, 5))]], [[timed(1.0, tokens=(4,))]])

    assert (found["ratio"], found["interval"]) == (2.0, None)


def test_time_split_and_limits_follow_from_the_same_runs():
    # After the prompt, plain takes 1 s for 10 tokens; ours takes 0.2 s for each of 4 rounds, which give 10 tokens too.
    plain = timed(3.0, tokens=[1] * 10, prompt_seconds=2.0)
    ours = timed(2.8, tokens=(2, 2, 3, 3), prompt_seconds=2.0, verify=0.4, draft=0.2, recycle=0.04)

    found = summarize_rounds([ours], [plain])

    assert found == pytest.approx(
        {
            "draft": 0.05,
            "recycle": 0.01,
            "verify": 0.1,
            "loop": 0.04,
            "one_token": 0.1,
            "limit": 2.5 * 0.1 / 0.15,
            "limit_free_drafter": 2.5 * 0.1 / 0.1,
            "reached": 2.5 * 0.1 / 0.2,
            "share_of_limit": 0.15 / 0.2,
        }
    )
    assert found["reached"] / found["limit"] == pytest.approx(found["share_of_limit"])


def test_no_rounds_give_no_time_split():
    assert summarize_rounds([timed(1.0, tokens=())], [timed(1.0)]) is None


def test_carry_on_is_compared_with_off_and_control_and_everything_with_plain():
    runs = {"plain": 8.0, "lookup": 4.0, "carry-off": 4.0, "carry-on": 2.0, "control": 6.0, "carry-auto": 2.0}

    found = summarize_speed([{name: [timed(seconds)] for name, seconds in runs.items()}])

    assert {name: ratio["ratio"] for name, ratio in found["to_plain"].items()} == pytest.approx(
        {"plain": 1.0, "lookup": 2.0, "carry-off": 2.0, "carry-on": 4.0, "control": 8 / 6, "carry-auto": 4.0}
    )
    assert {name: ratio["ratio"] for name, ratio in found["carry_on_to"].items()} == pytest.approx(
        {"carry-off": 2.0, "control": 3.0}
    )
    assert list(found["rounds"]) == ["carry-off", "carry-on", "control", "carry-auto"]


def test_automatic_lengths_stand_beside_the_best_fixed_one():
    seconds = {"plain": 8.0, "carry-off": 5.0, "carry-on": 8.0, "carry-1": 5.0, "carry-2": 4.0, "carry-auto": 3.2}
    runs = {name: timed(spent) for name, spent in seconds.items()}
    runs["carry-auto"].drafts = [0, 2]

    found = summarize_speed([{name: [run] for name, run in runs.items()}])["lengths"]

    assert found["best_fixed"] == "carry-2"
    assert {name: ratio["ratio"] for name, ratio in found["auto_to"].items()} == pytest.approx(
        {"carry-on": 8 / 3.2, "carry-1": 5 / 3.2, "carry-2": 4 / 3.2}
    )
    assert found["systems"]["carry-auto"] == {"drafts_a_round": 1.0, "plain_rounds": 0.5}


def test_warm_up_runs_every_system_on_a_few_tokens(monkeypatch):
    seen = []
    monkeypatch.setattr(speed, "run", lambda s, *args, max_new_tokens, **kwargs: seen.append((s.name, max_new_tokens)))

    warm_up(systems_for(make_target(), make_drafter(), None), None, None, max_new_tokens=64)

    assert seen == [(name, 8) for name in ("plain", "lookup", "library-dflash", "carry-off", "carry-on", "carry-auto")]


def step_of(**changes):
    fields = {"set": "s", "number": 0, "prompt": prompt(), "temperature": 0.0, "timed": True, "max_new_tokens": 8}
    return Step(**(fields | {"repeats": 2, "seed": 0} | changes))


@pytest.fixture
def slow_probe(monkeypatch):
    """Extra passes that take forever: no time that is reported may be theirs."""
    forever = timed(1e9)
    monkeypatch.setattr(visits, "run_matched", lambda *args, **kwargs: (forever, Matched()))
    return forever


def test_extra_passes_are_outside_the_timed_part(slow_probe):
    target, drafter = make_target(), make_drafter()
    plain, _, _, *ours = systems_for(target, drafter, None)
    passes = []
    drafter.register_forward_pre_hook(lambda module, args: passes.append(1))

    found = visit(step_of(), [plain, *ours], target, turn=0)

    assert all(run.seconds < 1e9 for runs in found.runs.values() for run in runs)
    rounds_that_draft = sum(drafts > 0 for system in ours for run in found.runs[system.name] for drafts in run.drafts)
    assert len(passes) == rounds_that_draft


@pytest.fixture
def tiny():
    target = make_target()
    return systems_for(target, make_drafter(), None), target


def test_a_prompt_that_is_not_timed_runs_each_system_once(slow_probe, tiny):
    found = visit(step_of(timed=False), *tiny, turn=0)

    assert {len(runs) for runs in found.runs.values()} == {1}
    assert found.runs["carry-on"] == [slow_probe]


def test_sampling_has_no_matched_anchors_and_no_differences(tiny):
    found = visit(step_of(timed=False, temperature=1.0), *tiny, turn=0)

    assert (found.matched, found.differences, len(found.runs)) == (None, [], 2)  # carry off and on


def test_what_is_there_for_its_speed_runs_where_time_is_taken_alone():
    target = make_target()
    systems = systems_for(target, make_drafter(), None, [1])

    timed, other = (visit(step_of(timed=is_timed), systems, target, turn=0) for is_timed in (True, False))

    assert timed.runs.keys() - other.runs.keys() == {"lookup", "library-dflash", "carry-auto", "carry-1"}


def test_sampling_repeats_with_other_seeds_and_the_same_for_every_system(tiny):
    found = visit(step_of(temperature=1.0), *tiny, turn=0)
    again = visit(step_of(temperature=1.0), *tiny, turn=1)

    assert found.runs["plain"][0].ids != found.runs["plain"][1].ids
    assert [r.ids for r in found.runs["carry-on"]] == [r.ids for r in again.runs["carry-on"]]


def test_decoding_has_no_penalties_and_no_cuts():
    assert decoding_options(0.0, 5) == {"max_new_tokens": 5, "repetition_penalty": 1.0, "do_sample": False}
    assert (
        decoding_options(0.7, 5).items() >= {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}.items()
    )

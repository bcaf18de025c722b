import pytest
import torch

from hf_carryover.evaluation.runs import decoding_options, run, systems_for
from tests.fakes import KINDS, TARGETS, make_drafter, make_target, prompt

GREEDY = decoding_options(0.0, 14)


def runs_of(target, drafter, ids=None, decoding=GREEDY):
    ids = prompt() if ids is None else ids
    return {s.name: run(s, target, ids, seed=0, **decoding) for s in systems_for(target, drafter, None)}


@pytest.mark.parametrize("target_kind", TARGETS)
def test_every_system_writes_the_same_text_and_its_rounds_add_up_to_it(target_kind):
    runs = runs_of(make_target(target_kind), make_drafter())

    assert {tuple(r.ids) for r in runs.values()} == {tuple(runs["plain"].ids)}
    for found in runs.values():
        assert len(found.ids) - sum(found.tokens) >= 1  # of the prompt's pass
        assert all(1 <= kept <= drafts + 1 for kept, drafts in zip(found.tokens, found.drafts, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_counted_at_the_target_are_those_that_the_drafter_reports(kind, temperature):
    target, drafter = make_target(), make_drafter(kind)
    system = next(s for s in systems_for(target, drafter, None) if s.name == "carry-on")

    found = run(system, target, prompt(), seed=3, **decoding_options(temperature, 20))

    assert found.tokens == [r.num_accepted + 1 for r in drafter.last_stats.rounds]
    assert found.drafts == [len(r.drafts) for r in drafter.last_stats.rounds]
    assert len(found.ids) - sum(found.tokens) == 1


def test_plain_generate_has_a_token_a_round():
    found = runs_of(make_target(), make_drafter())["plain"]

    assert (found.tokens, found.drafts) == ([1] * 13, [0] * 13)


def test_tokens_that_lookup_gains_in_the_prompts_pass_belong_to_no_round():
    target = make_target()
    torch.nn.init.zeros_(target.lm_head.weight)  # every token is token 0
    ids = torch.zeros(1, 6, dtype=torch.long)

    found = runs_of(target, make_drafter(), ids)["lookup"]

    assert found.ids == [0] * 14
    assert sum(found.tokens) < 13


def test_parts_of_the_time_fit_into_the_whole():
    for found in runs_of(make_target(), make_drafter()).values():
        parts = found.prompt_seconds + found.verify_seconds + found.draft_seconds + found.recycle_seconds
        assert 0 < found.prompt_seconds < parts < found.seconds


@pytest.mark.parametrize("setting", [None, True, False])
def test_target_and_drafter_are_left_as_they_were(setting):
    target, drafter = make_target(), make_drafter()
    drafter._carry_enabled = setting

    runs_of(target, drafter)

    assert drafter._carry_enabled is setting
    assert not target._forward_hooks
    assert not target._forward_pre_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_the_librarys_generator_is_compared_where_the_layout_allows(kind):
    names = [system.name for system in systems_for(make_target(), make_drafter(kind), make_drafter(kind))]

    assert ("library-dflash" in names) == (kind == "dflash")
    assert (names[:2], names[-4:]) == (["plain", "lookup"], ["carry-off", "carry-on", "control", "carry-auto"])


def test_fixed_draft_lengths_are_compared_where_they_are_fewer_than_all():
    drafter = make_drafter()

    systems = systems_for(make_target(), drafter, None, [9, 2, 1, 2])

    lengths = {system.name: system.draft_length for system in systems[3:]}
    assert lengths == {"carry-off": None, "carry-on": None, "carry-auto": "auto", "carry-1": 1, "carry-2": 2}


def test_drafts_are_capped_as_the_user_says_and_the_setting_stays():
    target, drafter = make_target(), make_drafter()
    drafter.draft_length = 2

    found = runs_of(target, drafter)

    assert {max(found[name].drafts) for name in ("carry-off", "carry-on")} == {2}
    assert drafter.draft_length == 2


def test_the_librarys_generator_is_left_out_for_a_target_without_positions():
    names = [system.name for system in systems_for(make_target("bloom"), make_drafter(), None)]

    assert names == ["plain", "lookup", "carry-off", "carry-on", "carry-auto"]


def test_carry_is_on_where_the_name_says_so():
    target, drafter, control = make_target(), make_drafter(), make_drafter(seed=2)
    systems = systems_for(target, drafter, control)
    carried = {}

    for system in systems:
        run(system, target, prompt(), seed=0, **GREEDY)
        if system.drafter is not None:
            carried[system.name] = system.drafter.last_stats.carried_rows > 0

    assert carried == {"carry-off": False, "carry-on": True, "control": False, "carry-auto": True}

import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import BloomConfig, GPT2Config

from hf_carryover.evaluation import EvaluationArguments, evaluate, machine, plots, problems, protocol, visits
from hf_carryover.evaluation.plan import context_length
from tests.evaluation_fakes import make_tokenizer, write_prompts
from tests.fakes import make_drafter, make_target

QUICK = {"max_new_tokens": 4, "prompts_per_set": (2,), "timed_per_set": 1}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """They are drawn in `test_evaluation_plots.py`; here they would only take time."""
    monkeypatch.setattr(plots, "draw_plots", lambda summary, out: None)


@pytest.fixture
def models():
    return make_target(), make_tokenizer(), make_drafter()


@pytest.fixture
def three_prompts(tmp_path):
    return write_prompts(tmp_path / "three.jsonl", ["1 2 3", "4 5 6", "7 8 9"])


def measure(models, sets, out, *, control=None, console=None, **changes):
    arguments = EvaluationArguments(**(QUICK | changes))
    return evaluate(*models, prompts=sets, out=out, control=control, arguments=arguments, console=console)


@pytest.fixture
def visited(monkeypatch):
    """Counts visits; `stop_at` interrupts the one of that number."""
    original, numbers = protocol.visit, []

    def visit(step, *args, **kwargs):
        if len(numbers) == visit.stop_at:
            raise KeyboardInterrupt
        numbers.append(step.number)
        return original(step, *args, **kwargs)

    visit.stop_at, visit.numbers = None, numbers
    monkeypatch.setattr(protocol, "visit", visit)
    return visit


def interrupt(visited, models, sets, out, **changes):
    """Start an evaluation and stop it in its second visit."""
    visited.stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        measure(models, sets, out, **changes)
    visited.stop_at = None
    visited.numbers.clear()


def test_the_same_call_goes_on_where_it_was_interrupted(tmp_path, models, three_prompts, visited):
    interrupt(visited, models, [three_prompts], tmp_path)

    summary = measure(models, [three_prompts], tmp_path)

    assert visited.numbers == [1]
    assert [row["number"] for row in summary["prompts"]] == [0, 1]


def test_a_call_for_more_prompts_measures_those_alone(tmp_path, models, visited):
    prompts = write_prompts(tmp_path / "four.jsonl", ["1 2 3", "4 5 6", "7 8 9", "3 2 1"])
    few = measure(models, [prompts], tmp_path / "few", prompts_per_set=(2,))["prompts"]
    visited.numbers.clear()

    more = measure(models, [prompts], tmp_path / "few", prompts_per_set=(4,))["prompts"]

    assert visited.numbers == [1, 3]
    assert [row["number"] for row in more] == [0, 1, 2, 3]
    assert [row["runs"] for row in few] == [more[0]["runs"], more[2]["runs"]]


def test_what_is_measured_waits_for_a_set_that_has_failed(tmp_path, models, three_prompts, visited):
    later = tmp_path / "later.jsonl"
    measure(models, [three_prompts, later], tmp_path)
    visited.numbers.clear()

    summary = measure(models, [three_prompts, write_prompts(later, ["1 2 3"])], tmp_path)

    assert (visited.numbers, summary["failed_sets"]) == ([0], {})


def test_a_line_that_was_cut_off_is_measured_again(tmp_path, models, three_prompts, visited):
    interrupt(visited, models, [three_prompts], tmp_path)
    kept = tmp_path / "visits.jsonl"
    kept.write_text(kept.read_text() + kept.read_text()[:50])

    summary = measure(models, [three_prompts], tmp_path)

    assert (visited.numbers, len(summary["prompts"])) == ([1], 2)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"max_new_tokens": 5}, id="new-tokens"),
        pytest.param({"temperatures": (0.5,)}, id="temperature"),
        pytest.param({"repeats": 2}, id="repeats"),
        pytest.param({"seed": 1}, id="seed"),
        pytest.param({"raw": True}, id="raw"),
        pytest.param({"control": make_drafter(seed=7)}, id="a-control"),
    ],
)
def test_other_settings_do_not_reuse_what_is_left(tmp_path, models, three_prompts, visited, changes):
    interrupt(visited, models, [three_prompts], tmp_path)

    measure(models, [three_prompts], tmp_path, **changes)

    assert visited.numbers == [0, 1]


def test_another_drafter_of_the_same_name_does_not_reuse_what_is_left(tmp_path, models, three_prompts, visited):
    interrupt(visited, models, [three_prompts], tmp_path)

    measure((*models[:2], make_drafter(seed=9)), [three_prompts], tmp_path)

    assert visited.numbers == [0, 1]


def test_another_draft_length_does_not_reuse_what_is_left(tmp_path, models, three_prompts, visited):
    interrupt(visited, models, [three_prompts], tmp_path)
    models[2].draft_length = 2

    summary = measure(models, [three_prompts], tmp_path)

    assert (visited.numbers, summary["models"]["drafter"]["drafts_a_round"]) == ([0, 1], 2)


def test_timed_visits_start_with_each_system_in_turn_at_every_temperature(tmp_path, models, monkeypatch):
    prompts = write_prompts(tmp_path / "many.jsonl", [f"{i} 2 3" for i in range(1, 17)])
    starts, original = {0.0: [], 1.0: []}, visits.run_in_turn

    def run_in_turn(systems, target, ids, **options):
        order = original(systems, target, ids, **options)
        if any(system.name == "lookup" for system in systems):  # a timed visit has all
            starts[options.get("temperature", 0.0)].append(next(iter(order)))
        return order

    monkeypatch.setattr(visits, "run_in_turn", run_in_turn)
    measure(
        models, [prompts], tmp_path / "out",
        temperatures=(0.0, 1.0), prompts_per_set=(16, 8), timed_per_set=8, draft_lengths=(1, 2), max_new_tokens=2,
    )  # fmt: skip

    assert [len(found) for found in starts.values()] == [8, 8]
    assert [len(set(found)) for found in starts.values()] == [8, 8]  # of eight systems


def test_another_generation_config_or_code_does_not_reuse_what_is_left(
    tmp_path, models, three_prompts, visited, monkeypatch
):
    interrupt(visited, models, [three_prompts], tmp_path)
    models[0].generation_config.suppress_tokens = [5]
    measure(models, [three_prompts], tmp_path)
    assert visited.numbers == [0, 1]

    visited.numbers.clear()
    monkeypatch.setattr(machine, "_source", lambda: "other")
    measure(models, [three_prompts], tmp_path)

    assert visited.numbers == [0, 1]


def test_the_context_is_known_by_its_older_names(models):
    target = SimpleNamespace(config=GPT2Config(n_positions=64))

    assert context_length(target) == 64
    assert context_length(SimpleNamespace(config=BloomConfig())) is None  # it has no positions


def test_nothing_is_called_exact_where_no_text_was_compared(tmp_path, models, three_prompts):
    summary = measure(models, [three_prompts], tmp_path, temperatures=(1.0,))

    assert summary["exactness"]["passed"] is None
    assert problems(summary) == []
    assert "Not checked: of 0 greedy texts" in (tmp_path / "report.md").read_text()


def test_a_set_whose_turns_the_template_refuses_fails_alone(tmp_path, models, three_prompts):
    models[1].chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}59"
    told = tmp_path / "told.jsonl"
    told.write_text(json.dumps({"messages": [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]}))

    summary = measure(models, [told, three_prompts], tmp_path / "out")

    assert list(summary["failed_sets"]) == [str(told)]
    assert "template takes, found ['system', 'user']: no system" in summary["failed_sets"][str(told)]


def test_sets_that_fail_are_told_in_a_sentence_and_the_others_run(tmp_path, models, three_prompts):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "odd.jsonl").write_text('{"text": "1 2"}\n')
    (tmp_path / "more").mkdir()
    long = write_prompts(tmp_path / "long.jsonl", ["1 " * 600])
    again = write_prompts(tmp_path / "more" / "three.jsonl", ["1 2 3"])
    pooled = write_prompts(tmp_path / "all.jsonl", ["1 2 3"])
    sets = [
        tmp_path / "none.jsonl",
        tmp_path / "empty.jsonl",
        tmp_path / "odd.jsonl",
        long,
        three_prompts,
        again,
        pooled,
    ]

    shown = io.StringIO()
    console = Console(file=shown, width=10_000)
    summary = measure(models, sets, tmp_path / "out", console=console)

    expected = {
        tmp_path / "none.jsonl": "found no .*none.jsonl; check the path",
        tmp_path / "empty.jsonl": "Expected at least one prompt in .*empty.jsonl",
        tmp_path / "odd.jsonl": "Expected `turns`, `prompt` or `messages` in line 1 of .*odd.jsonl",
        long: "Expected a prompt of at most 508 tokens in `long`, found none; shorten them",
        again: "Expected a set with a new name, but .*three.jsonl is another `three`; rename it",
        pooled: "Expected a set with a new name, but .*all.jsonl is another `all`; rename it",
    }
    assert list(summary["failed_sets"]) == [str(path) for path in expected]
    for path, sentence in expected.items():
        with pytest.raises(ValueError, match=sentence):
            raise ValueError(summary["failed_sets"][str(path)])
    assert {row["set"] for row in summary["results"]} == {"three", "all"}
    assert problems(summary) == list(summary["failed_sets"].values())
    told, _ = shown.getvalue().split("left", 1)  # the progress bar: before anything is measured
    assert all(sentence in told for sentence in problems(summary))
    assert "**Not measured:** " + problems(summary)[0] in (tmp_path / "out" / "report.md").read_text()


def test_a_prompt_that_is_too_long_is_left_out_with_a_note(tmp_path, models):
    path = write_prompts(tmp_path / "mixed.jsonl", ["1 2 3", "1 " * 600, "4 5 6"])

    summary = measure(models, [path], tmp_path, prompts_per_set=(3,))

    assert summary["notes"][:1] == [
        "A prompt of `mixed` is left out: it has 601 tokens, but the target's context has room for 508 beside 4 new "
        "ones; shorten it or ask for fewer."
    ]
    assert [row["number"] for row in summary["prompts"]] == [0, 1]
    assert summary["failed_sets"] == {}


def test_a_drafter_that_was_not_trained_to_carry_has_a_note(tmp_path, models, three_prompts):
    torch.nn.init.zeros_(models[2].carry_embedding)

    summary = measure(models, [three_prompts], tmp_path)

    assert summary["notes"][-1:] == [
        "The carry embedding is zero: the drafter was not trained to read the rows that carry-on shows it."
    ]


def test_no_set_at_all_is_an_error_that_says_why(tmp_path, models):
    with pytest.raises(ValueError, match=r"at least one set that can be measured, found none. .*none.jsonl; check"):
        measure(models, [tmp_path / "none.jsonl"], tmp_path)


def test_a_drafter_for_another_target_is_refused_before_anything_runs(tmp_path, models, three_prompts, visited):
    other = make_drafter(vocab_size=99, mask_token_id=98)

    with pytest.raises(ValueError, match="expects vocabulary size 99"):
        measure(models, [three_prompts], tmp_path, control=other)

    assert visited.numbers == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompts_per_set": (1, 2)}, "`prompts_per_set` must be one number or one for each of the 1 temp"),
        ({"prompts_per_set": (0,)}, "`prompts_per_set` must be at least 1, got 0"),
        ({"timed_per_set": 0}, "`timed_per_set` must be at least 1, got 0"),
        ({"max_new_tokens": 1}, "`max_new_tokens` must be at least 2, got 1"),
        ({"repeats": 0}, "`repeats` must be at least 1, got 0"),
        ({"temperatures": (-1.0,)}, r"`temperatures` must be numbers from 0 on, at least one, got \[-1.0\]"),
    ],
)
def test_settings_that_make_no_sense_are_told_in_a_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        EvaluationArguments(**changes)


def test_temperatures_have_prompts_of_their_own_number(tmp_path, models, three_prompts):
    summary = measure(models, [three_prompts], tmp_path, temperatures=(0.0, 1.0), prompts_per_set=(3, 2))

    assert [(row["temperature"], row["number"], row["timed"]) for row in summary["prompts"]] == [
        (0.0, 0, True), (0.0, 1, False), (0.0, 2, False), (1.0, 0, True), (1.0, 1, False),
    ]  # fmt: skip
    assert {row["temperature"] for row in summary["results"]} == {0.0, 1.0}


def test_report_says_what_a_number_is_worth_nothing_without(tmp_path, models, three_prompts, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.delenv("LD_PRELOAD", raising=False)

    measure(models, [three_prompts], tmp_path)

    found = json.loads((tmp_path / "evaluation.json").read_text())

    for name in ("command", "date", "commit", "device", "threads", "dtype", "attention", "platform", "arguments"):
        assert name in found
    assert found["versions"].keys() == {"python", "hf-carryover", "torch", "transformers"}
    assert found["prompts"][0]["runs"]["carry-on"][0]["new_tokens"] == 4
    assert found["models"].keys() == {"target", "drafter"}
    assert found["environment"] == {"MKL_CBWR": "AVX2"}
    assert "| environment | `{'MKL_CBWR': 'AVX2'}` |" in (tmp_path / "report.md").read_text()
    # All eight ways beside plain on the timed prompt, carry off and on on the other.
    assert found["exactness"] == {"texts": 8 + 2, "differences": [], "passed": True}


def test_text_that_is_not_the_targets_own_fails(tmp_path, models, three_prompts, monkeypatch):
    target, _, drafter = models
    generate = target.generate

    def broken(**kwargs):
        text = generate(**kwargs)
        if kwargs.get("assistant_model") is drafter and drafter.carry_enabled:
            text[0, -1] = (text[0, -1] + 1) % 50
        return text

    monkeypatch.setattr(target, "generate", broken)
    summary = measure(models, [three_prompts], tmp_path)

    assert not summary["exactness"]["passed"]
    assert {row["system"] for row in summary["exactness"]["differences"]} >= {"carry-on"}
    assert "does not explain it" in problems(summary)[0]
    assert "**Failed**" in (tmp_path / "report.md").read_text()


def test_sampling_measures_its_timings_before_anything_counts(tmp_path, models, three_prompts, monkeypatch):
    """They are measured in a call of their own, which must not be taken for the one that is watched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))

    summary = measure(models, [three_prompts], tmp_path / "out", temperatures=(0.0, 1.0))

    assert len(list((tmp_path / "assets").rglob("*.json"))) == 1
    rows = [row for row in summary["results"] if row["system"] == "carry-auto"]
    assert all(0 < row["rounds"] <= row["tokens"] for row in rows)


def test_progress_shows_the_set_and_the_count(tmp_path, models, three_prompts):
    console = Console(record=True, width=100)

    arguments = EvaluationArguments(**QUICK)
    evaluate(*models, prompts=[three_prompts], out=tmp_path, arguments=arguments, console=console)

    assert "three" in console.export_text(clear=False)
    assert "2/2" in console.export_text()


def test_missing_matplotlib_names_its_pip_command(tmp_path, models, three_prompts, monkeypatch, visited):
    monkeypatch.setitem(sys.modules, "hf_carryover.evaluation.plots", None)

    with pytest.raises(ImportError, match="matplotlib, which is missing; pip install matplotlib"):
        measure(models, [three_prompts], tmp_path)

    assert visited.numbers == []

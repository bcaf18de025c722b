import json
from dataclasses import replace

import numpy as np
import pytest

from hf_carryover.evaluation import EvaluationArguments, evaluate, results_table
from hf_carryover.evaluation.acceptance import (
    FEWEST,
    _tokens_a_round,
    bootstrap_interval,
    summarize_acceptance,
    summarize_difference,
)
from hf_carryover.evaluation.runs import Run
from hf_carryover.evaluation.summary import summarize
from hf_carryover.evaluation.visits import Visit
from tests.evaluation_fakes import make_tokenizer, script, write_prompts
from tests.fakes import ScriptedDrafter, make_drafter, make_target

# Right drafts a round, for each prompt's first word, with carry on and off. Of 13 new tokens the prompt's pass gives
# one; a round adds its right drafts and the target's own token, and drafts no more than the length left takes.
COUNTS = {
    "1": {True: [3], False: [2]},  # on: 4 + 4 + 4 tokens; off: four rounds of 3
    "2": {True: [2, 0, 2, 0, 2, 0], False: [0]},  # on: 3 + 1 + 3 + 1 + 3 + 1; off: 12 rounds of 1
    "3": {True: [1], False: [1]},  # six rounds of 2, both
}


SYSTEMS = ["plain", "lookup", "library-dflash", "carry-off", "carry-on", "carry-auto", "carry-1"]


def made_of(tokens):
    return Run(ids=[0] * (1 + sum(tokens)), tokens=tokens, drafts=[4] * len(tokens), seconds=1, prompt_seconds=0,
               verify_seconds=0)  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two sets, of two prompts and of one, evaluated with a drafter whose right drafts are known."""
    out = tmp_path_factory.mktemp("report")
    target, drafter = make_target(), make_drafter(cls=ScriptedDrafter)
    sets = [
        write_prompts(out / "pair.jsonl", ["1 7 8 9", "2 7 8 9"]),
        write_prompts(out / "single.jsonl", ["3 7 8 9"]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        script(patch, target, drafter, lambda ids, carry: COUNTS[str(ids[0, 1].item())][carry])
        arguments = EvaluationArguments(max_new_tokens=13, draft_lengths=(1, 9))
        summary = evaluate(target, make_tokenizer(), drafter, prompts=sets, out=out, arguments=arguments)
    assert json.loads((out / "evaluation.json").read_text())["results"] == summary["results"]
    return summary, (out / "report.md").read_text()


def row_of(rows, **wanted):
    (found,) = [row for row in rows if wanted.items() <= row.items()]
    return found


@pytest.mark.parametrize(
    ("name", "system", "rounds", "tokens"),
    [
        ("pair", "carry-on", 9, 24),
        ("pair", "carry-off", 16, 24),
        ("single", "carry-on", 6, 12),
        ("single", "carry-off", 6, 12),
        ("all", "carry-on", 15, 36),
        ("all", "carry-off", 22, 36),
        ("all", "plain", 36, 36),
    ],
)
def test_report_shows_the_scripts_rounds_and_accepted_length(report, name, system, rounds, tokens):
    summary, text = report

    row = row_of(summary["results"], set=name, system=system)

    assert (row["rounds"], row["tokens"], row["accepted_length"]) == (rounds, tokens, tokens / rounds)
    assert f"{tokens / rounds:.3f}" in next(line for line in text.splitlines() if line.startswith(f"| {name} |"))


def test_accepted_drafts_are_the_length_without_the_targets_own_token(report):
    row = row_of(report[0]["acceptance"], set="all", system="carry-on")

    assert row["accepted_drafts"] == pytest.approx((36 - 15) / 15)


def test_report_shows_the_scripts_histogram(report):
    summary, text = report

    histograms = {r["system"]: r["histogram"] for r in summary["acceptance"] if r["set"] == "all"}

    assert histograms["carry-on"] == [3, 6, 3, 3, 0]
    assert histograms["carry-off"] == [12, 6, 4, 0, 0]
    assert "| carry-on | 3 | 15 | 1.400 | 3 | 6 | 3 | 3 | 0 |" in text


def test_report_shows_the_scripts_acceptance_by_position(report):
    # The length left caps drafts: 14 of 15 rounds verify a first draft, 13 a second and a third, 10 a fourth.
    row = row_of(report[0]["acceptance"], set="all", system="carry-on")

    assert row["acceptance_by_position"] == pytest.approx([12 / 14, 6 / 13, 3 / 13, 0])


def test_report_shows_the_known_difference(report):
    summary, text = report

    pair, pooled = (row_of(summary["differences"], set=name, minus="carry-off") for name in ("pair", "all"))

    assert pair["difference"] == pytest.approx(24 / 9 - 24 / 16)
    assert pooled["difference"] == pytest.approx(36 / 15 - 36 / 22)
    assert pair["interval"] is pooled["interval"] is None  # of two and three prompts
    assert f"carry-on minus carry-off | +{24 / 9 - 24 / 16:.3f}" in text


def test_a_set_of_few_prompts_has_no_interval_and_a_note(report):
    summary, text = report

    assert row_of(summary["results"], set="single", system="carry-on")["accepted_length_interval"] is None
    assert summary["notes"] == [
        f"Temperature 0: a set has {found}; an interval takes 8."
        for found in ("2 prompts", "2 timed prompts", "1 prompts", "1 timed prompts")
    ]
    assert all(note in text for note in summary["notes"])


def test_results_have_the_fields_that_cards_read(report):
    fields = ["set", "system", "temperature", "rounds", "tokens", "accepted_length", "accepted_length_interval",
              "speedup", "speedup_interval"]  # fmt: skip

    assert all(list(row) == fields for row in report[0]["results"])
    assert [(r["set"], r["system"]) for r in report[0]["results"]] == [
        (name, system) for name in ("pair", "single", "all") for system in SYSTEMS
    ]


def test_table_has_a_line_a_set_and_a_column_a_system(report):
    table = results_table(report[0])

    assert [column.header for column in table.columns][2:] == SYSTEMS[:-1]  # fixed draft lengths have their own table
    carry_on = table.columns[2 + SYSTEMS.index("carry-on")]
    assert [cell.split()[0] for cell in carry_on.cells] == ["2.67", "2.00", "2.40"]


def test_a_fixed_draft_length_cuts_the_scripts_drafts(report):
    # At most one draft a round: prompts 1 and 3 take six rounds of 2; prompt 2 three of 2 and six of 1.
    summary, text = report

    rows = {name: row_of(summary["results"], set="all", system=name) for name in ("carry-1", "carry-on")}
    lengths = row_of(summary["speed"], set="all")["lengths"]

    assert (rows["carry-1"]["rounds"], rows["carry-1"]["tokens"]) == (6 + 9 + 6, 36)
    assert lengths["systems"].keys() == {"carry-on", "carry-1", "carry-auto"}
    assert lengths["systems"]["carry-1"]["drafts_a_round"] <= 1 < lengths["systems"]["carry-on"]["drafts_a_round"]
    assert lengths["best_fixed"] in lengths["auto_to"].keys() == {"carry-on", "carry-1"}
    assert "| carry-auto |" in text


def test_no_rounds_give_zeros_not_errors():
    found = summarize_acceptance([made_of([]), made_of([])])

    assert (found["accepted_length"], found["accepted_drafts"], found["histogram"]) == (0.0, 0.0, [0])


def test_bootstrap_interval_covers_the_truth_in_about_95_of_100_samples():
    covered = 0
    for seed in range(200):
        rounds = np.random.default_rng(seed).integers(10, 40, size=40).astype(float)
        tokens = np.random.default_rng(seed + 1000).binomial(rounds.astype(int) * 4, 0.4).astype(float)
        low, high = bootstrap_interval(np.stack([tokens, rounds], axis=1), _tokens_a_round)
        covered += low <= 1.6 <= high

    assert 180 <= covered <= 199


def test_the_fewest_prompts_that_give_an_interval_are_covered_in_about_nine_of_ten_samples():
    """Of two prompts the interval is their range, which covers the median in half of all samples; so there is none."""
    for statistic in (np.mean, np.median):
        samples = np.random.default_rng(0).normal(size=(400, FEWEST, 1))
        found = [bootstrap_interval(rows, lambda drawn, of=statistic: of(drawn[..., 0], axis=-1)) for rows in samples]

        assert 0.87 <= np.mean([low <= 0 <= high for low, high in found]) <= 0.96

    assert bootstrap_interval(samples[0][1:], lambda drawn: np.median(drawn[..., 0], axis=-1)) is None


def test_paired_interval_is_narrower_than_prompts_differ():
    # Prompts range from 1 to 4 tokens a round; on each, one system has 4 tokens more in 20 rounds.
    runs = [made_of([n] * 16 + [n + 1] * 4) for n in (1, 2, 3, 4) * 3]
    others = [made_of([n] * 20) for n in (1, 2, 3, 4) * 3]

    found = summarize_difference(runs, others)

    assert found["difference"] == pytest.approx(0.2)
    assert found["interval"] == pytest.approx([0.2, 0.2])


def test_tables_say_which_systems_ran_on_fewer_prompts_and_compare_all_on_those():
    # Tokens a round of 3 on the timed prompt and of 1 on the other: a system that runs on the timed one alone has 3.0,
    # beside others with 1.5 of both; on the same prompt they are alike.
    def visit_of(number, tokens, names, temperature=0.0):
        runs = {name: [replace(made_of(tokens), verify_seconds=1)] for name in names}
        return Visit("set", number, temperature, len(names) == len(SYSTEMS), runs, matched=None, differences=[])

    few = ["plain", "lookup", "carry-off", "carry-on"]
    visits = [visit_of(0, [3], SYSTEMS), visit_of(1, [1, 1, 1], few)]
    sampled = [visit_of(0, [2], SYSTEMS, 1.0), visit_of(1, [1, 1], few, 1.0)]

    summary = summarize([*visits, *sampled])
    greedy_line, sampled_line = results_table(summary).caption.split("\n")

    assert [row["accepted_length"] for row in summary["results"] if row["set"] == "all"][1:4] == [1.5, 3, 1.5]
    assert greedy_line.startswith("T 0, library-dflash, carry-auto: on the timed prompts alone. There, all sets, ")
    assert "library-dflash 3.00, carry-off 3.00, carry-on 3.00, carry-auto 3.00" in greedy_line
    assert sampled_line.startswith("T 1, ")
    assert "carry-off 2.00, carry-on 2.00, carry-auto 2.00" in sampled_line


def test_tables_of_the_same_prompts_for_all_need_no_such_sentence(report):
    assert results_table(report[0]).caption == ""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from hf_carryover import cli, evaluation, model_card
from hf_carryover.conversion import load_drafter
from hf_carryover.evaluation import EvaluationArguments, plots
from hf_carryover.evaluation.machine import describe_model
from hf_carryover.evaluation.speed import OURS
from hf_carryover.model_card import render_card, write_card
from hf_carryover.targets import TARGETS, folder_name
from tests.evaluation_fakes import make_tokenizer, write_prompts
from tests.fakes import make_drafter, make_target

CARDS = Path(__file__).parents[1] / "model_cards"
TRAINING = {
    "command": "/somewhere/bin/hf-carryover train recipe.yaml --stage carryover",
    "recipe": {"target": "smollm2", "data": "../texts/selfchat.jsonl.gz", "drafter": "base"},
    "arguments": {"stage": "carryover"},
    "texts": 1234,
    "steps": 56,
    "seconds": 78.9,
    "machine": {"device": "A Processor", "threads": 2, "dtype": "float32"},
    "earlier": [
        {
            "command": "hf-carryover train base.yaml",
            "recipe": {"drafter": None},
            "arguments": {"stage": "baseline"},
            "texts": 1234,
            "steps": 700,
            "seconds": 900,
            "machine": {"device": "Another", "threads": 1, "dtype": "bfloat16"},
        }
    ],
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A tiny drafter's folder with a real evaluation beside a control."""
    folder = tmp_path_factory.mktemp("cards") / "tiny-drafter"
    drafter = make_drafter()
    drafter.save_pretrained(folder)
    prompts = [write_prompts(folder.parent / f"{name}.jsonl", ["1 2 3", "4 5 6"]) for name in ("a", "b")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_plots", lambda summary, out: None)
        evaluation.evaluate(
            make_target(), make_tokenizer(), drafter, prompts=prompts, out=folder, control=make_drafter(seed=2),
            arguments=EvaluationArguments(max_new_tokens=6),
        )  # fmt: skip
    return folder


@pytest.fixture
def folder(measured, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(measured, tmp_path / measured.name))


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def stale_cards(cards):
    """Folders whose README.md is not what their files say."""
    folders = sorted(path.parent for path in cards.glob("*/config.json"))
    return [path.name for path in folders if (path / "README.md").read_bytes() != render_card(path).encode()]


def test_every_published_card_is_what_its_files_say():
    assert stale_cards(CARDS) == []


def test_the_readme_has_the_pooled_numbers_of_every_published_drafter():
    readme, cards = (CARDS.parent / "README.md").read_text(), sorted(CARDS.glob("*/config.json"))
    controls = [card.parent.name for card in cards if not (card.parent / "evaluation.json").exists()]
    assert all(f"](model_cards/{name})" in readme and name.endswith("-control") for name in controls)
    for card in cards:
        if card.parent.name in controls:  # its figures are in the rows that it is compared with
            continue
        measured = json.loads((card.parent / "evaluation.json").read_text())
        for temperature, label in ((0, "greedy"), (1, "sampled")):
            here = ("all", temperature)
            pooled = {row["system"]: row for row in measured["results"] if (row["set"], row["temperature"]) == here}
            gains = {r["minus"]: r for r in measured["differences"] if (r["set"], r["temperature"]) == here}
            speeds = ("carry-on", "control", "lookup", "library-dflash", "carry-auto")
            cells = [
                (pooled["carry-on"]["accepted_length"], pooled["carry-on"]["accepted_length_interval"], ""),
                *((gains[rival]["difference"], gains[rival]["interval"], "+") for rival in ("carry-off", "control")),
                *((pooled[s]["speedup"], pooled[s]["speedup_interval"], "") for s in speeds if s in pooled),
            ]
            line = [f"{value:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]" for value, (low, high), sign in cells]
            if "library-dflash" not in pooled:  # it runs no Markov head
                line.insert(-1, "")
            name = f"[{card.parent.name}](model_cards/{card.parent.name})" if label == "greedy" else card.parent.name
            assert f"| {name}, {label} | {' | '.join(line)} |\n".replace("|  |", "| |") in readme
    assert len(cards) == readme.count("](model_cards/")


def test_a_card_that_was_edited_or_whose_numbers_changed_is_found(folder):
    write_card(folder)
    assert stale_cards(folder.parent) == []

    card = folder / "README.md"
    card.write_text(card.read_text().replace("One prompt", "Many prompts"))
    assert stale_cards(folder.parent) == ["tiny-drafter"]

    write_card(folder)
    change(folder / "evaluation.json", lambda content: content["results"][4].update(speedup=9.87))
    assert stale_cards(folder.parent) == ["tiny-drafter"]
    assert "9.87" in render_card(folder)


def test_the_metadata_has_target_and_every_pooled_number(folder):
    (folder / "training.json").write_text(json.dumps(TRAINING))
    results = [
        row for row in json.loads((folder / "evaluation.json").read_text())["results"]
        if row["system"] in OURS
    ]  # fmt: skip

    data = yaml.safe_load(render_card(folder).split("---")[1])

    assert data["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert "license" not in data  # nothing tells it
    metrics = [metric for result in data["model-index"][0]["results"] for metric in result["metrics"]]
    named = {metric["name"]: metric["value"] for metric in metrics}
    pooled = [row for row in results if row["set"] == "all"]
    assert len(metrics) == len(named) == 2 * len(pooled)
    for row in pooled:
        where = f"{row['system']}, temperature 0"
        assert named[f"Accepted length, {where}"] == round(row["accepted_length"], 4)
        assert named[f"Speed relative to plain generate, {where}"] == round(row["speedup"], 4)


def test_the_licence_that_a_card_names_stays(folder):
    write_card(folder)
    card = folder / "README.md"
    card.write_text(card.read_text().replace("library_name:", "license: mit\nlibrary_name:", 1))

    write_card(folder)

    assert yaml.safe_load(card.read_text().split("---")[1])["license"] == "mit"


def test_the_tables_show_each_system_per_set_and_pooled_with_intervals(folder):
    rows = json.loads((folder / "evaluation.json").read_text())["results"]

    card = render_card(folder)

    assert "| set | carry-off | carry-on | control | carry-auto |" in card
    assert "| set | tokens a round, minus carry-off | tokens a round, minus control |" in card
    for row in rows:
        low, high = row["accepted_length_interval"] or (None, None)
        shown = f"| {row['accepted_length']:.2f}" + (f" [{low:.2f}, {high:.2f}] |" if low else " |")
        assert any(line.startswith(f"| {row['set']} |") and shown in line for line in card.splitlines()) or (
            row["system"] not in OURS
        )
    assert "| all |" in card


def test_the_card_tells_how_the_drafter_was_trained_and_on_what_it_was_measured(folder):
    facts = json.loads((folder / "evaluation.json").read_text())
    assert "has no record of it (`training.json`)" in render_card(folder)
    (folder / "training.json").write_text(json.dumps(TRAINING))

    card = render_card(folder)

    first = "| 700 | 1234 | 900 | Another, 1 threads, bfloat16 | `hf-carryover train base.yaml` |"
    words = "hf-carryover train recipe.yaml --stage carryover"
    then = f"| 56 | 1234 | 78.9 | A Processor, 2 threads, float32 | `{words}` |"
    assert f"| baseline | nothing {first}\n| carryover | `base` {then}\n" in card
    assert f"Measured on one machine: {facts['device']}, {facts['threads']} threads" in card


def test_limits_name_the_sets_on_which_the_gain_is_not_shown(folder):
    def edit(content):
        for row in content["differences"]:
            row["interval"] = [0.1, 0.2] if row["set"] == "a" else [-0.1, 0.2]
        for row in content["results"]:
            row["speedup_interval"] = [1.1, 1.2]

    change(folder / "evaluation.json", edit)

    card = render_card(folder)

    assert "does not show accepted length, carry-on minus control, above zero: b, all." in card
    assert "does not show speed, carry-on to plain, above one: none." in card


def test_a_drafter_without_evaluation_gets_a_card_that_says_so(folder):
    (folder / "evaluation.json").unlink()

    card = render_card(folder)

    assert "**Nothing was measured.**" in card
    assert "model-index" not in card
    assert "### Accepted length" not in card


def test_a_control_says_where_its_figures_are(folder):
    (folder / "evaluation.json").unlink()
    (folder / "training.json").write_text(json.dumps(TRAINING | {"arguments": {"stage": "control"}}))

    card = render_card(folder)

    assert "figures of it stand in the card of\nthe drafter that it is compared with." in card


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Expected a drafter folder with config\.json, found none in"):
        write_card(tmp_path)


def test_broken_or_foreign_files_are_named(folder):
    (folder / "training.json").write_text("{")
    with pytest.raises(ValueError, match=r"Expected UTF-8 JSON in .*training\.json"):
        render_card(folder)

    (folder / "training.json").write_text('{"steps": 1}')
    with pytest.raises(ValueError, match=r"Expected arguments, command, .* in .*training\.json, found none"):
        render_card(folder)


def test_an_evaluation_of_another_drafter_is_refused(folder):
    make_drafter(seed=3).save_pretrained(folder)

    with pytest.raises(ValueError, match=r"Expected an evaluation of this drafter .* found one of"):
        render_card(folder)


def test_a_card_knows_a_drafter_that_was_measured_with_its_targets_special_tokens(folder):
    """A folder without its own (trained from nothing, or converted without the target) gets them when it is loaded."""
    target = make_target()
    target.config.eos_token_id = target.config.pad_token_id = 57
    drafter = load_drafter(folder, target=target)

    change(folder / "evaluation.json", lambda summary: summary["models"].update(drafter=describe_model(drafter)))

    assert (drafter.config.eos_token_id, drafter.config.pad_token_id) == (57, 57)
    assert "Nothing was measured" not in render_card(folder)
    drafter.save_pretrained(folder)  # now they are in its file
    assert "Nothing was measured" not in render_card(folder)


def test_the_card_compares_with_what_needs_no_drafter(folder):
    def add(summary):
        ours = [row for row in summary["results"] if row["system"] == "carry-on"]
        others = [row for row in summary["results"] if row["system"] != "lookup"]
        summary["results"] = others + [row | {"system": "lookup", "speedup": 1.75} for row in ours]

    change(folder / "evaluation.json", add)

    speed = render_card(folder).split("### Speed relative")[1].split("###")[0]
    lines = [line.split("|") for line in speed.splitlines() if line.startswith("|")]
    assert {line[lines[0].index(" lookup ")].strip()[:4] for line in lines[2:]} == {"1.75"}


@pytest.mark.parametrize(
    ("explained", "told"), [((True, False), "1 of them**"), ((True, True), "rounding explains them")]
)
def test_the_card_counts_the_texts_that_rounding_does_not_explain(folder, explained, told):
    def differ(summary):
        one = {"set": "a", "number": 0, "system": "carry-on", "position": 1, "gap": 0.5}
        summary["exactness"]["differences"] = [one | {"explained": found} for found in explained]
        summary["exactness"]["passed"] = all(explained)

    change(folder / "evaluation.json", differ)

    assert told in render_card(folder).split("Exactness: ")[1].split("## How")[0]


def test_texts_of_others_are_not_counted_as_the_drafters_faults(folder):
    def differ(summary):
        one = {"set": "a", "number": 0, "position": 1, "gap": 0.5, "explained": False}
        names = ("lookup", "carry-on", "library-dflash", "lookup")
        summary["exactness"]["differences"] = [one | {"system": name} for name in names]

    change(folder / "evaluation.json", differ)

    assert "4 differ from plain `generate`'s, **and rounding does not explain\n1 of them**" in render_card(folder)


def test_a_drafter_that_was_measured_in_a_type_of_its_own_gets_its_card(folder):
    drafter = load_drafter(folder, dtype=torch.bfloat16)

    change(folder / "evaluation.json", lambda summary: summary["models"].update(drafter=describe_model(drafter)))

    assert "## Results" in render_card(folder)
    change(folder / "evaluation.json", lambda summary: summary["models"]["drafter"].pop("dtype"))
    with pytest.raises(ValueError, match="Expected an evaluation of this drafter"):
        render_card(folder)


def test_the_card_says_on_which_copy_of_the_target_it_was_measured(folder):
    assert "quantised weights" not in render_card(folder)
    cached = f"/cache/{folder_name(TARGETS['smollm2'])}"

    change(folder / "evaluation.json", lambda summary: summary["models"]["target"].update(name=cached))

    assert "`SmolLM2-135M-Instruct.Q4_1.gguf`, quantised weights" in render_card(folder)


def test_the_card_says_how_many_prompts_its_figures_are_of(folder):
    assert "(temperature 0: 4 prompts, 4 of them timed)" in render_card(folder)


def test_the_fingerprint_is_of_the_weights_not_of_who_saved_them(folder):
    def edit(content):
        content["transformers_version"] = "6.0.0"
        content["architectures"] = None

    change(folder / "config.json", edit)

    assert "## Results" in render_card(folder)


def test_the_template_lies_beside_the_code_so_that_the_wheel_has_it():
    assert model_card.TEMPLATE.parent == Path(model_card.__file__).parent
    assert model_card.TEMPLATE.is_file()


def test_the_command_writes_the_card_and_tells_errors_in_a_sentence(folder, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["hf-carryover", "card", str(folder)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert f"The card is {folder / 'README.md'}." in capsys.readouterr().out
    assert stale_cards(folder.parent) == []

    monkeypatch.setattr("sys.argv", ["hf-carryover", "card", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert "Expected a drafter folder with config.json" in capsys.readouterr().err

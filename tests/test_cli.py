import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_carryover import CarryoverDrafterModel, cli, conversion, targets
from tests.conversion_fakes import make_dspark, write_deepspec_folder
from tests.evaluation_fakes import write_target
from tests.fakes import Letters, make_drafter, make_target

RUN = CliRunner()


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A tiny target in place of the real one, and the folder of a drafter for it."""
    monkeypatch.setattr(targets, "load_target", lambda name, dtype: (make_target(), Letters()))
    make_drafter().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("command", ["", *(command.callback.__name__ for command in cli.app.registered_commands)])
def test_help_works(command):
    result = RUN.invoke(cli.app, [*command.split(), "--help"])

    assert result.exit_code == 0
    assert "usage" in result.output.lower()


def test_demo_runs_with_a_drafter(tiny):
    result = RUN.invoke(cli.app, ["demo", "--drafter", tiny, "--max-new-tokens", "8"])

    assert result.exit_code == 0, result.output
    assert "4 drafts a round, carries rejected rows" in result.output
    assert result.output.count("Identical token ids.") == 3


def test_demo_without_a_drafter_says_so(tiny, monkeypatch):
    monkeypatch.setattr("hf_carryover.demo.default_drafter", lambda target: None)

    result = RUN.invoke(cli.app, ["demo", "--max-new-tokens", "8"])

    assert result.exit_code == 0
    assert "No drafter: plain decoding only" in result.output


def test_demo_fails_when_the_texts_differ(tiny, monkeypatch):
    monkeypatch.setattr("hf_carryover.demo.compare_texts", lambda *_, **__: (False, "THE TEXTS DIFFER"))

    result = RUN.invoke(cli.app, ["demo", "--drafter", tiny, "--max-new-tokens", "8"])

    assert result.exit_code == 1
    assert result.output.count("THE TEXTS DIFFER") == 3


def test_convert_reads_a_public_drafter_and_writes_one(tmp_path, monkeypatch):
    target, original = make_target(), make_dspark()
    write_deepspec_folder(tmp_path / "public", original, target)
    monkeypatch.setattr(targets, "load_target", lambda name, dtype: (target, Letters()))

    into_ours = RUN.invoke(cli.app, ["convert", str(tmp_path / "public"), str(tmp_path / "ours"), "--target", "it"])
    out_again = RUN.invoke(
        cli.app, ["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "deepspec", "--target", "it"]
    )

    assert into_ours.exit_code == 0, into_ours.output
    assert f"The drafter is in {tmp_path / 'ours'} (carryover)." in into_ours.output
    assert f"The drafter is in {tmp_path / 'out'} (deepspec)." in out_again.output
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("public", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("auto", torch.float32)])
def test_convert_writes_what_it_is_told_to(name, dtype, tiny, tmp_path):
    result = RUN.invoke(cli.app, ["convert", tiny, str(tmp_path / "out"), "--dtype", name])

    assert result.exit_code == 0, result.output
    assert load_file(tmp_path / "out" / "model.safetensors")["fc.weight"].dtype == dtype


def test_convert_makes_a_draft_vocabulary_of_the_answers(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "load_target", lambda name, dtype: (make_target(), Letters()))
    rows = [{"prompt_ids": [1, 2], "answer_ids": [9, 9, 9, 40]}, {"prompt_ids": [1], "answer_ids": [9, 40, 7, 8]}]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--target", "it", "--draft-vocab", "2", "--prompts", str(tmp_path / "answers.jsonl")]

    result = RUN.invoke(cli.app, ["convert", tiny, str(tmp_path / "small"), *words])

    assert result.exit_code == 0, result.output
    assert "The draft vocabulary of 2 covers 75.00% of the answers." in " ".join(result.output.split())
    assert load_file(tmp_path / "small" / "model.safetensors")["draft_vocab_ids"].tolist() == [9, 40]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "gguf"], "Expected a format among carryover, z-lab, deepspec, speculators, got 'gguf'"),
        (["--to", "deepspec"], "which a DeepSpec folder describes or holds copies of, got none; pass it"),
        (["--to", "z-lab", "--target", "it"], "Expected a new folder, found"),
        (["--draft-vocab", "5"], "Expected `--draft-vocab N` together with the target's answers (`--prompts FILE`)"),
        (["--prompts", "answers.jsonl"], "Expected `--draft-vocab N` together with the target's answers"),
    ],
)
def test_convert_says_in_one_sentence_why_it_does_not(arguments, message, tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / ("out" if "it" not in arguments else "config.json")
    monkeypatch.setattr(sys, "argv", ["hf-carryover", "convert", tiny, str(out), *arguments])

    with pytest.raises(SystemExit) as stopped:
        cli.main()

    assert stopped.value.code == 1
    assert message in capsys.readouterr().err


def test_data_and_train_make_a_drafter(tmp_path, monkeypatch):
    target, data, out = write_target(tmp_path / "target"), tmp_path / "data.jsonl", tmp_path / "out"
    words = ["--target", target, "--out", data, "--count", 6, "--batch-size", 4, "--max-new-tokens", 20, "--keep-cut"]
    (tmp_path / "recipe.yaml").write_text("num_layers: 1\nblock_size: 4\nmax_steps: 2\nvalidation_every: 3\n")
    steps = ["--max_steps", 3, "--use_cpu", "true", "--num_anchors", 4, "--validation_tokens", 8]

    made = RUN.invoke(cli.app, ["data", *map(str, words)])
    trained = RUN.invoke(
        cli.app,
        [
            *map(
                str,
                ["train", tmp_path / "recipe.yaml", "--target", target, "--data", data, "--output_dir", out, *steps],
            )
        ],
    )
    again = RUN.invoke(cli.app, ["train", "--data", str(data), "--target", str(target), "--output_dir", str(out)])

    assert made.exit_code == 0, made.output
    assert "texts in" in made.output
    assert trained.exit_code == 0, trained.output
    record = json.loads((out / "training.json").read_text())
    assert record["steps"] == 3  # flags win over the file
    assert record["recipe"]["num_layers"] == 1
    assert CarryoverDrafterModel.from_pretrained(out).config.block_size == 4
    assert "Expected a folder without a finished drafter" in str(again.exception)


def test_an_interrupted_training_says_how_to_go_on(tmp_path, monkeypatch):
    def stop(recipe, arguments):
        raise KeyboardInterrupt(*said)

    monkeypatch.setattr("hf_carryover.training.train_drafter", stop)

    said = ["Stopped, and saved."]
    saved = RUN.invoke(cli.app, ["train", "--output_dir", str(tmp_path), "--use_cpu", "true"])
    said = []
    early = RUN.invoke(cli.app, ["train", "--output_dir", str(tmp_path), "--use_cpu", "true"])

    assert (saved.exit_code, early.exit_code) == (130, 130)
    assert "Stopped, and saved." in saved.output
    assert "Stopped; nothing new was saved." in early.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.yaml"], "Expected a recipe .YAML. at none.yaml, found no file"),
        (
            ["--output_dir", "x", "--stage", "later"],
            "`stage` must be one of baseline, carryover, control, got 'later'",
        ),
        (["--output_dir", "x", "--gamma", "0"], "`gamma` must be positive"),
        (["--output_dir", "x", "--ce_weight", "0"], "one of CE, L1 and KD positive"),
        (["--output_dir", "x", "--num_anchors", "0"], "`num_anchors` must be at least 1"),
        (["--output_dir", "x", "--validation_every", "1"], "`validation_every` must be at least 2"),
    ],
    ids=["no-recipe", "stage", "gamma", "weights", "anchors", "validation"],
)
def test_wrong_settings_of_training_are_told(words, sentence):
    result = RUN.invoke(cli.app, ["train", *words])

    assert re.search(sentence, str(result.exception))


def test_generate_reads_the_prompt_from_an_option_or_from_standard_input(tiny):
    by_option = RUN.invoke(cli.app, ["generate", "--target", "x", "--drafter", tiny, "--prompt", "hello"])
    by_input = RUN.invoke(cli.app, ["generate", "--target", "x", "--drafter", tiny], input="hello\n")
    plain = RUN.invoke(cli.app, ["generate", "--target", "x", "--prompt", "hello"])

    assert by_option.exit_code == by_input.exit_code == plain.exit_code == 0
    assert by_option.stdout == by_input.stdout == plain.stdout
    assert len(plain.stdout.strip()) > 200
    assert "accepted length" in by_option.stderr


def test_generate_switches_carry_off(tiny, monkeypatch):
    loaded, load_drafter = [], conversion.load_drafter
    monkeypatch.setattr(conversion, "load_drafter", lambda *a, **k: loaded.append(load_drafter(*a, **k)) or loaded[-1])
    for option in ([], ["--no-carry"], ["--carry"]):
        RUN.invoke(
            cli.app,
            ["generate", "--target", "x", "--drafter", tiny, "--prompt", "hello", "--max-new-tokens", "9", *option],
        )

    assert [drafter.carry_enabled for drafter in loaded] == [True, False, True]
    assert [drafter.last_stats.carried_rows > 0 for drafter in loaded] == [True, False, True]


def test_generate_samples_repeatably(tiny):
    def run(seed):
        options = ["--temperature", "2", "--seed", seed, "--max-new-tokens", "30"]
        return RUN.invoke(cli.app, ["generate", "--target", "x", "--drafter", tiny, "--prompt", "hi", *options]).stdout

    assert run("1") == run("1") != run("2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", " "], "Expected a prompt, got an empty one; pass `--prompt` or text on standard input."),
        (
            ["--prompt", "x", "--dtype", "int4"],
            "Expected `--dtype` auto, fp32 or bf16, got 'int4'; choose one of them.",
        ),
        (["--prompt", "x", "--drafter", "{tmp}"], "Expected a drafter's config.json at {tmp}/config.json, found none"),
    ],
    ids=["an-empty-prompt", "an-unknown-dtype", "a-folder-that-is-no-drafter"],
)
def test_a_users_error_is_one_plain_sentence(arguments, message, tiny, tmp_path_factory, monkeypatch, capsys):
    empty = str(tmp_path_factory.mktemp("empty"))
    arguments = [argument.replace("{tmp}", empty) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["hf-carryover", "generate", "--target", "x", *arguments])

    with pytest.raises(SystemExit) as exit_info:
        cli.main()

    error = capsys.readouterr().err
    assert exit_info.value.code == 1
    assert message.replace("{tmp}", empty) in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_the_installed_command_starts():
    command = Path(sys.executable).with_name("hf-carryover")

    found = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)

    assert all(name in found.stdout for name in ("demo", "generate", "evaluate"))


@pytest.mark.slow
def test_the_demo_runs_on_the_embedded_target(smollm2, monkeypatch):
    monkeypatch.setattr(targets, "load_target", lambda name, dtype: smollm2)
    monkeypatch.setattr("hf_carryover.demo.default_drafter", lambda target: None)

    result = RUN.invoke(cli.app, ["demo", "--max-new-tokens", "6"])

    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.output

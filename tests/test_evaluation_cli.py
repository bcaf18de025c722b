import sys
from dataclasses import fields

import pytest

from hf_carryover import cli, evaluation
from hf_carryover.evaluation import EvaluationArguments, plots
from tests.evaluation_fakes import make_tokenizer, write_prompts
from tests.fakes import make_drafter, make_target


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs `hf-carryover evaluate` on tiny models; returns exit code and what was asked to be loaded."""
    loaded = []
    target = make_target()
    monkeypatch.setattr(
        cli, "load_model", lambda name, dtype: (loaded.append((name, dtype)), (target, make_tokenizer()))[1]
    )
    monkeypatch.setattr(cli, "load_assistant", lambda name, model: (loaded.append(name), make_drafter())[1])
    monkeypatch.setattr(plots, "draw_plots", lambda summary, out: None)

    def run(*arguments):
        words = ["--target", "T", "--drafter", "D", "--out", tmp_path / "out", "--max-new-tokens", "4", *arguments]
        monkeypatch.setattr(sys, "argv", ["hf-carryover", "evaluate", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code

    run.target, run.loaded = target, loaded
    return run


@pytest.fixture
def prompts(tmp_path):
    return [write_prompts(tmp_path / f"{name}.jsonl", ["1 2 3", "4 5 6"]) for name in ("a", "b")]


def test_several_prompt_files_may_follow_one_option(command, prompts, tmp_path, capsys):
    code = command("--prompts", *prompts, "--control", "C", "--dtype", "fp32")

    assert code == 0
    assert command.loaded == [("T", "fp32"), "D", "C"]
    shown = capsys.readouterr().out
    assert "carry" in shown
    assert "Tokens a round" in shown
    assert (tmp_path / "out" / "report.md").exists()


def test_every_setting_arrives(command, prompts, monkeypatch):
    arrived = []

    def measure(*args, arguments, **kwargs):
        arrived.append(arguments)
        raise ValueError("enough")

    monkeypatch.setattr(evaluation, "evaluate", measure)
    words = ["--prompts-per-set", "2", "--prompts-per-set", "1", "--temperatures", "0", "--temperatures", "0.5"]
    words += ["--timed-per-set", "1", "--repeats", "3", "--seed", "7", "--raw"]
    words += ["--draft-lengths", "2", "--draft-lengths", "5"]

    command("--prompts", *prompts, *words)
    command("--prompts", *prompts)

    given, default = arrived
    assert given == evaluation.EvaluationArguments([2, 1], 1, 4, [0.0, 0.5], 3, seed=7, raw=True, draft_lengths=[2, 5])
    defaults = {"temperatures": [0.0], "draft_lengths": [1, 2, 3, 4, 6, 8]}
    assert default == evaluation.EvaluationArguments([8], max_new_tokens=4, **defaults)


def test_a_failed_set_is_told_and_the_others_are_measured(command, prompts, tmp_path, capsys):
    code = command("--prompts", tmp_path / "none.jsonl", *prompts)

    assert code == 1
    shown = capsys.readouterr()
    assert "found no" in shown.err
    assert "carry-on" in shown.out


def test_a_users_error_is_one_sentence(command, prompts, capsys):
    code = command("--prompts", *prompts, "--repeats", "0")

    assert code == 1
    assert capsys.readouterr().err == "`repeats` must be at least 1, got 0.\n"


def test_inexact_text_exits_non_zero(command, prompts, monkeypatch, capsys):
    generate = command.target.generate

    def broken(**kwargs):
        text = generate(**kwargs)
        text[0, -1] = 7 if "assistant_model" in kwargs else 8
        return text

    monkeypatch.setattr(command.target, "generate", broken)

    assert command("--prompts", *prompts) == 1
    assert "rounding does not explain it" in capsys.readouterr().err


def test_help_shows_each_setting_with_its_default(command, capsys):
    assert command("--help") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field in fields(EvaluationArguments):
        default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
        assert f"--{field.name.replace('_', '-')}" in shown
        assert f"[default: ({default})]" in shown, field.name

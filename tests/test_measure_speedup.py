import importlib.util
from pathlib import Path

import pytest

from tests.evaluation_fakes import make_tokenizer, script
from tests.fakes import ScriptedDrafter, make_drafter, make_target


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("measure_speedup", Path("examples/measure_speedup.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_prints_the_scripts_tokens_a_round(example, monkeypatch, capsys):
    target, drafter = make_target(), make_drafter(cls=ScriptedDrafter)
    script(monkeypatch, target, drafter, lambda ids, carry: [3] if carry else [1])

    worth = example.measure(target, make_tokenizer(), drafter, prompts=("1 2 3", "4 5 6"), max_new_tokens=13)

    assert {name: length for name, (length, _) in worth.items()} == {"plain": 1.0, "carry off": 2.0, "carry on": 4.0}
    assert worth["plain"][1] == 1.0
    shown = capsys.readouterr().out
    assert "another text" not in shown
    assert "carry on:           4.00" in shown


def test_example_says_when_a_text_differs(example, monkeypatch, capsys):
    target, drafter = make_target(), make_drafter()
    generate = target.generate

    def broken(**kwargs):
        text = generate(**kwargs)
        text[0, -1] = 7 if "assistant_model" in kwargs else 8
        return text

    monkeypatch.setattr(target, "generate", broken)
    example.measure(target, make_tokenizer(), drafter, prompts=("1 2 3",), max_new_tokens=4)

    assert capsys.readouterr().out.count("another text than plain") == 2

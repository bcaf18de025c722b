import importlib.util
from pathlib import Path

import pytest

from tests.fakes import Letters, make_drafter, make_target

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_drafter", [False, True], ids=["untrained", "given"])
def test_generate(with_drafter, monkeypatch, capsys, tmp_path):
    example = load("generate")
    target = make_target("qwen3")
    monkeypatch.setattr(example, "load_target", lambda name: (target, Letters()))
    make_drafter().save_pretrained(tmp_path)

    example.main(["target", str(tmp_path)] if with_drafter else [])

    assert "the same ids as without a drafter: True" in capsys.readouterr().out


def test_every_example_has_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"generate", "measure_speedup"}

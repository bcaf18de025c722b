import importlib.util
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import HfArgumentParser

from hf_carryover import CarryoverDrafterModel
from hf_carryover.training import CarryoverTrainingArguments, RecipeArguments, read_recipe, train_drafter
from tests.evaluation_fakes import write_prompts, write_target
from tests.fakes import Letters, make_drafter, make_target

EXAMPLES = Path(__file__).parents[1] / "examples"
# Sizes that only this family has.
TINY = {
    "gemma4_text": {
        "head_dim": 8, "global_head_dim": 8, "sliding_window": 16, "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 6, "final_logit_softcapping": 30.0,
    }
}  # fmt: skip


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_drafter", [False, True], ids=["untrained", "given"])
def test_generate(with_drafter, monkeypatch, capsys, tmp_path):
    example = load("generate")
    target = make_target("qwen3")
    monkeypatch.setattr(example, "load_target", lambda name, dtype: (target, Letters()))
    make_drafter().save_pretrained(tmp_path)

    example.main(["target", str(tmp_path)] if with_drafter else [])

    assert "the same ids as without a drafter: True" in capsys.readouterr().out


@pytest.mark.parametrize("with_adapter", [False, True], ids=["random", "given"])
def test_adapted_target(with_adapter, monkeypatch, capsys, tmp_path):
    example, target = load("adapted_target"), make_target()
    monkeypatch.setattr(example, "load_target", lambda name, dtype: (target, Letters()))
    make_drafter().save_pretrained(tmp_path / "drafter")
    words = [str(tmp_path / "drafter")]
    if with_adapter:
        torch.manual_seed(1)
        adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        get_peft_model(make_target(), adapter).save_pretrained(tmp_path / "adapter")
        words.append(str(tmp_path / "adapter"))

    example.main(words)

    assert "the same ids as without a drafter: True" in capsys.readouterr().out


def test_train_drafter(monkeypatch, capsys, tmp_path):
    example, target = load("train_drafter"), write_target(tmp_path / "target")
    words = ["--target", target, "--out", tmp_path / "out", "--texts", 20, "--steps", 6, "--draft-vocab", 50]
    monkeypatch.setattr("sys.argv", ["train_drafter.py", *map(str, words)])

    example.main()

    out = tmp_path / "out"
    assert "'kept': " in capsys.readouterr().out
    assert (out / "accepted_length.png").stat().st_size > 5000
    drafter = CarryoverDrafterModel.from_pretrained(out / "carryover")
    assert drafter.carry_enabled
    record = json.loads((out / "carryover" / "training.json").read_text())
    assert record["steps"] == 2
    assert [(stage["arguments"]["stage"], "log" in stage) for stage in record["earlier"]] == [("baseline", False)]
    assert any("eval_accepted_length_carry" in line for line in record["log"])


def test_adapt_drafter(monkeypatch, capsys, tmp_path):
    example, target = load("adapt_drafter"), write_target(tmp_path / "target")
    make_drafter().save_pretrained(tmp_path / "drafter")
    prompts = write_prompts(tmp_path / "p.jsonl", [f"{i} {i + 3} {i + 5}" for i in range(12)])
    words = ["--target", target, "--drafter", tmp_path / "drafter", "--prompts", prompts, "--out", tmp_path / "out"]
    monkeypatch.setattr("sys.argv", ["adapt_drafter.py", *map(str, [*words, "--steps", 3, "--max-new-tokens", 12])])

    example.main()

    shown = capsys.readouterr().out
    assert "before: " in shown
    assert "after: " in shown
    assert (tmp_path / "out" / "drafter" / "adapter" / "adapter_model.safetensors").is_file()
    assert len((tmp_path / "out" / "held_out.jsonl").read_text().splitlines()) == 3


def test_make_drafters(monkeypatch, tmp_path):
    example, commands = load("make_drafters"), []
    monkeypatch.setattr(example.subprocess, "run", lambda command, check: commands.append(command))
    (tmp_path / "smollm2-dflash").mkdir()
    (tmp_path / "smollm2-dflash" / "training.json").write_text("{}")
    words = ["--data", "d.jsonl", "--out", str(tmp_path), "--share", "0.01", "--bf16", "true"]
    monkeypatch.setattr("sys.argv", ["make_drafters.py", *words])

    example.main()

    assert len(commands) == 10
    made = {"smollm2-dflash"}
    for command in commands:
        recipe, arguments = HfArgumentParser(
            [RecipeArguments, CarryoverTrainingArguments]
        ).parse_args_into_dataclasses([*read_recipe(command[2:]), "--bf16", "false", "--use_cpu", "true"])
        name = Path(arguments.output_dir).name
        assert (Path(command[2]).stem, Path(recipe.drafter).name) == example.DRAFTERS[name]
        assert Path(recipe.drafter).parent == tmp_path
        assert Path(recipe.drafter).name in made  # what a stage starts from comes before it
        if name.endswith(("-carryover", "-control")):
            assert name.endswith(f"-{arguments.stage}")
        made.add(name)
        assert 1 <= arguments.max_steps <= 15
        assert command[-2:] == ["--bf16", "true"]


@pytest.mark.parametrize("name", sorted(path.stem for path in (EXAMPLES / "recipes").glob("*.yaml")))
def test_a_recipe_takes_a_step_on_a_tiny_model_of_its_family(name, tmp_path, caplog):
    kind = {"qwen3": "qwen3", "gemma4": "gemma4_text", "smollm2": "llama"}[name.split("-")[0]]
    target = write_target(tmp_path / "target", kind, **TINY.get(kind, {}))
    texts = [{"prompt_ids": [1, 2, i + 3], "answer_ids": [*range(4, 40)]} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    words = read_recipe([str(EXAMPLES / "recipes" / f"{name}.yaml")])
    words += ["--target", str(target), "--data", str(tmp_path / "data.jsonl"), "--output_dir", str(tmp_path / "out")]
    words += ["--max_steps", "1", "--bf16", "false", "--use_cpu", "true", "--max_length", "64", "--draft_vocab", "50"]
    words += ["--num_anchors", "8", "--validation_every", "4", "--eval_strategy", "no"]
    if name.endswith(("first", "carryover", "control", "anchor", "longer")) or name == "smollm2-markov":
        kind = "markov-vanilla" if "markov-" in name else "dflash"
        make_drafter(kind, draft_vocab_size=50 if "markov-" in name else None).save_pretrained(tmp_path / "start")
        words += ["--drafter", str(tmp_path / "start")]
        if kind == "markov-vanilla":  # has its draft vocabulary already
            at = words.index("--draft_vocab")
            words[at : at + 2] = []
    recipe, arguments = HfArgumentParser([RecipeArguments, CarryoverTrainingArguments]).parse_args_into_dataclasses(
        words
    )

    drafter = train_drafter(recipe, arguments)

    loaded = CarryoverDrafterModel.from_pretrained(tmp_path / "out")
    assert loaded.config.num_drafts == drafter.config.num_drafts
    assert all(torch.equal(tensor, drafter.state_dict()[key]) for key, tensor in loaded.state_dict().items())
    assert "drafter's pass" in caplog.text
    assert json.loads((tmp_path / "out" / "training.json").read_text())["arguments"]["stage"] == arguments.stage
    if name.split("-")[0] not in ("qwen3", "gemma4"):
        return
    cut = [i for word in ("--draft_vocab", "--output_dir") for i in (words.index(word), words.index(word) + 1)]
    words = [word for i, word in enumerate(words) if i not in cut]
    words += ["--stage", "carryover", "--drafter", str(tmp_path / "out"), "--output_dir", str(tmp_path / "second")]
    train_drafter(
        *HfArgumentParser([RecipeArguments, CarryoverTrainingArguments]).parse_args_into_dataclasses(words)
    )  # as the recipe's first lines say
    assert len(json.loads((tmp_path / "second" / "training.json").read_text())["earlier"]) == 1


def test_every_example_has_a_test():
    tested = {test.removeprefix("test_") for test in globals() if test.startswith("test_")}
    tested |= {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested

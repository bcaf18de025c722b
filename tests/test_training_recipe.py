import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser

from hf_carryover import CarryoverDrafterModel
from hf_carryover.training import CarryoverTrainingArguments, RecipeArguments, read_recipe, train_drafter
from hf_carryover.training.interruption import Interruption
from tests.evaluation_fakes import write_target
from tests.fakes import make_drafter

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, texts, and a drafter to start from."""
    root = tmp_path_factory.mktemp("recipe")
    write_target(root / "target")
    texts = [{"prompt_ids": [1, 2, i + 3], "answer_ids": [*range(4, 24)]} for i in range(12)]
    (root / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (root / "one.jsonl").write_text(json.dumps(texts[0]) + "\n")
    (root / "others.jsonl").write_text("".join(json.dumps(row | {"answer_ids": [61, 4]}) + "\n" for row in texts))
    make_drafter().save_pretrained(root / "start")
    make_drafter("markov-vanilla").save_pretrained(root / "markov")
    return root


def train(folder, out, *words):
    given = ["--target", folder / "target", "--data", folder / "texts.jsonl", "--output_dir", out, "--use_cpu", "true"]
    given += [
        "--num_anchors",
        4,
        "--max_steps",
        4,
        "--validation_every",
        4,
        "--eval_strategy",
        "no",
        "--bf16",
        "false",
    ]
    parser = HfArgumentParser([RecipeArguments, CarryoverTrainingArguments])
    return train_drafter(*parser.parse_args_into_dataclasses([*map(str, [*given, *words])]))


@pytest.fixture
def cut(folder, tmp_path, monkeypatch):
    """A training that was stopped after its second step, and the words it was begun with."""
    words = ["--drafter", tmp_path / "start", "--stage", "carryover"]
    shutil.copytree(folder / "start", tmp_path / "start")
    (tmp_path / "start" / "training.json").write_text(json.dumps({"steps": 7, "log": []}))
    on_step_end = Interruption.on_step_end

    def stop(self, args, state, control, **kwargs):
        self.asked = state.global_step == 2
        on_step_end(self, args, state, control, **kwargs)

    monkeypatch.setattr(Interruption, "on_step_end", stop)
    with pytest.raises(KeyboardInterrupt, match="Stopped, and saved"):
        train(folder, tmp_path / "out", *words)
    monkeypatch.setattr(Interruption, "on_step_end", on_step_end)
    return words


def test_a_training_goes_on_when_the_drafter_it_started_from_is_gone(folder, cut, tmp_path):
    # NVIDIA/Model-Optimizer#1978.
    whole = train(folder, tmp_path / "whole", *cut)
    shutil.rmtree(tmp_path / "start")

    train(folder, tmp_path / "out", *cut)

    found = CarryoverDrafterModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in whole.state_dict().items())
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "whole" / "config.json").read_text()
    assert record["earlier"] == [{"steps": 7}]
    assert record["steps"] == 4
    assert not (tmp_path / "out" / "training.json.unfinished").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--learning_rate", 0.5], "learning_rate 0.5"),
        (["--seed", 5], "seed 5"),
        (["--bf16", "true"], "bf16 True"),
        (["--stage", "control"], "stage 'control'"),
        (["--logging_steps", 1], "logging_steps 1.0"),  # the Trainer would go on with the old ones
        (["--lr_scheduler_kwargs", '{"a": 1}'], r"lr_scheduler_kwargs \{'a': 1\}"),
        (["--max_length", 50], "max_length 50"),
        (["--weight_decay", 0.1], "weight_decay 0.1"),
    ],
)
def test_a_training_does_not_go_on_with_other_settings(words, told, folder, cut, tmp_path):
    with pytest.raises(ValueError, match=f"begun with, found {told} .*; give those, or choose another folder"):
        train(folder, tmp_path / "out", *cut, *words)


def test_a_training_does_not_go_on_with_other_texts_in_its_file(folder, cut, tmp_path):
    shutil.copy(folder / "texts.jsonl", tmp_path / "texts.jsonl")
    data = ["--data", tmp_path / "texts.jsonl"]
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "out", stopped)
    record = json.loads((stopped / "training.json.unfinished").read_text())
    record["recipe"]["data"] = str(tmp_path / "texts.jsonl")
    (stopped / "training.json.unfinished").write_text(json.dumps(record))
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt_ids": [1], "answer_ids": [2, 3, 4]}) + "\n")

    with pytest.raises(ValueError, match=r"in .*texts.jsonl the texts that the training in .*stopped was begun"):
        train(folder, stopped, *cut, *data)

    shutil.copy(folder / "texts.jsonl", tmp_path / "texts.jsonl")
    train(folder, stopped, *cut, *data)
    done = json.loads((stopped / "training.json").read_text())
    assert done["data_sha256"] == hashlib.sha256((folder / "texts.jsonl").read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_a_target_with_older_names_for_its_sizes_gets_a_drafter(kind, folder, tmp_path):
    write_target(tmp_path / "target", kind)

    train(folder, tmp_path / "out", "--target", tmp_path / "target", "--max_steps", 1)

    assert CarryoverDrafterModel.from_pretrained(tmp_path / "out").config.num_target_layers == 4


def test_texts_beyond_the_context_of_a_target_with_older_names_are_told(folder, tmp_path):
    write_target(tmp_path / "target", "gpt2", n_positions=20, max_position_embeddings=20)

    with pytest.raises(ValueError, match=r"Expected texts with answers of two tokens or more .*longer than 20 tokens"):
        train(folder, tmp_path / "out", "--target", tmp_path / "target")


@pytest.mark.parametrize("words", [[], ["--lora_rank", 2]], ids=["drafter", "adapter"])
def test_a_training_that_ended_before_the_drafter_was_saved_makes_no_more_steps(words, folder, tmp_path):
    words = ["--drafter", folder / "start", "--stage", "carryover", "--save_steps", 2, *words]
    whole, out = train(folder, tmp_path / "whole", *words), tmp_path / "whole"
    for path in (out / "training.json", out / "model.safetensors"):
        path.unlink()

    again = train(folder, out, *words)

    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in whole.state_dict().items())
    assert json.loads((out / "training.json").read_text())["steps"] == 4
    (out / "training.json").unlink()
    with pytest.raises(ValueError, match="`max_steps` must be at least 4, the steps that were made already"):
        train(folder, out, *words, "--max_steps", 3)


def test_the_same_command_makes_the_same_drafter_from_nothing(folder, tmp_path):
    one, two = (train(folder, tmp_path / name, "--num_layers", 1, "--block_size", 4) for name in ("one", "two"))

    assert all(torch.equal(tensor, two.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_a_training_may_go_on_for_longer(folder, cut, tmp_path):
    train(folder, tmp_path / "out", *cut, "--max_steps", 5)

    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["steps"] == record["arguments"]["max_steps"] == 5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "one.jsonl"], "Expected at least two texts"),
        (["--data", "others.jsonl"], "Expected ids below 61, the target's vocabulary, found 61"),
        (["--confidence_head", "true"], "`confidence_head` needs a `confidence_weight` above 0"),
        (["--confidence_weight", "1"], "`confidence_weight` must be 0 without a head"),
        (["--lora_rank", "2"], "`lora_rank` needs a whole `drafter`"),
        (
            ["--drafter", "start", "--lora_rank", "2", "--markov_head", "vanilla", "--markov_rank", "4"],
            "`lora_rank` needs a whole `drafter` to adapt, without a new `markov_head`",
        ),
        (["--drafter", "start", "--lora_rank", "2"], "`stage` must be carryover with `lora_rank`"),
        (["--optim", "sgd"], "`optim` must be left out, got 'sgd': `matrix_optimizer` says"),
        (["--dataloader_num_workers", "2"], "`dataloader_num_workers` must be left out, got 2"),
        (["--label_smoothing_factor", "0.1"], "`label_smoothing_factor` must be left out"),
        (["--per_device_eval_batch_size", "1"], "`per_device_eval_batch_size` must be left out, got 1"),
        (["--resume_from_checkpoint", "x"], "`resume_from_checkpoint` must be left out"),
        (["--num_train_epochs", "2"], "`num_train_epochs` needs `max_steps` -1, got 4"),
        (["--fp16", "true"], "`fp16` must be left out on a processor"),
        (["--save_only_model", "true"], "`save_only_model` must be left out, got True: a training without its optim"),
        (["--push_to_hub", "true"], "share the finished folder with `hf-carryover push`"),
        (["--train_sampling_strategy", "group_by_length"], "texts of like length are drawn together"),
        (["--dataloader_prefetch_factor", "2"], "`dataloader_prefetch_factor` must be left out, got 2"),
        (
            ["--drafter", "start", "--lora_rank", "2", "--stage", "carryover", "--weight_decay", "0.1"],
            "`weight_decay` must be 0 with `lora_rank`",
        ),
        (["--drafter", "start", "--num_layers", "5"], r"Expected the layers of .*start \(2, reading \["),
        (["--drafter", "start", "--num_target_layers", "1"], r"Expected the layers of .*start \(2, reading \["),
        (["--drafter", "markov", "--markov_rank", "5"], "Expected settings that the weights of .*markov fit, got"),
    ],
)
def test_settings_that_would_do_nothing_or_harm_are_refused(words, told, folder, tmp_path):
    words = [folder / word if (folder / word).exists() else word for word in words]

    with pytest.raises(ValueError, match=told):
        train(folder, tmp_path / "out", *words)


def test_epochs_count_where_steps_do_not(folder, tmp_path):
    train(folder, tmp_path / "out", "--max_steps", -1, "--num_train_epochs", 2)

    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (record["steps"], record["epochs"]) == (4, 2.0)  # nine texts, a batch of eight, twice each


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1", "Expected YAML in .*recipe.yaml, got: "),
        ("- a", "Expected `name: value` lines in .*recipe.yaml, found list"),
        ("a:\n  b: 1", "Expected one value for `a` in .*recipe.yaml, found {'b': 1}"),
    ],
)
def test_a_recipe_that_is_no_list_of_settings_is_refused(text, told, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)

    with pytest.raises(ValueError, match=told):
        read_recipe([str(tmp_path / "recipe.yaml")])


@pytest.mark.slow
def test_two_processes_stopped_by_ctrl_c_go_on_bit_equal(folder, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [
        Path(sys.executable).with_name("hf-carryover"),
        "train",
        "--target",
        folder / "target",
        "--data",
        folder / "texts.jsonl",
    ]
    command += ["--num_layers", 1, "--block_size", 4, "--num_anchors", 4, "--per_device_train_batch_size", 2]
    command += ["--max_steps", 80, "--validation_every", 4, "--eval_strategy", "no", "--use_cpu", "true"]

    def start(out):
        words = list(map(str, [*command, "--output_dir", out]))
        return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    whole, cut = start(tmp_path / "whole"), start(tmp_path / "cut")
    for line in cut.stdout:
        if "'loss'" in line:  # a step was made
            cut.send_signal(signal.SIGINT)
            break
    cut.communicate()
    checkpoints = list((tmp_path / "cut").glob("checkpoint-*/complete"))
    again = start(tmp_path / "cut")
    told = [process.communicate()[0] for process in (whole, again)]

    assert (whole.returncode, again.returncode) == (0, 0), told
    assert len(checkpoints) == 1
    one, two = (CarryoverDrafterModel.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())

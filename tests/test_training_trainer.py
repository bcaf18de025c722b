import json
import math
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser, TrainerCallback, TrainerControl, TrainerState

from hf_carryover import CarryoverDrafterModel
from hf_carryover.training import CarryoverTrainer, CarryoverTrainingArguments, Example
from hf_carryover.training import arguments as training_arguments
from hf_carryover.training import interruption as interruption_module
from hf_carryover.training.data import AnchoredTexts, Draw, collate
from hf_carryover.training.interruption import Interruption, MarkComplete, last_checkpoint
from hf_carryover.training.masks import Texts
from hf_carryover.training.rehearsal import Rehearsal
from tests.fakes import make_drafter, make_target, plain, prompt

ROOT = Path(__file__).parents[1]


def answered(target, count=16, tokens=20):
    """Texts of the target's own, of several lengths."""
    found = []
    for seed in range(count):
        ids = prompt(4 + seed % 4, seed=seed)
        text = plain(target, input_ids=ids, max_new_tokens=tokens - seed % 7)
        found.append(Example(ids[0].tolist(), text[0, ids.shape[1] :].tolist()))
    return found


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def examples(target):
    return answered(target)


def arguments(folder, **settings):
    defaults = {
        "max_steps": 6, "num_anchors": 6, "per_device_train_batch_size": 4, "eval_strategy": "no", "save_steps": 100,
        "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "learning_rate": 0.01,
        "bf16": False,  # numbers here are those of any machine
    }  # fmt: skip
    return CarryoverTrainingArguments(output_dir=str(folder), **(defaults | settings))


def trainer_of(drafter, target, examples, folder, callbacks=None, validation=None, **settings):
    args = arguments(folder, **settings)
    return CarryoverTrainer(drafter, target, args=args, examples=examples, validation=validation, callbacks=callbacks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_training_computes_in_bf16_where_the_hardware_multiplies_in_it(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(training_arguments, "default_dtype", lambda device: dtype)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    by_itself, told = (CarryoverTrainingArguments(output_dir=str(tmp_path), bf16=told) for told in (None, True))

    (parsed,) = HfArgumentParser(CarryoverTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--bf16"]
    )

    assert by_itself.bf16 == (dtype == torch.bfloat16)
    assert parsed.bf16
    assert by_itself.mixed_precision == ("bf16" if by_itself.bf16 else "no")
    assert by_itself.use_cpu  # which the library wants to be told for bf16
    assert told.bf16
    assert not CarryoverTrainingArguments(output_dir=str(tmp_path), bf16=False).bf16


def gradients(trainer, batches):
    """Gradients and summed loss of batches as one step."""
    drafter = trainer.rehearsal.drafter
    drafter.zero_grad()
    count = sum((batch["anchors"] >= 0).sum() for batch in batches)
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(drafter, batch, num_items_in_batch=count)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("stage", ["baseline", "carryover"])
@pytest.mark.parametrize("kind", ["dflash", "markov-rnn"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_how_a_step_is_cut_into_batches_changes_no_gradient(stage, kind, attention, target, examples, tmp_path):
    # NVIDIA-NeMo/Automodel#2406 and #2826: accumulation scaled the loss, padding made it NaN.
    drafter = make_drafter(kind)
    drafter.set_attn_implementation(attention)
    trainer = trainer_of(drafter, target, examples, tmp_path, stage=stage, l1_weight=0.9, kd_weight=0.1)
    items = [AnchoredTexts(examples, num_anchors=6, seed=0)[i] for i in range(8)]

    whole_loss, whole = gradients(trainer, [collate(items)])
    cut_loss, cut = gradients(trainer, [collate(items[:1]), collate(items[1:6]), collate(items[6:])])

    assert cut_loss == pytest.approx(whole_loss, rel=1e-5)
    assert whole.keys() == cut.keys()
    assert ("carry_embedding" in whole) == (stage == "carryover")
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item(), msg=name)


@pytest.mark.parametrize("detach", [True, False])
def test_the_confidence_loss_stays_in_its_head_if_it_is_told_to(detach, target, examples, tmp_path):
    # vllm-project/speculators#846: it leaked into the layers.
    found = {}
    for weight in (0.0, 1.0):
        drafter = make_drafter("markov-vanilla", enable_confidence_head=True, confidence_head_with_markov=True)
        trainer = trainer_of(drafter, target, examples, tmp_path, confidence_weight=weight, confidence_detach=detach)
        found[weight] = gradients(trainer, [collate([AnchoredTexts(examples, num_anchors=6, seed=0)[0]])])[1]

    heads = {name for name in found[1.0] if name.startswith("confidence_head")}
    assert all(found[1.0][name].any() for name in heads)
    assert heads
    same = {name: torch.equal(found[1.0][name], gradient) for name, gradient in found[0.0].items()}
    assert all(same[name] == detach for name in ("fc.weight", "markov_head.markov_w1.weight"))
    assert all(same.values()) or not detach


def test_a_batch_without_anchors_is_harmless(target, examples, tmp_path):
    # NVIDIA-NeMo/Automodel#2406 and verl-project/verl#785.
    drafter = make_drafter()
    trainer = trainer_of(drafter, target, examples, tmp_path, stage="carryover")
    batch = collate([AnchoredTexts(examples, num_anchors=6, seed=0)[0]])
    batch["anchors"].fill_(-1)

    loss, found = gradients(trainer, [batch])

    assert loss == 0
    assert all(gradient.abs().max() == 0 for gradient in found.values())


@pytest.mark.parametrize("stage", ["carryover", "control"])
def test_the_first_steps_are_a_curriculum(stage, target, examples, tmp_path, monkeypatch):
    carried = []
    draft = Rehearsal.draft

    def watched(self, texts, reading, anchors, rejected=None, *, forward=None):
        if torch.is_grad_enabled():
            carried.append(0 if rejected is None else rejected.is_rejected.shape[2])
        return draft(self, texts, reading, anchors, rejected, forward=forward)

    monkeypatch.setattr(Rehearsal, "draft", watched)
    drafter = make_drafter()
    trainer = trainer_of(drafter, target, examples, tmp_path, stage=stage, curriculum_steps=2, max_steps=4)
    trainer.train()

    assert carried == ([1, 1, 4, 4] if stage == "carryover" else [0, 0, 0, 0])


def test_a_control_carries_nothing_when_it_decodes_either(target, examples, tmp_path):
    drafter = make_drafter()
    assert drafter.carry_enabled

    trainer_of(drafter, target, examples, tmp_path, stage="control").train()

    assert not drafter.carry_enabled


@pytest.mark.parametrize("stage", ["baseline", "carryover", "control"])
def test_the_target_is_left_as_it_was(stage, target, examples, tmp_path):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    target.train()

    trainer_of(make_drafter(), target, examples, tmp_path, stage=stage).train()

    assert not target.training  # as the trainer's docstring says
    assert not any(parameter.requires_grad for parameter in target.parameters())

    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())


def test_a_non_finite_loss_stops_with_the_examples(target, examples, tmp_path):
    drafter = make_drafter()
    trainer = trainer_of(drafter, target, examples, tmp_path)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = math.inf
    weights = drafter.norm.weight.clone()

    with pytest.raises(ValueError, match=r"Expected a finite loss, got nan at step 0 on the examples \[\d+, "):
        trainer.train()

    assert torch.equal(drafter.norm.weight, weights)


def test_a_step_sees_the_same_texts_and_fresh_anchors_on_each_reading(target, examples, tmp_path):
    trainer = trainer_of(make_drafter(), target, examples, tmp_path, steps_per_reading=3)
    readings = []
    trainer.rehearsal.target.register_forward_hook(lambda *_: readings.append(1))
    decoder = trainer.rehearsal.target.get_decoder().register_forward_hook(lambda *_: readings.append(1))

    trainer.train()
    decoder.remove()

    batches = list(trainer.get_train_dataloader())
    assert len(readings) == 2
    assert torch.equal(batches[0]["input_ids"], batches[2]["input_ids"])
    assert not torch.equal(batches[0]["anchors"], batches[1]["anchors"])


def test_every_checkpoint_loads_and_drafts(target, examples, tmp_path):
    # NVIDIA/Model-Optimizer#1621: checkpoints without loadable weights.
    drafter = make_drafter("markov-rnn")
    trainer_of(drafter, target, examples, tmp_path, max_steps=2, save_steps=1).train()

    for step in (1, 2):
        loaded = CarryoverDrafterModel.from_pretrained(tmp_path / f"checkpoint-{step}")
        ids = prompt()
        text = plain(target, input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=loaded)

        assert torch.equal(text, plain(target, input_ids=ids, attention_mask=torch.ones_like(ids)))
        assert loaded.last_stats.rounds
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stop", [1, 4, 7], ids=["at-the-first-step", "between-readings", "in-the-second-epoch"])
def test_an_interrupted_run_ends_bit_equal(stop, bf16, target, examples, tmp_path):
    settings = {"stage": "carryover", "max_steps": 10, "lr_scheduler_type": "cosine", "bf16": bf16}
    straight, resumed = make_drafter("markov-rnn"), make_drafter("markov-rnn")
    trainer_of(straight, target, examples, tmp_path / "straight", **settings).train()

    interruption = Interruption()

    class Stop(MarkComplete):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == stop - 1:
                signal.raise_signal(signal.SIGINT)

    with interruption:
        trainer_of(resumed, target, examples, tmp_path / "cut", [interruption, Stop()], **settings).train()
    again = make_drafter("markov-rnn", seed=99)
    trainer_of(again, target, examples, tmp_path / "cut", **settings).train(
        resume_from_checkpoint=last_checkpoint(tmp_path / "cut")
    )

    assert interruption.happened
    assert (tmp_path / "cut" / f"checkpoint-{stop}").is_dir()
    for name, tensor in straight.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_processes_stop_after_the_same_step_and_one_of_them_says_that_a_checkpoint_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(interruption_module, "gather_object", lambda mine: [*mine, True])  # another one was told
    interruption, control = Interruption(), TrainerControl()
    (tmp_path / "checkpoint-3").mkdir()
    args = arguments(tmp_path)

    interruption.on_step_end(args, TrainerState(), control)
    MarkComplete().on_save(args, TrainerState(global_step=3, is_world_process_zero=False), control)
    from_another = last_checkpoint(tmp_path)
    MarkComplete().on_save(args, TrainerState(global_step=3, is_world_process_zero=True), control)

    assert control.should_save
    assert control.should_training_stop
    assert from_another is None
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")


def test_a_checkpoint_that_was_cut_short_is_not_resumed_from(tmp_path):
    for step, whole in ((10, True), (9, True), (100, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if whole:
            (folder / "complete").touch()

    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_a_full_disk_is_told_and_the_last_whole_checkpoint_goes_on(target, examples, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class FullDisk(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:  # files can grow to 1 kB from here on
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))

    settings = {"save_steps": 2, "logging_steps": 100}
    trainer = trainer_of(
        make_drafter(), target, examples, tmp_path, callbacks=[MarkComplete(), FullDisk()], **settings
    )
    try:
        with pytest.raises(OSError, match=r"Expected room to save in .* it goes on from .*checkpoint-2\."):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    again = trainer_of(make_drafter(), target, examples, tmp_path, callbacks=[MarkComplete()], **settings)
    again.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    whole = make_drafter()
    trainer_of(whole, target, examples, tmp_path / "whole", **settings).train()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.rehearsal.drafter.state_dict()[name]), name


def test_sharding_the_drafter_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="`fsdp` must be left out"):
        arguments(tmp_path, fsdp="full_shard")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as `accelerate launch --use_fsdp` does
    with pytest.raises(ValueError, match="`fsdp` must be left out"):
        arguments(tmp_path)


def test_the_order_depends_on_seed_and_epoch_alone(target, examples, tmp_path):
    trainer = trainer_of(make_drafter(), target, examples, tmp_path)
    loader = trainer.get_train_dataloader()
    other = trainer_of(make_drafter("markov-rnn"), target, examples, tmp_path, stage="control").get_train_dataloader()

    first, second = ([batch["example"].tolist() for batch in each] for each in (loader, other))
    trainer.state.epoch = 1.0

    assert first == second
    assert sorted(example for batch in first[::2] for example in batch) == list(range(len(examples)))
    assert [batch["example"].tolist() for batch in loader] != first


def test_anchors_are_those_of_text_and_draw(examples):
    texts = AnchoredTexts(examples, num_anchors=4, seed=0)

    assert texts[Draw(3, 5)]["anchors"].tolist() == texts[Draw(3, 5)]["anchors"].tolist()
    assert texts[Draw(3, 5)]["anchors"].tolist() != texts[Draw(3, 6)]["anchors"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "markov-gated"])
def test_an_overfitted_drafter_drafts_nearly_whole_blocks(kind, target, tmp_path):
    # sgl-project/SpecForge#473: good loss, but labels one off from what decoding reads.
    examples = answered(target, count=20, tokens=30)
    drafter = make_drafter(kind, initializer_range=0.05)
    trainer = trainer_of(
        drafter, target, examples, tmp_path, max_steps=250, num_anchors=30, per_device_train_batch_size=20,
        validation=examples, validation_prompts=20, validation_tokens=24, learning_rate=0.01, logging_steps=50,
    )  # fmt: skip

    trainer.train()

    found = trainer.evaluate()
    assert found["eval_accepted_length"] > 0.85 * (drafter.config.num_drafts + 1)


@pytest.mark.slow
def test_two_processes_make_the_same_step_as_one(tmp_path):
    weights = {}
    for count in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", "-m"]
        out = tmp_path / f"{count}.json"
        done = subprocess.run(
            [*command, "tests.train_in_processes", str(out), str(count)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        weights[count] = json.loads(out.read_text())

    assert weights[2]["loss"] == pytest.approx(weights[1]["loss"], rel=1e-5)
    assert weights[2]["sums"] == pytest.approx(weights[1]["sums"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@torch.no_grad()
def test_the_teacher_is_the_targets_own_distribution(kind, tmp_path):
    # NVIDIA/Model-Optimizer#2186: teacher logits rebuilt from un-normed or wrong-layer states.
    cap = {"final_logit_softcapping": 3.0} if kind == "gemma3_text" else {}
    target = make_target(kind, **cap)
    examples = answered(target, count=4)
    drafter = make_drafter(draft_vocab_size=50, **cap)
    trainer = trainer_of(drafter, target, examples, tmp_path, l1_weight=1.0)
    batch = collate([AnchoredTexts(examples, num_anchors=3, seed=0)[i] for i in range(2)])
    texts = Texts(batch["input_ids"], batch["ends"])

    found = trainer.block_losses._teacher(texts, trainer.rehearsal.read(texts), batch["anchors"], 2)

    for row in range(2):
        whole = target(batch["input_ids"][row : row + 1, : batch["ends"][row]]).logits[0].softmax(-1)[:, :50]
        for block, anchor in enumerate(batch["anchors"][row].tolist()):
            torch.testing.assert_close(found[row, block], whole[anchor : anchor + 2], rtol=1e-4, atol=1e-5)

"""What buys accepted length per CPU hour? Drafters of a tiny target, each trained for the same CPU seconds.

    python benchmarks/laboratory.py --data smollm2_selfchat.jsonl.gz --out laboratory --seconds 90

First a tiny Llama learns the texts (their most used tokens), then it writes its own, and drafters are trained on
these, one setting changed at a time, two seeds each. ``results.json`` keeps what is done; the same call goes on. The
table shows tokens a round on prompts held out (greedy, real rounds, carry off).

Then what carried rows are worth there: from a drafter that was trained four times as long, a control and Carryover,
with carry embeddings of several first sizes, again for the same CPU seconds, and for four times as many. Beside
tokens a round with carry off and, of those that learned to carry, on, it shows what carried rows take off the loss
and how much attention they get. The last two do the same with blocks of 16 slots, as the paper's are, from a drafter
that was trained twelve times as long. A folder belongs to one ``--seconds``.
"""

import argparse
import json
import resource
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainerCallback

from hf_carryover import CarryoverDrafterConfig, CarryoverDrafterModel
from hf_carryover.training import CarryoverTrainer, CarryoverTrainingArguments, Example, read_examples
from hf_carryover.training.data import most_used_tokens

VOCAB, END, MASK = 4096, 0, 1  # ids of the tiny vocabulary: end of text, mask slots, then the most used tokens
PROMPT, ANSWER = 40, 96  # tokens
VARIED = 0.4  # share of an answer's tokens that must differ: so small a target often repeats itself
SHAPE = {"num_hidden_layers": 2, "block_size": 5, "draft_vocab_size": None}
SETTINGS: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "AdamW 6e-4": {"matrix_optimizer": "adamw", "learning_rate": 6e-4},
    "AdamW 3e-3": {"matrix_optimizer": "adamw", "learning_rate": 3e-3},
    "Muon 1e-3": {"learning_rate": 1e-3},
    "Muon 1e-2": {"learning_rate": 1e-2},
    "3 layers": {"num_hidden_layers": 3},
    "5 layers": {"num_hidden_layers": 5},
    "8 slots": {"block_size": 8},
    "16 slots": {"block_size": 16},
    "0.1 CE + 0.9 L1": {"ce_weight": 0.1, "l1_weight": 0.9},
    "KD instead of CE": {"ce_weight": 0.0, "kd_weight": 1.0},
    "D-PACE": {"slot_weights": "dpace"},
    "16 anchors": {"num_anchors": 16},
    "1 step a reading": {"steps_per_reading": 1},
    "4 steps a reading": {"steps_per_reading": 4},
    "draft vocabulary 1024": {"draft_vocab_size": 1024},
    "half of the texts": {"share": 0.5},
}

# Blocks as long as the paper's, with what the settings above like best; times are those of ``--seconds``.
LONG = {"block_size": 16, "num_hidden_layers": 3, "draft_vocab_size": 1024, "slot_weights": "dpace", "num_anchors": 16,
        "taught": 12, "times": 6}  # fmt: skip
# From one drafter: the same seconds without carried rows, and with them.
CARRIES: dict[str, dict[str, Any]] = {
    "control": {"stage": "control"},
    "E of 0.03": {"stage": "carryover", "carry_scale": 0.03},
    "E of 0.3": {"stage": "carryover"},
    "E of 3": {"stage": "carryover", "carry_scale": 3.0},
    "E of 0.3, anchor's row first": {"stage": "carryover", "curriculum_steps": 100},
    "control, 4 times as long": {"stage": "control", "times": 4},
    "E of 0.3, 4 times as long": {"stage": "carryover", "times": 4},
    "16 slots, control": {"stage": "control"} | LONG,
    "16 slots, E of 0.3": {"stage": "carryover"} | LONG,
}


class StopAfter(TrainerCallback):
    """Ends training once this process has used so many CPU seconds since it began."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start the clock."""
        self.end = cpu_seconds() + self.seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Look at it."""
        control.should_training_stop = cpu_seconds() > self.end


def cpu_seconds() -> float:
    """Of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def make_target(data: str, out: Path, *, steps: int) -> tuple[PreTrainedModel, list[Example]]:
    """A Llama of four layers that has learned the texts, and its own greedy continuations of their prompts."""
    if not (out / "texts.json").exists():
        from hf_carryover.targets import load_target

        _, tokenizer = load_target("smollm2")
        found = read_examples(data, tokenizer, max_length=512).examples
        known, _ = most_used_tokens(found, VOCAB - 2, always=[tokenizer.eos_token_id])
        table = torch.zeros(tokenizer.vocab_size + 64, dtype=torch.long)
        table[known] = torch.arange(2, VOCAB)
        rare = table == 0
        table[tokenizer.eos_token_id], rare[tokenizer.eos_token_id] = END, False
        whole = (torch.tensor(e.prompt_ids[-32:] + e.answer_ids) for e in found)
        texts = [table[ids[~rare[ids]]][: PROMPT + ANSWER] for ids in whole]
        torch.manual_seed(0)
        target = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=END,
                pad_token_id=END, tie_word_embeddings=True,
            )
        )  # fmt: skip
        teach(target, texts, steps=steps)
        target.save_pretrained(out / "target")
        rows = write(target.eval(), [text[:PROMPT] for text in texts])
        (out / "texts.json").write_text(json.dumps(rows))
    target = LlamaForCausalLM.from_pretrained(out / "target").eval()
    return target, [Example(*row) for row in json.loads((out / "texts.json").read_text())]


def teach(target: PreTrainedModel, texts: list[torch.Tensor], *, steps: int) -> None:
    """Plain language modelling."""
    optimizer = torch.optim.AdamW(target.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    order = torch.randint(len(texts), (steps, 16), generator=torch.Generator().manual_seed(0))
    for step, rows in enumerate(order):
        batch = torch.nn.utils.rnn.pad_sequence([texts[i] for i in rows], batch_first=True, padding_value=END)
        loss = target(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"target, step {step}: {loss.item():.3f}", flush=True)


def write(target: PreTrainedModel, prompts: list[torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """Greedy answers to prompts that are whole, but those that say the same over and over."""
    rows = []
    whole = [prompt for prompt in prompts if len(prompt) == PROMPT]
    for start in range(0, len(whole), 128):
        ids = torch.stack(whole[start : start + 128])
        text = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=ANSWER)
        for prompt, answer in zip(ids.tolist(), text[:, PROMPT:].tolist(), strict=True):
            end = answer.index(END) + 1 if END in answer else len(answer)
            if end > 2 and len(set(answer[:end])) > VARIED * end:
                rows.append((prompt, answer[:end]))
    return rows


def new_drafter(target: PreTrainedModel, examples: list[Example], *, seed: int, **shape: Any) -> CarryoverDrafterModel:
    """A drafter with random weights."""
    torch.manual_seed(seed)
    config, shape = target.config, SHAPE | shape
    drafter = CarryoverDrafterModel(
        CarryoverDrafterConfig(
            mask_token_id=MASK, target_layer_ids=[0, 1, 2], sample_from_anchor=False, vocab_size=VOCAB,
            hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
            num_target_layers=4, **shape,
        )
    )  # fmt: skip
    if shape["draft_vocab_size"]:
        drafter.draft_vocab_ids.copy_(most_used_tokens(examples, shape["draft_vocab_size"], always=[END])[0])
    return drafter


def train(
    drafter: CarryoverDrafterModel, target: PreTrainedModel, examples: list[Example], out: Path, *, seed: int,
    seconds: float, share: float = 1.0, **settings: Any,
) -> dict[str, float]:  # fmt: skip
    """Train for so many CPU seconds, and measure on prompts held out."""
    held, learn = examples[:64], examples[64:]
    defaults = {"num_anchors": 48, "gamma": 2.0}
    args = CarryoverTrainingArguments(
        output_dir=str(out / "run"), max_steps=100_000, lr_scheduler_type="constant_with_warmup", warmup_steps=20,
        seed=seed, save_strategy="no", eval_strategy="no", logging_steps=1000, disable_tqdm=True, use_cpu=True,
        bf16=False, validation_prompts=64, validation_tokens=64, **(defaults | settings),
    )  # fmt: skip
    trainer = CarryoverTrainer(
        drafter, target, args=args, examples=learn[: int(len(learn) * share)], validation=held,
        callbacks=[StopAfter(seconds)],
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    return {"steps": trainer.state.global_step} | {name.removeprefix("eval_"): found[name] for name in found}


def try_setting(
    target: PreTrainedModel, examples: list[Example], out: Path, changes: dict[str, Any], *, seed: int, seconds: float
) -> dict[str, float]:
    """A new drafter with some settings changed."""
    shape = {name: value for name, value in changes.items() if name in SHAPE}
    settings = {name: value for name, value in changes.items() if name not in SHAPE}
    drafter = new_drafter(target, examples[64:], seed=seed, **shape)
    return train(drafter, target, examples, out, seed=seed, seconds=seconds, **settings)


def try_carry(
    target: PreTrainedModel, examples: list[Example], out: Path, changes: dict[str, Any], *, seed: int, seconds: float
) -> dict[str, float]:
    """Further training of the seed's drafter of that shape, which is made where there is none."""
    shape = {name: value for name, value in changes.items() if name in SHAPE}
    settings = {name: value for name, value in changes.items() if name not in SHAPE}
    taught, times = settings.pop("taught", 4), settings.pop("times", 1)
    start = out / f"drafter-{(SHAPE | shape)['block_size']}-{seed}"
    if not start.exists():
        drafter = new_drafter(target, examples[64:], seed=seed, **shape)
        first = {name: value for name, value in settings.items() if name in ("slot_weights", "num_anchors")}
        train(drafter, target, examples, out, seed=seed, seconds=taught * seconds, **first)
        drafter.save_pretrained(unfinished := start.with_name(f"{start.name}.unfinished"))
        unfinished.rename(start)
    drafter = CarryoverDrafterModel.from_pretrained(start)
    return train(drafter, target, examples, out, seed=100 + seed, seconds=times * seconds, **settings)


def show(results: dict[str, dict[str, float]], settings: dict[str, dict[str, Any]]) -> None:
    """A line a setting: means, and both seeds."""
    columns = {"accepted_length": "carry off", "accepted_length_carry": "carry on", "steps": "steps",
               "estimate": "estimate", "carry_gain": "loss saved", "attention_mass": "attention"}  # fmt: skip
    shown = [{name: row for name, row in results.items() if name.rpartition(" seed ")[0] == one} for one in settings]
    used = {
        name: title for name, title in columns.items() if any(name in row for rows in shown for row in rows.values())
    }
    table = Table("setting", *used.values(), title="Tokens a round; each seed in brackets")
    for one, rows in zip(settings, shown, strict=True):
        if rows:
            table.add_row(one, *(seeds([*rows.values()], name) for name in used))
    Console(width=150).print(table)


def seeds(rows: list[dict[str, float]], name: str) -> str:
    """Mean, and each; nothing where it was not measured."""
    values = [row[name] for row in rows if name in row]
    mean = sum(values) / max(len(values), 1)
    return f"{mean:.3g} [{', '.join(f'{v:.3g}' for v in values)}]" if values else ""


def main() -> None:
    """Everything that ``results.json`` lacks, then the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90, help="CPU seconds of a training")
    parser.add_argument("--target-steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[*SETTINGS, *CARRIES], help="some of the settings, by name")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    target, examples = make_target(options.data, options.out, steps=options.target_steps)
    file = options.out / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for seed in range(options.seeds):
        for name, changes in (SETTINGS | CARRIES).items():
            if name not in options.only:
                continue
            key, attempt = f"{name} seed {seed}", try_carry if name in CARRIES else try_setting
            if key not in results:
                results[key] = attempt(target, examples, options.out, changes, seed=seed, seconds=options.seconds)
                file.write_text(json.dumps(results, indent=1))
                print(key, results[key], flush=True)
    show(results, SETTINGS)
    show(results, CARRIES)


if __name__ == "__main__":
    main()

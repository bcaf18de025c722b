"""Make a drafter in minutes: the target writes texts, a baseline learns from them, then Carryover; draw how it grew.

    python examples/train_drafter.py --out my_drafter

It is small on purpose: a drafter that helps needs hours (see `make_drafters.py`). The curve shows that it learns.
"""

import argparse
import json
from pathlib import Path

from matplotlib import pyplot as plt
from rich.console import Console

from hf_carryover.targets import load_target
from hf_carryover.training import (
    CarryoverTrainingArguments,
    DataArguments,
    RecipeArguments,
    TargetWriter,
    make_data,
    train_drafter,
)


def write_texts(name: str, out: Path, *, count: int) -> None:
    """The target invents prompts and answers them."""
    target, tokenizer = load_target(name)
    arguments = DataArguments(count=count, batch_size=16, max_new_tokens=96, max_prompt_tokens=64, keep_cut=True)
    writer = TargetWriter(target, tokenizer, arguments)
    counts = make_data(
        tokenizer, out, answer=writer.answer, invent=writer.invent, arguments=arguments, console=Console(stderr=True)
    )
    print(dict(counts))


def train(recipe: RecipeArguments, out: Path, stage: str, *, steps: int) -> list[dict[str, float]]:
    """One stage; returns its log."""
    if not (out / "training.json").exists():
        arguments = CarryoverTrainingArguments(
            output_dir=str(out), stage=stage, max_steps=steps, per_device_train_batch_size=4, num_anchors=24,
            eval_steps=max(1, steps // 5), logging_steps=max(1, steps // 10), validation_every=8, validation_texts=4,
            validation_prompts=3, validation_tokens=32, lr_scheduler_type="constant_with_warmup",
        )  # fmt: skip
        train_drafter(recipe, arguments)
    return json.loads((out / "training.json").read_text())["log"]


def draw(logs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Accepted length on validation prompts over steps, one stage after the other."""
    start = 0
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for stage, log in logs.items():
        rows = [row for row in log if "eval_accepted_length" in row]
        key = "eval_accepted_length_carry" if stage == "carryover" else "eval_accepted_length"
        axes.plot([start + row["step"] for row in rows], [row[key] for row in rows], marker="o", label=stage)
        start += rows[-1]["step"]
    axes.set(xlabel="steps", ylabel="tokens a round", title="Accepted length on prompts held out")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Data, baseline, Carryover, plot; what is already in the folder is not made again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path("my_drafter"))
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--draft-vocab", type=int, default=4096, help="tokens that may be drafted")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "data.jsonl"

    write_texts(options.target, data, count=options.texts)
    shape = {"target": options.target, "data": str(data)}
    baseline = RecipeArguments(**shape, num_layers=2, block_size=5, draft_vocab=options.draft_vocab)
    logs = {"baseline": train(baseline, options.out / "baseline", "baseline", steps=options.steps)}
    carryover = RecipeArguments(**shape, drafter=str(options.out / "baseline"))
    logs["carryover"] = train(carryover, options.out / "carryover", "carryover", steps=max(1, options.steps // 3))
    draw(logs, options.out / "accepted_length.png")
    print(f"The drafter is in {options.out / 'carryover'}, the plot in {options.out / 'accepted_length.png'}.")


if __name__ == "__main__":
    main()

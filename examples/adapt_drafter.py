"""Fit a drafter to your own prompts with LoRA, and see on prompts held out what that gained.

    python examples/adapt_drafter.py --drafter model_cards/smollm2-dflash-carryover --prompts mine.jsonl --out adapted

The prompts (JSONL, a text file with a prompt a line, or a Hub data set) are answered by the target; every fourth is
kept for the comparison. The result is a whole drafter in ``--out``/drafter, its adapter in the folder
``adapter`` there.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from hf_carryover import CarryoverDrafterModel
from hf_carryover.conversion import load_drafter
from hf_carryover.evaluation import EvaluationArguments, evaluate
from hf_carryover.prompts import read_prompts
from hf_carryover.targets import load_target
from hf_carryover.training import (
    CarryoverTrainingArguments,
    DataArguments,
    RecipeArguments,
    TargetWriter,
    make_data,
    train_drafter,
)


def split(prompts: str, out: Path) -> tuple[Path, Path]:
    """Prompts to learn from, and every fourth to compare on."""
    found = read_prompts(prompts).prompts
    files = out / "learn.jsonl", out / "held_out.jsonl"
    for path, rows in zip(files, ([p for i, p in enumerate(found) if i % 4], found[::4]), strict=True):
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return files


def accepted_length(result: dict, system: str) -> str:
    """Tokens a round of a system on the prompts held out, with its interval."""
    row = next(row for row in result["results"] if (row["set"], row["system"]) == ("all", system))
    low, high = row["accepted_length_interval"] or (row["accepted_length"],) * 2
    return f"{row['accepted_length']:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Answer, adapt, compare; what is already in the folder is not made again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", type=Path, default=Path("adapted"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)

    target, tokenizer = load_target(options.target)
    learn, held_out = split(options.prompts, options.out)
    texts = DataArguments(batch_size=16, max_new_tokens=options.max_new_tokens, keep_cut=True)
    writer = TargetWriter(target, tokenizer, texts)
    data = options.out / "data.jsonl"
    make_data(tokenizer, data, answer=writer.answer, prompts=learn, arguments=texts, console=console)

    before = load_drafter(options.drafter, target=target)
    result = options.out / "drafter"
    if not (result / "training.json").exists():
        recipe = RecipeArguments(target=options.target, data=str(data), drafter=options.drafter, lora_rank=16)
        stage = "carryover" if before.carry_enabled else "baseline"
        arguments = CarryoverTrainingArguments(
            output_dir=str(result), stage=stage, max_steps=options.steps, per_device_train_batch_size=4,
            num_anchors=32, learning_rate=1e-3, eval_strategy="no", logging_steps=5,
        )  # fmt: skip
        train_drafter(recipe, arguments)
    after = CarryoverDrafterModel.from_pretrained(result, dtype=target.dtype)

    measured = EvaluationArguments((100,), timed_per_set=1, max_new_tokens=options.max_new_tokens)
    system = "carry-on" if before.carry_enabled else "carry-off"
    for name, drafter in (("before", before), ("after", after)):
        found = evaluate(
            target, tokenizer, drafter, prompts=[held_out], out=options.out / name, arguments=measured, console=console
        )
        print(f"{name}: {accepted_length(found, system)} tokens a round on prompts held out")


if __name__ == "__main__":
    main()

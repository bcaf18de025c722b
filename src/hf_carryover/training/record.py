"""How was a drafter made? A record in its folder, begun with the training, so that it goes on as it began."""

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_carryover.evaluation.machine import describe_machine
from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.interruption import last_checkpoint, saving, steps_made

if TYPE_CHECKING:
    from hf_carryover.training.trainer import CarryoverTrainer

RECORD = "training.json"
UNFINISHED = f"{RECORD}.unfinished"
# Settings of the library that decide what is learned, beside our own.
LEARNED = (
    "seed", "data_seed", "gradient_accumulation_steps", "weight_decay", "max_grad_norm", "lr_scheduler_kwargs", "fp16",
    "world_size",
)  # fmt: skip
# What may change when a training goes on: how long it is, what is kept, and what it is validated on.
FREE = {"max_steps", "save_total_limit", "validation_texts", "validation_prompts", "validation_tokens"}


def begin(out: Path, recipe: dict[str, Any], args: CarryoverTrainingArguments) -> dict[str, Any]:
    """Settings and earlier stages of a training, kept in ``out`` until it is finished; those kept, if it goes on.

    Raises:
        ValueError: It was begun with other settings.
        OSError: The disk is full.
    """
    kept, texts = out / UNFINISHED, Path(recipe["data"])
    now: dict[str, Any] = {"recipe": recipe, "arguments": settings_of(args), "earlier": earlier(recipe["drafter"])}
    now["data_sha256"] = digest(texts) if texts.is_file() else None  # a missing file is told where it is read
    checkpoint = last_checkpoint(out)
    if 0 < args.max_steps < steps_made(checkpoint):
        raise ValueError(f"`max_steps` must be at least {steps_made(checkpoint)}, the steps that were made already in "
                         f"{out}, got {args.max_steps}.")  # fmt: skip
    if checkpoint is None or not kept.exists():
        if args.process_index == 0:
            with saving(out):
                out.mkdir(parents=True, exist_ok=True)
                _write(kept, now)
        return now
    begun: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    before, after = (side["recipe"] | side["arguments"] for side in (begun, json.loads(json.dumps(now))))
    changed = [name for name in after if name not in FREE and before.get(name) != after[name]]
    if recipe["lora_rank"] is not None and begun["earlier"] != now["earlier"]:  # its weights are read again
        raise ValueError(f"Expected the drafter that the adapter in {out} was begun on, found another in "
                         f"{recipe['drafter']}; put it back, or choose another folder.")  # fmt: skip
    if begun.get("data_sha256") != now["data_sha256"] and "data" not in changed:
        raise ValueError(f"Expected in {texts} the texts that the training in {out} was begun with, found others; "
                         "bring them back, or choose another folder.")  # fmt: skip
    if changed:
        told = ", ".join(f"{name} {after[name]!r} (begun with {before.get(name)!r})" for name in changed)
        raise ValueError(f"Expected the settings that the training in {out} was begun with, found {told}; "
                         "give those, or choose another folder.")  # fmt: skip
    return begun | {"arguments": now["arguments"]}


def finish(out: Path, begun: dict[str, Any], trainer: "CarryoverTrainer", dropped: dict[str, int]) -> None:
    """Write the record: command, settings, steps, time, machine, the stages before, and the log."""
    state = trainer.state
    record = {
        "command": shlex.join(sys.argv),
        "target": trainer.rehearsal.target.config.name_or_path,
        "recipe": begun["recipe"],
        "arguments": begun["arguments"],
        "data_sha256": begun["data_sha256"],
        "texts": len(trainer.examples),
        "texts_left_out": dropped,
        "steps": state.global_step,
        "epochs": state.epoch,
        "seconds": max((line.get("seconds", 0.0) for line in state.log_history), default=0.0),
        "machine": describe_machine(trainer.rehearsal.target),
        "earlier": begun["earlier"],
        "log": state.log_history,
    }
    with saving(out):
        _write(out / RECORD, record)
    (out / UNFINISHED).unlink(missing_ok=True)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def settings_of(args: CarryoverTrainingArguments) -> dict[str, Any]:
    """What was set of how a drafter learns."""
    plain = args.to_dict() | {"world_size": args.world_size}
    return {name: plain[name] for name in (*CarryoverTrainingArguments.__annotations__, *LEARNED)}


def earlier(drafter: str | None) -> list[dict[str, Any]]:
    """Records of the stages that a drafter folder went through, first one first, without their logs."""
    if drafter is None or not (Path(drafter) / RECORD).is_file():
        return []
    last = json.loads((Path(drafter) / RECORD).read_text(encoding="utf-8"))
    return [*last.pop("earlier", []), {name: value for name, value in last.items() if name != "log"}]

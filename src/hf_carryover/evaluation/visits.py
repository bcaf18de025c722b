"""What is measured on one prompt, and how is it kept? A visit runs every system; a log survives an interruption."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hf_carryover.evaluation.exactness import Difference, find_difference
from hf_carryover.evaluation.matched import Matched, run_matched
from hf_carryover.evaluation.runs import Run, System, decoding_options
from hf_carryover.evaluation.speed import run_in_turn


class Step(NamedTuple):
    """A visit to come: a set's prompt ``[1, T]`` by its number among those taken, and how it is run."""

    set: str
    number: int
    prompt: Tensor
    temperature: float
    timed: bool
    max_new_tokens: int
    repeats: int
    seed: int

    @property
    def decoding(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        return decoding_options(self.temperature, self.max_new_tokens)


@dataclass
class Visit:
    """What one step gave: each system's runs (one a repeat), and, if greedy, matched anchors and differences."""

    set: str
    number: int
    temperature: float
    timed: bool
    runs: dict[str, list[Run]]
    matched: Matched | None
    differences: list[Difference]


def visit(step: Step, systems: Sequence[System], target: PreTrainedModel, *, turn: int) -> Visit:
    """Run every system on a prompt: in turn, bare, as often as asked if timed; then what is measured beside the time.

    Where nothing is timed, systems that are there for their speed do not run; a greedy carry on runs once only, with
    its extra passes, as its text and rounds are the same; nor does plain run when sampling: no text is compared then.
    """
    greedy = step.temperature == 0
    shown = [system for system in systems if step.timed or not system.timed_only]
    bare = [system for system in shown if step.timed or system.name != ("carry-on" if greedy else "plain")]
    runs: dict[str, list[Run]] = {system.name: [] for system in shown}
    for repeat in range(step.repeats if step.timed else 1):
        order = run_in_turn(bare, target, step.prompt, turn=turn + repeat, seed=step.seed + repeat, **step.decoding)
        for name, result in order.items():
            runs[name].append(result)
    matched = None
    if greedy:
        drafter = next(system.drafter for system in systems if system.name == "carry-on")
        assert drafter is not None
        result, matched = run_matched(drafter, target, step.prompt, seed=step.seed, **step.decoding)
        runs["carry-on"] = runs["carry-on"] or [result]
    runs = {name: repeats for name, repeats in runs.items() if repeats}
    texts = {name: repeats[0].ids for name, repeats in runs.items()}
    found = [
        find_difference(system, target, step.prompt, plain_ids=texts["plain"], ids=texts[system.name], **step.decoding)
        for system in (shown if greedy else ())
    ]
    differences = [difference for difference in found if difference is not None]
    return Visit(step.set, step.number, step.temperature, step.timed, runs, matched, differences)


class VisitLog:
    """Finished visits on disk, a JSON line each, under a key of everything that they depend on.

    ``identity`` says what all visits have in common: models, systems, machine. A line that was cut off is removed.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.identity = json.dumps(identity, sort_keys=True)
        self.visits: dict[str, Visit] = {}
        *lines, torn = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        if torn:
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for line in lines:
            row = json.loads(line)
            self.visits[row["key"]] = _visit_from(row["visit"])

    def __contains__(self, step: Step) -> bool:
        return self._key(step) in self.visits

    def __getitem__(self, step: Step) -> Visit:
        return replace(self.visits[self._key(step)], number=step.number)

    def __setitem__(self, step: Step, visit: Visit) -> None:
        key = self._key(step)
        self.visits[key] = visit
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "visit": asdict(visit)}) + "\n")

    def _key(self, step: Step) -> str:
        # Where a prompt stands among those taken changes nothing about it: a longer evaluation has it, too.
        settings = [self.identity, step._asdict() | {"prompt": step.prompt.tolist(), "number": None}]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _visit_from(row: dict[str, Any]) -> Visit:
    runs = {name: [Run(**run) for run in runs] for name, runs in row.pop("runs").items()}
    matched, differences = row.pop("matched"), [Difference(**difference) for difference in row.pop("differences")]
    return Visit(**row, runs=runs, matched=None if matched is None else Matched(**matched), differences=differences)

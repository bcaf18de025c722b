"""What is asked for, and how far is it? Settings of `make_data`, and the file that grows batch by batch."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_carryover.chat import Conversation


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class DataArguments:
    """How texts are made; each field's help is what the command line shows."""

    count: int = _setting(1000, "Texts to make; of prompts given, the first so many are asked.")
    batch_size: int = _setting(32, "Texts that are generated together.")
    max_new_tokens: int = _setting(320, "Tokens of an answer, at most.")
    max_prompt_tokens: int = _setting(256, "Tokens of an invented user turn, at most.")
    temperature: float = _setting(0.0, "Of the answers; 0 is greedy.")
    prompt_temperature: float = _setting(0.9, "Of the invented user turns.")
    keep_cut: bool = _setting(False, "Keep answers that the length limit cut.")
    seed: int = _setting(0, "Seed of all sampling.")

    def __post_init__(self) -> None:
        for name in ("count", "batch_size", "max_new_tokens", "max_prompt_tokens"):
            if vars(self)[name] < 1:
                raise ValueError(f"`{name}` must be at least 1, got {vars(self)[name]}.")
        if min(self.temperature, self.prompt_temperature) < 0:
            raise ValueError(f"Temperatures must be at least 0, got {self.temperature}, {self.prompt_temperature}.")


class DataLog:
    """The file of texts and how far it is; a torn last line is removed. A file that was deleted is begun anew.

    Attributes:
        num_batches: Batches that are written.
        counts: Texts kept and dropped, by reason.
        fruitless: Batches in a row that kept nothing.
        prompts: Last turns of the texts that were in the file.
    """

    def __init__(self, out: Path, arguments: DataArguments, prompts: str, writer: str) -> None:
        self.out, self.progress = out, out.with_name(out.name + ".progress.json")
        self.settings = {**vars(arguments), "count": None, "prompts": prompts, "writer": writer}
        self.num_batches, self.fruitless = 0, 0
        self.counts, self.seen, self.prompts = Counter[str](), set[str](), list[str]()
        if out.suffix == ".gz":
            raise ValueError(f"Expected a file that grows line by line, got {out}; leave .gz out, compress it after.")
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.exists():
            return
        if not self.progress.exists():
            raise ValueError(f"Expected a new file or one that this command began, found {out}; choose another name.")
        saved = json.loads(self.progress.read_text(encoding="utf-8"))
        if {"writer": writer} | saved["settings"] != self.settings:
            raise ValueError(f"Expected {out} to be made with the same settings, found {saved['settings']}; "
                             "choose another file, or delete this one.")  # fmt: skip
        self.num_batches, self.counts = saved["batches"], Counter(saved["counts"])
        # Texts hold characters at which `splitlines` would split, too.
        written = out.read_text(encoding="utf-8")
        lines = [line for line in written.split("\n") if line][: self.counts["kept"]]
        if len(lines) < self.counts["kept"]:
            raise ValueError(f"Expected the {self.counts['kept']} texts written to {out}, found {len(lines)}; bring "
                             "them back, or delete the file.")  # fmt: skip
        if written != (whole := "".join(f"{line}\n" for line in lines)):  # what follows is made again
            _replace(out, whole)
        self.prompts = [json.loads(line)["prompt"] for line in lines]

    def is_new(self, prompt: Conversation) -> bool:
        """Whether a prompt has text that was not asked before; asking is noted."""
        key = _key([message["content"] for message in prompt])
        if not key or key in self.seen:
            return False
        self.seen.add(key)
        return True

    @property
    def num_taken(self) -> int:
        """Prompts of finished batches: each was kept, or dropped for a reason."""
        return self.counts.total()

    def add(self, rows: Sequence[dict[str, Any]], dropped: Counter[str]) -> None:
        """Write a batch, then that it is written."""
        with self.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        self.num_batches += 1
        self.fruitless = 0 if rows else self.fruitless + 1
        self.counts += dropped + Counter(kept=len(rows))
        saved = {"settings": self.settings, "batches": self.num_batches, "counts": self.counts}
        _replace(self.progress, json.dumps(saved))


def _replace(path: Path, content: str) -> None:
    """Write a file anew; whoever looks, or stops, in between finds the old one."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(path)


def _key(turns: Sequence[str]) -> str:
    return " ".join(" ".join(turns).lower().split())

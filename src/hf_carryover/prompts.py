"""Where do prompts come from? A JSONL file, a text file or a Hub data set, as named sets of conversations."""

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from hf_carryover.chat import Conversation

COLUMNS = ("turns", "prompt", "messages")
Item = TypeVar("Item")


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one source: what stands before the first answer, as chat messages ``{"role", "content"}``."""

    name: str
    prompts: list[Conversation]


def read_prompts(source: str | Path) -> PromptSet:
    """Read a set of prompts; it is named after its file or data set.

    Args:
        source: A ``.jsonl`` file whose objects have `turns` (the first is taken), `prompt` or `messages` (those before
            the first answer are taken); any other file as text, a prompt a line; or a Hub data set,
            ``owner/name[:config[:split]]`` with the same columns (default split: ``test``, else the first).

    Raises:
        ValueError: The source is missing, empty, or without a known column; the message says what to do.
        ImportError: A data set is asked for and the package ``datasets`` is not installed.
    """
    path = Path(source)
    if path.is_file():
        name, prompts = path.stem, _read_file(path)
    elif str(source).count("/") != 1 or path.is_absolute() or path.suffix in (".jsonl", ".json", ".txt"):
        raise ValueError(f"Expected a prompt file or a Hub data set (owner/name), found no {source}; check the path.")
    else:
        hub_id, _, config_and_split = str(source).partition(":")
        name, prompts = hub_id.split("/")[1], _read_data_set(hub_id, *config_and_split.partition(":")[::2])
    if not prompts:
        raise ValueError(f"Expected at least one prompt in {source}, found none; add one or leave the set out.")
    return PromptSet(name, prompts)


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` of the items, evenly spaced, the first among them (files are often sorted); all, if they are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _read_file(path: Path) -> list[Conversation]:
    try:
        lines = [(n, line) for n, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected UTF-8 text in {path}, got: {error}. Save the file as UTF-8.") from error
    if path.suffix not in (".jsonl", ".json"):
        return [_conversation({"prompt": line.strip()}, str(path)) for _, line in lines]
    return [_parse(line, f"line {n} of {path}") for n, line in lines]


def _parse(line: str, where: str) -> Conversation:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        return _conversation(row, where)
    raise ValueError(f"Expected one JSON object in {where}, found {line[:60]!r}; mend or remove it.")


def _read_data_set(name: str, config: str, split: str) -> list[Conversation]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"Reading the data set {name} needs a package that is missing; pip install datasets."
        ) from error
    try:
        splits: Mapping[str, Iterable[dict[str, Any]]] = datasets.load_dataset(name, config or None)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Expected a Hub data set {name} that can be loaded, got: {error}. Check its name."
        ) from error
    chosen = split or ("test" if "test" in splits else next(iter(splits)))
    if chosen not in splits:
        raise ValueError(f"Expected a split `{chosen}` in {name}, found {sorted(splits)}; name one of them.")
    return [_conversation(row, name) for row in splits[chosen]]


def _conversation(row: dict[str, Any], where: str) -> Conversation:
    match next(((column, row[column]) for column in COLUMNS if column in row), None):
        case ("turns", [str(text), *_]) | ("prompt", str(text)) if text.strip():
            return [{"role": "user", "content": text}]
        case ("messages", [{"role": "system" | "user", "content": str()}, *_] as turns) if all(map(_is_turn, turns)):
            return list(takewhile(lambda turn: turn["role"] != "assistant", turns))
        case None:
            raise ValueError(f"Expected `turns`, `prompt` or `messages` in {where}, found {sorted(row)}; rename one.")
        case (column, value):
            raise ValueError(f"Expected text in `{column}` of {where}, found {str(value)[:60]!r}; mend or remove it.")


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn

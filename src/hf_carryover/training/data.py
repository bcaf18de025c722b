"""Which texts does a drafter learn from? Prompts with the target's own answers, as ids, drawn in a fixed order."""

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_carryover.chat import render
from hf_carryover.training.masks import NO_ANCHOR


class Example(NamedTuple):
    """A text: prompt and answer ids; anchors are drawn from the answer alone."""

    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def length(self) -> int:
        """Tokens in all."""
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass
class Examples:
    """Texts of a file, and how many of its lines were left out, by reason."""

    examples: list[Example]
    dropped: Counter[str] = field(default_factory=Counter)

    def split(self, every: int) -> tuple[list[Example], list[Example]]:
        """Texts to train on, and every ``every``-th to validate with."""
        rows = self.examples
        return [e for i, e in enumerate(rows) if i % every], rows[::every]


def read_examples(
    source: str | Path, tokenizer: PreTrainedTokenizerBase, *, max_length: int, ends: Sequence[int] = ()
) -> Examples:
    """Read a JSONL file (or ``.gz``) of answered prompts.

    A line has ``prompt_ids`` and ``answer_ids``, as `hf-carryover data` writes them; or ``messages``, whose assistant
    turns are the answers; or ``prompt`` and ``answer`` texts. Texts are put through the chat template as a whole, and
    an answer is what the rendering up to its end adds to the rendering up to its start, end-of-turn token included:
    one of ``ends`` (`end_tokens` of the target) or the tokenizer's own.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line has no answer, or no line is left.
    """
    path, found = Path(source), Examples([])
    if not path.is_file():
        raise FileNotFoundError(f"Expected training data at {path}, found no file; make it with `hf-carryover data`.")
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            for example in _parse(line, tokenizer, ends, f"line {number} of {path}"):
                if len(example.answer_ids) < 2:
                    found.dropped["answer shorter than two tokens"] += 1
                elif example.length > max_length:
                    found.dropped[f"longer than {max_length} tokens"] += 1
                else:
                    found.examples.append(example)
    if not found.examples:
        raise ValueError(f"Expected texts with answers of two tokens or more in {path}, found none: "
                         f"{dict(found.dropped) or 'it is empty'}.")  # fmt: skip
    return found


def _parse(line: str, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], where: str) -> list[Example]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    match row:
        case {"prompt_ids": [int(), *_] as prompt_ids, "answer_ids": [*answer_ids]}:
            return [Example(prompt_ids, answer_ids)]
        case {"messages": [*messages]} if all(isinstance(message, dict) and "role" in message for message in messages):
            return answers_of(messages, tokenizer, where, ends=ends)
        case {"prompt": str(prompt), "answer": str(answer)}:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return answers_of(turns, tokenizer, where, ends=ends)
        case _:
            raise ValueError(
                "Expected `prompt_ids` and `answer_ids`, `messages` with a `role` each, or `prompt` and `answer` "
                f"in {where}, found "
                f"{sorted(row) if isinstance(row, dict) else line[:60]!r}; let the target answer: `hf-carryover data`."
            )


def answers_of(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, where: str, *, ends: Sequence[int] = ()
) -> list[Example]:
    """An example for each assistant turn; whole renderings are compared, so that a template may rewrite history."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError(f"Expected an assistant turn in {where}, found none; let the target answer first.")
    examples = []
    for turn in turns:
        start = render(messages[:turn], tokenizer, add_generation_prompt=True)
        whole = render(messages[: turn + 1], tokenizer, add_generation_prompt=False)
        if whole[: len(start)] != start:
            raise ValueError(
                f"Expected the chat template to render the answer of {where} after its prompt, found it changes the "
                "prompt; give `prompt_ids` and `answer_ids` instead."
            )
        answer = whole[len(start) :]
        # What the template adds after the end of the turn (a line break) is never generated.
        stops = [i for i, token in enumerate(answer) if token in {tokenizer.eos_token_id, *ends}]
        examples.append(Example(start, answer[: stops[-1] + 1] if stops else answer))
    return examples


class Draw(NamedTuple):
    """What the sampler asks for: an example, and which of its sets of anchors."""

    example: int
    number: int


class AnchoredTexts(Dataset[dict[str, Tensor]]):
    """Texts with anchors. Both are a function of seed and `Draw` alone, however batches are put together."""

    def __init__(self, examples: Sequence[Example], *, num_anchors: int, seed: int) -> None:
        self.examples, self.num_anchors, self.seed = examples, num_anchors, seed

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, draw: Draw | int) -> dict[str, Tensor]:
        """Ids ``[T]`` and anchors ``[M]``, -1 where the answer has fewer tokens."""
        index, number = draw if isinstance(draw, tuple) else (draw, 0)
        example = self.examples[index]
        first, choices = len(example.prompt_ids), len(example.answer_ids) - 1
        generator = torch.Generator().manual_seed(hash((self.seed, index, number)) % 2**63)
        chosen = first + torch.randperm(choices, generator=generator)[: self.num_anchors].sort().values
        anchors = torch.full((self.num_anchors,), NO_ANCHOR)
        anchors[: len(chosen)] = chosen
        return {
            "input_ids": torch.tensor(example.prompt_ids + example.answer_ids),
            "anchors": anchors,
            "example": torch.tensor(index),
        }


def collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad on the right: ``input_ids [N, T]``, ``ends [N]``, ``anchors [N, M]``, ``example [N]``."""
    texts = [item["input_ids"] for item in items]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
        "ends": torch.tensor([len(text) for text in texts]),
        "anchors": torch.stack([item["anchors"] for item in items]),
        "example": torch.stack([item["example"] for item in items]),
    }


class LikeLengths(Sampler[list[Draw]]):
    """Batches of texts of like length, in an order that depends on seed and epoch alone.

    Texts that fill no batch are left out, others in each epoch.
    Each batch comes ``repeats`` times in a row with fresh anchors, so that one pass of the target serves several
    steps; with several processes, the repeats of a batch go to the same one.
    """

    WINDOW = 32  # batches that are sorted among themselves

    def __init__(
        self, lengths: Sequence[int], *, batch_size: int, repeats: int, world: int, seed: int, epoch: Callable[[], int]
    ) -> None:
        if len(lengths) < batch_size * world and world > 1:  # the library would hand some process nothing
            raise ValueError(f"Expected at least {batch_size * world} texts to train on, a batch for each of {world} "
                             f"processes, got {len(lengths)}; give more, or a smaller batch.")  # fmt: skip
        self.lengths, self.batch_size, self.repeats = lengths, batch_size, repeats
        # Asked when batches are: what wraps a sampler in other processes, or to go on, does not pass an epoch on.
        self.world, self.seed, self.epoch = world, seed, epoch

    def __len__(self) -> int:
        return self._num_groups() * self.world * self.repeats

    def _num_groups(self) -> int:
        return max(1, len(self.lengths) // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch = self.epoch()
        generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        order = order[: len(order) // self.batch_size * self.batch_size] or order  # before they stand by length
        span = self.batch_size * self.WINDOW
        for start in range(0, len(order), span):
            order[start : start + span] = sorted(order[start : start + span], key=self.lengths.__getitem__)
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        shuffled = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        for i in range(self._num_groups()):
            group = shuffled[i * self.world : (i + 1) * self.world]
            for repeat in range(self.repeats):
                for batch in group:
                    yield [Draw(index, epoch * self.repeats + repeat) for index in batch]


def end_tokens(target: PreTrainedModel) -> list[int]:
    """Tokens that end the target's answers, which a draft vocabulary must have."""
    ends = target.generation_config.eos_token_id if target.generation_config is not None else None
    return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]


def most_used_tokens(examples: Sequence[Example], count: int, *, always: Sequence[int] = ()) -> tuple[Tensor, float]:
    """The ``count`` tokens that answers use most, increasing ``[count]``, and the share of answer tokens they cover.

    ``always`` (end of turn) comes first; ties go to the smaller id, and tokens never seen fill up from id 0.
    """
    if count < 1:
        raise ValueError(f"A draft vocabulary must have at least 1 token, got {count}.")
    seen = Counter(token for example in examples for token in example.answer_ids)
    by_use = sorted(seen, key=lambda token: (-seen[token], token))
    chosen = list(dict.fromkeys([*always, *by_use, *range(count)]))[:count]
    covered = sum(seen[token] for token in chosen) / max(1, sum(seen.values()))
    return torch.tensor(sorted(chosen)), covered

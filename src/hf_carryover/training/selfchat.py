"""Where do training texts come from? The target answers prompts, given or its own; bad text is dropped."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jinja2 import TemplateError
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_carryover.chat import Conversation, render
from hf_carryover.prompts import read_prompts
from hf_carryover.training.datalog import DataArguments, DataLog

# Under these the target invents user turns; each pulls towards another kind of text.
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You help a student with mathematics, step by step.",
    "You are an expert programmer who answers with code.",
    "You translate and explain languages.",
    "You summarise and rewrite the texts that the user pastes.",
    "You answer questions about a document that the user pastes.",
    "You are an encyclopedia: short questions, factual answers.",
    "You write stories, letters and articles.",
)
# Batches without a text worth keeping, after which it is plain that none will come.
MOST_FRUITLESS = 8
MARK = "\u241fmark\u241f"


class Answer(NamedTuple):
    """Ids of an answer, whether it ended by itself, and what is wrong with it, if that is known already."""

    ids: list[int]
    finished: bool
    problem: str | None = None


def make_data(
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path,
    *,
    answer: Callable[[Sequence[list[int]], Sequence[Conversation], int], list[Answer]],
    invent: Callable[[int], list[str]] | None = None,
    prompts: str | Path | None = None,
    writer: str = "",
    arguments: DataArguments | None = None,
    console: Console | None = None,
) -> Counter[str]:
    """Write texts to a JSONL file, batch by batch; the same call goes on where an interrupted one stopped.

    A line has ``prompt``, ``prompt_ids``, ``answer_ids`` (with the end-of-turn token if ``finished``), ``temperature``
    and ``finished``.

    Args:
        tokenizer: The target's.
        out: The file; beside it, ``.progress.json`` remembers what is done.
        answer: Answers a batch of prompts (ids, messages, number of the batch): `TargetWriter` or `ServerWriter`.
        invent: Makes a batch of user turns (number of the batch), where no prompts are given.
        prompts: A source as `read_prompts` takes it.
        writer: Who answers: a call that goes on must name the same.
        arguments: How; None: the defaults.
        console: Where progress is shown; None: nowhere.

    Returns:
        Texts written (``kept``) and dropped, by reason.
    """
    arguments = arguments or DataArguments()
    given = None if prompts is None else read_prompts(prompts).prompts[: arguments.count]
    if given is None and invent is None:
        raise ValueError("Expected prompts, or a target that invents them, got neither; name a file: --prompts.")
    log = DataLog(Path(out), arguments, str(prompts), writer)
    for prompt in _as_turns(log.prompts) if given is None else given[: log.num_taken]:
        log.is_new(prompt)
    total = arguments.count if given is None else len(given)
    with Progress(console=console, disable=console is None) as progress:
        task = progress.add_task("texts" if given is None else "prompts", total=total)
        while True:
            done = log.counts["kept"] if given is None else log.num_taken
            progress.update(task, completed=min(done, total))
            if done >= total:
                return log.counts
            if given is None and log.fruitless == MOST_FRUITLESS:
                raise ValueError(
                    f"Expected the target to invent prompts and answer them, kept nothing of {MOST_FRUITLESS} batches "
                    f"in a row: {dict(log.counts)}; allow more tokens, `--keep-cut`, or give prompts: --prompts."
                )
            batch = (
                given[log.num_taken :][: arguments.batch_size]
                if given is not None
                else _as_turns(invent(log.num_batches) if invent else ())
            )
            fresh = [prompt for prompt in batch if log.is_new(prompt)]
            ids = [render(prompt, tokenizer, add_generation_prompt=True) for prompt in fresh]
            rows, dropped = [], Counter[str]({"prompt seen before or empty": len(batch) - len(fresh)})
            for prompt, prompt_ids, found in zip(fresh, ids, answer(ids, fresh, log.num_batches), strict=True):
                reason = why_bad(found, keep_cut=arguments.keep_cut)
                if reason is not None:
                    dropped[reason] += 1
                    continue
                rows.append({"prompt": prompt[-1]["content"], "prompt_ids": prompt_ids, "answer_ids": found.ids,
                             "temperature": arguments.temperature, "finished": found.finished})  # fmt: skip
            log.add(rows, dropped)


def _as_turns(texts: Sequence[str]) -> list[Conversation]:
    return [[{"role": "user", "content": text}] for text in texts]


def why_bad(answer: Answer, *, keep_cut: bool) -> str | None:
    """Why an answer is not worth learning from, or None: known before, too short, cut off, or caught in a loop."""
    if answer.problem is not None:
        return answer.problem
    if len(answer.ids) < 3:
        return "answer too short"
    if not answer.finished and not keep_cut:
        return "answer cut by the length limit"
    return "answer loops" if loops(answer.ids) else None


def loops(ids: Sequence[int], *, longest: int = 32, times: int = 4) -> bool:
    """Whether a text ends in a piece of at most ``longest`` tokens, repeated four times and over 32 tokens or more.

    So a short row of dashes is no loop.
    """
    body = list(ids[:-1])  # the last token ends the turn
    for size in range(1, longest + 1):
        span = max(size * times, 32)
        tail = body[-span:]
        if len(tail) == span and tail[:-size] == tail[size:]:
            return True
    return False


@dataclass(frozen=True)
class TargetWriter:
    """Writes with the target itself, in left-padded batches of `generate`."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: DataArguments

    def answer(self, prompts: Sequence[list[int]], _: Sequence[Conversation], batch: int) -> list[Answer]:
        """Answers to prompts, given as ids."""
        return self._write(prompts, self.arguments.temperature, self.arguments.max_new_tokens, seed=2 * batch)

    def invent(self, batch: int) -> list[str]:
        """User turns that the target invents after the bare chat prefix (Magpie, arXiv 2406.08464)."""
        kinds = [SYSTEM_PROMPTS[i % len(SYSTEM_PROMPTS)] for i in range(self.arguments.batch_size)]
        prefixes = [user_prefix(self.tokenizer, kind) for kind in kinds]
        turns = self._write(
            prefixes, self.arguments.prompt_temperature, self.arguments.max_prompt_tokens, seed=2 * batch + 1
        )
        # A turn that never ends is no prompt.
        return [self.tokenizer.decode(t.ids, skip_special_tokens=True).strip() if t.finished else "" for t in turns]

    def _write(self, prompts: Sequence[list[int]], temperature: float, most: int, *, seed: int) -> list[Answer]:
        if not prompts:
            return []
        ids, mask = pad_left(prompts, self.target.device)
        torch.manual_seed(self.arguments.seed * 1_000_003 + seed)
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        text = self.target.generate(
            input_ids=ids, attention_mask=mask, do_sample=temperature > 0, max_new_tokens=most,
            repetition_penalty=1.0, pad_token_id=self.ends[0], **sampling,
        )  # fmt: skip
        return [self._cut(row) for row in text[:, ids.shape[1] :].tolist()]

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer."""
        eos = self.target.generation_config.eos_token_id
        return [self.tokenizer.eos_token_id] if eos is None else eos if isinstance(eos, list) else [eos]

    def _cut(self, ids: list[int]) -> Answer:
        end = next((i for i, token in enumerate(ids) if token in self.ends), None)
        return Answer(ids, False) if end is None else Answer(ids[: end + 1], True)


def user_prefix(tokenizer: PreTrainedTokenizerBase, system: str) -> list[int]:
    """The chat prompt up to where the user's text would start, under a system prompt if the template takes one."""
    turns = [{"role": "system", "content": system}, {"role": "user", "content": MARK}]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except TemplateError:  # some know no system turn
        text = tokenizer.apply_chat_template(turns[1:], tokenize=False)
    ids: list[int] = tokenizer(text[: text.index(MARK)], add_special_tokens=False).input_ids
    return ids


def pad_left(prompts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[N, T]`` of prompts that end together."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask

"""What does a user see first? Three answers, plain and with a drafter, coloured by who wrote each token."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_carryover.acceptance import DraftStats
from hf_carryover.chat import encode_prompt
from hf_carryover.evaluation.exactness import find_difference
from hf_carryover.evaluation.runs import decoding_options, drafting
from hf_carryover.modeling_carryover import CarryoverDrafterModel
from hf_carryover.streaming import StreamedToken, TokenStreamer
from hf_carryover.targets import TARGETS

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
    "List the days of the week, each with a short sentence about it.",
)
DRAFT_STYLE, OWN_STYLE = "green", "bold cyan"
# Verifying a block reads the weights once, as a single token does: where it takes so much longer, products are slow.
DEAR_BLOCK = 1.5


class OriginStreamer(TokenStreamer):
    """Prints text as it comes: accepted drafts in one style, the target's own tokens in another."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, drafter: CarryoverDrafterModel | None, console: Console
    ) -> None:
        super().__init__(tokenizer, drafter, self._show)
        self.console = console

    def _show(self, token: StreamedToken) -> None:
        self._print(token.text, DRAFT_STYLE if token.is_draft else OWN_STYLE)

    def _print(self, text: str, style: str) -> None:
        if self.console.is_terminal:
            self.console.out(text, style=style, end="", highlight=False)
        else:  # a file gets the text as it is: rich would expand tabs
            self.console.file.write(text)

    def end(self) -> None:
        """Print what waited for the rest of its character, and finish the line."""
        self._print(self.rest() + "\n", OWN_STYLE)


@dataclass
class Answer:
    """Ids with their prompt ``[1, T]``, number of new tokens, seconds, and the record of drafting."""

    ids: Tensor
    num_tokens: int
    seconds: float
    stats: DraftStats | None


def encode(tokenizer: Any, prompt: str, device: torch.device, *, raw: bool = False) -> dict[str, Tensor]:
    """The prompt's ids and mask, ``[1, T]`` each, under the chat template if there is one and ``raw`` is not set."""
    bare = raw or tokenizer.chat_template is None
    ids = encode_prompt([{"role": "user", "content": prompt}], tokenizer, raw=bare).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, Tensor],
    *,
    drafter: CarryoverDrafterModel | None,
    console: Console,
    **options: Any,
) -> Answer:
    """Stream one answer to the console; ``options`` are those of ``generate``."""
    streamer = OriginStreamer(tokenizer, drafter, console)
    started = time.perf_counter()
    ids = target.generate(**inputs, assistant_model=drafter, streamer=streamer, **options)
    seconds = time.perf_counter() - started
    return Answer(ids, ids.shape[1] - inputs["input_ids"].shape[1], seconds, drafter.last_stats if drafter else None)


def run_demo(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: CarryoverDrafterModel | None,
    *,
    max_new_tokens: int,
    console: Console,
) -> bool:
    """Answer the prompts with every system in turn, then compare; returns whether the texts were as they must be.

    The drafter hands over all drafts of its blocks, whether that pays or not, so that there is something to see.
    """
    options = decoding_options(0.0, max_new_tokens)
    systems = (None,) if drafter is None else (None, drafter)
    if drafter is not None:
        drafter.draft_length = None
    answers: list[list[Answer]] = []
    all_right = True
    for number, prompt in enumerate(PROMPTS):
        console.rule(f"[bold]{prompt}")
        inputs = encode(tokenizer, prompt, target.device)
        answers.append([])
        for system in systems:
            if number == 0:  # the first call of each system pays for what is built once
                target.generate(**inputs, assistant_model=system, do_sample=False, max_new_tokens=4)
            legend = f"with the drafter: [{DRAFT_STYLE}]accepted drafts[/], [{OWN_STYLE}]the target's own tokens[/]"
            console.print("[dim]plain[/dim]" if system is None else legend)
            answers[-1].append(answer(target, tokenizer, inputs, drafter=system, console=console, **options))
        if drafter is not None:
            texts = [given.ids for given in answers[-1]]
            is_right, verdict = compare_texts(target, drafter, inputs["input_ids"], *texts, **options)
            all_right &= is_right
            console.print(f"[dim]{verdict}[/dim]")
    console.print(speed_table(answers))
    if drafter is not None:
        console.print(what_limits(target, drafter, answers))
    return all_right


def compare_texts(
    target: PreTrainedModel, drafter: CarryoverDrafterModel, prompt: Tensor, plain: Tensor, drafted: Tensor,
    **options: Any,
) -> tuple[bool, str]:  # fmt: skip
    """Whether two greedy texts ``[1, T]`` after a prompt are as they must be (`find_difference`), in a sentence.

    ``options`` are those of ``generate`` that both were written with.
    """
    system, length = drafting("drafter", drafter, carry=drafter.carry_enabled), prompt.shape[1]
    theirs, ours = (text[0, length:].tolist() for text in (plain, drafted))
    found = find_difference(system, target, prompt, plain_ids=theirs, ids=ours, **options)
    if found is None:
        return True, "Identical token ids."
    place = f"token {found.position} of the answer, where the target's logits for the two are {found.gap:.4f} apart"
    if found.explained:
        return True, f"The texts part at {place}; that is rounding."
    return False, f"THE TEXTS DIFFER at {place}. Please report this."


def speed_table(answers: list[list[Answer]]) -> Table:
    """Tokens a second of both systems, their ratio, and accepted length, for each prompt and pooled."""
    table = Table("prompt", "plain, tokens/s", "drafter, tokens/s", "ratio", "accepted length", "rounds")
    for name, group in [*((str(i + 1), [row]) for i, row in enumerate(answers)), ("all", answers)]:
        systems = list(zip(*group, strict=True))
        rates = [sum(a.num_tokens for a in system) / sum(a.seconds for a in system) for system in systems]
        cells = [f"{rates[0]:.1f}", *["-"] * 4]
        if len(rates) == 2:
            stats = DraftStats([r for a in systems[1] if a.stats for r in a.stats.rounds])
            cells[1:] = [f"{rates[1]:.1f}", f"{rates[1] / rates[0]:.2f}", f"{stats.accepted_length:.2f}"]
            cells.append(str(len(stats.rounds)))
        table.add_row(name, *cells)
    return table


def what_limits(target: PreTrainedModel, drafter: CarryoverDrafterModel, answers: list[list[Answer]]) -> str:
    """One measured sentence: what a round costs in plain tokens, and so which accepted length breaks even."""
    ids, num_rows = answers[0][0].ids, drafter.config.num_drafts + 1
    one, block = pass_seconds(target, ids, 1), pass_seconds(target, ids, num_rows)
    stats = DraftStats([r for row in answers if row[1].stats for r in row[1].stats.rounds])
    # Of whole calls: on a GPU, drafting is launched and not waited for, so that its own clock does not see its work.
    plain, drafted = (sum(row[i].seconds for row in answers) for i in (0, 1))
    cost = drafted / max(len(stats.rounds), 1) / (plain / sum(row[0].num_tokens for row in answers))
    advice = ""
    if target.device.type == "cpu" and block > DEAR_BLOCK * one and "MKL_CBWR" not in os.environ:
        advice = " On an AMD processor, `export MKL_CBWR=AVX2` makes verifying cheaper (README, When it pays)."
    return (
        f"A round took {cost:.1f} plain tokens here (verifying {num_rows} rows takes {block / one:.1f}, the rest is "
        f"drafting), so an accepted length of {cost:.1f} breaks even; it was {stats.accepted_length:.2f}. This demo "
        "hands over all drafts; `generate` by default as many as pay on this machine (`drafter.draft_length`)."
        + advice
    )


def pass_seconds(target: PreTrainedModel, ids: Tensor, num_rows: int, *, repeats: int = 5) -> float:
    """Median seconds of a target pass over the last ``num_rows`` of ids ``[1, T]`` on a cache of those before."""
    times = []
    with torch.no_grad():
        cache = target(ids[:, :-num_rows], use_cache=True).cache
        for _ in range(repeats + 1):
            started = time.perf_counter()
            target(ids[:, -num_rows:], cache=cache, use_cache=True)
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
            cache.crop(-num_rows)
    return sorted(times[1:])[repeats // 2]


def default_drafter(target: str) -> Path | None:
    """The first drafter of the checkout's ``model_cards/``, which are for the embedded target; None beside others."""
    folders = sorted((Path(__file__).parents[2] / "model_cards").glob("*")) if target in TARGETS else []
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)

"""Which prompts are visited, and how? From sets and settings to steps; what cannot run gets a sentence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_carryover.chat import encode_prompt
from hf_carryover.evaluation.acceptance import FEWEST
from hf_carryover.evaluation.summary import POOLED
from hf_carryover.evaluation.visits import Step
from hf_carryover.prompts import PromptSet, evenly_spaced, read_prompts


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EvaluationArguments:
    """What is measured; each field's help is what the command line shows."""

    prompts_per_set: Sequence[int] = _setting((8,), "Prompts of a set, evenly spaced; once, or for each temperature.")
    timed_per_set: int | None = _setting(None, "How many of them are timed; all, if not given.")
    max_new_tokens: int = _setting(64, "New tokens a prompt, at most.")
    temperatures: Sequence[float] = _setting((0.0,), "0 is greedy; several may be given.")
    repeats: int = _setting(1, "Times that every system runs on a timed prompt.")
    seed: int = _setting(0, "Seed of sampling.")
    raw: bool = _setting(False, "Feed prompts as they are, without the chat template.")
    draft_lengths: Sequence[int] = _setting((1, 2, 3, 4, 6, 8), "Fixed draft lengths beside the automatic ones.")

    def __post_init__(self) -> None:
        if len(self.prompts_per_set) not in (1, len(self.temperatures)):
            raise ValueError(
                f"`prompts_per_set` must be one number or one for each of the {len(self.temperatures)} temperatures, "
                f"got {list(self.prompts_per_set)}."
            )
        if min(self.temperatures, default=-1) < 0:
            raise ValueError(f"`temperatures` must be numbers from 0 on, at least one, got {list(self.temperatures)}.")
        # The prompt's pass gives a token of its own: a round needs a second one.
        for name, found, smallest in (
            ("prompts_per_set", min(self.prompts_per_set), 1),
            ("timed_per_set", 1 if self.timed_per_set is None else self.timed_per_set, 1),
            ("max_new_tokens", self.max_new_tokens, 2),
            ("repeats", self.repeats, 1),
            ("draft_lengths", min(self.draft_lengths, default=1), 1),
        ):
            if found < smallest:
                raise ValueError(f"`{name}` must be at least {smallest}, got {found}.")


def plan(
    sources: Sequence[str | Path],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: EvaluationArguments,
) -> tuple[list[Step], dict[str, str], list[str]]:
    """The prompts to visit; why sets cannot be measured, by source; what else a reader should know."""
    steps: list[Step] = []
    failed: dict[str, str] = {}
    notes: list[str] = []
    for source in sources:
        try:
            prompt_set = read_prompts(source)
            if prompt_set.name in {POOLED, *(step.set for step in steps)}:
                raise ValueError(
                    f"Expected a set with a new name, but {source} is another `{prompt_set.name}`; rename it."
                )
            steps += _plan_set(prompt_set, target, tokenizer, arguments, notes)
        except (ValueError, ImportError) as error:
            failed[str(source)] = str(error)
    return steps, failed, list(dict.fromkeys(notes))


def _plan_set(
    prompt_set: PromptSet,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: EvaluationArguments,
    notes: list[str],
) -> list[Step]:
    """A set's steps for every temperature; prompts that are too long are left out, with a note."""
    name, length = prompt_set.name, context_length(target) or tokenizer.model_max_length
    room = length - arguments.max_new_tokens
    steps: list[Step] = []
    counts = list(arguments.prompts_per_set) * (len(arguments.temperatures) // len(arguments.prompts_per_set))
    for temperature, count in zip(arguments.temperatures, counts, strict=True):
        chosen = evenly_spaced(prompt_set.prompts, count)
        encoded = [encode_prompt(prompt, tokenizer, raw=arguments.raw).to(target.device) for prompt in chosen]
        for ids in encoded:
            if ids.shape[1] > room:
                notes.append(
                    f"A prompt of `{name}` is left out: it has {ids.shape[1]} tokens, but the target's context has "
                    f"room for {room} beside {arguments.max_new_tokens} new ones; shorten it or ask for fewer."
                )
        fitting = [ids for ids in encoded if ids.shape[1] <= room]
        timed = evenly_spaced(range(len(fitting)), arguments.timed_per_set or len(fitting))
        steps += [
            Step(name, i, ids, temperature, i in timed, arguments.max_new_tokens, arguments.repeats, arguments.seed)
            for i, ids in enumerate(fitting)
        ]
        for what, found in (("prompts", len(fitting)), ("timed prompts", len(timed))):
            if found < FEWEST:
                notes.append(f"Temperature {temperature:g}: a set has {found} {what}; an interval takes {FEWEST}.")
    if not steps:
        raise ValueError(f"Expected a prompt of at most {room} tokens in `{name}`, found none; shorten them.")
    return steps


def context_length(target: PreTrainedModel) -> int | None:
    """Tokens that the target takes; None where its configuration does not say so."""
    config, name = target.config.get_text_config(decoder=True), "max_position_embeddings"
    length: int | None = config.max_position_embeddings if name in {*config.to_dict(), *config.attribute_map} else None
    return length

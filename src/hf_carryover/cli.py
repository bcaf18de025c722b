"""What can be done from a shell? One thin command for each thing: parse, call, show."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hf_carryover.evaluation import EvaluationArguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_carryover.modeling_carryover import CarryoverDrafterModel

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# Answers go to standard output, everything about them to standard error.
console, notes = Console(highlight=False), Console(highlight=False, soft_wrap=True, stderr=True)


@app.callback()
def about() -> None:
    """Carryover Drafting for Hugging Face Transformers: the same text, faster."""


def setting(name: str) -> Any:
    """The option of one of `EvaluationArguments`, with that field's help."""
    return typer.Option(help=EvaluationArguments.__dataclass_fields__[name].metadata["help"])


@app.command()
def evaluate(
    target: Annotated[str, typer.Option(help="Model folder or Hub id.")],
    drafter: Annotated[str, typer.Option(help="Drafter folder or Hub id.")],
    prompts: Annotated[list[str], typer.Option(help="JSONL or text file, or Hub data set; more may follow.")],
    out: Annotated[Path, typer.Option(help="Folder of the report; the same command goes on where it stopped.")],
    more_prompts: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    control: Annotated[str | None, typer.Option(help="A drafter trained alike, without carried rows.")] = None,
    prompts_per_set: Annotated[Sequence[int], setting("prompts_per_set")] = EvaluationArguments.prompts_per_set,
    timed_per_set: Annotated[int | None, setting("timed_per_set")] = EvaluationArguments.timed_per_set,
    max_new_tokens: Annotated[int, setting("max_new_tokens")] = EvaluationArguments.max_new_tokens,
    temperatures: Annotated[Sequence[float], setting("temperatures")] = EvaluationArguments.temperatures,
    repeats: Annotated[int, setting("repeats")] = EvaluationArguments.repeats,
    seed: Annotated[int, setting("seed")] = EvaluationArguments.seed,
    raw: Annotated[bool, setting("raw")] = EvaluationArguments.raw,
    dtype: Annotated[
        str, typer.Option(help="auto (bf16 where the hardware multiplies in it), fp32 or bf16.")
    ] = "auto",
) -> None:
    """Measure what a drafter is worth: accepted length, speed beside its rivals, and exactness."""
    from hf_carryover import evaluation

    arguments = EvaluationArguments(
        prompts_per_set, timed_per_set, max_new_tokens, temperatures, repeats=repeats, seed=seed, raw=raw
    )
    model, tokenizer = load_model(target, dtype)
    assistant, rival = (None if name is None else load_assistant(name, model) for name in (drafter, control))
    assert assistant is not None
    summary = evaluation.evaluate(
        model, tokenizer, assistant, prompts=[*prompts, *(more_prompts or ())], out=out, control=rival,
        arguments=arguments, console=notes,
    )  # fmt: skip
    console.print(evaluation.results_table(summary))
    console.print(f"The whole report is {out / 'report.md'}.")
    for sentence in summary["notes"]:
        notes.print(sentence, style="yellow", markup=False)
    problems = evaluation.problems(summary)
    for sentence in problems:
        notes.print(sentence, style="red", markup=False)
    raise typer.Exit(1 if problems else 0)


def load_model(name: str, dtype: str) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Load a target and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtypes = {"auto": "auto", "fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype not in dtypes:
        raise ValueError(f"Expected `--dtype` auto, fp32 or bf16, got {dtype!r}; choose one of them.")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtypes[dtype]).eval()
    return model, AutoTokenizer.from_pretrained(name)


def load_assistant(source: str, model: "PreTrainedModel") -> "CarryoverDrafterModel":
    """Load a drafter in the target's dtype."""
    from hf_carryover.conversion import load_dflash

    return load_dflash(source, target=model, dtype=model.dtype)


def main() -> None:
    """The command `hf-carryover`; a user's error is one plain sentence and exit code 1."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        notes.print(" ".join(str(error).split()), style="red", markup=False)
        sys.exit(1)

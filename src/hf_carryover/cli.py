"""What can be done from a shell? One thin command for each thing: parse, call, show."""

import os
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console

from hf_carryover.evaluation import EvaluationArguments
from hf_carryover.training import DataArguments

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_carryover.modeling_carryover import CarryoverDrafterModel

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# Answers go to standard output, everything about them to standard error.
console, notes = Console(highlight=False, soft_wrap=True), Console(highlight=False, soft_wrap=True, stderr=True)

TargetOption = Annotated[str, typer.Option(help="Embedded target (smollm2), model folder or Hub id.")]
DtypeOption = Annotated[str, typer.Option(help="auto (bf16 where the hardware multiplies in it), fp32 or bf16.")]
TokensOption = Annotated[int, typer.Option(min=1, help="Most new tokens of an answer.")]


@app.callback()
def about() -> None:
    """Carryover Drafting for Hugging Face Transformers: make, measure and use drafters for `generate`."""


@app.command()
def demo(
    target: TargetOption = "smollm2",
    drafter: Annotated[
        str | None, typer.Option(help="Drafter folder or Hub id; by default one beside the code.")
    ] = None,
    dtype: DtypeOption = "auto",
    max_new_tokens: TokensOption = 64,
) -> None:
    """Answer three prompts twice, plain and with a drafter; compare speed and text."""
    from hf_carryover.demo import default_drafter, run_demo

    model, tokenizer = load_model(target, dtype)
    assistant = load_assistant(drafter or default_drafter(target), model)
    if not run_demo(model, tokenizer, assistant, max_new_tokens=max_new_tokens, console=console):
        raise typer.Exit(1)


@app.command()
def generate(
    target: TargetOption,
    drafter: Annotated[str | None, typer.Option(help="Drafter folder or Hub id; without one, plain decoding.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The user's message; without it, standard input is read.")] = None,
    carry: Annotated[bool | None, typer.Option(help="Carry rejected rows; by default if it learnt to.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_new_tokens: TokensOption = 256,
    seed: Annotated[int | None, typer.Option(help="For sampling: the same seed gives the same text.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it stands, no chat template.")] = False,
    dtype: DtypeOption = "auto",
) -> None:
    """Answer one prompt, streaming."""
    from transformers import set_seed

    from hf_carryover.demo import answer, encode

    message = sys.stdin.read().rstrip("\n") if prompt is None else prompt
    if not message.strip():
        raise ValueError("Expected a prompt, got an empty one; pass `--prompt` or text on standard input.")
    model, tokenizer = load_model(target, dtype)
    assistant = load_assistant(drafter, model)
    if assistant is not None and carry is not None:
        assistant.carry_enabled = carry
    if seed is not None:
        set_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    inputs = encode(tokenizer, message, model.device, raw=raw)
    given = answer(
        model, tokenizer, inputs, drafter=assistant, console=console, max_new_tokens=max_new_tokens, **sampling
    )
    length = f", accepted length {given.stats.accepted_length:.2f}" if given.stats else ""
    notes.print(f"[dim]{given.num_tokens} tokens, {given.num_tokens / given.seconds:.1f} tokens/s{length}[/dim]")


def setting(name: str, arguments: type[EvaluationArguments | DataArguments] = EvaluationArguments) -> Any:
    """The option of one of the arguments, with that field's default and help."""
    field = next(field for field in fields(arguments) if field.name == name)
    default: Any = field.default
    shown = str(default)
    if isinstance(default, tuple):
        default, shown = list(default), " ".join(map(str, default))
    return typer.Option(help=field.metadata["help"], default_factory=lambda: default, show_default=shown)


@app.command()
def evaluate(
    *,
    target: TargetOption,
    drafter: Annotated[str, typer.Option(help="Drafter folder or Hub id.")],
    prompts: Annotated[list[str], typer.Option(help="JSONL or text file, or Hub data set; more may follow.")],
    out: Annotated[Path, typer.Option(help="Folder of the report; the same command goes on; more prompts add to it.")],
    more_prompts: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    control: Annotated[str | None, typer.Option(help="A drafter trained alike, without carried rows.")] = None,
    prompts_per_set: Annotated[list[int], setting("prompts_per_set")],
    timed_per_set: Annotated[int | None, setting("timed_per_set")],
    max_new_tokens: Annotated[int, setting("max_new_tokens")],
    temperatures: Annotated[list[float], setting("temperatures")],
    repeats: Annotated[int, setting("repeats")],
    seed: Annotated[int, setting("seed")],
    raw: Annotated[bool, setting("raw")],
    draft_lengths: Annotated[list[int], setting("draft_lengths")],
    dtype: DtypeOption = "auto",
) -> None:
    """Measure what a drafter is worth: accepted length, speed beside its rivals, and exactness."""
    from hf_carryover import evaluation

    arguments = EvaluationArguments(
        prompts_per_set, timed_per_set, max_new_tokens, temperatures, repeats=repeats, seed=seed, raw=raw,
        draft_lengths=draft_lengths,
    )  # fmt: skip
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


@app.command()
def data(
    *,
    target: TargetOption = "smollm2",
    out: Annotated[Path, typer.Option(help="JSONL file; the same command goes on where it stopped.")],
    prompts: Annotated[
        str | None, typer.Option(help="JSONL or text file, or Hub data set; without it, the target invents them.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server that runs the target, e.g. http://host:8000/v1.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(help="The target's name there; by default its own.")] = None,
    count: Annotated[int, setting("count", DataArguments)],
    batch_size: Annotated[int, setting("batch_size", DataArguments)],
    max_new_tokens: Annotated[int, setting("max_new_tokens", DataArguments)],
    max_prompt_tokens: Annotated[int, setting("max_prompt_tokens", DataArguments)],
    temperature: Annotated[float, setting("temperature", DataArguments)],
    prompt_temperature: Annotated[float, setting("prompt_temperature", DataArguments)],
    keep_cut: Annotated[bool, setting("keep_cut", DataArguments)],
    seed: Annotated[int, setting("seed", DataArguments)],
    dtype: DtypeOption = "auto",
) -> None:
    """Let the target answer prompts, or invent and answer them: texts to train a drafter on."""
    from hf_carryover.training import ServerWriter, TargetWriter, make_data

    arguments = DataArguments(
        count, batch_size, max_new_tokens, max_prompt_tokens, temperature, prompt_temperature, keep_cut, seed
    )
    server = None if endpoint is None else ServerWriter.of(target, endpoint, endpoint_model or target, arguments)
    local = None if server and prompts else TargetWriter(*load_model(target, dtype), arguments)  # invents, or answers
    writer: Any = server or local
    counts = make_data(
        writer.tokenizer, out, answer=writer.answer, invent=local.invent if local else None, prompts=prompts,
        writer=f"{target} {endpoint_model or ''}".strip(), arguments=arguments, console=notes,
    )  # fmt: skip
    console.print(f"{counts.pop('kept', 0)} texts in {out}.")
    for reason, number in counts.items():
        console.print(f"{number} dropped: {reason}.")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Drafter folder, with its card and evaluation.")],
    name: Annotated[str, typer.Argument(help="Hub repository, owner/name; made if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private.")] = False,
) -> None:
    """Upload a drafter folder to the Hub, as it is, in one commit; log in first with `hf auth login`."""
    from huggingface_hub import HfApi

    # The library's own name for what its HTTP client raises, which differs between its versions.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    from hf_carryover.modeling_carryover import CarryoverDrafterModel

    CarryoverDrafterModel.from_pretrained(folder)  # a folder that does not load is not shared
    try:
        api = HfApi()
        url = api.create_repo(name, private=private or None, exist_ok=True)  # None: as its owner has it
        if private and not api.model_info(name).private:  # one that is there stays as it is
            raise ValueError(f"Expected {name} to be private, found it public; make it so there, or choose another "
                             "name. Nothing was uploaded.")  # fmt: skip
        # Old weights go in the same commit: a single file would win over new shards.
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Drafter",
            ignore_patterns=["checkpoint-*", "*.log", "visits.jsonl"],
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
        )  # fmt: skip
    except HTTPError as error:
        raise OSError(
            f"Expected {name} to take the upload, got: {error}. No file changed there; try again."
        ) from error
    console.print(f"{url}")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(context: typer.Context) -> None:
    """Train a drafter: a recipe in YAML, or flags, or both (flags win). `train --help` lists them."""
    from transformers import HfArgumentParser

    from hf_carryover.training import CarryoverTrainingArguments, RecipeArguments, read_recipe, train_drafter

    parser = HfArgumentParser([RecipeArguments, CarryoverTrainingArguments], prog="hf-carryover train [RECIPE.yaml]")
    recipe, arguments = parser.parse_args_into_dataclasses(read_recipe(context.args))
    try:
        train_drafter(recipe, arguments)
    except KeyboardInterrupt as stop:
        notes.print(str(stop) or "Stopped; nothing new was saved.", style="yellow", markup=False)
        raise typer.Exit(130) from None
    console.print(f"The drafter is in {arguments.output_dir}.")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Drafter folder or Hub id: ours, z-lab, DeepSpec or speculators.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    to: Annotated[str, typer.Option(help="carryover, or for engines: z-lab, deepspec, speculators.")] = "carryover",
    target: Annotated[str | None, typer.Option(help="The drafter's target; needed if a format holds copies.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Propose only the so many tokens that the answers in --prompts use most.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="The target's answers (JSONL), as `data` makes them.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the drafter's weights: fp32, bf16, or auto: as it was.")] = "auto",
) -> None:
    """Turn a public drafter into one of ours, or ours into a folder that other engines read."""
    from hf_carryover.conversion import convert_drafter

    model, tokenizer = (None, None) if target is None else load_model(target, "auto")
    ids, kind = None, None if dtype == "auto" else torch_dtype(dtype)
    if draft_vocab is not None or prompts is not None:
        ids = answer_tokens(draft_vocab, prompts, model, tokenizer)
    drafter = convert_drafter(source, out, to=to, target=model, token_ids=ids, dtype=kind)
    carries = ", with its carry embedding" if drafter.carry_embedding.any() else ""
    console.print(f"The drafter is in {out} ({to}{carries}).")


@app.command()
def card(folder: Annotated[Path, typer.Argument(help="Drafter folder; its README.md is written anew.")]) -> None:
    """Render a drafter's model card from its files."""
    from hf_carryover.model_card import write_card

    console.print(f"The card is {write_card(folder)}.")


def answer_tokens(
    count: int | None,
    answers: Path | None,
    model: "PreTrainedModel | None",
    tokenizer: "PreTrainedTokenizerBase | None",
) -> "Tensor":
    """The tokens that answers use most, with a word about how much of them that is."""
    from hf_carryover.training.data import end_tokens, most_used_tokens, read_examples

    if count is None or answers is None or model is None or tokenizer is None:
        raise ValueError(f"Expected `--draft-vocab N` together with the target's answers (`--prompts FILE`) and "
                         f"`--target`, whose tokenizer reads them, got {count}, {answers}; name all.")  # fmt: skip
    examples = read_examples(answers, tokenizer, max_length=sys.maxsize, ends=end_tokens(model)).examples
    ids, covered = most_used_tokens(examples, count, always=end_tokens(model))
    notes.print(f"The draft vocabulary of {len(ids)} covers {covered:.2%} of the answers.")
    return ids


def load_model(name: str, dtype: str) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Load a target, with a word about it."""
    from hf_carryover.targets import load_target

    kind, started = torch_dtype(dtype), time.perf_counter()
    with notes.status(f"Loading {name} (it is unpacked or downloaded the first time) ..."):
        model, tokenizer = load_target(name, dtype=kind)
    place = f"{str(model.dtype).removeprefix('torch.')} on {model.device.type}"
    notes.print(f"[dim]{name}: {place}, loaded in {time.perf_counter() - started:.1f} s[/dim]")
    return model, tokenizer


def torch_dtype(name: str) -> Any:
    """A number type by its short name; ``auto`` stays a word."""
    import torch

    dtypes = {"auto": "auto", "fp32": torch.float32, "bf16": torch.bfloat16}
    if name not in dtypes:
        raise ValueError(f"Expected `--dtype` auto, fp32 or bf16, got {name!r}; choose one of them.")
    return dtypes[name]


def load_assistant(source: str | Path | None, model: "PreTrainedModel") -> "CarryoverDrafterModel | None":
    """Load a drafter, or say that there is none."""
    from hf_carryover.conversion import load_drafter

    if source is None:
        notes.print("[yellow]No drafter: plain decoding only. Name one with --drafter.[/yellow]")
        return None
    drafter = load_drafter(source, target=model)
    carries = "carries rejected rows" if drafter.carry_enabled else "carries nothing (it was not trained to)"
    notes.print(f"[dim]{source}: {drafter.config.num_drafts} drafts a round, {carries}[/dim]")
    return drafter


def main() -> None:
    """The command `hf-carryover`; an error is one sentence, or a traceback with HF_CARRYOVER_TRACEBACK set."""
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError, StrictDataclassError) as error:
        if os.environ.get("HF_CARRYOVER_TRACEBACK"):
            raise
        notes.print(" ".join(str(error).split()), style="red", markup=False)
        sys.exit(1)

"""How is a drafter measured? Set by set and prompt by prompt, every system in turn, kept on disk as it goes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_carryover.decoding import check_pair
from hf_carryover.draft_length import longest_draft
from hf_carryover.evaluation.machine import describe_call, describe_machine, describe_model
from hf_carryover.evaluation.plan import EvaluationArguments, plan
from hf_carryover.evaluation.report import write_report
from hf_carryover.evaluation.runs import System, systems_for
from hf_carryover.evaluation.speed import warm_up
from hf_carryover.evaluation.summary import summarize
from hf_carryover.evaluation.visits import Step, Visit, VisitLog, visit
from hf_carryover.modeling_carryover import CarryoverDrafterModel

VISITS_FILE = "visits.jsonl"


def evaluate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: CarryoverDrafterModel,
    *,
    prompts: Sequence[str | Path],
    out: str | Path,
    control: CarryoverDrafterModel | None = None,
    arguments: EvaluationArguments | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure a drafter beside plain `generate` and its rivals; write evaluation.json, report.md and plots.

    Every finished prompt is kept in ``out``: the same call goes on where an interrupted one stopped, and a call for
    more prompts, sets or temperatures measures those alone; take a new folder to measure all again. A set that cannot
    be measured is named in ``failed_sets``; the others run.

    Args:
        target: The model that is made faster.
        tokenizer: Its tokenizer.
        drafter: The drafter, measured with carry off and on.
        prompts: Sets, as `read_prompts` takes them.
        out: Folder of the report.
        control: A drafter trained like this one, without carried rows.
        arguments: What is measured; None: the defaults.
        console: Where progress is shown; None: nowhere.

    Returns:
        The content of evaluation.json; ``["exactness"]["passed"]`` says whether greedy texts were the target's own.

    Raises:
        ValueError: A drafter does not fit the target, or no set can be measured.
        ImportError: matplotlib is missing.
    """
    # Late, because matplotlib is an extra; before anything is measured, because it is needed at the end.
    try:
        from hf_carryover.evaluation.plots import draw_plots
    except ImportError as error:
        raise ImportError("Drawing plots needs matplotlib, which is missing; pip install matplotlib.") from error

    arguments = arguments or EvaluationArguments()
    drafters = {"drafter": drafter} | ({} if control is None else {"control": control})
    for model in drafters.values():
        check_pair(target, model)
    steps, failed, notes = plan(prompts, target, tokenizer, arguments)
    if not steps:
        raise ValueError(f"Expected at least one set that can be measured, found none. {' '.join(failed.values())}")
    if not drafter.carry_embedding.any():
        notes.append(
            "The carry embedding is zero: the drafter was not trained to read the rows that carry-on shows it."
        )
    if failed and console is not None:  # now, not after an hour
        console.print(f"Not measured: {' '.join(failed.values())}", style="red", markup=False)
    models = {"target": describe_model(target) | {"generation_config": target.generation_config.to_diff_dict()}}
    for name, model in drafters.items():
        models[name] = describe_model(model) | {"drafts_a_round": longest_draft(model), "timings": model.timings}
    facts = describe_machine(target) | {"models": models, "draft_lengths": list(arguments.draft_lengths)}
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    log = VisitLog(out / VISITS_FILE, facts)
    systems = systems_for(target, drafter, control, arguments.draft_lengths)
    visits = run_steps(steps, systems, target, log, console)
    summary = describe_call() | facts | {"acceptance_prior": drafter.acceptance_prior, "arguments": asdict(arguments)}
    summary |= {"failed_sets": failed, "notes": notes}
    summary |= summarize(visits)
    write_report(summary, out)
    draw_plots(summary, out)
    return summary


def run_steps(
    steps: Sequence[Step], systems: Sequence[System], target: PreTrainedModel, log: VisitLog, console: Console | None
) -> list[Visit]:
    """Make the visits that the log lacks. Progress is drawn between them, so that it takes none of their time."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    missing = [step for step in steps if step not in log]
    with Progress(
        *columns, console=console, disable=console is None, auto_refresh=False, speed_estimate_period=3600
    ) as progress:
        task = progress.add_task("warm-up", total=len(steps), completed=len(steps) - len(missing))
        progress.refresh()
        for first in {step.temperature: step for step in reversed(missing)}.values():
            warm_up(systems, target, first.prompt, **first.decoding)
        turns: Counter[float] = Counter()  # timed runs of each system so far: the order rotates over these alone
        for step in steps:
            if step not in log:
                progress.update(task, description=step.set, refresh=True)
                log[step] = visit(step, systems, target, turn=turns[step.temperature])
                progress.advance(task)
            turns[step.temperature] += step.timed * step.repeats
        progress.refresh()
    return [log[step] for step in steps]

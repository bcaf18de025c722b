"""What may a drafter's page on the Hub say? What the files in its folder say, and nothing else."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_carryover.conversion import load_drafter
from hf_carryover.conversion.folders import read_json
from hf_carryover.evaluation.machine import SAVED_WITH, fingerprint
from hf_carryover.evaluation.speed import OURS, RIVALS
from hf_carryover.evaluation.summary import OTHERS, POOLED, is_a_fault
from hf_carryover.evaluation.tables import by_temperature, markdown_table, number
from hf_carryover.modeling_carryover import CarryoverDrafterModel
from hf_carryover.targets import TARGETS, folder_name, hub_name

TEMPLATE = Path(__file__).with_name("model_card_template.md")
MEASURED, RECORD = "evaluation.json", "training.json"
# What the card reads of each file.
KEYS = {
    MEASURED: {"results", "acceptance", "differences", "matched", "speed", "exactness", "models", "dtype", "device",
               "threads", "versions", "arguments", "failed_sets", "notes", "command", "date"},
    RECORD: {"command", "recipe", "arguments", "texts", "steps", "seconds", "machine"},
}  # fmt: skip
METRICS = {"accepted_length": "Accepted length", "speedup": "Speed relative to plain generate"}
_cell = partial(number, digits=2)


def write_card(folder: str | Path) -> Path:
    """Write a drafter folder's ``README.md`` anew; arguments and errors are those of `render_card`."""
    (card := Path(folder) / "README.md").write_text(render_card(folder), encoding="utf-8")
    return card


def render_card(folder: str | Path) -> str:
    """The model card of a drafter folder, from its configuration, ``evaluation.json`` and ``training.json``.

    A folder without one of the last two gets a card that says so. The licence is that of the card which stands there.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: A file is broken or lacks what the card needs, or the evaluation is another drafter's.
    """
    folder = Path(folder).resolve()
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"Expected a drafter folder with config.json, found none in {folder}; check the path.")
    evaluation, training = (_read(folder / name) for name in (MEASURED, RECORD))
    measured = evaluation["models"]["drafter"] if evaluation else {}
    dtype = measured.get("dtype", evaluation.get("dtype"))  # older evaluations have the target's alone
    drafter = load_drafter(folder, dtype=getattr(torch, dtype) if dtype else None)
    if evaluation:
        _check_measured(drafter, measured)
    base = hub_name(evaluation["models"]["target"]["name"]) if evaluation else None
    base = base or (hub_name(training.get("target", training["recipe"]["target"])) if training else None)
    stages = [*training.get("earlier", []), training] if training else []
    files = [folder / name for name in KEYS if (folder / name).exists()]
    card = ModelCard.from_template(
        _metadata(folder, base, evaluation), template_path=str(TEMPLATE),
        name=folder.name, base=base, config=drafter.config, carries=bool(drafter.carry_embedding.any()),
        evaluation=evaluation, training=training, stages=stages,
        sections=[_section(here) for here in by_temperature(evaluation)] if evaluation else [],
        copy=next((t for t in TARGETS.values() if base == t.hub_id and evaluation and folder_name(t) in str(
            evaluation["models"]["target"]["name"])), None),
        faults=sum(map(is_a_fault, evaluation["exactness"]["differences"])) if evaluation else 0,
        digests={file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files},
    )  # fmt: skip
    return str(card).rstrip() + "\n"


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.exists() else {}
    missing = sorted(KEYS[path.name] - content.keys())
    if content and missing:
        raise ValueError(f"Expected {', '.join(missing)} in {path}, found none; make the file again.")
    return content


def _check_measured(drafter: CarryoverDrafterModel, measured: dict[str, Any]) -> None:
    found = fingerprint(drafter)
    if measured["fingerprint"] not in (found, fingerprint(drafter, without=SAVED_WITH)):  # or an older one
        raise ValueError(
            f"Expected an evaluation of this drafter (fingerprint {found}), found one of "
            f"{measured['name']} ({measured['fingerprint']}); run `hf-carryover evaluate` again."
        )


def _results(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in evaluation.get("results", []) if row["system"] in OURS]


def _metadata(folder: Path, base: str | None, evaluation: dict[str, Any]) -> ModelCardData:
    card = folder / "README.md"
    results = [
        EvalResult(
            task_type="text-generation", dataset_type=row["set"], dataset_name=row["set"], metric_type=metric,
            metric_name=f"{label}, {row['system']}, temperature {row['temperature']:g}",
            metric_value=round(row[metric], 4),
        )
        for row in _results(evaluation) if row["set"] == POOLED
        for metric, label in METRICS.items()
    ]  # fmt: skip
    return ModelCardData(
        model_name=folder.name, base_model=base, library_name="transformers", pipeline_tag="text-generation",
        license=ModelCard.load(card).data.license if card.exists() else None,
        tags=["speculative-decoding", "carryover-drafting", "dflash"], eval_results=results or None,
    )  # fmt: skip


def _section(here: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The tables of one temperature, and the sets on which a gain is not shown."""
    results, measured = _results(here), {(row["set"], row["system"]): row for row in here["results"]}
    systems, sets = (list(dict.fromkeys(row[key] for row in results)) for key in ("system", "set"))
    rivals = [rival for rival in RIVALS if rival in systems]
    shown = {"accepted_length": systems, "speedup": [*systems, *(s for s in OTHERS if (POOLED, s) in measured)]}
    gains = {(row["set"], row["minus"]): row for row in here["differences"]}
    ratios = {(row["set"], rival): ratio for row in here["speed"] for rival, ratio in row["carry_on_to"].items()}

    def by_system(metric: str) -> str:
        return markdown_table(["set", *shown[metric]], [
            [name, *(_cell(measured[name, s][metric], measured[name, s][f"{metric}_interval"]) for s in shown[metric])]
            for name in sets
        ])  # fmt: skip

    gained = markdown_table(
        ["set", *(f"tokens a round, minus {rival}" for rival in rivals), *(f"speed, to {rival}" for rival in rivals)],
        [
            [name, *(_cell(gains[name, r]["difference"], gains[name, r]["interval"], "+") for r in rivals),
             *(_cell(ratios[name, r]["ratio"], ratios[name, r]["interval"]) for r in rivals)]
            for name in sets
        ],
    )  # fmt: skip
    not_shown = {
        f"accepted length, carry-on minus {rival}, above zero": [
            name for name in sets if (interval := gains[name, rival]["interval"]) and interval[0] <= 0
        ]
        for rival in rivals
    }
    not_shown["speed, carry-on to plain, above one"] = [
        name for name in sets if (interval := measured[name, "carry-on"]["speedup_interval"]) and interval[0] <= 1
    ]
    tables = {label: by_system(metric) for metric, label in METRICS.items()} | {"What carried rows add": gained}
    facts = {"temperature": f"{results[0]['temperature']:g}", "tables": tables, "not_shown": not_shown}
    counts = [row["to_plain"]["plain"]["prompts"] for row in here["speed"] if row["set"] == POOLED]
    prompts = [row["prompts"] for row in here["acceptance"] if (row["set"], row["system"]) == (POOLED, "carry-on")]
    return facts | {"prompts": prompts[0], "timed": counts[0]}

"""How are the numbers shown? evaluation.json for programs, report.md for readers, a table for the terminal."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from hf_carryover.evaluation.speed import OURS
from hf_carryover.evaluation.summary import POOLED
from hf_carryover.evaluation.tables import (
    Rows,
    by_set,
    by_temperature,
    curve,
    image,
    markdown_table,
    number,
    on_fewer_prompts,
    ratio_cell,
    share,
    shown,
)

CONDITIONS = ("command", "date", "commit", "device", "threads", "environment", "dtype", "attention")


def write_report(summary: dict[str, Any], out: Path) -> None:
    """Write ``evaluation.json``, an object of a list a line, and ``report.md`` into a folder."""
    lines = (f"{json.dumps(key)}: {_json(value)}" for key, value in summary.items())
    (out / "evaluation.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    (out / "report.md").write_text(render_report(summary), encoding="utf-8")


def results_table(summary: dict[str, Any]) -> Table:
    """Tokens a round and speed relative to plain `generate`, a line a set and temperature, for rich's console."""
    results = shown(summary["results"])
    systems = list(dict.fromkeys(row["system"] for row in results))
    notes = {here["results"][0]["temperature"]: on_fewer_prompts(here) for here in by_temperature(summary)}
    caption = "\n".join(f"T {temperature:g}, {note}" for temperature, note in notes.items() if note)
    table = Table("set", "T", *systems, title="Tokens a round, and speed relative to plain generate", caption=caption)
    lines: dict[tuple[str, float], list[str]] = {}
    for row in results:
        cell = f"{row['accepted_length']:.2f}  {row['speedup']:.2f}x"
        lines.setdefault((row["set"], row["temperature"]), []).append(cell)
    for (name, temperature), cells in lines.items():
        table.add_row(name, f"{temperature:g}", *cells, style="bold" if name == POOLED else None)
    return table


def render_report(summary: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    parts = [f"# What {summary['models']['drafter']['name'] or 'the drafter'} is worth"]
    parts += [f"**Not measured:** {sentence}" for sentence in summary["failed_sets"].values()]
    parts += [f"Note: {sentence}" for sentence in summary["notes"]]
    for here in by_temperature(summary):
        temperature = here["results"][0]["temperature"]
        parts.append(f"## Temperature {temperature:g}" + (" (greedy)" if temperature == 0 else ""))
        parts += _accepted_length(here, temperature) + _carried_rows(here, temperature) + _speed(here, temperature)
    parts += _exactness(summary["exactness"]) + _conditions(summary)
    return "\n\n".join(parts) + "\n"


def _json(value: Any) -> str:
    rows = ",\n".join(json.dumps(row) for row in value) if isinstance(value, list) else ""
    return f"[\n{rows}\n]" if rows else json.dumps(value)


def _accepted_length(here: dict[str, Rows], temperature: float) -> list[str]:
    pooled = [row for row in shown(here["acceptance"]) if row["set"] == POOLED and row["system"] != "plain"]
    longest = max(len(row["histogram"]) for row in pooled)
    return [
        "### Accepted length",
        "Tokens a round (tau), the target's own token included; in brackets the 95 % bootstrap interval over prompts.",
        by_set(shown(here["results"]), lambda row: number(row["accepted_length"], row["accepted_length_interval"])),
        *filter(None, [on_fewer_prompts(here)]),
        image("accepted_length", temperature),
        "Rounds by accepted drafts, all sets:",
        markdown_table(
            ["system", "prompts", "rounds", "accepted drafts", *map(str, range(longest))],
            [
                [row["system"], row["prompts"], row["rounds"], f"{row['accepted_drafts']:.3f}", *row["histogram"]]
                + [""] * (longest - len(row["histogram"]))
                for row in pooled
            ],
        ),
        "The share of rounds that accept the draft at each position after the anchor:",
        image("acceptance_by_position", temperature),
    ]


def _carried_rows(here: dict[str, Rows], temperature: float) -> list[str]:
    parts = [
        "### What carried rows add",
        "Differences of the accepted length on the same prompts, with paired 95 % intervals.",
        markdown_table(
            ["set", "difference", "tokens a round"],
            [
                [row["set"], f"{row['system']} minus {row['minus']}", number(row["difference"], row["interval"], "+")]
                for row in here["differences"]
            ],
        ),
    ]
    if not here["matched"]:
        return parts
    return [
        *parts,
        "Recall at position k: how often the draft for the k-th position after the anchor is the token that finally "
        "stands there, with carry on and off at the same anchors. Re-convergence: of rejected positions after the "
        "first, the share whose draft finally stands there. Attention: the share that falls on carried rows.",
        markdown_table(
            ["set", "anchors", "with carried rows", "recall at 1, 2, .. on", "off", "re-convergence", "attention"],
            [
                [row["set"], row["anchors"], row["anchors_carrying"], curve(row["recall_on"]),
                 curve(row["recall_off"]), share(row["reconvergence"]), share(row["attention_mass"])]
                for row in here["matched"]
            ],
        ),
        image("recall", temperature),
    ]  # fmt: skip


def _speed(here: dict[str, Rows], temperature: float) -> list[str]:
    pooled = next(row for row in here["speed"] if row["set"] == POOLED)
    rounds = [(name, pooled["rounds"][name]) for name in OURS if pooled["rounds"].get(name)]
    lengths = pooled["lengths"]
    return [
        "### Speed",
        "Tokens a second of `generate` relative to plain: the median over prompts of each prompt's ratio, with its "
        "95 % interval.",
        by_set(shown(here["results"]), lambda row: number(row["speedup"], row["speedup_interval"])),
        image("speed", temperature),
        markdown_table(
            ["set", "carry-on relative to", "speed"],
            [
                [row["set"], rival, ratio_cell(ratio)]
                for row in here["speed"]
                for rival, ratio in row["carry_on_to"].items()
            ],
        ),
        "Where the time of a round goes, in milliseconds, all sets. The limit is the speed-up after the prompt's pass "
        "if recycling and the loop took no time; with a free drafter, drafting would take none either. On a GPU, "
        "`draft` is launching alone and the work itself counts as `verify`: only their sum, and so `limit`, is right.",
        markdown_table(
            ["system", "draft", "recycle", "verify", "loop", "one plain token", "speed-up", "limit", "free drafter",
             "share of the limit"],
            [
                [name, *(f"{1000 * r[part]:.2f}" for part in ("draft", "recycle", "verify", "loop", "one_token"))]
                + [f"{r[part]:.2f}" for part in ("reached", "limit", "limit_free_drafter")]
                + [f"{r['share_of_limit']:.1%}"]
                for name, r in rounds
            ],
        ),
        image("time_split", temperature),
        "How many drafts pay: automatic lengths (`carry-auto`) beside fixed ones; `carry-on` hands over all.",
        markdown_table(
            ["system", "drafts a round", "rounds without drafts", "speed to plain", "auto relative to it"],
            [
                [name, f"{row['drafts_a_round']:.2f}", f"{row['plain_rounds']:.1%}",
                 ratio_cell(pooled["to_plain"][name]),
                 ratio_cell(lengths["auto_to"][name]) if name in lengths["auto_to"] else ""]
                for name, row in lengths["systems"].items()
            ],
        ),
        markdown_table(
            ["set", "best fixed", "auto relative to it", "auto relative to plain"],
            [
                [row["set"], best := row["lengths"]["best_fixed"], ratio_cell(row["lengths"]["auto_to"][best]),
                 ratio_cell(row["to_plain"]["carry-auto"])]
                for row in here["speed"]
            ],
        ),
    ]  # fmt: skip


def _exactness(exactness: dict[str, Any]) -> list[str]:
    differences = exactness["differences"]
    verdict = {None: "Not checked", True: "Passed", False: "**Failed**"}[exactness["passed"]]
    parts = [
        "## Exactness",
        f"{verdict}: of {exactness['texts']} greedy texts, {len(differences)} differ from plain `generate`'s.",
    ]
    if differences:
        header = ["set", "prompt", "system", "first difference at", "gap of logits", "explained by rounding"]
        keys = ("set", "number", "system", "position", "gap", "explained")
        parts.append(markdown_table(header, [[row[key] for key in keys] for row in differences]))
    return parts


def _conditions(summary: dict[str, Any]) -> list[str]:
    facts = {key: summary[key] for key in CONDITIONS}
    for name, model in summary["models"].items():
        facts[name] = ", ".join(f"{key} {value}" for key, value in model.items())
    facts |= summary["versions"] | summary["arguments"]
    return ["## Conditions", markdown_table(["", ""], [[key, f"`{value}`"] for key, value in facts.items()])]

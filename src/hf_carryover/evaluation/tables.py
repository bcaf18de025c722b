"""How do numbers stand in a report? Tables, cells and names of plots, in Markdown."""

from collections.abc import Callable, Sequence
from typing import Any

from hf_carryover.evaluation.speed import OURS
from hf_carryover.evaluation.summary import OTHERS, POOLED

Rows = list[dict[str, Any]]


def shown(rows: Rows) -> Rows:
    """Rows of the systems that tables by set have a column for: all but fixed draft lengths, which are many."""
    return [row for row in rows if row["system"] in (*OURS, *OTHERS, "plain")]


def by_temperature(summary: dict[str, Any]) -> list[dict[str, Rows]]:
    """The lists of an evaluation, for each temperature."""
    names = ("results", "acceptance", "differences", "matched", "speed")
    return [
        {name: [row for row in summary[name] if row["temperature"] == temperature] for name in names}
        for temperature in dict.fromkeys(row["temperature"] for row in summary["results"])
    ]


def on_fewer_prompts(here: dict[str, Rows]) -> str:
    """Which systems ran on the timed prompts alone, and all systems' tokens a round on those; nothing if none did."""
    pooled = [row for row in shown(here["acceptance"]) if row["set"] == POOLED]
    most = max(row["prompts"] for row in pooled)
    fewer = [row["system"] for row in pooled if row["prompts"] < most]
    if not fewer:
        return ""
    timed = next(row for row in here["speed"] if row["set"] == POOLED)["accepted_length"]
    lengths = ", ".join(f"{row['system']} {timed[row['system']]:.2f}" for row in pooled)
    return f"{', '.join(fewer)}: on the timed prompts alone. There, all sets, tokens a round are: {lengths}."


def by_set(results: Rows, cell: Callable[[dict[str, Any]], str]) -> str:
    """A table with a line a set and a column a system."""
    systems, sets = (list(dict.fromkeys(row[key] for row in results)) for key in ("system", "set"))
    return markdown_table(
        ["set", *systems], [[name, *(cell(row) for row in results if row["set"] == name)] for name in sets]
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, without a line break at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def plot_file(name: str, temperature: float) -> str:
    """File name of a plot in the report's folder."""
    return f"{name}_t{temperature:g}.png"


def image(name: str, temperature: float) -> str:
    """A plot of the report's folder."""
    return f"![{name.replace('_', ' ')}]({plot_file(name, temperature)})"


def number(value: float, interval: list[float] | None, sign: str = "", digits: int = 3) -> str:
    """A value and its interval, if it has one."""
    shown = [f"{x:{sign}.{digits}f}" for x in (value, *(interval or ()))]
    return shown[0] + (f" [{shown[1]}, {shown[2]}]" if interval else "")


def ratio_cell(found: dict[str, Any]) -> str:
    """A ratio of speeds and its interval."""
    return number(found["ratio"], found["interval"])


def curve(values: list[float]) -> str:
    """Values by position."""
    return " ".join(f"{value:.3f}" for value in values)


def share(value: float | None) -> str:
    """A share; nothing where there was nothing to share."""
    return "" if value is None else f"{value:.3f}"

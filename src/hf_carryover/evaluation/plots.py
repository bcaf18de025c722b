"""How do the numbers look? Five plots a temperature, on a transparent ground, for light and dark pages alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_carryover.evaluation.speed import OURS
from hf_carryover.evaluation.summary import POOLED
from hf_carryover.evaluation.tables import plot_file

# Colours from the middle of the scale: each has a contrast of 3:1 or more to white and to black.
INK = "#808080"
COLORS = {
    "plain": INK,
    "lookup": "#A87B00",
    "library-dflash": "#B565A7",
    "carry-off": "#2080D0",
    "carry-on": "#E05A20",
    "control": "#10956B",
    "carry-auto": "#7A6FE0",
}
MARKERS = {"plain": "x", "lookup": "^", "library-dflash": "D", "carry-off": "s", "carry-on": "o", "control": "v",
           "carry-auto": "P"}  # fmt: skip
PARTS = {"draft": "#E05A20", "recycle": "#A87B00", "verify": "#2080D0", "loop": "#B565A7"}
STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.transparent": True,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def draw_plots(summary: dict[str, Any], out: Path) -> None:
    """Draw the plots of every temperature into a folder; curves and times are those of all sets together."""
    for temperature in dict.fromkeys(row["temperature"] for row in summary["results"]):
        results = [row for row in summary["results"] if row["temperature"] == temperature and row["system"] in COLORS]
        acceptance, matched, speed = (
            [row for row in summary[name] if row["temperature"] == temperature and row["set"] == POOLED]
            for name in ("acceptance", "matched", "speed")
        )
        height = 1 + 0.14 * len(results)
        with _plot(out / plot_file("accepted_length", temperature), height=height) as axes:
            _draw_by_set(axes, results, "accepted_length", "tokens a round")
        with _plot(out / plot_file("speed", temperature), height=height) as axes:
            _draw_by_set(axes, results, "speedup", "speed relative to plain generate")
        with _plot(out / plot_file("acceptance_by_position", temperature)) as axes:
            curves = {row["system"]: row["acceptance_by_position"] for row in acceptance if row["system"] in OURS}
            _draw_by_position(axes, curves, "share of rounds that accept it")
        for row in matched:
            with _plot(out / plot_file("recall", temperature)) as axes:
                curves = {"carry-off": row["recall_off"], "carry-on": row["recall_on"]}
                _draw_by_position(axes, curves, "share of anchors where it is right")
        with _plot(out / plot_file("time_split", temperature), height=2.8) as axes:
            _draw_time_split(axes, speed[0]["rounds"])


@contextmanager
def _plot(path: Path, *, height: float = 4.0) -> Iterator[Axes]:
    """A figure of one set of axes, saved when the block ends."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, height), layout="constrained")
        yield figure.add_subplot()
        figure.savefig(path, dpi=150)


def _draw_by_set(axes: Axes, results: list[dict[str, Any]], key: str, label: str) -> None:
    """A point a set and system with its interval, systems one below the other; plain is the line at 1."""
    sets, systems = (list(dict.fromkeys(row[name] for row in results)) for name in ("set", "system"))
    drawn = [system for system in systems if system != "plain"]
    for i, system in enumerate(drawn):
        rows = [row for row in results if row["system"] == system]
        values = [row[key] for row in rows]
        ends = [row[f"{key}_interval"] or (row[key], row[key]) for row in rows]
        # A median can lie at the very end of its interval; rounding must not make the difference negative.
        bars = [[max(v - low, 0) for v, (low, _) in zip(values, ends, strict=True)],
                [max(high - v, 0) for v, (_, high) in zip(values, ends, strict=True)]]  # fmt: skip
        heights = [sets.index(row["set"]) + 0.7 * ((i + 0.5) / len(drawn) - 0.5) for row in rows]
        axes.errorbar(values, heights, xerr=bars, fmt=MARKERS[system], color=COLORS[system], label=system, capsize=2)
    axes.axvline(1, color=INK, linestyle=":", label="plain")
    axes.set_yticks(range(len(sets)), sets)
    axes.set_ylim(len(sets) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.figure.legend(loc="outside upper center", ncols=3)


def _draw_by_position(axes: Axes, curves: dict[str, list[float]], label: str) -> None:
    """A line a system, each thinner than the one below it, so that equal ones can be told apart."""
    for i, (system, values) in enumerate(curves.items()):
        places, marker, color = range(1, len(values) + 1), MARKERS[system], COLORS[system]
        width, size = 4.5 - 3.5 * i / len(curves), 10 - 6 * i / len(curves)
        axes.plot(places, values, marker=marker, color=color, linewidth=width, markersize=size, label=system)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("position of the draft after the anchor")
    axes.set_ylabel(label)
    axes.legend()


def _draw_time_split(axes: Axes, rounds: dict[str, dict[str, float] | None]) -> None:
    """A stacked bar a system, in milliseconds, below a bar for one token of plain `generate`."""
    measured = {name: parts for name, parts in rounds.items() if parts is not None}
    axes.barh(
        ["one plain token"] * len(measured), [1000 * parts["one_token"] for parts in measured.values()], color=INK
    )
    left = [0.0] * len(measured)
    for part, color in PARTS.items():
        widths = [1000 * parts[part] for parts in measured.values()]
        axes.barh(list(measured), widths, left=left, color=color, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a round")
    axes.figure.legend(loc="outside upper center", ncols=len(PARTS))

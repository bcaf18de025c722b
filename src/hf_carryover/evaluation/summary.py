"""What do all visits say together? The content of evaluation.json, set by set and pooled."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hf_carryover.evaluation.acceptance import summarize_acceptance, summarize_difference, summarize_matched
from hf_carryover.evaluation.speed import RIVALS, summarize_speed
from hf_carryover.evaluation.visits import Visit

POOLED = "all"
# Systems whose text is not ours to answer for.
OTHERS = ("lookup", "library-dflash")


def summarize(visits: Sequence[Visit]) -> dict[str, Any]:
    """The numbers: ``results`` is the short list that cards read, the other lists hold the details behind it.

    Each list has objects with ``set`` (`all` is the pooled one) and ``temperature``. Accepted lengths come from every
    prompt's first run (of systems that are there for their speed: from every timed one's), times from the timed
    prompts. ``prompts`` holds every run, without its text.
    """
    summary: dict[str, Any] = {name: [] for name in ("results", "acceptance", "differences", "matched", "speed")}
    for temperature in dict.fromkeys(visit.temperature for visit in visits):
        here = [visit for visit in visits if visit.temperature == temperature]
        for name in [*dict.fromkeys(visit.set for visit in here), POOLED]:
            chosen = [visit for visit in here if name in (visit.set, POOLED)]
            _add(summary, {"set": name, "temperature": temperature}, chosen)
    summary["exactness"] = summarize_exactness([visit for visit in visits if visit.temperature == 0])
    summary["prompts"] = [_without_text(visit) for visit in visits]
    return summary


def _without_text(visit: Visit) -> dict[str, Any]:
    row = asdict(visit)
    for runs in row["runs"].values():
        for run in runs:
            run["new_tokens"] = len(run.pop("ids"))
    return row


def _add(summary: dict[str, Any], place: dict[str, Any], visits: Sequence[Visit]) -> None:
    names = max((list(visit.runs) for visit in visits), key=len)  # fixed draft lengths run where time is taken
    first = {name: [visit.runs[name][0] for visit in visits if name in visit.runs] for name in names}
    speed = summarize_speed([visit.runs for visit in visits if visit.timed])
    summary["speed"].append(place | speed)
    for system, runs in first.items():
        acceptance = summarize_acceptance(runs)
        summary["acceptance"].append(place | {"system": system} | acceptance)
        ratio = speed["to_plain"][system]
        summary["results"].append(
            {
                "set": place["set"],
                "system": system,
                "temperature": place["temperature"],
                "rounds": acceptance["rounds"],
                "tokens": acceptance["tokens"],
                "accepted_length": acceptance["accepted_length"],
                "accepted_length_interval": acceptance["accepted_length_interval"],
                "speedup": ratio["ratio"],
                "speedup_interval": ratio["interval"],
            }
        )
    for rival in RIVALS:
        if rival in first:
            pair = {"system": "carry-on", "minus": rival}
            summary["differences"].append(place | pair | summarize_difference(first["carry-on"], first[rival]))
    matched = [visit.matched for visit in visits if visit.matched is not None]
    if matched:
        summary["matched"].append(place | summarize_matched(matched))


def summarize_exactness(visits: Sequence[Visit]) -> dict[str, Any]:
    """Greedy texts beside plain `generate`'s: how many were compared, where they differ, and whether ours pass.

    What rounding does not explain fails if a system of ours wrote it; others' differences are listed. ``passed`` is
    None if no text was compared, as when all is sampled.
    """
    differences = [
        {"set": visit.set, "number": visit.number} | asdict(difference)
        for visit in visits
        for difference in visit.differences
    ]
    return {
        "texts": sum(len(visit.runs) - 1 for visit in visits),
        "differences": differences,
        "passed": not any(map(is_a_fault, differences)) if visits else None,
    }


def is_a_fault(difference: dict[str, Any]) -> bool:
    """Whether a text of ours parts from plain `generate`'s where rounding does not explain it."""
    return not difference["explained"] and difference["system"] not in OTHERS


def problems(summary: dict[str, Any]) -> list[str]:
    """What is wrong with an evaluation, a sentence each: sets that failed, text that is not the target's own."""
    sentences = list(summary["failed_sets"].values())
    if summary["exactness"]["passed"] is False:
        sentences.append("A text differs from plain generate's and rounding does not explain it; the report lists it.")
    return sentences

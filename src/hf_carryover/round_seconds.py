"""How long does a round take, by the drafts it hands over? Measured as calls go on, or once and kept on disk."""

import hashlib
import json
import os
import platform
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import constants
from torch import nn

# Measurements of a length that are looked at, those it takes before it is trusted, and the rounds for which one is
# believed: a plain round's for fewer, since all choices are compared with it and machines are now faster, now slower.
KEPT, NEEDED, FRESH, FRESH_PLAIN = 9, 2, 512, 64
MEASURED_ROUNDS = 28  # of four lengths, in turn: what is frozen cannot be mended by later rounds


class RoundSeconds:
    """Seconds of whole rounds by drafts handed over; with those ``given``, nothing is learned."""

    def __init__(self, given: Mapping[Any, float] | None = None, *, needed: int = NEEDED) -> None:
        self.is_frozen, self.num_rounds, self.needed = given is not None, 0, needed
        self.found: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=KEPT))
        for length, seconds in (given or {}).items():
            self.found[int(length)].extend([(0, seconds)] * needed)

    def record(self, num_drafts: int, seconds: float) -> None:
        """One round."""
        if not self.is_frozen:
            self.num_rounds += 1
            self.found[num_drafts].append((self.num_rounds, seconds))

    def known(self) -> dict[int, float]:
        """Low medians of the lengths that were measured often enough, and lately; shortest first."""
        oldest = {length: self.num_rounds - (FRESH if length else FRESH_PLAIN) for length in sorted([*self.found])}
        recent = {n: [seconds for at, seconds in [*self.found[n]] if at > oldest[n]] for n in oldest}
        return {length: median_low(seconds) for length, seconds in recent.items() if len(seconds) >= self.needed}


def curve(known: Mapping[int, float], longest: int) -> list[float]:
    """Seconds of a round with 0, 1, .., ``longest`` drafts: straight lines between those that are known."""
    if not {0, longest} <= known.keys() or not min(known.values()) > 0:
        raise ValueError(f"`drafter.timings` must have positive seconds of 0 and {longest} drafts, got {known}.")
    values = []
    for length in range(longest + 1):
        a, b = max(n for n in known if n <= length), min(n for n in known if n >= length)
        values.append(known[a] + (known[b] - known[a]) * (length - a) / max(b - a, 1))
    return values


MEASURING = Lock()
TIMES: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[str, RoundSeconds]]] = WeakKeyDictionary()


def measured_times(target: Any, drafter: Any) -> RoundSeconds:
    """Seconds of this pair's rounds on this device and in this number type, taken as calls go on."""
    by_place = TIMES.setdefault(target, WeakKeyDictionary()).setdefault(drafter, {})
    return by_place.setdefault(_place(target) + _place(drafter), RoundSeconds())


def _place(model: Any) -> str:
    kind = model.device.type
    gpu = torch.cuda.get_device_name(model.device) if kind == "cuda" else None
    where = f"{platform.node()} {model.device} {gpu} {torch.get_num_threads()} {os.environ.get('MKL_CBWR')}"
    how = f"{model.dtype} {torch.is_autocast_enabled(kind)} {model.config._attn_implementation}"
    return f"{where} {how} {torch.__version__}"


def frozen_times(target: Any, drafter: Any, measure: Callable[[int], RoundSeconds]) -> RoundSeconds:
    """Those measured once on this machine: in the cache folder, or in this process where it cannot be written."""
    facts = [model.config.to_json_string() + _place(model) for model in (target, drafter)]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    path = Path(constants.HF_ASSETS_CACHE) / "hf_carryover" / "timings" / f"{name}.json"
    by_place = TIMES.setdefault(target, WeakKeyDictionary()).setdefault(drafter, {})
    with MEASURING:
        times = by_place.get(name) or _kept(path, drafter)
        if times is None:
            measure(4)  # what only a first call costs is no measure
            known = measure(MEASURED_ROUNDS).known()
            times = _kept(path, drafter) or RoundSeconds(known)  # another process may have been faster
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(times.known()))
        return by_place.setdefault(name, times)


def _kept(path: Path, drafter: Any) -> RoundSeconds | None:
    with suppress(OSError, ValueError, TypeError, AttributeError):  # none there, or damaged
        times = RoundSeconds(json.loads(path.read_text()))
        return times if curve(times.known(), drafter.config.num_drafts) else None
    return None

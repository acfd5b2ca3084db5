"""How the benchmarks here measure: everything in one process and in turns, round after round.

A busy moment of the machine then hits all contenders alike. Ratios and differences are taken within a round,
and their median is reported. A turn is short, a few calls: a long one would be interrupted by other work more
often, and look slower than it is.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]
Times = dict[str, list[float]]
"""Microseconds per call of each contender, one number a round."""


@dataclass(frozen=True)
class Contender:
    """One line of a table: what is called, and what stays alive for it."""

    name: str
    call: Call


def measure(contenders: Sequence[Contender], rounds: int, calls: int, warm_up: int = 20) -> Times:
    """The times of contenders that take turns, `calls` calls each, within each of the rounds."""
    times: Times = {c.name: [] for c in contenders}
    for contender in contenders:
        for _ in range(warm_up):
            contender.call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for contender in contenders:
                times[contender.name].append(time_calls(contender.call, calls))
    finally:
        gc.enable()
    return times


def time_calls(call: Call, calls: int) -> float:
    """Microseconds per call."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls / 1e3


def median_ratio(times: Times, name: str, *floor: str) -> float:
    """The median over rounds of time(name) / sum of times(floor), each ratio within one round."""
    rounds = zip(times[name], *(times[part] for part in floor), strict=True)
    return statistics.median(time / sum(parts) for time, *parts in rounds)


def median_difference(times: Times, name: str, other: str) -> float:
    """The median over rounds of time(name) - time(other), in microseconds."""
    return statistics.median(a - b for a, b in zip(times[name], times[other], strict=True))


def circumstances() -> dict[str, Any]:
    """What a report must say of where it was made."""
    return {
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"Written to {path}")

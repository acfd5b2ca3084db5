"""What published times say of a chip: the clock, HBM bandwidth and DMA latency that programs reach.

    python benchmarks/schedule_fit.py [--chip tpu7x] [--entries 1000] [--json FILE]

Tokamax's ragged_dot kernels are compiled once each, and their schedules executed with several shares of the
HBM bandwidth and several latencies. The clock scales the result. What has the least mean error over all
problems is printed, and what every other problem says about the rest. Attention is left out, to check the
constants with.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import schedule_tokamax

from autotune.score.schedule import ScheduleScorer, compile_with_dumps
from bridge.chips import Chip, chip

RESULTS = Path(__file__).parent / "results" / "schedule_fit.json"
HBM_SHARES = (0.7, 0.8, 0.9, 1.0)
LATENCIES = (2e-7, 4e-7, 7e-7, 1e-6, 1.3e-6)
GRID = tuple(itertools.product(HBM_SHARES, LATENCIES))


def seconds(entry: schedule_tokamax.Entry, on: Chip) -> list[float]:
    """The predicted seconds of a problem with each of `GRID`, at the chip's nominal clock.

    Raises `ValueError` with the reason if they have low confidence.
    """
    workload, found = entry.workload(), []
    with compile_with_dumps(workload, on) as compiled:
        for share, latency in GRID:
            variant = dataclasses.replace(on, hbm_efficiency=share, dma_latency_seconds=latency)
            scorer = ScheduleScorer(variant, lambda *_: contextlib.nullcontext(compiled))
            score = scorer.score(workload)
            if score.confidence == "low":
                raise ValueError(score.reasons[0])
            found.append(score.time_s)
    return found


def fit(ratios: np.ndarray) -> tuple[int, float]:
    """The place in `GRID` and the share of the clock that fit best.

    Args:
        ratios: published over predicted times at the nominal clock; a row for each problem, a column for each
            of `GRID`.
    """
    logs = np.log(ratios)
    place = int(np.argmin(np.abs(logs - np.median(logs, axis=0)).mean(axis=0)))
    return place, float(np.exp(-np.median(logs[:, place])))


def describe(ratios: np.ndarray, place: int, clock: float) -> dict[str, float]:
    """The constants in practice, and the errors of problems with them.

    A slower clock makes everything slower, copies too: what was executed at the nominal clock with a share of
    the bandwidth and a latency is what happens at the slower one with less of the one and more of the other.
    """
    share, latency = GRID[place]
    errors = np.sort(np.exp(np.abs(np.log(ratios[:, place] * clock))) - 1)
    return {
        "clock_efficiency": clock,
        "hbm_efficiency": share * clock,
        "dma_latency_seconds": latency / clock,
        "median_error": float(np.median(errors)),
        "ninth_decile_error": float(errors[int(np.ceil(0.9 * len(errors))) - 1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chip", default="tpu7x")
    parser.add_argument("--entries", type=int, default=sys.maxsize, help="at most so many problems")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    del sys.argv[1:]  # Tokamax reads the command line, too, and stumbles over what it does not know

    nominal = dataclasses.replace(chip(options.chip), clock_efficiency=1.0)
    tables = schedule_tokamax.Release.installed().tables(options.entries, ["ragged_dot"])
    entries = [entry for table in tables if table.chip == options.chip for entry in table.entries]
    rows = {}
    for number, entry in enumerate(entries, 1):
        try:
            rows[entry.name] = [entry.milliseconds / 1e3 / predicted for predicted in seconds(entry, nominal)]
        except ValueError as error:
            print(f"left out: {entry.name}: {error}", file=sys.stderr)
        print(f"{number} of {len(entries)}", file=sys.stderr, flush=True)
    if len(rows) < 2:
        raise SystemExit(f"{len(rows)} problems of {options.chip} have a prediction: too few to fit anything")
    ratios = np.array(list(rows.values()))
    report = {"chip": options.chip, "problems": len(rows), "all": describe(ratios, *fit(ratios))}
    for name, half, rest in (
        ("even", ratios[::2], ratios[1::2]),
        ("odd", ratios[1::2], ratios[::2]),
    ):
        report[f"rest, fitted to {name}"] = describe(rest, *fit(half))
    print(json.dumps(report, indent=2))
    report["grid"] = GRID
    report["ratios"] = rows
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Would the score `schedule` have picked the configuration that a tuner on hardware found best?

    python benchmarks/schedule_ranking.py [--kernels ragged_dot,attention] [--entries 8] [--candidates 12]
        [--resume] [--json FILE]

For entries of Tokamax's tables, the recorded winner and others of the configurations that its tuner tries
are scored. The prediction is right about an entry if the winner scores within 5% of the best. Needs
Tokamax, and no TPU. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import schedule_tokamax
from schedule_tokamax import Entry

from autotune.score import Score, rank
from autotune.score.schedule import ScheduleScorer, compile_with_dumps
from bridge.chips import chip
from bridge.topology import CompileError, compiler_versions

RESULTS = Path(__file__).parent / "results" / "schedule_ranking.json"
CLOSE = 0.05
"""By how much the winner may be slower than the best candidate."""

STEPS = 4
"""Candidates have at most so many times the winner's grid steps: smaller tiles lose by far, too easily."""


@dataclass(frozen=True)
class Ranking:
    """How the recorded winner fares among other configurations.

    Attributes:
        name, chip: the problem.
        winner: the configuration recorded as the fastest.
        best: the one that scores best.
        behind: by how much the winner is slower than it, both as scored.
        scored: configurations scored, the winner included.
        refused: configurations that do not compile, or not in time, which a tuner leaves out.
    """

    name: str
    chip: str
    winner: Mapping[str, Any]
    best: Mapping[str, Any]
    behind: float
    scored: int
    refused: int


def ranking(entry: Entry, count: int, seconds: float) -> Ranking | str:
    """The place of the recorded winner among `count` configurations; or why there is none.

    Args:
        seconds: that the compiler may take for each configuration but the winner.
    """
    on = chip(entry.chip)
    most = STEPS * entry.steps(entry.config)
    others = [
        config
        for config in entry.configurations()
        if config != entry.config and entry.fits(config, on) and entry.steps(config) <= most
    ]
    first = _score(entry, entry.config)
    if isinstance(first, str):
        return f"{entry.chip} {entry.name}: the winner has no score: {first}"
    scored, refused = [(entry.config, first)], 0
    for place in np.random.default_rng(0).permutation(len(others)):
        if len(scored) == count:
            break
        score = _score(entry, others[place], seconds)
        if isinstance(score, str):
            refused += 1
        else:
            scored.append((others[place], score))
    best, score = scored[rank([score for _, score in scored])[0]]
    behind = first.time_s / score.time_s - 1
    winner, best = schedule_tokamax.short(entry.config), schedule_tokamax.short(best)
    return Ranking(entry.name, entry.chip, winner, best, behind, len(scored), refused)


def _score(entry: Entry, config: Any, seconds: float | None = None) -> Score | str:
    """The score with a configuration; or why there is none."""
    in_time = functools.partial(compile_with_dumps, timeout=seconds)
    try:
        score = ScheduleScorer(chip(entry.chip), in_time).score(entry.workload(config))
    except (
        CompileError,
        ValueError,
        NotImplementedError,
    ) as error:  # the last two: Pallas and Tokamax refuse
        return str(error)[:200]
    return score.reasons[0] if score.confidence == "low" else dataclasses.replace(score, kernels=())


def sample(table: schedule_tokamax.Table, count: int) -> Sequence[Entry]:
    """Entries of a table, each form of the kernel as often as the other; those with residuals left out."""
    forms: dict[str, list[Entry]] = {}
    for entry in table.entries:
        if not entry.arguments["return_residuals"]:
            forms.setdefault(entry.form, []).append(entry)
    chosen = []
    for entries in forms.values():
        places = (
            np.linspace(0, len(entries) - 1, min(len(entries), -(-count // len(forms)))).round().astype(int)
        )
        chosen += [entries[place] for place in np.unique(places)]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kernels", default="ragged_dot,attention", help="names with commas")
    parser.add_argument("--entries", type=int, default=8, help="about so many of each table")
    parser.add_argument(
        "--candidates", type=int, default=12, help="configurations of each, the winner included"
    )
    parser.add_argument(
        "--seconds", type=float, default=300, help="that the compiler may take for a configuration"
    )
    parser.add_argument("--resume", action="store_true", help="keep the cases that the file of --json has")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    del sys.argv[1:]  # Tokamax reads the command line, too, and stumbles over what it does not know

    schedule_tokamax.check_sizes()
    tokamax = schedule_tokamax.Release.installed()
    tables = tokamax.tables(sys.maxsize, options.kernels.split(","))
    entries = [entry for table in tables for entry in sample(table, options.entries)]
    versions = {name: compiler_versions()[name] for name in ("jax", "libtpu")}
    versions["tokamax"] = tokamax.version
    about = {
        "versions": versions,
        "candidates": options.candidates,
        "seconds": options.seconds,
        "within": CLOSE,
    }
    results: list[Ranking | str] = _kept(options.json, about) if options.resume else []
    done = {(result.chip, result.name) for result in results if isinstance(result, Ranking)}
    missing = [entry for entry in entries if (entry.chip, entry.name) not in done]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        tasks = [threads.submit(ranking, entry, options.candidates, options.seconds) for entry in missing]
        for task in as_completed(tasks):
            results.append(task.result())
            print(_line(results[-1]), flush=True)
            _write(options.json, about, results)  # it takes long: what is done is kept
    found = [result for result in results if isinstance(result, Ranking)]
    good = sum(result.behind <= CLOSE for result in found)
    print(f"\n{good} of {len(found)} recorded winners within {CLOSE:.0%} of the best candidate")


def _kept(path: Path, about: Mapping[str, Any]) -> list[Ranking | str]:
    """The cases that an earlier run has written. Raises `SystemExit` if it was another kind of run."""
    if not path.is_file():
        return []
    before = json.loads(path.read_text())
    if any(before[name] != value for name, value in about.items()):
        raise SystemExit(f"{path} was made with other versions or options: leave out --resume")
    return [Ranking(**fields) for fields in before["rankings"]]


def _write(path: Path, about: Mapping[str, Any], results: Sequence[Ranking | str]) -> None:
    found = [result for result in results if isinstance(result, Ranking)]
    report = {
        **about,
        "good": sum(result.behind <= CLOSE for result in found),
        "cases": len(found),
        "failures": [result for result in results if isinstance(result, str)],
        "rankings": [asdict(result) for result in found],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def _line(result: Ranking | str) -> str:
    if isinstance(result, str):
        return result
    changed = {key: value for key, value in result.best.items() if value != result.winner[key]}
    return (
        f"{result.chip:6} {result.name}: {result.behind:.1%} behind "
        f"{'itself' if not changed else changed}; {result.scored} scored, {result.refused} refused"
    )


if __name__ == "__main__":
    main()

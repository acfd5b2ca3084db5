"""Would the score `schedule` have picked the tiles that a tuner on hardware found best?

    python benchmarks/schedule_ranking.py [--chip v5e] [--entries 6] [--candidates 12] [--json FILE]

For entries of Tokamax's ragged_dot table: the recorded winner and other legal tiles, sampled, are scored. The
prediction is right about an entry if the winner scores within 5% of the best. Needs Tokamax, and no TPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from schedule_vs_published import TOKAMAX_TABLES, ragged_entries, ragged_kind, ragged_workload

from autotune.score import Score, rank
from autotune.score.schedule import ScheduleScorer
from bridge.aot.avals import parse_aval
from bridge.chips import Chip, chip

RESULTS = Path(__file__).parent / "results" / "schedule_ranking.json"
CLOSE = 0.05
"""By how much the winner may be slower than the best candidate."""

TILES = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)


@dataclass(frozen=True)
class Ranking:
    """How the recorded winner fares among other tiles; `behind` is by how much the best is faster."""

    name: str
    chip: str
    winner: tuple[int, int, int]
    best: tuple[int, int, int]
    behind: float
    candidates: int
    refused: int


def candidates(problem: dict[str, Any], on: Chip) -> Iterator[tuple[int, int, int]]:
    """Tiles (m, k, n) that divide the problem and whose blocks fit in the VMEM a kernel may use."""
    lhs, rhs = parse_aval(problem["lhs"]).shape, parse_aval(problem["rhs"]).shape
    kind = ragged_kind(problem)
    (m, k), n = lhs, rhs[-2] if kind == "dlhs" else rhs[-1]
    for tile_m, tile_k, tile_n in itertools.product(
        TILES, sorted({*TILES, k} & set(_divisors(k))), sorted({*TILES, n} & set(_divisors(n)))
    ):
        inputs = 2 * 2 * (tile_m * tile_k + (tile_m if kind == "drhs" else tile_k) * tile_n)
        outputs = (2 * 2 + 4) * (tile_k if kind == "drhs" else tile_m) * tile_n
        if tile_m <= 1024 and m % tile_m == 0 and inputs + outputs <= on.vmem_limit_bytes:
            yield tile_m, tile_k, tile_n


def _divisors(size: int) -> Iterator[int]:
    return (tile for tile in range(128, size + 1, 128) if size % tile == 0)


def ranking(problem: dict[str, Any], config: dict[str, Any], on: Chip, count: int) -> Ranking | None:
    """The place of the recorded winner among `count` tiles; None if too few can be scored."""
    winner = (config["tile_m"], config["tile_k"], config["tile_n"])
    others = [tiles for tiles in candidates(problem, on) if tiles != winner]
    chosen = np.random.default_rng(0).permutation(len(others))[: count - 1]
    tiles = [winner, *(others[place] for place in chosen)]
    scores = [_score(problem, config, choice, on) for choice in tiles]
    scored = [(choice, score) for choice, score in zip(tiles, scores, strict=True) if score is not None]
    if scores[0] is None or len(scored) < 2:
        return None
    best, score = scored[rank([score for _, score in scored])[0]]
    name = f"{ragged_kind(problem)} {problem['lhs']} {problem['rhs']}"
    behind = scores[0].time_s / score.time_s - 1
    return Ranking(name, on.name, winner, best, behind, len(scored), len(tiles) - len(scored))


def _score(
    problem: dict[str, Any], config: dict[str, Any], tiles: tuple[int, int, int], on: Chip
) -> Score | None:
    """The score with other tiles; None if it does not compile or something in it is unknown."""
    changed = config | dict(zip(("tile_m", "tile_k", "tile_n"), tiles, strict=True))
    try:
        score = ScheduleScorer(on).score(ragged_workload("candidate", problem, changed))
    except Exception:  # such tiles are not legal: a tuner leaves them out
        return None
    return None if score.confidence == "low" else dataclasses.replace(score, kernels=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chip", default="v5e", choices=list(TOKAMAX_TABLES))
    parser.add_argument("--entries", type=int, default=6)
    parser.add_argument("--candidates", type=int, default=12)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    del sys.argv[1:]  # Tokamax reads the command line, too, and stumbles over what it does not know

    on = chip(options.chip)
    entries = ragged_entries(options.chip, options.entries)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        tasks = [threads.submit(ranking, p, config, on, options.candidates) for p, config, _ in entries]
        found = [result for result in (task.result() for task in tasks) if result is not None]
    for result in found:
        print(
            f"{result.name:60} winner {result.winner} best {result.best}: {result.behind:.1%} behind, "
            f"{result.candidates} candidates ({result.refused} more were refused)"
        )
    good = sum(result.behind <= CLOSE for result in found)
    print(f"\n{good} of {len(found)} recorded winners within {CLOSE:.0%} of the best candidate")
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps([asdict(result) for result in found], indent=2) + "\n")


if __name__ == "__main__":
    main()

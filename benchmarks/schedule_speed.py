"""How long a score takes, and how far several at once are quicker than one after the other.

    python benchmarks/schedule_speed.py [--rounds 3] [--json FILE]

What is scored are matmuls of 4096 x 4096 whose tiles have sides of 512 to 1024, for v5e, each another one.
Nothing runs on a TPU. The compiler's processes are those of `bridge.topology`, as many as there are cores.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from schedule_vs_published import matmul
from timing import circumstances, write_report

from autotune.score import Workload
from autotune.score.schedule import ScheduleScorer
from bridge.chips import chip
from bridge.topology import compiler_versions

RESULTS = Path(__file__).parent / "results" / "schedule_speed.json"
TILES = ((512, 1024, 1024), (1024, 512, 1024), (1024, 1024, 512), (512, 1024, 512))
"""Tiles (m, k, n): those of one batch. Their schedules are about equally long."""
PARALLEL = (1, 2, 4)
SIZE = 4096


def batches() -> Iterator[list[Workload]]:
    """Batches of different tiles. No batch is the same problem as another, so none finds a trace of it."""
    for number in itertools.count():
        size = jax.ShapeDtypeStruct((SIZE, SIZE + 1024 * number), jnp.bfloat16)
        yield [
            Workload(
                f"matmul {tile_m}/{tile_k}/{tile_n}",
                functools.partial(matmul, tile_m=tile_m, tile_k=tile_k, tile_n=tile_n),
                (jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16), size),
            )
            for tile_m, tile_k, tile_n in TILES
        ]


def seconds(batch: Sequence[Workload], at_once: int) -> float:
    """Seconds for a whole batch, so many scores at a time."""
    scorer = ScheduleScorer(chip("v5e"))
    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        scores = list(threads.map(scorer.score, batch))
    taken = time.perf_counter() - start
    low = [score.reasons for score in scores if score.confidence == "low"]
    if low:
        raise RuntimeError(f"a score is of low confidence, so its time says nothing: {low[0]}")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()

    different = batches()
    first = seconds(next(different)[:1], 1)
    seconds(next(different), max(PARALLEL))  # starts all of the compiler's processes
    rounds: dict[int, list[float]] = {at_once: [] for at_once in PARALLEL}
    for _ in range(options.rounds):
        for at_once in PARALLEL:
            rounds[at_once].append(seconds(next(different), at_once))
    speed_up = {
        at_once: statistics.median(one / several for one, several in zip(rounds[1], taken, strict=True))
        for at_once, taken in rounds.items()
    }
    warm = statistics.median(rounds[1]) / len(TILES)
    print(f"first score, compiler started: {first:.2f} s\nwarm: {warm:.2f} s")
    for at_once, taken in rounds.items():
        print(
            f"{at_once} at a time: {len(TILES)} scores in {statistics.median(taken):.2f} s, "
            f"{speed_up[at_once]:.2f} times as many a second as one at a time"
        )
    report = circumstances()
    report["versions"] |= {name: compiler_versions()[name] for name in ("jax", "libtpu")}
    report |= {
        "first_s": first,
        "warm_s": warm,
        "scores_in_a_batch": len(TILES),
        "batch_s": {str(at_once): taken for at_once, taken in rounds.items()},
        "speed_up": {str(at_once): ratio for at_once, ratio in speed_up.items()},
    }
    write_report(options.json, report)


if __name__ == "__main__":
    main()

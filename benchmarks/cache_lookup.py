"""What it costs to ask for a tuned tiling at a call, in microseconds.

    python benchmarks/cache_lookup.py [--rounds 20] [--calls 20000]

Warm lookups are those of a problem that was asked for before: a call of a kernel makes its problem anew, so
the problem is equal to that one and not the same object. Cold ones are those after `autotune.cache.reload`,
files and code read anew. Nothing of the user's is read or written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune import cache
from autotune.problem import ArraySpec, Problem
from bridge.chips import chip

ENTRIES = 300
"""Problems in the file."""

ALLOWED_US = 2.0
"""What a warm lookup may take."""


@dataclass(frozen=True)
class Tiling:
    """As many sizes as a forward and a backward of attention have."""

    tile_q: int
    tile_kv: int
    backward_tile_q: int
    backward_tile_kv: int


KERNEL = cache.Kernel("attention", Tiling, modules=("autotune.problem", "autotune.spec"))


def make_problem(length: int) -> Problem:
    """A problem with three arrays and four params, as that of splash attention."""
    arrays = {name: ArraySpec((1, 32, length, 128), "bfloat16") for name in ("q", "k", "v")}
    return Problem.of("attention", arrays, {"mask": "ge(q,kv)", "score": "", "scale": None, "dropout_p": 0.0})


def microseconds(call: Callable[[], object], rounds: int, calls: int) -> tuple[float, float]:
    """Least and median microseconds of a call over the rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return min(times), statistics.median(times)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args()
    on = chip("v5e")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BRIDGE_TILINGS"] = folder
        tiling = Tiling(512, 512, 256, 256)
        problems = [make_problem(128 * (1 + number)) for number in range(ENTRIES)]
        entries = [cache.new_entry(KERNEL, problem, on, "schedule", tiling, 1e-3) for problem in problems]
        cache.store(entries)
        hit, equal, miss = problems[10], make_problem(128 * 11), make_problem(64)
        assert equal == hit and equal is not hit

        def cold() -> object:
            cache.reload()
            return cache.lookup(KERNEL, hit, on)

        def in_context() -> tuple[float, float]:
            with cache.use(entries[10:11]), cache.use([]):
                return microseconds(lambda: cache.lookup(KERNEL, equal, on), options.rounds, options.calls)

        def warm(problem: Problem) -> tuple[float, float]:
            return microseconds(lambda: cache.lookup(KERNEL, problem, on), options.rounds, options.calls)

        assert cache.lookup(KERNEL, equal, on) is not None and cache.lookup(KERNEL, miss, on) is None
        rows = {
            "warm, an equal problem": warm(equal),
            "warm, the same object": warm(hit),
            "warm, nothing there": warm(miss),
            "warm, in two contexts": in_context(),
            f"cold, of {ENTRIES} entries": microseconds(cold, options.rounds, 1),
        }
    print(f"{'microseconds':28}{'least':>12}{'median':>12}")
    for name, (least, median) in rows.items():
        print(f"{name:28}{least:12.2f}{median:12.2f}")
    worst = max(least for name, (least, _) in rows.items() if name.startswith("warm"))
    print(f"allowed for warm lookups: {ALLOWED_US}; {'kept' if worst < ALLOWED_US else 'NOT KEPT'}")


if __name__ == "__main__":
    main()

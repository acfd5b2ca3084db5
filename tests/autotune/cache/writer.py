"""A process that stores entries: `writer.py FIRST COUNT`; it says `ready`, waits for a line, and says what it
has stored after each."""

from __future__ import annotations

import sys

from autotune import cache
from autotune.problem import ArraySpec, Problem


def entry(number: int, rows: int) -> cache.Entry:
    """One of a problem of its own; its time says which is the best."""
    problem = Problem.of("op", {"x": ArraySpec((number, 128), "float32")})
    failure = cache.Failure({"rows": rows + 1}, "wrong numbers")
    return cache.Entry(problem, "v5e", "schedule", {"rows": rows}, float(rows), (failure,), {"jax": "1"})


def main() -> None:
    """Store entries of problems FIRST, FIRST + 1, ..., and one of problem 0, which all processes share."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(first, first + count):
        assert cache.store([entry(number, 8), entry(0, 2 * number)])
        print(number, flush=True)


if __name__ == "__main__":
    main()

"""Processes that write one file at once, and that are killed while they do."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.cache import Entry, from_text

WRITER = Path(__file__).parent / "writer.py"


def start(first: int, count: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(WRITER), str(first), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process


def let_go(processes: list[subprocess.Popen[str]]) -> None:
    """All at the same time, when all have started."""
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def stored(process: subprocess.Popen[str]) -> list[int]:
    """What it said it had stored. A killed one may have been cut off in the middle of a number."""
    output, _ = process.communicate(timeout=120)
    return [int(line) for line in output.splitlines(keepends=True) if line.endswith("\n")]


def by_rows(entries: list[Entry]) -> dict[int, Entry]:
    return {entry.problem.required("x").shape[0]: entry for entry in entries}


def check_several_write_at_once(folder: Path, processes: int, count: int) -> None:
    running = [start(100 * (number + 1), count) for number in range(processes)]
    let_go(running)
    done = list(itertools.chain.from_iterable(stored(process) for process in running))
    assert [process.returncode for process in running] == [0] * processes
    assert len(done) == processes * count
    found = by_rows(from_text((folder / "v5e.json").read_bytes(), "v5e")[1])
    assert set(found) == {0, *done}
    # All wrote that of problem 0: the fastest is left, and what failed in any of them.
    assert found[0].tiling == {"rows": 200}  # twice the first problem
    assert {failure.tiling["rows"] for failure in found[0].failures} == {2 * number + 1 for number in done}
    assert [file.name for file in folder.iterdir() if file.suffix not in (".json", ".lock")] == []


def check_killed_ones_lose_nothing(folder: Path, rounds: int, processes: int = 2) -> None:
    chance = random.Random(0)
    file = folder / "v5e.json"
    said: set[int] = set()
    for number in range(rounds):
        running = [start(100_000 * (number * processes + p + 1), 10_000) for p in range(processes)]
        let_go(running)
        until = time.monotonic() + 0.05 + 0.2 * chance.random()
        while time.monotonic() < until:
            if file.exists():
                from_text(file.read_bytes(), "v5e")
        for process in running:
            process.kill()
            said.update(stored(process))
        found = by_rows(from_text(file.read_bytes(), "v5e")[1]) if file.exists() else {}
        # What a process had stored is there; of what it was about to store, one may be.
        assert said <= set(found)
        assert len(found) <= 1 + len(said) + processes * (number + 1)
    assert said, "no process got as far as to store anything"
    survivor = start(1, 1)
    let_go([survivor])
    assert stored(survivor) == [1] and survivor.returncode == 0
    assert said | {0, 1} <= set(by_rows(from_text(file.read_bytes(), "v5e")[1]))
    left = {path.name for path in folder.iterdir()}
    assert left == {"v5e.json", ".v5e.json.lock"}, "what killed processes leave is removed"


def test_several_write_at_once(folder: Path) -> None:
    check_several_write_at_once(folder, 4, 4)


def test_killed_ones_lose_nothing(folder: Path) -> None:
    check_killed_ones_lose_nothing(folder, 1)


@pytest.mark.slow
def test_eight_write_at_once_at_length(folder: Path) -> None:
    check_several_write_at_once(folder, 8, 20)


@pytest.mark.slow
def test_killed_ones_lose_nothing_at_length(folder: Path) -> None:
    check_killed_ones_lose_nothing(folder, 20)

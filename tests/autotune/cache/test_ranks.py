"""Ranks that agree: as threads, and as processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autotune import cache
from autotune.cache import FirstRankFailed, agreed, following
from bridge import ranks

TIMEOUT = 60


def refuse() -> Any:
    raise AssertionError("only the first rank chooses")


def test_without_ranks_the_choice_is_ones_own() -> None:
    assert agreed(lambda: 8) == 8
    assert ranks.run(lambda: agreed(lambda: dist.get_rank()), 1, timeout=TIMEOUT) == [0]


def test_the_first_rank_decides() -> None:
    def rank() -> int:
        # Each would choose something else: timings differ, or one has it in its cache.
        own = {0: 256, 1: 512, 2: 1024}[dist.get_rank()]
        return agreed((lambda: own) if dist.get_rank() == 0 else refuse)

    assert ranks.run(rank, 3, timeout=TIMEOUT) == [256, 256, 256]


@pytest.mark.parametrize("what", ["raises", "exits", "cannot be sent"])
def test_when_the_first_rank_fails_all_do(what: str) -> None:
    def fail() -> Any:
        if what == "raises":
            raise ValueError("no candidate compiles")
        if what == "exits":
            sys.exit(1)
        return lambda: None  # no function of this kind can be pickled

    def rank() -> tuple[type[BaseException], str]:
        try:
            agreed(fail if dist.get_rank() == 0 else refuse)
        except (Exception, SystemExit) as error:
            dist.barrier()
            return type(error), str(error)
        raise AssertionError("it was to fail")

    first, *others = ranks.run(rank, 3, timeout=TIMEOUT)
    assert first[0] is not FirstRankFailed
    for kind, text in others:
        assert kind is FirstRankFailed
        assert "rank 0, which decides for the others, failed" in text
        assert what != "raises" or "ValueError: no candidate compiles" in text


def test_groups_decide_for_themselves() -> None:
    def rank() -> int | str:
        group = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="not in the process group"):
                agreed(refuse, group)
            return "not in it"
        return agreed(lambda: 10 * dist.get_rank(), group)

    assert ranks.run(rank, 3, timeout=TIMEOUT) == ["not in it", 10, 10]


def test_lookups_follow_the_first_rank(making: Any) -> None:
    known = [making.entry(256)]
    other = making.problem(2048)

    def rank() -> list[int | None]:
        index = dist.get_rank()
        # Rank 1 has a tiling of its own for one problem, and one for another that rank 0 does not know.
        own = known if index == 0 else [making.entry(512), making.entry(512, problem=other)]
        with cache.use(own):
            with following():
                found = [making.rows(), making.rows(other)]
            return [*found, making.rows()]

    assert ranks.run(rank, 2, timeout=TIMEOUT) == [[256, None, 256], [256, None, 512]]


def test_a_context_of_the_first_rank_alone(making: Any) -> None:
    cache.store([making.entry(512)])

    def rank() -> int | None:
        if dist.get_rank() == 0:
            with cache.use([], alone=True), following():
                return making.rows()
        with following():
            return making.rows()

    assert ranks.run(rank, 2, timeout=TIMEOUT) == [None, None]


PROGRAM = """
import sys
import torch.distributed as dist
sys.path.append(sys.argv[1])
import conftest
from autotune import cache
dist.init_process_group("gloo", init_method="env://")
Making, rank = conftest.Making, dist.get_rank()
cache.store([Making.entry(256 if rank == 0 else 512)])
with cache.following():
    followed = Making.rows()
chosen = cache.agreed(lambda: Making.rows())
try:
    cache.agreed(lambda: 1 // 0)
except (ZeroDivisionError, cache.FirstRankFailed) as error:
    failure = type(error).__name__
print(Making.rows(), followed, chosen, failure, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_processes_with_folders_of_their_own(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
            env={
                **os.environ,
                "BRIDGE_TILINGS": str(tmp_path / str(rank)),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": "2",
                "RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].strip() for process in running]
    assert outputs == ["256 256 256 ZeroDivisionError", "512 256 256 FirstRankFailed"]

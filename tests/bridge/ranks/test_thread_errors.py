"""Ranks that are threads, when something goes wrong; and what is left in the process afterwards."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from bridge.ranks import threads
from bridge.ranks.threads import RankError, RankTimeout, run

from .collectives import all_reduced, everyone

_SOON = 10.0  # seconds, of which what "ends at once" takes a small part

# What torch itself warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*not support barrier device_ids"),
]


# -- errors --------------------------------------------------------------------------------------


class _Problem(Exception):
    pass


def _fails(where: str, cleaned: list[int]) -> None:
    rank = dist.get_rank()
    try:
        dist.barrier()  # all have come this far
        if where == "before" and rank == 1:
            raise _Problem("bad luck")
        dist.all_reduce(torch.ones(1))
        if where == "middle" and rank == 1:
            raise _Problem("bad luck")
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        if where == "backward":
            y.register_hook(_raise if rank == 1 else _reduce)
        y.backward()
        if where == "receive":
            if rank == 1:
                raise _Problem("bad luck")
            dist.recv(torch.ones(1), 1)
        if where == "new_group":
            if rank == 1:
                raise _Problem("bad luck")
            dist.new_group([0, 1, 2])
        dist.barrier()
    finally:
        cleaned.append(rank)


def _raise(_: torch.Tensor) -> None:
    raise _Problem("bad luck")


def _reduce(gradient: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(gradient)
    return gradient


@pytest.mark.parametrize("where", ["before", "middle", "backward", "receive", "new_group"])
def test_a_rank_that_raises_ends_the_others(where: str) -> None:
    cleaned: list[int] = []
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised _Problem: bad luck") as caught:
        run(_fails, 3, where, cleaned)
    assert time.monotonic() - started < _SOON
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, _Problem)
    assert sorted(cleaned) == [0, 1, 2]
    assert run(all_reduced, 2) == [3.0, 3.0]


def test_other_errors_are_notes() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            with threads.blocking():
                time.sleep(0.3)
                raise KeyError("second")
        raise _Problem("first")

    with pytest.raises(RankError, match="rank 1 raised _Problem: first") as caught:
        run(program, 2)
    assert caught.value.__notes__ == ["rank 0 raised as well: KeyError: 'second'"]


def test_an_exception_that_programs_catch_does_not_keep_a_rank() -> None:
    def program() -> str:
        if dist.get_rank() == 1:
            raise _Problem
        while True:
            try:
                dist.barrier()
            except Exception:  # noqa: S112  what a retry loop does
                continue

    with pytest.raises(RankError):
        run(program, 2, timeout=60)


def test_work_left_behind() -> None:
    """Collectives and messages that nobody else comes to, and nobody waits for."""

    def program() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1000), async_op=True)
            dist.isend(torch.ones(1), 1)
            dist.irecv(torch.ones(1), 1)

    started = time.monotonic()
    run(program, 2)
    assert time.monotonic() - started < _SOON


@pytest.mark.parametrize("world_size", [0, -1])
def test_world_sizes_that_are_too_small(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"expected a world_size of 1 or more, got {world_size}"):
        run(print, world_size)


@pytest.mark.parametrize("world_size", [True, 2.0, "2", None])
def test_world_sizes_that_are_no_numbers(world_size: Any) -> None:
    with pytest.raises(TypeError, match="expected an int as world_size, got"):
        run(print, world_size)


def test_timeouts_that_are_none() -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        run(print, 1, timeout=0)
    with pytest.raises(TypeError, match="number of seconds"):
        run(print, 1, timeout=None)  # pyright: ignore[reportArgumentType]


def test_runs_within_runs() -> None:
    with pytest.raises(RankError, match=r"run\(\) was called on rank \d of another run\(\)"):
        run(lambda: run(print, 2), 2)


def test_runs_beside_runs() -> None:
    errors: list[BaseException] = []

    def program() -> None:
        if dist.get_rank() == 0:
            other = threading.Thread(target=beside)
            other.start()
            with threads.blocking():
                other.join()

    def beside() -> None:
        try:
            run(print, 2)
        except RuntimeError as error:
            errors.append(error)

    run(program, 2)
    assert "while another thread is in run()" in str(errors[0])


def test_a_group_of_a_rank_in_a_thread_without_one() -> None:
    def program() -> list[str]:
        errors: list[str] = []
        group = dist.group.WORLD

        def beside() -> None:
            assert group is not None
            try:
                group.allreduce([torch.ones(1)])
            except RuntimeError as error:
                errors.append(str(error))

        other = threading.Thread(target=beside)
        other.start()
        with threads.blocking():
            other.join()
        return errors

    for rank, errors in enumerate(run(program, 2)):
        assert len(errors) == 1 and f"a collective of rank {rank}'s group to be called in that" in errors[0]


# -- ranks that never come -----------------------------------------------------------------------


def _waits(where: str) -> None:
    rank, one = dist.get_rank(), torch.ones(1)
    if rank == 1:
        return
    if where == "collective":
        dist.all_reduce(one)
    elif where == "receive":
        dist.recv(one, 1) if rank == 0 else dist.recv(one, 0)
    elif where == "send":
        dist.send(one, 1) if rank == 0 else dist.recv(one, 1)
    elif where == "functional":
        _ = functional.all_reduce(one, "sum", everyone()) + 1
    elif where == "new_group":
        dist.new_group([0, 1, 2])
    elif where == "backward":
        x = torch.ones(1, requires_grad=True)
        x.register_hook(_reduce)
        (x * 1).backward()
    elif where == "monitored_barrier":
        dist.monitored_barrier()


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("collective", "waiting in allreduce (collective 1 of group '0' of ranks [0, 1, 2]), for rank 1"),
        ("receive", "waiting in recv from rank 1 (tag 0, group '0' of ranks [0, 1, 2]), for rank 1"),
        ("send", "waiting in send to rank 1 (tag 0, group '0' of ranks [0, 1, 2]), for rank 1"),
        ("functional", "waiting in allreduce (collective 1 of group '0' of ranks [0, 1, 2]), for rank 1"),
        ("new_group", "waiting in new group (collective 1 of group '1' of ranks [0, 1, 2]), for rank 1"),
        ("backward", "waiting in allreduce (collective 1 of group '0' of ranks [0, 1, 2]), for rank 1"),
        ("monitored_barrier", "waiting in monitored_barrier (collective 1 of group '0'"),
    ],
)
def test_when_no_rank_can_go_on_it_is_told_at_once(where: str, what: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankTimeout, match="no rank can go on") as caught:
        run(_waits, 3, where, timeout=100)
    assert time.monotonic() - started < _SOON
    message = str(caught.value)
    assert f"rank 0, {what}" in message and "rank 1 has ended" in message
    assert f"{__file__}:" in message and (" in _waits" in message or where == "backward")
    assert caught.value.ranks == [0, 2]


def test_timeouts_of_the_program_s_own() -> None:
    """Of a barrier, a work and the store: they end before the run does, so this is no deadlock."""

    def program() -> list[str]:
        soon, errors = timedelta(milliseconds=200), []
        work = dist.all_reduce(torch.ones(1), async_op=True) if dist.get_rank() == 0 else None
        store: Any = c10d._get_default_store()
        for wait in (
            lambda: dist.monitored_barrier(timeout=soon),
            lambda: work.wait(soon) if work is not None else None,
            lambda: store.wait(["nothing"], soon),
        ):
            if dist.get_rank() == 0:
                try:
                    wait()
                except (RuntimeError, dist.DistStoreError) as error:
                    errors.append(str(error))
        return errors

    errors = run(program, 2)[0]
    assert len(errors) == 3
    assert errors[0] == "Rank 1 failed to pass monitoredBarrier in 200 ms"
    assert "imed out" in errors[1] and "nothing" in errors[2]


def test_ranks_that_wait_for_each_other() -> None:
    def program() -> None:
        dist.recv(torch.ones(1), 1 - dist.get_rank())
        dist.send(torch.ones(1), 1 - dist.get_rank())

    with pytest.raises(RankTimeout, match="no rank can go on"):
        run(program, 2)


def test_a_rank_that_hangs_elsewhere_is_named_after_the_timeout() -> None:
    release = threading.Event()

    def program() -> None:
        if dist.get_rank() == 1:
            with threads.blocking():
                release.wait()
        dist.barrier()

    before = set(threading.enumerate())
    try:
        with pytest.raises(RankTimeout, match="2 of 2 ranks have not ended after 1 seconds") as caught:
            run(program, 2, timeout=1)
        message = str(caught.value)
        assert "rank 0, waiting in barrier" in message and "for rank 1" in message
        assert f"rank 1, in blocking(), at {__file__}:" in message and "in program" in message
        assert "left alone: rank 1 of 2" in caught.value.__notes__[0]
    finally:
        release.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(_SOON)
    assert run(all_reduced, 2) == [3.0, 3.0]


def test_a_loop_without_end_is_ended() -> None:
    def program() -> None:
        if dist.get_rank() == 1:
            while True:
                pass
        dist.barrier()

    with pytest.raises(RankTimeout, match="rank 1, running, at") as caught:
        run(program, 2, timeout=1)
    assert not hasattr(caught.value, "__notes__")


def test_interrupts_end_the_ranks() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            with threads.blocking():
                for _ in range(200):  # on a busy machine the signal may take its time
                    time.sleep(0.05)
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(program, 2)
    finally:
        signal.signal(signal.SIGINT, before)


# -- the process ---------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[None]:
    """A process that has a group of its own already."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


def test_the_process_keeps_its_own_group(world: None) -> None:
    mine = dist.group.WORLD
    seen: list[Any] = []

    def beside() -> None:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        seen.append((dist.group.WORLD is mine, dist.get_world_size(), tensor.item()))

    def program() -> int:
        assert dist.group.WORLD is not mine
        if dist.get_rank() == 0:
            other = threading.Thread(target=beside)
            other.start()
            with threads.blocking():
                other.join()
        dist.barrier()
        return dist.get_world_size()

    assert run(program, 2) == [2, 2]
    assert seen == [(True, 1, 1.0)]
    assert dist.group.WORLD is mine and all_reduced() == 1.0
    assert (functional.all_reduce(torch.ones(1), "sum", everyone()) + 0).item() == 1.0


def test_ranks_may_destroy_their_groups() -> None:
    def program() -> None:
        dist.barrier()
        dist.destroy_process_group()

    run(program, 2)


def test_many_runs_leave_nothing_behind() -> None:
    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    run(all_reduced, 2)
    gc.collect()
    before = threading.active_count(), tasks()
    for number in range(30):
        assert run(all_reduced, 2) == [3.0, 3.0]
        if number % 5 == 0:
            with pytest.raises(RankError):
                run(_fails, 3, "middle", [])
            with pytest.raises(RankTimeout):
                run(_waits, 3, "collective")
    gc.collect()
    assert threading.active_count() == before[0]
    assert tasks() <= before[1], "gloo's threads"

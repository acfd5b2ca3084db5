"""N ranks of torch.distributed as threads of this process: for tests, notebooks and debuggers.

    from bridge.ranks import threads

    def step(x):
        y = x + torch.distributed.get_rank()
        torch.distributed.all_reduce(y)
        return y

    threads.run(step, 4, torch.ones(3))  # a list of four tensors

In the function, torch.distributed is what it would be under torchrun with gloo, and results are the same, bit
for bit. Each rank has its own process groups, its own random numbers (torch's for cpu and tpu, numpy's,
Python's) and its own RANK and LOCAL_RANK in `os.environ`. One rank's Python runs at a time: ranks take turns
where one waits for another. All else is the process's, and so shared: modules and their globals, torch's
settings.

Threads that a rank starts itself, as a DataLoader's, have no rank: there, torch.distributed is the process's.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

import bridge
from bridge.ranks import baton, thread_group, thread_rank, thread_store

__all__ = ["RankError", "RankTimeout", "blocking", "current_rank", "is_rank_thread", "run"]

_GRACE = 2.0  # seconds for ranks to end, once told
_PATIENCE = 0.5  # ... after which they are told by an exception out of nowhere
_NOT_PROGRAM = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(bridge.__file__) + os.sep,
    os.path.dirname(threading.__file__) + os.sep + "threading.py",
    os.path.dirname(threading.__file__) + os.sep + "contextlib.py",
)
_one_run = threading.Lock()


class RankError(RuntimeError):
    """A rank raised. The exception is `__cause__`.

    Attributes:
        rank: which rank.
    """

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank} raised {type(error).__name__}: {error}")
        self.rank = rank
        self.__cause__ = error


class RankTimeout(TimeoutError):
    """Ranks have not ended in time, or never can.

    Attributes:
        ranks: the ranks that had not ended.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


# -- for programs --------------------------------------------------------------------------------


def run(
    fn: Callable[..., Any],
    world_size: int,
    /,
    *args: Any,
    timeout: float = 300.0,
    device: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on each of `world_size` ranks, threads of this process.

    The ranks start with the caller's random numbers and context variables. The caller's are as before
    afterwards.

    Args:
        fn: what each rank runs. All ranks get the same objects, and what they return is not copied either.
        world_size: how many ranks.
        timeout: seconds after which ranks that have not ended are given up; `math.inf` for a debugger.
        device: where ranks make tensors that name no device, as by `torch.set_default_device`.

    Returns:
        What `fn` returned, in the order of ranks.

    Raises:
        RankError: a rank raised. The others are ended.
        RankTimeout: ranks have not ended in time; or, at once, all that have not ended wait for others.
        RuntimeError: another run is going on in this process.
    """
    _check(world_size, timeout)
    if device is not None:
        torch.device(device)  # raises here if it is none
    if is_rank_thread():
        raise RuntimeError(
            f"run() was called on rank {current_rank()} of another run(): expected one at a time in a "
            "process. Use torch.distributed.new_group() for groups of ranks."
        )
    if not _one_run.acquire(blocking=False):
        raise RuntimeError(
            "run() was called while another thread is in run(): expected one at a time in a process. "
            "Wait for it."
        )
    try:
        return _Run(lambda: fn(*args, **kwargs), world_size, timeout, device).results()
    finally:
        _one_run.release()


def current_rank() -> int | None:
    """The rank whose thread calls; none outside of `run`."""
    rank = thread_rank.current()
    return None if rank is None else rank.index


def is_rank_thread() -> bool:
    """Whether the calling thread is one of `run`'s ranks."""
    return current_rank() is not None


@contextlib.contextmanager
def blocking() -> Iterator[None]:
    """Within, other ranks run: for a call that waits for something that is not torch.distributed's.

    A rank that waits for another one by other means, such as a queue, must do so in here: otherwise the other
    one never has its turn. No random numbers should be drawn within. Without effect where there is no rank.
    """
    rank = thread_rank.current()
    if rank is None:
        yield
        return
    with rank.baton.outside(rank.index):
        yield


def _check(world_size: object, timeout: object) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"expected an int as world_size, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"expected a world_size of 1 or more, got {world_size}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"expected a number of seconds as timeout, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"expected a timeout of more than 0 seconds, got {timeout}")


# -- one run -------------------------------------------------------------------------------------


class _Run:
    """The threads of one call of `run`, and what came of them."""

    def __init__(self, fn: Callable[[], Any], size: int, timeout: float, device: str | None) -> None:
        self._fn, self._size, self._timeout, self._device = fn, size, timeout, device
        self._deadline = time.monotonic() + timeout
        self._baton = baton.Baton(size, self._deadline, self._deadlock)
        board = thread_rank.Board()
        self._ranks = [thread_rank.Rank(r, size, self._baton, board) for r in range(size)]
        self._store = thread_store.RankStore(self._baton)
        self._results: list[Any] = [None] * size
        self._errors: list[tuple[int, BaseException]] = []  # in the order they were raised
        self._threads: list[threading.Thread] = []

    def results(self) -> list[Any]:
        random_state = baton.RandomState()
        try:
            with thread_group.installed(self._ranks):
                self._start_and_wait()
        finally:
            random_state.restore()
        if self._baton.failure is not None:
            raise self._finished_error()
        return self._results

    # -- the caller's thread

    def _start_and_wait(self) -> None:
        try:
            for rank in self._ranks:
                target = contextvars.copy_context().run
                name = f"rank {rank.index} of {self._size}"
                thread = threading.Thread(target=target, args=(self._work, rank), name=name, daemon=True)
                self._threads.append(thread)
            for thread in self._threads:
                thread.start()
            if not self._baton.over.wait(self._seconds_left()):
                self._baton.fail(self._too_late())
            self._end_threads()
        except BaseException as error:  # KeyboardInterrupt, above all
            self._baton.fail(error)
            self._deadline = 0.0  # nobody wants to wait for the ranks now
            self._end_threads()
            raise

    def _seconds_left(self) -> float | None:
        return None if math.isinf(self._deadline) else max(self._deadline - time.monotonic(), 0.0)

    def _end_threads(self) -> None:
        """Wait for the threads, which have nothing to do any more but what `fn` does in spite of that."""
        if self._baton.failure is None:
            for thread in self._threads:
                thread.join()
            return
        told_at = time.monotonic()
        until = max(self._deadline, told_at + _GRACE)
        interrupted = False
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < until:
            for rank, thread in zip(self._ranks, self._threads, strict=True):
                if thread.is_alive():
                    rank.close_connections()
                    thread.join(0.05)
            if not interrupted and time.monotonic() - told_at > _PATIENCE:
                interrupted = True
                self._interrupt()
        left = [t.name for t in self._threads if t.is_alive()]
        if left and self._baton.failure is not None:
            self._baton.failure.add_note(
                f"Threads that could not be ended and are left alone: {', '.join(left)}. They hang in a call "
                "that does not return."
            )

    def _interrupt(self) -> None:
        """Raise `Ended` in ranks that are busy with something else; not in a call that hangs in C."""
        for turn, thread in zip(self._baton.turns, self._threads, strict=True):
            if thread.is_alive() and thread.ident is not None and turn.status is not baton.Status.ENDED:
                turn.told = True
                kind = ctypes.py_object(baton.Ended)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), kind)

    def _finished_error(self) -> BaseException:
        error = self._baton.failure
        assert error is not None
        for rank, other in self._errors:
            if isinstance(error, RankError) and other is not error.__cause__:
                error.add_note(f"rank {rank} raised as well: {type(other).__name__}: {other}")
        return error

    # -- the ranks' threads

    def _work(self, rank: thread_rank.Rank) -> None:
        try:
            self._call(rank)
        except baton.Ended:
            pass
        except BaseException as error:
            if not self._baton.turns[rank.index].told:  # else it is but a consequence
                self._errors.append((rank.index, error))
                self._baton.fail(RankError(rank.index, error))
        try:
            self._baton.end(rank.index)
            self._baton.over.wait()  # others may still be receiving what this rank has sent
            rank.stop()
        except baton.Ended:  # `_interrupt`, late
            pass
        except Exception as error:
            self._baton.fail(RankError(rank.index, error))

    def _call(self, rank: thread_rank.Rank) -> None:
        self._baton.start(rank.index)
        rank.start(self._store)
        if self._device is not None:
            torch.set_default_device(self._device)  # of this thread
        self._results[rank.index] = self._fn()

    # -- reports

    def _deadlock(self) -> RankTimeout:
        return RankTimeout(
            "no rank can go on: all that have not ended wait for others.\n"
            + self._where()
            + "\nEvery rank of a group must come to each of its collectives, and every recv needs a send.",
            self._not_ended(),
        )

    def _too_late(self) -> RankTimeout:
        ranks = self._not_ended()
        return RankTimeout(
            f"{len(ranks)} of {self._size} ranks have not ended after {self._timeout:g} seconds.\n"
            + self._where()
            + "\nIf they only need longer, give run() a longer timeout. If a rank waits for another one by "
            "something else than torch.distributed, that call must be in "
            "`with bridge.ranks.threads.blocking():`.",
            ranks,
        )

    def _not_ended(self) -> list[int]:
        return [r for r, turn in enumerate(self._baton.turns) if turn.status is not baton.Status.ENDED]

    def _where(self) -> str:
        """A line for each rank: what it does, and where."""
        frames = sys._current_frames()
        lines = []
        for rank, (turn, thread) in enumerate(zip(self._baton.turns, self._threads, strict=True)):
            if turn.status is baton.Status.ENDED:
                lines.append(f"  rank {rank} has ended")
                continue
            state, wait = turn.status.value, turn.wait
            if wait is not None:
                missing = ", ".join(map(str, wait.missing()))
                state = f"waiting in {wait.what}" + (f", for rank {missing}" if missing else "")
            lines.append(f"  rank {rank}, {state}, at {_place(frames.get(thread.ident or 0))}")
        return "\n".join(lines)


def _place(frame: FrameType | None) -> str:
    """The innermost place in a stack that is neither torch's nor ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_PROGRAM):
        frame = frame.f_back
    if frame is None:
        return "its start"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

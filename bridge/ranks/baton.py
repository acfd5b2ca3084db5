"""Threads that take turns: each is one rank, and one rank's Python runs at a time.

The baton goes from rank to rank only where a rank waits for another one, or ends. So a program's result does
not depend on how the system schedules threads, and what belongs to a process can be kept for each rank:
random numbers and environment variables are exchanged when the baton changes hands. And it is known at once
when no rank can go on.
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_SEVERAL = -1  # the baton's holder while ranks are `together`


class Ended(BaseException):
    """Thrown into ranks that wait, once the run is over for another reason. No `Exception`, so that programs
    don't catch it by accident."""


# -- what belongs to a rank ----------------------------------------------------------------------


class RandomState:
    """A copy of the random numbers' state in this process: torch (cpu and tpu), DTensor, numpy, Python."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = [(g, g.get_state()) for g in _generators()]
        self._tracker = getattr(_dtensor_random(), "_rng_tracker", None)

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for generator, state in self._torch:
            generator.set_state(state)
        module = _dtensor_random()
        if module is not None:
            module._rng_tracker = self._tracker


def _generators() -> list[torch.Generator]:
    device = sys.modules.get("bridge.device.random")  # not there, where torch_tpu serves "tpu"
    others = () if device is None else device.default_generators()
    return [torch.default_generator, *(g for g in others if g is not torch.default_generator)]


def _dtensor_random() -> Any:
    """The module that keeps DTensor's one tracker of random states, if it has been imported."""
    return sys.modules.get("torch.distributed.tensor._random")


# -- waiting -------------------------------------------------------------------------------------


@dataclass
class Wait:
    """What a rank waits for. The functions are called by any thread, under the baton's lock."""

    ready: Callable[[], bool]
    what: str
    missing: Callable[[], Sequence[int]] = field(default=lambda: ())  # the ranks that have not come
    deadline: float | None = None  # of `time.monotonic`: the wait ends then, ready or not
    ranks_only: bool = True  # nothing but another rank can make it ready


class Status(enum.Enum):
    READY = "ready to run"
    RUNNING = "running"
    WAITING = "waiting for ranks"
    OUTSIDE = "in blocking()"
    ENDED = "ended"


class Turn:
    """One rank's place in the round."""

    def __init__(self, lock: threading.Lock, state: RandomState) -> None:
        self.status = Status.READY
        self.wait: Wait | None = None
        self.told = False  # `Ended` was thrown into it
        self.granted = threading.Condition(lock)
        self.state = state


class Baton:
    """Who may run.

    Args:
        size: how many ranks.
        deadline: when the run ends at the latest, in `time.monotonic`'s seconds. Waits that time out later
            than that count as waits for ever.
        on_deadlock: makes the error for the case that every rank waits for another one.
    """

    def __init__(self, size: int, deadline: float, on_deadlock: Callable[[], BaseException]) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._last = size - 1  # so that rank 0 is the first
        self._deadline = deadline
        self._on_deadlock = on_deadlock
        self._state_of: int | None = None  # whose random numbers the process has
        state = RandomState()
        self.turns = [Turn(self._lock, state) for _ in range(size)]
        self.failure: BaseException | None = None
        self.over = threading.Event()  # all ranks have ended, or the run has failed

    # -- for the ranks' threads

    def start(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        with self._lock:
            if self._holder is None:
                self._next()
            self._until_granted(rank)
        self._exchange(rank)

    def end(self, rank: int) -> None:
        """This rank has no more to do. It may hold the baton or not."""
        with self._lock:
            self.turns[rank].status = Status.ENDED
            self._let_go(rank)
            if all(turn.status is Status.ENDED for turn in self.turns):
                self.over.set()

    def wait(self, rank: int, wait: Wait) -> bool:
        """Let others run until `wait` is ready; false if its deadline came first.

        Within `outside`, the rank goes on as soon as it is ready, without the baton.
        """
        turn = self.turns[rank]
        with self._lock:
            self._raise_if_failed(turn)
            if wait.ready():
                return True
            outside = turn.status is Status.OUTSIDE
            turn.wait = wait
            try:
                if outside:
                    self._until_ready(turn, wait)
                else:
                    turn.status = Status.WAITING
                    self._let_go(rank)
                    self._until_granted(rank)
            finally:
                turn.wait = None
        if not outside:
            self._exchange(rank)
        return wait.ready()

    def give_way(self, rank: int) -> None:
        """Let every other rank that can run have a turn: for loops that ask whether something is done."""
        with self._lock:
            self._raise_if_failed(self.turns[rank])
            self.turns[rank].status = Status.READY
            self._let_go(rank)
            self._until_granted(rank)
        self._exchange(rank)

    @contextlib.contextmanager
    def outside(self, rank: int) -> Iterator[None]:
        """Within, others run, while this rank is busy with something they have no part in."""
        turn = self.turns[rank]
        with self._lock:
            self._raise_if_failed(turn)
            if turn.status is not Status.RUNNING:  # within another one
                nested = True
            else:
                nested = False
                turn.status = Status.OUTSIDE
                self._let_go(rank)
        try:
            yield
        except BaseException:
            if not nested and self.failure is None:  # else this error is all that is left to say
                self._come_back(rank)
            raise
        if not nested:
            self._come_back(rank)

    @contextlib.contextmanager
    def together(self, rank: int, members: Sequence[int], come: set[int], what: str) -> Iterator[None]:
        """Within, these ranks are busy at the same time, in C++, and no other rank runs.

        Args:
            come: shared by the members: those that have come to this point.
        """
        turn = self.turns[rank]
        with self._lock:
            self._raise_if_failed(turn)
            come.add(rank)
            if len(come) == len(members):
                self._holder, self._last = _SEVERAL, min(members) - 1  # the first one goes on first
                for member in members:
                    self.turns[member].status = Status.OUTSIDE
                    self.turns[member].granted.notify_all()
            else:
                turn.status = Status.WAITING
                missing = lambda: [member for member in members if member not in come]
                turn.wait = Wait(lambda: False, what, missing)
                self._let_go(rank)
                try:
                    while turn.status is Status.WAITING:
                        self._raise_if_failed(turn)
                        turn.granted.wait()
                finally:
                    turn.wait = None
        try:
            yield
        finally:
            with self._lock:
                come.discard(rank)
                turn.status = Status.READY
                if not come and self._holder == _SEVERAL:
                    self._holder = None
                    if self.failure is None:
                        self._next()
                self._until_granted(rank)
            self._exchange(rank)

    def raise_if_over(self, rank: int) -> None:
        """Raises: Ended: the run has failed."""
        with self._lock:
            self._raise_if_failed(self.turns[rank])

    # -- for any thread

    def poke(self) -> None:
        """Something has happened that may have made a wait ready."""
        with self._lock:
            for turn in self.turns:
                if turn.status is Status.OUTSIDE and turn.wait is not None:
                    turn.granted.notify_all()
            if self._holder is None and self.failure is None:
                self._next()

    def fail(self, error: BaseException) -> None:
        """End the run: ranks that wait, and that come to wait, get `Ended`. The first error counts."""
        with self._lock:
            self._fail(error)

    # -- under the lock

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self.over.set()
        for turn in self.turns:
            turn.granted.notify_all()

    def _let_go(self, rank: int) -> None:
        if self._holder == rank:
            self._holder = None
            if self.failure is None:
                self._next()

    def _next(self) -> None:
        """Give the baton to the next rank, in turn, that can run."""
        size = len(self.turns)
        for rank in ((self._last + 1 + i) % size for i in range(size)):
            turn = self.turns[rank]
            waited = turn.status is Status.WAITING and turn.wait is not None and self._may_go_on(turn.wait)
            if waited or turn.status is Status.READY:
                turn.status = Status.RUNNING
                self._holder = self._last = rank
                turn.granted.notify_all()
                return
        if self._stuck():
            self._fail(self._on_deadlock())

    @staticmethod
    def _may_go_on(wait: Wait) -> bool:
        return wait.ready() or (wait.deadline is not None and time.monotonic() >= wait.deadline)

    def _stuck(self) -> bool:
        """Whether it is certain that no rank will ever go on."""
        waits = [turn.wait for turn in self.turns if turn.status is not Status.ENDED]
        return bool(waits) and all(
            wait is not None
            and wait.ranks_only
            and (wait.deadline is None or wait.deadline >= self._deadline)
            and not self._may_go_on(wait)
            for wait in waits
        )

    def _until_granted(self, rank: int) -> None:
        turn = self.turns[rank]
        while True:
            self._raise_if_failed(turn)
            if self._holder == rank:
                return
            deadline = None if turn.wait is None else turn.wait.deadline
            if deadline is None:
                turn.granted.wait()
            elif not turn.granted.wait(max(deadline - time.monotonic(), 0.0005)) and self._holder is None:
                self._next()

    def _until_ready(self, turn: Turn, wait: Wait) -> None:
        if self._holder is None:
            self._next()  # finds out whether anyone can go on
        while not self._may_go_on(wait):
            self._raise_if_failed(turn)
            turn.granted.wait(
                None if wait.deadline is None else max(wait.deadline - time.monotonic(), 0.0005)
            )

    def _raise_if_failed(self, turn: Turn) -> None:
        if self.failure is not None:
            turn.told = True
            raise Ended

    # -- by the thread that has the baton

    def _come_back(self, rank: int) -> None:
        with self._lock:
            self.turns[rank].status = Status.READY
            if self._holder is None and self.failure is None:
                self._next()
            self._until_granted(rank)
        self._exchange(rank)

    def _exchange(self, rank: int) -> None:
        """Put this rank's random numbers and environment in the place of the last one's."""
        if self._state_of == rank:
            return
        if self._state_of is not None:
            self.turns[self._state_of].state = RandomState()
        self._state_of = rank
        self.turns[rank].state.restore()
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)

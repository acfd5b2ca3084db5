"""Finds races: accesses to the same memory, one of them a write, that nothing puts in an order.

Takes the place of the interpreter's own detector, whose clocks it uses: each core has one, so has each copy,
and a clock counts what is known to have happened on every other. It differs in this:

- a wait takes over the clocks of as many signals as it uses up, the first that came (`Arrivals`); JAX's takes
  over those of all that came so far, and a rank that was late in a run hides a race;
- an access is forgotten once a later one covers it, so that long kernels take linear time;
- races are told as values, with both lines.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.interpretation.signs import DEVICE

Range = Sequence[slice | int]


@dataclass(frozen=True)
class Actor:
    """Who accesses memory: a core, or a copy on behalf of one.

    Attributes:
        component: its place in clocks.
        device: the core's.
        is_copy: whether it is a copy.
    """

    component: int
    device: int
    is_copy: bool


@dataclass(frozen=True)
class Access:
    """An access to memory. `time` is the actor's own at that moment."""

    actor: Actor
    time: int
    range: Range
    line: str
    writes: bool

    def described(self) -> str:
        """In words; the device is left open as `DEVICE`."""
        verb = "write" if self.writes else "read"
        by = f"a copy that {DEVICE} started" if self.actor.is_copy else DEVICE
        return f"the {verb} by {by} at {self.line or 'the launch of the kernel'}"


class Races:
    """The accesses to each buffer, and what is wrong with them.

    Args:
        tell: called with the later access, the earlier one, and the buffer's key.
        actor: the actor of the device and core that the interpreter names; a copy has a number instead.
        line: the source line in words of what the interpreter knows of it.
        alone: whether there has only been one actor so far; then nothing needs to be kept.
    """

    def __init__(
        self,
        tell: Callable[[Access, Access, Any], None],
        actor: Callable[[int, int], Actor],
        line: Callable[[Any], str],
        alone: Callable[[], bool],
    ) -> None:
        self.races_found = False  # JAX's name
        self._tell = tell
        self._actor = actor
        self._line = line
        self._alone = alone
        self._reads: defaultdict[Any, list[Access]] = defaultdict(list)
        self._writes: defaultdict[Any, list[Access]] = defaultdict(list)
        self._lock = threading.Lock()

    # JAX's names, and what it gives.

    def check_read(
        self,
        device_id: int,
        local_core_id: int,
        clock: Any,
        buffer_key: Any,
        rnge: Range,
        source_info: Any = None,
    ) -> None:
        """Called for each read."""
        self._check(device_id, local_core_id, clock, buffer_key, rnge, source_info, False)

    def check_write(
        self,
        device_id: int,
        local_core_id: int,
        clock: Any,
        buffer_key: Any,
        rnge: Range,
        source_info: Any = None,
    ) -> None:
        """Called for each write."""
        self._check(device_id, local_core_id, clock, buffer_key, rnge, source_info, True)

    def _check(
        self, device: int, core: int, clock: Any, key: Any, range_: Range, source: Any, writes: bool
    ) -> None:
        if self._alone():
            return
        actor = self._actor(device, core)
        new = Access(actor, int(clock[actor.component]), tuple(range_), self._line(source), writes)
        with self._lock:
            earlier = [self._writes[key], self._reads[key]] if writes else [self._writes[key]]
            raced = [
                next(
                    (old for old in accesses if not _known(old, clock) and overlap(old.range, new.range)),
                    None,
                )
                for accesses in earlier
            ]
            mine = self._writes if writes else self._reads
            for accesses in earlier if writes else [mine[key]]:
                accesses[:] = [
                    old for old in accesses if not (covers(new.range, old.range) and _known(old, clock))
                ]
            mine[key].append(new)
        for old in raced:
            if old is not None:
                self.races_found = True
                self._tell(new, old, key)


def _known(old: Access, clock: Any) -> bool:
    """Whether an access happened before the moment of a clock."""
    return clock[old.actor.component] >= old.time


def overlap(one: Range, other: Range) -> bool:
    """Whether two ranges of a buffer have elements in common. Dimensions that are left out are whole."""
    return all(itertools.starmap(_meet, zip(one, other, strict=False)))


def _meet(one: slice | int, other: slice | int) -> bool:
    a, b = _indices(one), _indices(other)
    if not a or not b or a[-1] < b[0] or b[-1] < a[0]:
        return False
    if a.step == b.step == 1:
        return True
    return not set(a).isdisjoint(b)


def covers(one: Range, other: Range) -> bool:
    """Whether a range has all elements of another one."""
    if len(one) > len(other):
        return False
    return all(_holds(_indices(a), _indices(b)) for a, b in zip(one, other, strict=False))


def _holds(a: range, b: range) -> bool:
    return not b or a == b or (a.step == 1 and bool(a) and a[0] <= b[0] and b[-1] <= a[-1])


def _indices(item: slice | int) -> range:
    if isinstance(item, int):
        return range(item, item + 1)
    return range(item.start, item.stop, item.step or 1)


@dataclass
class Arrival:
    """A signal that came, and how much of it no wait has used up."""

    left: int
    clock: Any
    origin: Any


class Arrivals:
    """The signals that a semaphore has on one core, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[Arrival] = deque()

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self._waiting)

    def come(self, amount: int, clock: Any, origin: Any) -> None:
        """A signal."""
        self._waiting.append(Arrival(amount, np.array(clock), origin))

    def use(self, amount: int) -> Any:
        """A wait. Returns what it learns: the clock of the signals it uses up; None if there are none."""
        learned = None
        while amount > 0 and self._waiting:
            first = self._waiting[0]
            learned = first.clock if learned is None else np.maximum(learned, first.clock)
            used = min(amount, first.left)
            amount -= used
            first.left -= used
            if not first.left:
                self._waiting.popleft()
        return learned

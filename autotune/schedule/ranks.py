"""Runs one program on all devices of a mesh together, in the order of time.

Every core has a machine of its own and runs the same code, with its own place in the
mesh. The machine that is furthest behind goes on, until it is about to do something at a time before which
another may still do something that matters to it: use a link, or send what arrives earlier. So copies get the
links in the order of time, and no wait ends too late. A machine that waits for what nobody has sent lets the
others run; if none can go on, that is reported, and one of them goes on without.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from autotune.schedule.network import Network, Slice, latency_cycles
from autotune.schedule.records import Rates
from autotune.schedule.semaphores import Arrival
from autotune.schedule.statements import SEMAPHORE_BITS

FAR_COPY = 0x3 << 14
"""Copies to other devices have one of these bits in their overrides: on v4 the second, else the first."""

# Where code puts the number of a chip and of a core beside that of a semaphore. The chip's place in the
# address of a signal depends on the kind of chip (`program.Dialect.chip_shift`).
CHIPS = 0x3FFF
SIGNAL_CORE_BIT = 14
COPY_CORE_BIT = 13
SEMAPHORE_NUMBERS = 0x1FFF

Groups = Mapping[str, Sequence[Sequence[int]]]
"""Ranks that take part in each collective operation, by its name: several groups, each on its own."""


class Machine(Protocol):
    """What a machine must be to take part: see `timeline.Machine`.

    Attributes:
        core, core_in_device, rank, chip: which core it is.
        rates: the speed of its copies.
        ready: when it can go on; infinite while it waits for others.
        blocked_at: when it began to wait.
        released: whether it goes on although nobody has sent what it waits for.
        link_cycles: cycles it kept each link busy, by function.
    """

    core: int
    core_in_device: int
    rank: int
    chip: int
    rates: Rates
    ready: float
    blocked_at: float
    released: bool
    link_cycles: Any  # [function][link], a number of cycles

    def steps(self, program: str) -> Generator[None, None, float]:
        """Run `program`, yielding where others must go on first; returns the cycles it took."""
        ...

    def receive(self, function: str, flag: int, arrival: Arrival) -> bool:
        """Take something that arrives at a semaphore; False if it is not known which one that is."""
        ...

    def occupy_channel(self, now: float, nbytes: int) -> tuple[float, float]:
        """Take its HBM channel for a copy: (begin, end)."""
        ...

    def record(self, begin: float, end: float, nbytes: int, kind: int, owner: str | None = None) -> None:
        """Note a copy of a function."""
        ...

    def note_in(self, function: str, what: str) -> None:
        """Something is not known."""
        ...


@dataclass
class Meeting:
    """Devices that wait for each other in a collective operation.

    Attributes:
        size: how many there will be.
        arrivals: when each machine came.
    """

    size: int
    arrivals: dict[Machine, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all are there."""
        return len(self.arrivals) == self.size


class Ranks:
    """The machines of a mesh while they run.

    Args:
        around: where the devices are.
        chip_shift: the bit from which on the address of a signal names a chip.
        groups: ranks of each collective operation.
    """

    def __init__(self, around: Slice, chip_shift: int, groups: Groups) -> None:
        self.network = Network(around)
        self._slice = around
        self._chip_shift = chip_shift
        self._groups = groups
        self._machines: dict[tuple[int, int], Machine] = {}
        self._meetings: dict[tuple[str, int, tuple[int, ...], int], Meeting] = {}
        self._horizon = 0.0

    def run(self, machines: Sequence[Machine], program: str) -> list[float]:
        """Run `program` on all machines; returns the cycles each one took."""
        self._machines = {(machine.chip, machine.core): machine for machine in machines}
        running = {machine: machine.steps(program) for machine in machines}
        cycles: dict[Machine, float] = {}
        while running:
            machine, self._horizon = _furthest_behind(running)
            if machine.ready == math.inf:
                machine = min(running, key=lambda machine: machine.blocked_at)
                machine.released, self._horizon = True, math.inf
            try:
                next(running[machine])
            except StopIteration as end:
                cycles[machine] = end.value
                del running[machine]
        return [cycles[machine] for machine in machines]

    # What machines ask ----------------------------------------------------------------------------

    def too_early(self, machine: Machine, time: float) -> bool:
        """Whether another machine may still do something before `time`; then `machine` must let it."""
        if time <= self._horizon:
            return False
        machine.ready = time
        return True

    def is_far(self, overrides: int) -> bool:
        """Whether a copy goes to another device."""
        return bool(overrides & FAR_COPY)

    def receiver(self, overrides: int, semaphore: int) -> Machine | None:
        """The core that gets a copy; None if it is not in the mesh."""
        return self._machines.get((overrides & CHIPS, semaphore >> COPY_CORE_BIT & 1))

    def signalled(self, semaphore: int) -> Machine | None:
        """The core that a signal goes to; None if it is not in the mesh."""
        low = semaphore & (1 << SEMAPHORE_BITS) - 1
        return self._machines.get((low >> self._chip_shift & CHIPS, low >> SIGNAL_CORE_BIT & 1))

    def plain(self, semaphore: int) -> int:
        """The address of a semaphore, on whichever core, without what says which core."""
        return semaphore >> SEMAPHORE_BITS << SEMAPHORE_BITS | semaphore & SEMAPHORE_NUMBERS

    def members(self, words: int) -> np.ndarray:
        """The table of devices that the runtime provides, filled up with zeros."""
        table = np.zeros(words, np.int32)
        devices = [place.device for place in self._slice.places][:words]
        table[: len(devices)] = devices
        return table

    def latency(self, source: Machine, destination: Machine) -> float:
        """Cycles from the end of a copy, or a signal, to the moment the other core sees it."""
        route = self._route(source, destination)
        return latency_cycles(self._slice.chip, route) if route else source.rates.latency_cycles

    def send(
        self, source: Machine, destination: Machine, name: str, now: float, nbytes: int
    ) -> tuple[float, float]:
        """Occupy the links between two cores, for the function `name`: (begin, end)."""
        route = self._route(source, destination)
        if not route:  # the other core of the same device
            return now, now + nbytes / source.rates.bytes_per_cycle
        begin, end = self.network.send(route, now, nbytes)
        for link in route:
            source.link_cycles[name][link] += end - begin
        return begin, end

    def deliver(self, target: Machine, function: str, semaphore: int, arrival: Arrival) -> None:
        """Bring something to a semaphore of another core, which it may be waiting for."""
        if not target.receive(function, semaphore, arrival):
            target.note_in(
                function, f"is signalled at semaphore {semaphore}, and it is not known which one that is"
            )
            return
        target.ready = min(target.ready, arrival.time)
        self._horizon = min(self._horizon, target.ready)

    def join(self, name: str, call: int, machine: Machine, now: float) -> Meeting | None:
        """Take part in a collective operation; None for one that is not."""
        group = next((tuple(g) for g in self._groups.get(name, ()) if machine.rank in g), None)
        if group is None:
            return None
        meeting = self._meetings.setdefault((name, call, group, machine.core_in_device), Meeting(len(group)))
        meeting.arrivals[machine] = now
        if meeting.complete:
            latest = max(meeting.arrivals.values())
            for other in meeting.arrivals:
                other.ready = min(other.ready, latest)
            self._horizon = min(self._horizon, latest)
        return meeting

    def _route(self, source: Machine, destination: Machine) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        places = self._slice.places
        return self._slice.route(places[source.rank], places[destination.rank])


def _furthest_behind(running: Mapping[Machine, Generator[None, None, float]]) -> tuple[Machine, float]:
    """The machine that can go on at the earliest time, and the earliest time of the others."""
    first: Machine | None = None
    others = math.inf
    for machine in running:
        if first is None:
            first = machine
        elif machine.ready < first.ready:
            others, first = min(others, first.ready), machine
        else:
            others = min(others, machine.ready)
    assert first is not None
    return first, others

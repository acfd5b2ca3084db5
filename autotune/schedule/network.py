"""The links between chips: which of them a copy passes, and when they are free.

Chips of a slice are points of a grid with two axes or three, linked to their neighbours, in a ring where the
axis is long enough. A copy goes along one axis after the other, the shorter way round, and occupies every
link of its way at the same time, for bytes / bandwidth: what comes in is passed on at once, packet by packet.
Each direction of a link is a channel of its own. Two devices of one chip have a link that is not ICI.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.chips import Chip

Link = tuple[tuple[int, ...], int, int]
"""One direction of a link: coordinates of the chip it leaves, axis, and 1 or -1. Axis -1 is within a chip."""

ON_CHIP = -1


@dataclass(frozen=True)
class Place:
    """Where one device of a mesh is.

    Attributes:
        device: its number, as JAX has it.
        coordinates: of its chip.
        core: its core on the chip; 0 where a device is a whole chip.
    """

    device: int
    coordinates: tuple[int, ...]
    core: int


@dataclass(frozen=True)
class Slice:
    """Chips and the devices of a mesh on them.

    Attributes:
        chip: what it is made of.
        shape: chips along each axis.
        places: of each device, in the order of the mesh.
    """

    chip: Chip
    shape: tuple[int, ...]
    places: tuple[Place, ...]

    def chip_number(self, place: Place) -> int:
        """The number by which code names the chip of a device."""
        return place.device // self.chip.devices_per_chip

    def route(self, source: Place, destination: Place) -> tuple[Link, ...]:
        """The links from one device to another; none within one device."""
        if source.coordinates == destination.coordinates:
            direction = destination.core - source.core
            return ((source.coordinates, ON_CHIP, direction),) if direction else ()
        links: list[Link] = []
        at = list(source.coordinates)
        for axis, goal in enumerate(destination.coordinates):
            size = self.shape[axis] if axis < len(self.shape) else 1
            ring = size % self.chip.ici_wrap_size == 0
            ahead, back = (goal - at[axis]) % size, (at[axis] - goal) % size
            step = (1 if ahead <= back else -1) if ring else (1 if goal > at[axis] else -1)
            while at[axis] != goal:
                links.append((tuple(at), axis, step))
                at[axis] = (at[axis] + step) % size if ring else at[axis] + step
        return tuple(links)


class Network:
    """The links of a slice while a program runs; times in cycles."""

    def __init__(self, around: Slice) -> None:
        self.slice = around
        self.busy: defaultdict[Link, float] = defaultdict(float)
        self._free: dict[Link, float] = {}

    def send(self, route: Sequence[Link], now: float, nbytes: int) -> tuple[float, float]:
        """Occupy the links of a route from `now` on, when all are free: (begin, end)."""
        begin = max([now, *(self._free.get(link, 0.0) for link in route)])
        length = nbytes / bytes_per_cycle(self.slice.chip, route)
        for link in route:
            self._free[link] = begin + length
            self.busy[link] += length
        return begin, begin + length


def bytes_per_cycle(chip: Chip, route: Sequence[Link]) -> float:
    """The bandwidth of a route, of one direction."""
    on_chip = any(axis == ON_CHIP for _, axis, _ in route)
    rate = chip.on_chip_bytes_per_second if on_chip else chip.ici_bytes_per_second
    assert rate is not None, f"{chip.name} has one device for each chip"
    return rate / chip.sustained_clock_hz


def latency_cycles(chip: Chip, route: Sequence[Link]) -> float:
    """From the moment the last byte has left to the moment the receiver is told."""
    on_chip = any(axis == ON_CHIP for _, axis, _ in route)
    seconds = chip.on_chip_latency_seconds if on_chip else chip.ici_latency_seconds * len(route)
    assert seconds is not None, f"{chip.name} has one device for each chip"
    return seconds * chip.sustained_clock_hz

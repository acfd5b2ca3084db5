"""The ring: who is in it, which keys a rank holds in each hop, and what travels to whom between hops.

Keys and values start at their own rank and visit every other one. With `cut` smaller than the number of keys
they travel in two halves, rows before `cut` to the right and the others to the left: links carry data both
ways at once, so a hop's keys arrive in half of the time. In a ring of two axes, keys visit all ranks along
the inner axis, then take one step along the outer one, and so on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax

from tpu_kernels.collectives.links import Line
from tpu_kernels.collectives.shipment import Parcel, Route
from tpu_kernels.ring_attention.layouts import Layout

ALIGNMENT = 128
"""Rows of a half are a multiple of these, and so of the tiles of any dtype in memory."""


Shifts: TypeAlias = tuple[Any, ...]
"""How far keys have come along each line: ints, or in a loop traced integers."""


class Hop(NamedTuple):
    """One of a ring's hops.

    Attributes:
        onward: along which line keys go on from here; None in the last hop.
        behind: along which line they came; None in the first.
    """

    onward: Line | None
    behind: Line | None


@dataclass(frozen=True)
class Ring:
    """All ranks of one axis of a mesh, or of two.

    Attributes:
        lines: the axes, the inner one last. Its ranks hold neighbouring parts of the sequence.
        layout: how the sequence is cut.
        q_count, kv_count: positions on each rank.
        cut: how many of its keys travel to the right.
    """

    lines: tuple[Line, ...]
    layout: Layout
    q_count: int
    kv_count: int
    cut: int

    @property
    def size(self) -> int:
        """How many ranks."""
        return math.prod(line.size for line in self.lines)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names."""
        return tuple(line.name for line in self.lines)

    def place(self, shifts: Shifts | None = None, way: int = 1, of: Sequence[int] | None = None) -> Any:
        """A rank's place in the ring, or that of the rank whose keys it has now.

        Args:
            shifts: how far keys have come along each line; None for the rank's own place.
            way: 1 for keys that travel to the right, -1 for the others.
            of: the rank's position along each line; None for the rank that this runs on.
        """
        place: Any = 0
        for i, (line, shift) in enumerate(zip(self.lines, shifts or self.start, strict=True)):
            own = jax.lax.axis_index(line.name) if of is None else of[i]
            place = place * line.size + (own - way * shift) % line.size
        return place

    @property
    def start(self) -> Shifts:
        """How far keys have come before the first hop."""
        return (0,) * len(self.lines)

    def ranks(self) -> Iterator[tuple[int, ...]]:
        """The positions of all ranks along each line, in the order of their places."""
        return itertools.product(*(range(line.size) for line in self.lines))

    def hops(self) -> list[Hop]:
        """All hops, in order."""
        *outer, inner = self.lines
        within = [inner] * (inner.size - 1)
        path = list(within)
        for line in outer:
            path += ([line, *within]) * (line.size - 1)
        return [Hop(onward, behind) for onward, behind in zip([*path, None], [None, *path], strict=True)]

    def runs(self) -> Iterator[tuple[Hop, int]]:
        """Hops, and how often each comes in succession."""
        for hop, same in itertools.groupby(self.hops()):
            yield hop, len(list(same))

    def moved(self, shifts: Shifts, line: Line, steps: int = 1) -> Shifts:
        """How far keys have come, some steps along a line later."""
        return tuple(
            (shift + steps) % one.size if one == line else shift
            for shift, one in zip(shifts, self.lines, strict=True)
        )

    def route(self, line: Line, arrays: int) -> Route:
        """Of so many arrays with a row for each key, to the next ranks along a line."""
        parcels = []
        for slot in range(arrays):
            parcels.append(Parcel(slot, 0, self.cut, 1))
            if self.cut < self.kv_count:
                parcels.append(Parcel(slot, self.cut, self.kv_count - self.cut, -1))
        return Route(line, tuple(parcels))


def cut_of(kv_count: int, ranks: int, bidirectional: bool | None) -> int:
    """How many keys travel to the right: about half, or all.

    All in a ring of two, whose two neighbours are one rank, and where halves would not be whole tiles.

    Raises:
        ValueError: halves are asked for, and there are too few keys.
    """
    half = -(-kv_count // 2 // ALIGNMENT) * ALIGNMENT
    possible = 0 < half < kv_count
    if bidirectional and not possible:
        raise ValueError(
            f"ring_attention: bidirectional=True needs more than {ALIGNMENT} keys on each rank, to be halved "
            f"at a multiple of {ALIGNMENT}, got {kv_count}; pass None to let it choose"
        )
    wanted = ranks > 2 if bidirectional is None else bidirectional
    return half if wanted and possible else kv_count

"""Arrays that travel to a neighbour while a kernel computes something else.

A kernel with a grid takes the arrays as operands and what arrives as results, all of them in HBM. Its first
grid step sends, its last one waits, and between them the copies have all the time of the kernel. Ranks are
no further apart than one kernel: see `links`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge.shapes import pallas_call
from tpu_kernels.collectives.links import Line, Peers


@dataclass(frozen=True)
class Parcel:
    """Some rows of an array, its last dimension but one, on their way to the same rows of a neighbour.

    Attributes:
        slot: which of the arrays.
        begin, rows: which rows.
        step: 1 for the neighbour to the right, -1 for the one to the left.
    """

    slot: int
    begin: int
    rows: int
    step: int

    def of(self, ref: Any) -> Any:
        """These rows."""
        if (self.begin, self.rows) == (0, ref.shape[-2]):
            return ref
        return ref.at[(*(slice(None),) * (len(ref.shape) - 2), pl.ds(self.begin, self.rows))]


@dataclass(frozen=True)
class Route:
    """Who sends what to whom; the same on all ranks of a line."""

    line: Line
    parcels: tuple[Parcel, ...]

    @property
    def collective_id(self) -> int:
        """Of the kernel that the arrays travel with."""
        return self.line.collective_id(Peers.RING)

    @property
    def both_ways(self) -> bool:
        """Whether something goes to each of the two neighbours."""
        return {parcel.step for parcel in self.parcels} == {1, -1}


@dataclass(frozen=True)
class Shipment:
    """Arrays [..., rows, cols] with their route, as operands and results of a `pallas_call`."""

    arrays: tuple[jax.Array, ...]
    route: Route

    @property
    def specs(self) -> list[pl.BlockSpec]:
        """Of the operands, and of the results."""
        return [pl.BlockSpec(memory_space=pl.ANY)] * len(self.arrays)

    @property
    def out_shape(self) -> list[jax.ShapeDtypeStruct]:
        """Of the results."""
        return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.arrays]

    @property
    def scratch_shapes(self) -> list[Any]:
        """Semaphores: for what leaves, for what arrives, and for the end. They come last."""
        count = len(self.route.parcels)
        copies = pltpu.SemaphoreType.DMA
        return [copies((count,)), copies((count,)), pltpu.SemaphoreType.REGULAR]


@dataclass(frozen=True)
class Travel:
    """A shipment inside the kernel.

    Attributes:
        route: of the arrays.
        source_refs, target_refs: in HBM: this rank's arrays, and where the neighbours' arrive.
        send_sem, recv_sem, done_sem: see `Shipment.scratch_shapes`.
    """

    route: Route
    source_refs: Sequence[Any]
    target_refs: Sequence[Any]
    send_sem: Any
    recv_sem: Any
    done_sem: Any

    @classmethod
    def of(
        cls, route: Route | None, sources: Sequence[Any], targets: Sequence[Any], rest: list[Any]
    ) -> Travel | None:
        """The travel of a kernel, if it has one; its semaphores are taken from the end of `rest`."""
        if route is None:
            return None
        semaphores = rest[-3:]
        del rest[-3:]
        return cls(route, sources, targets, *semaphores)

    def depart(self) -> None:
        """Wait until both neighbours are here, and send."""
        self.route.line.enter(Peers.RING)
        for copy in self._copies():
            copy.start()

    def arrive(self) -> None:
        """Wait until all has left, and all has arrived."""
        for copy in self._copies():
            copy.wait()
        if not self.route.both_ways:  # else each peer has sent something, so it was here
            self.route.line.leave(self.done_sem, Peers.RING)

    def _copies(self) -> list[Any]:
        line = self.route.line
        return [
            pltpu.make_async_remote_copy(
                parcel.of(self.source_refs[parcel.slot]),
                parcel.of(self.target_refs[parcel.slot]),
                self.send_sem.at[i],
                self.recv_sem.at[i],
                device_id=line.rank(parcel.step),
                device_id_type=pl.DeviceIdType.MESH,
            )
            for i, parcel in enumerate(self.route.parcels)
        ]


def is_first_step(axes: int) -> Any:
    """Whether a grid of so many axes is at its first step."""
    return functools.reduce(operator.and_, (pl.program_id(axis) == 0 for axis in range(axes)))


def is_last_step(axes: int) -> Any:
    """Whether a grid of so many axes is at its last step."""
    ends = (pl.program_id(axis) == pl.num_programs(axis) - 1 for axis in range(axes))
    return functools.reduce(operator.and_, ends)


def ship(shipment: Shipment) -> list[jax.Array]:
    """What arrives, where nothing is computed meanwhile."""
    count = len(shipment.arrays)

    def body(*refs: Any) -> None:
        travel = Travel(shipment.route, refs[:count], refs[count : 2 * count], *refs[2 * count :])
        travel.depart()
        travel.arrive()

    found = pallas_call(
        body,
        tuple(shipment.out_shape),
        in_specs=shipment.specs,
        out_specs=tuple(shipment.specs),
        scratch_shapes=shipment.scratch_shapes,
        compiler_params=pltpu.CompilerParams(
            collective_id=shipment.route.collective_id, has_side_effects=True
        ),
        name="collectives_ship",
    )(*shipment.arrays)
    return list(found)


def parted(refs: Sequence[Any], *counts: int) -> Iterator[list[Any]]:
    """A kernel's refs in groups of so many, and what is left."""
    begin = 0
    for count in counts:
        yield list(refs[begin : begin + count])
        begin += count
    yield list(refs[begin:])

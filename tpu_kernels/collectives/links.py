"""Who a kernel talks to along one axis of a mesh, and how it knows that they are ready.

A kernel may write to another rank's memory only after that rank has entered the same kernel. So each rank
signals the barrier semaphore of all its peers when it enters, and waits for as many signals as it has peers.
The semaphore only counts: it can't tell who signalled. A peer that ran ahead into the next kernel must not be
taken for one that has yet to come to this one. What rules that out:

- kernels that share a barrier semaphore (a `collective_id`) have the same peers on every rank: an axis has
  one id for its `RING` and one for `ALL`;
- a rank leaves a kernel only after each of its peers has passed the barrier in it. It has if it has sent
  something to that rank; a kernel in which some peers send nothing ends with `leave`.

Other axes of the mesh have other ids, as peers along them come and go as they like.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class Peers(enum.IntEnum):
    """Which ranks along an axis a kernel signals, and waits for."""

    RING = 0  # one to the left and one to the right; along an axis of two, the other one twice
    ALL = 1  # every other one


@dataclass(frozen=True)
class Line:
    """One axis of the mesh of the enclosing `shard_map`.

    Attributes:
        name: of the axis.
        size: how many ranks it has.
    """

    name: str
    size: int

    def place(self, step: Any = 0) -> jax.Array:
        """The position of the rank `step` to the right of this one, around the ring."""
        return jax.lax.rem(jax.lax.axis_index(self.name) + step + self.size, self.size)

    def rank(self, step: Any) -> dict[Any, Any]:
        """The same rank as a device id of kind MESH: along other axes it is where this rank is."""
        return {self.name: self.place(step)}

    def steps(self, peers: Peers) -> tuple[int, ...]:
        """How far the peers are."""
        return (-1, 1) if peers is Peers.RING else tuple(range(1, self.size))

    def collective_id(self, peers: Peers) -> int:
        """The barrier semaphore's number, unless the caller of a kernel names another."""
        return 2 * jax.sharding.get_abstract_mesh().axis_names.index(self.name) + peers

    def enter(self, peers: Peers) -> None:
        """Wait until all peers are in this kernel."""
        self._meet(pltpu.get_barrier_semaphore(), peers)

    def leave(self, done_sem: Any, peers: Peers) -> None:
        """Wait until all peers have come to the end of this kernel."""
        self._meet(done_sem, peers)

    def _meet(self, sem: Any, peers: Peers) -> None:
        steps = self.steps(peers)
        for step in steps:
            pl.semaphore_signal(sem, 1, device_id=self.rank(step), device_id_type=pl.DeviceIdType.MESH)
        pl.semaphore_wait(sem, len(steps))

    def send(self, source_ref: Any, target_ref: Any, sems: tuple[Any, Any], step: Any) -> Any:
        """Start a copy to `target_ref` on the rank `step` to the right.

        All ranks do the same, so waiting for what is returned also waits for what comes in: as many bytes, in
        this rank's `target_ref`, from the rank `step` to the left.
        """
        send_sem, recv_sem = sems
        copy = pltpu.make_async_remote_copy(
            source_ref,
            target_ref,
            send_sem,
            recv_sem,
            device_id=self.rank(step),
            device_id_type=pl.DeviceIdType.MESH,
        )
        copy.start()
        return copy


def reach(size: int) -> tuple[int, int]:
    """How many hops things travel around a ring to the right, and to the left, to come everywhere.

    Links carry data both ways at once, so each half of the ring is served by one direction.
    """
    return size // 2, (size - 1) // 2


def each_hop(hop: Callable[[Any, tuple[int, ...]], None], right: int, left: int) -> None:
    """Do `hop(h, directions)` for each hop around the ring: right is 1, left is -1.

    The first hop has the number 0, an int: it is often different. There may be hundreds of others, which are
    a loop. `right` is `left`, or one more.
    """
    hop(0, (1, -1) if left else (1,))

    def both(h: Any, carry: None) -> None:
        hop(h, (1, -1))

    if left > 1:
        jax.lax.fori_loop(1, left, both, None)
    if right > left and right > 1:
        hop(right - 1, (1,))

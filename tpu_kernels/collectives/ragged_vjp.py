"""All to all with as many rows for each rank as data says, and its gradient: the same rows back.

For use inside `jax.shard_map(..., check_vma=False)`. All ranks along the axis make the same calls.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_kernels.collectives import kernel
from tpu_kernels.collectives.links import Line
from tpu_kernels.collectives.ragged import Moves, move_rows


def ragged_all_to_all(
    x: jax.Array, send_counts: jax.Array, axis_name: str, size: int, output_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Rows from each rank along an axis to each other one.

    Args:
        x: [rows, ...], sorted by the rank that they go to; float32, bfloat16 or int32.
        send_counts: int32 [size], how many rows go to each rank. A negative count is 0, and rows from
            `rows` on do not exist.
        axis_name: of the mesh.
        size: ranks along it.
        output_rows: how many rows a rank has room for. Those that find none are not sent.

    Returns:
        [output_rows, ...]: the rows from rank 0, then those from rank 1, ...; then zeros. And int32 [size],
        how many rows there were from each rank; more than `output_rows` together if some found no room.

    Raises:
        TypeError, ValueError: other dtypes or shapes.
    """
    kernel.check("ragged_all_to_all", x)
    if send_counts.dtype != jnp.int32 or send_counts.shape != (size,) or x.ndim == 0:
        raise ValueError(
            f"ragged_all_to_all: x must have rows and send_counts be int32 [{size}], got {x.shape} and "
            f"{send_counts.dtype} {send_counts.shape}"
        )
    counts = kernel.all_gather(send_counts[None], axis_name, size)
    plan = Plan.of(counts, x.shape[0], output_rows)
    y: Any = _moved(x, counts, axis_name, size, x.shape[0], output_rows, False)
    return y, plan.sent[:, jax.lax.axis_index(axis_name)]


class Plan(NamedTuple):
    """Where all rows go. Everything is int32 [size, size], of rows from rank i to rank j.

    Attributes:
        starts: where they begin at rank i.
        sent: how many there are.
        targets: where they begin at rank j.
        moved: how many find room there.
    """

    starts: jax.Array
    sent: jax.Array
    targets: jax.Array
    moved: jax.Array

    @classmethod
    def of(cls, counts: jax.Array, rows: int, output_rows: int) -> Plan:
        """For any counts, a plan within the bounds of all arrays."""
        starts, sent = _placed(jnp.maximum(counts, 0), rows, 1)
        targets, moved = _placed(sent, output_rows, 0)
        return cls(starts, sent, targets, moved)


def _placed(counts: jax.Array, room: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """Where each count begins behind the ones before it, and how much of it is in the first `room`."""
    # A sum that never gets above `room` can't overflow.
    ends = jax.lax.associative_scan(
        lambda one, other: jnp.minimum(one + other, room), jnp.minimum(counts, room), axis=axis
    )
    starts = jnp.roll(ends, 1, axis)
    first = jax.lax.broadcasted_iota(jnp.int32, ends.shape, axis) == 0
    starts = jnp.where(first, 0, starts)
    return starts, ends - starts


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def _moved(
    x: jax.Array, counts: jax.Array, axis_name: str, size: int, rows: int, output_rows: int, back: bool
) -> jax.Array:
    """Rows where they go by `Plan.of(counts, rows, output_rows)`, or back to where they were; else zeros."""
    target_rows = rows if back else output_rows
    if not x.size or not target_rows:
        return jnp.zeros((target_rows, *x.shape[1:]), x.dtype)
    me = jax.lax.axis_index(axis_name)
    plan = Plan.of(counts, rows, output_rows)
    out = plan.starts[me], plan.moved[me], plan.targets[me]
    home = plan.targets[:, me], plan.moved[:, me], plan.starts[:, me]
    (starts, sent, targets), (ends_at, received, _) = (home, out) if back else (out, home)
    if size == 1:
        found = jnp.resize(x, (target_rows, *x.shape[1:]))  # both begin with row 0
    else:
        moves = Moves(starts, sent, targets, jnp.sum(received) - received[me])
        found = move_rows(x, moves, target_rows, Line(axis_name, size))
    row = jnp.arange(target_rows, dtype=jnp.int32)[:, None]
    came = jnp.any((row >= ends_at) & (row < ends_at + received), axis=1)
    return jnp.where(came.reshape(-1, *(1,) * (x.ndim - 1)), found, jnp.zeros((), x.dtype))


def _moved_fwd(
    x: jax.Array, counts: jax.Array, axis_name: str, size: int, rows: int, output_rows: int, back: bool
) -> tuple[jax.Array, jax.Array]:
    return _moved(x, counts, axis_name, size, rows, output_rows, back), counts


def _moved_bwd(
    axis_name: str, size: int, rows: int, output_rows: int, back: bool, counts: jax.Array, g: jax.Array
) -> tuple[jax.Array, None]:
    return _moved(g, counts, axis_name, size, rows, output_rows, not back), None


_moved.defvjp(_moved_fwd, _moved_bwd)

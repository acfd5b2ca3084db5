"""Rows from each rank to each other one, as many as data says: remote copies of any number of rows.

The size of a copy is part of a kernel's code. So n rows go as one copy for each bit of n that is set: 13 rows
as 8, 4 and 1. Ranks wait for all rows together, as semaphores count bytes: again a wait for each bit.

Rows lie along a leading dimension, which is never tiled, so that copies may begin at any of them: [cols] as
[cols / 128, 128], or [1, cols] where that is none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.collectives.links import Line, Peers

_LANES = 128


class Moves(NamedTuple):
    """What one rank sends to each other one along an axis. All are int32, and within the arrays' bounds.

    Attributes:
        starts: [size], where the rows for each rank begin.
        rows: [size], how many there are.
        targets: [size], where they begin in that rank's result.
        received: [], how many come from other ranks.
    """

    starts: jax.Array
    rows: jax.Array
    targets: jax.Array
    received: jax.Array


def move_rows(
    x: jax.Array, moves: Moves, output_rows: int, line: Line, collective_id: int | None = None
) -> jax.Array:
    """Rows of this rank to all ranks along an axis of two or more, and theirs to it.

    Args:
        x: [rows, ...], not empty.
        moves: this rank's; those of all ranks belong together.
        output_rows: of the result; not 0.
        line: the axis.
        collective_id: another barrier semaphore than the axis's own.

    Returns:
        [output_rows, ...], with anything in rows that no rank sent.
    """
    rows, *shape = x.shape
    cols = math.prod(shape)
    row = (cols // _LANES, _LANES) if cols % _LANES == 0 else (1, cols)
    others = jnp.sum(moves.rows) - moves.rows[line.place()]
    in_smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    found = pl.pallas_call(
        functools.partial(_body, line=line),
        out_shape=jax.ShapeDtypeStruct((output_rows, *row), x.dtype),
        in_specs=[in_smem, in_smem, in_smem, in_smem, in_hbm],
        out_specs=in_hbm,
        scratch_shapes=[
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.REGULAR,
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=line.collective_id(Peers.ALL) if collective_id is None else collective_id,
            has_side_effects=True,
        ),
        name="collectives_ragged_all_to_all",
    )(
        moves.starts,
        moves.rows,
        moves.targets,
        jnp.stack([others, moves.received]),
        x.reshape(rows, *row),
    )
    return found.reshape(output_rows, *shape)


def _body(
    starts_ref,  # [size]
    rows_ref,  # [size]
    targets_ref,  # [size]
    totals_ref,  # [2], rows to and from other ranks
    x_hbm_ref,  # [rows, ., .]
    o_hbm_ref,  # [output_rows, ., .]
    own_sem,
    send_sem,
    recv_sem,
    done_sem,
    *,
    line: Line,
) -> None:
    most = min(x_hbm_ref.shape[0], o_hbm_ref.shape[0])
    me = line.place()

    def own(start: Any, target: Any, count: int) -> Any:
        return pltpu.make_async_copy(
            x_hbm_ref.at[pl.ds(start, count)], o_hbm_ref.at[pl.ds(target, count)], own_sem
        )

    def start_own(offset: Any, count: int) -> None:
        own(starts_ref[me] + offset, targets_ref[me] + offset, count).start()

    _pieces(rows_ref[me], most, start_own)
    line.enter(Peers.ALL)

    def send(step: Any, carry: None) -> None:
        other = line.place(step)

        def start(offset: Any, count: int) -> None:
            source_hbm_ref = x_hbm_ref.at[pl.ds(starts_ref[other] + offset, count)]
            target_hbm_ref = o_hbm_ref.at[pl.ds(targets_ref[other] + offset, count)]
            line.send(source_hbm_ref, target_hbm_ref, (send_sem, recv_sem), step)

        _pieces(rows_ref[other], most, start)

    jax.lax.fori_loop(1, line.size, send, None)

    # To wait needs a semaphore and a size; the rows that a wait names for it are not touched.
    def like(ref: Any, count: int) -> Any:
        rows = ref.at[pl.ds(0, count)]
        return pltpu.make_async_remote_copy(
            rows, rows, send_sem, recv_sem, device_id=line.rank(1), device_id_type=pl.DeviceIdType.MESH
        )

    _pieces(totals_ref[0], x_hbm_ref.shape[0], lambda _, count: like(x_hbm_ref, count).wait_send())
    _pieces(totals_ref[1], o_hbm_ref.shape[0], lambda _, count: like(o_hbm_ref, count).wait_recv())
    _pieces(rows_ref[me], most, lambda _, count: own(0, 0, count).wait())
    line.leave(done_sem, Peers.ALL)  # some of the peers may have sent nothing


def _pieces(count: Any, most: int, work: Callable[[Any, int], Any]) -> None:
    """Do `work(offset, rows)` for pieces of `count` rows, `most` at most, each a power of two."""
    for bit in reversed(range(most.bit_length())):
        rows = 1 << bit

        @pl.when(count & rows != 0)
        def _(rows: int = rows) -> None:
            work(count & ~(2 * rows - 1), rows)  # behind the larger ones

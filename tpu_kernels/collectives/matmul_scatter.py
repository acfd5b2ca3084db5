"""Multiply, add over ranks and scatter: each rank gets its rows of the sum of all ranks' products.

Each rank's rows of the sum come to it from both sides, as in `ring_sum`: from the left, they start R hops
away as the product there; each rank on the way adds its own in float32 and passes the sum on. The two
directions take turns: while the sum of one travels, the rank multiplies for the other. At the end, while the
last sums travel, it computes its own product, and adds both sums to that.

Sums wait in HBM in two slots for each direction. A rank must not write to its neighbour's slot before that
has added what is in it: the neighbour grants a credit each time it has, and the writer waits for one credit
for each slot that it uses again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.collectives.links import Line, Peers, each_hop, reach
from tpu_kernels.collectives.products import MatmulTiling, acc_shape, multiply
from tpu_kernels.collectives.ring_sum import SumTile, add


def multiply_scatter(
    parts: jax.Array,
    w: jax.Array,
    line: Line,
    *,
    transpose_w: bool = False,
    tiling: MatmulTiling | None = None,
    collective_id: int | None = None,
) -> jax.Array:
    """The sum over the ranks of an axis of two or more of the part at each one's position, times their `w`.

    Args:
        parts: [size, rows, k], float32 or bfloat16; none is 0.
        w: [k, n], or [n, k] with `transpose_w`, of the same dtype.
        line: the axis.
        transpose_w: whether `w` is transposed first, which is free.
        tiling: what is multiplied at a time.
        collective_id: another barrier semaphore than the axis's own.

    Returns:
        [rows, n] in the dtype of `parts`. Products and ranks are summed in float32, and rounded once.
    """
    (size, rows, k), n = parts.shape, w.shape[0 if transpose_w else 1]
    tiling = tiling or MatmulTiling.of(rows, k, n, parts.dtype.itemsize)
    ways = 1 if size == 2 else 2
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    # Memory for sums. A kernel's scratch can't be in HBM in JAX's interpreter, results can.
    sums = [(rows, n), (ways, rows, n), (ways, 2, rows, n)]
    y, *_ = pl.pallas_call(
        functools.partial(_body, line=line, transpose_w=transpose_w, tiling=tiling),
        out_shape=(
            jax.ShapeDtypeStruct((rows, n), parts.dtype),
            *[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sums],
        ),
        in_specs=[in_hbm, in_hbm],
        out_specs=(in_hbm,) * 4,
        scratch_shapes=[
            acc_shape(rows, k, n, tiling),
            pltpu.SemaphoreType.DMA((ways,)),
            pltpu.SemaphoreType.DMA((ways, 2)),
            pltpu.SemaphoreType.REGULAR((ways,)),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=line.collective_id(Peers.RING) if collective_id is None else collective_id,
            has_side_effects=True,
            vmem_limit_bytes=tiling.vmem_limit_bytes(rows, k, n, parts.dtype.itemsize),
        ),
        name="collectives_matmul_reduce_scatter",
    )(parts, w)
    return y


def _body(
    x_hbm_ref,  # [size, rows, k]
    w_hbm_ref,  # [k, n] or [n, k]
    y_hbm_ref,  # [rows, n]
    own_hbm_ref,  # [rows, n] float32, the rank's own product
    send_hbm_ref,  # [ways, rows, n] float32, the sum that goes out
    recv_hbm_ref,  # [ways, slots, rows, n] float32, sums that came in
    acc_ref,  # [tile_m, tile_n] float32
    send_sem,  # [ways]
    recv_sem,  # [ways, slots]
    credit_sem,  # [ways], slots of the next rank that are free again
    *,
    line: Line,
    transpose_w: bool,
    tiling: MatmulTiling,
) -> None:
    right, left = reach(line.size)
    line.enter(Peers.RING)

    def copy(way: int, h: Any) -> Any:
        """That of hop `h`: the sum that goes out, and the one that comes in."""
        row, slot = (1 - way) // 2, h % 2
        return pltpu.make_async_remote_copy(
            send_hbm_ref.at[row],
            recv_hbm_ref.at[row, slot],
            send_sem.at[row],
            recv_sem.at[row, slot],
            device_id=line.rank(way),
            device_id_type=pl.DeviceIdType.MESH,
        )

    def hop(h: Any, directions: tuple[int, ...]) -> None:
        """Hop `h` takes along the part that has `h` hops behind it."""
        first = isinstance(h, int) and h == 0
        for way in directions:
            row = (1 - way) // 2
            hops = right if way > 0 else left
            came = []
            if not first:
                copy(way, h - 1).wait()  # the memory that it went from is free, too
                came.append(recv_hbm_ref.at[row, (h - 1) % 2])
            multiply(
                x_hbm_ref.at[line.place(way * (hops - h))],
                w_hbm_ref,
                send_hbm_ref.at[row],
                acc_ref,
                tiling=tiling,
                transpose_w=transpose_w,
                plus=came,
            )
            if not first:

                @pl.when(h + 1 < hops)  # else the slot is not used again
                def _(row: int = row, way: int = way) -> None:
                    pl.semaphore_signal(
                        credit_sem.at[row],
                        1,
                        device_id=line.rank(-way),
                        device_id_type=pl.DeviceIdType.MESH,
                    )

                @pl.when(h >= 2)
                def _(row: int = row) -> None:
                    pl.semaphore_wait(credit_sem.at[row], 1)

            copy(way, h).start()

    each_hop(hop, right, left)
    multiply(
        x_hbm_ref.at[line.place()],
        w_hbm_ref,
        own_hbm_ref,
        acc_ref,
        tiling=tiling,
        transpose_w=transpose_w,
    )
    came = []
    for way, hops in ((1, right), (-1, left)):
        if hops:
            copy(way, hops - 1).wait()
            came.append(recv_hbm_ref.at[(1 - way) // 2, (hops - 1) % 2])
    rows, n = y_hbm_ref.shape
    add([*came, own_hbm_ref], y_hbm_ref, SumTile.of(rows, n))

"""Gather and multiply: the rows of all ranks times this rank's matrix, in one kernel.

Chunks of rows travel around the ring, half of the way to the right and half to the left. In hop h, the chunk
that came h places is passed on, and multiplied meanwhile.

Chunks wait in HBM in two slots for each direction, so that one can come in while the other is read. A rank
must not write to its neighbour's slot before that has multiplied what is in it and passed it on: the
neighbour grants a credit each time it has, and the writer waits for one credit for each slot that it uses
again. Or all chunks are kept, in the order of ranks; then each place is written once, and needs no credits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.collectives.links import Line, Peers, each_hop, reach
from tpu_kernels.collectives.products import MatmulTiling, acc_shape, multiply


def gather_multiply(
    x: jax.Array,
    w: jax.Array,
    line: Line,
    *,
    transpose_w: bool = False,
    keep: bool = False,
    tiling: MatmulTiling | None = None,
    collective_id: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The rows of all ranks along an axis of two or more, times `w`.

    Args:
        x: [rows, k], float32 or bfloat16; neither is 0.
        w: [k, n], or [n, k] with `transpose_w`, of the same dtype.
        line: the axis.
        transpose_w: whether `w` is transposed first, which is free.
        keep: whether to return the rows as well.
        tiling: what is multiplied at a time.
        collective_id: another barrier semaphore than the axis's own.

    Returns:
        [size, rows, n] in the dtype of `x`, products summed in float32. And [size, rows, k], the rows of all
        ranks if `keep`; otherwise memory with anything in it.
    """
    (rows, k), n = x.shape, w.shape[0 if transpose_w else 1]
    tiling = tiling or MatmulTiling.of(rows, k, n, x.dtype.itemsize)
    right, _ = reach(line.size)
    ways = 1 if line.size == 2 else 2
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    y, chunks = pl.pallas_call(
        functools.partial(_body, line=line, transpose_w=transpose_w, keep=keep, tiling=tiling),
        out_shape=(
            jax.ShapeDtypeStruct((line.size, rows, n), x.dtype),
            # A kernel's scratch can't be in HBM in JAX's interpreter, results can.
            jax.ShapeDtypeStruct((line.size if keep else 2 * ways, rows, k), x.dtype),
        ),
        in_specs=[in_hbm, in_hbm],
        out_specs=(in_hbm, in_hbm),
        scratch_shapes=[
            acc_shape(rows, k, n, tiling),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((ways,)),
            pltpu.SemaphoreType.DMA((ways, right)),
            pltpu.SemaphoreType.REGULAR((ways,)),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=line.collective_id(Peers.RING) if collective_id is None else collective_id,
            has_side_effects=True,
            vmem_limit_bytes=tiling.vmem_limit_bytes(rows, k, n, x.dtype.itemsize),
        ),
        name="collectives_all_gather_matmul",
    )(x, w)
    return y, chunks


def _body(
    x_hbm_ref,  # [rows, k]
    w_hbm_ref,  # [k, n] or [n, k]
    y_hbm_ref,  # [size, rows, n]
    chunks_hbm_ref,  # [ways * slots, rows, k], or [size, rows, k]
    acc_ref,  # [tile_m, tile_n] float32
    own_sem,
    send_sem,  # [ways]
    recv_sem,  # [ways, hops]
    credit_sem,  # [ways], slots of the next rank that are free again
    *,
    line: Line,
    transpose_w: bool,
    keep: bool,
    tiling: MatmulTiling,
) -> None:
    right, left = reach(line.size)
    own = pltpu.make_async_copy(x_hbm_ref, chunks_hbm_ref.at[line.place()], own_sem) if keep else None
    if own is not None:
        own.start()
    line.enter(Peers.RING)

    def chunk(way: int, h: Any) -> Any:
        """The chunk that came `h` places."""
        if isinstance(h, int) and h == 0:
            return x_hbm_ref
        if keep:
            return chunks_hbm_ref.at[line.place(-way * h)]
        return chunks_hbm_ref.at[(1 - way) + (h - 1) % 2]

    def target(way: int, h: Any) -> Any:
        """Where it goes in the next rank's memory."""
        if keep:
            return chunks_hbm_ref.at[line.place(-way * h)]
        return chunks_hbm_ref.at[(1 - way) + h % 2]

    def multiplied(ways: Sequence[int], h: Any) -> None:
        for way in ways:
            multiply(
                chunk(way, h),
                w_hbm_ref,
                y_hbm_ref.at[line.place(-way * h)],
                acc_ref,
                tiling=tiling,
                transpose_w=transpose_w,
            )

    def hop(h: Any, directions: tuple[int, ...]) -> None:
        first = isinstance(h, int) and h == 0
        copies = []
        for way in directions:
            row = (1 - way) // 2
            if not (first or keep):

                @pl.when(h >= 2)
                def _(row: int = row) -> None:
                    pl.semaphore_wait(credit_sem.at[row], 1)

            sems = send_sem.at[row], recv_sem.at[row, h]
            copies.append(line.send(chunk(way, h), target(way, h), sems, way))
        # In a last hop to the right alone, there is still the last chunk from the other side.
        multiplied((1,) if first else (1, -1), h)
        for copy in copies:
            copy.wait()
        if first or keep:
            return
        for way in directions:
            hops = right if way > 0 else left

            @pl.when(h + 1 < hops)  # else the slot is not used again
            def _(way: int = way) -> None:
                pl.semaphore_signal(
                    credit_sem.at[(1 - way) // 2],
                    1,
                    device_id=line.rank(-way),
                    device_id_type=pl.DeviceIdType.MESH,
                )

    each_hop(hop, right, left)
    multiplied((1, -1) if left == right else (1,), right)
    if own is not None:
        own.wait()

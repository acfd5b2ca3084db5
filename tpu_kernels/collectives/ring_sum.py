"""The ring that adds up: reduce_scatter.

Each rank's part of the sum comes to it from both sides. From the left, it starts R hops away as the numbers
of the rank there; each rank on the way adds its own in float32 and passes the sum on. From the right, it
starts L hops away; R + L + 1 is the size of the ring. The rank itself adds both sums and its own numbers.

Sums wait in HBM: two slots for each direction, so that one can come in while the other is added. A rank must
not write to its neighbour's slot before that has read what is in it: the neighbour grants a credit each time
it has, and the writer waits for one credit for each slot that it uses again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.collectives.links import Line, Peers, each_hop, reach

_TILE_ELEMENTS = 128 * 1024  # with four operands in two buffers each, 4 MiB of float32
_MAX_COLS = 2048


@dataclass(frozen=True)
class SumTile:
    """What of a part is in VMEM at a time. Dimensions are whole, or multiples of any dtype's tiles."""

    tile_rows: int
    tile_cols: int

    @classmethod
    def of(cls, rows: int, cols: int) -> SumTile:
        """A tile for parts of this shape."""
        tile_cols = min(cols, _MAX_COLS)
        lanes = -(-tile_cols // 128) * 128
        return cls(min(rows, _TILE_ELEMENTS // lanes // 32 * 32), tile_cols)

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Tiles along both dimensions; the last ones may be smaller."""
        return pl.cdiv(rows, self.tile_rows), pl.cdiv(cols, self.tile_cols)


def ring_sum(
    parts: jax.Array, line: Line, collective_id: int | None = None, tile: SumTile | None = None
) -> jax.Array:
    """The sum over the ranks of an axis of the part at each one's position.

    Args:
        parts: [size, rows, cols].
        line: the axis.
        collective_id: another barrier semaphore than the axis's own.
        tile: what is added at a time.

    Returns:
        [rows, cols] in the dtype of `parts`; floating numbers are added in float32.
    """
    size, rows, cols = parts.shape
    sums = jnp.dtype(jnp.float32) if jnp.issubdtype(parts.dtype, jnp.floating) else parts.dtype
    ways = 1 if size == 2 else 2
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    found, _, _ = pl.pallas_call(
        functools.partial(_body, line=line, tile=tile or SumTile.of(rows, cols)),
        out_shape=(
            jax.ShapeDtypeStruct((rows, cols), parts.dtype),
            # Memory for sums. A kernel's scratch can't be in HBM in JAX's interpreter, results can.
            jax.ShapeDtypeStruct((ways, rows, cols), sums),
            jax.ShapeDtypeStruct((ways, 2, rows, cols), sums),
        ),
        in_specs=[in_hbm],
        out_specs=(in_hbm,) * 3,
        scratch_shapes=[
            pltpu.SemaphoreType.DMA((ways,)),
            pltpu.SemaphoreType.DMA((ways, 2)),
            pltpu.SemaphoreType.REGULAR((ways,)),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=line.collective_id(Peers.RING) if collective_id is None else collective_id,
            has_side_effects=True,
        ),
        name="collectives_reduce_scatter",
    )(parts)
    return found


def _body(
    x_hbm_ref,  # [size, rows, cols]
    o_hbm_ref,  # [rows, cols]
    send_hbm_ref,  # [ways, rows, cols], the sum that goes out
    recv_hbm_ref,  # [ways, slots, rows, cols], sums that came in
    send_sem,  # [ways]
    recv_sem,  # [ways, slots]
    credit_sem,  # [ways], slots of the next rank that are free again
    *,
    line: Line,
    tile: SumTile,
) -> None:
    right, left = reach(line.size)
    direct = x_hbm_ref.dtype == send_hbm_ref.dtype
    line.enter(Peers.RING)

    def hop(h: Any, directions: tuple[int, ...]) -> None:
        """Hop `h` takes along the part that has `h` hops behind it."""
        first = isinstance(h, int) and h == 0
        copies = []
        for way in directions:
            row = (1 - way) // 2
            hops = right if way > 0 else left
            own_hbm_ref = x_hbm_ref.at[line.place(way * (hops - h))]
            source_hbm_ref = send_hbm_ref.at[row]
            if first and direct:
                source_hbm_ref = own_hbm_ref
            elif first:
                add([own_hbm_ref], source_hbm_ref, tile)
            else:
                add([recv_hbm_ref.at[row, (h - 1) % 2], own_hbm_ref], source_hbm_ref, tile)

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

            slot = h % 2
            sems = send_sem.at[row], recv_sem.at[row, slot]
            copies.append(line.send(source_hbm_ref, recv_hbm_ref.at[row, slot], sems, way))
        for copy in copies:
            copy.wait()

    each_hop(hop, right, left)
    last = [recv_hbm_ref.at[0, (right - 1) % 2]]
    if left:
        last.append(recv_hbm_ref.at[1, (left - 1) % 2])
    add([*last, x_hbm_ref.at[line.place()]], o_hbm_ref, tile)


def add(terms: list[Any], sum_hbm_ref: Any, tile: SumTile) -> None:
    """Write the sum of terms in HBM to HBM, tile by tile through VMEM; in the widest of the dtypes."""
    rows, cols = sum_hbm_ref.shape
    block = pl.BlockSpec((tile.tile_rows, tile.tile_cols), _tile_index)
    dtype = jnp.result_type(*[term.dtype for term in terms], sum_hbm_ref.dtype)

    def add(*refs: Any) -> None:
        *term_refs, sum_ref = refs
        total = term_refs[0][...].astype(dtype)
        for term_ref in term_refs[1:]:
            total += term_ref[...].astype(dtype)
        sum_ref[...] = total.astype(sum_ref.dtype)

    pltpu.emit_pipeline(add, grid=tile.grid(rows, cols), in_specs=[block] * len(terms), out_specs=[block])(
        *terms, sum_hbm_ref
    )


def _tile_index(i: Any, j: Any) -> tuple[Any, Any]:
    """[rows, cols]: one tile after the other."""
    return i, j

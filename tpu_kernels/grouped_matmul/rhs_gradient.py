"""The gradient of the matrices in Pallas for TPU: a product summed over each group's rows.

    out[g] = lhs[rows of group g]ᵀ @ grad[rows of group g]

The grid goes over tiles of the result, then over visits (a tile of rows for a group, see `visits`), every
group at least once: the result of one without rows is 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge.shapes import pallas_call
from tpu_kernels.grouped_matmul.kernel import precision, row_numbers, with_own_rows
from tpu_kernels.grouped_matmul.tiling import Tiles
from tpu_kernels.grouped_matmul.visits import Visits


def rhs_gradient(
    lhs: jax.Array,
    grad: jax.Array,
    visits: Visits,
    *,
    groups: int,
    tiles: Tiles,
    out_dtype: jnp.dtype,
    vmem_limit_bytes: int,
) -> jax.Array:
    """The product of the rows of each group.

    Args:
        lhs: [M, K], bfloat16 or float32; no size is 0.
        grad: [M, N], of the same dtype.
        visits: of all groups, for tiles of `tiles.clipped(M, K, N).tile_m`.
        groups: how many there are.
        tiles, out_dtype, vmem_limit_bytes: as for `kernel.forward`.

    Returns:
        [groups, K, N], summed in float32.
    """
    (m, k), n = lhs.shape, grad.shape[1]
    tiles = tiles.clipped(m, k, n)

    def lhs_map(i_k, i_n, visit, group, tile, first, end):
        # lhs is (M, K). Load the tile of rows of the visit.
        del i_n, group, first, end
        return tile[visit], i_k

    def grad_map(i_k, i_n, visit, group, tile, first, end):
        # grad is (M, N). Load the same rows.
        del i_k, group, first, end
        return tile[visit], i_n

    def out_map(i_k, i_n, visit, group, tile, first, end):
        # out is (G, K, N). Visits of one group follow each other, and share it.
        del tile, first, end
        return group[visit], i_k, i_n

    return pallas_call(
        _body,
        out_shape=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(k, tiles.tile_k), pl.cdiv(n, tiles.tile_n), visits.total),
            in_specs=[
                pl.BlockSpec((tiles.tile_m, tiles.tile_k), lhs_map),
                pl.BlockSpec((tiles.tile_m, tiles.tile_n), grad_map),
            ],
            out_specs=pl.BlockSpec((None, tiles.tile_k, tiles.tile_n), out_map),
            scratch_shapes=[pltpu.VMEM((tiles.tile_k, tiles.tile_n), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        name="grouped_matmul_rhs_gradient",
    )(visits.group, visits.tile, visits.first, visits.end, lhs, grad)


def _body(
    # Scalars, [visits]
    group_ref,
    tile_ref,
    first_ref,
    end_ref,
    # Inputs
    lhs_ref,  # [tile_m, tile_k]
    grad_ref,  # [tile_m, tile_n]
    # Outputs
    out_ref,  # [tile_k, tile_n]
    # Scratch
    acc_ref,  # [tile_k, tile_n] float32, the sum over the group's rows so far
) -> None:
    del tile_ref
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    group, first, end = group_ref[visit], first_ref[visit], end_ref[visit]
    tile_m = lhs_ref.shape[0]
    whole = (first == 0) & (end == tile_m)

    @pl.when((visit == 0) | (group_ref[jnp.maximum(visit - 1, 0)] != group))
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(lhs, grad) -> None:
        acc_ref[...] += jax.lax.dot_general(
            lhs,
            grad,
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision(lhs_ref.dtype),
        )

    def add_own(rows) -> None:
        # Both are masked: what other groups have there may be infinite, and 0 times that is NaN.
        def own(values):
            row = row_numbers(rows, values)
            return jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))

        add(own(lhs_ref[rows, :]), own(grad_ref[rows, :]))

    @pl.when(whole)
    def _() -> None:
        add(lhs_ref[...], grad_ref[...])

    @pl.when(~whole & (end > first))
    def _() -> None:
        with_own_rows(first, end, tile_m, add_own)

    @pl.when((visit == last_visit) | (group_ref[jnp.minimum(visit + 1, last_visit)] != group))
    def _() -> None:
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)

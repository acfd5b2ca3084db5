"""Grouped matmul in Pallas for TPU: the product of each group's rows with a matrix of its own.

    out[rows of group g] = lhs[rows of group g] @ rhs[g]

The grid goes over tiles of columns, then visits (a tile of rows for a group, see `visits`), then tiles of the
inner dimension. With the whole inner dimension in one tile, the usual default, a group's matrix is loaded
once for each tile of columns, however many rows the group has.

A visit whose group has the tile for itself multiplies it at once. Where groups share it, only the rows of the
visit's group are multiplied, some at a time: small groups cost what they have, not a tile each.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge.shapes import pallas_call
from tpu_kernels.grouped_matmul.tiling import ROW_UNIT, SUB_M, Tiles
from tpu_kernels.grouped_matmul.visits import Visits


def forward(
    lhs: jax.Array,
    rhs: jax.Array,
    visits: Visits,
    *,
    transpose_rhs: bool,
    tiles: Tiles,
    out_dtype: jnp.dtype,
    vmem_limit_bytes: int,
) -> jax.Array:
    """Multiply the rows of each group by its matrix; rows of no group give 0.

    Args:
        lhs: [M, K], bfloat16 or float32; no size is 0.
        rhs: [G, K, N], or [G, N, K] with `transpose_rhs`, of the same dtype.
        visits: of all rows, for tiles of `tiles.clipped(M, K, N).tile_m`.
        transpose_rhs: whether the matrices are transposed first, which is free.
        tiles: tile sizes.
        out_dtype: of the result.
        vmem_limit_bytes: what the kernel may use.

    Returns:
        [M, N]. Products are summed in float32.
    """
    (m, k), groups = lhs.shape, rhs.shape[0]
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    tiles = tiles.clipped(m, k, n)
    steps_k = pl.cdiv(k, tiles.tile_k)

    def lhs_map(i_n, visit, i_k, group, tile, first, end):
        # lhs is (M, K). Load the tile of rows of the visit.
        del i_n, group, first, end
        return tile[visit], i_k

    def rhs_map(i_n, visit, i_k, group, tile, first, end):
        # rhs is (G, K, N) or (G, N, K). Load the group's own; rows of no group need none, so keep some.
        del tile, first, end
        g = jnp.clip(group[visit], 0, groups - 1)
        return (g, i_n, i_k) if transpose_rhs else (g, i_k, i_n)

    def out_map(i_n, visit, i_k, group, tile, first, end):
        # out is (M, N). Visits of one tile of rows follow each other, and share it.
        del i_k, group, first, end
        return tile[visit], i_n

    rhs_block = (tiles.tile_n, tiles.tile_k) if transpose_rhs else (tiles.tile_k, tiles.tile_n)
    return pallas_call(
        functools.partial(_forward_body, transpose_rhs=transpose_rhs, inner=k, steps_k=steps_k),
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(n, tiles.tile_n), visits.total, steps_k),
            in_specs=[
                pl.BlockSpec((tiles.tile_m, tiles.tile_k), lhs_map),
                pl.BlockSpec((None, *rhs_block), rhs_map),
            ],
            out_specs=pl.BlockSpec((tiles.tile_m, tiles.tile_n), out_map),
            scratch_shapes=[] if steps_k == 1 else [pltpu.VMEM((tiles.tile_m, tiles.tile_n), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        name="grouped_matmul",
    )(visits.group, visits.tile, visits.first, visits.end, lhs, rhs)


def _forward_body(
    # Scalars, [visits]
    group_ref,
    tile_ref,
    first_ref,
    end_ref,
    # Inputs
    lhs_ref,  # [tile_m, tile_k]
    rhs_ref,  # [tile_k, tile_n], or [tile_n, tile_k]
    # Outputs
    out_ref,  # [tile_m, tile_n]
    # Scratch
    acc_ref: Any = None,  # [tile_m, tile_n] float32, the sum over the tiles of k so far; None if there is one
    *,
    transpose_rhs: bool,
    inner: int,
    steps_k: int,
) -> None:
    del tile_ref
    visit, step_k = pl.program_id(1), pl.program_id(2)
    first, end = first_ref[visit], end_ref[visit]
    tile_m = out_ref.shape[0]
    whole = (first == 0) & (end == tile_m)
    of_a_group = group_ref[visit] >= 0

    def multiply(rows, fresh, store) -> None:
        """Rows of the product to `store`; those before `fresh` have been multiplied already."""
        product = jax.lax.dot_general(
            within(lhs_ref[rows, :], 1, inner, step_k),
            within(rhs_ref[...], 1 if transpose_rhs else 0, inner, step_k),
            (((1,), (1 if transpose_rhs else 0,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision(lhs_ref.dtype),
        )
        if acc_ref is None:
            store(rows, product)
            return
        before = acc_ref[rows, :]
        total = jnp.where(step_k == 0, product, before + product)
        acc_ref[rows, :] = (
            total if fresh is None else jnp.where(row_numbers(rows, total) >= fresh, total, before)
        )

        @pl.when(step_k == steps_k - 1)
        def _() -> None:
            store(rows, acc_ref[rows, :])

    def store_all(rows, values) -> None:
        out_ref[rows, :] = values.astype(out_ref.dtype)

    def store_own(rows, values) -> None:
        row = row_numbers(rows, values)
        own = (row >= first) & (row < end)
        out_ref[rows, :] = jnp.where(own, values, out_ref[rows, :].astype(jnp.float32)).astype(out_ref.dtype)

    @pl.when(of_a_group & whole)
    def _() -> None:
        multiply(pl.ds(0, tile_m), None, store_all)

    @pl.when(of_a_group & ~whole)
    def _() -> None:
        for_rows(first, end, tile_m, lambda rows, fresh: multiply(rows, fresh, store_own))

    @pl.when(~of_a_group & (step_k == 0))
    def _() -> None:
        store_own(pl.ds(0, tile_m), jnp.zeros(out_ref.shape, jnp.float32))


# Shared with the gradient of rhs ------------------------------------------------------------------------


def for_rows(first, end, tile_m: int, work) -> None:
    """Call `work(rows, fresh)` with slices of a tile that together have the rows from `first` to `end`.

    They have others, too, before and behind those. Rows before `fresh` were in an earlier slice.
    """
    if tile_m <= SUB_M:
        work(pl.ds(0, tile_m), 0)
        return
    begin = first // ROW_UNIT * ROW_UNIT

    def step(i, _):
        fresh = begin + i * SUB_M
        start = pl.multiple_of(jnp.minimum(fresh, tile_m - SUB_M), ROW_UNIT)
        work(pl.ds(start, SUB_M), fresh)
        return 0

    jax.lax.fori_loop(0, pl.cdiv(end - begin, SUB_M), step, 0)


def row_numbers(rows, values):
    """The number of each row of `values`, which are the slice `rows` of a tile."""
    return rows.start + jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)


def within(block, axis: int, size: int, step):
    """Zero where a block of step `step` reaches past `size` along `axis`: what is there is not ours."""
    tile = block.shape[axis]
    if size % tile == 0:
        return block
    position = step * tile + jax.lax.broadcasted_iota(jnp.int32, block.shape, axis)
    return jnp.where(position < size, block, jnp.zeros_like(block))


def precision(dtype):
    """How products of `dtype` are computed: float32 in full."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

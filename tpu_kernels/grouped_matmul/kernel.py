"""Grouped matmul in Pallas for TPU: the product of each group's rows with a matrix of its own.

    out[rows of group g] = activation(lhs[rows of group g] @ rhs[g] + bias[g])

The grid goes over tiles of columns, then visits (a tile of rows for a group, see `visits`), then tiles of the
inner dimension. With the whole inner dimension in one tile, the usual default, a group's matrix is loaded
once for each tile of columns, however many rows the group has.

A visit whose group has the tile for itself multiplies it at once. Where groups share it, the
smallest slice with the rows of the visit's group is: small groups cost what they have, not a tile each.

A second matrix of each group gates: rows are loaded once for both, and only the gated product is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge.shapes import pallas_call
from tpu_kernels.grouped_matmul import epilogue
from tpu_kernels.grouped_matmul.epilogue import Activation
from tpu_kernels.grouped_matmul.operands import Operands, multiplied_as
from tpu_kernels.grouped_matmul.tiling import LANES, ROW_UNIT, Tiles, slices
from tpu_kernels.grouped_matmul.visits import Visits


def forward(
    operands: Operands[jax.Array],
    visits: Visits,
    *,
    transpose_rhs: bool,
    gated: bool = False,
    activation: Activation | None = None,
    save: bool = False,
    tiles: Tiles,
    out_dtype: jnp.dtype,
    vmem_limit_bytes: int,
) -> tuple[jax.Array, ...]:
    """Multiply the rows of each group by its matrix; rows of no group give 0.

    Args:
        operands: the arrays, bfloat16, float32 or 8 bits wide; no size is 0.
        visits: of all rows, for tiles of `tiles.clipped(M, K, N).tile_m`.
        transpose_rhs: whether the matrices are transposed first, which is free.
        gated: whether the one array of matrices has two, side by side along N.
        activation: of the sums, with their bias.
        save: whether to return the sums that `activation` is computed of, too.
        tiles: tile sizes.
        out_dtype: of the result.
        vmem_limit_bytes: what the kernel may use.

    Returns:
        [M, N], and if `save` the sums, [M, N] for each matrix, in the dtype of `lhs`. Products are summed in
        float32.
    """
    (m, k), n = operands.lhs.shape, columns(operands.rhs, transpose_rhs, gated)
    tiles = tiles.clipped(m, k, n)
    steps_k = pl.cdiv(k, tiles.tile_k)
    rhs, rhs_specs = _matrices(operands.rhs, transpose_rhs, gated, n, tiles)
    operands = operands._replace(rhs=rhs)

    def lhs_map(i_n, visit, i_k, group, tile, first, end):
        # lhs is (M, K). Load the tile of rows of the visit.
        del i_n, group, first, end
        return tile[visit], i_k

    def lhs_scale_map(i_n, visit, i_k, group, tile, first, end):
        # lhs_scale is (M, B). All blocks of the same rows.
        del i_n, i_k, group, first, end
        return tile[visit], 0

    def out_map(i_n, visit, i_k, group, tile, first, end):
        # out and existing are (M, N). Visits of one tile of rows follow each other, and share it.
        del i_k, group, first, end
        return tile[visit], i_n

    def column_map(i_n, visit, i_k, group, tile, first, end):
        # rhs_scale is (G, B, N) and bias (G, 1, N). The group's own, for the tile of columns.
        del i_k, tile, first, end
        return jnp.maximum(group[visit], 0), 0, i_n

    def of_columns(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, array.shape[1], tiles.tile_n), column_map)

    out_spec = pl.BlockSpec((tiles.tile_m, tiles.tile_n), out_map)
    lhs_scale, existing = operands.lhs_scale, operands.existing
    in_specs = Operands(
        lhs=pl.BlockSpec((tiles.tile_m, tiles.tile_k), lhs_map),
        rhs=rhs_specs,
        lhs_scale=None
        if lhs_scale is None
        else pl.BlockSpec((tiles.tile_m, lhs_scale.shape[1]), lhs_scale_map),
        rhs_scale=tuple(map(of_columns, operands.rhs_scale)),
        bias=tuple(map(of_columns, operands.bias)),
        existing=None if existing is None else out_spec,
    )
    shapes = [(m, n)] * (1 + len(rhs) * save)
    dtypes = [out_dtype, *[operands.lhs.dtype] * len(rhs)]
    return pallas_call(
        functools.partial(
            _body, transpose_rhs=transpose_rhs, activation=activation, inner=k, steps_k=steps_k
        ),
        out_shape=tuple(map(jax.ShapeDtypeStruct, shapes, dtypes)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(n, tiles.tile_n), visits.total, steps_k),
            in_specs=(in_specs,),
            out_specs=(out_spec,) * len(shapes),
            scratch_shapes=[pltpu.VMEM((tiles.tile_m, tiles.tile_n), jnp.float32)]
            * (len(rhs) if steps_k > 1 else 0),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        name="grouped_matmul",
    )(visits.group, visits.tile, visits.first, visits.end, operands)


def columns(rhs: Sequence[jax.Array], transpose_rhs: bool, gated: bool) -> int:
    """N, for matrices as `Operands` has them."""
    n = rhs[0].shape[1 if transpose_rhs else 2]
    return n // 2 if gated else n


def _matrices(
    rhs: tuple[jax.Array, ...], transpose_rhs: bool, gated: bool, n: int, tiles: Tiles
) -> tuple[tuple[jax.Array, ...], tuple[pl.BlockSpec, ...]]:
    """The arrays of matrices, and where their blocks are. Of an array with two matrices no half is copied if
    one begins where a block does."""
    groups = rhs[0].shape[0]
    halves = range(2 if gated else 1)
    block = (tiles.tile_n, tiles.tile_k) if transpose_rhs else (tiles.tile_k, tiles.tile_n)

    def spec(half: int) -> pl.BlockSpec:
        def rhs_map(i_n, visit, i_k, group, tile, first, end):
            # rhs is (G, K, N) or (G, N, K). Load the group's own; rows of no group need none, so keep some.
            del tile, first, end
            g = jnp.maximum(group[visit], 0)
            i_n = i_n + half * (n // tiles.tile_n)
            return (g, i_n, i_k) if transpose_rhs else (g, i_k, i_n)

        return pl.BlockSpec((None, *block), rhs_map)

    def spec_of_rows(half: int) -> pl.BlockSpec:
        def rhs_map(i_n, visit, i_k, group, tile, first, end):
            # rhs is (G, 2, N, K).
            del tile, first, end
            return jnp.maximum(group[visit], 0), half, i_n, i_k

        return pl.BlockSpec((None, None, *block), rhs_map)

    if not gated:
        return rhs, (spec(0),) * len(rhs)
    (both,) = rhs
    if n % tiles.tile_n == 0 and tiles.tile_n % (ROW_UNIT if transpose_rhs else LANES) == 0:
        return (both, both), tuple(map(spec, halves))
    if transpose_rhs and n % ROW_UNIT == 0:
        both = both.reshape(groups, 2, n, both.shape[2])
        return (both, both), tuple(map(spec_of_rows, halves))
    axis = 1 if transpose_rhs else 2
    return tuple(jnp.split(both, 2, axis)), (spec(0),) * 2


def _body(
    # Scalars, [visits]
    group_ref,
    tile_ref,
    first_ref,
    end_ref,
    # Inputs, blocks of [tile_m, tile_k], [tile_k, tile_n] or [tile_n, tile_k], and [tile_m, tile_n]
    operands: Operands[Any],
    # Outputs, [tile_m, tile_n] each: the result, and the sums that are saved. Then scratch, [tile_m, tile_n]
    # float32: the sum over the tiles of k so far, of each matrix; none if there is one tile
    *refs: Any,
    transpose_rhs: bool,
    activation: Activation | None,
    inner: int,
    steps_k: int,
) -> None:
    del tile_ref
    parts = range(len(operands.rhs))
    acc_refs = refs[len(refs) - len(parts) :] if steps_k > 1 else ()
    out_refs = refs[: len(refs) - len(acc_refs)]
    visit, step_k = pl.program_id(1), pl.program_id(2)
    first, end = first_ref[visit], end_ref[visit]
    tile_m = out_refs[0].shape[0]
    whole = (first == 0) & (end == tile_m)
    of_a_group = group_ref[visit] >= 0
    scales = _Scales(operands, inner, steps_k, step_k)

    def multiply(rows, store) -> None:
        """Rows of the products to `store`."""

        def products() -> list[Any]:
            return [_product(operands, part, rows, transpose_rhs, inner, step_k, scales) for part in parts]

        if not acc_refs:
            store(rows, products())
            return

        @pl.when(step_k < steps_k - 1)
        def _() -> None:
            for acc_ref, product in zip(acc_refs, products(), strict=True):
                acc_ref[rows, :] = jnp.where(step_k == 0, product, acc_ref[rows, :] + product)

        @pl.when(step_k == steps_k - 1)
        def _() -> None:  # the sum is not written first
            store(rows, [acc[rows, :] + product for acc, product in zip(acc_refs, products(), strict=True)])

    def results(rows, totals) -> list[Any]:
        """What is written, from the sums of products."""
        sums = [scales.of_channels(part, rows, total) for part, total in zip(parts, totals, strict=True)]
        if operands.bias:
            sums = [total + bias_ref[...] for total, bias_ref in zip(sums, operands.bias, strict=True)]
        result = epilogue.applied(activation, sums)
        if operands.existing is not None:
            result = result + operands.existing[rows, :].astype(jnp.float32)
        return [result, *sums][: len(out_refs)]

    def store_all(rows, totals) -> None:
        for out_ref, values in zip(out_refs, results(rows, totals), strict=True):
            out_ref[rows, :] = values.astype(out_ref.dtype)

    def store_own(rows, totals) -> None:
        write_own(rows, results(rows, totals))

    def write_own(rows, all_values) -> None:
        for out_ref, values in zip(out_refs, all_values, strict=True):
            row = row_numbers(rows, values)
            own = (row >= first) & (row < end)
            kept = out_ref[rows, :].astype(jnp.float32)
            out_ref[rows, :] = jnp.where(own, values, kept).astype(out_ref.dtype)

    @pl.when(of_a_group & whole)
    def _() -> None:
        multiply(pl.ds(0, tile_m), store_all)

    @pl.when(of_a_group & ~whole)
    def _() -> None:
        with_own_rows(first, end, tile_m, lambda rows: multiply(rows, store_own))

    @pl.when(~of_a_group & (step_k == 0))
    def _() -> None:
        nothing = jnp.zeros(out_refs[0].shape, jnp.float32)
        result = nothing if operands.existing is None else operands.existing[...].astype(jnp.float32)
        write_own(pl.ds(0, tile_m), [result, *[nothing] * (len(out_refs) - 1)])


def _product(
    operands: Operands[Any], part: int, rows, transpose_rhs: bool, inner: int, step_k, scales: _Scales
):
    """Rows times a tile of the matrix `part`, float32; with the factors of blocks, not those of channels."""
    lhs_ref, rhs_ref = operands.lhs, operands.rhs[part]
    axis = 1 if transpose_rhs else 0
    dtype, summed = multiplied_as(lhs_ref.dtype, rhs_ref.dtype)
    lhs = within(lhs_ref[rows, :].astype(dtype), 1, inner, step_k)
    rhs = within(rhs_ref[...].astype(dtype), axis, inner, step_k)

    if rhs.shape[1 - axis] == 1:  # JAX makes no product of one column, and then needs the dtype of the sum
        dtype = summed = jnp.dtype(jnp.float32)

    def product(lhs, rhs):
        return jax.lax.dot_general(
            lhs.astype(dtype),
            rhs.astype(dtype),
            (((1,), (axis,)), ((), ())),
            preferred_element_type=summed,
            precision=precision(dtype),
        ).astype(jnp.float32)

    def block(values, axis: int, number: int):
        return jax.lax.slice_in_dim(values, number * scales.block, (number + 1) * scales.block, axis=axis)

    if not scales.blocks:
        return product(lhs, rhs)
    return sum(
        scales.of_block(part, rows, number, product(block(lhs, 1, number), block(rhs, axis, number)))
        for number in range(scales.blocks)
    )


class _Scales:
    """The factors of quantised operands: those of a whole row or column, and those of blocks along K.

    Attributes:
        blocks: how many blocks of factors a tile has; 0 if all factors are of whole rows and columns.
        block: the length of one along K, of the part of it that a tile has.
    """

    def __init__(self, operands: Operands[Any], inner: int, steps_k: int, step_k) -> None:
        self._lhs, self._rhs = operands.lhs_scale, operands.rhs_scale
        tile_k = operands.lhs.shape[1]
        self._lhs_blocks = 0 if self._lhs is None else self._lhs.shape[1]
        self._rhs_blocks = self._rhs[0].shape[0] if self._rhs else 0
        most = max(self._lhs_blocks, self._rhs_blocks)
        self.blocks = self.block = 0
        if most > 1:
            length = inner // most
            self.block = min(length, tile_k)
            self.blocks = tile_k // self.block
            self._first = step_k * tile_k // length if steps_k > 1 else 0

    def of_block(self, part: int, rows, number: int, product):
        """The product of one block, with the factors of it that are of no whole row or column."""
        number = self._first + number
        if self._lhs is not None and self._lhs_blocks > 1:
            factors = self._lhs[rows, :]
            # A column whose number is data: no register can be indexed by it.
            own = jax.lax.broadcasted_iota(jnp.int32, factors.shape, 1) == number
            product = product * jnp.sum(jnp.where(own, factors, 0.0), axis=1, keepdims=True)
        if self._rhs_blocks > 1:
            product = product * self._rhs[part][pl.ds(number, 1), :]
        return product

    def of_channels(self, part: int, rows, total):
        """The sum, with the factors of whole rows and columns."""
        if self._lhs is not None and self._lhs_blocks == 1:
            total = total * self._lhs[rows, :]
        if self._rhs_blocks == 1:
            total = total * self._rhs[part][...]
        return total


# Shared with the gradient of rhs ------------------------------------------------------------------------


def with_own_rows(first, end, tile_m: int, work: Callable[[Any], None]) -> None:
    """Call `work(rows)` with a slice of a tile that has the rows from `first` to `end`, and others around."""
    begin = first // ROW_UNIT * ROW_UNIT
    wanted, fewer = end - begin, 0
    for rows in slices(tile_m):

        @pl.when((wanted > fewer) & (wanted <= rows))
        def _(rows=rows) -> None:
            work(pl.ds(pl.multiple_of(jnp.minimum(begin, tile_m - rows), ROW_UNIT), rows))

        fewer = rows


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

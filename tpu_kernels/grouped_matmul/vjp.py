"""Grouped matmul as a differentiable JAX function.

Two products are each other's derivatives: that of rows with their group's matrix, and that of rows summed
over each group. So all derivatives, of any order, are computed by the same two kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge.chips import chip
from bridge.interpretation import target_chip
from tpu_kernels import _select
from tpu_kernels._select import Implementation
from tpu_kernels._vmem import vmem_allowed
from tpu_kernels.grouped_matmul import kernel, rhs_gradient, space, visits
from tpu_kernels.grouped_matmul.reference import grouped_matmul_reference
from tpu_kernels.grouped_matmul.tiling import GroupedTiling, Tiles


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    transpose_rhs: bool = False,
    out_dtype: jnp.dtype | None = None,
    tiling: GroupedTiling | None = None,
    impl: Implementation = "auto",
) -> jax.Array:
    """The product of each group's rows with its matrix; see `reference.grouped_matmul_reference`.

    Args:
        tiling: tile sizes of the kernels; by default chosen for the shape.
        impl: `pallas` (the kernels), `reference`, or `auto`.

    Raises:
        ValueError: the chosen implementation cannot compute this, with the reasons.
    """
    out_dtype = jnp.promote_types(lhs.dtype, rhs.dtype) if out_dtype is None else jnp.dtype(out_dtype)
    problem = space.problem_of(
        _select.describe(lhs=lhs, rhs=rhs, group_sizes=group_sizes),
        transpose_rhs=transpose_rhs,
        out_dtype=str(out_dtype),
    )
    chosen = _select.select(
        problem,
        impl,
        tiling,
        unsupported_reasons=space.unsupported_reasons,
        illegal_reasons=space.illegal_reasons,
        default_tiling=space.default_tiling,
        integers=("group_sizes",),
    )
    if chosen is None or 0 in (*lhs.shape, *rhs.shape):  # no elements: no block to launch a kernel on
        return grouped_matmul_reference(lhs, rhs, group_sizes, group_offset, transpose_rhs, out_dtype)
    static = _Static(
        chosen.output,
        chosen.dlhs,
        chosen.drhs,
        transpose_rhs,
        out_dtype,
        vmem_allowed(chip(target_chip())),
    )
    starts, ends = visits.row_ranges(
        group_sizes.astype(jnp.int32), lhs.shape[0], rhs.shape[0], _scalar(group_offset)
    )
    return _as_array(_product(static, lhs, rhs, starts, ends))


def _scalar(offset: jax.Array | None) -> jax.Array | None:
    return None if offset is None else offset.reshape(()).astype(jnp.int32)


@dataclass(frozen=True)
class _Static:
    """All that is no array: tiles of the product and of its two derivatives, and the parameters."""

    tiles: Tiles
    dlhs: Tiles
    drhs: Tiles
    transpose_rhs: bool
    out_dtype: jnp.dtype
    vmem_limit_bytes: int


def _as_array(result: Any) -> jax.Array:
    """What a function under `custom_vjp` returns, which it declares as any object."""
    return result


# Rows times their group's matrix ----------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    static: _Static, lhs: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array
) -> jax.Array:
    (m, k), n = lhs.shape, rhs.shape[1 if static.transpose_rhs else 2]
    tile_m = static.tiles.clipped(m, k, n).tile_m
    return kernel.forward(
        lhs,
        rhs,
        visits.of_all_rows(starts, ends, m, tile_m),
        transpose_rhs=static.transpose_rhs,
        tiles=static.tiles,
        out_dtype=static.out_dtype,
        vmem_limit_bytes=static.vmem_limit_bytes,
    )


def _product_forward(static, lhs, rhs, starts, ends):
    return _product(static, lhs, rhs, starts, ends), (lhs, rhs, starts, ends)


def _product_backward(static, kept, cotangent):
    lhs, rhs, starts, ends = kept
    cotangent = cotangent.astype(lhs.dtype)  # what the matrix units multiply
    of_lhs = replace(
        static,
        tiles=static.dlhs,
        dlhs=static.tiles,
        drhs=_swapped(static.drhs),
        transpose_rhs=not static.transpose_rhs,
        out_dtype=lhs.dtype,
    )
    dlhs = _product(of_lhs, cotangent, rhs, starts, ends)
    of_rhs = replace(static, tiles=static.drhs, dlhs=static.dlhs, drhs=static.tiles, out_dtype=rhs.dtype)
    if static.transpose_rhs:
        drhs = _summed(_swapped_rows(of_rhs), cotangent, lhs, starts, ends)
    else:
        drhs = _summed(of_rhs, lhs, cotangent, starts, ends)
    return dlhs, drhs, _no_gradient(starts), _no_gradient(ends)


_product.defvjp(_product_forward, _product_backward)


# Rows summed over each group --------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(static: _Static, lhs: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
    """`lhs[rows]ᵀ @ rhs[rows]` of each group. `static.dlhs` and `.drhs` are the tiles of the products with a
    cotangent `[G, K, N]`: of rows of `rhs`, and of rows of `lhs`."""
    (m, k), n = lhs.shape, rhs.shape[1]
    tile_m = static.tiles.clipped(m, k, n).tile_m
    return rhs_gradient.rhs_gradient(
        lhs,
        rhs,
        visits.of_groups(starts, ends, m, tile_m),
        groups=starts.shape[0],
        tiles=static.tiles,
        out_dtype=static.out_dtype,
        vmem_limit_bytes=static.vmem_limit_bytes,
    )


def _summed_forward(static, lhs, rhs, starts, ends):
    return _summed(static, lhs, rhs, starts, ends), (lhs, rhs, starts, ends)


def _summed_backward(static, kept, cotangent):
    lhs, rhs, starts, ends = kept
    cotangent = cotangent.astype(lhs.dtype)
    of_rhs = replace(static, tiles=static.drhs, drhs=static.tiles, transpose_rhs=False, out_dtype=rhs.dtype)
    of_lhs = replace(
        of_rhs, tiles=static.dlhs, dlhs=static.drhs, drhs=_swapped(static.tiles), transpose_rhs=True
    )
    dlhs = _product(of_lhs, rhs, cotangent, starts, ends)
    drhs = _product(of_rhs, lhs, cotangent, starts, ends)
    return dlhs, drhs, _no_gradient(starts), _no_gradient(ends)


_summed.defvjp(_summed_forward, _summed_backward)


def _swapped(tiles: Tiles) -> Tiles:
    """Tiles of the transposed result."""
    return Tiles(tiles.tile_m, tiles.tile_n, tiles.tile_k)


def _swapped_rows(static: _Static) -> _Static:
    """The same with the two operands exchanged."""
    return replace(static, tiles=_swapped(static.tiles), dlhs=static.drhs, drhs=static.dlhs)


def _no_gradient(array: jax.Array) -> Any:
    """The gradient of integers."""
    return np.zeros(array.shape, jax.dtypes.float0)

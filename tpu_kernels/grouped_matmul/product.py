"""The product of a grouped matmul, and its derivatives.

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

from tpu_kernels.grouped_matmul import kernel, rhs_gradient, visits
from tpu_kernels.grouped_matmul.operands import Operands
from tpu_kernels.grouped_matmul.tiling import Tiles


@dataclass(frozen=True)
class Static:
    """All that is no array: tiles of the product and of its two derivatives, and the parameters."""

    tiles: Tiles
    dlhs: Tiles
    drhs: Tiles
    transpose_rhs: bool
    out_dtype: jnp.dtype
    vmem_limit_bytes: int


# Rows times their group's matrix ----------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(static: Static, lhs: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
    (m, k), n = lhs.shape, rhs.shape[1 if static.transpose_rhs else 2]
    tile_m = static.tiles.clipped(m, k, n).tile_m
    (out,) = kernel.forward(
        Operands(lhs, (rhs,)),
        visits.of_all_rows(starts, ends, m, tile_m),
        transpose_rhs=static.transpose_rhs,
        tiles=static.tiles,
        out_dtype=static.out_dtype,
        vmem_limit_bytes=static.vmem_limit_bytes,
    )
    return out


def _product_forward(static, lhs, rhs, starts, ends):
    return product(static, lhs, rhs, starts, ends), (lhs, rhs, starts, ends)


def _product_backward(static, kept, cotangent):
    lhs, rhs, starts, ends = kept
    cotangent = cotangent.astype(lhs.dtype)  # what the matrix units multiply
    of_lhs = replace(
        static,
        tiles=static.dlhs,
        dlhs=static.tiles,
        drhs=swapped(static.drhs),
        transpose_rhs=not static.transpose_rhs,
        out_dtype=lhs.dtype,
    )
    dlhs = product(of_lhs, cotangent, rhs, starts, ends)
    of_rhs = replace(static, tiles=static.drhs, dlhs=static.dlhs, drhs=static.tiles, out_dtype=rhs.dtype)
    if static.transpose_rhs:
        drhs = summed(with_rows_swapped(of_rhs), cotangent, lhs, starts, ends)
    else:
        drhs = summed(of_rhs, lhs, cotangent, starts, ends)
    return dlhs, drhs, no_gradient(starts), no_gradient(ends)


product.defvjp(_product_forward, _product_backward)


# Rows summed over each group --------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed(static: Static, lhs: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
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
    return summed(static, lhs, rhs, starts, ends), (lhs, rhs, starts, ends)


def _summed_backward(static, kept, cotangent):
    lhs, rhs, starts, ends = kept
    cotangent = cotangent.astype(lhs.dtype)
    of_rhs = replace(static, tiles=static.drhs, drhs=static.tiles, transpose_rhs=False, out_dtype=rhs.dtype)
    of_lhs = replace(
        of_rhs, tiles=static.dlhs, dlhs=static.drhs, drhs=swapped(static.tiles), transpose_rhs=True
    )
    dlhs = product(of_lhs, rhs, cotangent, starts, ends)
    drhs = product(of_rhs, lhs, cotangent, starts, ends)
    return dlhs, drhs, no_gradient(starts), no_gradient(ends)


summed.defvjp(_summed_forward, _summed_backward)


def swapped(tiles: Tiles) -> Tiles:
    """Tiles of the transposed result."""
    return Tiles(tiles.tile_m, tiles.tile_n, tiles.tile_k)


def with_rows_swapped(static: Static) -> Static:
    """The same with the two operands exchanged."""
    return replace(static, tiles=swapped(static.tiles), dlhs=static.drhs, drhs=static.dlhs)


def no_gradient(array: jax.Array) -> Any:
    """The gradient of integers."""
    return np.zeros(array.shape, jax.dtypes.float0)

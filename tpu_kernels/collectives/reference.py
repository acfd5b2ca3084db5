"""The collectives by JAX's own operations: the oracle, with the signatures of `kernel`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def all_gather_reference(x: jax.Array, axis_name: str, size: int, dim: int = 0) -> jax.Array:
    """[..., n, ...] as [..., size * n, ...]."""
    del size
    return jax.lax.all_gather(x, axis_name, axis=dim, tiled=True)


def reduce_scatter_reference(x: jax.Array, axis_name: str, size: int, dim: int = 0) -> jax.Array:
    """[..., size * n, ...] as [..., n, ...]; floating numbers are added in float32."""
    del size
    wide = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.lax.psum_scatter(wide, axis_name, scatter_dimension=dim, tiled=True).astype(x.dtype)


def all_to_all_reference(
    x: jax.Array, axis_name: str, size: int, split_dim: int = 0, concat_dim: int = 0
) -> jax.Array:
    """[..., size * n, ..., m, ...] as [..., n, ..., size * m, ...]."""
    del size
    return jax.lax.all_to_all(x, axis_name, split_dim, concat_dim, tiled=True)


def ppermute_reference(x: jax.Array, axis_name: str, size: int, shift: int = 1) -> jax.Array:
    """What the rank `shift` before this one has."""
    return jax.lax.ppermute(x, axis_name, [(i, (i + shift) % size) for i in range(size)])


def halo_exchange_reference(
    x: jax.Array, axis_name: str, size: int, before: int, after: int, dim: int = 0, wrap: bool = False
) -> jax.Array:
    """`x` between the last rows of the rank before this one and the first rows of the one after it."""
    n = x.shape[dim]
    # A rank that no pair of `ppermute` names as a target gets zeros.
    right = [(i, (i + 1) % size) for i in range(size if wrap else size - 1)]
    left = [(target, source) for source, target in right]
    last = jax.lax.slice_in_dim(x, n - before, n, axis=dim)
    first = jax.lax.slice_in_dim(x, 0, after, axis=dim)
    found = jax.lax.ppermute(last, axis_name, right), x, jax.lax.ppermute(first, axis_name, left)
    return jnp.concatenate(found, dim)


def all_gather_matmul_reference(
    x: jax.Array,
    w: jax.Array,
    axis_name: str,
    size: int,
    dim: int = 0,
    transpose_w: bool = False,
    tiling: Any = None,
) -> jax.Array:
    """[..., m, ..., k] and [k, n] as [..., size * m, ..., n]; products are summed in float32."""
    del tiling
    wide = x.astype(jnp.float32)  # so that gradients are summed over the ranks in float32
    return _product(all_gather_reference(wide, axis_name, size, dim), w, transpose_w).astype(x.dtype)


def matmul_reduce_scatter_reference(
    x: jax.Array,
    w: jax.Array,
    axis_name: str,
    size: int,
    dim: int = 0,
    transpose_w: bool = False,
    tiling: Any = None,
) -> jax.Array:
    """[..., size * m, ..., k] and [k, n] as [..., m, ..., n]; all sums are in float32."""
    del tiling
    return reduce_scatter_reference(_product(x, w, transpose_w), axis_name, size, dim).astype(x.dtype)


def ragged_all_to_all_reference(
    x: jax.Array, send_counts: jax.Array, axis_name: str, size: int, output_rows: int
) -> tuple[jax.Array, jax.Array]:
    """The rows of all ranks, of which each picks those for it; and how many are from each rank."""
    rows = x.shape[0]
    everything = jax.lax.all_gather(x, axis_name, tiled=True)  # [size * rows, ...]
    counts = jnp.maximum(jax.lax.all_gather(send_counts, axis_name), 0)
    limited = jnp.minimum(counts, rows)
    # Before each row of a rank: how many of the ranks' ends it is behind, which is where it goes.
    ends = jnp.minimum(jax.lax.cumsum(limited, axis=1), rows)
    target = jnp.sum(jnp.arange(rows)[None, :, None] >= ends[:, None, :], axis=2)  # [size, rows]
    mine = target == jax.lax.axis_index(axis_name)
    order = jnp.argsort(~mine.reshape(-1), stable=True)
    order = jnp.pad(order, (0, max(0, output_rows - order.size)))[:output_rows]
    there = jnp.arange(output_rows) < jnp.sum(mine)
    kept = jnp.where(there.reshape(-1, *(1,) * (x.ndim - 1)), everything[order], jnp.zeros((), x.dtype))
    return kept, jnp.sum(mine, axis=1, dtype=jnp.int32)


def _product(x: jax.Array, w: jax.Array, transpose_w: bool) -> jax.Array:
    wide = jnp.float32
    return jnp.matmul(
        x.astype(wide), (w.T if transpose_w else w).astype(wide), precision=jax.lax.Precision.HIGHEST
    )

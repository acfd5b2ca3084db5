"""The collectives by JAX's own operations: the oracle, with the signatures of `kernel`."""

from __future__ import annotations

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

"""The collectives with gradients, which are collectives again, so that gradients have gradients.

Each rank's result is its own tensor, with a cotangent of its own. So, with sums over the ranks of an axis:

    all_gather(dim)                     <->  reduce_scatter(dim)
    all_to_all(split_dim, concat_dim)   <->  all_to_all(concat_dim, split_dim)
    ppermute(shift)                     <->  ppermute(-shift)
    exchange(to_right, to_left)         <->  exchange, what came from a side goes back to it

`all_gather` and the others take the arguments of the functions of that name in `kernel`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tpu_kernels.collectives import kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def all_gather(x: jax.Array, axis_name: str, size: int, dim: int = 0) -> jax.Array:
    return kernel.all_gather(x, axis_name, size, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def reduce_scatter(x: jax.Array, axis_name: str, size: int, dim: int = 0) -> jax.Array:
    return kernel.reduce_scatter(x, axis_name, size, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def all_to_all(x: jax.Array, axis_name: str, size: int, split_dim: int = 0, concat_dim: int = 0) -> jax.Array:
    return kernel.all_to_all(x, axis_name, size, split_dim, concat_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def ppermute(x: jax.Array, axis_name: str, size: int, shift: int = 1) -> jax.Array:
    return kernel.ppermute(x, axis_name, size, shift)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def exchange(
    to_right: jax.Array, to_left: jax.Array, axis_name: str, size: int
) -> tuple[jax.Array, jax.Array]:
    return kernel.exchange(to_right, to_left, axis_name, size)


def halo_exchange(
    x: jax.Array, axis_name: str, size: int, before: int, after: int, dim: int = 0, wrap: bool = False
) -> jax.Array:
    """`x` between the last rows of the rank before this one and the first rows of the one after it.

    Args:
        x: [..., n, ...], n along `dim`.
        before, after: how many rows to get from either side, n at most.
        wrap: whether the first and the last rank are neighbours; else they get zeros.

    Returns:
        [..., before + n + after, ...].
    """
    n = x.shape[dim]
    last = jax.lax.slice_in_dim(x, n - before, n, axis=dim)
    first = jax.lax.slice_in_dim(x, 0, after, axis=dim)
    received: Any = exchange(last, first, axis_name, size)
    left, right = received
    if not wrap:
        place = jax.lax.axis_index(axis_name)
        left = jnp.where(place == 0, 0, left)
        right = jnp.where(place == size - 1, 0, right)
    return jnp.concatenate([left, x, right], dim)


def _linear(collective: Any) -> Any:
    """Its forward rule: a linear function keeps nothing for its gradient."""
    return lambda *args: (collective(*args), None)


def _all_gather_bwd(axis_name: str, size: int, dim: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (reduce_scatter(g, axis_name, size, dim),)


def _reduce_scatter_bwd(axis_name: str, size: int, dim: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (all_gather(g, axis_name, size, dim),)


def _all_to_all_bwd(
    axis_name: str, size: int, split_dim: int, concat_dim: int, _: None, g: jax.Array
) -> tuple[jax.Array]:
    return (all_to_all(g, axis_name, size, concat_dim, split_dim),)


def _ppermute_bwd(axis_name: str, size: int, shift: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (ppermute(g, axis_name, size, -shift),)


def _exchange_bwd(
    axis_name: str, size: int, _: None, g: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    from_left, from_right = g
    received: Any = exchange(from_right, from_left, axis_name, size)
    of_to_left, of_to_right = received
    return of_to_right, of_to_left


all_gather.defvjp(_linear(all_gather), _all_gather_bwd)
reduce_scatter.defvjp(_linear(reduce_scatter), _reduce_scatter_bwd)
all_to_all.defvjp(_linear(all_to_all), _all_to_all_bwd)
ppermute.defvjp(_linear(ppermute), _ppermute_bwd)
exchange.defvjp(_linear(exchange), _exchange_bwd)

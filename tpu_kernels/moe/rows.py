"""Tokens to rows sorted by expert and back, as differentiable JAX functions.

Three functions are each other's derivatives: `spread` copies tokens to rows, `collect` sums rows for each
token, and `dots` multiplies each row with its token. The order of the rows and its inverse are both known, so
each of them gathers and sums; JAX's own derivative of a gather is a scatter, which a TPU does row by row.

Here x is the dtype of tokens and rows, `order` int32 [T * k] and `places` int32 [T, k] are those of
`permutation.Permuted`, and `weights` is [T, k] or None for ones.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def spread(tokens: jax.Array, weights: jax.Array | None, order: jax.Array, places: jax.Array) -> jax.Array:
    """`rows[place of (t, j)] = weights[t, j] * tokens[t]`, and 0 where no pair is, x [T * k, D]."""
    return _spread(tokens, weights, order, places)


def collect(rows: jax.Array, weights: jax.Array | None, order: jax.Array, places: jax.Array) -> jax.Array:
    """`tokens[t] = sum over j of weights[t, j] * rows[place of (t, j)]`, x [T, D]."""
    return _collect(rows, weights, order, places)


def _compute_dtype(*arrays: jax.Array | None) -> jnp.dtype:
    dtypes = [array.dtype for array in arrays if array is not None]
    return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))


# The functions --------------------------------------------------------------------------------------------


@jax.custom_vjp
def _spread(tokens: jax.Array, weights: jax.Array | None, order: jax.Array, places: jax.Array) -> Any:
    rows = tokens[order // places.shape[1]]
    if weights is not None:
        compute = _compute_dtype(tokens, weights)
        factors = weights.reshape(order.shape)[order]
        rows = (factors[:, None].astype(compute) * rows.astype(compute)).astype(tokens.dtype)
    number = jnp.arange(order.shape[0], dtype=jnp.int32)
    used = number < jnp.sum(places >= 0, dtype=jnp.int32)
    return jnp.where(used[:, None], rows, 0)


@jax.custom_vjp
def _collect(rows: jax.Array, weights: jax.Array | None, order: jax.Array, places: jax.Array) -> Any:
    del order
    compute = _compute_dtype(rows, weights)
    terms = rows[jnp.maximum(places, 0)].astype(compute)  # [T, k, D]
    if weights is not None:
        terms = weights[:, :, None].astype(compute) * terms
    terms = jnp.where(places[:, :, None] >= 0, terms, 0)
    return jnp.sum(terms, axis=1).astype(rows.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dots(dtype: jnp.dtype, tokens: jax.Array, rows: jax.Array, order: jax.Array, places: jax.Array) -> Any:
    """`tokens[t] · rows[place of (t, j)]`, and 0 where the pair is dropped, dtype [T, k]."""
    del order
    compute = functools.reduce(jnp.promote_types, [_compute_dtype(tokens, rows), dtype])
    products = tokens[:, None, :].astype(compute) * rows[jnp.maximum(places, 0)].astype(compute)
    return jnp.where(places >= 0, jnp.sum(products, axis=-1), 0).astype(dtype)


# Their derivatives ----------------------------------------------------------------------------------------


def _spread_forward(tokens, weights, order, places):
    return _spread(tokens, weights, order, places), (
        None if weights is None else tokens,
        weights,
        order,
        places,
    )


def _spread_backward(kept, cotangent):
    tokens, weights, order, places = kept
    dtokens = _collect(cotangent, weights, order, places)
    dweights = None if weights is None else _dots(weights.dtype, tokens, cotangent, order, places)
    return dtokens, dweights, None, None


def _collect_forward(rows, weights, order, places):
    kept = None if weights is None else rows, weights, order, places
    return _collect(rows, weights, order, places), kept


def _collect_backward(kept, cotangent):
    rows, weights, order, places = kept
    drows = _spread(cotangent, weights, order, places)
    dweights = None if weights is None else _dots(weights.dtype, cotangent, rows, order, places)
    return drows, dweights, None, None


def _dots_forward(dtype, tokens, rows, order, places):
    return _dots(dtype, tokens, rows, order, places), (tokens, rows, order, places)


def _dots_backward(dtype, kept, cotangent):
    del dtype
    tokens, rows, order, places = kept
    return (
        _collect(rows, cotangent, order, places),
        _spread(tokens, cotangent, order, places),
        None,
        None,
    )


_spread.defvjp(_spread_forward, _spread_backward)
_collect.defvjp(_collect_forward, _collect_backward)
_dots.defvjp(_dots_forward, _dots_backward)

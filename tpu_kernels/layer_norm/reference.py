"""Layer norm in plain jnp: the oracle, and how far float32 arithmetic may be from it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from autotune.problem import Problem
from autotune.spec import Arrays


def layer_norm_reference(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> jax.Array:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, mean and variance over the last dimension.

    Args:
        x: [..., cols], any floating dtype.
        weight: [cols], any floating dtype, or None for ones.
        bias: [cols], any floating dtype, or None for zeros.
        eps: added to the variance, which is that of the row (divided by cols).

    Returns:
        [..., cols] in the dtype of `x`. Computed in float32, or in float64 if an argument is.
    """
    dtypes = [array.dtype for array in (x, weight, bias) if array is not None]
    compute = functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))
    wide = x.astype(compute)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight.astype(compute)
    if bias is not None:
        y = y + bias.astype(compute)
    return y.astype(x.dtype)


def error_bounds(problem: Problem, arrays: Arrays, cotangent: np.ndarray) -> tuple[np.ndarray | None, ...]:
    """First-order bounds of the rounding errors of y, dx, dweight and dbias in float32.

    They hold in any order of summation. With u the unit roundoff: a sum of n terms errs by at most n u
    times the sum of their magnitudes. So the centred values err by n u (mean|x| + |x|), which matters where
    a row is far from zero compared to its spread; its variance by twice that relative to the spread; and
    everything made from them accordingly. The constants below count the remaining operations generously.

    Args:
        problem: gives `eps`.
        arrays: x [..., cols], weight and bias [cols] or None, float64.
        cotangent: [..., cols], float64.
    """
    x, weight, bias = arrays
    assert x is not None
    u = float(np.finfo(np.float32).eps) / 2
    cols = x.shape[-1]
    rows = x.size // max(cols, 1)
    centred = x - _mean(x)
    rstd = 1 / np.sqrt(_mean(centred * centred) + problem.param("eps"))
    n = centred * rstd
    h = cotangent if weight is None else cotangent * weight

    # Relative to u: how far off-centre values and rstd can be.
    spread = 1 + 2 * np.sqrt(_mean(x * x)) * rstd
    n_error = (cols + 12) * u * (rstd * (_mean(np.abs(x)) + np.abs(x)) + np.abs(n) * spread)
    y_error = n_error * (1 if weight is None else np.abs(weight))
    if bias is not None:
        y_error = y_error + 2 * u * np.abs(bias)

    projection = _mean(np.abs(h * n))
    terms = np.abs(h) + _mean(np.abs(h)) + np.abs(n) * projection
    dx_error = rstd * (
        (2 * cols + 32) * u * spread * terms + n_error * projection + np.abs(n) * _mean(np.abs(h) * n_error)
    )
    g = np.abs(cotangent).reshape(rows, cols)
    dweight_error = (g * (n_error + (rows + 4) * u * np.abs(n)).reshape(rows, cols)).sum(axis=0)
    dbias_error = (rows + 2) * u * g.sum(axis=0)
    return y_error, dx_error, None if weight is None else dweight_error, None if bias is None else dbias_error


def _mean(values: np.ndarray) -> np.ndarray:
    return values.sum(axis=-1, keepdims=True) / max(values.shape[-1], 1)

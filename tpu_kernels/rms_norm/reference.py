"""RMS norm in plain jnp: the oracle, and how far float32 arithmetic may be from it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from autotune.problem import Problem
from autotune.spec import Arrays


def rms_norm_reference(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """`x / sqrt(mean(x², over the last dimension) + eps) * weight`.

    Args:
        x: [..., cols], any floating dtype.
        weight: [cols], any floating dtype, or None for ones.
        eps: added to the mean square.

    Returns:
        [..., cols] in the dtype of `x`. Computed in float32, or in float64 if an argument is.
    """
    dtypes = [array.dtype for array in (x, weight) if array is not None]
    compute = functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))
    wide = x.astype(compute)
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight.astype(compute)
    return y.astype(x.dtype)


def error_bounds(problem: Problem, arrays: Arrays, cotangent: np.ndarray) -> tuple[np.ndarray | None, ...]:
    """First-order bounds of the rounding errors of y, dx and dweight in float32.

    They hold in any order of summation. With u the unit roundoff: a sum of n terms errs by at most n u
    times the sum of their magnitudes, and the mean square, whose terms are positive, by n u of itself; rstd
    is a square root of that, so it errs by half as much, and rsqrt itself by a few u. The constants below
    count the remaining operations generously.

    Args:
        problem: gives `eps`.
        arrays: x [..., cols] and weight [cols] or None, float64.
        cotangent: [..., cols], float64.
    """
    x, weight = arrays
    assert x is not None
    u = float(np.finfo(np.float32).eps) / 2
    cols = x.shape[-1]
    rows = x.size // max(cols, 1)
    rstd = 1 / np.sqrt(_mean(x * x) + problem.param("eps"))
    n = x * rstd
    h = cotangent if weight is None else cotangent * weight

    y_error = (cols / 2 + 12) * u * np.abs(n if weight is None else n * weight)
    dx_terms = np.abs(h) + np.abs(n) * _mean(np.abs(h * n))
    dx_error = (2.5 * cols + 32) * u * rstd * dx_terms
    if weight is None:
        return y_error, dx_error, None
    dweight_error = (rows + cols / 2 + 12) * u * np.abs(cotangent * n).reshape(rows, cols).sum(axis=0)
    return y_error, dx_error, dweight_error


def _mean(values: np.ndarray) -> np.ndarray:
    return values.sum(axis=-1, keepdims=True) / max(values.shape[-1], 1)

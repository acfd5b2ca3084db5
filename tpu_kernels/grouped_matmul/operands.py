"""The arrays of one grouped matmul, as its kernel takes them."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

_EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Quantised dtypes."""


T = TypeVar("T")
"""An array, or what a kernel has in its place: a specification of blocks, a reference."""


class Operands(NamedTuple, Generic[T]):
    """Everything but the visits. What is not given is None, or an empty tuple.

    Attributes:
        lhs: [M, K].
        rhs: one matrix for each group, [G, K, N] or [G, N, K]; or two, of which the second gates; or one
            array, [G, K, 2 N] or [G, 2 N, K], that has both.
        lhs_scale: float32 [M, B]: factors of each row's B blocks along K.
        rhs_scale: as many as matrices, float32 [G, B, N]: factors of each column's blocks along K.
        bias: as many, float32 [G, 1, N].
        existing: [M, N], added to the result.
    """

    lhs: T
    rhs: tuple[T, ...]
    lhs_scale: T | None = None
    rhs_scale: tuple[T, ...] = ()
    bias: tuple[T, ...] = ()
    existing: T | None = None


def is_quantized(dtype: jnp.dtype) -> bool:
    """Whether numbers of this dtype come with a scale."""
    return str(dtype) in _EIGHT_BITS


def result_dtype(lhs: jnp.dtype, rhs: jnp.dtype, asked: jnp.dtype | None) -> jnp.dtype:
    """The dtype of the result: what is asked for, or that of the operands; float32 if both are quantised."""
    if asked is not None:
        return jnp.dtype(asked)
    plain = [jnp.dtype(dtype) for dtype in (lhs, rhs) if not is_quantized(jnp.dtype(dtype))]
    return jnp.promote_types(plain[0], plain[-1]) if plain else jnp.dtype(jnp.float32)


def multiplied_as(lhs: jnp.dtype, rhs: jnp.dtype) -> tuple[jnp.dtype, jnp.dtype]:
    """The dtype in which two operands are multiplied, and the one in which products are summed.

    Matrix units multiply 8-bit numbers with their like. Other pairs are multiplied in bfloat16, which has
    every 8-bit number, or in float32 if one is.
    """
    if lhs == rhs:
        return lhs, jnp.dtype(jnp.int32 if lhs == jnp.int8 else jnp.float32)
    wide = [dtype for dtype in (lhs, rhs) if not is_quantized(dtype)]
    return wide[0] if wide else jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def dequantized(values: jax.Array, scale: jax.Array | None, axis: int, dtype: jnp.dtype) -> jax.Array:
    """`values` times their factors.

    Args:
        values: floating or integers.
        scale: like `values`, but that `axis` has one factor for each of some equal blocks; None for 1.
        axis: the one that is multiplied and summed over.
        dtype: of the result.
    """
    if scale is None:
        return values.astype(dtype)
    block = values.shape[axis] // max(scale.shape[axis], 1)
    compute = jnp.promote_types(dtype, jnp.float32)
    factors = jnp.repeat(scale.astype(compute), block, axis, total_repeat_length=values.shape[axis])
    return (values.astype(compute) * factors).astype(dtype)

"""Grouped matmul in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_kernels.grouped_matmul import epilogue
from tpu_kernels.grouped_matmul.epilogue import Activation
from tpu_kernels.grouped_matmul.operands import dequantized, result_dtype


def grouped_matmul_reference(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    transpose_rhs: bool = False,
    out_dtype: jnp.dtype | None = None,
    *,
    up: jax.Array | None = None,
    gated: bool = False,
    activation: Activation | None = None,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    up_scale: jax.Array | None = None,
    existing_out: jax.Array | None = None,
) -> jax.Array:
    """`out[rows of group offset + i] = activation(lhs[the same rows] @ rhs[i] + bias[i])`, other rows 0.

    With `up` that is times `lhs[rows] @ up[i] + up_bias[i]`, and to all rows `existing_out` is added.

    Args:
        lhs: [M, K], floating, or 8-bit numbers.
        rhs: [G, K, N], or [G, N, K] with `transpose_rhs`, likewise.
        group_sizes: integers [all groups], the rows of each; groups follow each other from row 0 on. Negative
            sizes count as 0, and rows behind the last are no rows.
        group_offset: integer [], the first group that has a matrix in `rhs`; None for 0.
        transpose_rhs: whether the matrices are transposed first.
        out_dtype: of the result; None for that of lhs and rhs promoted.
        up: matrices that gate, like `rhs`.
        gated: whether `rhs` has both, [G, K, 2 N] or [G, 2 N, K], and so have bias and factors.
        activation: of the first product and its bias.
        bias, up_bias: [G, N].
        lhs_scale: [M] or [M, B], factors of each row, or of B equal blocks of it.
        rhs_scale, up_scale: [G, N] or [G, B, N], of each column.
        existing_out: [M, N].

    Returns:
        [M, N], summed in float32, or in float64 if an operand is.
    """
    out_dtype = result_dtype(lhs.dtype, rhs.dtype, out_dtype)
    compute = jnp.dtype(jnp.float64 if jnp.float64 in (lhs.dtype, rhs.dtype) else jnp.float32)
    if lhs_scale is not None and lhs_scale.ndim == 1:
        lhs_scale = lhs_scale[:, None]
    rows = dequantized(lhs, lhs_scale, 1, compute)

    def product(matrices, scale, bias):
        if scale is not None:
            scale = scale[:, None] if scale.ndim == 2 else scale
            scale = scale.mT if transpose_rhs else scale
        matrices = dequantized(matrices, scale, 2 if transpose_rhs else 1, compute)
        matrices = matrices.mT if transpose_rhs else matrices
        return _product(rows, matrices, bias, starts, ends, first)

    m = lhs.shape[0]

    def next_end(end, size):
        end = jnp.minimum(end + size, m)
        return end, end

    _, ends = jax.lax.scan(next_end, jnp.zeros((), jnp.int32), jnp.clip(group_sizes, 0, m).astype(jnp.int32))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[:-1]
    first = 0 if group_offset is None else group_offset.reshape(())
    sums, own = product(rhs, rhs_scale, bias)
    both = jnp.split(sums, 2, axis=1) if gated else [sums]
    if up is not None:
        both = [sums, product(up, up_scale, up_bias)[0]]
    # Rows of no group are 0, whatever the activation makes of 0.
    out = jnp.where(own, epilogue.applied(activation, both), 0)
    if existing_out is not None:
        out = out + existing_out.astype(out.dtype)
    return out.astype(out_dtype)


def _product(lhs, matrices, bias, starts, ends, first) -> tuple[jax.Array, jax.Array]:
    """Rows times their group's matrix, plus its bias; and which rows have one, bool [M, 1]."""
    m, groups = lhs.shape[0], matrices.shape[0]
    row = jnp.arange(m, dtype=jnp.int32)[:, None]
    if bias is None:
        bias = jnp.zeros((groups, matrices.shape[2]), lhs.dtype)

    def add(carry, number_matrix_bias):
        out, some = carry
        number, matrix, bias = number_matrix_bias
        own = (row >= starts[number]) & (row < ends[number])
        # What the rows of other groups hold may be infinite, and so may this matrix.
        product = jnp.matmul(jnp.where(own, lhs, 0), matrix, precision=jax.lax.Precision.HIGHEST)
        return (out + jnp.where(own, product + bias, 0), some | own), None

    nothing = jnp.zeros((m, matrices.shape[2]), lhs.dtype), jnp.zeros((m, 1), bool)
    if not groups:
        return nothing
    numbers = first + jnp.arange(groups, dtype=jnp.int32)
    return jax.lax.scan(add, nothing, (numbers, matrices, bias.astype(lhs.dtype)))[0]

"""Grouped matmul in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def grouped_matmul_reference(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    transpose_rhs: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """`out[rows of group offset + i] = lhs[the same rows] @ rhs[i]`, and 0 in all other rows.

    Args:
        lhs: [M, K], floating.
        rhs: [G, K, N], or [G, N, K] with `transpose_rhs`, floating.
        group_sizes: integers [all groups], the rows of each; groups follow each other from row 0 on. Negative
            sizes count as 0, and rows behind the last are no rows.
        group_offset: integer [], the first group that has a matrix in `rhs`; None for 0.
        transpose_rhs: whether the matrices are transposed first.
        out_dtype: of the result; None for that of lhs and rhs promoted.

    Returns:
        [M, N], summed in float32, or in float64 if an operand is.
    """
    promoted = jnp.promote_types(lhs.dtype, rhs.dtype)
    compute = jnp.promote_types(promoted, jnp.float32)
    m, n = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    out_dtype = promoted if out_dtype is None else out_dtype
    if not rhs.shape[0]:
        return jnp.zeros((m, n), out_dtype)

    def next_end(end, size):
        end = jnp.minimum(end + size, m)
        return end, end

    _, ends = jax.lax.scan(next_end, jnp.zeros((), jnp.int32), jnp.clip(group_sizes, 0, m).astype(jnp.int32))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[:-1]
    row = jnp.arange(m, dtype=jnp.int32)[:, None]
    first = 0 if group_offset is None else group_offset.reshape(())

    def add(out, number_and_matrix):
        number, matrix = number_and_matrix
        own = (row >= starts[number]) & (row < ends[number])
        matrix = (matrix.T if transpose_rhs else matrix).astype(compute)
        # What the rows of other groups hold may be infinite, and so may this matrix.
        rows = jnp.where(own, lhs.astype(compute), 0)
        product = jnp.matmul(rows, matrix, precision=jax.lax.Precision.HIGHEST)
        return out + jnp.where(own, product, 0), None

    numbers = first + jnp.arange(rhs.shape[0], dtype=jnp.int32)
    out, _ = jax.lax.scan(add, jnp.zeros((m, n), compute), (numbers, rhs))
    return out.astype(out_dtype)

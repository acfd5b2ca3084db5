"""Grouped matmul for torch: the public function and its op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from bridge import jax_op
from tpu_kernels._integers import int32
from tpu_kernels._select import Implementation
from tpu_kernels.grouped_matmul import arguments, vjp
from tpu_kernels.grouped_matmul.arguments import Pair
from tpu_kernels.grouped_matmul.epilogue import Activation
from tpu_kernels.grouped_matmul.reference import grouped_matmul_reference
from tpu_kernels.grouped_matmul.tiling import GroupedTiling

_OP = "grouped_matmul"


def grouped_matmul(
    lhs: torch.Tensor,
    rhs: Pair,
    group_sizes: torch.Tensor,
    *,
    group_offset: torch.Tensor | int | None = None,
    transpose_rhs: bool = False,
    bias: Pair | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    lhs_scale: torch.Tensor | None = None,
    rhs_scale: Pair | None = None,
    existing_out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Implementation = "auto",
    tiling: GroupedTiling | None = None,
) -> torch.Tensor:
    """`out[rows of group i] = lhs[rows of group i] @ rhs[i]`: each group of rows times a matrix of its own.

    In full, with everything that may be given, and both matrices of a gated product:

        out = existing_out + activation(lhs @ gate[i] + bias[i]) * (lhs @ up[i] + up_bias[i])

    The groups follow each other from row 0 on, `group_sizes[i]` rows each. Rows behind the last group are 0
    in the output, or as in `existing_out`, and pass no gradient on; the gradient of the matrix of a group
    without rows is 0. The sizes are data: other ones, with every step, compile nothing again, and nobody
    waits for them.

    Differentiable in all that is floating but 8-bit operands, any number of times. Gradients are computed
    from cotangents in the dtype of `lhs`; of 8-bit operands, from the numbers that they stand for.

    Args:
        lhs: [M, K], float16, bfloat16, float32 or float64, on `tpu` or `cpu`; or int8, float8_e4m3fn or
            float8_e5m2.
        rhs: [G, K, N], or [G, N, K] with `transpose_rhs`, of the same dtype, or of 8 bits. A pair of such
            tensors for a gated product: the one that is activated, and the one that it is multiplied with.
        group_sizes: integers [G]: at least 0, and M together at most. On `cpu` and on the simulated device
            that is checked; elsewhere, and in compiled functions, a negative size counts as 0, and rows from
            M on do not exist.
        group_offset: for a slice of the groups, as of one rank of many: `rhs` has the matrices of G groups
            from this one on, and `group_sizes` those of all. Rows of other groups are 0. An int, or a tensor
            of one integer, which is data as well: out of range, it is the nearest in range.
        transpose_rhs: whether the matrices are transposed first, which costs nothing.
        bias: [G, N]; a pair if `rhs` is one.
        activation: `relu`, `silu`, `gelu` (by the error function), `gelu_tanh` or `sigmoid`, of the sums in
            float32; None for none.
        gated: whether one `rhs` has both matrices of each group side by side, [G, K, 2 N] or [G, 2 N, K];
            then `bias` is [G, 2 N], and `rhs_scale` as wide. With `silu` that is SwiGLU, with `gelu` GeGLU.
        lhs_scale: of an 8-bit `lhs`, what each row is multiplied with, [M]; or [M, B], each of B equal blocks
            of a row. None for 1.
        rhs_scale: of an 8-bit `rhs`, that of each column, [G, N]; or [G, B, N], of each of B equal blocks of
            K, with `transpose_rhs` too. The kernel takes blocks of multiples of 128.
        existing_out: [M, N], floating: added to the result.
        out_dtype: of the output; None for that of the operands, float32 if both have 8 bits. JAX calls it
            `preferred_element_type`.
        impl: `pallas` is the TPU kernel: bfloat16, float32 and 8 bits. `reference` is plain JAX, and
            multiplies all rows by all matrices. `auto` is the kernel wherever it can compute this.
        tiling: tile sizes of the kernels, a `tpu_kernels.GroupedTiling`; None chooses for the shape.

    Returns:
        [M, N], contiguous. Products are summed in float32, or in float64 for float64; those of int8 with
        int8 in int32, as far as a tile goes.

    Raises:
        TypeError: dtypes or argument types other than these; an 8-bit operand that requires a gradient.
        RuntimeError: shapes or devices that don't belong together.
        ValueError: sizes or an offset out of range, an unknown activation; `impl` or `tiling` cannot compute
            this, and why.
    """
    columns = arguments.pairs(_OP, rhs, bias, rhs_scale, gated)
    arguments.check(
        _OP,
        lhs,
        columns,
        group_sizes,
        transpose_rhs=transpose_rhs,
        gated=gated,
        activation=activation,
        out_dtype=out_dtype,
        lhs_scale=lhs_scale,
        existing_out=existing_out,
    )
    first, second = columns if len(columns) == 2 else (*columns, arguments.NO_COLUMNS)
    offset = arguments.checked_offset(_OP, group_offset, columns[0].rhs.shape[0], group_sizes)
    arguments.check_sizes(_OP, group_sizes, lhs.shape[0])
    return op(
        lhs,
        first.rhs,
        int32(group_sizes),
        offset,
        transpose_rhs,
        out_dtype,
        tiling,
        impl,
        second.rhs,
        gated,
        activation,
        first.bias,
        second.bias,
        lhs_scale,
        first.scale,
        second.scale,
        existing_out,
    )


# The op -------------------------------------------------------------------------------------------


def _reference(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    transpose_rhs: bool,
    preferred_element_type: jnp.dtype | None,
    tiling: GroupedTiling | None,
    impl: Implementation,
    up: jax.Array | None,
    gated: bool,
    activation: Activation | None,
    bias: jax.Array | None,
    up_bias: jax.Array | None,
    lhs_scale: jax.Array | None,
    rhs_scale: jax.Array | None,
    up_scale: jax.Array | None,
    existing_out: jax.Array | None,
) -> jax.Array:
    del tiling, impl
    return grouped_matmul_reference(
        lhs,
        rhs,
        group_sizes,
        group_offset,
        transpose_rhs,
        preferred_element_type,
        up=up,
        gated=gated,
        activation=activation,
        bias=bias,
        up_bias=up_bias,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        up_scale=up_scale,
        existing_out=existing_out,
    )


op = jax_op("tpu_kernels::grouped_matmul", vjp.grouped_matmul, reference=_reference)
"""The torch op behind `grouped_matmul`."""

"""Grouped matmul summed over each group's rows: the gradient of the matrices, as an operation of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from autotune.problem import Problem
from bridge import jax_op
from bridge.chips import chip
from bridge.interpretation import target_chip
from tpu_kernels import _select
from tpu_kernels._checks import check_floating
from tpu_kernels._integers import check_integers, int32
from tpu_kernels._select import Implementation
from tpu_kernels._vmem import vmem_allowed
from tpu_kernels.grouped_matmul import arguments, space, visits
from tpu_kernels.grouped_matmul.product import Static, summed
from tpu_kernels.grouped_matmul.tiling import GroupedTiling

_OP = "transposed_grouped_matmul"


def transposed_grouped_matmul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    impl: Implementation = "auto",
    tiling: GroupedTiling | None = None,
) -> torch.Tensor:
    """`out[i] = lhs[rows of group i].T @ rhs[rows of group i]`: a product summed over each group's rows.

    Also known as tgmm. It is the gradient of the matrices of `grouped_matmul`, whose groups these are: they
    follow each other from row 0 on, rows behind the last one don't count, and a group without rows gives 0.

    Differentiable in `lhs` and `rhs`, any number of times. Gradients are computed from cotangents in the
    dtype of `lhs`.

    Args:
        lhs: [M, K], float16, bfloat16, float32 or float64, on `tpu` or `cpu`.
        rhs: [M, N], of the same dtype.
        group_sizes: integers [G]: at least 0, and M together at most. On `cpu` and on the simulated device
            that is checked; elsewhere, and in compiled functions, a negative size counts as 0, and rows from
            M on do not exist.
        out_dtype: of the output; None for that of `lhs`.
        impl: `pallas` is the TPU kernel: bfloat16 and float32. `reference` is plain JAX, and multiplies all
            rows once for each group. `auto` is the kernel wherever it can compute this.
        tiling: tile sizes of the grouped matmul whose gradient this is: the `drhs` ones for the output, the
            others for its gradients. None chooses for the shape.

    Returns:
        [G, K, N], contiguous, summed in float32, or in float64 for float64.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
        ValueError: sizes out of range; `impl` or `tiling` cannot compute this, and why.
    """
    _check(lhs, rhs, group_sizes, out_dtype)
    arguments.check_sizes(_OP, group_sizes, lhs.shape[0])
    return op(lhs, rhs, int32(group_sizes), out_dtype or lhs.dtype, tiling, impl)


def _check(
    lhs: torch.Tensor, rhs: torch.Tensor, group_sizes: torch.Tensor, out_dtype: torch.dtype | None
) -> None:
    check_floating(_OP, lhs=lhs, rhs=rhs)
    check_integers(_OP, "group_sizes", group_sizes)
    if lhs.dtype != rhs.dtype:
        raise TypeError(f"{_OP}: lhs and rhs must have the same dtype, got {lhs.dtype} and {rhs.dtype}")
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or not out_dtype.is_floating_point):
        raise TypeError(f"{_OP}: out_dtype must be a floating torch.dtype or None, got {out_dtype!r}")
    for name, tensor in {"rhs": rhs, "group_sizes": group_sizes}.items():
        if tensor.device != lhs.device:
            raise RuntimeError(
                f"{_OP}: all tensors must be on one device, got lhs on {lhs.device} and {name} on "
                f"{tensor.device}"
            )
    if lhs.dim() != 2 or rhs.dim() != 2 or lhs.shape[0] != rhs.shape[0]:
        raise RuntimeError(
            f"{_OP}: lhs must be [M, K] and rhs [M, N], got {list(lhs.shape)} and {list(rhs.shape)}"
        )
    if group_sizes.dim() != 1:
        raise RuntimeError(
            f"{_OP}: group_sizes must be [G], a size for each group, got {list(group_sizes.shape)}"
        )


# In JAX ------------------------------------------------------------------------------------------------


def transposed(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    out_dtype: jnp.dtype | None = None,
    tiling: GroupedTiling | None = None,
    impl: Implementation = "auto",
) -> jax.Array:
    """The product summed over the rows of each group; see `transposed_reference`.

    Args:
        tiling: tile sizes of the kernels; by default chosen for the shape.
        impl: `pallas` (the kernels), `reference`, or `auto`.

    Raises:
        ValueError: the chosen implementation cannot compute this, with the reasons.
    """
    out_dtype = jnp.promote_types(lhs.dtype, rhs.dtype) if out_dtype is None else jnp.dtype(out_dtype)
    chosen = _select.select(
        _problem(lhs, rhs, group_sizes, out_dtype),
        impl,
        tiling,
        unsupported_reasons=space.unsupported_reasons,
        illegal_reasons=space.illegal_reasons,
        default_tiling=space.default_tiling,
        integers=("group_sizes",),
    )
    if chosen is None or 0 in (*lhs.shape, *rhs.shape, *group_sizes.shape):  # no block to launch a kernel on
        return transposed_reference(lhs, rhs, group_sizes, out_dtype)
    starts, ends = visits.row_ranges(group_sizes.astype(jnp.int32), lhs.shape[0], group_sizes.shape[0], None)
    static = Static(
        chosen.drhs, chosen.dlhs, chosen.output, False, out_dtype, vmem_allowed(chip(target_chip()))
    )
    result: Any = summed(static, lhs, rhs, starts, ends)
    return result


def _problem(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, out_dtype: jnp.dtype) -> Problem:
    """The grouped matmul whose gradient this is: `rhs` is its cotangent, and its matrices are the output."""
    dtype = lhs.dtype
    if all(str(each) in space.KERNEL_DTYPES for each in (dtype, out_dtype)):
        dtype = jnp.promote_types(dtype, out_dtype)  # tiles that fit the wider ones fit both
    matrices = jax.ShapeDtypeStruct((group_sizes.shape[0], lhs.shape[1], rhs.shape[1]), dtype)
    arrays = _select.describe(
        lhs=jax.ShapeDtypeStruct(lhs.shape, dtype), rhs=matrices, group_sizes=group_sizes
    )
    return replace(space.problem_of(arrays, out_dtype=str(out_dtype)), kernel=_OP)


def transposed_reference(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """`out[i] = lhs[rows of group i].T @ rhs[the same rows]`, 0 for a group without rows.

    Args:
        lhs: [M, K], floating.
        rhs: [M, N], floating.
        group_sizes: integers [G], the rows of each; groups follow each other from row 0 on. Negative sizes
            count as 0, and rows behind the last are no rows.
        out_dtype: of the result; None for that of lhs and rhs promoted.

    Returns:
        [G, K, N], summed in float32, or in float64 if an operand is.
    """
    promoted = jnp.promote_types(lhs.dtype, rhs.dtype)
    compute = jnp.promote_types(promoted, jnp.float32)
    m, groups = lhs.shape[0], group_sizes.shape[0]
    starts, ends = visits.row_ranges(group_sizes.astype(jnp.int32), m, groups, None)
    row = jnp.arange(m, dtype=jnp.int32)[:, None]

    def product(group_range):
        start, end = group_range
        # What rows of other groups hold may be infinite: both are masked.
        own = (row >= start) & (row < end)
        rows, others = (jnp.where(own, each.astype(compute), 0) for each in (lhs, rhs))
        return jnp.matmul(rows.T, others, precision=jax.lax.Precision.HIGHEST)

    return jax.lax.map(product, (starts, ends)).astype(promoted if out_dtype is None else out_dtype)


# The op ------------------------------------------------------------------------------------------------


def _reference(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    out_dtype: jnp.dtype | None,
    tiling: GroupedTiling | None,
    impl: Implementation,
) -> jax.Array:
    del tiling, impl
    return transposed_reference(lhs, rhs, group_sizes, out_dtype)


op = jax_op("tpu_kernels::transposed_grouped_matmul", transposed, reference=_reference)
"""The torch op behind `transposed_grouped_matmul`."""

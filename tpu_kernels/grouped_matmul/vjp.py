"""Grouped matmul as a differentiable JAX function: which implementation, with which tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bridge.chips import chip
from bridge.interpretation import target_chip
from tpu_kernels import _select
from tpu_kernels._select import Implementation
from tpu_kernels._vmem import vmem_allowed
from tpu_kernels.grouped_matmul import fused, space, visits
from tpu_kernels.grouped_matmul.epilogue import Activation
from tpu_kernels.grouped_matmul.operands import Operands, is_quantized, result_dtype
from tpu_kernels.grouped_matmul.product import Static
from tpu_kernels.grouped_matmul.reference import grouped_matmul_reference
from tpu_kernels.grouped_matmul.tiling import GroupedTiling


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: jnp.dtype | None = None,
    tiling: GroupedTiling | None = None,
    impl: Implementation = "auto",
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
    """The product of each group's rows with its matrix; see `reference.grouped_matmul_reference`.

    Args:
        tiling: tile sizes of the kernels; by default chosen for the shape.
        impl: `pallas` (the kernels), `reference`, or `auto`.

    Raises:
        ValueError: the chosen implementation cannot compute this, with the reasons.
    """
    out_dtype = result_dtype(lhs.dtype, rhs.dtype, preferred_element_type)
    arrays = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": group_sizes,
        "up": up,
        "bias": bias,
        "lhs_scale": lhs_scale,
        "rhs_scale": rhs_scale,
        "existing_out": existing_out,
    }
    given = {name: array for name, array in arrays.items() if array is not None}
    quantized = [name for name, array in given.items() if is_quantized(array.dtype)]
    problem = space.problem_of(
        _select.describe(**given),
        transpose_rhs=transpose_rhs,
        gated=gated,
        activation=activation,
        out_dtype=str(out_dtype),
    )
    chosen = _select.select(
        problem,
        impl,
        tiling,
        unsupported_reasons=space.unsupported_reasons,
        illegal_reasons=space.illegal_reasons,
        default_tiling=space.default_tiling,
        integers=("group_sizes", *quantized),
    )
    if chosen is None or 0 in (*lhs.shape, *rhs.shape):  # no elements: no block to launch a kernel on
        return grouped_matmul_reference(
            lhs,
            rhs,
            group_sizes,
            group_offset,
            transpose_rhs,
            out_dtype,
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
    offset = None if group_offset is None else group_offset.reshape(()).astype(jnp.int32)
    starts, ends = visits.row_ranges(group_sizes.astype(jnp.int32), lhs.shape[0], rhs.shape[0], offset)
    operands = Operands(
        lhs=lhs,
        rhs=(rhs,) if up is None else (rhs, up),
        lhs_scale=None if lhs_scale is None else _rows(lhs_scale),
        rhs_scale=_columns(rhs_scale, up_scale, gated),
        bias=_columns(bias, up_bias, gated),
        existing=existing_out,
    )
    static = Static(
        chosen.output, chosen.dlhs, chosen.drhs, transpose_rhs, out_dtype, vmem_allowed(chip(target_chip()))
    )
    return fused.grouped(
        fused.Fused(static, gated, activation, _plain_dtype(lhs.dtype, rhs.dtype, out_dtype)),
        operands,
        starts,
        ends,
    )


def _plain_dtype(lhs: jnp.dtype, rhs: jnp.dtype, out_dtype: jnp.dtype) -> jnp.dtype:
    """What gradients of quantised operands are computed in."""
    plain = [dtype for dtype in (lhs, rhs) if not is_quantized(dtype)]
    return jnp.dtype(plain[0]) if plain else out_dtype


def _rows(scale: jax.Array) -> jax.Array:
    """Factors [M] or [M, B] as [M, B]."""
    scale = scale.astype(jnp.float32)
    return scale[:, None] if scale.ndim == 1 else scale


def _columns(first: jax.Array | None, second: jax.Array | None, gated: bool) -> tuple[jax.Array, ...]:
    """Factors [G, N] or [G, B, N], or a bias [G, N], of each matrix as [G, B, N]."""
    given = [array.astype(jnp.float32) for array in (first, second) if array is not None]
    given = [array[:, None] if array.ndim == 2 else array for array in given]
    return tuple(jnp.split(given[0], 2, axis=2)) if gated and given else tuple(given)

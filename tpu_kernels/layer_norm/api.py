"""Layer norm for torch: the public function and its op."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from bridge import jax_op
from tpu_kernels._checks import check_eps, check_floating, check_normalized_shape
from tpu_kernels._rows import RowTiling
from tpu_kernels._select import Implementation
from tpu_kernels.layer_norm import vjp
from tpu_kernels.layer_norm.reference import layer_norm_reference


def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    impl: Implementation = "auto",
    tiling: RowTiling | None = None,
) -> torch.Tensor:
    """`(input - mean) / sqrt(variance + eps) * weight + bias`, over the last dimensions `normalized_shape`.

    Takes the arguments of `torch.nn.functional.layer_norm` and means the same. Differentiable, also twice.
    More dtypes can be mixed than in torch.

    Args:
        input: [..., *normalized_shape], float16, bfloat16, float32 or float64, on `tpu` or `cpu`.
        normalized_shape: the last dimensions of `input`, or its last dimension as an int.
        weight: [*normalized_shape], any of these dtypes, or None for ones.
        bias: [*normalized_shape], any of these dtypes, or None for zeros.
        eps: added to the variance, which is that of the values themselves (divided by their number).
        impl: `pallas` is the TPU kernel: float32 and bfloat16, rows that fit VMEM. `reference` is plain JAX.
            `auto` is the kernel wherever it can compute this, and the reference elsewhere.
        tiling: tile sizes of the kernel, `tpu_kernels.RowTiling(tile_rows=...)`. None chooses for the shape.

    Returns:
        [..., *normalized_shape] in the dtype of `input`, contiguous. The arithmetic is float32, or float64
        if an argument is.

    Raises:
        TypeError: a dtype or argument type other than these.
        RuntimeError: shapes that don't belong together.
        ValueError: `impl` or `tiling` cannot compute this; the message says why.
    """
    check_floating("layer_norm", input=input, weight=weight, bias=bias)
    shape = check_normalized_shape("layer_norm", input, normalized_shape, weight=weight, bias=bias)
    if len(shape) > 1:
        input = input.flatten(-len(shape))
        weight = None if weight is None else weight.flatten()
        bias = None if bias is None else bias.flatten()
    output = op(input, weight, bias, check_eps("layer_norm", eps), tiling, impl)
    return output.unflatten(-1, shape) if len(shape) > 1 else output


def _reference(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
    tiling: RowTiling | None,
    impl: Implementation,
) -> jax.Array:
    del tiling, impl
    return layer_norm_reference(x, weight, bias, eps)


op = jax_op("tpu_kernels::layer_norm", vjp.layer_norm, reference=_reference)
"""The torch op behind `layer_norm`: `x` is normalised over its last dimension only."""

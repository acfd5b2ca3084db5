"""Layer norm as a differentiable JAX function, any number of leading dimensions.

The gradient is a kernel of its own. It is computed from the arguments alone, so nothing but they is kept
between forward and backward, and the gradient is itself a function with a gradient: that of the reference.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from autotune.problem import Problem
from tpu_kernels._rows import RowTiling, as_rows
from tpu_kernels._select import Implementation, describe, select
from tpu_kernels.layer_norm import kernel, space
from tpu_kernels.layer_norm.reference import layer_norm_reference


def layer_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
    tiling: RowTiling | None = None,
    impl: Implementation = "auto",
) -> jax.Array:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, mean and variance over the last dimension.

    Args:
        x: [..., cols], floating.
        weight: [cols], floating, or None for ones.
        bias: [cols], floating, or None for zeros.
        eps: added to the variance, which is that of the row (divided by cols).
        tiling: rows per block of the kernel, forward and backward; by default chosen for the shape.
        impl: `pallas` (float32 and bfloat16), `reference`, or `auto`.

    Returns:
        [..., cols] in the dtype of `x`; computed in float32, or in float64 if an argument is.

    Raises:
        ValueError: the chosen implementation cannot compute this, with the reasons.
    """
    chosen = select(
        Problem.of("layer_norm", describe(x=x, weight=weight, bias=bias), {"eps": eps}),
        impl,
        tiling,
        unsupported_reasons=space.unsupported_reasons,
        illegal_reasons=space.illegal_reasons,
        default_tiling=space.default_tiling,
    )
    # No elements: there is no block to launch a kernel on.
    return _layer_norm(x, weight, bias, eps, chosen if x.size else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _layer_norm(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float, tiling: RowTiling | None
) -> jax.Array:
    if tiling is None:
        return layer_norm_reference(x, weight, bias, eps)
    return kernel.forward(as_rows(x), weight, bias, eps=eps, tiling=tiling).reshape(x.shape)


def _keep_arguments(x, weight, bias, eps, tiling):
    return _layer_norm(x, weight, bias, eps, tiling), (x, weight, bias)


def _pull_back(eps, tiling, arguments, g) -> Any:
    return _layer_norm_gradient(*arguments, g, eps, tiling)


_layer_norm.defvjp(_keep_arguments, _pull_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _layer_norm_gradient(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    g: jax.Array,
    eps: float,
    tiling: RowTiling | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Gradients of x, weight and bias for the cotangent `g`."""
    if tiling is None:
        return _reference_gradient(eps, x, weight, bias, g)
    dx, dweight, dbias = kernel.backward(as_rows(x), weight, bias, as_rows(g), eps=eps, tiling=tiling)
    return dx.reshape(x.shape), dweight, dbias


def _keep_gradient_arguments(x, weight, bias, g, eps, tiling):
    return _layer_norm_gradient(x, weight, bias, g, eps, tiling), (x, weight, bias, g)


def _pull_back_gradient(eps, tiling, arguments, cotangents):
    del tiling
    _, pull_back = jax.vjp(functools.partial(_reference_gradient, eps), *arguments)
    return pull_back(cotangents)


_layer_norm_gradient.defvjp(_keep_gradient_arguments, _pull_back_gradient)


def _reference_gradient(eps, x, weight, bias, g):
    def forward(x, weight, bias):
        return layer_norm_reference(x, weight, bias, eps)

    _, pull_back = jax.vjp(forward, x, weight, bias)
    return pull_back(g)

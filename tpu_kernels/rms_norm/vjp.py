"""RMS norm as a differentiable JAX function, any number of leading dimensions.

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
from tpu_kernels.rms_norm import kernel, space
from tpu_kernels.rms_norm.reference import rms_norm_reference


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None,
    eps: float,
    tiling: RowTiling | None = None,
    impl: Implementation = "auto",
) -> jax.Array:
    """`x / sqrt(mean(x², over the last dimension) + eps) * weight`.

    Args:
        x: [..., cols], floating.
        weight: [cols], floating, or None for ones.
        eps: added to the mean square.
        tiling: rows per block of the kernel, forward and backward; by default chosen for the shape.
        impl: `pallas` (float32 and bfloat16), `reference`, or `auto`.

    Returns:
        [..., cols] in the dtype of `x`; computed in float32, or in float64 if an argument is.

    Raises:
        ValueError: the chosen implementation cannot compute this, with the reasons.
    """
    chosen = select(
        Problem.of("rms_norm", describe(x=x, weight=weight), {"eps": eps}),
        impl,
        tiling,
        unsupported_reasons=space.unsupported_reasons,
        illegal_reasons=space.illegal_reasons,
        default_tiling=space.default_tiling,
    )
    # No elements: there is no block to launch a kernel on.
    return _rms_norm(x, weight, eps, chosen if x.size else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x: jax.Array, weight: jax.Array | None, eps: float, tiling: RowTiling | None) -> jax.Array:
    if tiling is None:
        return rms_norm_reference(x, weight, eps)
    return kernel.forward(as_rows(x), weight, eps=eps, tiling=tiling).reshape(x.shape)


def _keep_arguments(x, weight, eps, tiling):
    return _rms_norm(x, weight, eps, tiling), (x, weight)


def _pull_back(eps, tiling, arguments, g) -> Any:
    return _rms_norm_gradient(*arguments, g, eps, tiling)


_rms_norm.defvjp(_keep_arguments, _pull_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rms_norm_gradient(
    x: jax.Array, weight: jax.Array | None, g: jax.Array, eps: float, tiling: RowTiling | None
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of x and weight for the cotangent `g`."""
    if tiling is None:
        return _reference_gradient(eps, x, weight, g)
    dx, dweight = kernel.backward(as_rows(x), weight, as_rows(g), eps=eps, tiling=tiling)
    return dx.reshape(x.shape), dweight


def _keep_gradient_arguments(x, weight, g, eps, tiling):
    return _rms_norm_gradient(x, weight, g, eps, tiling), (x, weight, g)


def _pull_back_gradient(eps, tiling, arguments, cotangents):
    del tiling
    _, pull_back = jax.vjp(functools.partial(_reference_gradient, eps), *arguments)
    return pull_back(cotangents)


_rms_norm_gradient.defvjp(_keep_gradient_arguments, _pull_back_gradient)


def _reference_gradient(eps, x, weight, g):
    _, pull_back = jax.vjp(lambda x, weight: rms_norm_reference(x, weight, eps), x, weight)
    return pull_back(g)

"""Grouped matmul with all that is fused to it, as a differentiable JAX function.

Derivatives are made of the product alone (`product`): the sums before the activation are kept by the forward
kernel, the activation's derivative is elementwise, and the two products behind it are grouped matmuls again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tpu_kernels.grouped_matmul import epilogue, kernel, visits
from tpu_kernels.grouped_matmul.epilogue import Activation
from tpu_kernels.grouped_matmul.operands import Operands, dequantized, is_quantized
from tpu_kernels.grouped_matmul.product import (
    Static,
    no_gradient,
    product,
    summed,
    swapped,
    with_rows_swapped,
)


@dataclass(frozen=True)
class Fused:
    """All that is no array.

    Attributes:
        product: of the products; its `out_dtype` is that of the result.
        gated: whether one array has both matrices of each group.
        activation: of the sums.
        dtype: in which gradients of quantised operands are computed.
    """

    product: Static
    gated: bool
    activation: Activation | None
    dtype: jnp.dtype

    @property
    def is_linear(self) -> bool:
        """Whether the result is the product, with a bias at most."""
        return self.activation is None and not self.gated


def grouped(static: Fused, operands: Operands[jax.Array], starts: jax.Array, ends: jax.Array) -> jax.Array:
    """The result for operands as the kernel takes them, differentiable in all that are floating."""
    if any(is_quantized(array.dtype) for array in (operands.lhs, *operands.rhs)):
        return _quantized(static, operands, starts, ends)
    if static.is_linear and len(operands.rhs) == 1 and not operands.bias and operands.existing is None:
        return product(static.product, operands.lhs, operands.rhs[0], starts, ends)
    return _fused(static, operands, starts, ends)


def _launch(static: Fused, operands: Operands[jax.Array], starts, ends, save: bool) -> tuple[jax.Array, ...]:
    (m, k), transposed = operands.lhs.shape, static.product.transpose_rhs
    tiles = static.product.tiles
    tile_m = tiles.clipped(m, k, kernel.columns(operands.rhs, transposed, static.gated)).tile_m
    return kernel.forward(
        operands,
        visits.of_all_rows(starts, ends, m, tile_m),
        transpose_rhs=transposed,
        gated=static.gated,
        activation=static.activation,
        save=save,
        tiles=tiles,
        out_dtype=static.product.out_dtype,
        vmem_limit_bytes=static.product.vmem_limit_bytes,
    )


# With bias, activation, gate, and what is added ---------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(static: Fused, operands: Operands[jax.Array], starts: jax.Array, ends: jax.Array) -> jax.Array:
    return _launch(static, operands, starts, ends, save=False)[0]


def _fused_forward(static, operands, starts, ends):
    if static.is_linear and len(operands.rhs) == 1:
        return _fused(static, operands, starts, ends), (operands, (), starts, ends)
    results: Any = _saving(static, operands, starts, ends)
    result, *sums = results
    return result, (operands, tuple(sums), starts, ends)


def _fused_backward(static, kept, cotangent):
    operands, sums, starts, ends = kept
    of_sums = _of_sums(static, sums, cotangent) if sums else (cotangent,)
    gradients = _of_operands(static, operands, of_sums, starts, ends)
    return _with_existing(gradients, operands, cotangent), no_gradient(starts), no_gradient(ends)


_fused.defvjp(_fused_forward, _fused_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _saving(
    static: Fused, operands: Operands[jax.Array], starts: jax.Array, ends: jax.Array
) -> tuple[jax.Array, ...]:
    """The result, and the sums that the activation is computed of."""
    return _launch(static, operands, starts, ends, save=True)


def _saving_forward(static, operands, starts, ends):
    results: Any = _saving(static, operands, starts, ends)
    return results, (operands, results[1:], starts, ends)


def _saving_backward(static, kept, cotangents):
    operands, sums, starts, ends = kept
    cotangent, *of_saved = cotangents
    of_sums = [
        a + b.astype(a.dtype) for a, b in zip(_of_sums(static, sums, cotangent), of_saved, strict=True)
    ]
    gradients = _of_operands(static, operands, of_sums, starts, ends)
    return _with_existing(gradients, operands, cotangent), no_gradient(starts), no_gradient(ends)


_saving.defvjp(_saving_forward, _saving_backward)


def _of_sums(static: Fused, sums, cotangent) -> tuple[jax.Array, ...]:
    """Gradients of the sums, float32."""
    wide = [total.astype(jnp.float32) for total in sums]
    _, pull_back = jax.vjp(lambda *sums: epilogue.applied(static.activation, sums), *wide)
    return pull_back(cotangent.astype(jnp.float32))


def _of_operands(static: Fused, operands: Operands[jax.Array], of_sums, starts, ends) -> Operands[jax.Array]:
    """Gradients of all operands but `existing`, from those of the sums."""
    lhs, plain = operands.lhs, static.product
    of_sums = [of.astype(lhs.dtype) for of in of_sums]  # what the matrix units multiply
    if static.gated:  # the two matrices are one, and so are their sums
        of_products = [jnp.concatenate(of_sums, axis=1)]
    else:
        of_products = of_sums
    of_rows = replace(plain, tiles=plain.dlhs, dlhs=plain.tiles, drhs=swapped(plain.drhs))
    of_rows = replace(of_rows, transpose_rhs=not plain.transpose_rhs)
    dlhs, drhs = None, []
    for number, (of, rhs) in enumerate(zip(of_products, operands.rhs, strict=True)):
        # What is not the last is added to: in float32, so that it is rounded once.
        last = number == len(of_products) - 1
        step = replace(of_rows, out_dtype=lhs.dtype if last else jnp.dtype(jnp.float32))
        dlhs = grouped(
            Fused(step, False, None, static.dtype), Operands(of, (rhs,), existing=dlhs), starts, ends
        )
        of_rhs = replace(
            plain, tiles=plain.drhs, dlhs=plain.dlhs, drhs=plain.tiles, out_dtype=jnp.dtype(rhs.dtype)
        )
        if plain.transpose_rhs:
            drhs.append(summed(with_rows_swapped(of_rhs), of, lhs, starts, ends))
        else:
            drhs.append(summed(of_rhs, lhs, of, starts, ends))
    assert dlhs is not None
    biases = [_of_bias(static, of, starts, ends) for of in of_sums] if operands.bias else []
    return Operands(dlhs, tuple(drhs), bias=tuple(biases))


def _of_bias(static: Fused, of_sum, starts, ends) -> jax.Array:
    """The sum over each group's rows, [G, 1, N]: a product with ones."""
    step = replace(static.product, tiles=static.product.drhs, out_dtype=jnp.dtype(jnp.float32))
    ones = jnp.ones((of_sum.shape[0], 1), of_sum.dtype)
    return summed(step, ones, of_sum, starts, ends)


def _with_existing(
    gradients: Operands[jax.Array], operands: Operands[jax.Array], cotangent
) -> Operands[jax.Array]:
    existing = operands.existing
    return gradients._replace(existing=None if existing is None else cotangent.astype(existing.dtype))


# Quantised ----------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(static: Fused, operands: Operands[jax.Array], starts: jax.Array, ends: jax.Array) -> jax.Array:
    return _launch(static, operands, starts, ends, save=False)[0]


def _quantized_forward(static, operands, starts, ends):
    return _quantized(static, operands, starts, ends), (operands, starts, ends)


def _quantized_backward(static, kept, cotangent):
    """By the same product of the numbers that the operands stand for. 8-bit numbers get none."""
    operands, starts, ends = kept

    def exact(operands):
        plain = dequantized_operands(operands, static.product.transpose_rhs, static.gated, static.dtype)
        return grouped(static, plain, starts, ends)

    _, pull_back = jax.vjp(exact, operands)
    (gradients,) = pull_back(cotangent)
    return gradients, no_gradient(starts), no_gradient(ends)


_quantized.defvjp(_quantized_forward, _quantized_backward)


def dequantized_operands(
    operands: Operands[jax.Array], transpose_rhs: bool, gated: bool, dtype: jnp.dtype
) -> Operands[jax.Array]:
    """The same with lhs and rhs as the numbers that they stand for, in `dtype`."""
    scales: tuple[jax.Array | None, ...] = operands.rhs_scale or (None,) * len(operands.rhs)
    if gated and operands.rhs_scale:
        scales = (jnp.concatenate(operands.rhs_scale, axis=2),)

    def matrices(values: jax.Array, scale: jax.Array | None) -> jax.Array:
        # Factors are [G, B, N]: transposed, so are they.
        scale = scale.mT if transpose_rhs and scale is not None else scale
        return dequantized(values, scale, 2 if transpose_rhs else 1, dtype)

    return operands._replace(
        lhs=dequantized(operands.lhs, operands.lhs_scale, 1, dtype),
        rhs=tuple(map(matrices, operands.rhs, scales)),
        lhs_scale=None,
        rhs_scale=(),
    )

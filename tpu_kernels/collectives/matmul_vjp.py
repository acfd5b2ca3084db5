"""Collectives that multiply, with gradients that are collectives again.

With G for `all_gather` and S for `reduce_scatter` along a dimension of rows, and v the matrix w or its
transpose:

    all_gather_matmul      y = G(x) v     dx = S(dy vᵀ), multiplied and added on the way    dv = G(x)ᵀ dy
    matmul_reduce_scatter  y = S(x v)     dx = G(dy) vᵀ, multiplied as it comes             dv = xᵀ G(dy)

G(x) is gathered again for the gradient of v rather than kept; G(dy) travels once for both.

For use inside `jax.shard_map(..., check_vma=False)`. All ranks along the axis make the same calls.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tpu_kernels.collectives import kernel, vjp
from tpu_kernels.collectives.kernel import joined, split
from tpu_kernels.collectives.links import Line
from tpu_kernels.collectives.matmul_gather import gather_multiply
from tpu_kernels.collectives.matmul_scatter import multiply_scatter
from tpu_kernels.collectives.products import MatmulTiling
from tpu_kernels.grouped_matmul.kernel import precision

DTYPES = ("float32", "bfloat16")
"""Of matrices that are multiplied."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    axis_name: str,
    size: int,
    dim: int = 0,
    transpose_w: bool = False,
    tiling: MatmulTiling | None = None,
) -> jax.Array:
    """The rows of all ranks along an axis, times this rank's matrix.

    Args:
        x: [..., m, ..., k], m along `dim`; float32 or bfloat16.
        w: [k, n], or [n, k] with `transpose_w`, of the same dtype; each rank's own.
        axis_name: of the mesh.
        size: ranks along it.
        dim: which dimension of rows to put them behind each other in; not negative, and not the last one.
        transpose_w: whether `w` is transposed first, which is free.
        tiling: what is multiplied at a time; None chooses for the shape.

    Returns:
        [..., size * m, ..., n] in the dtype of `x`; products are summed in float32.

    Raises:
        TypeError: other dtypes.
        ValueError: shapes that don't belong together.
    """
    return _gathered(x, w, axis_name, size, dim, transpose_w, tiling, keep=False)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    axis_name: str,
    size: int,
    dim: int = 0,
    transpose_w: bool = False,
    tiling: MatmulTiling | None = None,
) -> jax.Array:
    """The sum over the ranks along an axis of `x @ w`, of which each rank gets its rows.

    Args:
        x: [..., size * m, ..., k], size * m along `dim`. The others as for `all_gather_matmul`.

    Returns:
        [..., m, ..., n] in the dtype of `x`. Products and ranks are summed in float32, and rounded once.

    Raises:
        TypeError, ValueError: as `all_gather_matmul`; or a size along `dim` that the ranks can't divide.
    """
    check("matmul_reduce_scatter", x, w, dim, transpose_w, size)
    if size == 1 or not x.size or not w.size:
        return split(product(x, w, transpose_w), size, dim)[0]
    parts = split(x, size, dim)
    _, *shape, k = parts.shape
    rows = math.prod(shape)
    found = multiply_scatter(
        parts.reshape(size, rows, k), w, Line(axis_name, size), transpose_w=transpose_w, tiling=tiling
    )
    return found.reshape(*shape, found.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def all_gather_and_matmul(
    x: jax.Array,
    w: jax.Array,
    axis_name: str,
    size: int,
    dim: int = 0,
    transpose_w: bool = False,
    tiling: MatmulTiling | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`all_gather_matmul`, and what it has gathered: [..., size * m, ..., k]."""
    return _gathered(x, w, axis_name, size, dim, transpose_w, tiling, keep=True)


def product(x: jax.Array, w: jax.Array, transpose_w: bool) -> jax.Array:
    """`x @ w` in the dtype of `x`, summed in float32: what one rank computes by itself."""
    axis = 1 if transpose_w else 0
    return _dot(x, w, ((x.ndim - 1,), (axis,)))


def _gathered(
    x: jax.Array,
    w: jax.Array,
    axis_name: str,
    size: int,
    dim: int,
    transpose_w: bool,
    tiling: MatmulTiling | None,
    keep: bool,
) -> tuple[jax.Array, jax.Array]:
    check("all_gather_matmul", x, w, dim, transpose_w)
    if size == 1:
        return product(x, w, transpose_w), x
    if not x.size or not w.size:
        gathered = kernel.all_gather(x, axis_name, size, dim) if keep else jnp.concatenate([x] * size, dim)
        return product(gathered, w, transpose_w), gathered
    *shape, k = x.shape
    y, chunks = gather_multiply(
        x.reshape(math.prod(shape), k),
        w,
        Line(axis_name, size),
        transpose_w=transpose_w,
        keep=keep,
        tiling=tiling,
    )
    y = joined(y.reshape(size, *shape, y.shape[-1]), dim)
    return y, joined(chunks.reshape(size, *shape, k), dim) if keep else x


def _dot(x: jax.Array, y: jax.Array, contract: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    return jax.lax.dot_general(
        x, y, (contract, ((), ())), precision=precision(x.dtype), preferred_element_type=jnp.float32
    ).astype(x.dtype)


def _of_matrix(x: jax.Array, dy: jax.Array, transpose_w: bool) -> jax.Array:
    """The gradient of `w`, all of whose rows are here: xᵀ dy, or its transpose."""
    rows = tuple(range(x.ndim - 1))
    return _dot(dy, x, (rows, rows)) if transpose_w else _dot(x, dy, (rows, rows))


def check(op: str, x: Any, w: Any, dim: int, transpose_w: bool, size: int = 1) -> None:
    """Raise for arrays that can't be multiplied, or rows that `size` ranks can't divide."""
    for name, array in (("x", x), ("w", w)):
        if array.dtype.name not in DTYPES:
            raise TypeError(f"{op}: {name} must be {' or '.join(DTYPES)}, got {array.dtype.name}")
    if x.dtype != w.dtype:
        raise TypeError(f"{op}: x and w must have the same dtype, got {x.dtype.name} and {w.dtype.name}")
    if w.ndim != 2 or x.ndim < 2 or x.shape[-1] != w.shape[1 if transpose_w else 0]:
        raise ValueError(
            f"{op}: x must be [..., k] with rows, and w {'[n, k]' if transpose_w else '[k, n]'}, got "
            f"{x.shape} and {w.shape}"
        )
    if not 0 <= dim < x.ndim - 1:
        raise ValueError(f"{op}: dim must be a dimension of rows, from 0 to {x.ndim - 2}, got {dim}")
    if x.shape[dim] % size:
        raise ValueError(
            f"{op}: the size of x along dimension {dim} must be a multiple of {size}, the ranks along the "
            f"axis, got shape {x.shape}; pad it with jnp.pad"
        )


# Gradients -----------------------------------------------------------------------------------------------

# What a gradient is not asked for is not computed, since no compiler drops a kernel with remote copies: a
# forward rule keeps of x and w what the wanted gradients need, and None of the other.


def _forward(collective: Any, x: Any, w: Any, *statics: Any) -> tuple[Any, tuple[Any, Any]]:
    kept = x.value if w.perturbed else None, w.value if x.perturbed else None
    return collective(x.value, w.value, *statics), kept


def _dense(g: Any) -> jax.Array:
    if not isinstance(g, SymbolicZero):
        return g
    zero: Any = g
    return jnp.zeros(zero.shape, zero.dtype)


def _all_gather_matmul_bwd(
    axis_name: str,
    size: int,
    dim: int,
    transpose_w: bool,
    tiling: MatmulTiling | None,
    kept: tuple[Any, Any],
    g: Any,
) -> tuple[Any, Any]:
    del tiling  # it is for other shapes
    (x, w), g = kept, _dense(g)
    dx = dw = None
    if w is not None:
        dx = matmul_reduce_scatter(g, w, axis_name, size, dim, not transpose_w)
    if x is not None:
        dw = _of_matrix(vjp.all_gather(x, axis_name, size, dim), g, transpose_w)
    return dx, dw


def _matmul_reduce_scatter_bwd(
    axis_name: str,
    size: int,
    dim: int,
    transpose_w: bool,
    tiling: MatmulTiling | None,
    kept: tuple[Any, Any],
    g: Any,
) -> tuple[Any, Any]:
    del tiling
    (x, w), g = kept, _dense(g)
    if x is None:
        return all_gather_matmul(g, w, axis_name, size, dim, not transpose_w), None
    if w is None:
        return None, _of_matrix(x, vjp.all_gather(g, axis_name, size, dim), transpose_w)
    both: Any = all_gather_and_matmul(g, w, axis_name, size, dim, not transpose_w)
    dx, gathered = both
    return dx, _of_matrix(x, gathered, transpose_w)


def _all_gather_and_matmul_bwd(
    axis_name: str,
    size: int,
    dim: int,
    transpose_w: bool,
    tiling: MatmulTiling | None,
    kept: tuple[Any, Any],
    g: tuple[Any, Any],
) -> tuple[Any, Any]:
    of_product, of_gathered = g
    dx = dw = None
    if not isinstance(of_product, SymbolicZero):
        dx, dw = _all_gather_matmul_bwd(axis_name, size, dim, transpose_w, tiling, kept, of_product)
    if not isinstance(of_gathered, SymbolicZero):
        scattered = vjp.reduce_scatter(of_gathered, axis_name, size, dim)
        dx = scattered if dx is None else dx + scattered
    return dx, dw


def _define(collective: Any, bwd: Any) -> None:
    collective.defvjp(functools.partial(_forward, collective), bwd, symbolic_zeros=True)


_define(all_gather_matmul, _all_gather_matmul_bwd)
_define(matmul_reduce_scatter, _matmul_reduce_scatter_bwd)
_define(all_gather_and_matmul, _all_gather_and_matmul_bwd)

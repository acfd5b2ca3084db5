"""Collectives for torch that multiply on the way, for tensor and sequence parallel layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from tpu_kernels.collectives import matmul_vjp, ops, reference
from tpu_kernels.collectives.matmul_vjp import DTYPES
from tpu_kernels.collectives.ops import AnyMesh, check_divides, dimension
from tpu_kernels.collectives.products import MatmulTiling


def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    mesh: AnyMesh,
    axis: str,
    dim: int = 0,
    *,
    transpose_w: bool = False,
    tiling: MatmulTiling | None = None,
) -> torch.Tensor:
    """`all_gather(x, mesh, axis, dim) @ w`: rows are multiplied while others are still on their way.

    With `x` divided along a sequence, and `w` the rank's columns of a matrix, that is the first half of a
    tensor and sequence parallel layer; `matmul_reduce_scatter` is the second.

    The gradients, with sums over the ranks of the axis: `dx` is the `matmul_reduce_scatter` of the cotangents
    and the transpose of `w`; `dw = all_gather(x).T @ dy` is the rank's own, for which `x` is gathered again.

    Args:
        x: [..., m, ..., k], m along `dim`: [s, b, k] with `dim=0`, or [b, s, k] with `dim=1`, or [m, k].
            float32 or bfloat16, of the same shape on all ranks.
        w: [k, n], of the dtype of `x`, each rank's own.
        mesh: from `bridge.get_pallas_mesh`, or a DeviceMesh with names. All of its ranks make the call.
        axis: which of the mesh's axes; ranks that differ in others have nothing to do with each other.
        dim: the dimension along which the ranks' rows lie behind each other; not the last one. Another one
            than the first costs a copy of the result, unless all dimensions before it are 1.
        transpose_w: whether `w` is [n, k], as `torch.nn.Linear` has it, which costs nothing.
        tiling: what the kernel has in VMEM at a time; None chooses for the shape. Gradients choose.

    Returns:
        [..., ranks * m, ..., n], in the dtype of `x`. Products are summed in float32, and rounded once.

    Raises:
        TypeError: other dtypes, or arguments of other types.
        ValueError: shapes or devices that don't belong together; an axis that the mesh has not.
    """
    op, size, dim = _prepared("all_gather_matmul", x, w, mesh, axis, dim, transpose_w, tiling)
    if not (x.numel() and w.numel()):  # nothing, or sums of nothing: every rank can make that itself
        return torch.cat([x] * size, dim) @ (w.T if transpose_w else w)
    return op(x, w, dim, bool(transpose_w), _static(tiling))


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    mesh: AnyMesh,
    axis: str,
    dim: int = 0,
    *,
    transpose_w: bool = False,
    tiling: MatmulTiling | None = None,
) -> torch.Tensor:
    """`reduce_scatter(x @ w, mesh, axis, dim)`: sums travel while other rows are multiplied.

    The gradients, with G the `all_gather` of the ranks' cotangents along `dim`: `dx = G @ w.T`, multiplied
    while G comes in, and `dw = x.T @ G`.

    Args:
        x: [..., ranks * m, ..., k], ranks * m along `dim`. The others as for `all_gather_matmul`.
        w: [k, n], or [n, k] with `transpose_w`; each rank's own, usually its rows of a matrix.

    Returns:
        [..., m, ..., n], in the dtype of `x`. Products and ranks are summed in float32, and rounded once.

    Raises:
        TypeError, ValueError: as `all_gather_matmul`; or a size along `dim` that the ranks can't divide.
    """
    op, size, dim = _prepared("matmul_reduce_scatter", x, w, mesh, axis, dim, transpose_w, tiling)
    check_divides("matmul_reduce_scatter", x, "dim", dim, size, axis)
    if not (x.numel() and w.numel()):
        return x.narrow(dim, 0, x.shape[dim] // size) @ (w.T if transpose_w else w)
    return op(x, w, dim, bool(transpose_w), _static(tiling))


def _form(local: ops.Local) -> Callable[..., jax.Array]:
    def multiplied(
        x: jax.Array, w: jax.Array, dim: int, transpose_w: bool, tiling: MatmulTiling | None
    ) -> jax.Array:
        return local(x, w, statics=(dim, transpose_w, tiling))

    return multiplied


ops.define("all_gather_matmul", matmul_vjp.all_gather_matmul, reference.all_gather_matmul_reference, _form)
ops.define(
    "matmul_reduce_scatter",
    matmul_vjp.matmul_reduce_scatter,
    reference.matmul_reduce_scatter_reference,
    _form,
)


def _prepared(
    kind: str,
    x: torch.Tensor,
    w: torch.Tensor,
    mesh: AnyMesh,
    axis: str,
    dim: int,
    transpose_w: bool,
    tiling: Any,
) -> tuple[Callable[..., torch.Tensor], int, int]:
    """The op, how many ranks the axis has, and `dim` counted from the first dimension."""
    ops.check_tensor(kind, "x", x, DTYPES)
    ops.check_tensor(kind, "w", w, DTYPES)
    if x.dtype != w.dtype:
        raise TypeError(f"{kind}: x and w must have the same dtype, got {x.dtype} and {w.dtype}; convert one")
    if x.device != w.device:
        raise ValueError(f"{kind}: x and w must be on one device, got {x.device} and {w.device}")
    if tiling is not None and not isinstance(tiling, MatmulTiling):
        raise TypeError(f"{kind}: tiling must be a MatmulTiling or None, got {type(tiling).__name__}")
    op, size = ops.prepared(kind, mesh, axis)
    if x.dim() < 2 or w.dim() != 2 or x.shape[-1] != w.shape[1 if transpose_w else 0]:
        raise ValueError(
            f"{kind}: x must be [..., m, k] and w {'[n, k]' if transpose_w else '[k, n]'}, got "
            f"{list(x.shape)} and {list(w.shape)}; transpose_w=True takes a w of [n, k]"
        )
    dim = dimension(kind, x, "dim", dim)
    if dim == x.dim() - 1:
        raise ValueError(
            f"{kind}: dim must be a dimension of rows, from 0 to {x.dim() - 2}, got {dim}, the one that is "
            f"summed over"
        )
    return op, size, dim


def _static(tiling: MatmulTiling | None) -> Any:
    """The tiling as the op takes it. torch.compile sees the op below `JaxOp`, which takes text."""
    if tiling is None or not torch.compiler.is_compiling():
        return tiling
    return repr([tiling.tile_m, tiling.tile_k, tiling.tile_n])

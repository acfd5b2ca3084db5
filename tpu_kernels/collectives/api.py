"""Collectives for torch: the functions that move and add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import torch

from tpu_kernels.collectives import ops, reference, vjp
from tpu_kernels.collectives.kernel import DTYPES
from tpu_kernels.collectives.ops import AnyMesh as AnyMesh
from tpu_kernels.collectives.ops import check_divides, dimension

_Kind: TypeAlias = Literal["all_gather", "reduce_scatter", "all_to_all", "ppermute", "halo_exchange"]


def all_gather(x: torch.Tensor, mesh: AnyMesh, axis: str, dim: int = 0) -> torch.Tensor:
    """The tensors of all ranks along an axis of a mesh, one behind the other, on each of them.

    The gradient is the `reduce_scatter` of the ranks' cotangents.

    Args:
        x: [..., n, ...], n along `dim`; float32, bfloat16 or int32, of the same shape on all ranks.
        mesh: from `bridge.get_pallas_mesh`, or a DeviceMesh with names. All of its ranks make the call.
        axis: which of the mesh's axes; ranks that differ in others have nothing to do with each other.
        dim: the dimension along which the tensors lie behind each other.

    Returns:
        [..., ranks * n, ...], on the device of `x`.

    Raises:
        TypeError: another dtype, or arguments of other types.
        ValueError: an axis that the mesh has not, or a dimension that `x` has not.
    """
    op, size = _prepared("all_gather", x, mesh, axis)
    dim = dimension("all_gather", x, "dim", dim)
    if not x.numel():  # here and below: a result that every rank can make itself
        return torch.cat([x] * size, dim)
    return op(x, dim)


def reduce_scatter(x: torch.Tensor, mesh: AnyMesh, axis: str, dim: int = 0) -> torch.Tensor:
    """The sum of the tensors of all ranks along an axis, of which each rank gets its part.

    The gradient is the `all_gather` of the ranks' cotangents.

    Args:
        x: [..., ranks * n, ...]; the other arguments as for `all_gather`.
        dim: the dimension along which the parts lie behind each other.

    Returns:
        [..., n, ...]. Floating numbers are added in float32, and rounded once to the dtype of `x`.

    Raises:
        TypeError, ValueError: as `all_gather`; or a size along `dim` that can't be divided by the ranks.
    """
    op, size = _prepared("reduce_scatter", x, mesh, axis)
    dim = dimension("reduce_scatter", x, "dim", dim)
    check_divides("reduce_scatter", x, "dim", dim, size, axis)
    if not x.numel():
        return x.narrow(dim, 0, x.shape[dim] // size).clone()
    return op(x, dim)


def all_to_all(
    x: torch.Tensor, mesh: AnyMesh, axis: str, split_dim: int = 0, concat_dim: int = 0
) -> torch.Tensor:
    """Each rank along an axis gives every rank one part of its tensor, and gets one from each.

    The gradient is the `all_to_all` back, with `split_dim` and `concat_dim` exchanged.

    Args:
        x: [..., ranks * n, ..., m, ...]; the other arguments as for `all_gather`.
        split_dim: the dimension along which the parts lie in `x`, in the order of ranks.
        concat_dim: the dimension along which they lie in the result.

    Returns:
        [..., n, ..., ranks * m, ...]; of the shape of `x` if both dimensions are the same.

    Raises:
        TypeError, ValueError: as `all_gather`; or a size along `split_dim` that the ranks can't divide.
    """
    op, size = _prepared("all_to_all", x, mesh, axis)
    split_dim = dimension("all_to_all", x, "split_dim", split_dim)
    concat_dim = dimension("all_to_all", x, "concat_dim", concat_dim)
    check_divides("all_to_all", x, "split_dim", split_dim, size, axis)
    if not x.numel():
        return torch.cat([x.narrow(split_dim, 0, x.shape[split_dim] // size)] * size, concat_dim)
    return op(x, split_dim, concat_dim)


def ppermute(x: torch.Tensor, mesh: AnyMesh, axis: str, shift: int = 1) -> torch.Tensor:
    """The tensor of the rank `shift` places before this one, around the ring of an axis.

    The gradient goes back by `-shift`.

    Args:
        x: any shape; the other arguments as for `all_gather`.
        shift: any number, also negative. By a multiple of the number of ranks nothing moves.

    Returns:
        The shape of `x`. It is a copy where nothing moves, too.

    Raises:
        TypeError, ValueError: as `all_gather`.
    """
    op, size = _prepared("ppermute", x, mesh, axis)
    if isinstance(shift, bool) or not isinstance(shift, int):
        raise TypeError(f"ppermute: shift must be an int, got {shift!r}")
    if not x.numel():
        return x.clone()
    if x.dim() == 0:  # the bridge divides arrays along a dimension
        return op(x[None], shift % size)[0]
    return op(x, shift % size)


def halo_exchange(
    x: torch.Tensor,
    mesh: AnyMesh,
    axis: str,
    before: int,
    after: int,
    dim: int = 0,
    *,
    wrap: bool = False,
) -> torch.Tensor:
    """A rank's rows, between the last rows of the rank before it and the first rows of the rank after it.

    The gradient of a row is that of all its copies.

    Args:
        x: [..., n, ...], n along `dim`; the other arguments as for `all_gather`.
        before, after: how many rows to get from either side, n at most.
        wrap: whether the first and the last rank along the axis are neighbours; else they get zeros.

    Returns:
        [..., before + n + after, ...].

    Raises:
        TypeError, ValueError: as `all_gather`; or `before` or `after` is negative, or larger than n.
    """
    op, _ = _prepared("halo_exchange", x, mesh, axis)
    dim = dimension("halo_exchange", x, "dim", dim)
    for name, rows in (("before", before), ("after", after)):
        if isinstance(rows, bool) or not isinstance(rows, int):
            raise TypeError(f"halo_exchange: {name} must be an int, got {rows!r}")
        if not 0 <= rows <= x.shape[dim]:
            raise ValueError(
                f"halo_exchange: {name} must be from 0 to {x.shape[dim]}, the size of x along dim={dim}: "
                f"only neighbours exchange rows; got {rows}"
            )
    if not x.numel():
        shape = list(x.shape)
        shape[dim] += before + after
        return x.new_zeros(shape)
    return op(x, before, after, dim, bool(wrap))


# Ops ---------------------------------------------------------------------------------------------------


def _along(local: ops.Local) -> Callable[..., jax.Array]:
    def along(x: jax.Array, dim: int) -> jax.Array:
        return local(x, statics=(dim,))

    return along


def _across(local: ops.Local) -> Callable[..., jax.Array]:
    def across(x: jax.Array, split_dim: int, concat_dim: int) -> jax.Array:
        return local(x, statics=(split_dim, concat_dim))

    return across


def _around(local: ops.Local) -> Callable[..., jax.Array]:
    def around(x: jax.Array, shift: int) -> jax.Array:
        return local(x, statics=(shift,))

    return around


def _beside(local: ops.Local) -> Callable[..., jax.Array]:
    def beside(x: jax.Array, before: int, after: int, dim: int, wrap: bool) -> jax.Array:
        return local(x, statics=(before, after, dim, wrap))

    return beside


ops.define("all_gather", vjp.all_gather, reference.all_gather_reference, _along)
ops.define("reduce_scatter", vjp.reduce_scatter, reference.reduce_scatter_reference, _along)
ops.define("all_to_all", vjp.all_to_all, reference.all_to_all_reference, _across)
ops.define("ppermute", vjp.ppermute, reference.ppermute_reference, _around)
ops.define("halo_exchange", vjp.halo_exchange, reference.halo_exchange_reference, _beside)


def _prepared(
    kind: _Kind, x: torch.Tensor, mesh: AnyMesh, axis: str
) -> tuple[Callable[..., torch.Tensor], int]:
    """The op, and how many ranks the axis has."""
    ops.check_tensor(kind, "x", x, DTYPES)
    return ops.prepared(kind, mesh, axis)

"""Collectives for torch: public functions, and an op for each mesh and axis."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import jax
import torch
from jax.sharding import Mesh, PartitionSpec

from bridge import JaxOp, jax_op
from bridge.device import tracing
from bridge.ranks.mesh import mesh_of_device_mesh, ranks_of
from tpu_kernels.collectives import reference, vjp
from tpu_kernels.collectives.kernel import DTYPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AnyMesh: TypeAlias = "Mesh | DeviceMesh"
"""From `bridge.get_pallas_mesh`, or a torch DeviceMesh with names."""
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
    dim = _dimension("all_gather", x, "dim", dim)
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
    dim = _dimension("reduce_scatter", x, "dim", dim)
    _check_divides("reduce_scatter", x, "dim", dim, size, axis)
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
    split_dim = _dimension("all_to_all", x, "split_dim", split_dim)
    concat_dim = _dimension("all_to_all", x, "concat_dim", concat_dim)
    _check_divides("all_to_all", x, "split_dim", split_dim, size, axis)
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
    dim = _dimension("halo_exchange", x, "dim", dim)
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


_making = threading.Lock()
_names: dict[tuple[_Kind, Mesh, str], str] = {}
_ops: dict[str, JaxOp] = {}


def _name(kind: _Kind, mesh: Mesh, axis: str) -> str:
    """Of the op of a collective along an axis: one for all calls, and for all ranks that are threads."""
    key = kind, mesh, axis
    with _making:
        if key not in _names:
            name = f"{kind}_{_digest(mesh, axis)}"
            _ops[name] = _make_op(name, kind, mesh, axis)
            _names[key] = name
        return _names[key]


def _make_op(name: str, kind: _Kind, mesh: Mesh, axis: str) -> JaxOp:
    # All axes divide the first dimension: each rank has its own part of an array that is as large as all of
    # their tensors together. So no rank has what another one has, and cotangents are each rank's own as well.
    own = PartitionSpec(mesh.axis_names)
    size = mesh.shape[axis]

    def local(fn: Callable[..., jax.Array], x: jax.Array, *statics: int) -> jax.Array:
        def each(x: jax.Array) -> jax.Array:
            return fn(x, axis, size, *statics)

        return jax.shard_map(each, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)(x)

    def moved(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def along(x: jax.Array, dim: int) -> jax.Array:
            return local(fn, x, dim)

        def across(x: jax.Array, split_dim: int, concat_dim: int) -> jax.Array:
            return local(fn, x, split_dim, concat_dim)

        def around(x: jax.Array, shift: int) -> jax.Array:
            return local(fn, x, shift)

        def beside(x: jax.Array, before: int, after: int, dim: int, wrap: bool) -> jax.Array:
            return local(fn, x, before, after, dim, wrap)

        return {"all_to_all": across, "ppermute": around, "halo_exchange": beside}.get(kind, along)

    return jax_op(
        f"tpu_kernels::{name}",
        moved(getattr(vjp, kind)),
        mesh=mesh,
        input_partition_specs=own,
        output_partition_specs=own,
        reference=moved(getattr(reference, f"{kind}_reference")),
    )


def _digest(mesh: Mesh, axis: str) -> str:
    """A name for a mesh and one of its axes, the same in each process."""
    kinds = sorted({str(d.device_kind) for d in mesh.devices.flat})
    text = repr((mesh.axis_names, mesh.devices.shape, ranks_of(mesh), mesh.axis_types, kinds, axis))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Checks ------------------------------------------------------------------------------------------------


def _prepared(
    kind: _Kind, x: torch.Tensor, mesh: AnyMesh, axis: str
) -> tuple[Callable[..., torch.Tensor], int]:
    """The op, and how many ranks the axis has."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{kind}: x must be a torch.Tensor, got {type(x).__name__}")
    if hasattr(x, "device_mesh"):
        raise TypeError(f"{kind}: x must be a rank's own tensor, got a DTensor; pass x.to_local()")
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"{kind}: x must be {', '.join(DTYPES)}, got {name}; convert it first")
    name, size = _found(kind, mesh, axis)
    if torch.compiler.is_compiling():  # torch.compile would look for a new op in the old `_ops`
        return getattr(torch.ops.tpu_kernels, name), size
    return _ops[name], size


@tracing.constant
def _found(kind: _Kind, mesh: AnyMesh, axis: str) -> tuple[str, int]:
    """The op's name, and how many ranks the axis has. To torch.compile, a mesh is a constant of the graph."""
    if not isinstance(mesh, Mesh):
        if not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(
                f"{kind}: mesh must be from bridge.get_pallas_mesh, or a DeviceMesh, got "
                f"{type(mesh).__name__}"
            )
        mesh = mesh_of_device_mesh(mesh)
    if axis not in mesh.axis_names:
        raise ValueError(
            f"{kind}: axis must be one of the mesh's axes, {', '.join(map(repr, mesh.axis_names))}, got "
            f"{axis!r}"
        )
    return _name(kind, mesh, axis), mesh.shape[axis]


def _dimension(kind: _Kind, x: torch.Tensor, name: str, dim: int) -> int:
    """Counted from the first one."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{kind}: {name} must be an int, got {dim!r}")
    if x.dim() == 0:
        raise ValueError(f"{kind}: x must have a dimension, got a number; pass x[None]")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{kind}: {name} must be from {-x.dim()} to {x.dim() - 1}, as x has shape {list(x.shape)}, got "
            f"{dim}"
        )
    return dim % x.dim()


def _check_divides(kind: _Kind, x: torch.Tensor, name: str, dim: int, size: int, axis: str) -> None:
    if x.shape[dim] % size:
        raise ValueError(
            f"{kind}: the size of x along {name}={dim} must be a multiple of {size}, the number of ranks "
            f"along {axis!r}, got shape {list(x.shape)}; pad it with torch.nn.functional.pad"
        )

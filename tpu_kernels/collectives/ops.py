"""Torch ops of collectives: one for each collective, mesh and axis; and checks that all of them share."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import torch
from jax.sharding import Mesh, PartitionSpec

from bridge import JaxOp, jax_op
from bridge.device import tracing
from bridge.ranks.mesh import mesh_of_device_mesh, ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AnyMesh: TypeAlias = "Mesh | DeviceMesh"
"""From `bridge.get_pallas_mesh`, or a torch DeviceMesh with names."""
AnyAxis: TypeAlias = "str | Sequence[str]"
"""An axis of a mesh; or two, (outer, inner): the ranks of both are one line, row by row."""
Local: TypeAlias = Callable[..., Any]
"""`local(*arrays, statics=(...))`: a collective of whole arrays, of which each rank has its part."""


@dataclass(frozen=True)
class _Collective:
    function: Callable[..., Any]
    reference: Callable[..., Any]
    form: Callable[[Local], Callable[..., Any]]


_collectives: dict[str, _Collective] = {}


def define(
    kind: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    form: Callable[[Local], Callable[..., Any]],
) -> None:
    """Make a collective known.

    Args:
        kind: its name.
        function: `function(*arrays, axis_name, size, *statics)`, for one rank, in a `shard_map`.
        reference: the same by JAX's own operations.
        form: makes a function with the op's signature from one that takes any arrays and statics.
    """
    _collectives[kind] = _Collective(function, reference, form)


# Ops ---------------------------------------------------------------------------------------------------


_making = threading.Lock()
_names: dict[tuple[str, Mesh, str], str] = {}
_ops: dict[str, JaxOp] = {}


def prepared(kind: str, mesh: AnyMesh, axis: str) -> tuple[Callable[..., Any], int]:
    """The op of a collective along an axis, and how many ranks that has.

    Raises:
        TypeError: what is no mesh.
        ValueError: an axis that the mesh has not.
    """
    name, size = _found(kind, mesh, axis)
    if torch.compiler.is_compiling():  # torch.compile would look for a new op in the old `_ops`
        return getattr(torch.ops.tpu_kernels, name), size
    return _ops[name], size


@tracing.constant
def _found(kind: str, mesh: AnyMesh, axis: str) -> tuple[str, int]:
    """The op's name, and how many ranks the axis has. To torch.compile, a mesh is a constant of the graph."""
    mesh = mesh_of(kind, mesh)
    (axis,) = axes_of(kind, mesh, axis, most=1)
    return _name(kind, mesh, axis), mesh.shape[axis]


def _name(kind: str, mesh: Mesh, axis: str) -> str:
    """Of the op of a collective along an axis: one for all calls, and for all ranks that are threads."""
    key = kind, mesh, axis
    with _making:
        if key not in _names:
            name = f"{kind}_{digest(mesh, axis)}"
            _ops[name] = _make_op(name, _collectives[kind], mesh, axis)
            _names[key] = name
        return _names[key]


def _make_op(name: str, collective: _Collective, mesh: Mesh, axis: str) -> JaxOp:
    # All axes divide the first dimension: each rank has its own part of an array that is as large as all of
    # their tensors together. So no rank has what another one has, and cotangents are each rank's own as well.
    own = PartitionSpec(mesh.axis_names)
    size = mesh.shape[axis]

    def formed(fn: Callable[..., Any]) -> Callable[..., Any]:
        def local(*arrays: jax.Array, statics: tuple[Any, ...]) -> Any:
            def each(*parts: jax.Array) -> Any:
                return fn(*parts, axis, size, *statics)

            specs = (own,) * len(arrays)
            return jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False)(*arrays)

        return collective.form(local)

    return jax_op(
        f"tpu_kernels::{name}",
        formed(collective.function),
        mesh=mesh,
        input_partition_specs=own,
        output_partition_specs=own,
        reference=formed(collective.reference),
    )


def digest(mesh: Mesh, axis: str | tuple[str, ...]) -> str:
    """A name for a mesh and one or some of its axes, the same in each process."""
    kinds = sorted({str(d.device_kind) for d in mesh.devices.flat})
    text = repr((mesh.axis_names, mesh.devices.shape, ranks_of(mesh), mesh.axis_types, kinds, axis))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Checks ------------------------------------------------------------------------------------------------


def mesh_of(function: str, mesh: AnyMesh) -> Mesh:
    """The mesh in JAX's form. Raises `TypeError` for what is no mesh."""
    if isinstance(mesh, Mesh):
        return mesh
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(
            f"{function}: mesh must be from bridge.get_pallas_mesh, or a DeviceMesh, got "
            f"{type(mesh).__name__}"
        )
    return mesh_of_device_mesh(mesh)


def axes_of(function: str, mesh: Mesh, axis: AnyAxis, most: int = 2) -> tuple[str, ...]:
    """The name of one axis of the mesh, or the names of two.

    Args:
        most: how many there may be, 1 or 2.

    Raises:
        TypeError: what is neither.
        ValueError: an axis that the mesh has not, or one twice.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, list | tuple) else ()
    if not 1 <= len(axes) <= most or not all(isinstance(name, str) for name in axes):
        or_two = ", or two, (outer, inner)" if most == 2 else ""
        raise TypeError(f"{function}: axis must be the name of an axis of the mesh{or_two}; got {axis!r}")
    if len(set(axes)) < len(axes) or not set(axes) <= set(mesh.axis_names):
        or_two = ", or two of them;" if most == 2 else ","
        raise ValueError(
            f"{function}: axis must be one of the mesh's axes, {', '.join(map(repr, mesh.axis_names))}"
            f"{or_two} got {axis!r}"
        )
    return axes


def check_tensor(kind: str, name: str, x: torch.Tensor, dtypes: tuple[str, ...]) -> None:
    """Raise `TypeError` for what is no tensor of one of these dtypes that a rank has for itself."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{kind}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if hasattr(x, "device_mesh"):
        raise TypeError(f"{kind}: {name} must be a rank's own tensor, got a DTensor; pass {name}.to_local()")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        raise TypeError(f"{kind}: {name} must be {', '.join(dtypes)}, got {dtype}; convert it first")


def dimension(kind: str, x: torch.Tensor, name: str, dim: int) -> int:
    """Counted from the first one. Raises `TypeError` or `ValueError` for one that `x` has not."""
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


def check_divides(kind: str, x: torch.Tensor, name: str, dim: int, size: int, axis: str) -> None:
    """Raise `ValueError` for a tensor that can't be divided among the ranks of an axis."""
    if x.shape[dim] % size:
        raise ValueError(
            f"{kind}: the size of x along {name}={dim} must be a multiple of {size}, the number of ranks "
            f"along {axis!r}, got shape {list(x.shape)}; pad it with torch.nn.functional.pad"
        )

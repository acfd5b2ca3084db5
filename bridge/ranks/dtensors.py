"""DTensors as arguments of a distributed op: laid out as its partition specs say, and results as DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax.sharding import PartitionSpec

from bridge.program import Program
from bridge.ranks import specs
from bridge.ranks.mesh import ranks_of


def has_dtensors(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of them is a DTensor."""
    return any(hasattr(t, "device_mesh") and hasattr(t, "to_local") for t in tensors)


def call_with_dtensors(
    program: Program,
    tensors: Sequence[torch.Tensor],
    call: Callable[[Program, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """`call` with each DTensor's part on this rank; the results as DTensors on the same mesh.

    A DTensor that lies otherwise is moved first. Plain tensors are taken for this rank's part.

    Raises:
        ValueError: the DTensors' mesh is not that of the op.
    """
    from torch.distributed.tensor import DTensor

    mesh = _mesh_of(program, tensors)
    given = program.definition.sharding
    assert given is not None
    locals_ = []
    for tensor, spec in zip(tensors, given.of_arrays(program.structure), strict=True):
        if isinstance(tensor, DTensor):
            placements = _placements(program, spec)
            tensor = tensor.redistribute(mesh, placements).to_local(grad_placements=placements)
        locals_.append(tensor)
    results = call(program, locals_)
    found = specs.of_outputs(program, program.avals(locals_))
    return [
        DTensor.from_local(result, mesh, _placements(program, spec), run_check=False)
        for result, spec in zip(results, found, strict=True)
    ]


def _mesh_of(program: Program, tensors: Sequence[torch.Tensor]) -> Any:
    name, given = program.definition.name, program.definition.sharding
    assert given is not None
    found = {t.device_mesh for t in tensors if has_dtensors([t])}  # type: ignore[attr-defined]
    if len(found) != 1:
        raise ValueError(f"{name}: its DTensors are on {len(found)} different meshes; move them to one")
    mesh = found.pop()
    if (
        tuple(mesh.mesh.flatten().tolist()) != ranks_of(given.mesh)
        or tuple(mesh.mesh.shape) != given.mesh.devices.shape
        or (mesh.mesh_dim_names or given.mesh.axis_names) != given.mesh.axis_names
    ):
        raise ValueError(
            f"{name}: its DTensors are on {mesh}, and the op's mesh has the axes {dict(given.mesh.shape)} "
            f"over the ranks {ranks_of(given.mesh)}; pass the DeviceMesh to jax_op(mesh=)"
        )
    return mesh


def _placements(program: Program, spec: PartitionSpec) -> list[Any]:
    """For each axis of the mesh, which dimension it divides."""
    from torch.distributed.tensor import Replicate, Shard

    given = program.definition.sharding
    assert given is not None
    axes = given.mesh.axis_names
    found: list[Any] = [Replicate() for _ in axes]
    for dimension, entry in enumerate(spec):
        order = [axes.index(name) for name in specs.names_of(entry)]
        if order != sorted(order):
            raise ValueError(
                f"{program.definition.name}: {spec} divides dimension {dimension} by {entry}, and that of a "
                f"DTensor is divided in the order of the mesh's axes, {axes}"
            )
        for axis in order:
            found[axis] = Shard(dimension)
    return found

"""Where this rank stands in a mesh: for what each rank computes of its own part, before or after a
collective."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from bridge.device import tracing
from bridge.ranks.mesh import ranks_of
from tpu_kernels.collectives.ops import AnyAxis, AnyMesh, axes_of, mesh_of


class RanksAlong(NamedTuple):
    """The ranks along an axis, or two, among which this one is.

    Attributes:
        axes: their names, the outer one first.
        sizes: how many ranks each has.
        places: where this rank is along each.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return math.prod(self.sizes)

    @property
    def place(self) -> int:
        """Where this rank is, counted row by row."""
        place = 0
        for size, along in zip(self.sizes, self.places, strict=True):
            place = place * size + along
        return place


def line_of(function: str, mesh: AnyMesh, axis: AnyAxis) -> RanksAlong:
    """The ranks along an axis. To torch.compile it is a constant of the graph, as the rank is.

    Raises:
        TypeError: what is no mesh, or no axis.
        ValueError: an axis that the mesh has not, or one twice.
        RuntimeError: this rank is not in the mesh.
    """
    return RanksAlong(*_found(function, mesh, axis))


@tracing.constant
def _found(
    function: str, mesh: AnyMesh, axis: AnyAxis
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    mesh = mesh_of(function, mesh)
    axes = axes_of(function, mesh, axis)
    along = np.argwhere(np.array(ranks_of(mesh)).reshape(mesh.devices.shape) == _rank(mesh))
    if not len(along):
        raise RuntimeError(
            f"{function}: the mesh has the ranks {ranks_of(mesh)}, and not this one, {_rank(mesh)}"
        )
    places = dict(zip(mesh.axis_names, (int(i) for i in along[0]), strict=True))
    return axes, tuple(mesh.shape[a] for a in axes), tuple(places[a] for a in axes)


def _rank(mesh: Mesh) -> int:
    import torch.distributed as dist

    if mesh.devices.size == 1 and not (dist.is_available() and dist.is_initialized()):
        return ranks_of(mesh)[0]  # alone, a process needs no group
    return dist.get_rank()

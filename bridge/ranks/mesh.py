"""Meshes whose positions are ranks of torch.distributed.

A kernel that talks to other chips is written for a `jax.sharding.Mesh`. Here its devices are stand-ins that
know their rank and the chip they stand for, as in TorchTPU: JAX can trace and lower for it, and no device of
the other ranks need be visible in this process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
import torch

from bridge import device
from bridge.chips import chip
from bridge.interpretation import CHIPS, target_chip

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class RankDevice:
    """A device of a mesh that stands for a rank. It has what JAX asks of a device that it only compiles for.

    Attributes:
        id: the rank, in the default process group.
        device_kind, platform, num_cores: of the chip that it stands for.
    """

    platform = "tpu"
    num_cores = 1

    def __init__(self, rank: int, device_kind: str) -> None:
        self.id = self.process_index = rank
        self.device_kind = device_kind
        self.client = _CLIENT

    def __repr__(self) -> str:
        return f"RankDevice({self.id}, {self.device_kind!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankDevice) and (self.id, self.device_kind) == (other.id, other.device_kind)

    def __hash__(self) -> int:
        return hash((self.id, self.device_kind))


class _Client:
    """What a mesh asks of the client of its devices: that none of them is of this process."""

    platform = runtime_type = "tpu"
    platform_version = "simulated"

    def process_index(self) -> int:
        return -1


_CLIENT = _Client()


def get_pallas_mesh(
    axis_names: Sequence[str] | str,
    mesh_shape: Sequence[int] | None = None,
    process_group: ProcessGroup | None = None,
) -> jax.sharding.Mesh:
    """A mesh over the ranks of a process group, in the group's order, row by row.

    Pass it to `jax_op(mesh=)` and to `jax.shard_map`. Logical device ids in kernels count the positions of
    the mesh, whatever group and order it has.

    Args:
        axis_names: a name for each axis.
        mesh_shape: ranks along each axis; needed for more than one axis.
        process_group: the ranks; None for all.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: names and sizes that do not fit each other or the group; a group without this rank.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "get_pallas_mesh: torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() under torchrun, or run the function with bridge.ranks.run"
        )
    if device.real_backend_expected():
        return torch.tpu.pallas.get_pallas_mesh(  # pyright: ignore[reportAttributeAccessIssue]
            axis_names, mesh_shape=mesh_shape, process_group=process_group
        )
    group = dist.group.WORLD if process_group is None else process_group
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "get_pallas_mesh: this rank is not in the process group; call it on its members only"
        )
    return mesh_of_ranks(dist.get_process_group_ranks(group), axis_names, mesh_shape)


def mesh_of_ranks(
    ranks: Sequence[int], axis_names: Sequence[str] | str, shape: Sequence[int] | None = None
) -> jax.sharding.Mesh:
    """A mesh over these ranks, row by row.

    Raises:
        ValueError: names and sizes that do not fit each other or the number of ranks.
    """
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    if shape is None:
        if len(names) != 1:
            raise ValueError(f"get_pallas_mesh: {len(names)} axes {names} need mesh_shape=, sizes for each")
        shape = (len(ranks),)
    sizes = tuple(int(size) for size in shape)
    if len(names) != len(sizes) or len(set(names)) != len(names):
        raise ValueError(
            f"get_pallas_mesh: each axis has a name of its own and a size, got {names} and {sizes}"
        )
    if math.prod(sizes) != len(ranks) or min(sizes, default=1) < 1:
        raise ValueError(f"get_pallas_mesh: mesh_shape {sizes} must have {len(ranks)} ranks, one for each")
    name = target_chip()
    kind = CHIPS.get(name) or chip(name).device_kind
    return jax.sharding.Mesh(np.array([RankDevice(rank, kind) for rank in ranks]).reshape(sizes), names)


def mesh_of_device_mesh(mesh: DeviceMesh) -> jax.sharding.Mesh:
    """The mesh of a torch `DeviceMesh`, with its dimensions' names as those of the axes.

    Raises:
        ValueError: the DeviceMesh has no names.
    """
    if mesh.mesh_dim_names is None:
        raise ValueError(
            "jax_op: a DeviceMesh must have names, to be used in partition specs: "
            "init_device_mesh(..., mesh_dim_names=('x',))"
        )
    return mesh_of_ranks(mesh.mesh.flatten().tolist(), mesh.mesh_dim_names, tuple(mesh.mesh.shape))


@functools.cache
def ranks_of(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """The rank at each position of a mesh, row by row. That of a JAX device is its id, as in TorchTPU.

    Raises:
        ValueError: a device twice.
    """
    ranks = tuple(int(d.id) for d in mesh.devices.flat)
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"jax_op: each position of a mesh needs a rank of its own, got the ranks {ranks}")
    return ranks


def group_of(ranks: Sequence[int]) -> ProcessGroup:
    """The process group of these ranks, in any order, and of no other.

    Raises:
        RuntimeError: torch.distributed is not initialised, there is no such group, or this rank isn't in it.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"the op's mesh has {len(ranks)} ranks, and torch.distributed is not initialised; call "
            f"torch.distributed.init_process_group() under torchrun, or use bridge.ranks.run"
        )
    wanted = set(ranks)
    if dist.get_rank() not in wanted:
        raise RuntimeError(
            f"the op's mesh has the ranks {sorted(wanted)}, and rank {dist.get_rank()} called it"
        )
    for group in (dist.group.WORLD, *c10d._world.pg_map):  # private: the groups, in the order they were made
        if group is not None and set(dist.get_process_group_ranks(group)) == wanted:
            return group
    raise RuntimeError(
        f"the op's mesh has the ranks {sorted(wanted)}, and no process group has just those; make one with "
        f"torch.distributed.new_group, on every rank"
    )

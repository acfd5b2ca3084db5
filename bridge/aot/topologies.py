"""Slices of TPU pods and meshes of their devices, without any of them being here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.chips import Chip, chip

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh


@dataclass(frozen=True)
class Topology:
    """A slice of a TPU pod: chips in a box, linked to their neighbours. Made by `topology`.

    Attributes:
        chip: what it is made of.
        shape: chips along each axis, two axes or three.
    """

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """What libtpu calls it: `v5e:2x4`."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def devices(self) -> int:
        """Devices that JAX would see."""
        return math.prod(self.shape) * self.chip.devices_per_chip


def topology(chip_name: str | Chip, shape: str | Sequence[int] | None = None) -> Topology:
    """A topology of `chip_name`.

    Args:
        chip_name: `v4`, `v5e`, `v5p`, `v6e`, `tpu7x`, or a `Chip`.
        shape: chips along each axis, as `(2, 4)` or `"2x4"`: two axes for v5e and v6e, three for the others.
            None is the chips of one host: 2x2, or 2x2x1.

    Raises:
        ValueError: an unknown chip, or a shape that no slice of it has.
    """
    of = as_chip(chip_name)
    axes = of.topologies[0].count("x") + 1
    if shape is None:
        return Topology(of, (2, 2, 1)[:axes])  # that of one chip is refused by older releases of libtpu
    sizes = _sizes(shape)
    if len(sizes) != axes or min(sizes) < 1:
        raise ValueError(
            f"a topology of {of.name} has {axes} axes of at least one chip, such as {of.topologies[1]}, "
            f"got {shape!r}"
        )
    if any(size > 1 and size % 2 for size in sizes[:2]):
        raise ValueError(f"the first two axes of a topology have one chip or an even number, got {shape!r}")
    return Topology(of, sizes)


def mesh(chip_name: str | Chip, axis_names: str | Sequence[str], shape: int | Sequence[int]) -> AbstractMesh:
    """A mesh of devices of `chip_name`, to shard over and to pass to `jax.shard_map` and `compile_for`.

    Args:
        axis_names: a name for each axis.
        shape: devices along each axis. (A tpu7x chip is two devices.)

    Raises:
        ValueError: an unknown chip, or names and sizes that do not fit.
    """
    from jax.sharding import AbstractMesh

    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(names) != len(sizes) or len(set(names)) != len(names) or any(size < 1 for size in sizes):
        raise ValueError(
            f"a mesh needs a different name and a positive size for each axis, got names {names} and shape "
            f"{sizes}"
        )
    return AbstractMesh(sizes, names, abstract_device=abstract_device(as_chip(chip_name)))


def smallest(of: Chip, devices: int) -> Topology:
    """The smallest topology of whole hosts with at least so many devices. More chips change no program."""
    offered = [topology(of)] + [topology(of, shape) for shape in of.topologies if shape != "1x1"]
    for candidate in offered:
        if candidate.devices >= devices:
            return candidate
    raise ValueError(
        f"the largest topology of {of.name} known here, {offered[-1].name}, has {offered[-1].devices} "
        f"devices, the mesh has {devices}; pass topology="
    )


def as_chip(name: str | Chip) -> Chip:
    """The chip of this name, or the chip itself."""
    return name if isinstance(name, Chip) else chip(name)


def _sizes(shape: str | Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in (shape.split("x") if isinstance(shape, str) else shape))
    except (TypeError, ValueError):
        raise ValueError(f"a shape is written as (2, 4) or '2x4', got {shape!r}") from None


def abstract_device(of: Chip) -> Any:
    """What JAX takes a device of the chip to be while it traces."""
    from jax.sharding import AbstractDevice

    return AbstractDevice(device_kind=of.device_kind, num_cores=of.cores_per_device, platform="tpu")

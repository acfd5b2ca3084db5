"""Random numbers of tensors that are spread over ranks (DTensor) on the tpu device.

All ranks draw from equal states. torch lets each shard start at its own place in the sequence, which a
counting generator such as cuda's can do and the one behind this device can't. Here, one number that all
ranks draw alike and the shard's index make a seed for the shard. So shards differ, copies of a shard agree,
and all ranks leave with equal states. The numbers are not those that one process would draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from bridge.device import random
from bridge.device.imports import after_import
from bridge.device.storage import DEVICE_TYPE

_MODULE = "torch.distributed.tensor._random"
_SPREAD = 0x9E3779B97F4A7C15  # an odd number of 64 mixed bits: neighbouring indices get seeds far apart
_SEEDS = 2**63


def watch() -> None:
    """Have DTensor's random ops on tpu meshes draw as described above. Other devices are left alone."""
    after_import(_MODULE, _extend)


def _extend(module: ModuleType) -> None:
    tracker: Any = vars(module)["OffsetBasedRNGTracker"]
    region_elsewhere = tracker._distribute_region

    def region(self: Any, spec: Any, generator: torch.Generator | None = None) -> Any:
        if self._device.type != DEVICE_TYPE or not self.distribute_region_enabled:
            return region_elsewhere(self, spec, generator)
        return _region(self._device, spec, generator)

    tracker._distribute_region = region


@contextlib.contextmanager
def _region(device: torch.device, spec: Any, given: torch.Generator | None) -> Iterator[None]:
    """Within, the device's generator draws this rank's shard of the tensor that `spec` describes.

    Args:
        device: where the shard lies.
        spec: the tensor's DTensorSpec.
        given: the generator that the caller named: it is what moves on, instead of the device's.
    """
    used = random.generator_of(device)
    common = torch.Generator()
    common.set_state((used if given is None else given).get_state())
    drawn = int(torch.randint(_SEEDS - 1, (), generator=common, device="cpu"))
    before = used.get_state()
    used.manual_seed((drawn + _SPREAD * _shard_index(spec)) % _SEEDS)
    try:
        yield
    finally:
        used.set_state(before)
        (used if given is None else given).set_state(common.get_state())


def _shard_index(spec: Any) -> int:
    """The number of this rank's shard among all; ranks that hold copies of one have the same."""
    from torch.distributed.tensor import Partial, Replicate

    index = 0
    for dimension, placement in enumerate(spec.placements):
        if not isinstance(placement, Replicate | Partial):
            index = index * spec.mesh.size(dimension) + spec.mesh.get_local_rank(dimension)
    return index

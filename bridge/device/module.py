"""`torch.tpu`: the module of the simulated device. Its parts live in the files imported here.

Names and signatures are those of `torch_tpu`'s public module, and of `torch.cuda` for what that one lacks.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from bridge.device import execution, random
from bridge.device.chips import ChipProperties
from bridge.device.devices import (
    can_device_access_peer,
    current_device,
    device,
    device_count,
    device_of,
    exchange_device,
    get_amp_supported_dtype,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    is_available,
    is_bf16_supported,
    is_initialized,
    is_simulated,
    set_device,
    synchronize,
)
from bridge.device.execution import EagerMode, set_eager_mode
from bridge.device.memory import (
    empty_cache,
    get_memory_limit,
    get_per_process_memory_fraction,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_limit,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_memory_limit,
    set_per_process_memory_fraction,
)
from bridge.device.random import (
    generator_of,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from bridge.device.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)
from bridge.precision import Precision, precision

__all__ = [
    "ChipProperties",
    "EagerMode",
    "Event",
    "Precision",
    "Stream",
    "StreamContext",
    "can_device_access_peer",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_memory_limit",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "is_simulated",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_limit",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "precision",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_eager_mode",
    "set_memory_limit",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

# torch asks for these by name.
_lazy_init = init
_exchange_device = _maybe_exchange_device = exchange_device
_get_generator = generator_of
_initialized = True  # torch.utils.checkpoint saves the generators of a device only if it says so


def _is_in_bad_fork() -> bool:
    """False: host memory and CPU kernels work in a forked child too."""
    return False


class _TpuModule(ModuleType):
    """A module with attributes that are computed, and checked when they are set."""

    _excess_precision = False

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """The generators the devices draw from, by index."""
        return random.default_generators()

    @property
    def eager_mode(self) -> EagerMode:
        """How eager ops are dispatched; see `bridge.device.execution`."""
        return execution.get_eager_mode()

    @eager_mode.setter
    def eager_mode(self, mode: EagerMode) -> None:
        execution.change_eager_mode(mode)

    @property
    def allow_excess_precision(self) -> bool:
        """What was set last. A flag for the TPU's compiler; it does nothing here."""
        return self._excess_precision

    @allow_excess_precision.setter
    def allow_excess_precision(self, value: bool) -> None:
        execution.say_once("torch.tpu.allow_excess_precision")
        self._excess_precision = bool(value)


sys.modules[__name__].__class__ = _TpuModule

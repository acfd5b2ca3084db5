"""Random numbers of the simulated TPU.

With the C++ extension each device draws from a generator of its own, as on cuda: `torch.manual_seed` seeds
them all, `torch.Generator("tpu")` makes another. In pure Python the device draws from torch's CPU generator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bridge.device import extension
from bridge.device.devices import DEVICE_TYPE, DeviceLike, device_count, index_of
from bridge.device.tracing import untraced

_generators: tuple[torch.Generator, ...] = ()


@untraced
def default_generators() -> tuple[torch.Generator, ...]:
    """The generators the devices draw from, by index; the same objects at every call."""
    global _generators
    if len(_generators) != device_count():
        native = extension.loaded()
        if native is None:
            _generators = (torch.default_generator,)
        else:
            _generators = tuple(native.default_generator(i) for i in range(device_count()))
    return _generators


@untraced
def generator_of(device: DeviceLike = None) -> torch.Generator:
    """The generator a device draws from."""
    return default_generators()[index_of(device)]


@untraced
def manual_seed(seed: int) -> None:
    """Seed the generator of the device in use."""
    generator_of().manual_seed(int(seed))


@untraced
def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices. `torch.manual_seed` calls this."""
    for generator in default_generators():
        generator.manual_seed(int(seed))


@untraced
def seed() -> int:
    """Seed the generator of the device in use from the system's entropy; returns the seed."""
    return generator_of().seed()


@untraced
def seed_all() -> None:
    """Seed the generators of all devices with one number from the system's entropy."""
    manual_seed_all(seed())


@untraced
def initial_seed() -> int:
    """The seed last set for the device in use."""
    return generator_of().initial_seed()


@untraced
def get_rng_state(device: DeviceLike = DEVICE_TYPE) -> torch.Tensor:
    """The state of a device's generator, as a byte tensor on the CPU."""
    return generator_of(device).get_state()


@untraced
def get_rng_state_all() -> list[torch.Tensor]:
    """`get_rng_state` of every device."""
    return [generator.get_state() for generator in default_generators()]


@untraced
def set_rng_state(new_state: torch.Tensor, device: DeviceLike = DEVICE_TYPE) -> None:
    """Restore a state that `get_rng_state` gave."""
    generator_of(device).set_state(new_state)


@untraced
def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """`set_rng_state` for every device, in order.

    Raises:
        ValueError: not one state for each device.
    """
    states = list(new_states)
    if len(states) != device_count():
        raise ValueError(f"expected {device_count()} states, one for each device, got {len(states)}")
    for index, state in enumerate(states):
        set_rng_state(state, index)

"""`torch.tpu`: the module of the simulated device. One device, one stream, everything synchronous."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from bridge.device.chips import ChipProperties, chip_properties

_DEVICE_TYPE = "tpu"
_DeviceLike = int | str | torch.device | None


def is_available() -> bool:
    """Always True: the device is simulated."""
    return True


def is_initialized() -> bool:
    """Always True: there is nothing to start."""
    return True


def init() -> None:
    """Nothing to start."""


_lazy_init = init


def is_simulated() -> bool:
    """True: no TPU is used. (`torch_tpu`, which drives real TPUs, has its own `torch.tpu`.)"""
    return True


# -- devices -------------------------------------------------------------------------------------


def device_count() -> int:
    """1: one simulated chip."""
    return 1


def current_device() -> int:
    """The index of the device in use: 0."""
    return 0


def set_device(device: _DeviceLike) -> None:
    """Choose the device in use. There is one, so this only checks that it is that one."""
    _index(device)


def _index(device: _DeviceLike, optional: bool = True) -> int:
    """The index of a device given as `torch.device`, "tpu", "tpu:0", 0 or None (the current one)."""
    if device is None and optional:
        return 0
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != _DEVICE_TYPE:
            raise ValueError(f"expected a {_DEVICE_TYPE} device, got {device}")
        device = device.index or 0
    if isinstance(device, bool) or not isinstance(device, int):
        raise TypeError(f"expected a device as an int, str or torch.device, got {type(device).__name__}")
    if not 0 <= device < device_count():
        raise RuntimeError(
            f"invalid device index {device}: torch.{_DEVICE_TYPE}.device_count() is {device_count()}"
        )
    return device


class device(contextlib.AbstractContextManager[None]):
    """Context manager that chooses the device in use: `with torch.tpu.device(0): ...`."""

    def __init__(self, device: _DeviceLike) -> None:
        self.idx = _index(device)

    def __exit__(self, *exception: object) -> None:
        return None


def _exchange_device(device: int) -> int:
    _index(device)
    return current_device()


def synchronize(device: _DeviceLike = None) -> None:
    """Wait for the device. Ops here have finished when they return."""
    _index(device)


def get_device_name(device: _DeviceLike = None) -> str:
    """The chip this device stands for, and that it is simulated: "TPU v6e (simulated)"."""
    return get_device_properties(device).name


def get_device_properties(device: _DeviceLike = None) -> ChipProperties:
    """The figures of the chip this device stands for (environment variable BRIDGE_CHIP)."""
    _index(device)
    return chip_properties()


def get_device_capability(device: _DeviceLike = None) -> dict[str, Any]:
    """The dtypes tensors can have on the device."""
    _index(device)
    return {"supported_dtypes": set(_dtypes())}


def _dtypes() -> Iterable[torch.dtype]:
    from bridge.dlpack import DTYPE_CODES

    return DTYPE_CODES


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes `torch.autocast("tpu")` can compute in. bfloat16 is the one TPUs are made for."""
    return [torch.bfloat16, torch.float16]


# -- random numbers: the device draws from torch's CPU generator ---------------------------------


def manual_seed(seed: int) -> None:
    """Seed the device's random numbers. They come from torch's CPU generator, which this seeds."""
    torch.default_generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """`manual_seed`, for every device. `torch.manual_seed` calls this."""
    manual_seed(seed)


def seed() -> int:
    """Seed from the system's entropy; returns the seed."""
    return torch.default_generator.seed()


def seed_all() -> None:
    """`seed`, for every device."""
    seed()


def initial_seed() -> int:
    """The seed last set."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: _DeviceLike = _DEVICE_TYPE) -> torch.Tensor:
    """The state of the generator the device draws from, as a byte tensor on the CPU."""
    _index(device)
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """`get_rng_state` of every device."""
    return [get_rng_state()]


def set_rng_state(new_state: torch.Tensor, device: _DeviceLike = _DEVICE_TYPE) -> None:
    """Restore a state that `get_rng_state` gave."""
    _index(device)
    torch.default_generator.set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """`set_rng_state` for every device."""
    for state in new_states:
        set_rng_state(state)


def _is_in_bad_fork() -> bool:
    """False: host memory and CPU kernels work in a forked child too."""
    return False


def empty_cache() -> None:
    """Nothing to free: memory goes back to the host as soon as a tensor dies."""

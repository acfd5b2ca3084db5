"""Devices of the simulated TPU: which one is in use, and what each says about itself.

With the C++ extension there are `device_count()` of them and each thread has one in use. In pure Python
there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bridge.device import extension
from bridge.device.chips import ChipProperties, chip_properties
from bridge.device.tracing import constant, untraced

DEVICE_TYPE = "tpu"
DeviceLike = int | str | torch.device | None
"""How a caller may name a device: "tpu", "tpu:1", 1, `torch.device("tpu")`, or None for the one in use."""


def index_of(device: DeviceLike) -> int:
    """The index of a device given in any of the ways of `DeviceLike`.

    Raises:
        TypeError: not an int, str or `torch.device`.
        ValueError: a device of another type.
        RuntimeError: a device that does not exist.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != DEVICE_TYPE:
            raise ValueError(f"expected a {DEVICE_TYPE} device, got {device}")
        device = device.index
    if device is None:
        return current_device()
    if isinstance(device, bool) or not isinstance(device, int):
        raise TypeError(f"expected a device as an int, str or torch.device, got {type(device).__name__}")
    if not 0 <= device < device_count():
        raise RuntimeError(
            f"invalid device index {device}: torch.{DEVICE_TYPE}.device_count() is {device_count()}. "
            + _HOW_TO_HAVE_MORE
        )
    return device


_HOW_TO_HAVE_MORE = (
    "The environment variable BRIDGE_DEVICE_COUNT sets it, where the C++ extension is built "
    "(python -m bridge.device.build)."
)


# -- which device --------------------------------------------------------------------------------


def is_available() -> bool:
    """Always True: the device is simulated."""
    return True


def is_initialized() -> bool:
    """Always True: there is nothing to start."""
    return True


def init() -> None:
    """Nothing to start."""


def is_simulated() -> bool:
    """True: no TPU is used. (`torch_tpu`, which drives real TPUs, has its own `torch.tpu`.)"""
    return True


@constant
def device_count() -> int:
    """How many devices are simulated.

    The environment variable BRIDGE_DEVICE_COUNT, else LOCAL_WORLD_SIZE (which torchrun sets), else 1. In pure
    Python always 1.
    """
    native = extension.loaded()
    return 1 if native is None else native.device_count()


@untraced
def current_device() -> int:
    """The index of the device in use in this thread."""
    native = extension.loaded()
    return 0 if native is None else native.current_device()


def set_device(device: DeviceLike) -> None:
    """Use this device in this thread from now on. Negative indices change nothing, as on cuda."""
    exchange_device(_index_or_none(device))


def _index_or_none(device: DeviceLike) -> int:
    """`index_of`, or -1 for a negative index: torch's sign for "leave it as it is"."""
    negative = isinstance(device, int) and not isinstance(device, bool) and device < 0
    return -1 if negative else index_of(device)


@untraced
def exchange_device(device: int) -> int:
    """Use the device of this index, and return the one before. Negative: change nothing, return -1."""
    if device < 0:
        return -1
    index_of(device)
    native = extension.loaded()
    return 0 if native is None else native.exchange_device(device)


class device:
    """Context manager that uses a device: `with torch.tpu.device(1): ...`.

    Args:
        device: the device; None or a negative index changes nothing.

    Raises:
        TypeError, ValueError, RuntimeError: as `index_of`.
    """

    def __init__(self, device: DeviceLike) -> None:
        self.idx = -1 if device is None else _index_or_none(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = exchange_device(self.idx)

    def __exit__(self, *exception: object) -> None:
        exchange_device(self.prev_idx)


class device_of(device):
    """Context manager that uses the device of a tensor or storage; other objects change nothing."""

    def __init__(self, obj: Any) -> None:
        where = getattr(obj, "device", None)
        on_device = isinstance(where, torch.device) and where.type == DEVICE_TYPE
        super().__init__(where if on_device else None)


def synchronize(device: DeviceLike = None) -> None:
    """Wait for the device. Ops here have finished when they return, so there is nothing to wait for."""
    if device is not None:
        index_of(device)


# -- what a device is ----------------------------------------------------------------------------


def get_device_name(device: DeviceLike = None) -> str:
    """The chip the device stands for, and that it is simulated: "TPU v6e (simulated)"."""
    return get_device_properties(device).name


def get_device_properties(device: DeviceLike = None) -> ChipProperties:
    """The figures of the chip the device stands for (environment variable BRIDGE_CHIP)."""
    index_of(device)
    return chip_properties()


def get_device_capability(device: DeviceLike = None) -> dict[str, Any]:
    """What `torch.accelerator.get_device_capability` gives: {"supported_dtypes": set of torch dtypes}."""
    index_of(device)
    return {"supported_dtypes": set(_dtypes())}


def _dtypes() -> Iterable[torch.dtype]:
    from bridge.dlpack import DTYPE_CODES

    return DTYPE_CODES


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes `torch.autocast("tpu")` can compute in. bfloat16 is the one TPUs are made for."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: bfloat16 is what TPUs multiply in."""
    return True


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Whether one device can read another's memory: True for two different ones, which share the host's."""
    return index_of(device) != index_of(peer_device)

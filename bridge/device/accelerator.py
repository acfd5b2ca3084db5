"""`torch.accelerator` where torch's C++ can't answer for the device.

In pure Python it fails with internal assertions, or does nothing in silence: it gets the answers of
`torch.tpu`, or a clear error. With the C++ extension one question is left: how much memory the chip has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bridge.device import devices, extension, memory, streams


def install() -> None:
    """Give torch.accelerator its answers. Call once per process.

    It calls these functions of torch's C++ module (private) by name at each use.
    """
    functions = _ALWAYS if extension.loaded() is not None else _ALWAYS | _PURE_PYTHON
    for name, function in functions.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, function)


def _set_device(index: int) -> None:
    devices.exchange_device(index)


def _nothing(*args: Any) -> None:
    """There is no cache to empty."""


def _current_stream(index: int) -> torch.Stream:
    return streams.current_stream(index)


def _set_stream(stream: torch.Stream) -> None:
    streams.set_stream(stream)


def _memory(*args: Any) -> Any:
    extension.required("torch.accelerator's memory statistics")


_ALWAYS: dict[str, Callable[..., Any]] = {"_accelerator_getMemoryInfo": memory.mem_get_info}
_PURE_PYTHON: dict[str, Callable[..., Any]] = {
    "_accelerator_setDeviceIndex": _set_device,
    "_accelerator_exchangeDevice": devices.exchange_device,
    "_accelerator_maybeExchangeDevice": devices.exchange_device,
    "_accelerator_synchronizeDevice": devices.synchronize,
    "_accelerator_getDeviceCapability": devices.get_device_capability,
    "_accelerator_getStream": _current_stream,
    "_accelerator_setStream": _set_stream,
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_emptyCache": _nothing,
    "_accelerator_emptyHostCache": _nothing,
    "_accelerator_getDeviceStats": _memory,
    "_accelerator_resetPeakStats": _memory,
    "_accelerator_resetAccumulatedStats": _memory,
}

"""Storages of the tpu device from Python: `torch.UntypedStorage(n, device="tpu")` and what builds on it.

`torch.load`, `copy.deepcopy`, pickle and `UntypedStorage.clone` all allocate a storage by device in
Python and copy bytes into it. torch allocates by the backend's C++ allocator and does not check that
there is one: without the constructor below the process dies.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge.device.storage import DEVICE_TYPE, new_storage

_allocate: Any = torch.UntypedStorage.__new__


def register_serialization() -> None:
    """Make the constructor of `torch.UntypedStorage` know the tpu device."""
    torch.UntypedStorage.__new__ = staticmethod(_new)  # type: ignore[assignment]


def _new(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != DEVICE_TYPE:
        return _allocate(cls, *args, **kwargs)
    if "allocator" in kwargs:
        raise TypeError("UntypedStorage: give a device or an allocator, not both")
    content = args[0] if args else kwargs.get("size", 0)
    if isinstance(content, int):
        return new_storage(content)
    storage = new_storage(len(content))
    storage.copy_(_allocate(cls, content))
    return storage

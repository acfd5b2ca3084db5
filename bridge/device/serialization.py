"""Storages of the tpu device from Python: `torch.UntypedStorage(n, device="tpu")` and what builds on it.

`torch.load`, `copy.deepcopy`, pickle and `UntypedStorage.clone` all allocate a storage by device in
Python and copy bytes into it. torch allocates by the backend's C++ allocator and does not check that
there is one: without the constructor below the process dies.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from bridge.device.storage import DEVICE_TYPE, cpu_alias, from_cpu, new_storage

_allocate: Any = torch.UntypedStorage.__new__


def register_serialization() -> None:
    """Make the constructor of `torch.UntypedStorage`, and pickling between processes, know the tpu device."""
    torch.UntypedStorage.__new__ = staticmethod(_new)  # type: ignore[assignment]
    from torch.multiprocessing import reductions

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        if tensor.device.type != DEVICE_TYPE:
            return reductions.reduce_tensor(tensor)
        return _from_shared, (cpu_alias(tensor.detach()).contiguous().share_memory_(), tensor.requires_grad)

    ForkingPickler.register(torch.Tensor, reduce_tensor)


def _from_shared(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """The tensor another process sent (from a DataLoader worker, say), in the memory both share."""
    return from_cpu(tensor).requires_grad_(requires_grad)


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

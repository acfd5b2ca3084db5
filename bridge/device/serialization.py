"""tpu tensors in files, in pickles, and on their way to other processes.

Most of it is torch's own (`torch.save`, `copy.deepcopy`, pickle) and only needs storages of the device:

- `torch.UntypedStorage(n, device="tpu")`. torch allocates by the backend's C++ allocator and does not check
  that there is one: in pure Python, without the constructor below, the process dies. Nor can a storage of
  the device change its size there.
- Between processes (`torch.multiprocessing`, a DataLoader's workers) a tensor travels as a copy in shared
  memory, which the receiver's tensor then lies in. The sender's own memory is not shared.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

from bridge.device import extension, safetensors_device
from bridge.device.storage import DEVICE_TYPE, cpu_alias, from_cpu, new_storage

_allocate: Any = torch.UntypedStorage.__new__
_resize_elsewhere: Any = torch.UntypedStorage.resize_


def register_serialization() -> None:
    """Make storages, pickling between processes, and safetensors know the device. Call once per process."""
    if extension.loaded() is None:
        torch.UntypedStorage.__new__ = staticmethod(_new)  # type: ignore[assignment]
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    generate_methods_for_privateuse1_backend(
        for_tensor=False, for_module=False, for_packed_sequence=False, for_storage=True
    )
    from torch.multiprocessing import reductions

    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reducer(reductions.reduce_tensor))
    safetensors_device.watch()


# -- storages ------------------------------------------------------------------------------------


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


def _resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if self.device.type == DEVICE_TYPE and size != self.nbytes():
        extension.required("resizing a storage (which FSDP2 does)")
    return _resize_elsewhere(self, size)


# -- between processes ---------------------------------------------------------------------------


def _reducer(other_devices: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """How a tensor is pickled for another process: see the module's text."""

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        if tensor.device.type != DEVICE_TYPE:
            return other_devices(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "this tpu tensor has a history of gradients, which can't be sent to another process; "
                "send tensor.detach()"
            )
        shared = cpu_alias(tensor.detach()).clone().share_memory_()
        return _from_shared, (shared, tensor.device.index, type(tensor), tensor.requires_grad)

    return reduce_tensor


def _from_shared(
    shared: torch.Tensor, index: int, kind: type[torch.Tensor], requires_grad: bool
) -> torch.Tensor:
    """The tensor another process sent, in the memory both share."""
    tensor = from_cpu(shared, index)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)

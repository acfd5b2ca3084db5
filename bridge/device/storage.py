"""Storage of the simulated `tpu` device: host memory under another device name.

A tpu tensor and its CPU alias are two tensors over the same bytes. Neither direction copies; each
keeps the other's memory alive.

    from_cpu(t)   CPU tensor -> tpu tensor that takes its storage over
    cpu_alias(t)  tpu tensor -> CPU tensor that shares its storage

Both keep size, strides, storage offset and the conjugate and negative bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bridge.device import extension
from bridge.dlpack import CPU, EXTENSION, from_capsule, retag, to_capsule

DEVICE_TYPE = "tpu"
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""Redispatching to these keys runs torch's CPU kernel on the tensors as they are. Right for kernels
that touch metadata only (views, `set_`), which is what this package uses it for."""

_native = extension.loaded()  # relabels storages itself; without it, they travel through DLPack

_set_storage = torch.ops.aten.set_.source_Storage_storage_offset
_conj = torch.ops.aten._conj.default
_neg_view = torch.ops.aten._neg_view.default
_view_dtype = torch.ops.aten.view.dtype

# dtypes without a code in DLPack, or that torch exports under the code of another dtype. They have
# the layout of uint8 and travel as such.
_AS_BYTES = frozenset(
    getattr(torch, name)
    for name in [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
    + ["bits1x8", "bits2x4", "bits4x2", "bits8"]
    if hasattr(torch, name)
)


def from_cpu(tensor: torch.Tensor, index: int = -1) -> torch.Tensor:
    """A tpu tensor over the storage of a CPU tensor; the CPU tensor should not be used afterwards.

    The whole storage is taken over, so the result has the same size, strides and offset in it. The
    result does not require grad and has no history. It is on device `tpu:index`, or the current one.

    Raises:
        TypeError: the tensor is not a strided CPU tensor with memory (sparse, quantized, meta, fake).
    """
    _check_strided(tensor, "cpu")
    return _native.from_cpu(tensor, index) if _native else _whole_storage_to_tpu(tensor)


def cpu_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the storage of a tpu tensor: writes to one are seen by the other.

    The alias has the same size, strides and storage offset. It does not require grad, has no history,
    and counts versions of its own: a write through it is not seen by autograd.

    Raises:
        TypeError: the tensor is not a tpu tensor with memory (other device, fake tensor).
    """
    _check_strided(tensor, DEVICE_TYPE)
    return _native.cpu_alias(tensor) if _native else _whole_storage_to_cpu(tensor)


def _check_strided(tensor: torch.Tensor, device_type: str) -> None:
    found = tensor.device.type
    if found != device_type or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"expected a strided tensor on {device_type!r}, got a {kind} tensor on {found!r}")
    if tensor.untyped_storage().device.type != device_type:
        raise TypeError(
            f"this {type(tensor).__name__} names device {found!r} but has no memory there "
            "(a fake tensor, as in torch.compile): pass a real tensor"
        )


def take_over(capsule: Any, index: int) -> torch.Tensor:
    """The tpu tensor over the host memory of an unused DLPack capsule."""
    if _native:
        return _native.from_cpu(from_capsule(capsule), index)
    return from_capsule(retag(capsule, EXTENSION))


# -- conversions for kernels: arguments are known to be right ------------------------------------


def wrap_result(tensor: torch.Tensor, index: int = -1) -> torch.Tensor:
    """`from_cpu` for the fresh result of a CPU op: one capsule trip where that says it all."""
    if _native:
        return _native.from_cpu(tensor, index)
    if (
        tensor.storage_offset()
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.dtype in _AS_BYTES
        or tensor._is_zerotensor()
    ):
        return _whole_storage_to_tpu(tensor)
    return from_capsule(retag(to_capsule(tensor), EXTENSION))


def read_alias(tensor: torch.Tensor) -> torch.Tensor:
    """`cpu_alias` for a kernel that reads or writes elements only: the alias starts at the tensor's
    first element, so its storage offset is 0 and it does not reach the rest of the storage (the C++
    part's does)."""
    if _native:
        return _native.cpu_alias(tensor)
    if tensor.is_conj() or tensor.is_neg() or tensor.dtype in _AS_BYTES or tensor._is_zerotensor():
        return _whole_storage_to_cpu(tensor)
    return from_capsule(retag(to_capsule(tensor), CPU))


def full_alias(tensor: torch.Tensor) -> torch.Tensor:
    """`cpu_alias` for a kernel that looks at the storage around the tensor, or changes its metadata."""
    return _whole_storage_to_cpu(tensor)


def shared_aliases(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Aliases of several tensors, by `id`. Tensors of one storage get aliases of one storage, so that
    torch's own checks for overlapping memory see what they would see without aliases."""
    storages = [t.untyped_storage() for t in tensors]
    pointers = [s.data_ptr() for s in storages]
    if len(set(pointers)) == len(pointers):
        return {id(t): read_alias(t) for t in tensors}
    relabelled: dict[int, torch.UntypedStorage] = {}
    result = {}
    for tensor, storage, pointer in zip(tensors, storages, pointers, strict=True):
        if not storage.nbytes() or tensor._is_zerotensor():
            result[id(tensor)] = read_alias(tensor)
            continue
        if pointer not in relabelled:
            relabelled[pointer] = _relabel(storage, CPU)
        result[id(tensor)] = _on_storage(tensor, relabelled[pointer], CPU)
    return result


def sharing_version(alias: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The alias with the version counter of its tensor, or with none where the tensor has none.

    For kernels whose writes torch has not counted already. It costs some microseconds. Where torch counts
    no in-place ops (see `fallback.counts_inside`), the counter is the alias's own.
    """
    inference = tensor.is_inference()
    if inference != torch.is_inference_mode_enabled():
        with torch.inference_mode(inference):
            alias = _on_storage(alias, alias.untyped_storage(), CPU)
    if inference:
        return alias
    sharing = tensor.detach()  # shares the counter, and keeps it when it becomes the alias
    sharing.data = alias
    return sharing


def new_storage(nbytes: int) -> torch.UntypedStorage:
    """A fresh, uninitialised storage on the tpu device."""
    return from_capsule(
        retag(to_capsule(torch.empty(nbytes, dtype=torch.uint8, device="cpu")), EXTENSION)
    ).untyped_storage()


def set_geometry(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int | torch.SymInt,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Give a tensor (of either device) this storage and geometry, in place, without autograd."""
    return _set_storage.redispatch(CPU_KEYS, tensor, storage, offset, list(size), list(stride))


# -- whole storages ------------------------------------------------------------------------------


def _whole_storage_to_tpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor._is_zerotensor():  # a tensor of zeros without memory: give it some
        tensor = torch.zeros(tensor.size(), dtype=tensor.dtype, device="cpu")
    return _on_storage(tensor, _relabel(tensor.untyped_storage(), EXTENSION), EXTENSION)


def _whole_storage_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor._is_zerotensor():
        return torch.zeros(tensor.size(), dtype=tensor.dtype, device="cpu")
    return _on_storage(tensor, _relabel(tensor.untyped_storage(), CPU), CPU)


def _on_storage(tensor: torch.Tensor, storage: torch.UntypedStorage, device_type: int) -> torch.Tensor:
    """A tensor like this one, over a storage of the other device."""
    result = set_geometry(
        _empty_on(device_type, tensor.dtype), storage, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    return _with_bits_of(result, tensor)


def _relabel(storage: torch.UntypedStorage, target: int) -> torch.UntypedStorage:
    """The same bytes as a storage of the other device."""
    source = EXTENSION if target == CPU else CPU
    flat = set_geometry(_empty_on(source, torch.uint8), storage, 0, (storage.nbytes(),), (1,))
    return from_capsule(retag(to_capsule(flat), target)).untyped_storage()


def _empty_on(device_type: int, dtype: torch.dtype) -> torch.Tensor:
    """A zero-size tensor of this device and dtype, to be given a storage."""
    empty = torch.empty(0, dtype=dtype, device="cpu")
    if device_type == CPU:
        return empty
    if dtype in _AS_BYTES:
        as_bytes = from_capsule(retag(to_capsule(empty.view(torch.uint8)), EXTENSION))
        return _view_dtype.redispatch(CPU_KEYS, as_bytes, dtype)
    return from_capsule(retag(to_capsule(empty), EXTENSION))


def _with_bits_of(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if source.is_conj():
        tensor = _conj.redispatch(CPU_KEYS, tensor)
    if source.is_neg():
        tensor = _neg_view.redispatch(CPU_KEYS, tensor)
    return tensor

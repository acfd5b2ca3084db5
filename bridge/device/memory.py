"""Memory of the simulated TPU: how much tensors hold, and a limit that makes the chip's HBM size binding.

The figures are those of storages: bytes of every live tpu storage, whoever made it (torch's allocator, a CPU
kernel, JAX), counted once however many views share it. Nothing is cached, so "reserved" is what is allocated.
Not counted: what torch's CPU kernels and interpreted kernels use while they run.

All of it needs the C++ extension. In pure Python these functions raise, except `empty_cache`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from bridge.device import extension
from bridge.device.chips import chip_properties
from bridge.device.devices import DEVICE_TYPE, DeviceLike, device_count, index_of
from bridge.device.tracing import untraced

LIMIT_VARIABLE = "BRIDGE_HBM_LIMIT"
_UNLIMITED = -1
_CHIP = "chip"
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def _native() -> Any:
    return extension.required("memory statistics and limits")


# -- statistics ----------------------------------------------------------------------------------


@untraced
def memory_stats(device: DeviceLike = None) -> OrderedDict[str, Any]:
    """All figures, under cuda's names, sorted: "allocated_bytes.all.current" and so on.

    Groups: `allocated_bytes`, `reserved_bytes`, `active_bytes` and `requested_bytes` (bytes; the same here,
    where nothing is cached or rounded up), `allocation` and `active` (storages); each with `current`, `peak`
    and, since the last reset, `allocated` and `freed`. `num_ooms` counts out-of-memory errors. There is one
    pool, `all`; cuda's small and large pools and its segments are 0.
    """
    index = index_of(device)
    _native()
    return torch.accelerator.memory_stats(index)


@untraced
def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that live tpu tensors hold."""
    return _native().memory_stats(index_of(device))["allocated"]


@untraced
def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes that tensors held at once, since the start or `reset_peak_memory_stats`."""
    return _native().memory_stats(index_of(device))["peak"]


def memory_reserved(device: DeviceLike = None) -> int:
    """`memory_allocated`: nothing is reserved beyond what tensors hold."""
    return memory_allocated(device)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """`max_memory_allocated`: nothing is reserved beyond what tensors hold."""
    return max_memory_allocated(device)


@untraced
def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Let the peaks start again from what is held now."""
    _native().reset_peak_memory_stats(index_of(device))


@untraced
def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Let the sums (`allocated`, `freed`, `num_ooms`) start again from 0."""
    _native().reset_accumulated_memory_stats(index_of(device))


@untraced
def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes. Total is the limit if one is set, else the HBM of the chip the device stands for.

    Without a limit more than `total` can be allocated; free is then 0.
    """
    index = index_of(device)
    limit = get_memory_limit(index)
    total = chip_properties().total_memory if limit is None else limit
    return max(0, total - memory_allocated(index)), total


def empty_cache() -> None:
    """Nothing to free: memory goes back to the host as soon as a tensor dies."""


# -- the limit -----------------------------------------------------------------------------------


@untraced
def set_memory_limit(limit: int | str | None, device: DeviceLike = None) -> None:
    """Make allocations beyond `limit` raise `torch.OutOfMemoryError`, as on a chip with that much memory.

    Args:
        limit: bytes; a size such as "16GiB" or "500MB"; "chip" for the HBM of the chip the device stands for;
            None for no limit (the host's memory is the only one). Tensors that exist stay.
        device: where; None is the device in use.

    Raises:
        ValueError, TypeError: not a limit.
        NotImplementedError: pure Python, which does not count memory.
    """
    nbytes = _UNLIMITED if limit is None else _bytes(limit, "set_memory_limit")
    _native().set_memory_limit(index_of(device), nbytes, _describe(limit, "torch.tpu.set_memory_limit"))


@untraced
def get_memory_limit(device: DeviceLike = None) -> int | None:
    """The limit in bytes, or None if there is none."""
    limit = _native().memory_stats(index_of(device))["limit"]
    return None if limit == _UNLIMITED else limit


@contextlib.contextmanager
def memory_limit(limit: int | str | None, device: DeviceLike = None) -> Iterator[None]:
    """Context manager for `set_memory_limit`. It holds for all threads that use the device."""
    index = index_of(device)
    before = get_memory_limit(index)
    set_memory_limit(limit, index)
    try:
        yield
    finally:
        set_memory_limit(before, index)


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Limit memory to a fraction, in [0, 1], of the HBM of the chip the device stands for."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise TypeError(f"fraction: expected a number, got {type(fraction).__name__}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction: expected a number in [0, 1], got {fraction}")
    set_memory_limit(int(fraction * chip_properties().total_memory), device)


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """The limit as a fraction of the chip's HBM; 1.0 without a limit, as on cuda."""
    limit = get_memory_limit(device)
    return 1.0 if limit is None else limit / chip_properties().total_memory


def limit_from_environment() -> None:
    """Set the limit that the environment variable BRIDGE_HBM_LIMIT asks for, on every device.

    Raises:
        ValueError: it holds something else than "chip" or a size.
        NotImplementedError: pure Python, which does not count memory.
    """
    text = os.environ.get(LIMIT_VARIABLE)
    if not text:
        return
    nbytes = _bytes(text, f"the environment variable {LIMIT_VARIABLE}")
    native = extension.required(f"a memory limit (the environment variable {LIMIT_VARIABLE})")
    for index in range(device_count()):
        native.set_memory_limit(index, nbytes, _describe(text, LIMIT_VARIABLE))


def _describe(limit: int | str | None, source: str) -> str:
    """Whose limit it is, for the error: "the HBM of a TPU v6e (simulated), set by BRIDGE_HBM_LIMIT"."""
    chip = chip_properties()
    if isinstance(limit, str) and limit.lower() == _CHIP:
        return f"the HBM of a {chip.name}, set by {source}"
    return f"set by {source} (a {chip.name} has {format_bytes(chip.total_memory)})"


def _bytes(limit: int | str, source: str) -> int:
    """A limit in bytes, from what the user wrote."""
    if isinstance(limit, str):
        if limit.lower() == _CHIP:
            return chip_properties().total_memory
        return _parse_size(limit, source)
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f'{source}: expected bytes, a size such as "16GiB", "chip" or None, got {limit!r}')
    if limit < 0:
        raise ValueError(f"{source}: expected a number of bytes, got {limit}; None is no limit")
    return limit


def _parse_size(text: str, source: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f'{source} is {text!r}; expected "chip" or a size: a number with a unit (MiB, GiB, MB, GB, ...), '
            "or without one for bytes"
        )
    return int(float(match[1]) * _UNITS[match[2]])


# -- what holds memory ---------------------------------------------------------------------------


@untraced
def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """A table of the figures and, unless `abbreviated`, the tensors that hold most.

    Tensors are those Python can see. What autograd keeps for a backward pass is held in C++: it shows as the
    difference between what is allocated and what the listed tensors hold.
    """
    index = index_of(device)
    stats = _native().memory_stats(index)
    limit = get_memory_limit(index)
    lines = [
        f"{DEVICE_TYPE}:{index}, {chip_properties().name}",
        f"  allocated  {format_bytes(stats['allocated']):>12}",
        f"  peak       {format_bytes(stats['peak']):>12}",
        f"  limit      {'none' if limit is None else format_bytes(limit):>12}",
        f"  chip's HBM {format_bytes(chip_properties().total_memory):>12}",
    ]
    if not abbreviated:
        lines += _holders(index, stats["allocated"])
    return "\n".join(lines)


_SHOWN = 10


def _holders(index: int, allocated: int) -> list[str]:
    """Lines on the largest storages that tensors in sight of Python hold."""
    storages: dict[int, tuple[int, str]] = {}
    for tensor in _tensors_on(index):
        storage = tensor.untyped_storage()
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        dtype = str(tensor.dtype).removeprefix("torch.")
        storages.setdefault(storage.data_ptr(), (storage.nbytes(), f"{kind} {tuple(tensor.shape)} {dtype}"))
    largest = sorted(storages.values(), reverse=True)
    seen = sum(nbytes for nbytes, _ in largest)
    lines = [f"  {len(largest)} storages of tensors that Python sees hold {format_bytes(seen)}:"]
    lines += [f"  {format_bytes(nbytes):>23}  {text}" for nbytes, text in largest[:_SHOWN]]
    if len(largest) > _SHOWN:
        rest = sum(nbytes for nbytes, _ in largest[_SHOWN:])
        lines.append(f"  {format_bytes(rest):>23}  in {len(largest) - _SHOWN} more")
    lines.append(f"  {format_bytes(max(0, allocated - seen)):>23}  elsewhere (such as kept for backward)")
    return lines


def _tensors_on(index: int) -> Iterator[torch.Tensor]:
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor):  # `isinstance` would run code of lazy objects
            continue
        try:
            if found.device.type == DEVICE_TYPE and found.device.index == index and found.data_ptr():
                yield found
        except (RuntimeError, NotImplementedError, ReferenceError):
            continue  # a tensor without memory: fake, functional, of a transform


def format_bytes(nbytes: int) -> str:
    """A size for people: "1.50 GiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"

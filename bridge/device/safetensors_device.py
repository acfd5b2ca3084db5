"""safetensors files on the tpu device: `safe_open(..., device="tpu")`, and what builds on it.

safetensors checks the device in compiled code, against a list of names that has no "tpu". So the name
`safe_open` is replaced, as soon as the package is imported: for "tpu" it opens the file on the CPU and moves
each tensor as it is read; for other devices it is what it was. The package is not imported for this.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from bridge.device.imports import after_import
from bridge.device.storage import DEVICE_TYPE

_PACKAGE = "safetensors"


def watch() -> None:
    """Replace `safetensors.safe_open`, now or when the package is imported."""
    after_import(_PACKAGE, _extend)


def _extend(package: ModuleType) -> None:
    replacement = _opener(vars(package)["safe_open"])
    for module in (package, sys.modules.get(f"{_PACKAGE}.torch")):
        if module is not None:
            vars(module)["safe_open"] = replacement


def _opener(safe_open: Callable[..., Any]) -> Callable[..., Any]:
    """`safe_open` that knows the tpu device."""

    @functools.wraps(safe_open, updated=())
    def open_on_any_device(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        target = _tpu_device(device)
        if target is None:
            return safe_open(filename, framework, device, **options)
        return _File(safe_open(filename, framework, "cpu", **options), target)

    return open_on_any_device


def _tpu_device(device: Any) -> torch.device | None:
    """The tpu device meant, if it is one: given as a `torch.device` or its name."""
    name = str(device)
    return torch.device(name) if name.partition(":")[0] == DEVICE_TYPE else None


class _File:
    """An open file whose tensors come on the tpu device."""

    def __init__(self, file: Any, device: torch.device) -> None:
        self._file, self._device = file, device

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> Any:
        return self._file.__exit__(*exception)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).to(self._device)

    def get_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        tensors = self._file.get_tensors(*args, **kwargs)
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), self._device)

    def __getattr__(self, name: str) -> Any:  # keys, metadata, offset_keys
        return getattr(self._file, name)


class _Slice:
    """A tensor of a file of which parts can be read, onto the tpu device."""

    def __init__(self, part: Any, device: torch.device) -> None:
        self._slice, self._device = part, device

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._slice[index].to(self._device)

    def __getattr__(self, name: str) -> Any:  # get_shape, get_dtype
        return getattr(self._slice, name)

"""Which tensors torch's `flex_attention` takes, and what it warns of.

torch.compile traces both functions, as a part of torch's own, so they are plain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels.dropins.dropin import is_overriding

installed = False
"""Whether `install()` holds."""


def checked(torchs: Callable[..., None]) -> Callable[..., None]:
    """torch's check of devices, for the calls that our kernel does not compute."""

    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if not _ours(query):
            torchs(query, key, value)

    return _validate_device


def warned(torchs: Callable[..., None]) -> Callable[..., None]:
    """torch's warnings, but for that of slow computation where it is our kernel that computes."""

    def _warn_once(warning_id: str, message: str, category: type[Warning] = UserWarning) -> None:
        if (
            warning_id == "flex_attention_performance"
        ):  # not given while torch.compile traces: it knows no frames
            query: Any = sys._getframe(1).f_locals.get("query")
            if isinstance(query, torch.Tensor) and _ours(query):
                return
        torchs(warning_id, message, category)

    return _warn_once


def _ours(query: torch.Tensor) -> bool:
    if query.device.type == "tpu" and installed:
        return True
    return query.device.type in ("cpu", "tpu") and is_overriding()

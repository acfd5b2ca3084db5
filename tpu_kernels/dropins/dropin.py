"""What one drop-in tells `install()` and `overrides()`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.device import tracing

Function = Callable[..., Any]
Add = Callable[[Any, Function], None]
"""`add(function, replacement)`."""


class OverridingMode(TorchFunctionMode):
    """What `overrides()` is, so that a drop-in can see it without knowing what else is overridden."""

    # torch.compile knows only modes whose `__enter__` is torch's, so what must be done before code runs
    # inside of one is done where it is made.
    def __init__(self) -> None:
        _prepare()


_preparations: list[Function] = []
_lock = threading.RLock()


def before_overriding(prepare: Callable[[], None]) -> None:
    """Have `prepare` called before the first `overrides()` of the process holds."""
    _preparations.append(prepare)


@tracing.constant
def _prepare() -> None:
    # Run by Python, not traced, also for an `overrides()` that torch.compile finds in a function.
    with _lock:
        while _preparations:
            _preparations[-1]()
            _preparations.pop()


def is_overriding() -> bool:
    """Whether this thread is inside of `overrides()`. torch.compile traces it, so it is plain."""
    for place in range(torch._C._len_torch_function_stack()):
        if isinstance(torch._C._get_function_stack_at(place), OverridingMode):
            return True
    return False


@dataclass(frozen=True)
class DropIn:
    """A part of PyTorch, or of a library on top of it, that kernels of this package can compute.

    Args:
        name: what it stands in for.
        enable: for `install()`: from now on, calls with tensors on `tpu` are computed by our kernels. In the
            whole process; it must not change what tensors on other devices get.
        disable: undoes `enable`, exactly.
        overridden: for `overrides()`: adds the functions that are replaced in a thread, each with what
            replaces it; called once, and free to add when a module has been imported. Functions are what
            torch hands to a `TorchFunctionMode`. A replacement gets the arguments of the call, on any device,
            while the mode is off, and must call the function itself for what it cannot compute.
    """

    name: str
    enable: Callable[[], None]
    disable: Callable[[], None]
    overridden: Callable[[Add], None]

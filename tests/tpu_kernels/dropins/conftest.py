"""`attention`: torch's function, computed by ours on each device, and a count of how often ours was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import bridge
from tpu_kernels.dropins import attention as attention_module
from tpu_kernels.dropins.install import install, overrides, uninstall

# Taken before anything is overridden, as programs do.
from torch.nn.functional import scaled_dot_product_attention  # isort: skip


@dataclass
class Ours:
    """Calls torch's function on a device, where ours stands in for it."""

    device: torch.device
    calls: list[Any] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved: list[Any] = [a.to(self.device) if isinstance(a, torch.Tensor) else a for a in args]
        kwargs = {n: a.to(self.device) if isinstance(a, torch.Tensor) else a for n, a in kwargs.items()}
        with self.standing_in():
            return scaled_dot_product_attention(*moved, **kwargs)

    def standing_in(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which our kernels compute: `overrides()` for cpu tensors; for tpu, nothing more."""
        return overrides() if self.device.type == "cpu" else contextlib.nullcontext()

    def used(self) -> int:
        """How often our attention has computed since the last time this was asked."""
        count = len(self.calls)
        self.calls.clear()
        return count


@pytest.fixture
def interpretation() -> str:
    """How kernels run. Torch's rules come before the kernel; its reference compiles sooner."""
    return "reference"


@pytest.fixture
def ours(device: torch.device, interpretation: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ours]:
    """Our kernels stand in for torch's attention on the device of the test."""
    result = Ours(device)
    compute = attention_module.splash_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            result.calls.append(kwargs)
        return compute(*args, **kwargs)

    monkeypatch.setattr(attention_module, "splash_attention", counted)
    if device.type == "tpu":
        install()
    with bridge.interpret(interpretation):
        yield result
    uninstall()
    assert F.scaled_dot_product_attention is scaled_dot_product_attention

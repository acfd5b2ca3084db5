"""What `import torch` brings: the `tpu` device, and `torch.tpu.pallas`.

torch calls `autoload` through the entry point group "torch.backends" at the end of its own import,
so nothing here imports JAX, torch's compiler, or anything else that costs time.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from bridge import device

_PALLAS = "torch.tpu.pallas"


def autoload() -> None:
    """Entry point: register the simulated device and `torch.tpu.pallas`.

    Does nothing where another backend serves the process: `torch_tpu` with "tpu", or a backend that
    has taken torch's one out-of-tree device. `import torch` must work there; `device.register()` says
    what is in the way.
    """
    try:
        device.register()
    except device.DeviceTakenError:
        return


def install() -> None:
    """Add `torch.tpu.pallas` to the simulated `torch.tpu`, and send graphs on tpu to our compiler."""
    from bridge import compiler

    pallas = _Pallas(_PALLAS)
    sys.modules[_PALLAS] = pallas
    torch.tpu.pallas = pallas  # type: ignore[attr-defined]
    compiler.install()


class _Pallas(ModuleType):
    """`torch.tpu.pallas`: names of `bridge`, loaded when first used, since they import JAX."""

    __doc__ = "JAX and Pallas kernels as torch ops: `jax_op`."
    __all__ = ["jax_op"]

    def __getattr__(self, name: str) -> Any:
        if name in self.__all__:
            value = getattr(importlib.import_module("bridge"), name)
            self.__dict__[name] = value
            return value
        raise AttributeError(
            f"module {_PALLAS!r} has no attribute {name!r}; it has: {', '.join(self.__all__)}"
        )

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self.__all__])

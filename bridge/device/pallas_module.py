"""`torch.tpu.pallas`: the bridge's names under torch's, loaded when first used, since they import JAX."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

_PALLAS = "torch.tpu.pallas"


def install() -> None:
    """Add `torch.tpu.pallas` to the simulated `torch.tpu`."""
    pallas = _Pallas(_PALLAS)
    sys.modules[_PALLAS] = pallas
    torch.tpu.pallas = pallas  # type: ignore[attr-defined]


class _Pallas(ModuleType):
    """`torch.tpu.pallas`: names of `bridge`, loaded when first used, since they import JAX."""

    __doc__ = "JAX and Pallas kernels as torch ops: `jax_op`, and `get_pallas_mesh` for distributed ones."
    __all__ = ["get_pallas_mesh", "jax_op"]

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

"""What is computed, and what a tiling is chosen for: one kernel at given shapes, dtypes and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array. The dtype is named as in JAX: `bfloat16`, `float32`, `int32`.

    Raises `ValueError` for a negative size or a dtype that does not exist.
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"sizes must not be negative, got shape {list(self.shape)}")
        numpy_dtype(self.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return self.size * numpy_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Problem:
    """One call of a kernel without its values. Hashable; `str()` is a stable, readable key.

    Attributes:
        kernel: name of the kernel, as in its `KernelSpec`.
        arrays: (name, spec) of each array argument in call order; None for an optional one left out.
        params: (name, value) of each static argument: bool, int, float, str or None.
    """

    kernel: str
    arrays: tuple[tuple[str, ArraySpec | None], ...]
    params: tuple[tuple[str, bool | int | float | str | None], ...] = ()

    @classmethod
    def of(
        cls,
        kernel: str,
        arrays: Mapping[str, ArraySpec | None],
        params: Mapping[str, bool | int | float | str | None] | None = None,
    ) -> Problem:
        """A problem from dicts, in their order."""
        return cls(kernel, tuple(arrays.items()), tuple((params or {}).items()))

    def array(self, name: str) -> ArraySpec | None:
        """The array argument `name`; None if it is left out. Raises `KeyError` for an unknown name."""
        return dict(self.arrays)[name]

    def required(self, name: str) -> ArraySpec:
        """The array argument `name`, which must be there. Raises `ValueError` if it is left out."""
        spec = self.array(name)
        if spec is None:
            raise ValueError(f"{self.kernel}: argument {name!r} is required, got None")
        return spec

    def param(self, name: str) -> Any:
        """The value of the static argument `name`. Raises `KeyError` for an unknown name."""
        return dict(self.params)[name]

    def __str__(self) -> str:
        arguments = [f"{name}={'none' if spec is None else spec}" for name, spec in self.arrays]
        arguments += [f"{name}={value!r}" for name, value in self.params]
        return f"{self.kernel}({', '.join(arguments)})"


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a JAX dtype name, bfloat16 and the 8-bit floats included."""
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise ValueError(f"unknown dtype {name!r}; expected a name such as float32 or bfloat16") from None

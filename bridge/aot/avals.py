"""Abstract arrays in any form: JAX's own, torch tensors, arrays, or text such as `f32[128,4096]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

SHORT_NAMES: Mapping[str, str] = {
    "pred": "bool",
    "bf16": "bfloat16",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{letter}{bits}": f"int{bits}" for letter in "si" for bits in (4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (4, 8, 16, 32, 64)},
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f4e2m1fn": "float4_e2m1fn",
    "c64": "complex64",
    "c128": "complex128",
}
"""XLA's names of dtypes, and those of numpy and JAX."""


def parse_aval(text: str) -> jax.ShapeDtypeStruct:
    """The abstract array that a text such as `f32[128,4096]`, `bfloat16[8,128]` or `s32[]` describes.

    Raises `ValueError` that says what was expected.
    """
    found = re.fullmatch(r"\s*(\w+)\s*\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]\s*", text)
    if not found:
        raise ValueError(f"an array must be written as dtype[sizes], such as f32[128,4096], got {text!r}")
    name = SHORT_NAMES.get(found[1], found[1])
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        known = ", ".join(SHORT_NAMES)
        raise ValueError(
            f"unknown dtype {found[1]!r} in {text!r}; expected one of {known}, or a name such as float32"
        ) from None
    return jax.ShapeDtypeStruct(tuple(int(size) for size in found[2].split(",") if size.strip()), dtype)


def is_aval(value: Any) -> bool:
    """Whether a value stands for an array; other values are passed to the function as they are."""
    if isinstance(value, str):
        return re.fullmatch(r"\s*\w+\s*\[[\d,\s]*\]\s*", value) is not None
    return isinstance(value, jax.ShapeDtypeStruct | jax.Array | np.ndarray) or _is_tensor(value)


def to_aval(value: Any) -> jax.ShapeDtypeStruct:
    """The abstract array that `value` (for which `is_aval` holds) stands for; a sharding is kept."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    if isinstance(value, str):
        return parse_aval(value)
    if _is_tensor(value):
        from bridge.dtypes import jax_dtype
        from bridge.program import array_shape

        return jax.ShapeDtypeStruct(array_shape(value), jax_dtype(value.dtype))
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def describe(aval: Any) -> str:
    """`float32[128,4096]`."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)

"""The one table of dtypes: what torch and JAX both know, what is packed, and what is refused by name.

`jax_dtype` and `torch_dtype` translate; a dtype that has no counterpart raises `TypeError` naming
it and saying what would do.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

_SHARED: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
    torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
}

FLOAT4_PACKED = torch.float4_e2m1fn_x2
"""Two float4 values per byte, the first in the low bits: torch counts bytes, JAX counts values."""
FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)

_TO_JAX: dict[torch.dtype, np.dtype] = {t: np.dtype(j) for t, j in _SHARED.items()}
_TO_JAX[FLOAT4_PACKED] = FLOAT4

SHAREABLE: frozenset[torch.dtype] = frozenset(_SHARED)
"""Dtypes whose memory torch and JAX lay out alike."""

WIDE: frozenset[torch.dtype] = frozenset({torch.int64, torch.uint64, torch.float64, torch.complex128})
"""Dtypes that JAX keeps only under `jax.enable_x64`."""

DIFFERENTIABLE: frozenset[torch.dtype] = frozenset(
    t for t in _TO_JAX if (t.is_floating_point or t.is_complex) and t is not FLOAT4_PACKED
)

NAMES: dict[str, torch.dtype] = {str(j): t for t, j in _TO_JAX.items()}
"""JAX's name of a dtype ("bfloat16") -> the torch dtype."""


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The JAX (NumPy) dtype of a torch dtype.

    Raises:
        TypeError: JAX has no such dtype (complex32, quantised and sub-byte integer dtypes).
    """
    found = _TO_JAX.get(dtype)
    if found is None:
        raise TypeError(_refusal(dtype))
    return found


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a JAX or NumPy dtype (or of anything `numpy.dtype` takes).

    Raises:
        TypeError: torch can't hold it (int4, int2, ..., JAX key types).
    """
    try:
        found = NAMES.get(str(np.dtype(dtype)))  # by name, which torch.compile can trace
    except TypeError:
        found = None
    if found is None:
        raise TypeError(
            f"torch has no dtype for JAX's {dtype}; convert in the JAX function, for example with "
            f".astype(jnp.int8) for a sub-byte integer or jax.random.key_data for a key"
        )
    return found


def _refusal(dtype: torch.dtype) -> str:
    name = str(dtype)
    if name.startswith(("torch.int", "torch.uint")):
        return (
            f"{name} has no memory layout that JAX can share (torch keeps it as a shell of whole bytes); "
            f"store the values as torch.int8 and convert with .astype in the JAX function"
        )
    if dtype is torch.complex32:
        return "torch.complex32 has no counterpart in JAX; use torch.complex64"
    return f"{name} has no counterpart in JAX; convert the tensor first, known are: {_known()}"


def _known() -> str:
    return ", ".join(str(t).removeprefix("torch.") for t in _TO_JAX)

"""The DLPack structures, and the few capsule operations the bridge and the simulated device share.

A DLPack capsule describes memory: pointer, device, dtype, shape, strides (DLPack specification 0.8,
`DLManagedTensor`). torch and JAX both read it. Two things are done here that neither offers:

- `retag` changes the device a capsule names. The simulated `tpu` device keeps its storage in host
  memory, so the same bytes are named `cpu` to JAX and `tpu` (an "extension device") to torch.
- `borrow` describes memory without owning it: for an array that is used only while the tensor
  it was made from is alive.

Private torch and JAX names used for DLPack live in this module and nowhere else.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CPU = 1
"""DLPack's device type for host memory (kDLCPU)."""
EXTENSION = 12
"""DLPack's device type for out-of-tree devices (kDLExtDev): torch reads it as PrivateUse1, our `tpu`."""

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_FP8_E4M3FN, _FP8_E4M3FNUZ, _FP8_E5M2, _FP8_E5M2FNUZ, _FP8_E8M0FNU = 10, 11, 12, 13, 14

DTYPE_CODES: dict[torch.dtype, tuple[int, int]] = {
    torch.bool: (_BOOL, 8),
    torch.uint8: (_UINT, 8),
    torch.uint16: (_UINT, 16),
    torch.uint32: (_UINT, 32),
    torch.uint64: (_UINT, 64),
    torch.int8: (_INT, 8),
    torch.int16: (_INT, 16),
    torch.int32: (_INT, 32),
    torch.int64: (_INT, 64),
    torch.float16: (_FLOAT, 16),
    torch.bfloat16: (_BFLOAT, 16),
    torch.float32: (_FLOAT, 32),
    torch.float64: (_FLOAT, 64),
    torch.complex64: (_COMPLEX, 64),
    torch.complex128: (_COMPLEX, 128),
    torch.float8_e4m3fn: (_FP8_E4M3FN, 8),
    torch.float8_e4m3fnuz: (_FP8_E4M3FNUZ, 8),
    torch.float8_e5m2: (_FP8_E5M2, 8),
    torch.float8_e5m2fnuz: (_FP8_E5M2FNUZ, 8),
    torch.float8_e8m0fnu: (_FP8_E8M0FNU, 8),
}
"""(type code, bits) of the torch dtypes that a capsule can carry to JAX."""


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_DEVICE_TYPE_OFFSET = _Tensor.device.offset  # DLManagedTensor starts with its DLTensor

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# A consumer calls the deleter from any thread, without the GIL and perhaps at exit, so it can't be a
# Python callback. This C function reads one flag and ignores its argument.
_NOTHING_TO_FREE = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value

to_capsule = torch._C._to_dlpack
"""torch tensor -> owning capsule. Refuses nothing: the caller checks layout, conj and neg bits."""
from_capsule = torch._C._from_dlpack
"""capsule -> torch tensor, on the device the capsule names. Takes the capsule over."""


def retag(capsule: Any, device_type: int) -> Any:
    """Name another device for the memory of an unused capsule, in place; returns the capsule."""
    address = _get_pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + _DEVICE_TYPE_OFFSET).value = device_type
    return capsule


class Borrowed:
    """The structs of a capsule that describes memory and does not own it; reusable, never to be freed.

    A consumer copies shape and dtype when it imports the capsule, and reads the struct again only
    for its deleter, when the importing object dies. All these structs have the same one, so a
    struct may describe other memory by then, but it must exist.
    """

    __slots__ = ("_managed", "_shape")

    def __init__(self) -> None:
        self._managed = _ManagedTensor()
        # Never freed, so that it outlives the arrays even when the interpreter takes everything down at exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._managed))
        self._managed.deleter = _NOTHING_TO_FREE
        self._managed.tensor.device = _Device(CPU, 0)
        self._managed.tensor.dtype.lanes = 1
        self._shape = (ctypes.c_int64 * 0)()

    def describe(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """A fresh capsule for a row-major array at `address`."""
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        tensor = self._managed.tensor
        tensor.data = address
        tensor.ndim = len(shape)
        tensor.dtype.code, tensor.dtype.bits = DTYPE_CODES[dtype]
        tensor.shape = ctypes.addressof(self._shape)
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

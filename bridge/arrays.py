"""torch tensors as JAX arrays and back: share memory, or say why not.

`to_jax` and `to_torch` are the public pair; they share memory where both libraries can describe
it and copy otherwise, which `copy=False` turns into an error and `copy_reason` tells beforehand.

`Borrowing` is the pair's quick sister for one call: it makes arrays that do not own the memory
they name, and keeps them for the next tensor at the same address.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
import torch
from jax.core import Tracer
from torch._C._functorch import is_functorch_wrapped_tensor

from bridge import dlpack
from bridge.counters import count_copy
from bridge.device.storage import take_over
from bridge.dtypes import FLOAT4, FLOAT4_PACKED, SHAREABLE, WIDE, jax_dtype, torch_dtype

ALIGNMENT = 64
"""XLA's CPU runtime reads buffers at multiples of this many bytes; it copies others, and late."""

try:
    # Private: the public from_dlpack narrows 64 bits without a word, and costs ten times as much.
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    _import_capsule = _jax.dlpack_managed_tensor_to_buffer
    _export_capsule = _jax.buffer_to_dlpack_managed_tensor
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"this jax ({jax.__version__}) has no jax._src.lib._jax.dlpack_managed_tensor_to_buffer, by which "
        f"the bridge shares memory; use jax >= 0.10.2"
    ) from error

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensor types without a behaviour of their own."""

_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

HOST_DEVICES = ("cpu", "tpu")
"""Device types whose memory is host memory here (`tpu` when simulated)."""


# ---------------------------------------------------------------------------------- public


def _not_compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Keep torch.compile out: a graph ends before the call. (torch.compiler.disable, but without importing
    the compiler, which takes longer than JAX, where it is not in use.)"""
    disabled: list[Any] = []

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function, reason=f"{function.__name__} reads memory"))
        return disabled[0](*args, **kwargs)

    return call


@_not_compiled
def to_jax(tensor: torch.Tensor, *, copy: bool | None = None) -> jax.Array:
    """The JAX array of a tensor.

    A shared array is a live view: a later in-place write to the tensor shows in the array. Take
    `copy=True` for a snapshot. Gradients do not flow through this function (use `jax_op`).

    Args:
        tensor: a dense tensor on `cpu` or on the simulated `tpu` device, of any dtype that JAX
            has. `float4_e2m1fn_x2` (two values per byte) becomes `float4_e2m1fn` with the last
            dimension doubled, always as a copy.
        copy: None shares when possible and else copies; False shares or raises; True copies.

    Raises:
        TypeError: not a tensor, a tensor without memory of its own (fake, meta, functorch), or a
            dtype JAX can't hold; a 64-bit dtype while `jax_enable_x64` is off.
        RuntimeError: the tensor's storage was freed or shrunk.
        ValueError: `copy=False` and the memory can't be shared; the message gives the reason.
    """
    check_readable(tensor, "to_jax")
    with _outside_of_modes():
        return _to_jax(tensor, copy)


def _to_jax(tensor: torch.Tensor, copy: bool | None) -> jax.Array:
    if tensor.dtype in WIDE and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise TypeError(
            f"to_jax: JAX would narrow {tensor.dtype} to 32 bits in the next operation; call it under "
            f"`with jax.enable_x64(True):`, or convert the tensor first"
        )
    reason = _copy_reason(tensor)
    if copy is False and reason:
        raise ValueError(f"to_jax: copy=False, but the memory can't be shared: {_EXPLAIN[reason]}")
    if tensor.dtype is FLOAT4_PACKED:
        count_copy(reason)
        return _unpack_float4(tensor)
    if copy or reason:
        count_copy(reason or "requested")
        tensor = _compact(tensor)
    return _import_capsule(dlpack.retag(dlpack.to_capsule(tensor.detach()), dlpack.CPU), cpu_device(), None)


@_not_compiled
def to_torch(array: jax.Array, *, copy: bool | None = None) -> torch.Tensor:
    """The CPU tensor of a JAX array.

    JAX takes arrays as immutable: do not write to a shared tensor, take `copy=True` to write.

    Args:
        array: a concrete array on the CPU backend. `float4_e2m1fn` becomes the packed
            `float4_e2m1fn_x2` (its last dimension must be even), always as a copy.
        copy: None shares when possible and else copies; False shares or raises; True copies.

    Raises:
        TypeError: not a concrete JAX array, or a dtype torch can't hold (int4, key types).
        ValueError: the array is not on one CPU device, or `copy=False` and it can't be shared.
        RuntimeError: the array was deleted or donated.
    """
    if isinstance(array, Tracer) or not isinstance(array, jax.Array):
        raise TypeError(f"to_torch takes a concrete JAX array, got {type(array).__name__}")
    dtype = torch_dtype(array.dtype)
    if array.is_deleted():
        raise RuntimeError("to_torch: the array was deleted or donated")
    devices = array.devices()
    if len(devices) != 1 or next(iter(devices)).platform != "cpu":
        raise ValueError(
            f"to_torch: expected an array on one CPU device, got {sorted(map(str, devices))}; "
            f"move it with jax.device_put(array, jax.devices('cpu')[0])"
        )
    if dtype is FLOAT4_PACKED:
        if copy is False:
            raise ValueError(f"to_torch: copy=False, but the memory can't be shared: {_EXPLAIN['packed']}")
        return _pack_float4(array)
    array.block_until_ready()
    with _outside_of_modes():
        tensor = dlpack.from_capsule(_export_capsule(array))
        return tensor.clone() if copy else tensor


def copy_reason(tensor: torch.Tensor) -> str | None:
    """Why `to_jax(tensor)` would copy, as a sentence; None when it would share memory."""
    check_readable(tensor, "copy_reason")
    reason = _copy_reason(tensor)
    return _EXPLAIN[reason] if reason else None


def _outside_of_modes() -> contextlib.AbstractContextManager[None]:
    """Dispatch modes and torch.func transforms would wrap what is made inside (in FakeTensorMode, even the
    detached form of a real tensor is fake): leave them for a while."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return _leave_modes()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _leave_modes() -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C._DisableFuncTorch():
        yield


# ---------------------------------------------------------------------------------- checks


def check_readable(tensor: Any, who: str) -> None:
    """Raise TypeError unless `tensor` has memory here that may be read, before any pointer is."""
    if type(tensor) not in PLAIN:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{who} takes a torch.Tensor, got {type(tensor).__name__}")
        _refuse_wrapper(tensor, who)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind, fix = str(tensor.layout), ".to_dense()"
        if tensor.is_quantized:
            kind, fix = "quantised", ".dequantize() or .int_repr()"
        elif tensor.is_nested:
            kind, fix = "nested", "torch.nested.to_padded_tensor"
        raise TypeError(f"{who}: expected a dense strided tensor, got a {kind} one; use {fix} first")
    if tensor.device.type not in HOST_DEVICES:
        raise TypeError(
            f"{who}: expected a tensor on cpu or tpu, got one on {tensor.device}"
            + (" (it has a shape but no values)" if tensor.device.type == "meta" else "; use .to('cpu')")
        )
    if is_functorch_wrapped_tensor(tensor):
        raise TypeError(f"{who}: the tensor belongs to a torch.func transform; call a jax_op on it instead")
    try:
        jax_dtype(tensor.dtype)
    except TypeError as error:
        raise TypeError(f"{who}: {error}") from None
    if tensor.dtype is FLOAT4_PACKED and not tensor.dim():
        raise TypeError(f"{who}: a float4 tensor without dimensions holds two values; use .reshape(1)")
    _check_backed(tensor, who)


def _check_backed(tensor: torch.Tensor, who: str) -> None:
    """Raise RuntimeError if the tensor reaches past the end of its storage."""
    if not tensor.numel() or tensor._is_zerotensor():
        return
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed, held = (tensor.storage_offset() + reach) * tensor.itemsize, tensor.untyped_storage().nbytes()
    if needed > held:
        raise RuntimeError(
            f"{who}: the tensor needs {needed} bytes of memory and its storage holds {held}: the storage was "
            f"freed or shrunk (UntypedStorage.resize_); give it its memory back first"
        )


def _refuse_wrapper(tensor: torch.Tensor, who: str) -> None:
    from torch._subclasses.fake_tensor import is_fake

    if is_fake(tensor):
        raise TypeError(
            f"{who}: a fake tensor has no memory to read; register the function with jax_op so that "
            f"torch.compile and export see an op"
        )
    if getattr(type(tensor), "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH:
        raise TypeError(
            f"{who}: a {type(tensor).__name__} keeps its values in other tensors; pass those (for a "
            f"DTensor: .to_local())"
        )


_EXPLAIN = {
    "conj": "the tensor is a lazy conjugate (its memory holds the unconjugated values)",
    "neg": "the tensor is a lazy negation (its memory holds the values of opposite sign)",
    "stride": "its strides leave gaps or repeat elements, which JAX can't describe",
    "unaligned": f"its first element is not at a multiple of {ALIGNMENT} bytes, which XLA needs",
    "packed": "two float4 values share a byte in torch and not in JAX",
    "address": "the tensor is zeros without memory (torch's ZeroTensor)",
}


def _copy_reason(tensor: torch.Tensor) -> str:
    if tensor.dtype not in SHAREABLE:
        return "packed"
    if tensor._is_zerotensor():
        return "address"
    if tensor.is_conj():
        return "conj"
    if tensor.is_neg():
        return "neg"
    if tensor.numel() == 0:
        return ""
    if not tensor.is_contiguous() and not _is_permuted_dense(tensor):
        return "stride"
    if tensor.data_ptr() % ALIGNMENT:
        return "unaligned"
    return ""


def _is_permuted_dense(tensor: torch.Tensor) -> bool:
    """Whether some order of the dimensions makes the tensor contiguous (transposes, channels_last)."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


# ---------------------------------------------------------------------------------- conversions


def cpu_device() -> Any:
    """JAX's CPU device, started on first use."""
    global _cpu
    if _cpu is None:
        from bridge.interpretation import prepare_process

        prepare_process()
        _cpu = jax.local_devices(backend="cpu")[0]
    return _cpu


_cpu: Any = None


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in fresh, hence aligned, memory."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.clone(memory_format=torch.contiguous_format)


def _unpack_float4(tensor: torch.Tensor) -> jax.Array:
    packed = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    nibbles = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return jax.device_put(nibbles.view(FLOAT4), cpu_device())


def _pack_float4(array: jax.Array) -> torch.Tensor:
    if array.ndim == 0 or array.shape[-1] % 2:
        raise ValueError(
            f"to_torch packs float4 in pairs: the last dimension must be even, got {array.shape}"
        )
    nibbles = np.asarray(array).view(np.uint8) & 0xF
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return torch.from_numpy(np.ascontiguousarray(packed)).view(FLOAT4_PACKED)


def from_jax(array: jax.Array, index: int | None) -> torch.Tensor:
    """The tensor of a fresh result, which nothing else refers to, on `tpu:index` (simulated); None: `cpu`."""
    if array.dtype == FLOAT4:
        return _pack_float4(array).to("cpu" if index is None else f"tpu:{index}")
    try:
        capsule = _export_capsule(array)
    except Exception:
        torch_dtype(array.dtype)  # names the dtype that is at fault
        raise
    return dlpack.from_capsule(capsule) if index is None else take_over(capsule, index)


class Borrowing:
    """Arrays that name tensors' memory for the length of one call, kept for the next.

    An entry says "a row-major array of this shape and dtype at this address", and holds no
    reference to a tensor. It is right for every tensor that has that address, shape and dtype, and
    is read only while such a tensor is alive, by a call that ends before its caller goes on. So
    entries never go stale, and no tensor's memory is held back. JAX then sees the same array
    object again, which makes its own dispatch twice as quick.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._arrays: dict[tuple[int, torch.Size, torch.dtype], tuple[jax.Array, dlpack.Borrowed]] = {}
        # JAX reads a struct's deleter once more when its array dies, which may be after the entry
        # was dropped. So structs are reused: every one has the same deleter.
        self._spare: list[dlpack.Borrowed] = []
        self._lock = threading.Lock()

    def array(self, tensor: torch.Tensor, who: str) -> tuple[jax.Array, torch.Tensor]:
        """The array over a tensor's memory, and the tensor that owns it.

        The owner is a copy where the memory itself can't be read; keep it alive until the call ends.
        Memory that is seen for the first time goes through `check_readable(tensor, who)`.
        """
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            check_readable(tensor, who)
            count_copy(_copy_reason(tensor) or "stride")
            tensor = _compact(tensor)
        address = tensor.data_ptr()
        key = (address, tensor.shape, tensor.dtype)
        entry = self._arrays.get(key)
        if entry is not None:
            return entry[0], tensor
        check_readable(tensor, who)
        if address == 0 or tensor.numel() == 0:
            return _empty(tensor), tensor
        if address % ALIGNMENT:
            count_copy("unaligned")
            return self.array(_compact(tensor), who)
        if tensor.dtype not in SHAREABLE:
            count_copy("packed")
            return _unpack_float4(tensor), tensor
        return self._import(key), tensor

    def _import(self, key: tuple[int, torch.Size, torch.dtype]) -> jax.Array:
        device = cpu_device()
        with self._lock:
            if key in self._arrays:  # another thread was quicker
                return self._arrays[key][0]
            if len(self._arrays) >= self._capacity:
                self._spare.extend(struct for _, struct in self._arrays.values())
                self._arrays.clear()
            struct = self._spare.pop() if self._spare else dlpack.Borrowed()
            capsule = struct.describe(*key)
            array = _import_capsule(capsule, device, None)
            self._arrays[key] = (array, struct)
        return array


def _empty(tensor: torch.Tensor) -> jax.Array:
    """An array without elements; a tensor that has a size and no memory (torch's ZeroTensor) is zeros."""
    shape = tuple(tensor.shape)
    if tensor.dtype is FLOAT4_PACKED and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    with jax.enable_x64(True):  # or JAX narrows a 64-bit dtype
        return jax.device_put(np.zeros(shape, jax_dtype(tensor.dtype)), cpu_device())

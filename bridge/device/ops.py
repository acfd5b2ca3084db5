"""The ops of the tpu device: the boxed fallback, and the few ops that need a kernel of their own.

Own kernels exist where torch's CPU kernel cannot be run on an alias: creation, copies between
devices, metadata changes, and ops that torch has for accelerators only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge.device import extension, recurrent
from bridge.device.fallback import (
    CHECK_FOR_OVERLAP,
    HOST_ARGUMENTS,
    PRODUCTS_IN_PLACE,
    check_index,
    fallback,
    kernel_for,
    no_layout,
)
from bridge.device.storage import (
    CPU_KEYS,
    DEVICE_TYPE,
    new_storage,
    read_alias,
    set_geometry,
    shared_aliases,
    wrap_result,
)

_KEY = "PrivateUse1"
_aten = torch.ops.aten
_libraries: list[torch.library.Library] = []  # a registration lasts as long as its Library object


def register_ops() -> None:
    """Register every kernel of the device. Call once per process."""
    aten = torch.library.Library("aten", "IMPL")
    _libraries.append(aten)
    native = extension.loaded()
    if native is None:
        _register_python_kernels(aten)
    else:
        for name, arguments in HOST_ARGUMENTS.items():
            native.set_host_arguments(name, sorted(arguments))
        for name in PRODUCTS_IN_PLACE:
            native.set_reads_again(name, True)
        for name in CHECK_FOR_OVERLAP:
            native.set_reads_again(name, False)
        native.register_ops(_direct_ops(), list(_METADATA_OPS))
    for name, kernel in _FOR_ACCELERATORS.items():
        aten.impl(name, kernel, _KEY)
    # Copies handle lazy conjugation, negation and zeros themselves. torch's handlers of these bits
    # copy in turn: without a fallthrough they would call each other for ever.
    for name in ("_copy_from", "_copy_from_and_resize"):
        for key in ("Conjugate", "Negative", "ZeroTensor"):
            aten.impl(name, torch.library.fallthrough_kernel, key)
    everything = torch.library.Library("_", "IMPL")
    _libraries.append(everything)
    for key, layout in _OTHER_LAYOUTS.items():
        everything.fallback(_refuse(layout), key)
    for name in _MAKES_NESTED:
        aten.impl(name, functools.partial(_refuse("nested"), getattr(_aten, name).default), _KEY)
    aten.impl("_nested_tensor_from_mask_left_aligned", lambda tensor, mask: False, _KEY)
    # At both keys, as torch's kernel is for all: tensor subclasses must not see the op.
    for key in (f"Autograd{_KEY}", _KEY):
        aten.impl("_has_compatible_shallow_copy_type", _can_take_data_of, key)


def _register_python_kernels(aten: torch.library.Library) -> None:
    everything = torch.library.Library("_", "IMPL")
    _libraries.append(everything)
    everything.fallback(fallback, _KEY)
    for name, kernel in _OWN_KERNELS.items():
        aten.impl(name, kernel, _KEY)
    for name in _METADATA_OPS:
        aten.impl(name, _lazy_kernel(name, _on_metadata), _KEY)
    aten.impl("_pin_memory", _pin_memory, "CPU")
    for name in _direct_ops():
        aten.impl(name, _lazy_kernel(name, kernel_for), _KEY)


def _on_metadata(op: Any) -> Callable[..., Any]:
    """torch's CPU kernel on the tpu tensor itself: for ops that touch no element."""
    return lambda *args, **kwargs: op.redispatch(CPU_KEYS, *args, **kwargs)


_OTHER_LAYOUTS = {
    "SparsePrivateUse1": "sparse",
    "SparseCsrPrivateUse1": "sparse",
    "NestedTensorPrivateUse1": "nested",
    "QuantizedPrivateUse1": "quantized",
}
"""The kinds of tensors that the device does not have, by the key at which torch looks for their ops."""

_MAKES_NESTED = ("_nested_tensor_from_tensor_list", "_nested_view_from_buffer", "_nested_tensor_from_mask")
"""What makes a nested tensor from dense ones. `nn.TransformerEncoder` asks before it does
(`_nested_tensor_from_mask_left_aligned`), and goes without where the answer is no."""


def _refuse(layout: str) -> Callable[..., Any]:
    def refuse(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        raise no_layout(op._schema.name, layout)

    return refuse


def _lazy_kernel(name: str, build: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A kernel built at its first call: looking an op up costs more than registering it."""
    kernel: Callable[..., Any] | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal kernel
        if kernel is None:
            base, _, overload = name.partition(".")
            kernel = build(getattr(getattr(_aten, base), overload or "default"))
        return kernel(*args, **kwargs)

    return run


def _direct_ops() -> list[str]:
    """Ops that torch would otherwise decompose before they reach the fallback.

    "Structured" ops have a generic kernel that allocates an output and calls the `out=` form, the
    `_foreach` ops one that loops over single tensors, normalisations and some gradients one made of other
    ops. One call of the CPU kernel does the same, with the same rounding.
    """
    on_cpu = set(torch._C._dispatch_get_registrations_for_dispatch_key("CPU"))
    structured = set(
        torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutogradNonFunctional")
    )
    generic = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd"))
    implicit = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    foreach = {name for name in generic if name.startswith("aten::_foreach_") and "out" not in name}
    qualified = ((structured | generic | implicit) & on_cpu) - {"aten::_pin_memory"} | foreach
    names = {name.removeprefix("aten::") for name in qualified if name.startswith("aten::")}
    own = _OWN_KERNELS.keys() | _FOR_ACCELERATORS.keys() | set(_METADATA_OPS)
    return sorted((names | _ALSO_DIRECT) - own)


# "mode" refuses devices that it does not know by name; windows look for a kernel of this device's own.
_ALSO_DIRECT = {"clone", "conj_physical_", "mode.values", "zeros", "ones", "full"} | {
    "kaiser_window",
    "kaiser_window.periodic",
    "kaiser_window.beta",
}

_METADATA_OPS = (
    "alias",
    "as_strided",
    "view",
    "view.dtype",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)


# -- creation ------------------------------------------------------------------------------------


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    _check_options("aten::empty", layout, device)
    return wrap_result(
        torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format)
    )


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    _check_options("aten::empty_strided", layout, device)
    return wrap_result(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _efficientzerotensor(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Zeros with memory. torch's zero tensors without memory save work only, and need C++ to exist."""
    return wrap_result(torch.zeros(size, dtype=dtype, device="cpu"))


def _check_options(name: str, layout: torch.layout | None, device: torch.device | None) -> None:
    if layout is not None and layout is not torch.strided:
        raise no_layout(name, str(layout).removeprefix("torch."))
    if device is not None and device.type == DEVICE_TYPE:
        check_index(device)


# -- copies and scalars --------------------------------------------------------------------------


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if source.is_cpu:
        read_alias(target).copy_(source)
    elif target.is_cpu:
        target.copy_(read_alias(source))
    else:
        aliases = shared_aliases([source, target])
        aliases[id(target)].copy_(aliases[id(source)])
    return target


def _to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """`.to(...)`: one copy on the CPU. Copies are synchronous and no memory is pinned."""
    _check_options("aten::_to_copy", layout, device)
    here = device is None or device.type == DEVICE_TYPE
    copied = _aten._to_copy.default(
        read_alias(tensor),
        dtype=dtype,
        device=torch.device("cpu") if here else device,
        memory_format=memory_format,
    )
    return wrap_result(copied) if here else copied


def _pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """`cpu_tensor.pin_memory()`: a copy. There is no transfer that pinned memory would speed up."""
    return tensor.clone()


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.shape != source.shape:
        target.resize_(source.shape)
    return _copy_from(source, target)


def _local_scalar_dense(tensor: torch.Tensor) -> bool | int | float | complex:
    return read_alias(tensor).item()


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Nothing to remember: no work on any stream is still to come when memory is freed."""


# -- metadata ------------------------------------------------------------------------------------


def _resize(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """`resize_`. A tensor that outgrows its storage moves to a new one, with its elements.

    On other devices the storage itself grows, which views then share; from Python a storage of this
    device cannot grow, so views keep the old one.
    """
    size = list(size)
    stride = _strides_of(tensor, size, memory_format)
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    needed = int(offset + math.prod(size)) * tensor.element_size()
    if needed > storage.nbytes():
        grown = new_storage(needed)
        if storage.nbytes():
            grown_bytes, bytes_ = _bytes_of(grown), _bytes_of(storage)
            read_alias(grown_bytes)[: storage.nbytes()].copy_(read_alias(bytes_))
        storage = grown
    return set_geometry(tensor, storage, offset, size, stride)


def _strides_of(
    tensor: torch.Tensor, size: list[int], memory_format: torch.memory_format | None
) -> Sequence[int]:
    if memory_format in (None, torch.contiguous_format):
        if list(tensor.size()) == size:
            return tensor.stride()
        return torch.empty(size, device="meta").stride()
    if memory_format is torch.preserve_format:
        raise RuntimeError("resize_: unsupported memory format torch.preserve_format")
    return torch.empty(size, device="meta", memory_format=memory_format).stride()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    carrier = wrap_result(torch.empty(0, dtype=torch.uint8, device="cpu"))
    return set_geometry(carrier, storage, 0, (storage.nbytes(),), (1,))


def _resize_output(tensor: torch.Tensor, size: Sequence[int], device: torch.device) -> torch.Tensor:
    return _resize(tensor, size)


def _set_to_nothing(tensor: torch.Tensor) -> torch.Tensor:
    return set_geometry(tensor, new_storage(0), 0, (0,), (1,))


def _can_take_data_of(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `tensor.data = source` is allowed: among dense tensors of cpu and tpu, as for cuda.

    `Module.to("tpu")` asks, and moves a parameter in place where it can: tied parameters stay tied, and
    optimizers made before keep theirs.
    """
    keys, source_keys = torch._C._dispatch_keys(tensor), torch._C._dispatch_keys(source)
    return keys == source_keys or (_is_dense(tensor, keys) and _is_dense(source, source_keys))


def _is_dense(tensor: torch.Tensor, keys: torch._C.DispatchKeySet) -> bool:
    wrapped = keys.has(torch._C.DispatchKey.Python)  # a fake tensor, or another without memory of its own
    return not wrapped and tensor.layout is torch.strided and tensor.device.type in ("cpu", DEVICE_TYPE)


# -- ops that only accelerators have -------------------------------------------------------------


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    return kernel_for(_aten.convolution.default)(
        input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )


def _convolution_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    bias_sizes = [weight.shape[1] * groups if transposed else weight.shape[0]]
    return kernel_for(_aten.convolution_backward.default)(
        grad_output,
        input,
        weight,
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        output_mask,
    )


_OWN_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_efficientzerotensor": _efficientzerotensor,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_to_copy": _to_copy,
    "_local_scalar_dense": _local_scalar_dense,
    "record_stream": _record_stream,
    "resize_": _resize,
    "_resize_output_": _resize_output,
    "set_": _set_to_nothing,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}
"""The kernels that the C++ part has, too (cpp/ops.cpp)."""


def _histc(tensor: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    if tensor.is_floating_point():
        return _histc_of_floats(tensor, bins, min, max)
    # Counts, and integers as large as numbers of experts, are exact in float64.
    return _histc_of_floats(tensor.double(), bins, min, max).to(tensor.dtype)


_histc_of_floats = _lazy_kernel("histc", kernel_for)

_FOR_ACCELERATORS: dict[str, Callable[..., Any]] = {
    "histc": _histc,  # of integers
    "_thnn_fused_lstm_cell": recurrent.lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": recurrent.lstm_cell_backward,
    "_thnn_fused_gru_cell": recurrent.gru_cell,
    "_thnn_fused_gru_cell_backward": recurrent.gru_cell_backward,
}

"""Runs any torch op on tpu tensors with torch's CPU kernel, through aliases of their storage.

`kernel_for(op)` builds one Python kernel per op from its schema, once:

    views              torch's CPU kernel on the tpu tensors themselves: real views, shared storage
    plain functions    positional tensors in, fresh tensors out: the short path
    everything else    lists, keyword tensors, in-place and `out=` arguments, device arguments

The rules for devices are cuda's: all tensors on the device, zero-dimensional CPU tensors allowed as
operands (not as a target), and CPU index tensors allowed where indexing takes them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from bridge.device.storage import (
    CPU_KEYS,
    DEVICE_TYPE,
    from_cpu,
    full_alias,
    read_alias,
    set_geometry,
    shared_aliases,
    wrap_result,
)

Kernel = Callable[..., Any]

_CPU_DEVICE = torch.device("cpu")
_ONE_TENSOR = ("Tensor", "Optional[Tensor]")

# Arguments that may hold CPU tensors of any size, by op name: as on cuda.
_HOST_ARGUMENTS: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        [
            "aten::index",
            "aten::index_put",
            "aten::index_put_",
            "aten::_index_put_impl_",
            "aten::_unsafe_index",
            "aten::_unsafe_index_put",
            "aten::_unsafe_masked_index",
            "aten::_unsafe_masked_index_put_accumulate",
        ],
        frozenset({"indices"}),
    ),
    **dict.fromkeys(
        ["aten::_ctc_loss", "aten::_ctc_loss_backward"], frozenset({"input_lengths", "target_lengths"})
    ),
    "aten::_pack_padded_sequence": frozenset({"lengths"}),
    "aten::_foreach_copy_": frozenset({"src"}),
    **dict.fromkeys(
        [f"aten::_foreach_{name}{end}" for name in ("addcdiv", "addcmul") for end in ("", "_")],
        frozenset({"scalars"}),
    ),
}


def fallback(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The boxed fallback of the tpu device: see the module's text."""
    return kernel_for(op)(*args, **kwargs)


@functools.cache
def kernel_for(op: OpOverload) -> Kernel:
    """The kernel that runs `op` on tpu tensors, built from the op's schema."""
    schema = op._schema
    returns, arguments = schema.returns, schema.arguments
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return functools.partial(op.redispatch, CPU_KEYS)
    if any(a.alias_info is not None and a.alias_info.is_write for a in arguments):
        return _in_place_kernel(op) if _writes_first_only(op) else _writing_kernel(op)
    return _plain_kernel(op) if _is_plain(op) else _general_kernel(op)


def _is_plain(op: OpOverload) -> bool:
    """Whether tensors come one by one, as positional arguments, and there is nothing else to mind."""
    arguments = op._schema.arguments
    if _reads_around(op) or op._schema.name in _HOST_ARGUMENTS:
        return False
    for argument in arguments:
        kind = str(argument.type)
        if "Device" in kind or ("Tensor" in kind and (kind not in _ONE_TENSOR or argument.kwarg_only)):
            return False
    return True


def _writes_first_only(op: OpOverload) -> bool:
    """Whether this is the common in-place op: writes elements of its first argument and returns it."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    return (
        written[0]
        and not any(written[1:])
        and len(op._schema.returns) == 1
        and torch.Tag.inplace_view not in op.tags
        and _is_plain(op)
    )


@functools.cache
def _tensor_positions(op: OpOverload) -> list[int]:
    return [i for i, a in enumerate(op._schema.arguments) if str(a.type) in _ONE_TENSOR]


def _reads_around(op: OpOverload) -> bool:
    """Ops that read the storage outside of the tensor given."""
    return op._schema.name in ("aten::as_strided_copy", "aten::as_strided_scatter")


# -- functions -----------------------------------------------------------------------------------


def _plain_kernel(op: OpOverload) -> Kernel:
    positions = _tensor_positions(op)
    names = [a.name for a in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        count = len(args)
        inputs = list(args)
        pointers = []
        call = op
        for i in positions:
            if i >= count:
                break
            tensor = inputs[i]
            if not isinstance(tensor, torch.Tensor):
                if tensor is not None:  # see _overload_for
                    call = op.overloadpacket
                continue
            if tensor.is_cpu:
                _allow_scalar(op, names[i], tensor)
                continue
            inputs[i] = alias = _alias(op, names[i], tensor)
            pointers.append(alias.data_ptr())
        return _wrap(op, call(*inputs, **kwargs), pointers)

    return kernel


def _general_kernel(op: OpOverload) -> Kernel:
    alias = full_alias if _reads_around(op) else read_alias

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = _Tensors(op, args, kwargs)
        aliases = {id(t): alias(t) for t in tensors.on_device}
        inputs, keywords = tensors.replaced(aliases)
        result = _overload_for(op, args)(*inputs, **keywords)
        return _wrap(op, result, [a.data_ptr() for a in aliases.values()])

    return kernel


def _overload_for(op: OpOverload, args: Sequence[Any]) -> Callable[..., Any]:
    """What to call with these arguments.

    torch hands over a number that stands for a tensor (`x % 5`, op "remainder.Tensor") as a number, which
    most overloads for tensors refuse: let torch choose the overload again.
    """
    numbers = any(
        i < len(args) and args[i] is not None and not isinstance(args[i], torch.Tensor)
        for i in _tensor_positions(op)
    )
    return op.overloadpacket if numbers else op


def _alias(op: OpOverload, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != DEVICE_TYPE:
        raise _mixed_devices(op, name, tensor.device)
    return read_alias(tensor)


def _allow_scalar(op: OpOverload, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim():
        raise _mixed_devices(op, name, tensor.device)


def _mixed_devices(op: OpOverload, name: str, other: torch.device) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, "
        f"{DEVICE_TYPE}:0 and {other}! (when checking argument {name!r} of {op._schema.name}; "
        f"move it with .to({DEVICE_TYPE!r}))"
    )


def _wrap(op: OpOverload, result: Any, pointers: Sequence[int]) -> Any:
    """The results of a CPU op on the tpu device.

    A few kernels return an input as it is, which their schema does not say: that is copied, so that
    every result owns its memory.
    """
    if isinstance(result, torch.Tensor):
        if not result.is_cpu:
            return result
        if result.layout is not torch.strided or result.is_quantized:
            raise no_layout(op._schema.name, result)
        return wrap_result(result.clone() if result.data_ptr() in pointers else result)
    if isinstance(result, list | tuple):
        return type(result)(_wrap(op, r, pointers) for r in result)
    return result


def no_layout(name: str, tensor: torch.Tensor | None = None) -> NotImplementedError:
    """The error for sparse, quantized and nested tensors, which this device does not have."""
    what = "sparse, quantized or nested"
    if tensor is not None:
        what = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
    return NotImplementedError(
        f"{name}: the simulated tpu device holds dense (strided) tensors only, not {what} ones. "
        "Move the operands with .cpu() first."
    )


class _Tensors:
    """The tensors among the arguments of one call, checked against cuda's rules for devices."""

    def __init__(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self.on_device: list[torch.Tensor] = []
        schema = op._schema
        host = _HOST_ARGUMENTS.get(schema.name, frozenset())
        given = list(zip(schema.arguments, args, strict=False))
        given += [(a, kwargs[a.name]) for a in schema.arguments[len(args) :] if a.name in kwargs]
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _flat_tensors(value):
                if tensor.device.type == DEVICE_TYPE:
                    self.on_device.append(tensor)
                elif not tensor.is_cpu or written or (tensor.dim() and argument.name not in host):
                    raise _mixed_devices(op, argument.name, tensor.device)

    def replaced(self, aliases: dict[int, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with aliases for the tpu tensors, and the cpu for the tpu device."""
        return (
            [_replace(a, aliases) for a in self._args],
            {name: _replace(a, aliases) for name, a in self._kwargs.items()},
        )


def _flat_tensors(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return ()


def _replace(value: Any, aliases: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return aliases.get(id(value), value)
    if isinstance(value, list | tuple):
        return [_replace(v, aliases) for v in value]
    if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
        check_index(value)
        return _CPU_DEVICE
    return value


def check_index(device: torch.device) -> None:
    """Raise for a tpu device other than the one there is."""
    if device.index not in (None, 0):
        raise RuntimeError(
            f"invalid device {device}: there is one simulated device, {DEVICE_TYPE}:0 "
            f"(torch.{DEVICE_TYPE}.device_count() is 1)"
        )


# -- writing ops ---------------------------------------------------------------------------------


def _in_place_kernel(op: OpOverload) -> Kernel:
    """The short path of `_writing_kernel`, for ops like `add_`."""
    positions = _tensor_positions(op)[1:]
    names = [a.name for a in op._schema.arguments]
    slow = _writing_kernel(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        target = args[0]
        if target.is_cpu:
            raise _mixed_devices(op, names[0], target.device)
        count = len(args)
        inputs = list(args)
        call = op
        for i in positions:
            if i >= count:
                break
            tensor = inputs[i]
            if not isinstance(tensor, torch.Tensor):
                if tensor is not None:
                    call = op.overloadpacket
                continue
            if tensor.is_cpu:
                _allow_scalar(op, names[i], tensor)
                continue
            if torch._C._is_alias_of(tensor, target):  # type: ignore[attr-defined]
                return slow(*args, **kwargs)
            inputs[i] = _alias(op, names[i], tensor)
        inputs[0] = _alias(op, names[0], target)
        call(*inputs, **kwargs)
        return target

    return kernel


def _writing_kernel(op: OpOverload) -> Kernel:
    """In-place ops write through the aliases; `out=` tensors receive a copy of fresh results.

    An `out=` tensor may overlap an input or need another size, and an alias cannot be resized, so the
    op is always given outputs of its own.
    """
    written = [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    out_names = [a.name for a in written if a.kwarg_only]
    changes_geometry = torch.Tag.inplace_view in op.tags

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = _Tensors(op, args, kwargs)
        if changes_geometry:
            aliases = {id(t): full_alias(t) for t in tensors.on_device}
        else:
            aliases = shared_aliases(tensors.on_device)
        inputs, keywords = tensors.replaced(aliases)
        targets = {name: kwargs[name] for name in out_names if kwargs.get(name) is not None}
        fresh = {name: _fresh(target) for name, target in targets.items()}
        result = _overload_for(op, args)(*inputs, **{**keywords, **fresh})
        if changes_geometry:
            for tensor in tensors.on_device:
                _take_geometry(tensor, aliases[id(tensor)])
        originals = {id(aliases[id(t)]): t for t in tensors.on_device}
        for name, target in targets.items():
            _deliver(fresh[name], target, originals)
        return _originals(op, result, originals)

    return kernel


def _fresh(target: Any) -> Any:
    if isinstance(target, torch.Tensor):
        return torch.empty(0, dtype=target.dtype, device="cpu")
    return [_fresh(t) for t in target]


def _deliver(value: Any, target: Any, originals: dict[int, torch.Tensor]) -> None:
    """Copy a fresh output into the tensor that was passed as `out=`, resizing that as torch does."""
    if not isinstance(target, torch.Tensor):
        for v, t in zip(value, target, strict=True):
            _deliver(v, t, originals)
        return
    originals[id(value)] = target
    if target.shape != value.shape:
        if target.numel():
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(target.shape)}, "
                f"which does not match the required output shape {list(value.shape)}. This behavior is "
                "deprecated. Resize it to 0 elements with out.resize_(0) before reusing it.",
                UserWarning,
                stacklevel=2,
            )
        _take_geometry_and_memory(target, value)
    elif target.numel():
        read_alias(target).copy_(value)


def _take_geometry(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    set_geometry(tensor, tensor.untyped_storage(), alias.storage_offset(), alias.size(), alias.stride())


def _take_geometry_and_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    source = from_cpu(value.clone() if value.storage_offset() else value)
    needed = source.untyped_storage().nbytes()
    offset = tensor.storage_offset()
    room = tensor.untyped_storage().nbytes() - offset * tensor.element_size()
    if needed <= room:  # torch keeps the storage where the result fits in it
        set_geometry(tensor, tensor.untyped_storage(), offset, source.size(), source.stride())
        read_alias(tensor).copy_(value)
    else:
        set_geometry(tensor, source.untyped_storage(), 0, source.size(), source.stride())


def _originals(op: OpOverload, result: Any, originals: dict[int, torch.Tensor]) -> Any:
    """Results of a writing op: the tensors that were written to, or fresh ones."""
    if isinstance(result, torch.Tensor):
        found = originals.get(id(result))
        return _wrap(op, result, ()) if found is None else found
    if isinstance(result, list | tuple):
        return type(result)(_originals(op, r, originals) for r in result)
    return result

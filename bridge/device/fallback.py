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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    sharing_version,
    wrap_result,
)

Kernel = Callable[..., Any]

_CPU_DEVICE = torch.device("cpu")
_CPU_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_COUNTS = torch._C.DispatchKey.ADInplaceOrView
_ONE_TENSOR = ("Tensor", "Optional[Tensor]")

# Arguments that may hold CPU tensors of any size, by op name: as on cuda.
HOST_ARGUMENTS: dict[str, frozenset[str]] = {
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
        return _below_autocast(_in_place_kernel(op) if _writes_first_only(op) else _writing_kernel(op))
    return _below_autocast(_plain_kernel(op) if _is_plain(op) else _general_kernel(op))


def _below_autocast(kernel: Kernel) -> Kernel:
    """The kernel without the autocast of the CPU, which must not see the aliases."""

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return kernel(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_CPU_AUTOCAST):
            return kernel(*args, **kwargs)

    return call


def _is_plain(op: OpOverload) -> bool:
    """Whether tensors come one by one, as positional arguments, and there is nothing else to mind."""
    arguments = op._schema.arguments
    if _reads_around(op) or op._schema.name in HOST_ARGUMENTS:
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
            layout = "quantized" if result.is_quantized else str(result.layout).removeprefix("torch.")
            raise no_layout(op._schema.name, layout)
        return wrap_result(result.clone() if result.data_ptr() in pointers else result)
    if isinstance(result, list | tuple):
        return type(result)(_wrap(op, r, pointers) for r in result)
    return result


def no_layout(name: str, layout: str) -> NotImplementedError:
    """The error for sparse, quantized and nested tensors, which this device does not have."""
    return NotImplementedError(
        f"{name}: the simulated tpu device holds dense (strided) tensors only, not {layout} ones. "
        "Move the operands with .cpu() first."
    )


class _TensorArgument(NamedTuple):
    position: int
    name: str
    written: bool
    is_out: bool
    may_be_on_cpu: bool


@functools.cache
def _tensor_arguments(op: OpOverload) -> tuple[_TensorArgument, ...]:
    """The arguments that hold tensors. A schema makes new objects at each look, so it is read once."""
    host = HOST_ARGUMENTS.get(op._schema.name, frozenset())
    return tuple(
        _TensorArgument(
            position=i,
            name=a.name,
            written=a.alias_info is not None and a.alias_info.is_write,
            is_out=a.kwarg_only,
            may_be_on_cpu=a.name in host,
        )
        for i, a in enumerate(op._schema.arguments)
        if "Tensor" in str(a.type)
    )


class _Tensors:
    """The tensors among the arguments of one call, checked against cuda's rules for devices."""

    def __init__(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self.on_device: list[torch.Tensor] = []
        self.outs: list[torch.Tensor] = []
        """Those given as `out=`."""
        self.changed: list[torch.Tensor] = []
        """Those that the op writes to in place."""
        count = len(args)
        for position, name, written, is_out, may_be_on_cpu in _tensor_arguments(op):
            for tensor in _flat_tensors(args[position] if position < count else kwargs.get(name)):
                if tensor.device.type == DEVICE_TYPE:
                    self.on_device.append(tensor)
                    if written:
                        (self.outs if is_out else self.changed).append(tensor)
                elif not tensor.is_cpu or written or (tensor.dim() and not may_be_on_cpu):
                    raise _mixed_devices(op, name, tensor.device)

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


def counts_inside(target: torch.Tensor) -> bool:
    """Whether the ops inside a kernel that writes to this tensor are to count its versions.

    torch counts the versions of what most ops write, on every device, and then keeps the ops inside from
    counting again. Where it does not (ops on lists, some ops of libraries), those inside the CPU kernel do.
    """
    if torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTS):
        return False
    return not (target.is_inference() and torch.is_inference_mode_enabled())  # no counter, no complaint


def _in_place_kernel(op: OpOverload) -> Kernel:
    """The short path of `_writing_kernel`, for ops like `add_`."""
    positions = _tensor_positions(op)[1:]
    names = [a.name for a in op._schema.arguments]
    slow = _writing_kernel(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        target = args[0]
        if target.is_cpu:
            raise _mixed_devices(op, names[0], target.device)
        if counts_inside(target):
            return slow(*args, **kwargs)
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
        try:
            call(*inputs, **kwargs)
        except RuntimeError as error:
            if _NOT_RESIZABLE not in str(error):
                raise
            return slow(*args, **kwargs)
        return target

    return kernel


def _writing_kernel(op: OpOverload) -> Kernel:
    """In-place and `out=` ops write through aliases, so torch's own checks see what they see on the CPU.

    An alias cannot grow. An `out=` tensor without elements, which is there to be resized, is therefore
    stood in for by an empty CPU tensor, whose content it takes over. An op that turns out to resize
    another tensor is called a second time, with stand-ins for all that it writes to.
    """
    changes_geometry = torch.Tag.inplace_view in op.tags
    reads_again = _may_read_again(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if reads_again:
            args, kwargs = _with_inputs_apart(op, args, kwargs)
        tensors = _Tensors(op, args, kwargs)
        call = _overload_for(op, args)
        counted = [t for t in tensors.outs + tensors.changed if counts_inside(t)]
        if counted and call is op:  # past the op's own counting, if any, which has had its turn
            call = functools.partial(op.redispatch, CPU_KEYS)
        if changes_geometry:
            aliases = {id(t): full_alias(t) for t in tensors.on_device}
        else:
            aliases = shared_aliases(tensors.on_device)
        stand_ins = {id(t): _same_but_empty(t) for t in tensors.outs if not t.numel()}
        aliases |= stand_ins
        aliases |= {id(t): sharing_version(aliases[id(t)], t) for t in counted}
        try:
            inputs, keywords = tensors.replaced(aliases)
            result = call(*inputs, **keywords)
        except RuntimeError as error:
            if _NOT_RESIZABLE not in str(error):
                raise
            _check_no_shared_storage(op, tensors)
            # Outputs have no elements now, since the first call has given the warning about the resize.
            stand_ins = {id(t): torch.empty(0, dtype=t.dtype, device="cpu") for t in tensors.outs}
            stand_ins |= {id(t): read_alias(t).clone() for t in tensors.changed}
            aliases |= stand_ins
            aliases |= {id(t): sharing_version(aliases[id(t)], t) for t in counted}
            inputs, keywords = tensors.replaced(aliases)
            result = call(*inputs, **keywords)
        for tensor in tensors.outs + tensors.changed:
            alias = aliases[id(tensor)]
            if id(tensor) in stand_ins:
                _take_result(tensor, alias)
            else:
                _take_geometry(tensor, alias, (alias if changes_geometry else tensor).storage_offset())
        return _originals(op, result, {id(aliases[id(t)]): t for t in tensors.on_device})

    return kernel


PRODUCTS_IN_PLACE = ("aten::addmm_", "aten::addmv_", "aten::addbmm_", "aten::baddbmm_")

CHECK_FOR_OVERLAP = frozenset(
    f"aten::{name}"
    for name in (
        "cat",
        "cross",
        "gather",
        "index_add",
        "index_copy",
        "index_reduce",
        "index_select",
        "kthvalue",
        "linalg_cross",
        "masked_select",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "take",
        "take_along_dim",
    )
)
"""Ops that refuse a result over their own inputs, as elementwise ones do where it is not all of one."""


def _may_read_again(op: OpOverload) -> bool:
    """Whether the op may read inputs, unchecked, after it has begun to write to others of its arguments."""
    name = op._schema.name
    if torch.Tag.pointwise in op.tags or name in CHECK_FOR_OVERLAP:
        return False
    return name in PRODUCTS_IN_PLACE or any(a.written and a.is_out for a in _tensor_arguments(op))


def _with_inputs_apart(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with copies of the inputs that share memory with what the op writes.

    `mm(a, b, out=a)` is right on a TPU, where results are written at the end; torch's CPU kernels, which
    write as they go, would read what they have written, unnoticed.
    """
    arguments = _tensor_arguments(op)
    values = [args[a.position] if a.position < len(args) else kwargs.get(a.name) for a in arguments]
    written = {
        _memory(t)
        for a, value in zip(arguments, values, strict=True)
        if a.written
        for t in _flat_tensors(value)
        if t.numel()
    }
    positional, kwargs = list(args), dict(kwargs)
    for a, value in zip(arguments, values, strict=True):
        shared = {id(t): t for t in _flat_tensors(value) if t.numel() and _memory(t) in written}
        if a.written or not shared:
            continue
        apart = _replace(value, {known: t.clone() for known, t in shared.items()})
        if a.position < len(args):
            positional[a.position] = apart
        else:
            kwargs[a.name] = apart
    return tuple(positional), kwargs


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_NOT_RESIZABLE = "storage that is not resizable"  # in torch's error


def _check_no_shared_storage(op: OpOverload, tensors: _Tensors) -> None:
    """Raise for a tensor to be resized that shares its memory with another argument."""
    storages = {id(t): _memory(t) for t in tensors.on_device}
    pointers = list(storages.values())
    if any(pointers.count(storages[id(t)]) > 1 for t in tensors.outs + tensors.changed):
        raise RuntimeError(
            f"unsupported operation: {op._schema.name} has to resize a tensor, and some elements of another "
            "argument and the written-to tensor refer to a single memory location. Please clone() the tensor "
            "before performing the operation."
        )


def _same_but_empty(target: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the shape of one without elements: some kernels look at it before they resize."""
    return torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device="cpu")


def _take_geometry(tensor: torch.Tensor, alias: torch.Tensor, offset: int | torch.SymInt) -> None:
    """Give a tensor the size, strides and lazy conjugation that the op has given its alias."""
    if alias.shape != tensor.shape or alias.stride() != tensor.stride() or offset != tensor.storage_offset():
        set_geometry(tensor, tensor.untyped_storage(), offset, alias.size(), alias.stride())
    _take_lazy_bits(tensor, alias)


def _take_lazy_bits(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    if alias.is_conj() != tensor.is_conj():  # linalg.lu_solve, say
        torch._C._set_conj(tensor, alias.is_conj())
    if alias.is_neg() != tensor.is_neg():
        torch._C._set_neg(tensor, alias.is_neg())


def _take_result(target: torch.Tensor, value: torch.Tensor) -> None:
    """Make an `out=` tensor hold the fresh result of an op, resized as torch does."""
    if target.shape == value.shape and target.numel():
        read_alias(target).copy_(value)
        return
    offset = target.storage_offset()
    needed = value.untyped_storage().nbytes()
    room = target.untyped_storage().nbytes() - offset * target.element_size()
    if needed <= room:  # torch keeps the storage where the result fits in it
        _take_geometry(target, value, offset)
        read_alias(target).copy_(value)
    else:
        source = from_cpu(value)
        set_geometry(target, source.untyped_storage(), value.storage_offset(), value.size(), value.stride())
        _take_lazy_bits(target, value)


def _originals(op: OpOverload, result: Any, originals: dict[int, torch.Tensor]) -> Any:
    """Results of a writing op: the tensors that were written to, or fresh ones."""
    if isinstance(result, torch.Tensor):
        found = originals.get(id(result))
        return _wrap(op, result, ()) if found is None else found
    if isinstance(result, list | tuple):
        return type(result)(_originals(op, r, originals) for r in result)
    return result

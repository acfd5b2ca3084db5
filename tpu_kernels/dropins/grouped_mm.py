"""`torch.nn.functional.grouped_mm`, also known as `torch._grouped_mm`, computed by grouped matmul.

The rules are torch's own: a call that is not plainly right by them is handed to torch, which raises its own
errors. Where torch asks more only for the sake of its kernels, we don't: any strides, float64, float32
results of narrower operands. What it leaves undefined, rows and columns behind the last group, is 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bridge.compiler import run_as_is
from bridge.device.imports import after_import
from tpu_kernels._checks import FLOATING
from tpu_kernels.dropins.dropin import Add, DropIn, before_overriding
from tpu_kernels.grouped_matmul.api import grouped_matmul
from tpu_kernels.grouped_matmul.arguments import values_at_hand
from tpu_kernels.grouped_matmul.transposed import transposed_grouped_matmul

_OP = torch.ops.aten._grouped_mm.default
_NAME = "_grouped_mm"
_KEYS = ("AutogradPrivateUse1", "PrivateUse1")
_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"
_DEVICES = ("cpu", "tpu")
_SHOWN = 16

# As it is now: by the time of a call, the name may be someone else's.
_torchs = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


class Call(NamedTuple):
    """The arguments of `torch.nn.functional.grouped_mm`."""

    mat_a: torch.Tensor
    mat_b: torch.Tensor
    offs: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None


def compute(call: Call, otherwise: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The result of a call, contiguous.

    | `mat_a` | `mat_b` | `offs` split | result |
    |---|---|---|---|
    | [M, K] | [G, K, N] | M | [M, N], the product of each group's rows with its matrix |
    | [G, M, K] | [K, N] | N | [M, N], the product of its matrix with each group's columns |
    | [M, K] | [K, N] | K | [G, M, N], the product over each group's part of K |
    | [G, M, K] | [G, K, N] | | [G, M, N] |

    Offsets are the ends of the groups. On `cpu` and on the simulated device they are checked; elsewhere, and
    in compiled functions, each counts as at least the one before, and at most the size that they split.

    Args:
        call: the arguments.
        otherwise: torch's own function, which gets the arguments of a call that is not ours.

    Raises:
        ValueError: offsets that decrease, or are out of range.
    """
    if not _fits(call):
        return otherwise(*call)
    mat_a, mat_b, offs, _, out_dtype = call
    if offs is None:
        return _batched(mat_a, mat_b, out_dtype)
    if mat_a.dim() == 2 and mat_b.dim() == 2:
        sizes = _sizes(offs, mat_b.shape[0])
        return transposed_grouped_matmul(mat_a.t(), mat_b, sizes, out_dtype=out_dtype)
    if mat_a.dim() == 2:
        return _rows(mat_a, mat_b, _sizes(offs, mat_a.shape[0]), out_dtype)
    return _rows(mat_b.t(), mat_a.mT, _sizes(offs, mat_b.shape[1]), out_dtype).t().contiguous()


def _rows(
    rows: torch.Tensor, matrices: torch.Tensor, sizes: torch.Tensor, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """[M, N]: the product of rows [M, K] with the matrices [G, K, N] of their groups, in either layout."""
    transposed = matrices.stride(1) == 1 and matrices.stride(2) != 1
    return grouped_matmul(
        rows,
        matrices.mT if transposed else matrices,
        sizes,
        transpose_rhs=transposed,
        out_dtype=out_dtype,
    )


def _batched(mat_a: torch.Tensor, mat_b: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    if out_dtype is not None:
        mat_a, mat_b = mat_a.to(out_dtype), mat_b.to(out_dtype)
    device = mat_a.device.type
    if not torch.is_autocast_enabled(device):
        return torch.bmm(mat_a, mat_b)
    with torch.autocast(device, enabled=False):  # it concerns bmm, but not grouped_mm
        return torch.bmm(mat_a, mat_b)


def _sizes(offs: torch.Tensor, length: int) -> torch.Tensor:
    """The sizes of groups that end at these offsets."""
    if values_at_hand(offs):
        _check_offsets(offs, length)
    else:
        offs = offs.clamp(0, length).cummax(0).values
    return offs.diff(prepend=offs.new_zeros(1))


def _check_offsets(offs: torch.Tensor, length: int) -> None:
    ends = offs.tolist()
    if any(end < start or end > length for start, end in zip([0, *ends], ends, strict=False)):
        raise ValueError(
            f"grouped_mm: offs must not decrease, and be between 0 and {length}, the size that they split, "
            f"got {ends[:_SHOWN]}{'...' if len(ends) > _SHOWN else ''}. They are the ends of groups"
        )


# What is plainly right by torch's rules ----------------------------------------------------------------


def _fits(call: Call) -> bool:
    """Whether the call is right by torch's rules, and for us."""
    mat_a, mat_b, offs, bias, out_dtype = call
    if bias is not None or not _are_matrices(mat_a, mat_b) or not _fits_dtype(mat_a.dtype, out_dtype):
        return False
    if mat_a.dim() == 3 and mat_b.dim() == 3:
        return offs is None and mat_a.shape[0] == mat_b.shape[0] and mat_a.shape[2] == mat_b.shape[1]
    if not _is_dense(offs) or offs is None:
        return False
    if offs.dtype != torch.int32 or offs.dim() != 1 or offs.device != mat_a.device:
        return False
    groups = [matrix.shape[0] for matrix in (mat_a, mat_b) if matrix.dim() == 3]
    return mat_a.shape[-1] == mat_b.shape[-2] and all(n == offs.shape[0] for n in groups)


def _are_matrices(mat_a: Any, mat_b: Any) -> bool:
    return (
        _is_dense(mat_a)
        and _is_dense(mat_b)
        and mat_a.dim() in (2, 3)
        and mat_b.dim() in (2, 3)
        and mat_a.dtype in FLOATING
        and mat_a.dtype == mat_b.dtype
        and mat_a.device.type in _DEVICES
        and mat_a.device == mat_b.device
    )


def _is_dense(tensor: Any) -> bool:
    """Whether an op of ours can take it. DTensor can't be: it knows how to shard torch's ops, not ours."""
    return (
        isinstance(tensor, torch.Tensor)
        and not tensor.is_nested
        and tensor.layout == torch.strided
        and not is_traceable_wrapper_subclass(tensor)
    )


def _fits_dtype(dtype: torch.dtype, out_dtype: torch.dtype | None) -> bool:
    narrow = (torch.bfloat16, torch.float16)
    return out_dtype is None or out_dtype == dtype or (out_dtype == torch.float32 and dtype in narrow)


# On tpu ------------------------------------------------------------------------------------------------

_libraries: list[torch.library.Library] = []


def _enable() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for key in (*_KEYS, _TRANSFORMS):
        library.impl(_NAME, _kernel(torch.library.get_kernel(_OP, key)), key, with_keyset=True)
    _OP._dispatch_cache.clear()  # what tracing remembers of kernels


def _kernel(below: Any) -> Callable[..., torch.Tensor]:
    """A kernel for the dispatcher, and what torch has in its place."""

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = Call(*args, **kwargs)
        if call.mat_a.device.type != "tpu":  # transforms come before devices
            return below.call_boxed(keys, *call)
        return compute(call, lambda *given: below.call_boxed(keys, *given))

    return kernel


def _disable() -> None:
    while _libraries:
        _libraries.pop()._destroy()
    _OP._dispatch_cache.clear()


# Under overrides() -------------------------------------------------------------------------------------


def _replacement(*args: Any, **kwargs: Any) -> torch.Tensor:
    try:
        call = Call(*args, **{_NAMES.get(name, name): value for name, value in kwargs.items()})
    except TypeError:  # torch's own says what is missing, or too much
        return _torchs(*args, **kwargs)
    return compute(call, _torchs)


_NAMES = {"input": "mat_a", "self": "mat_a", "mat2": "mat_b"}
"""How torch's builtin and op call what `torch.nn.functional.grouped_mm` calls otherwise."""


def _overridden(add: Add) -> None:
    # torch.nn.functional.grouped_mm is a plain function, under which torch sees this builtin.
    for function in (_torchs, _OP, torch.ops.aten._grouped_mm):
        add(function, _replacement)
    before_overriding(lambda: after_import("torch._dynamo.variables.torch", _let_modes_see))


def _let_modes_see(dynamo: ModuleType) -> None:
    """A `TorchFunctionMode` sees the builtin. To torch.compile it would not: its name begins with "_"."""
    dynamo.get_overridable_functions().add(_torchs)  # private, and cached


run_as_is(sys.modules[__name__])
DROP_IN = DropIn("torch.nn.functional.grouped_mm", _enable, _disable, _overridden)

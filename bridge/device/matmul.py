"""Matrix products of float32 tpu tensors in passes over bfloat16 parts, as `bridge.precision` asks.

`install()` puts kernels before those of the device, when precision is first used in the process. They look at
the thread's setting at each call: the device's own kernel runs if there is none, and as often as there are
passes if there is one. Sums that are part of an op (`addmm`'s input, a bias) are added in float32 afterwards.

Ops made of these (linear, matmul, einsum, attention, the backward formulas of all) come here on their way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.device.storage import CPU_KEYS, cpu_alias, from_cpu
from bridge.precision import Arithmetic, current_passes, exactly, multiply

Tensor = torch.Tensor
Kernel = Callable[..., Any]

_KEY = "PrivateUse1"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
_libraries: list[torch.library.Library] = []  # a registration lasts as long as its Library object


def install() -> None:
    """Register the kernels, once per process. The device is registered already."""
    if _libraries:
        return
    aten = torch.library.Library("aten", "IMPL")
    kernels = {name: _emulating(name, _own_kernel) for name in [*_EMULATIONS, *_WRITING]}
    kernels |= {name: _with_inner_products(name) for name in _CONTAINERS}
    for name, kernel in kernels.items():
        _hide_from_compiler(kernel)
        aten.impl(name, kernel, _KEY)
    _libraries.append(aten)


def _hide_from_compiler(kernel: Any) -> None:
    """Let torch.compile not look into a kernel that runs where it has broken a graph.

    The names are private. The public `torch.compiler.disable` would load the compiler, which takes seconds.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(kernel.__code__, eval_frame._FrameExecStrategy(skip, skip))


def _own_kernel(name: str) -> Kernel:
    """The kernel that the device has for an op: its own, or its fallback."""
    kernel = torch.library.get_kernel(f"aten::{name}", _KEY)
    return functools.partial(kernel.call_boxed, _KEYS)


def _emulating(name: str, kernel_of: Callable[[str], Kernel]) -> Kernel:
    """The kernel of an op that computes in passes when the thread asks for it.

    Args:
        name: of the op, with its overload.
        kernel_of: gives the kernels that compute exactly, by name.
    """
    exact = kernel_of(name)
    compute = _writing(name, kernel_of) if name in _WRITING else _functional(name, kernel_of)
    operands = 2 if name == "_grouped_mm" else 3  # the arguments that have to be float32

    def kernel(*args: Any, **kwargs: Any) -> Any:
        passes = current_passes()
        if not passes or any(isinstance(a, Tensor) and a.dtype is not torch.float32 for a in args[:operands]):
            return exact(*args, **kwargs)
        with exactly():
            return compute(passes, *args, **kwargs)

    return kernel


def _functional(name: str, kernel_of: Callable[[str], Kernel]) -> Kernel:
    product = kernel_of("addmm" if name == "_addmm_activation" else name)
    return functools.partial(_EMULATIONS[name], product)


def _writing(name: str, kernel_of: Callable[[str], Kernel]) -> Kernel:
    exact, compute = kernel_of(name), _functional(_WRITING[name], kernel_of)

    def write(passes: int, *args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        result = compute(passes, *args, **options)
        # For its checks, and the size it gives to `out`.
        written = exact(*args, **options) if out is None else exact(*args, **options, out=out)
        return written.copy_(result)

    return write


# -- arithmetic -------------------------------------------------------------------------------------------


def _round(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def _finite_or_zero(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


_TORCH = Arithmetic(_round, _finite_or_zero)


# -- products, by op: (the exact product, passes, the op's arguments) -------------------------------------


def _plain(product: Kernel, passes: int, lhs: Tensor, rhs: Tensor) -> Tensor:
    return multiply(product, lhs, rhs, passes, _TORCH)


def _added(
    product: Kernel,
    passes: int,
    addend: Tensor,
    lhs: Tensor,
    rhs: Tensor,
    beta: complex = 1,
    alpha: complex = 1,
) -> Tensor:
    """beta * addend + alpha * (lhs @ rhs); with beta 0 the addend does not count, even if it is NaN."""
    multiplied = multiply(lambda left, right: product(addend, left, right, beta=0), lhs, rhs, passes, _TORCH)
    if beta == 0:
        return multiplied if alpha == 1 else multiplied * alpha
    return torch.add(addend if beta == 1 else addend * beta, multiplied, alpha=alpha)


def _activated(product: Kernel, passes: int, *args: Any, use_gelu: bool = False, **options: Any) -> Tensor:
    result = _added(product, passes, *args, **options)
    return torch.nn.functional.gelu(result) if use_gelu else torch.relu(result)


def _grouped(
    product: Kernel,
    passes: int,
    lhs: Tensor,
    rhs: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if bias is not None:  # torch refuses it
        return product(lhs, rhs, offs, bias, out_dtype)
    return multiply(lambda left, right: product(left, right, offs, None, out_dtype), lhs, rhs, passes, _TORCH)


def _convolution(
    product: Kernel, passes: int, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
) -> Tensor:
    result = multiply(
        lambda left, right: product(left, right, None, *geometry), input, weight, passes, _TORCH
    )
    return result if bias is None else result + bias.reshape(-1, *[1] * (result.dim() - 2))


def _convolution_backward(
    product: Kernel, passes: int, grad: Tensor, input: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    *geometry, wanted = rest

    def of_input(grad: Tensor, weight: Tensor) -> Tensor:
        return product(grad, input, weight, *geometry, [True, False, False])[0]

    def of_weight(grad: Tensor, input: Tensor) -> Tensor:
        return product(grad, input, weight, *geometry, [False, True, False])[1]

    return (
        multiply(of_input, grad, weight, passes, _TORCH) if wanted[0] else None,
        multiply(of_weight, grad, input, passes, _TORCH) if wanted[1] else None,
        product(grad, input, weight, *geometry, [False, False, True])[2] if wanted[2] else None,
    )


_EMULATIONS: dict[str, Kernel] = {
    **dict.fromkeys(["mm", "bmm", "mv", "dot", "vdot"], _plain),
    **dict.fromkeys(["addmm", "addmv", "baddbmm", "addbmm"], _added),
    "_addmm_activation": _activated,
    "_grouped_mm": _grouped,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}

# Ops that write their result to an argument, and the op that returns it.
_WRITING: dict[str, str] = {
    **{f"{name}.out": name for name in ("mm", "bmm", "mv", "dot", "vdot", "_addmm_activation")},
    **{f"{name}{end}": name for name in ("addmm", "addmv", "baddbmm", "addbmm") for end in ("_", ".out")},
}

# -- ops whose CPU kernels call products -------------------------------------------------------------------

_CONTAINERS = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd", "linalg_matrix_exp")


def _with_inner_products(name: str) -> Kernel:
    exact = _own_kernel(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        devices = {a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor)}
        if not current_passes() or len(devices) > 1:
            return exact(*args, **kwargs)
        inputs = [_alias(a) for a in args]
        options = {option: _alias(a) for option, a in kwargs.items()}
        with _InnerProducts():
            result = _on_cpu(name).redispatch(CPU_KEYS, *inputs, **options)
        index = devices.pop().index
        if isinstance(result, Tensor):
            return from_cpu(result, index)
        return tuple(from_cpu(r, index) if isinstance(r, Tensor) else r for r in result)

    return kernel


def _alias(value: Any) -> Any:
    return cpu_alias(value) if isinstance(value, Tensor) else value


class _InnerProducts(TorchDispatchMode):
    """Sees the ops that a CPU kernel calls, and computes the products among them in passes."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        overload = func._schema.overload_name
        name = func._schema.name.removeprefix("aten::") + (f".{overload}" if overload else "")
        if name in _EMULATIONS or name in _WRITING:
            return _emulating_on_cpu(name)(*args, **(kwargs or {}))
        if name in _CONTAINERS:  # one may call another
            with self:
                return func.redispatch(CPU_KEYS, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@functools.cache
def _emulating_on_cpu(name: str) -> Kernel:
    return _emulating(name, _on_cpu)


def _on_cpu(name: str) -> OpOverload:
    """The op, which runs on CPU tensors as torch has it."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")

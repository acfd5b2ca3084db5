"""`overrides()`: our kernels in place of torch's functions, on any device, inside one block of code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels.context_parallel.active import refuse
from tpu_kernels.dropins.copies import with_names
from tpu_kernels.dropins.dropin import OverridingMode
from tpu_kernels.dropins.registry import DROP_INS

_autograd: Any = torch.autograd
_replacements: dict[Any, Callable[..., Any]] = {}
"""Torch's functions, each with ours."""
_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class overrides(OverridingMode):
    """Context in which our kernels compute torch's attention and `F.grouped_mm`, on `cpu` and `tpu` tensors.

        with tpu_kernels.overrides():
            loss = model(batch)

    It holds in the thread that entered it, until the block ends, by an exception too; contexts may be nested,
    one object entered many times, and an object decorates functions (`@tpu_kernels.overrides()`). It is a
    `TorchFunctionMode`, which sees all calls of torch functions; nothing in torch is patched, but for what
    FlexAttention does below its function (see `flex_attention`), and for the list of functions that
    torch.compile lets a mode see, which lacks `torch._grouped_mm` (see `grouped_mm`). So:

    - A function made by `torch.compile` has one graph for inside and one for outside, whichever came first.
    - Backward uses what forward used, inside or outside. With `torch.utils.checkpoint`, which computes the
      forward again, run backward inside too.
    - Programs of `torch.export` that hold the function as an op are concerned, as eager code is.
    - Other threads and TorchScript functions are not; nor is what a handler of another `__torch_function__`
      calls, since torch switches modes off there.
    - `nn.MultiheadAttention` and transformer layers take their normal path, not the fused one for inference.
    """

    def __enter__(self) -> Any:
        if not torch.compiler.is_compiling():
            refuse("overrides()", "enter it outside of that block")
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = _replacements.get(func)
        return (func if replacement is None else replacement)(*args, **(kwargs or {}))

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, run inside of the context.

        Raises `TypeError` for generators and coroutines: their code runs after the call has returned.
        """
        if any(later(function) for later in _RUN_LATER):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"@overrides() must decorate a function whose call runs it, got the generator or coroutine "
                f"function {name}; write `with overrides():` inside of it, around code without yield or await"
            )

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with overrides():
                return function(*args, **kwargs)

        return inside


# Backward, which is a torch function too: what runs in it, such as the forward of a checkpoint, is inside.


def _engine(*args: Any, **kwargs: Any) -> Any:
    with overrides():
        return _autograd._engine_run_backward(*args, **kwargs)


_inner_backward = with_names(torch.autograd.backward, _engine_run_backward=_engine)
_inner_grad = with_names(torch.autograd.grad, _engine_run_backward=_engine)


def _backward(*args: Any, **kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return torch.autograd.backward(*args, **kwargs)
    return _inner_backward(*args, **kwargs)


def _grad(*args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return torch.autograd.grad(*args, **kwargs)
    return _inner_grad(*args, **kwargs)


def _tensor_backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    _backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_replacements |= {
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    torch.Tensor.backward: _tensor_backward,
}
for _drop_in in DROP_INS:
    _drop_in.overridden(_replacements.__setitem__)

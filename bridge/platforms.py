"""Where a program runs: here on the CPU backend, or on a real TPU through the `torch_tpu` package.

With `torch_tpu` and a TPU, the `tpu` device is theirs, and every program (also derived gradients and
vmap) is handed to their compiler as one JAX function. Everything else in the bridge is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from bridge.program import Program

_callables: weakref.WeakKeyDictionary[Program, Callable[..., Any]] = weakref.WeakKeyDictionary()


def run_on_tpu(program: Program, tensors: Sequence[torch.Tensor], wide: bool) -> list[torch.Tensor]:
    """Run a program on tensors of a real TPU.

    Args:
        wide: whether JAX must keep 64 bits while it traces.

    Raises:
        ImportError: `torch_tpu` is of another version than the bridge knows.
    """
    found = _callables.get(program)
    if found is None:
        found = _callables[program] = _compile_with_torch_tpu(program)
    with jax.enable_x64(wide):
        results = found(*tensors)
    return list(results)


def _compile_with_torch_tpu(program: Program) -> Callable[..., Any]:
    try:
        # Private in torch_tpu 0.2.0: the object behind its own jax_op; the only way to hand over a
        # function that is derived and has no signature of its own.
        from torch_tpu._internal.pallas.pallas import JaxCallable  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "tensors are on a real TPU, but this version of torch_tpu has no "
            "torch_tpu._internal.pallas.pallas.JaxCallable; the bridge knows torch_tpu 0.2"
        ) from error

    known = weakref.ref(program)  # the callable must not keep its program alive

    def function(*arrays: Any) -> tuple[Any, ...]:
        program = known()
        assert program is not None  # it is being called
        return tuple(program.working(arrays)(*arrays))

    # keep_unused: torch_tpu hands every tensor to the compiled function, also those it does not read.
    jitted = jax.jit(function, keep_unused=True)
    return JaxCallable(name=program.name, jit_fn=jitted, trace_key=program.name)

"""Where a program runs: here on the CPU backend, or on a real TPU through the `torch_tpu` package.

With `torch_tpu` and a TPU, the `tpu` device is theirs, and every program (also derived gradients and
vmap) is handed to their compiler as one JAX function. Everything else in the bridge is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridge.program import Program

_callables: weakref.WeakKeyDictionary[Program, Callable[..., Any]] = weakref.WeakKeyDictionary()


def run_on_tpu(program: Program, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a program on tensors of a real TPU."""
    found = _callables.get(program)
    if found is None:
        found = _callables[program] = _compile_with_torch_tpu(program)
    results = found(*tensors)
    return list(results) if isinstance(results, tuple | list) else [results]


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
    import jax

    def function(*arrays: Any) -> tuple[Any, ...]:
        return tuple(program.working(arrays)(*arrays))

    return JaxCallable(name=program.name, jit_fn=jax.jit(function), trace_key=program.name)

"""The class behind torch_tpu's `jax_op`: hands a JAX function to its compiler."""

from __future__ import annotations

from typing import Any

import jax
import torch
from jax import export
from jax.core import eval_jaxpr

import bridge
from bridge.device.storage import cpu_alias, from_cpu
from bridge.interpretation import interpret_kernels

made: list[str] = []
"""The name of each function that was handed over."""


class JaxCallable:
    """Constructor and call of torch_tpu 0.2.0's class of this name; the function runs on the CPU."""

    def __init__(self, name: str, jit_fn: Any, trace_key: str) -> None:
        made.append(name)
        self.jit_fn = jit_fn

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert all(t.device.type == "tpu" for t in tensors), [t.device for t in tensors]
        arrays = [bridge.to_jax(cpu_alias(t)) for t in tensors]
        exported = export.export(self.jit_fn, platforms=["tpu"])(*arrays)
        assert exported.module_kept_var_idx == tuple(range(len(tensors)))  # all of them are passed to it
        program = interpret_kernels(jax.make_jaxpr(self.jit_fn)(*arrays), "fast").jaxpr
        results = eval_jaxpr(program.jaxpr, program.consts, *arrays)
        return tuple(from_cpu(bridge.to_torch(a, copy=True)) for a in results)

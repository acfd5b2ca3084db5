"""torch.vmap over an op, and batches of gradients: the program of `jax.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from bridge.program import Flat, Program


def vmapped(program: Program, in_dims: Sequence[int | None]) -> Program:
    """The program mapped over dimension `in_dims[i]` of input i (None: not mapped), and 0 of each result."""
    axes = tuple(in_dims)
    text = ",".join("-" if d is None else str(d) for d in axes)

    def mapped(fn: Flat) -> Flat:
        def call(*arrays: Any) -> tuple[Any, ...]:
            return tuple(jax.vmap(lambda *xs: tuple(fn(*xs)), in_axes=axes, out_axes=0)(*arrays))

        return call

    return program.derive(f"vmap({text})", mapped)


def batched(
    call: Callable[[Program, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    program: Program,
    tensors: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """`call(program, tensors)`, also for gradients that `torch.autograd.grad(is_grads_batched=True)` passes.

    Those hide a batch dimension in a way older than torch.func's, which has no hook for a Function.
    """
    # Private to torch, and its only door to these tensors: level and hidden dimension.
    hidden = [torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors]
    if not any(hidden):
        return call(program, tensors)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    shown = [
        torch._remove_batch_dim(t, level, 1, 0) if h else t for t, h in zip(tensors, hidden, strict=True)
    ]
    outs = call(vmapped(program, [0 if h else None for h in hidden]), shown)
    return [torch._add_batch_dim(out, 0, level) for out in outs]

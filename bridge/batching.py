"""torch.vmap over an op, and batches of gradients: the program of `jax.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

# Private: torch's only doors to tensors that hide a batch dimension in the old way.
from torch import _add_batch_dim, _remove_batch_dim  # pyright: ignore[reportPrivateImportUsage]
from torch._C._functorch import is_legacy_batchedtensor

from bridge.program import Program
from bridge.roots import Flat


def vmapped(program: Program, in_dims: Sequence[int | None]) -> Program:
    """The program mapped over dimension `in_dims[i]` of input i (None: not mapped), and 0 of each result."""
    axes = tuple(in_dims)
    text = ",".join("-" if d is None else str(d) for d in axes)

    def mapped(fn: Flat) -> Flat:
        def call(*arrays: Any) -> tuple[Any, ...]:
            return tuple(jax.vmap(lambda *xs: tuple(fn(*xs)), in_axes=axes, out_axes=0)(*arrays))

        return call

    return program.derive(f"vmap({text})", mapped)


given_rules: dict[str, Callable[..., Any]] = {}
"""Rules given with `register_vmap`, by the name of the op; they map the op itself, not its derivatives."""


def given_rule(program: Program) -> Callable[..., Any] | None:
    """The rule given for the op whose base program this is."""
    rule = given_rules.get(program.definition.name)
    return rule if program.name.endswith("]") else None  # names of derived programs end with ")"


def apply_given(
    rule: Callable[..., Any],
    info: Any,
    in_dims: Sequence[int | None],
    program: Program,
    tensors: Sequence[torch.Tensor],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(results, their mapped dimensions) by a rule as `torch.library.register_vmap` takes it."""
    signature = program.definition.signature
    statics = [
        p.static.to_torch(value)
        for p, value in zip(signature.static_parameters, program.statics, strict=True)
        if p.static is not None
    ]
    args, kwargs = signature.arguments(tensors, program.structure, statics)
    dims, _ = signature.arguments(in_dims, program.structure, [None] * len(statics))
    outs, out_dims = rule(info, tuple(dims), *args, **kwargs)
    if signature.returns.kind == "tensor":
        return (outs,), (out_dims,)
    same = out_dims if isinstance(out_dims, tuple | list) else [out_dims] * len(outs)
    return tuple(outs), tuple(same)


def batched(
    call: Callable[[Program, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    program: Program,
    tensors: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """`call(program, tensors)`, also for gradients that `torch.autograd.grad(is_grads_batched=True)` passes.

    Those hide a batch dimension in a way older than torch.func's, which has no hook for a Function.
    """
    hidden = list(map(is_legacy_batchedtensor, tensors))
    if True not in hidden:
        return call(program, tensors)
    level = _hidden_level(tensors[hidden.index(True)])
    shown = [_remove_batch_dim(t, level, 1, 0) if h else t for t, h in zip(tensors, hidden, strict=True)]
    outs = call(vmapped(program, [0 if h else None for h in hidden]), shown)
    return [_add_batch_dim(out, 0, level) for out in outs]


def _hidden_level(tensor: torch.Tensor) -> int:
    """The level of a hidden batch dimension.

    torch keeps count of levels in the thread that called it, and the backward of tpu tensors runs in another;
    so they are tried: a dimension of a level that the tensor does not have is made up, here with size 0.
    torch has no public function for such tensors.
    """
    for level in range(1, 9):
        if _remove_batch_dim(tensor, level, 0, 0).shape[0]:
            return level
    raise NotImplementedError("an empty batch of gradients (torch.autograd.grad with is_grads_batched=True)")

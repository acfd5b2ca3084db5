"""Experts of Hugging Face models by grouped matmul: `experts_implementation="tpu_grouped_matmul"`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from bridge.device.imports import after_import
from tpu_kernels.dropins import grouped_mm
from tpu_kernels.dropins.dropin import Add
from tpu_kernels.grouped_matmul.api import grouped_matmul

NAME = "tpu_grouped_matmul"
_MODULE = "transformers.integrations.moe"


def register() -> None:
    """Make the name known to transformers, if it has an interface for experts: older ones have none."""
    global _default_gate, _silu
    interface = _interface()
    if interface is not None:
        interface.register(NAME, experts)
        _default_gate = getattr(import_module(_MODULE), "_default_apply_gate", None)
        activations = import_module("transformers.activations")
        _silu = (torch.nn.SiLU, getattr(activations, "SiLUActivation", torch.nn.SiLU))


def unregister() -> None:
    """Undo `register`."""
    interface = _interface()
    if interface is not None:
        interface._global_mapping.pop(NAME, None)


def _interface() -> Any:
    if find_spec(_MODULE) is None:
        return None
    return getattr(import_module(_MODULE), "ExpertsInterface", None)


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of a layer, as transformers' models call them.

        out[t] = sum over j of w[t, j] expert[i[t, j]](x[t])

    An expert is `down(act(up(x)))`, or with a gate `down(gate_and_up(x))` by the rule of the module, with
    biases and a norm at the end if it has them. Tokens are sorted by expert, so that each multiplies rows
    that follow each other. How many each has is data: nobody waits for it, and it compiles nothing again.

    Args:
        module: has the parameters, `up_proj` or `gate_up_proj` and `down_proj`, each [experts, out, in], or
            [experts, in, out] if `is_transposed`, and their biases, [experts, out], if `has_bias`.
        hidden_states: x [T, H], floating.
        top_k_index: i [T, k], integers. `num_experts` and above stand for experts of other ranks, with expert
            parallelism: they add nothing and pass no gradient on.
        top_k_weights: w [T, k], floating.

    Returns:
        [T, H] in the dtype of `hidden_states`.
    """
    tokens, choices = top_k_index.shape
    expert, order = torch.sort(top_k_index.reshape(-1))
    numbers = torch.arange(module.num_experts, device=expert.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    sizes = ends.diff(prepend=ends.new_zeros(1))

    def linear(rows: torch.Tensor, name: str, **fused: Any) -> torch.Tensor:
        weight = getattr(module, f"{name}_proj")
        return grouped_matmul(
            rows.to(weight.dtype),  # under autocast, they may have another
            weight,
            sizes,
            transpose_rhs=not getattr(module, "is_transposed", False),
            bias=getattr(module, f"{name}_proj_bias") if getattr(module, "has_bias", False) else None,
            **fused,
        )

    rows = hidden_states[order // choices]
    if getattr(module, "has_gate", True):
        if _is_swiglu(module):
            rows = linear(rows, "gate_up", gated=True, activation="silu")
        else:
            rows = module._apply_gate(linear(rows, "gate_up"))
    else:
        rows = module.act_fn(linear(rows, "up"))
    rows = linear(rows, "down")
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
        if getattr(module, "_is_expert_parallel", True):  # else there are no rows of no group
            rows = rows.masked_fill(expert[:, None] >= module.num_experts, 0)
    weighted = rows * top_k_weights.reshape(-1)[order, None]
    return weighted[order.argsort()].view(tokens, choices, -1).sum(1).to(hidden_states.dtype)


_default_gate: Any = None
"""transformers' own rule, `act(gate) * up` of the two halves of a row, once it is known."""
_silu: tuple[type, ...] = (torch.nn.SiLU,)


def _is_swiglu(module: Any) -> bool:
    """Whether a module has that rule, with SiLU: it is inside of the kernel then."""
    rule = getattr(module._apply_gate, "__func__", None)
    return rule is not None and rule is _default_gate and type(module.act_fn) in _silu


# Under overrides() -------------------------------------------------------------------------------------


def overridden(add: Add) -> None:
    """Of `experts_implementation="grouped_mm"`, what is not `torch.nn.functional.grouped_mm`: an op of
    transformers that does the same, which it calls on `cpu` while torch.compile traces, but for bfloat16."""

    def imported(module: ModuleType) -> None:
        packet = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
        if packet is None:
            return

        def replacement(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            call = grouped_mm.Call(input, weight, offs.to(torch.int32))
            return grouped_mm.compute(call, lambda *given: packet(input, weight, offs))

        for op in (packet, packet.default):
            add(op, replacement)

    after_import(_MODULE, imported)

"""Attention by torch's rules written out in float64, and how far rounding may be from it.

The bounds are those of `tests/tpu_kernels/splash_attention/oracle.py`, for tensors of rank 4; here everything
is first broadcast to that, and gradients are summed back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..splash_attention.oracle import Case, tolerances


@dataclass(frozen=True)
class Attention:
    """One call: float tensors on the CPU, and the other arguments of `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def arguments(self, *tensors: torch.Tensor) -> tuple[Any, dict[str, Any]]:
        """Positional and keyword arguments, with other tensors for query, key, value and a floating mask."""
        mask = tensors[3] if len(tensors) > 3 else self.mask
        return (*tensors[:3], mask), {
            "is_causal": self.is_causal,
            "scale": self.scale,
            "enable_gqa": self.enable_gqa,
        }

    def leaves(self) -> list[torch.Tensor]:
        """The tensors that have a gradient."""
        given = [self.query, self.key, self.value]
        return given if self.mask is None or self.mask.dtype == torch.bool else [*given, self.mask]


def check(call: Attention, device: torch.device, function: Any) -> torch.Tensor:
    """Result and gradients of `function`, called on the device, are right to rounding; returns the result."""
    leaves = [t.detach().to(device).requires_grad_() for t in call.leaves()]
    args, kwargs = call.arguments(*leaves)
    args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
    result = function(*args, **kwargs)
    g = torch.randn(result.shape, generator=torch.Generator().manual_seed(5)).to(result.dtype)
    gradients = torch.autograd.grad(result, leaves, g.to(device))
    _compare(call, g, [t.detach().cpu() for t in (result, *gradients)])
    return result


def exact(call: Attention, leaves: list[torch.Tensor]) -> torch.Tensor:
    """The formula in the dtype of the leaves. A row that sees nothing is zero."""
    query, key, value = leaves[:3]
    if call.enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
    scores = scale * (query @ key.mT)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if call.is_causal:
        visible = visible.tril()
    if len(leaves) > 3:
        scores = scores + leaves[3]
    elif call.mask is not None:
        visible = visible & call.mask
    scores = scores.masked_fill(~visible, -torch.inf)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0) @ value


def _compare(call: Attention, g: torch.Tensor, found: list[torch.Tensor]) -> None:
    wide = [t.detach().double().requires_grad_() for t in call.leaves()]
    result = exact(call, wide)
    expected = [result.detach(), *torch.autograd.grad(result, wide, g.double())]
    allowed = _tolerances(call, g)
    for name, got, want, bound in zip(
        ("o", "query", "key", "value", "mask"), found, expected, allowed, strict=False
    ):
        assert got.shape == want.shape, (name, got.shape, want.shape)
        assert torch.equal(got.isnan(), want.isnan()), name
        rounding = torch.finfo(got.dtype)
        tolerance = bound + rounding.eps / 2 * (want.abs() + bound) + rounding.smallest_normal
        error = (got.double() - want).abs().nan_to_num()
        worst = int((error - tolerance).argmax()) if error.numel() else 0
        assert bool((error <= tolerance.nan_to_num(posinf=torch.inf)).all()), (
            f"{name}: got {got.flatten()[worst]}, expected {want.flatten()[worst]}, allowed error "
            f"{tolerance.flatten()[worst]:.3g}"
        )


def _tolerances(call: Attention, g: torch.Tensor) -> list[torch.Tensor]:
    """Bounds for the result and the gradients, in their shapes."""
    batch = g.shape[:-2]
    rows, columns = call.query.shape[-2], call.key.shape[-2]
    key, value = call.key, call.value
    if call.enable_gqa:
        key, value = (t.repeat_interleave(call.query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    whole = [_rank_4(t, batch) for t in (call.query, key, value)]
    visible = torch.ones(rows, columns, dtype=torch.bool)
    if call.is_causal:
        visible = visible.tril()
    tensors: dict[str, torch.Tensor] = {"query": whole[0], "key": whole[1], "value": whole[2]}
    if call.mask is not None and call.mask.dtype != torch.bool:
        tensors["bias"] = _rank_4(call.mask.expand(*call.mask.shape[:-2], rows, columns), batch)
    elif call.mask is not None:
        visible = _rank_4((visible & call.mask), batch)
    options = {} if call.scale is None else {"scale": call.scale}
    case = Case(tensors, g=_rank_4(g, batch), visible=visible, options=options)
    bounds = tolerances(case, "pallas")
    wide = [t.detach().double().requires_grad_() for t in tensors.values()]
    lifted = Attention(*wide[:3], is_causal=call.is_causal, scale=call.scale)
    if "bias" not in tensors:
        lifted = Attention(*wide[:3], mask=visible, scale=call.scale)
    magnitudes = torch.autograd.grad(exact(lifted, wide), wide, _rank_4(g, batch).double())
    results = [torch.from_numpy(bounds["o"]).reshape(g.shape)]
    for name, leaf, magnitude in zip(tensors, call.leaves(), magnitudes, strict=True):
        bound = torch.from_numpy(bounds[name]).expand_as(magnitude)
        results.append(_summed(bound, magnitude, leaf, batch, call))
    return results


def _summed(
    bound: torch.Tensor, magnitude: torch.Tensor, leaf: torch.Tensor, batch: torch.Size, call: Attention
) -> torch.Tensor:
    """The bound of a sum of gradients, each of which was rounded."""
    rounding = torch.finfo(leaf.dtype)
    each = bound + rounding.eps / 2 * (magnitude.abs() + bound) + rounding.smallest_normal
    terms = magnitude.numel() / leaf.numel()
    each = each + terms * rounding.eps / 2 * (magnitude.abs() + each)
    each = each.reshape(*batch, *each.shape[-2:])
    if call.enable_gqa and leaf.dim() > 2 and leaf.shape[-3] != each.shape[-3]:
        each = each.unflatten(-3, (leaf.shape[-3], -1)).sum(-3)
    return each.sum_to_size(leaf.shape)


def _rank_4(tensor: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    """Broadcast to the batch of the result, with all but the last of its dimensions as one."""
    whole = tensor.expand(*batch, *tensor.shape[-2:])
    return whole.reshape(-1, batch[-1] if batch else 1, *tensor.shape[-2:])

"""FlexAttention written out in float64, and how far rounding may be from it."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tpu_kernels.splash_attention import bounds

from ..splash_attention.oracle import roundings

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Example:
    """A `score_mod` and a `mask_mod`, made from the tensors that they capture.

    Attributes:
        tables: what they capture. Those that are floating get a gradient.
        score_mod, mask_mod: functions of `tables` that give the function; None for none.
    """

    name: str
    score_mod: Callable[[Tensors], Callable[..., Any]] | None = None
    mask_mod: Callable[[Tensors], Callable[..., Any]] | None = None
    tables: Tensors = field(default_factory=dict)

    def functions(self, tables: Tensors) -> tuple[Any, Any]:
        return (
            None if self.score_mod is None else self.score_mod(tables),
            None if self.mask_mod is None else self.mask_mod(tables),
        )


@dataclass(frozen=True)
class Exact:
    """Results and gradients in float64, and for each the bound of a float32 computation's error."""

    values: dict[str, torch.Tensor]
    allowed: dict[str, torch.Tensor]


def exact(
    example: Example,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    g_lse: torch.Tensor,
    visible: torch.Tensor | None = None,
) -> Exact:
    """The softmax of the changed scores where seen, and its gradients for the cotangents g and g_lse.

    Args:
        q, k, v: [B, Hq, L, D], [B, Hkv, S, D], [B, Hkv, S, Dv].
        visible: in place of what the `mask_mod` says.
    """
    leaves = {name: t.detach().double().requires_grad_() for name, t in {"q": q, "k": k, "v": v}.items()}
    tables = {
        n: t.detach().double().requires_grad_() if t.is_floating_point() else t
        for n, t in example.tables.items()
    }
    leaves |= {name: t for name, t in tables.items() if t.requires_grad}
    heads, scale = q.shape[1], q.shape[-1] ** -0.5
    wide_k, wide_v = (leaves[n].repeat_interleave(heads // leaves[n].shape[1], 1) for n in ("k", "v"))
    raw = scale * leaves["q"] @ wide_k.mT
    at = [
        torch.arange(n).reshape([n if i == axis else 1 for i in range(4)]) for axis, n in enumerate(raw.shape)
    ]
    score_mod, mask_mod = example.functions(tables)
    start = raw.detach().requires_grad_()
    changed = start * 1.0 if score_mod is None else score_mod(start, *at).expand(start.shape)
    if visible is None:
        visible = torch.ones((), dtype=torch.bool) if mask_mod is None else mask_mod(*at)
    visible = visible.expand(raw.shape)

    s = raw if score_mod is None else score_mod(raw, *at)
    s = torch.where(visible, s, -torch.inf)
    dead = s.amax(-1) == -torch.inf
    safe = torch.where(dead[..., None], 0.0, s)
    p = torch.where(dead[..., None], 0.0, safe.softmax(-1))
    lse = torch.where(dead, -torch.inf, safe.logsumexp(-1))
    o = p @ wide_v
    gradients = torch.autograd.grad(
        [o, lse], list(leaves.values()), [g.double(), g_lse.double()], allow_unused=True
    )
    values = {"o": o, "lse": lse}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        values[name] = torch.zeros_like(leaf) if gradient is None else gradient

    # Errors: of the products, through the slope of the change, and of the change itself: 32 roundings.
    (slope,) = torch.autograd.grad(changed.sum(), start, create_graph=True)
    curvature = torch.autograd.grad(slope.sum(), start)[0] if slope.requires_grad else torch.zeros_like(start)
    rounding = roundings(torch.float32, "pallas", scaled_queries=score_mod is None)
    u = rounding.arithmetic
    products = bounds.score_errors(*(leaves[n].detach().numpy() for n in "qk"), scale, rounding)
    finite = torch.nan_to_num(changed.detach(), neginf=0.0)
    error = slope.detach().abs().numpy() * products + 32 * u * (finite.abs() + start.detach().abs()).numpy()
    found = bounds.attention_errors(
        *(leaves[n].detach().numpy() for n in "qkv"),
        s.detach().numpy(),
        error,
        g.double().numpy(),
        g_lse.double().numpy(),
        rounding,
        scale=scale,
        slope=slope.detach().numpy(),
        slope_error=2 * curvature.detach().abs().numpy() * products + 32 * u * slope.detach().abs().numpy(),
    )
    allowed = {
        n: torch.from_numpy(np.asarray(getattr(found, a)))
        for n, a in (("o", "o"), ("lse", "lse"), ("q", "dq"), ("k", "dk"), ("v", "dv"))
    }
    # A table's gradient is a sum of gradients of scores, each times a factor, of one sign in all examples.
    each = torch.from_numpy(found.ds + (raw.numel() + 32) * u * np.abs(found.ds_exact))
    names = [name for name in leaves if name not in "qkv"]
    if names:
        again = example.functions(tables)[0](start, *at).expand(start.shape)
        summed = torch.autograd.grad(again, [leaves[n] for n in names], torch.where(visible, each, 0.0))
        allowed |= {name: t.abs() for name, t in zip(names, summed, strict=True)}
    return Exact({n: t.detach() for n, t in values.items()}, allowed)


def check(actual: Mapping[str, torch.Tensor], want: Exact) -> None:
    """All results and gradients are within the bounds, and infinite where they must be."""
    for name, exact_value in want.values.items():
        got = actual[name].detach().cpu()
        assert got.shape == exact_value.shape, (name, got.shape)
        assert torch.equal(got.isinf(), exact_value.isinf()) and not got.isnan().any(), name
        finite = torch.isfinite(exact_value)
        error = torch.where(finite, (got.double() - exact_value).abs(), 0.0)
        allowed = want.allowed[name] + torch.finfo(torch.float32).eps * torch.where(
            finite, exact_value.abs(), 0.0
        )
        worst = int((error - allowed).argmax())
        assert bool((error <= allowed + torch.finfo(torch.float32).tiny).all()), (
            f"{name}, element {worst}: got {got.flatten()[worst]}, expected {exact_value.flatten()[worst]}, "
            f"allowed {allowed.flatten()[worst]}"
        )

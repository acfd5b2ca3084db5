"""What attention must give, written out in torch and float64, and how far rounding may be from it.

A `Case` is one call with everything that may be given. `expected` computes it and its gradients with torch's
autograd; `tolerances` bounds the error of each element (`bounds.py`, which derives them), and `norms` that of
a whole result, where roundings of both signs cancel; `check` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention import bounds, dropout
from tpu_kernels.splash_attention.api import splash_attention
from tpu_kernels.splash_attention.reference import default_scale

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Arguments of one call, of rank 4, with their meaning in plain tensors.

    Attributes:
        tensors: query, key, value, and of bias, alibi_slopes, sinks, table and weights those that are given;
            all get a gradient. `table` [2n + 1] is added to the scores by `q - kv`, `weights` [Hq]
            multiplies them.
        visible: bool, broadcasts to the scores.
        mask: the same as the function takes it.
        options: the other arguments.
        g, g_lse: gradients of the results; g_lse None to leave lse out.
    """

    tensors: Mapping[str, torch.Tensor]
    g: torch.Tensor
    g_lse: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    mask: Mask | torch.Tensor | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """[B, Hq, L, S]."""
        q, k = self.tensors["query"], self.tensors["key"]
        return q.shape[0], q.shape[1], q.shape[2], k.shape[2]

    @property
    def scale(self) -> float:
        """The factor of the products."""
        given = self.options.get("scale")
        return default_scale(self.tensors["query"].shape[-1]) if given is None else given

    def __str__(self) -> str:
        tensors = {
            name: f"{t.dtype}{list(t.shape)}".removeprefix("torch.") for name, t in self.tensors.items()
        }
        return f"{tensors}, mask {self.mask!r}, {dict(self.options)}, {self.note}"


# Ours ---------------------------------------------------------------------------------------------


def run(
    case: Case, *, device: str = "cpu", function: Callable[..., Any] = splash_attention, **options: Any
) -> Gradients:
    """The results and gradients of the function, on the CPU."""
    # As views of what is given: strides stay, and gradients flow to leaves of the same layout.
    leaves = {name: t.detach().to(device).requires_grad_() for name, t in case.tensors.items()}
    given = dict(leaves)
    table, weights = given.pop("table", None), given.pop("weights", None)
    if table is not None or weights is not None:
        options["score_mod"] = _score_mod(table, weights)
    mask = case.mask
    if isinstance(mask, torch.Tensor):
        mask = mask.to(device)
    elif mask is not None:
        mask = replace(mask, captures=tuple(t.to(device) for t in mask.captures))
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in case.options.items()
    }
    o, lse = function(
        given.pop("query"),
        given.pop("key"),
        given.pop("value"),
        mask=mask,
        return_lse=True,
        **given,
        **moved,
        **options,
    )
    outputs, cotangents = [o], [case.g.to(device)]
    if case.g_lse is not None:
        outputs, cotangents = [o, lse], [case.g.to(device), case.g_lse.to(device, lse.dtype)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    found = {"o": o, "lse": lse, **dict(zip(leaves, gradients, strict=True))}
    return {name: t.detach().cpu() for name, t in found.items()}


def _score_mod(table: torch.Tensor | None, weights: torch.Tensor | None) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        if table is not None:
            score = score + table[torch.clamp(q - kv + table.shape[0] // 2, 0, table.shape[0] - 1)]
        if weights is not None:
            score = score * weights[h]
        return score

    return score_mod


# The oracle ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scores:
    """The scores after all changes and on the way, float64 [B, Hq, L, S] or what broadcasts to it."""

    raw: torch.Tensor
    capped: torch.Tensor
    shifted: torch.Tensor  # by the table
    weighted: torch.Tensor
    sloped: torch.Tensor
    final: torch.Tensor  # -inf where masked
    table_index: torch.Tensor | None
    distance: torch.Tensor


def expected(case: Case) -> Gradients:
    """The exact results and gradients, float64."""
    wide = {name: t.detach().double().requires_grad_() for name, t in case.tensors.items()}
    s = _scores(case, wide).final
    sinks = wide.get("sinks")
    columns = s if sinks is None else torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    dead = columns.amax(-1) == -torch.inf if columns.shape[-1] else torch.ones(s.shape[:-1], dtype=torch.bool)
    # A row that sees nothing would be 0/0: give it any other scores, then drop its results.
    p = torch.where(dead[..., None], 0, torch.where(dead[..., None], 0.0, columns).softmax(-1))
    lse = torch.where(dead, -torch.inf, torch.where(dead[..., None], 0.0, columns).logsumexp(-1))
    p = p[..., : s.shape[-1]] * kept(case)
    o = p @ _heads(wide["value"], s.shape[1])
    outputs, cotangents = [o], [case.g.double()]
    if case.g_lse is not None:
        outputs, cotangents = [o, lse], [case.g.double(), case.g_lse.double()]
    gradients = torch.autograd.grad(outputs, list(wide.values()), cotangents, allow_unused=True)
    zeros = (torch.zeros_like(t) if g is None else g for t, g in zip(wide.values(), gradients, strict=True))
    found = {"o": o, "lse": lse, **dict(zip(wide, zeros, strict=True))}
    return {name: t.detach() for name, t in found.items()}


def kept(case: Case) -> torch.Tensor:
    """The factor of each probability: 1, or 0 and 1 / (1 - p)."""
    p: float = case.options.get("dropout_p", 0.0)
    if p == 0:
        return torch.ones((), dtype=torch.float64)
    if p == 1:
        return torch.zeros((), dtype=torch.float64)
    b, h, q, kv = map(jnp.asarray, np.ix_(*(np.arange(n, dtype=np.int32) for n in case.scores)))
    keep = dropout.keep(jnp.asarray(case.options["seed"].numpy()), b, h, q, kv, p)
    return torch.from_numpy(np.array(keep)).double() / (1 - p)


def _scores(case: Case, wide: Mapping[str, torch.Tensor]) -> _Scores:
    batch, heads, rows, columns = case.scores
    q, kv = torch.arange(rows)[:, None], torch.arange(columns)
    raw = case.scale * wide["query"] @ _heads(wide["key"], heads).mT
    cap = case.options.get("soft_cap")
    capped = raw if cap is None else cap * torch.tanh(raw / cap)
    table = wide.get("table")
    index = None if table is None else torch.clamp(q - kv + table.shape[0] // 2, 0, table.shape[0] - 1)
    shifted = capped if table is None else capped + table[index]
    weights = wide.get("weights")
    weighted = shifted if weights is None else shifted * weights[:, None, None]
    distance = (q + (columns - rows) - kv).abs().double()
    slopes = wide.get("alibi_slopes")
    sloped = weighted if slopes is None else weighted - slopes[..., None, None] * distance
    final = sloped if "bias" not in wide else sloped + wide["bias"]
    if case.visible is not None:
        final = torch.where(case.visible, final, -torch.inf)
    final = final.expand(batch, heads, rows, columns)
    return _Scores(raw, capped, shifted, weighted, sloped, final, index, distance)


def _heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.repeat_interleave(heads // max(tensor.shape[1], 1), 1)


# Tolerances ---------------------------------------------------------------------------------------


def roundings(dtype: torch.dtype, impl: str, *, scaled_queries: bool) -> bounds.Roundings:
    """How the implementation rounds for tensors of this dtype: the reference keeps all in its arithmetic."""
    arithmetic = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    operand = torch.finfo(dtype) if impl == "pallas" else arithmetic
    return bounds.Roundings(
        arithmetic=arithmetic.eps / 2,
        operand=operand.eps / 2,
        output=operand.eps / 2,
        query=operand.eps / 2 if impl == "pallas" and scaled_queries else 0.0,
        underflow=max(operand.smallest_normal, arithmetic.smallest_normal),
    )


def tolerances(case: Case, impl: str) -> dict[str, np.ndarray]:
    """Bounds of the error of each result and gradient, before it is rounded to its own dtype."""
    changed = {"table", "weights", "alibi_slopes", "bias"} & set(case.tensors) or "soft_cap" in case.options
    rounding = roundings(case.tensors["query"].dtype, impl, scaled_queries=not changed)
    u = rounding.arithmetic
    wide = {name: t.detach().double() for name, t in case.tensors.items()}
    s = _scores(case, wide)
    q, k, v = (wide[name].numpy() for name in ("query", "key", "value"))
    arrays = {name: getattr(s, name).numpy() for name in ("raw", "capped", "shifted", "weighted", "sloped")}

    # Each change makes the error of the scores larger by its slope, and adds a rounding or a few.
    error = bounds.score_errors(q, k, case.scale, rounding)
    slope, slope_error = np.ones(()), np.zeros(())
    cap = case.options.get("soft_cap")
    if cap is not None:
        tanh = arrays["capped"] / cap
        slope = 1 - tanh**2
        slope_error = 0.77 / cap * error + 32 * u  # the second derivative of cap * tanh(s / cap)
        error = error + 8 * u * np.abs(arrays["capped"])
    if "table" in wide:
        error = error + 2 * u * (np.abs(arrays["capped"]) + np.abs(arrays["shifted"]))
    before_weights = error
    if "weights" in wide:
        weights = wide["weights"].numpy()[:, None, None]
        slope, slope_error = slope * weights, (slope_error + 2 * u * slope) * np.abs(weights)
        error = error * np.abs(weights) + 2 * u * np.abs(arrays["weighted"])
    if "alibi_slopes" in wide:
        error = error + 3 * u * (np.abs(arrays["weighted"]) + np.abs(arrays["sloped"] - arrays["weighted"]))
    if "bias" in wide:
        bias = torch.nan_to_num(wide["bias"], neginf=0).abs().numpy()
        error = error + 2 * u * (np.abs(arrays["sloped"]) + bias)

    final = s.final.numpy()
    g_lse = np.zeros(final.shape[:-1]) if case.g_lse is None else case.g_lse.double().numpy()
    errors = bounds.attention_errors(
        q,
        k,
        v,
        final,
        np.broadcast_to(error, final.shape),
        case.g.double().numpy(),
        g_lse,
        rounding,
        scale=case.scale,
        slope=slope,
        slope_error=slope_error,
        kept=kept(case).numpy(),
        sinks=wide["sinks"].numpy() if "sinks" in wide else None,
    )
    found = {"o": errors.o, "lse": errors.lse, "query": errors.dq, "key": errors.dk, "value": errors.dv}
    if errors.dsinks is not None:
        found["sinks"] = errors.dsinks

    # What is added to the scores, or multiplies them, has the sum of ds times its factor as gradient: of up
    # to 100,000 terms, and far smaller than they are together. n roundings, each of up to u and independent
    # of the others, are sqrt(n / 3) u in the mean square; 5 sqrt(n) u is more than eight times that.
    def roundings_of(terms: int) -> float:
        return min(terms, 5 * terms**0.5) + 8

    def summed(parameter: str, factor: np.ndarray, factor_error: np.ndarray, to: Callable[..., Any]) -> None:
        exact = np.broadcast_to(np.abs(errors.ds_exact * factor), final.shape)
        each = (errors.ds + np.abs(errors.ds_exact) * 8 * u) * np.abs(factor)
        each = each + (np.abs(errors.ds_exact) + errors.ds) * factor_error
        terms = final.size // max(wide[parameter].numel(), 1)
        found[parameter] = to(torch.from_numpy(each + roundings_of(terms) * u * exact)).numpy()

    one, zero = np.ones(()), np.zeros(())
    if "bias" in wide:
        summed("bias", one, zero, lambda t: t.sum_to_size(wide["bias"].shape))
    if "alibi_slopes" in wide:
        shape = wide["alibi_slopes"].shape
        summed("alibi_slopes", s.distance.numpy(), zero, lambda t: t.sum((-1, -2)).sum_to_size(shape))
    if "weights" in wide:
        factor = arrays["shifted"]
        summed("weights", factor, before_weights, lambda t: t.sum((0, 2, 3)))
    if "table" in wide:
        weights = wide["weights"].numpy()[:, None, None] if "weights" in wide else one
        index, size = s.table_index, wide["table"].shape[0]
        assert index is not None
        # A sum over any positions: as many terms as the largest has.
        terms = final.size // max(index.numel(), 1) * int(torch.bincount(index.flatten()).max())
        each = errors.ds * np.abs(weights) + np.abs(errors.ds_exact * weights) * roundings_of(terms) * u
        flat = torch.from_numpy(each.sum((0, 1))).flatten()
        found["table"] = torch.zeros(size, dtype=torch.float64).index_add(0, index.flatten(), flat).numpy()
    return found


# Norms --------------------------------------------------------------------------------------------
#
# A bound of each element has every rounding at its largest, and of the sign that hurts: where hundreds of
# operands are rounded to bfloat16 it is as large as the gradient itself. Roundings are independent, though:
# the norm of all errors together is near its root mean square, some thousandths of the gradient's norm.

DRAWS = 8
"""Estimates of a mean square: it is known to within a third even of a single number, which is then a sum of
many roundings; of the many numbers of a tensor to within a few hundredths."""


def norms(case: Case, impl: str, want: Gradients) -> dict[str, float]:
    """Bounds of the Euclidean norms of the errors of each result and gradient, rounded to its own dtype.

    The mean square is that of the roundings that `bounds.py` names, at random: a number is rounded by up to
    u of itself, either way, so by u / sqrt(3) in the mean square. Three times its root is the bound: three
    standard deviations of a sum of many, and of a few numbers rounded n times, each time by u, still enough
    if n <= 3, as n u <= 3 sqrt(n / 3) u. What the arithmetic rounds, so much finer, counts with its largest.

    Args:
        want: what is expected.
    """
    changed = {"table", "weights", "alibi_slopes", "bias"} & set(case.tensors) or "soft_cap" in case.options
    dtype = case.tensors["query"].dtype
    unit = roundings(dtype, impl, scaled_queries=not changed)
    generator = torch.Generator().manual_seed(0)

    def at_random(tensor: torch.Tensor, u: float) -> torch.Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype) * 2 - 1
        return tensor * (1 + u / 3**0.5 * signs)

    factor = kept(case)
    for name, result in _as_kernels(case, factor, lambda tensor, _: tensor, unit).items():
        # Without roundings: else what is bounded here are errors of formulas.
        torch.testing.assert_close(result, want[name], rtol=1e-9, atol=1e-9)
    squares = dict.fromkeys(want, 0.0)
    for _ in range(DRAWS):
        for name, result in _as_kernels(case, factor, at_random, unit).items():
            own = torch.float32 if name == "lse" else case.tensors[name].dtype if name != "o" else dtype
            error = at_random(result, torch.finfo(own).eps / 2) - want[name]
            squares[name] += float(error[torch.isfinite(want[name])].square().sum()) / DRAWS
    fine = {name: float(np.linalg.norm(bound)) for name, bound in tolerances(case, "reference").items()}
    return {name: 3 * square**0.5 + fine[name] for name, square in squares.items()}


def _as_kernels(
    case: Case,
    factor: torch.Tensor,
    rounded: Callable[[torch.Tensor, float], torch.Tensor],
    unit: bounds.Roundings,
) -> Gradients:
    """The results and gradients by the kernels' formulas, float64: `rounded(x, u)` is x where they round it.

    Kernels know of no sink: it leaves a share of o, and their cotangents are those of what they gave before.
    """
    wide = {name: t.detach().double().requires_grad_() for name, t in case.tensors.items()}
    heads, kv_heads = case.scores[1], wide["key"].shape[1]
    queries = rounded(wide["query"], unit.query) if unit.query else wide["query"]
    s = _scores(case, {**wide, "query": queries})
    changes = [name for name in ("table", "weights", "alibi_slopes", "bias") if name in wide]
    final, sinks = s.final.detach(), wide.get("sinks")
    q, k, v = (wide[name].detach() for name in ("query", "key", "value"))
    k, v = _heads(k, heads), _heads(v, heads)

    inner_lse = final.logsumexp(-1)
    lse = inner_lse if sinks is None else torch.logaddexp(inner_lse, sinks.detach()[:, None])
    share = torch.where(inner_lse == -torch.inf, 0.0, (inner_lse - lse).exp())[..., None]
    # A row that sees nothing: exp(-inf - inf).
    p = (final - torch.where(inner_lse == -torch.inf, torch.inf, inner_lse)[..., None]).exp()
    o = (rounded(p, unit.operand) * factor) @ v

    g, g_lse = case.g.double(), 0.0 if case.g_lse is None else case.g_lse.double()[..., None]
    along = (g * o).sum(-1, keepdim=True)
    inner_g, inner_g_lse = g, g_lse
    if sinks is not None:
        inner_g = rounded(share * g, unit.operand)
        inner_g_lse = share * g_lse + share * (1 - share) * along
    dv = (rounded(p, unit.operand) * factor).mT @ inner_g
    kept_o = rounded(o, unit.output) if sinks is None else o
    ds = p * (factor * (inner_g @ v.mT) - (inner_g * kept_o).sum(-1, keepdim=True) + inner_g_lse)
    d_raw, *d_changes = torch.autograd.grad(s.final, [s.raw, *(wide[n] for n in changes)], ds)
    d_raw = rounded(d_raw, unit.operand)
    found = {
        "o": share * o,
        "lse": lse,
        "query": case.scale * d_raw @ k,
        "key": case.scale * _per_kv_head(d_raw.mT @ q, kv_heads),
        "value": _per_kv_head(dv, kv_heads),
        **dict(zip(changes, d_changes, strict=True)),
    }
    if sinks is not None:
        p_sink = torch.where(lse == -torch.inf, 0.0, (sinks.detach()[:, None] - lse).exp())[..., None]
        found["sinks"] = (p_sink * (g_lse - share * along)).sum((0, 2, 3))
    return found


def _per_kv_head(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    return gradient.unflatten(1, (heads, -1)).sum(2)


def check(case: Case, actual: Gradients, impl: str) -> None:
    """All results and gradients are within the bounds, have the right shape and dtype, and are contiguous."""
    want_all, allowed_all = expected(case), tolerances(case, impl)
    query = case.tensors["query"]
    dtypes = {name: t.dtype for name, t in case.tensors.items()}
    dtypes |= {"o": query.dtype, "lse": torch.float64 if query.dtype == torch.float64 else torch.float32}
    assert actual["o"].is_contiguous() and actual["lse"].is_contiguous()
    for name, want in want_all.items():
        got = actual[name]
        assert (got.shape, got.dtype) == (want.shape, dtypes[name]), (name, got.shape, got.dtype)
        bound = torch.from_numpy(np.broadcast_to(allowed_all[name], tuple(want.shape)).copy())
        assert bool((got.isinf() == want.isinf()).all()) and not bool(got.isnan().any()), f"{name}: {case}"
        finite = torch.isfinite(want)
        rounding = torch.finfo(got.dtype)
        magnitude = torch.where(finite, want.abs(), 0) + bound
        # Half a unit in the last place of the result, or half the smallest normal number.
        allowed = bound + rounding.eps / 2 * magnitude + rounding.smallest_normal
        error = torch.where(finite, (got.double() - want).abs(), 0)
        worst = int((error - allowed).argmax()) if error.numel() else 0
        assert bool((error <= allowed).all()), (
            f"{name}, element {worst} of {list(want.shape)}: got {got.flatten()[worst]}, "
            f"expected {want.flatten()[worst]}, error {error.flatten()[worst]:.3g}, "
            f"allowed {allowed.flatten()[worst]:.3g}. {case}"
        )
    if impl == "pallas" and torch.finfo(query.dtype).eps > torch.finfo(torch.float32).eps:
        for name, allowed in norms(case, impl, want_all).items():
            want = want_all[name]
            error = float((actual[name].double() - want)[torch.isfinite(want)].norm())
            assert error <= allowed, (
                f"{name}, all of it: norm of the errors {error:.3g}, allowed {allowed:.3g}, "
                f"norm expected {float(want[torch.isfinite(want)].norm()):.3g}. {case}"
            )

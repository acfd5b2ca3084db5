"""How far rounding may take attention and its gradients from the exact result: first-order bounds.

They hold for the reference and for any kernel that computes as follows, in any order of summation and with
any tiles (u is the unit roundoff of the arithmetic, 2**-24 in float32; γ(n) = n u):

- Scores, softmax and sums in the arithmetic's precision, from q, k, v and g as given. A sum of n products
  errs by at most γ(n) times the sum of their magnitudes.
- Operands of the second product of a pair (p before p v and pᵀ g, ds before ds k and dsᵀ q) rounded to the
  dtype of the tensors: a relative error of that dtype's unit roundoff. Where nothing else changes the scores,
  the queries may be multiplied by the scale first and rounded.
- With sinks, the gradient of o is scaled by what the sink leaves, and rounded to the dtype of the tensors.
- delta = sum(p dp) taken as sum(g o) from the o that was returned, rounded to its dtype.
- What is smaller than the smallest normal number of a dtype may be lost altogether.

From errors of the scores to those of the softmax: with |error of s_j| <= e_j, a row's lse errs by at most
log(sum_j p_j exp(e_j)), and p_j by at most the factor exp(e_j + error of lse).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_FEW = 16
"""Single operations that a step makes besides its sums, counted generously: exp and log err by a few u."""


@dataclass(frozen=True)
class Roundings:
    """How the values of a computation are rounded.

    Attributes:
        arithmetic, operand, output: unit roundoffs of the arithmetic, of p and ds, and of o.
        query: of the queries if they are multiplied by the scale before the product, and rounded; else 0.
        underflow: the smallest normal number of the arithmetic and of the operands, the larger of the two.
    """

    arithmetic: float
    operand: float
    output: float
    query: float
    underflow: float


@dataclass(frozen=True)
class Errors:
    """Bounds of the errors before the rounding of each result to its own dtype; shapes are the results'.

    Attributes:
        o, lse: of the forward.
        dq, dk, dv, dsinks: of the gradients (`dsinks` None without sinks).
        ds: of the gradient of the final scores, [B, Hq, L, S], and `ds_exact` that gradient: what is made of
            the scores (a bias) has a gradient that is a sum of these.
    """

    o: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None
    ds: np.ndarray
    ds_exact: np.ndarray


def score_errors(q: np.ndarray, k: np.ndarray, scale: float, roundings: Roundings) -> np.ndarray:
    """Bound of the errors of `scale * q kᵀ`, [B, Hq, L, S]: a sum of D products, and the scale."""
    terms = np.abs(q) @ np.abs(per_query_head(k, q.shape[1])).swapaxes(-1, -2)
    return ((q.shape[-1] + 2) * roundings.arithmetic + roundings.query) * abs(scale) * terms


def attention_errors(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    s: np.ndarray,
    s_error: np.ndarray,
    g: np.ndarray,
    g_lse: np.ndarray,
    roundings: Roundings,
    *,
    scale: float,
    slope: np.ndarray | float = 1.0,
    slope_error: np.ndarray | float = 0.0,
    kept: np.ndarray | float = 1.0,
    sinks: np.ndarray | None = None,
) -> Errors:
    """Bounds for one call and its gradients. All arrays are float64.

    Args:
        q, k, v: [B, Hq, L, D], [B, Hkv, S, D], [B, Hkv, S, Dv].
        s: [B, Hq, L, S], the final scores, -inf where masked.
        s_error: bound of the errors of `s`.
        g, g_lse: gradients of o and lse.
        roundings: of the computation.
        scale: factor of the products.
        slope: derivative of the final scores by the scaled products; `slope_error` the bound of its errors.
        kept: factor of each probability: 0 or 1 / (1 - dropout_p).
        sinks: [Hq] or None.
    """
    u = roundings.arithmetic
    heads, (rows, columns) = q.shape[1], s.shape[-2:]
    k_heads, v_heads = per_query_head(k, heads), per_query_head(v, heads)
    visible = s > -np.inf

    # The exact softmax.
    highest = s.max(-1, initial=-np.inf)
    if sinks is not None:
        highest = np.maximum(highest, sinks[:, None])
    shift = np.where(highest > -np.inf, highest, 0)
    weights = np.exp(s - shift[..., None])
    sink_weights = 0.0 if sinks is None else np.exp(sinks[:, None] - shift)
    total = weights.sum(-1) + sink_weights
    total = np.where(total == 0, 1, total)
    p = weights / total[..., None]
    p_sink = sink_weights / total

    # Its errors. Rounding the argument of exp counts with its magnitude, the sum with its number of terms.
    arguments = np.where(visible, np.abs(np.where(visible, s, 0)) + np.abs(shift)[..., None], 0)
    e = np.where(visible, s_error, 0) + 4 * u * arguments
    lse_error = np.log1p((p * np.expm1(e)).sum(-1)) + (columns + _FEW) * u
    relative = np.expm1(e + lse_error[..., None] + (columns + _FEW) * u)
    lost = np.where(visible, roundings.underflow, 0)
    p_error = p * relative + lost
    lse_absolute = lse_error + 4 * u * np.abs(shift)

    # o = sum(p kept v)
    weighted = p * kept
    o = weighted @ v_heads
    weighted_error = weighted * (relative + roundings.operand) + lost * kept
    o_error = (weighted_error + (columns + _FEW) * u * weighted) @ np.abs(v_heads)

    # ds = p (kept dp - delta + g_lse)
    dp = g @ v_heads.swapaxes(-1, -2)
    g_rounding = 0.0 if sinks is None else roundings.operand
    magnitude = np.abs(g) @ np.abs(v_heads).swapaxes(-1, -2)
    delta = (g * o).sum(-1, keepdims=True)
    spread = (weighted * magnitude).sum(-1, keepdims=True)
    delta_error = (np.abs(g) * (o_error + roundings.output * (np.abs(o) + o_error))).sum(-1, keepdims=True)
    delta_error += ((v.shape[-1] + columns + _FEW) * u + g_rounding) * spread
    inner = kept * dp - delta + g_lse[..., None]
    inner_terms = kept * magnitude + np.abs(delta) + np.abs(g_lse)[..., None]
    # Beside a sink, delta is the difference of what it is without the sink, and what the sink takes of that:
    # where the sink takes nearly all, both are many times as large as delta.
    beside = spread / np.maximum(1 - p_sink, np.finfo(float).tiny)[..., None] - spread
    inner_error = delta_error + ((v.shape[-1] + columns + _FEW) * u + g_rounding) * beside
    inner_error = inner_error + ((v.shape[-1] + _FEW) * u + g_rounding) * inner_terms
    ds = p * inner
    ds_error = p_error * np.abs(inner) + (p + p_error) * inner_error

    # Back through the score's changes, then into q and k.
    d_product = ds * slope
    d_product_error = ds_error * (np.abs(slope) + slope_error) + np.abs(ds) * slope_error
    d_product_error += (roundings.operand + _FEW * u) * np.abs(d_product) + lost
    dq = np.abs(scale) * ((d_product_error + columns * u * np.abs(d_product)) @ np.abs(k_heads))
    terms = rows * (heads // max(k.shape[1], 1))
    dk = (d_product_error + terms * u * np.abs(d_product)).swapaxes(-1, -2) @ np.abs(q)
    dv = (weighted_error + ((terms + _FEW) * u + g_rounding) * weighted).swapaxes(-1, -2) @ np.abs(g)

    dsinks = None
    if sinks is not None:
        # dsink = sum(p_sink (g_lse - delta))
        from_rows = np.abs(g_lse) + np.abs(delta[..., 0])
        off = np.abs(sinks)[:, None] + np.abs(shift)
        sink_relative = np.expm1(lse_error + (_FEW + 4 * off) * u)
        each = (sink_relative + (q.shape[0] * rows + _FEW) * u) * from_rows + (
            1 + sink_relative
        ) * delta_error[..., 0]
        dsinks = (p_sink * each).sum((0, 2))
    return Errors(
        o=o_error,
        lse=lse_absolute,
        dq=dq,
        dk=np.abs(scale) * per_kv_head(dk, k.shape[1]),
        dv=per_kv_head(dv, v.shape[1]),
        dsinks=dsinks,
        ds=ds_error,
        ds_exact=ds,
    )


def per_query_head(array: np.ndarray, heads: int) -> np.ndarray:
    """[B, Hkv, ...] to [B, Hq, ...]: what each query head reads."""
    return np.repeat(array, heads // max(array.shape[1], 1), axis=1)


def per_kv_head(array: np.ndarray, heads: int) -> np.ndarray:
    """[B, Hq, ...] to [B, Hkv, ...]: the sum over the query heads that read each."""
    batch, q_heads, *rest = array.shape
    return array.reshape(batch, heads, q_heads // max(heads, 1), *rest).sum(2)

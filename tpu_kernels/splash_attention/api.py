"""Splash attention for torch: the public function and its op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import torch

from bridge import jax_op
from tpu_kernels._select import Implementation
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention import arguments, changes, vjp
from tpu_kernels.splash_attention.reference import splash_attention_reference
from tpu_kernels.splash_attention.terms import ScoreMod
from tpu_kernels.splash_attention.tiling import SplashTiling


class _Options(TypedDict, total=False):
    """The keyword arguments of `splash_attention` but `return_lse`."""

    mask: Mask | torch.Tensor | None
    bias: torch.Tensor | None
    score_mod: Callable[..., Any] | ScoreMod | None
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    scale: float | None
    dropout_p: float
    seed: torch.Tensor | int | None
    q_segment_ids: torch.Tensor | None
    kv_segment_ids: torch.Tensor | None
    impl: Implementation
    tiling: SplashTiling | None


@overload
def splash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def splash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def splash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | ScoreMod | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | int | None = None,
    return_lse: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    impl: Implementation = "auto",
    tiling: SplashTiling | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention, `softmax(scale * query keyᵀ) value`, with masks and score changes inside of the kernel.

    The scores of a query and a key are changed in this order, each step with None left out:

        s = scale * (query · key)
        s = soft_cap * tanh(s / soft_cap)
        s = score_mod(s, b, h, q, kv)
        s = s - alibi_slopes[h] * |q + S - L - kv|
        s = s + bias
        s = -inf where not mask, or where the segment ids differ

    and with `lse = log(sum(exp(s)) + exp(sinks[h]))`, the sum over all keys, the output is
    `sum(dropout(exp(s - lse)) * value)`. A query that sees no key has output 0 and passes no gradient on; its
    lse is -inf, or the sink. A score that is NaN or +inf makes its row NaN.

    Differentiable in all floating tensors, those that masks and `score_mod` capture included, through both
    results, and twice. Under `torch.autocast`, query, key and value are cast and everything else is left.

    Args:
        query: [..., Hq, L, D], float16, bfloat16, float32 or float64, on `tpu` or `cpu`. Without the heads'
            dimension there is one head. Dimensions before the heads are batch; they broadcast.
        key: [..., Hkv, S, D]. Query head h reads head h // (Hq // Hkv); Hq must be a multiple of Hkv.
        value: [..., Hkv, S, Dv].
        mask: a mask from `tpu_kernels.masks`, or bool that broadcasts to [..., Hq, L, S]; True where a query
            sees a key.
        bias: floating, broadcasts to [..., Hq, L, S].
        score_mod: a torch function `(score, b, h, q, kv) -> score` of 0-d tensors, as for flex_attention.
            `b` counts all batch entries, `h` the query heads. `tpu_kernels.ScoreMod.trace(score_mod)` traces
            it once and for all, which a compiled function needs.
        soft_cap: the scores stay between `-soft_cap` and `soft_cap`.
        alibi_slopes: [Hq] or [..., Hq], floating. The distance counts from the end: the last query stands at
            the last key, as in flash-attn.
        sinks: [Hq], floating.
        scale: None for `1 / sqrt(D)`.
        dropout_p: probability that an element of the softmax is dropped; the others are divided by
            `1 - dropout_p`. It is applied always, in `eval` too.
        seed: what dropout depends on, together with the position alone: an integer, a tensor of one integer,
            or int32 [2]. None draws it from torch's generator. In a compiled function, pass a tensor: each
            other int compiles again.
        return_lse: return lse as well.
        q_segment_ids: integers that fit int32, [..., L]: a query sees keys of the same number only.
        kv_segment_ids: [..., S]; None for those of the queries, if L is S.
        impl: `pallas` is the TPU kernel, `reference` plain JAX that holds all scores in memory, `auto` the
            kernel wherever it can compute this.
        tiling: tile sizes of the kernel, a `tpu_kernels.SplashTiling`; None chooses for the shape.

    Returns:
        The output [..., Hq, L, Dv] in the dtype of query, contiguous; with `return_lse` also lse
        [..., Hq, L], float32, or float64 for float64.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
        ValueError: values out of range, or a mask's tensor has other sizes than the scores, or `impl` or
            `tiling` cannot compute this; the message says why.
    """
    query, key, value = arguments.under_autocast(query, key, value)
    sizes = arguments.sizes_of(query, key, value)
    arguments.check_additional(query, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks)
    if sinks is not None and tuple(sinks.shape) != (sizes.q_heads,):
        raise RuntimeError(
            f"splash_attention: sinks must be [{sizes.q_heads}], one for each query head, "
            f"got {list(sinks.shape)}"
        )
    captures: list[torch.Tensor] = []
    score = changes.score_of(captures, sizes, query, soft_cap, score_mod, alibi_slopes, bias)
    visible = changes.mask_of(captures, sizes, query, mask, q_segment_ids, kv_segment_ids)
    changes.check_captures(captures, sizes, query, score, visible)

    dropout_p = arguments.check_probability(dropout_p)
    output, lse = op(
        arguments.as_rank_4(query, sizes.q_heads, sizes),
        arguments.as_rank_4(key, sizes.kv_heads, sizes),
        arguments.as_rank_4(value, sizes.kv_heads, sizes),
        captures,
        sinks,
        arguments.seed_words(seed, query.device) if dropout_p else None,
        visible,
        score,
        arguments.check_scale(scale),
        dropout_p,
        tiling,
        impl,
    )
    output = arguments.from_rank_4(output, sizes)
    return (output, arguments.from_rank_4(lse, sizes)) if return_lse else output


# The op -------------------------------------------------------------------------------------------


def _reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    captures: Sequence[jax.Array],
    sinks: jax.Array | None,
    seed: jax.Array | None,
    mask: str = "",
    score: str = "",
    scale: float | None = None,
    dropout_p: float = 0.0,
    tiling: SplashTiling | None = None,
    impl: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    del tiling, impl
    return splash_attention_reference(q, k, v, captures, sinks, seed, mask, score, scale, dropout_p)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    del rest
    given = [t for t in (q, k, v, sinks, *captures) if t is not None]
    lse_dtype = torch.float64 if any(t.dtype == torch.float64 for t in given) else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype)


op = jax_op("tpu_kernels::splash_attention", vjp.splash_attention, reference=_reference, fake=_fake)
"""The torch op behind `splash_attention`: tensors of rank 4, masks and score changes as text and captures."""

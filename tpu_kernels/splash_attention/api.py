"""Splash attention for torch: the public function and its op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import numpy as np
import torch

from bridge import jax_op, to_torch
from tpu_kernels._integers import int32
from tpu_kernels._select import Implementation
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention import arguments, terms, vjp
from tpu_kernels.splash_attention.arguments import Sizes
from tpu_kernels.splash_attention.reference import splash_attention_reference
from tpu_kernels.splash_attention.terms import Part, ScoreMod
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
    score = _score(captures, sizes, query, soft_cap, score_mod, alibi_slopes, bias)
    visible = _mask(captures, sizes, query, mask, q_segment_ids, kv_segment_ids)
    _check_captures(captures, sizes, query, score, visible)

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


# Masks and score changes --------------------------------------------------------------------------


def _score(
    captures: list[torch.Tensor],
    sizes: Sizes,
    query: torch.Tensor,
    soft_cap: float | None,
    score_mod: Callable[..., Any] | ScoreMod | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> str:
    """The text of all score changes; their tensors are added to `captures`."""
    changes: list[Part] = []
    if soft_cap is not None:
        changes.append(Part(terms.soft_cap(terms.check_cap(soft_cap))))
    if score_mod is not None:
        if not isinstance(score_mod, ScoreMod):
            if not callable(score_mod):
                raise TypeError(
                    f"splash_attention: score_mod must be a function (score, b, h, q, kv) -> score or a "
                    f"tpu_kernels.ScoreMod, got {type(score_mod).__name__}"
                )
            if torch.compiler.is_compiling():
                raise ValueError(
                    "splash_attention: a score_mod can't be traced while torch.compile traces; give "
                    "tpu_kernels.ScoreMod.trace(score_mod), made before, in its place"
                )
            score_mod = ScoreMod.trace(score_mod)
        changes.append(_captured(captures, query, score_mod.text, score_mod.captures))
    if alibi_slopes is not None:
        leading = alibi_slopes.shape[:-1]
        if (
            alibi_slopes.shape[-1:] != (sizes.q_heads,)
            or len(leading) > len(sizes.batch)
            or any(a not in (1, b) for a, b in zip(reversed(leading), reversed(sizes.batch), strict=False))
        ):
            raise RuntimeError(
                f"splash_attention: alibi_slopes must be [{sizes.q_heads}], one for each query head, or "
                f"{[*sizes.batch, sizes.q_heads]}, or have 1 for a size before the last, "
                f"got {list(alibi_slopes.shape)}"
            )
        batched = alibi_slopes.dim() > 1
        if batched:
            alibi_slopes = alibi_slopes.expand(*sizes.batch, sizes.q_heads).reshape(-1, sizes.q_heads)
        changes.append(_captured(captures, query, terms.alibi(batched), [alibi_slopes]))
    if bias is not None:
        tensor, axes = arguments.aligned("bias", bias, sizes)
        changes.append(_captured(captures, query, terms.added(axes), [tensor]))
    return terms.score_text(tuple(changes))


def _mask(
    captures: list[torch.Tensor],
    sizes: Sizes,
    query: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    q_segment_ids: torch.Tensor | None,
    kv_segment_ids: torch.Tensor | None,
) -> str:
    """The text of all masks; their tensors are added to `captures`."""
    parts: list[Part] = []
    if isinstance(mask, Mask):
        parts.append(_captured(captures, query, mask.text, mask.captures))
        for one in mask.sized:
            arguments.check_sized(one, mask.captures[one.slot], sizes)
    elif isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"splash_attention: a mask tensor must be bool, got {mask.dtype}; what is added to the "
                f"scores is bias="
            )
        tensor, axes = arguments.aligned("mask", mask, sizes)
        parts.append(_captured(captures, query, terms.aligned("bool", axes), [tensor]))
    elif mask is not None:
        raise TypeError(
            f"splash_attention: mask must be a mask from tpu_kernels.masks or a bool tensor, got "
            f"{type(mask).__name__}"
        )
    if q_segment_ids is not None:
        if kv_segment_ids is None:
            if sizes.q_len != sizes.kv_len:
                raise RuntimeError(
                    f"splash_attention: query has length {sizes.q_len} and key {sizes.kv_len}, so the "
                    f"segments of both must be given: kv_segment_ids is None"
                )
            kv_segment_ids = q_segment_ids
        q_ids, q_batched = arguments.per_position("q_segment_ids", q_segment_ids, sizes.q_len, sizes)
        kv_ids, kv_batched = arguments.per_position("kv_segment_ids", kv_segment_ids, sizes.kv_len, sizes)
        parts.append(_captured(captures, query, terms.same_segment(q_batched, kv_batched), [q_ids, kv_ids]))
    elif kv_segment_ids is not None:
        raise RuntimeError("splash_attention: kv_segment_ids is given without q_segment_ids")
    return terms.mask_text(tuple(parts))


def _captured(
    captures: list[torch.Tensor], query: torch.Tensor, text: str, tensors: Sequence[torch.Tensor]
) -> Part:
    """The part with its tensors added to `captures`."""
    offset = len(captures)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):  # of a JAX function, or given as an array
            tensor = _as_tensor(tensor).to(query.device)
        if not tensor.is_floating_point():
            tensor = int32(tensor)
        elif tensor.dtype == torch.float64 and query.dtype != torch.float64:
            tensor = tensor.float()  # what it is added to has no more digits
        captures.append(tensor)
    return Part(text, offset)


def _as_tensor(array: Any) -> torch.Tensor:
    if isinstance(array, jax.Array):
        return to_torch(array)
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    raise TypeError(
        f"splash_attention: masks must hold torch tensors or JAX or NumPy arrays, got {type(array).__name__}"
    )


def _check_captures(
    captures: list[torch.Tensor], sizes: Sizes, query: torch.Tensor, score: str, mask: str
) -> None:
    """What masks and score_mod load must be there: an index past the end would read a neighbour."""
    lengths = {"b": sizes.flat_batch, "h": sizes.q_heads, "q": sizes.q_len, "kv": sizes.kv_len}
    for source in (score, mask):
        for slot, dimensions in terms.dimensions(source):
            if captures[slot].dim() != dimensions:
                raise RuntimeError(
                    f"splash_attention: a tensor of shape {list(captures[slot].shape)} is indexed in "
                    f"{dimensions} dimensions (of a mask or score_mod); give each of its dimensions an index"
                )
        for slot, dimension, variable in terms.direct_indices(source):
            size = captures[slot].shape[dimension]
            if size < lengths[variable]:
                raise RuntimeError(
                    f"splash_attention: a tensor of shape {list(captures[slot].shape)} is indexed by "
                    f"{variable} in dimension {dimension} (of a mask or score_mod), so it needs at least "
                    f"{lengths[variable]} elements there"
                )
    for tensor in captures:
        arguments.check_same_device(query.device, {"a tensor of a mask or of score_mod": tensor})


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

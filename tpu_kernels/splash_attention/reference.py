"""Attention in plain jnp: the oracle of the tests, and what computes where the kernel cannot.

It holds all scores at once, `[B, Hq, L, S]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import INDICES, Constant, Load, Variable, parse
from tpu_kernels.expressions.hoist import load_from
from tpu_kernels.splash_attention import dropout


def splash_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    captures: Sequence[jax.Array] = (),
    sinks: jax.Array | None = None,
    seed: jax.Array | None = None,
    mask: str = "",
    score: str = "",
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention with masks and changes of the scores given as expressions.

        s = score(scale * q kᵀ), and -inf where not mask
        lse = log(sum(exp(s)) + exp(sink))
        o = (exp(s - lse) * keep / (1 - dropout_p)) v

    Args:
        q: [B, Hq, L, D], floating.
        k: [B, Hkv, S, D], floating. Query head h reads head h // (Hq // Hkv) of k and v.
        v: [B, Hkv, S, Dv], floating.
        captures: arrays that the expressions load from, by slot.
        sinks: [Hq], floating: one more score for each row, which takes part of the probability and has no
            value. None for none.
        seed: int32 [2]; needed if `dropout_p` is positive.
        mask: text of a bool expression of b, h, q and kv, True where q sees kv; "" for True.
        score: text of an expression of score, b, h, q and kv; "" for the score itself.
        scale: factor of the products; None for 1 / sqrt(D).
        dropout_p: probability that an element of the softmax is dropped.

    Returns:
        o [B, Hq, L, Dv] in the dtype of q, and lse [B, Hq, L] in float32. All arithmetic is float32; if a
        floating argument is float64, it is float64 and so is lse. A row that sees nothing has o = 0 and
        lse = -inf (or the sink), and passes no gradient on.
    """
    floating = [a for a in (q, k, v, sinks, *captures) if a is not None and _is_floating(a)]
    compute = functools.reduce(jnp.promote_types, (a.dtype for a in floating), jnp.dtype(jnp.float32))
    q_heads, kv_heads = q.shape[1], k.shape[1]
    group = q_heads // kv_heads if kv_heads else 1
    if scale is None:
        scale = default_scale(q.shape[-1])

    # [B, Hkv, group, L, S] -> [B, Hq, L, S]
    grouped = q.reshape(q.shape[0], kv_heads, group, *q.shape[2:])
    s = scale * jnp.einsum(
        "bhgld,bhsd->bhgls", *_wide(compute, grouped, k), precision=jax.lax.Precision.HIGHEST
    )
    s = s.reshape(*q.shape[:3], k.shape[2])
    b, h, rows, columns = (
        jax.lax.broadcasted_iota(jnp.int32, _only(s.shape, axis), axis) for axis in range(4)
    )
    if (mask or score) and s.size:
        value = _evaluator(captures, compute, b, h, rows, columns, q_len=s.shape[2], kv_len=s.shape[3])
        if score:
            s = jnp.broadcast_to(value(score, s).astype(compute), s.shape)
        if mask:
            s = jnp.where(value(mask, None), s, -jnp.inf)

    p, lse = _softmax(s, None if sinks is None else sinks.astype(compute)[:, None])
    if dropout_p:
        p = drop(p, seed, b, h, rows, columns, dropout_p)
    p = p.reshape(p.shape[0], kv_heads, group, *p.shape[2:])
    o = jnp.einsum("bhgls,bhsd->bhgld", *_wide(compute, p, v), precision=jax.lax.Precision.HIGHEST)
    return o.reshape(*q.shape[:3], v.shape[-1]).astype(q.dtype), lse


def default_scale(head_dim: int) -> float:
    """`1 / sqrt(head_dim)`; 1 where there is nothing to scale."""
    return 1 / math.sqrt(head_dim) if head_dim else 1.0


def drop(
    p: jax.Array,
    seed: jax.Array | None,
    b: jax.Array,
    h: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
    rate: float,
) -> jax.Array:
    """`p` with each element zero with probability `rate`, and the others divided by `1 - rate`."""
    if rate == 1:
        return jnp.zeros_like(p)
    if seed is None:
        raise ValueError(
            "splash_attention: dropout_p is positive, so seed must be an int32 array [2], got None"
        )
    kept = dropout.keep(seed, b, h, rows, columns, rate)
    return jnp.where(kept, p / (1 - rate), 0)


def _softmax(s: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The softmax of each row [..., S] and its lse [...]; where all of a row is -inf: zeros, and -inf."""
    highest = jnp.max(s, axis=-1, initial=-jnp.inf)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks)
    # Any shift gives the same result, so none is differentiated. exp(-inf - -inf) would be NaN.
    shift = jax.lax.stop_gradient(jnp.where(highest == -jnp.inf, 0, highest))
    weights = jnp.exp(s - shift[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - shift)
    dead = total == 0
    # The logarithm's gradient at 0 is infinite, also where its value is not chosen.
    total = jnp.where(dead, 1, total)
    lse = jnp.where(dead, -jnp.inf, shift + jnp.log(total))
    return weights / total[..., None], lse


def _evaluator(
    captures: Sequence[jax.Array],
    compute: jnp.dtype,
    b: jax.Array,
    h: jax.Array,
    q: jax.Array,
    kv: jax.Array,
    *,
    q_len: int,
    kv_len: int,
) -> Callable[[str, jax.Array | None], jax.Array]:
    """`value(text, score)`: an expression's value over all of `[B, Hq, L, S]`."""
    env = {"b": b, "h": h, "q": q, "kv": kv, "q_len": q_len, "kv_len": kv_len}
    sizes = {"b": b.size, "h": h.size, "q": q.size, "kv": kv.size}
    arrays = [_wide(compute, a)[0] if _is_floating(a) else a for a in captures]
    look_up = load_from(arrays, env)

    def load(node: Load) -> jax.Array:
        array = _aligned(node, arrays[node.slot], sizes)
        return look_up(node) if array is None else array

    def value(text: str, score: jax.Array | None) -> jax.Array:
        return evaluate(parse(text), env if score is None else {**env, "score": score}, load)

    return value


def _aligned(node: Load, array: jax.Array, sizes: Mapping[str, int]) -> jax.Array | None:
    """The array in the axes of the scores, where the load takes it as it lies; quicker than to look it up."""
    index: list[slice | int] = []
    shape = [1] * len(INDICES)
    axes = []
    for position, size in zip(node.index, array.shape, strict=True):
        match position:
            case Constant(int(value)) if -size <= value < size:
                index.append(value)
            case Variable(name) if name in sizes and size >= sizes[name]:
                index.append(slice(sizes[name]))
                axes.append(INDICES.index(name))
                shape[axes[-1]] = sizes[name]
            case _:
                return None
    return array[tuple(index)].reshape(shape) if axes == sorted(set(axes)) else None


def _wide(compute: jnp.dtype, *arrays: jax.Array) -> list[jax.Array]:
    return [a.astype(compute) for a in arrays]


def _is_floating(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _only(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """`shape` with all sizes but one set to 1."""
    return tuple(size if i == axis else 1 for i, size in enumerate(shape))

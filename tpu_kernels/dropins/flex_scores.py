"""The highest score of each row, which `flex_attention` can return as well."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from bridge import jax_op
from tpu_kernels._integers import int32
from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import parse
from tpu_kernels.expressions.hoist import load_from
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention.terms import ScoreMod

_ROWS = 128
"""Queries whose scores are in memory at a time."""


@torch.no_grad()
def highest_scores(
    query: torch.Tensor, key: torch.Tensor, visible: Mask | None, changed: ScoreMod | None, scale: float
) -> torch.Tensor:
    """The maximum over the keys of the changed scores, -inf where nothing is seen; it has no gradient.

    Args:
        query: [B, Hq, L, D].
        key: [B, Hkv, S, D].

    Returns:
        [B, Hq, L], float32, or float64 for float64.
    """

    def captures(part: Mask | ScoreMod | None) -> list[torch.Tensor]:
        tensors = () if part is None else part.captures
        return [t.detach() if t.is_floating_point() else int32(t) for t in tensors]

    return _op(
        query.detach(),
        key.detach(),
        captures(visible),
        captures(changed),
        "" if visible is None else visible.text,
        "" if changed is None else changed.text,
        float(scale),
    )


@jax_op("tpu_kernels::flex_attention_highest_scores")
def _op(
    q: jax.Array,
    k: jax.Array,
    mask_captures: Sequence[jax.Array],
    score_captures: Sequence[jax.Array],
    mask: str,
    score: str,
    scale: float,
) -> jax.Array:
    batch, heads, q_len, _ = q.shape
    compute = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.astype(compute).reshape(batch, k.shape[1], -1, *q.shape[2:])
    wide = k.astype(compute)
    b, h, kv = (
        jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        for shape, axis in (((batch, 1, 1, 1), 0), ((1, heads, 1, 1), 1), ((1, 1, 1, k.shape[2]), 3))
    )

    def of_row(row: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(grouped, row, 3, keepdims=False)
        s = scale * jnp.einsum("bhgd,bhsd->bhgs", one, wide, precision=jax.lax.Precision.HIGHEST)
        s = s.reshape(batch, heads, 1, k.shape[2])
        env = {"b": b, "h": h, "q": row.reshape(1, 1, 1, 1), "kv": kv, "q_len": q_len, "kv_len": k.shape[2]}
        if score:
            changed = evaluate(parse(score), {**env, "score": s}, load_from(score_captures, env))
            s = jnp.broadcast_to(changed, s.shape).astype(compute)
        if mask:
            s = jnp.where(evaluate(parse(mask), env, load_from(mask_captures, env)), s, -jnp.inf)
        return s.max(-1, initial=-jnp.inf)[..., 0]

    rows = jnp.arange(q_len, dtype=jnp.int32)
    return jnp.moveaxis(jax.lax.map(of_row, rows, batch_size=_ROWS), 0, -1)

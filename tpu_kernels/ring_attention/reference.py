"""Ring attention in plain JAX: every rank gets all keys and values, and holds all of its scores."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpu_kernels.expressions.expression import Expression, Load, Operand, Variable, parse, substitute, text
from tpu_kernels.ring_attention.formula import CAUSAL
from tpu_kernels.ring_attention.layouts import positions
from tpu_kernels.ring_attention.ring import Ring
from tpu_kernels.splash_attention.reference import splash_attention_reference


def ring_attention_reference(
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    captures: Sequence[jax.Array],
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
    mask: str,
    score: str,
    lengths: tuple[int, int],
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """o and lse of this rank's queries, as `vjp.attend` defines them; any floating dtype."""

    # Their gradients are sums over ranks: rounded once, at the end.
    wide = jnp.promote_types(q.dtype, jnp.float32)
    dtype, (q, k, v) = q.dtype, (array.astype(wide) for array in (q, k, v))

    def everywhere(array: jax.Array, axis: int) -> jax.Array:
        return jax.lax.all_gather(array, ring.names, axis=axis, tiled=True)

    q_at = positions(ring.place(), ring.size, ring.q_count, ring.layout)
    kv_at = jnp.concatenate(
        [positions(place, ring.size, ring.kv_count, ring.layout) for place in range(ring.size)]
    )
    first = len(captures)
    q_index, kv_index = Variable("q"), Variable("kv")
    q_position = Load(first, (q_index,), "int")
    kv_position = Load(first + 1, (kv_index,), "int")
    whole: dict[str, Operand] = {
        "q": q_position,
        "kv": kv_position,
        "q_len": lengths[0],
        "kv_len": lengths[1],
    }
    conditions: list[Expression] = [substitute(parse(mask), whole)] if mask else []
    in_order = mask == CAUSAL and ring.q_count == ring.kv_count
    if lengths[1] < ring.size * ring.kv_count and not in_order:
        conditions.append(kv_position < lengths[1])
    arrays = [*captures, jnp.asarray(q_at, jnp.int32), kv_at]
    if q_ids is not None and kv_ids is not None:
        b = Variable("b")
        conditions.append(Load(first + 2, (b, q_index), "int").eq(Load(first + 3, (b, kv_index), "int")))
        arrays += [q_ids, everywhere(kv_ids, 1)]
    seen: Expression | None = None
    for condition in conditions:
        seen = condition if seen is None else seen & condition
    o, lse = splash_attention_reference(
        q,
        everywhere(k, 2),
        everywhere(v, 2),
        arrays,
        mask="" if seen is None else text(seen),
        score=text(substitute(parse(score), whole)) if score else "",
        scale=scale,
    )
    return o.astype(dtype), lse

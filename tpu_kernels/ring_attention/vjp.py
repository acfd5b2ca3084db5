"""Ring attention as a differentiable JAX function of each rank's part, inside of a shard_map.

Forward: in each hop a rank attends to the keys that it has, while they travel on; the sums of the softmax
go from one hop to the next in float32, and are divided once, at the end. Backward: the same walk. The
gradients of keys follow the keys, one hop behind: each rank adds its own to those that arrive. At the end
they go home. (Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers, arXiv 2310.01889.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_kernels.collectives import kernel as collectives
from tpu_kernels.collectives.links import Line
from tpu_kernels.collectives.shipment import Shipment
from tpu_kernels.expressions.expression import parse
from tpu_kernels.expressions.hoist import hoist_all, materialise
from tpu_kernels.ring_attention import composed, fused
from tpu_kernels.ring_attention.formula import hop_captures, hop_cases, local_texts
from tpu_kernels.ring_attention.reference import ring_attention_reference
from tpu_kernels.ring_attention.ring import Hop, Ring, Shifts
from tpu_kernels.splash_attention.blocks import AlignedLoad
from tpu_kernels.splash_attention.tiles import Formula
from tpu_kernels.splash_attention.tiling import SplashTiling

UNROLLED = 6
"""Hops of one kind that are written out. More are a loop, two by two: what arrives in one is sent in the
next, so two buffers do, and nothing is copied."""


@dataclass(frozen=True)
class RingProblem:
    """All that is no array.

    Attributes:
        ring: who holds what.
        batch, heads: of the queries.
        mask, score: expressions of positions in the whole sequence, "" for none.
        lengths: of the whole sequences of queries and keys, without padding.
        scale: factor of the products.
        tiling: sizes of the kernels.
        vmem_limit_bytes, resident_bytes: see `splash_attention.kernel` and `backward`.
        fused: whether keys travel inside of the kernels.
    """

    ring: Ring
    batch: int
    heads: int
    mask: str
    score: str
    lengths: tuple[int, int]
    scale: float
    tiling: SplashTiling
    vmem_limit_bytes: int
    resident_bytes: int
    fused: bool

    @property
    def engine(self) -> Any:
        """The functions that do a hop."""
        return fused if self.fused else composed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    problem: RingProblem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    captures: list[jax.Array],
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of this rank's queries over all ranks' keys.

    Args:
        q: [B, Hq, L / ranks, D], float32 or bfloat16; all sizes at least 1.
        k, v: [B, Hkv, S / ranks, D] and [B, Hkv, S / ranks, Dv], in the dtype of q.
        captures: what mask and score load from; the same on all ranks.
        q_ids, kv_ids: int32 [B, L / ranks] and [B, S / ranks], segments of this rank's part; None without.

    Returns:
        o [B, Hq, L / ranks, Dv] in the dtype of q, and float32 [B, Hq, 1 or 2, L / ranks]: lse, and what
        `kernel.Forward` calls the correction, if the formula may be huge.
    """
    engine, static = problem.engine, _forward_sizes(problem)
    state: Any = (None, k, v, problem.ring.start)
    all_kv_ids = _gathered(problem.ring, kv_ids)
    for hop, count in problem.ring.runs():
        formula, load = _formula(problem, hop, captures, q_ids, all_kv_ids)
        onward = hop.onward
        if onward is None:
            sums, k, v, shifts = state
            found = engine.finish(
                q, k, v, load(shifts), None, before=sums, out_dtype=q.dtype, **formula(shifts), **static
            )
            rows = [found.lse] if found.correction is None else [found.lse, found.correction]
            return found.o, jnp.stack(rows, axis=2)

        def step(state: Any, formula: Any = formula, load: Any = load, onward: Line = onward) -> Any:
            sums, k, v, shifts = state
            shipment = Shipment((k, v), problem.ring.route(onward, 2))
            sums, (k, v) = engine.advance(
                q, k, v, load(shifts), before=sums, shipment=shipment, **formula(shifts), **static
            )
            return sums, k, v, problem.ring.moved(shifts, onward)

        state = _repeated(problem.ring, hop, count, step, state)
    raise AssertionError("a ring ends")


def _attend_forward(problem, q, k, v, captures, q_ids, kv_ids):
    found: Any = attend(problem, q, k, v, captures, q_ids, kv_ids)
    return found, (q, k, v, captures, q_ids, kv_ids, *found)


def _attend_backward(problem, kept, cotangents):
    q, k, v, captures, q_ids, kv_ids, o, rows = kept
    d_o, d_rows = cotangents
    found: Any = gradient(problem, q, k, v, captures, q_ids, kv_ids, o, rows, d_o, d_rows[:, :, 0])
    return *found, [_no_gradient(a) for a in captures], _no_gradient(q_ids), _no_gradient(kv_ids)


attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradient(
    problem: RingProblem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    captures: list[jax.Array],
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
    o: jax.Array,
    rows: jax.Array,
    d_o: jax.Array,
    d_lse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v of the sum over all ranks of `sum(o * d_o) + sum(lse * d_lse)`.

    Args:
        o, rows: what `attend` returned; the others as for it.
        d_o, d_lse: cotangents of o and lse.
    """
    lse = rows[:, :, 0]
    if rows.shape[2] > 1:
        # The kernels take exp(s - lse) for p. All they compute is linear in a row's p times its cotangents.
        d_o, d_lse = (d_o * rows[:, :, 1, :, None]).astype(d_o.dtype), d_lse * rows[:, :, 1]
    ring = problem.ring
    state: Any = (None, k, v, None, None, ring.start)
    all_kv_ids = _gathered(ring, kv_ids)
    for hop, count in ring.runs():
        formula, load = _formula(problem, hop, captures, q_ids, all_kv_ids)

        def step(state: Any, formula: Any = formula, load: Any = load, hop: Hop = hop) -> Any:
            dq, k, v, dk, dv, shifts = state
            shipment, behind = _shipment(problem, hop, [k, v], [dk, dv])
            found = problem.engine.gradients(
                q,
                k,
                v,
                load(shifts),
                o,
                lse,
                d_o,
                d_lse,
                **formula(shifts),
                tiles=problem.tiling.backward,
                scores_stay=problem.tiling.backward_scores_stay,
                vmem_limit_bytes=problem.vmem_limit_bytes,
                resident_bytes=problem.resident_bytes,
                dq_before=dq,
                shipment=shipment,
            )
            arrived = found.arrived
            if hop.onward is not None:
                (k, v), arrived = arrived[:2], arrived[2:]
                shifts = ring.moved(shifts, hop.onward)
            earlier = behind or arrived
            dk, dv = (a + b for a, b in zip(earlier, found[1:3], strict=True)) if earlier else found[1:3]
            return found.dq, k, v, dk, dv, shifts

        state = _repeated(ring, hop, count, step, state)
    dq, _, _, dk, dv, _ = state
    dk, dv = _home(problem, [dk, dv])
    return dq[:, :, : ring.q_count].astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _gradient_forward(problem, *arguments):
    return gradient(problem, *arguments), arguments


def _gradient_backward(problem, arguments, cotangents):
    q, k, v, captures, q_ids, kv_ids, o, rows, d_o, d_lse = arguments

    def of_reference(q, k, v, d_o, d_lse):
        def reference(q, k, v):
            return ring_attention_reference(
                problem.ring, q, k, v, captures, q_ids, kv_ids, problem.mask, problem.score, problem.lengths,
                problem.scale,
            )  # fmt: skip

        _, pull_back = jax.vjp(reference, q, k, v)
        return pull_back((d_o, d_lse))

    # o and lse are functions of the others, and the reference computes them again.
    _, pull_back = jax.vjp(of_reference, q, k, v, d_o, d_lse)
    dq, dk, dv, dd_o, dd_lse = pull_back(cotangents)
    others = [_no_gradient(a) for a in captures], _no_gradient(q_ids), _no_gradient(kv_ids)
    return dq, dk, dv, *others, jnp.zeros_like(o), jnp.zeros_like(rows), dd_o, dd_lse


gradient.defvjp(_gradient_forward, _gradient_backward)


# One hop ------------------------------------------------------------------------------------------


def _formula(
    problem: RingProblem,
    hop: Hop,
    captures: Sequence[jax.Array],
    q_ids: jax.Array | None,
    all_kv_ids: jax.Array | None,
) -> tuple[Callable[[Shifts], dict[str, Any]], Callable[[Shifts], list[AlignedLoad]]]:
    """What a kernel computes in a hop, and what it loads, once keys have come so far."""
    ring = problem.ring
    texts = local_texts(
        problem.mask,
        problem.score,
        ring,
        captures=len(captures),
        lengths=problem.lengths,
        segments=q_ids is not None,
        own_keys=hop.behind is None,
    )
    (mask, score), hoisted = hoist_all([parse(text) if text else None for text in texts])

    def formula(shifts: Shifts) -> dict[str, Any]:
        cases = hop_cases(texts.mask, ring, shifts, len(captures))
        return {"formula": Formula(mask, score, problem.scale, 0.0), "cases": cases}

    def load(shifts: Shifts) -> list[AlignedLoad]:
        given = [*captures, *hop_captures(ring, shifts, q_ids, all_kv_ids)]
        batch, heads = problem.batch, problem.heads
        sizes = {"b": batch, "h": heads, "q": ring.q_count, "kv": ring.kv_count}
        arrays = materialise(hoisted, given, sizes)
        return [AlignedLoad(array, of.axes) for array, of in zip(arrays, hoisted, strict=True)]

    return formula, load


def _shipment(
    problem: RingProblem, hop: Hop, keys: list[jax.Array], gradients: list[jax.Array]
) -> tuple[Shipment | None, list[jax.Array]]:
    """What travels while a hop's gradients are computed; and gradients of keys that have come before it.

    Keys go on, and the gradients of the last hop's keys go where those went. Both do so at once, but where a
    ring of two axes turns: a kernel knows its neighbours along one axis.
    """
    ring = problem.ring
    if hop.behind is None:
        gradients = []
    if hop.onward is None:
        keys = []
    before: list[jax.Array] = []
    if keys and gradients and hop.onward != hop.behind:
        assert hop.behind is not None
        before = problem.engine.move(Shipment(tuple(gradients), ring.route(hop.behind, 2)))
        gradients = []
    line = hop.onward or hop.behind
    arrays = (*keys, *gradients)
    if line is None or not arrays:
        return None, before
    return Shipment(arrays, ring.route(line, len(arrays))), before


def _home(problem: RingProblem, gradients: list[jax.Array]) -> list[jax.Array]:
    """Gradients of keys, from where these have ended, to the ranks that the keys are of."""
    ring, hops = problem.ring, problem.ring.hops()
    for line in ring.lines:
        left = -sum(hop.onward == line for hop in hops) % line.size
        if left == 1:
            gradients = problem.engine.move(Shipment(tuple(gradients), ring.route(line, 2)))
        elif left:
            gradients = [_moved_rows(array, ring, line, left, problem.fused) for array in gradients]
    return gradients


def _moved_rows(array: jax.Array, ring: Ring, line: Line, by: int, fused: bool) -> jax.Array:
    """Rows that travel to the right so many places that way, the others as many to the left."""

    def permuted(rows: jax.Array, shift: int) -> jax.Array:
        if fused:
            return collectives.ppermute(rows, line.name, line.size, shift)
        pairs = [(i, (i + shift) % line.size) for i in range(line.size)]
        return jax.lax.ppermute(rows, line.name, pairs)

    right = permuted(array[:, :, : ring.cut], by)
    if ring.cut == ring.kv_count:
        return right
    return jnp.concatenate([right, permuted(array[:, :, ring.cut :], -by)], axis=2)


# Around it ----------------------------------------------------------------------------------------


def _forward_sizes(problem: RingProblem) -> dict[str, Any]:
    return {"tiles": problem.tiling.forward, "vmem_limit_bytes": problem.vmem_limit_bytes}


def _gathered(ring: Ring, kv_ids: jax.Array | None) -> jax.Array | None:
    """Of all ranks, [ranks, B, S / ranks]."""
    return None if kv_ids is None else jax.lax.all_gather(kv_ids, ring.names)


def _repeated(ring: Ring, hop: Hop, count: int, step: Callable[[Any], Any], state: Any) -> Any:
    """The state after so many hops. It ends with how far keys have come."""
    if count <= UNROLLED:
        for _ in range(count):
            state = step(state)
        return state
    assert hop.onward is not None
    *_, shifts = state
    for_loop = (*state[:-1], tuple(map(jnp.int32, shifts)))
    looped = jax.lax.fori_loop(0, count // 2, lambda _, state: step(step(state)), for_loop)
    state = (*looped[:-1], ring.moved(shifts, hop.onward, count // 2 * 2))
    return step(state) if count % 2 else state


def _no_gradient(array: Any) -> Any:
    """The gradient of an array that nothing differentiable depends on."""
    if array is None:
        return None
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)

"""Splash attention in Pallas for TPU: the gradients of q, k and v.

    p = exp(s - lse)     dv = pᵀ do     dp = do vᵀ     ds = p (dp - delta)     delta = sum(do o) - dlse
    dx = ds score'(x)    dq = scale dx k     dk = scale dxᵀ q     where s = score(x), x = scale q kᵀ

One kernel makes all three, so that scores and dp are computed once. It walks through the scores as the
forward does, one q tile after the other. dq of a q tile is summed up while its visits last; dk and dv of all
keys stay in VMEM in float32 until all queries, of all heads that share these keys, have been seen.
Where keys are so many that this does not fit, they are taken in ranges, a call of the kernel for each,
and dq is the sum over them.

- Scores are transposed, [keys, queries]: lse and delta are rows, p and dx are what the products for dv and dk
  need, and for dq a tile of k is transposed, never one of scores.
- delta costs no pass over memory of its own: do is there anyhow.
- The queries that scores are computed from are scaled and rounded as in the forward, so that p is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge.shapes import pallas_call
from tpu_kernels.collectives.shipment import Route, Shipment, Travel, is_first_step, is_last_step, parted
from tpu_kernels.expressions.expression import Expression, Variable, substitute
from tpu_kernels.splash_attention import blocks
from tpu_kernels.splash_attention.blocks import END, AlignedLoad, Cases, Pattern, Sizes, Visits
from tpu_kernels.splash_attention.kernel import compiler_params, sub_blocks
from tpu_kernels.splash_attention.tiles import (
    LOG2_E,
    Formula,
    SubBlock,
    Visit,
    changed_scores,
    kept,
    operands,
    product,
    rows_inside,
    scaled_queries,
    visible,
)
from tpu_kernels.splash_attention.tiling import LANES, Tiles

WRITTEN_BYTES = 2**20
"""What dk and dv are written in: the more, the fewer steps do nothing but write."""

AHEAD = 2
"""Sub-blocks whose scores and dp are issued before the present one's are used."""


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    aligned: Sequence[AlignedLoad],
    seed: jax.Array | None,
    o: jax.Array,
    lse: jax.Array,
    d_o: jax.Array,
    d_lse: jax.Array,
    *,
    formula: Formula,
    tiles: Tiles,
    scores_stay: bool = False,
    vmem_limit_bytes: int,
    resident_bytes: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v for the cotangents of o and lse.

    Args:
        q, k, v, aligned, seed, formula: as in `kernel.forward`.
        o, lse: what it returned, [B, Hq, L, Dv] in any floating dtype and [B, Hq, L] float32.
        d_o, d_lse: cotangents of them; d_o is rounded to the dtype of v.
        tiles: sizes.
        scores_stay: whether p and dx are what the matrix units hold in the products for dk and dv, and do and
            q pass by, rather than the other way round. It is quicker if heads are narrower than a matrix
            unit, which is full then.
        vmem_limit_bytes: what the compiler lets the kernel use of VMEM.
        resident_bytes: what dk and dv in float32 may take of VMEM; at least a kv tile's are taken.

    Returns:
        dq, dk and dv in the shapes and the dtype of q, k and v. Sums are float32, rounded once at the end.
    """
    kv_len = k.shape[2]
    tiles = tiles.clipped(q.shape[2], kv_len)
    step = _keys_at_once(k.shape[3], v.shape[3], tiles, resident_bytes)
    sizes = Sizes(q.shape[0], q.shape[1], q.shape[2], kv_len)
    ranges = _ranges_of_keys(step, formula.mask, aligned, sizes, tiles)
    rows = backward_rows(lse, d_lse, log2=formula.score is None)
    parts = [
        _of_keys(
            visits,
            begin,
            end,
            q,
            k,
            v,
            aligned,
            seed,
            o,
            rows,
            d_o.astype(v.dtype),
            formula=formula,
            tiles=tiles,
            scores_stay=scores_stay,
            vmem_limit_bytes=vmem_limit_bytes,
            dq_dtype=q.dtype if len(ranges) == 1 else jnp.dtype(jnp.float32),
            dkv_dtype=k.dtype,
            dq_rows=q.shape[2],
        )
        for begin, end, visits in ranges
    ]
    dq, dk, dv = zip(*(part[:3] for part in parts), strict=True)
    if len(parts) == 1:
        return dq[0], dk[0], dv[0]
    return (
        functools.reduce(jnp.add, dq).astype(q.dtype),
        jnp.concatenate(dk, axis=2),
        jnp.concatenate(dv, axis=2),
    )


class Gradients(NamedTuple):
    """Results of `partial_backward`, float32, and what has arrived.

    dq has rows for a multiple of `tile_q` queries: JAX's interpreter adds in place to whole tiles only.
    """

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    arrived: list[jax.Array]


def partial_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    aligned: Sequence[AlignedLoad],
    o: jax.Array,
    lse: jax.Array,
    d_o: jax.Array,
    d_lse: jax.Array,
    *,
    formula: Formula,
    tiles: Tiles,
    scores_stay: bool,
    vmem_limit_bytes: int,
    resident_bytes: int,
    dq_before: jax.Array | None,
    shipment: Shipment | None,
    cases: Cases | None = None,
) -> Gradients:
    """The gradients for some of the keys that `o` and `lse` are of, while a shipment travels.

    Args:
        dq_before: a dq of before, to which this one is added, in its memory; None for zero.
        shipment: what travels, if something does. The other arguments as for `backward`.
        cases: what the mask can be, see `blocks.plan`.
    """
    tiles = tiles.clipped(q.shape[2], k.shape[2])
    step = _keys_at_once(k.shape[3], v.shape[3], tiles, resident_bytes)
    sizes = Sizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    rows = backward_rows(lse, d_lse, log2=formula.score is None)

    def is_visited(begin: int) -> bool:
        return begin == 0 and dq_before is None

    dq = dq_before
    parts: list[tuple[jax.Array, jax.Array]] = []
    arrived: list[jax.Array] = []
    for begin, end, visits in _ranges_of_keys(step, formula.mask, aligned, sizes, tiles, is_visited, cases):
        dq, dk, dv, *landed = _of_keys(
            visits,
            begin,
            end,
            q,
            k,
            v,
            aligned,
            None,
            o,
            rows,
            d_o.astype(v.dtype),
            formula=formula,
            tiles=tiles,
            scores_stay=scores_stay,
            vmem_limit_bytes=vmem_limit_bytes,
            dq_dtype=jnp.dtype(jnp.float32),
            dkv_dtype=jnp.dtype(jnp.float32),
            dq_rows=pl.cdiv(q.shape[2], tiles.tile_q) * tiles.tile_q,
            dq_before=dq,
            shipment=shipment if begin == 0 else None,
        )
        parts.append((dk, dv))
        arrived += landed
    assert dq is not None
    if len(parts) == 1:
        return Gradients(dq, *parts[0], arrived)
    dk, dv = zip(*parts, strict=True)
    return Gradients(dq, jnp.concatenate(dk, axis=2), jnp.concatenate(dv, axis=2), arrived)


def backward_rows(lse: jax.Array, d_lse: jax.Array, *, log2: bool) -> jax.Array:
    """[B, Hq, 2, L] float32: lse, as power of 2 if `log2`, and d_lse.

    The lse of a row without probabilities becomes +inf: its p = exp(s - lse) are 0 then, also for s = -inf.
    """
    finite = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    return jnp.stack([finite * LOG2_E if log2 else finite, d_lse.astype(jnp.float32)], axis=2)


def _keys_at_once(head_dim: int, value_dim: int, tiles: Tiles, resident_bytes: int) -> int:
    """How many keys' gradients fit, in whole tiles."""
    row = sum(-(-dim // LANES) * LANES for dim in (head_dim, value_dim)) * 4
    return max(resident_bytes // row // tiles.tile_kv, 1) * tiles.tile_kv


def _ranges_of_keys(
    step: int,
    mask: Expression | None,
    aligned: Sequence[AlignedLoad],
    sizes: Sizes,
    tiles: Tiles,
    every: Callable[[int], bool] = lambda begin: True,
    cases: Cases | None = None,
) -> list[tuple[int, int, Visits]]:
    """(begin, end, visits) of the ranges of keys to work on one after the other.

    They have `step` keys, or fewer where the lists of visits would not fit in SMEM. `every` says of a range's
    begin whether q tiles that see none of its keys are visited.
    """
    while True:
        ends = [(begin, min(begin + step, sizes.kv_len)) for begin in range(0, sizes.kv_len, step)]
        try:
            return [
                (*range_, _visits(*range_, mask, aligned, sizes, tiles, cases, every=every(range_[0])))
                for range_ in ends
            ]
        except blocks.TooManyVisits:
            if step == tiles.tile_kv:
                raise
            step = max(step // 2 // tiles.tile_kv, 1) * tiles.tile_kv


def _of_keys(
    visits: Visits,
    begin: int,
    end: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    aligned: Sequence[AlignedLoad],
    seed: jax.Array | None,
    o: jax.Array,
    rows: jax.Array,
    d_o: jax.Array,
    *,
    formula: Formula,
    tiles: Tiles,
    scores_stay: bool,
    vmem_limit_bytes: int,
    dq_dtype: Any,
    dkv_dtype: Any,
    dq_rows: int,
    dq_before: jax.Array | None = None,
    shipment: Shipment | None = None,
) -> list[jax.Array]:
    """What keys `begin` to before `end` contribute to dq, dk and dv of these keys, and what arrived."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, value_dim = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    sizes = Sizes(batch, heads, q_len, kv_len)
    first_tile = begin // tiles.tile_kv
    written, writes = _written_rows(end - begin, max(head_dim, value_dim), dkv_dtype, tiles)

    def where(b: Any, kv_head: Any, member: Any, n: Any, words: Any, steps: Any, *_: Any) -> tuple[Any, ...]:
        # What follows the visits only writes dk and dv: it stays at the last visit.
        h = kv_head * group + member
        word = words[visits.word_index(b, h, jnp.minimum(n, steps[0] - 1))]
        return b, h, blocks.q_tile(word), first_tile + blocks.kv_tile(word)

    def q_map(*at: Any) -> tuple[Any, ...]:
        # q, o, do, dq are (B, Hq, L, D). The visit's q tile.
        b, h, q_tile, _ = where(*at)
        return b, h, q_tile, 0

    def rows_map(*at: Any) -> tuple[Any, ...]:
        # rows is (B, Hq, 2, L). The visit's q tile.
        b, h, q_tile, _ = where(*at)
        return b, h, 0, q_tile

    def kv_map(*at: Any) -> tuple[Any, ...]:
        # k, v are (B, Hkv, S, D). The visit's kv tile.
        _, _, _, kv_tile = where(*at)
        return at[0], at[1], kv_tile, 0

    def written_map(b: Any, kv_head: Any, member: Any, n: Any, words: Any, steps: Any, *_: Any) -> Any:
        # dk, dv are (B, Hkv, end - begin, D). One block after the other, from the last head's last visit on.
        return b, kv_head, jnp.where(member == group - 1, jnp.maximum(n - (steps[0] - 1), 0), 0), 0

    loads = operands(aligned, tiles, where, transposed=True)
    words, steps = jnp.asarray(visits.words, jnp.int32), jnp.asarray(visits.steps, jnp.int32)
    prefetched = [words, steps.reshape(1)] + ([] if seed is None else [seed])
    arrays = [*prefetched, q, k, v, o, d_o, rows, *(load.array for load in loads)]
    dq_spec = pl.BlockSpec((None, None, tiles.tile_q, head_dim), q_map)
    found = pallas_call(
        functools.partial(
            _body,
            visits=visits,
            sizes=sizes,
            tiles=tiles,
            scores_stay=scores_stay,
            group=group,
            first_tile=first_tile,
            axes=tuple(load.axes for load in loads),
            has_seed=seed is not None,
            formula=formula,
            continues=dq_before is not None,
            route=shipment and shipment.route,
            shipped=len(shipment.arrays) if shipment else 0,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, kv_heads, group, visits.steps + writes - 1),
            in_specs=[
                pl.BlockSpec((None, None, tiles.tile_q, head_dim), q_map),
                pl.BlockSpec((None, None, tiles.tile_kv, head_dim), kv_map),
                pl.BlockSpec((None, None, tiles.tile_kv, value_dim), kv_map),
                pl.BlockSpec((None, None, tiles.tile_q, value_dim), q_map),
                pl.BlockSpec((None, None, tiles.tile_q, value_dim), q_map),
                pl.BlockSpec((None, None, 2, tiles.tile_q), rows_map),
                *(load.spec for load in loads),
                *([] if dq_before is None else [dq_spec]),
                *(shipment.specs if shipment else []),
            ],
            out_specs=[
                dq_spec,
                pl.BlockSpec((None, None, written, head_dim), written_map),
                pl.BlockSpec((None, None, written, value_dim), written_map),
                *(shipment.specs if shipment else []),
            ],
            scratch_shapes=[
                pltpu.VMEM((head_dim, tiles.tile_q), jnp.float32),
                *(
                    pltpu.VMEM(
                        (dim, writes * written) if scores_stay else (writes * written, dim), jnp.float32
                    )
                    for dim in (head_dim, value_dim)
                ),
                *(shipment.scratch_shapes if shipment else []),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, dq_rows, head_dim), dq_dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, end - begin, head_dim), dkv_dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, end - begin, value_dim), dkv_dtype),
            *(shipment.out_shape if shipment else []),
        ],
        # A tile of dq that nothing is added to keeps what it has in place.
        input_output_aliases={} if dq_before is None else {len(arrays): 0},
        compiler_params=compiler_params(
            ("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes,
            shipment and shipment.route,
        ),
        name="splash_attention_backward",
    )(
        *arrays,
        *([] if dq_before is None else [dq_before]),
        *(shipment.arrays if shipment else ()),
    )
    return list(found)


def _written_rows(keys: int, dim: int, dtype: Any, tiles: Tiles) -> tuple[int, int]:
    """Rows of dk and dv that a step writes, whole tiles, and how many steps write."""
    kv_tiles = pl.cdiv(keys, tiles.tile_kv)
    row = -(-dim // LANES) * LANES * jnp.dtype(dtype).itemsize
    rows = min(max(WRITTEN_BYTES // row // tiles.tile_kv, 1), kv_tiles) * tiles.tile_kv
    return rows, pl.cdiv(kv_tiles * tiles.tile_kv, rows)


def _visits(
    begin: int,
    end: int,
    mask: Expression | None,
    aligned: Sequence[AlignedLoad],
    sizes: Sizes,
    tiles: Tiles,
    cases: Cases | None,
    *,
    every: bool,
) -> Visits:
    """The visits of keys `begin` to before `end`; kv tiles are counted from `begin`."""
    part = Sizes(sizes.batch, sizes.heads, sizes.q_len, end - begin)
    if part != sizes:

        def cut(mask: Expression) -> Expression:
            return substitute(substitute(mask, {"kv_len": sizes.kv_len}), {"kv": Variable("kv") + begin})

        mask = None if mask is None else cut(mask)
        cases = None if cases is None else cases.changed(cut)
        aligned = [
            AlignedLoad(jax.lax.slice_in_dim(load.array, begin, end, axis=load.axes.index("kv")), load.axes)
            if "kv" in load.axes
            else load
            for load in aligned
        ]
    return blocks.plan(mask, aligned, part, tiles, "q", q_end=True, every=every, cases=cases)


def _body(
    *refs: Any,
    has_seed: bool,
    axes: tuple[tuple[str, ...], ...],
    continues: bool,
    route: Route | None,
    shipped: int,
    **static: Any,
) -> None:
    groups = parted(refs, 2, has_seed, 6, len(axes), continues, shipped, 3, shipped)
    (words_ref, steps_ref), seed, arrays, loads, before, sources, results, targets, scratch = groups
    travel = Travel.of(route, sources, targets, scratch)
    if travel:
        pl.when(is_first_step(4))(travel.depart)
    q_ref, k_ref, v_ref, o_ref, do_ref, rows_ref = arrays
    given = words_ref, steps_ref, seed[0] if seed else None, q_ref, k_ref, v_ref, o_ref, do_ref, rows_ref
    _visit(*given, tuple(loads), before[0] if before else None, *results, *scratch, axes=axes, **static)
    if travel:
        pl.when(is_last_step(4))(travel.arrive)


def _visit(
    words_ref,  # int32, all visits
    steps_ref,  # int32 [1]: how many of them the longest list has
    seed_ref,  # int32 [2] or None
    q_ref,  # [tile_q, D]
    k_ref,  # [tile_kv, D]
    v_ref,  # [tile_kv, Dv]
    o_ref,  # [tile_q, Dv]
    do_ref,  # [tile_q, Dv]
    rows_ref,  # [2, tile_q] float32: lse and dlse, see backward_rows
    load_refs,  # see tiles.operands
    dq_before_ref,  # [tile_q, D] float32: what dq is added to; or None
    dq_ref,  # [tile_q, D]
    dk_ref,  # [written, D]
    dv_ref,  # [written, Dv]
    dq_sum_ref,  # [D, tile_q] float32: of this q tile so far, transposed, without the scale
    dk_sum_ref,  # [keys, D], or transposed, float32: of all keys so far, without the scale
    dv_sum_ref,  # [keys, Dv], or transposed, float32: of all keys so far
    *,
    axes: tuple[tuple[str, ...], ...],
    visits: Visits,
    sizes: Sizes,
    tiles: Tiles,
    scores_stay: bool,
    group: int,
    first_tile: int,
    formula: Formula,
) -> None:
    b, member, n = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    h = pl.program_id(1) * group + member
    steps = steps_ref[0]
    word = words_ref[visits.word_index(b, h, jnp.minimum(n, steps - 1))]
    is_visit = n < steps
    kv_tile = blocks.kv_tile(word)
    visit = Visit(
        b=b,
        h=h,
        q=blocks.q_tile(word) * tiles.tile_q,
        kv=(first_tile + kv_tile) * tiles.tile_kv,
        sizes=sizes,
        axes=axes,
        refs=load_refs,
        seed_ref=seed_ref,
    )

    @pl.when((member == 0) & (n == 0))
    def _() -> None:
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    @pl.when(is_visit & blocks.is_first(word))
    def _() -> None:
        dq_sum_ref[...] = jnp.zeros_like(dq_sum_ref)

    def queries(ref: Any, block: SubBlock) -> jax.Array:
        tile = ref[pl.ds(block.q, block.sub_q)]
        at_end = block.kind == END and sizes.q_len % block.sub_q
        return rows_inside(tile, visit.q + block.q, sizes.q_len) if at_end else tile

    def keys(ref: Any, block: SubBlock) -> jax.Array:
        tile = ref[pl.ds(block.kv, block.sub_kv)]
        at_end = block.kind == END and sizes.kv_len % block.sub_kv
        return rows_inside(tile, visit.kv + block.kv, sizes.kv_len) if at_end else tile

    def delta_of(q_rows: Any) -> jax.Array:
        terms = do_ref[q_rows].astype(jnp.float32) * o_ref[q_rows].astype(jnp.float32)
        return jnp.sum(terms.T, axis=0, keepdims=True) - rows_ref[1:2, q_rows]

    def scaled(rows: jax.Array) -> jax.Array:
        return scaled_queries(rows, formula) if formula.score is None else rows

    def gradients(pattern: Pattern) -> None:
        todo = sub_blocks(pattern, tiles)
        # Made in each visit anew, where it overlaps with products.
        begins = {block.q: pl.ds(block.q, block.sub_q) for block in todo}
        scaled_q = {begin: scaled(q_ref[q_rows]) for begin, q_rows in begins.items()}
        delta = {begin: delta_of(q_rows) for begin, q_rows in begins.items()}
        k_transposed = {block.kv: keys(k_ref, block).T for block in todo}
        q_rows_of = {block.q: queries(q_ref, block) for block in todo}
        do_rows_of = {block.q: queries(do_ref, block) for block in todo}
        if scores_stay:
            q_rows_of, do_rows_of = (
                {at: rows.T for at, rows in of.items()} for of in (q_rows_of, do_rows_of)
            )

        def products(block: SubBlock) -> tuple[jax.Array, jax.Array]:
            """k qᵀ and v doᵀ."""
            kv_rows = pl.ds(block.kv, block.sub_kv)
            kq = product(k_ref[kv_rows], scaled_q[block.q], (1, 1))
            return kq, product(v_ref[kv_rows], do_ref[begins[block.q]], (1, 1))

        waiting = [products(block) for block in todo[:AHEAD]]
        for place, block in enumerate(todo):
            if place + AHEAD < len(todo):
                waiting.append(products(todo[place + AHEAD]))
            kq, dp = waiting.pop(0)
            lanes = begins[block.q]
            weights, dx = weights_and_dx(
                kq,
                dp,
                rows_ref[0:1, lanes],
                delta[block.q],
                visit,
                block,
                formula=formula,
            )
            weights, dx = weights.astype(do_ref.dtype), dx.astype(q_ref.dtype)
            own = pl.ds(kv_tile * tiles.tile_kv + block.kv, block.sub_kv)
            if scores_stay:
                dv_sum_ref[:, own] += product(do_rows_of[block.q], weights, (1, 1))
                dk_sum_ref[:, own] += product(q_rows_of[block.q], dx, (1, 1))
            else:
                dv_sum_ref[own] += product(weights, do_rows_of[block.q], (1, 0))
                dk_sum_ref[own] += product(dx, q_rows_of[block.q], (1, 0))
            dq_sum_ref[:, lanes] += product(k_transposed[block.kv], dx, (1, 0))

    for number, pattern in visits.branches():
        chosen = is_visit & (blocks.pattern_of(word) == number)
        pl.when(chosen)(functools.partial(gradients, pattern))

    @pl.when(is_visit & blocks.is_last(word))
    def _() -> None:
        dq = (dq_sum_ref[...] * formula.scale).T
        if dq_before_ref is not None:
            dq += dq_before_ref[...]
        dq_ref[...] = dq.astype(dq_ref.dtype)

    @pl.when((n >= steps - 1) & (member == group - 1))
    def _() -> None:
        own = pl.ds((n - (steps - 1)) * dk_ref.shape[0], dk_ref.shape[0])
        dk, dv = (
            (dk_sum_ref[:, own].T, dv_sum_ref[:, own].T)
            if scores_stay
            else (dk_sum_ref[own], dv_sum_ref[own])
        )
        dk_ref[...] = (dk * formula.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv.astype(dv_ref.dtype)


def weights_and_dx(
    kq: jax.Array,
    dp: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    visit: Visit,
    block: SubBlock,
    *,
    formula: Formula,
) -> tuple[jax.Array, jax.Array]:
    """What the values are weighted with, and the gradient of the scaled products, [sub_kv, sub_q] float32.

    Args:
        kq: k qᵀ; without a change of the scores, of queries times scale * log2(e).
        dp: v doᵀ.
        lse, delta: rows of the sub-block; `lse` as `backward_rows` makes it.
    """
    pull_back = None
    if formula.score is None:
        p = jnp.exp2(kq - lse)
    else:
        change = functools.partial(
            changed_scores, score=formula.score, visit=visit, block=block, transposed=True
        )
        s, pull_back = jax.vjp(change, kq * formula.scale)
        p = jnp.exp2((s - lse) * LOG2_E)
    seen = visible(formula.mask, visit, block, transposed=True)
    if seen is not None:
        p = jnp.where(seen, p, 0.0)
    weights = p
    if formula.dropout_p:
        kept_here = kept(visit, block, formula.dropout_p, transposed=True)
        factor = jnp.where(kept_here, 1 / (1 - formula.dropout_p), 0.0)
        weights, dp = p * factor, dp * factor
    dx = p * (dp - delta)
    if pull_back is not None:
        (dx,) = pull_back(dx)
    if seen is not None:
        # Not only p is meant: behind an end, and in slopes of masked scores, there may be NaN.
        dx = jnp.where(seen, dx, 0.0)
    return weights, dx

"""Splash attention in Pallas for TPU, forward.

    s = score(scale * q kᵀ), -inf where masked     o = softmax(s) v     lse = log(sum(exp(s)))

One grid step visits one tile of the scores (`blocks`), sub-block by sub-block. The softmax is computed on the
way (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135), with these details:

- A visit is one long piece of straight code. So the compiler can overlap the products of one sub-block with
  the exponentials of another; the products of the next sub-blocks are written `AHEAD` of their use.
- The sum of a row is kept as 128 partial sums, one per lane, which are added up once at the end.
- Powers are of 2, the unit's own. Where scores are the products times a scale, the queries are multiplied by
  scale * log2(e) once, and rounded to their dtype again, instead of every score: the vector unit is what
  limits attention on chips with large matrix units.
- Masked scores are -inf, and maxima begin with the lowest finite number. So exp(s - m) is 0 for them, never
  NaN, a row that sees nothing has sum 0, whatever is visited, and any finite score is an ordinary one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge.shapes import pallas_call
from tpu_kernels.collectives.shipment import Route, Shipment, Travel, is_first_step, is_last_step, parted
from tpu_kernels.splash_attention import blocks
from tpu_kernels.splash_attention.blocks import END, SKIP, AlignedLoad, Cases, Pattern, Sizes, Visits
from tpu_kernels.splash_attention.tiles import (
    LOG2_E,
    NEGATIVE_INFINITY,
    Formula,
    SubBlock,
    Visit,
    changed_scores,
    kept,
    lanes,
    operands,
    product,
    rows_inside,
    scaled_queries,
    visible,
)
from tpu_kernels.splash_attention.tiling import LANES, Tiles

LOWEST = float(jnp.finfo(jnp.float32).min)
AHEAD = 2
"""Sub-blocks whose products are issued before the softmax of the present one."""


class Sums(NamedTuple):
    """How far the softmax of each query has come over the keys seen so far.

    There are rows for L' queries, a multiple of `tile_q`: JAX's interpreter adds in place to whole tiles
    only.

    Attributes:
        acc: sum(exp(s - m) v), [B, Hq, L', Dv] float32.
        rows: m, the largest score (times log2(e) where nothing changes the scores), and sum(exp(s - m)),
            [B, Hq, 2, L'] float32.
    """

    acc: jax.Array
    rows: jax.Array


class Forward(NamedTuple):
    """Results of `forward`.

    Attributes:
        o: [B, Hq, L, Dv].
        lse: [B, Hq, L] float32.
        correction: p / exp(s - lse) for each query, [B, Hq, L] float32: what rounding lse has cost, so that
            the backward knows p. None unless the formula `may_be_huge`: a bias may be finfo.min or -1e9 for a
            whole row, and lse is the same number then.
    """

    o: jax.Array
    lse: jax.Array
    correction: jax.Array | None


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    aligned: Sequence[AlignedLoad],
    seed: jax.Array | None,
    *,
    formula: Formula,
    tiles: Tiles,
    vmem_limit_bytes: int,
    out_dtype: Any,
    before: Sums | None = None,
    cases: Cases | None = None,
) -> Forward:
    """Attention of each query over the keys it sees.

    Args:
        q: [B, Hq, L, D], float32 or bfloat16; all sizes at least 1.
        k: [B, Hkv, S, D] and v [B, Hkv, S, Dv], in the dtype of q. Hkv divides Hq.
        aligned: what the loads of slot i in the formula read.
        seed: int32 [2], for dropout.
        formula: what is computed of the products.
        tiles: sizes.
        vmem_limit_bytes: what the compiler lets the kernel use of VMEM.
        out_dtype: of o.
        before: of other keys, which count as well.
        cases: what the mask can be, see `blocks.plan`.
    """
    found, _ = _launch(
        q,
        k,
        v,
        aligned,
        seed,
        formula=formula,
        tiles=tiles,
        vmem_limit_bytes=vmem_limit_bytes,
        out_dtype=out_dtype,
        before=before,
        shipment=None,
        ends=True,
        cases=cases,
    )
    o, lse = found
    return Forward(o, lse[:, :, 0], lse[:, :, 1] if formula.may_be_huge else None)


def partial_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    aligned: Sequence[AlignedLoad],
    *,
    formula: Formula,
    tiles: Tiles,
    vmem_limit_bytes: int,
    before: Sums | None,
    shipment: Shipment | None,
    cases: Cases | None = None,
) -> tuple[Sums, list[jax.Array]]:
    """The sums of `before` and of these keys, while a shipment travels; more keys are to come.

    Args:
        before: of the keys seen so far, whose memory the result takes; None if there are none.
        shipment: what travels, if something does. The other arguments as for `forward`.

    Returns:
        The sums, and what has arrived.
    """
    found, arrived = _launch(
        q,
        k,
        v,
        aligned,
        None,
        formula=formula,
        tiles=tiles,
        vmem_limit_bytes=vmem_limit_bytes,
        out_dtype=jnp.float32,
        before=before,
        shipment=shipment,
        ends=False,
        cases=cases,
    )
    return Sums(*found), arrived


def finished(sums: Sums, formula: Formula, out_dtype: Any, q_len: int) -> Forward:
    """What `forward` makes of the sums over all keys."""
    m, total = sums.rows[:, :, 0, :q_len], sums.rows[:, :, 1, :q_len]
    if formula.score is None:
        m = m / LOG2_E
    log_total = jnp.log(total)
    lse = m + log_total
    o = (sums.acc[:, :, :q_len] / jnp.where(total == 0.0, 1.0, total)[..., None]).astype(out_dtype)
    correction = jnp.where(total == 0.0, 1.0, jnp.exp((lse - m) - log_total))
    return Forward(o, lse, correction if formula.may_be_huge else None)


def _launch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    aligned: Sequence[AlignedLoad],
    seed: jax.Array | None,
    *,
    formula: Formula,
    tiles: Tiles,
    vmem_limit_bytes: int,
    out_dtype: Any,
    before: Sums | None,
    shipment: Shipment | None,
    ends: bool,
    cases: Cases | None,
) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    """Either what `forward` or what `partial_forward` returns, and what arrived."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, value_dim = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    sizes = Sizes(batch, heads, q_len, kv_len)
    tiles = tiles.clipped(q_len, kv_len)
    # A tile of sums that nothing is added to keeps what it has in place.
    in_place = before is not None and not ends
    visits = blocks.plan(
        formula.mask, aligned, sizes, tiles, "q", q_end=False, every=not in_place, cases=cases
    )

    def where(b: Any, h: Any, n: Any, words: Any, *_: Any) -> tuple[Any, Any, Any, Any]:
        word = words[visits.word_index(b, h, n)]
        return b, h, blocks.q_tile(word), blocks.kv_tile(word)

    def q_map(*at: Any) -> tuple[Any, ...]:
        # q, o are (B, Hq, L, D). Load the visit's q tile.
        b, h, q_tile, _ = where(*at)
        return b, h, q_tile, 0

    def kv_map(*at: Any) -> tuple[Any, ...]:
        # k, v are (B, Hkv, S, D). Load the visit's kv tile, of the head that the query head reads.
        b, h, _, kv_tile = where(*at)
        return b, h // group, kv_tile, 0

    def lse_map(*at: Any) -> tuple[Any, ...]:
        # lse is (B, Hq, rows, L). The visit's q tile.
        b, h, q_tile, _ = where(*at)
        return b, h, 0, q_tile

    rows = 2 if formula.may_be_huge or not ends else 1
    results = q_len if ends else pl.cdiv(q_len, tiles.tile_q) * tiles.tile_q
    loads = operands(aligned, tiles, where, transposed=False)
    prefetched = [jnp.asarray(visits.words, jnp.int32)] + ([] if seed is None else [seed])
    operands_ = [*prefetched, q, k, v, *(load.array for load in loads)]
    acc_spec = pl.BlockSpec((None, None, tiles.tile_q, value_dim), q_map)
    found = pallas_call(
        functools.partial(
            _body,
            visits=visits,
            sizes=sizes,
            tiles=tiles,
            axes=tuple(load.axes for load in loads),
            has_seed=seed is not None,
            formula=formula,
            continues=before is not None,
            ends=ends,
            route=shipment and shipment.route,
            shipped=len(shipment.arrays) if shipment else 0,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, heads, visits.steps),
            in_specs=[
                pl.BlockSpec((None, None, tiles.tile_q, head_dim), q_map),
                pl.BlockSpec((None, None, tiles.tile_kv, head_dim), kv_map),
                pl.BlockSpec((None, None, tiles.tile_kv, value_dim), kv_map),
                *(load.spec for load in loads),
                *([acc_spec, pl.BlockSpec((None, None, 2, tiles.tile_q), lse_map)] if before else []),
                *(shipment.specs if shipment else []),
            ],
            out_specs=[
                acc_spec,
                pl.BlockSpec((None, None, rows, tiles.tile_q), lse_map),
                *(shipment.specs if shipment else []),
            ],
            scratch_shapes=[
                pltpu.VMEM((tiles.tile_q, value_dim), jnp.float32),
                pltpu.VMEM((tiles.tile_q, LANES), jnp.float32),
                pltpu.VMEM((tiles.tile_q, LANES), jnp.float32),
                *([pltpu.VMEM((tiles.tile_q, head_dim), q.dtype)] if formula.score is None else []),
                *(shipment.scratch_shapes if shipment else []),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, results, value_dim), out_dtype),
            jax.ShapeDtypeStruct((batch, heads, rows, results), jnp.float32),
            *(shipment.out_shape if shipment else []),
        ],
        input_output_aliases={len(operands_): 0, len(operands_) + 1: 1} if in_place else {},
        compiler_params=compiler_params(
            ("parallel", "parallel", "arbitrary"), vmem_limit_bytes, shipment and shipment.route
        ),
        name="splash_attention_forward",
    )(*operands_, *(before or ()), *(shipment.arrays if shipment else ()))
    return (found[0], found[1]), list(found[2:])


def compiler_params(
    semantics: tuple[Literal["parallel", "arbitrary"], ...], vmem_limit_bytes: int, route: Route | None
) -> pltpu.CompilerParams:
    """Of a kernel with this grid, with which something travels."""
    if route is None:
        return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem_limit_bytes)
    # The first and the last step of the grid must be on one core, in this order.
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",) * len(semantics),
        vmem_limit_bytes=vmem_limit_bytes,
        collective_id=route.collective_id,
        has_side_effects=True,
    )


def _body(
    *refs: Any,
    has_seed: bool,
    axes: tuple[tuple[str, ...], ...],
    continues: bool,
    route: Route | None,
    shipped: int,
    **static: Any,
) -> None:
    groups = parted(refs, 1, has_seed, 3, len(axes), 2 * continues, shipped, 2, shipped)
    (words_ref,), seed, arrays, loads, before, sources, results, targets, scratch = groups
    travel = Travel.of(route, sources, targets, scratch)
    if travel:
        pl.when(is_first_step(3))(travel.depart)
    q_ref, k_ref, v_ref = arrays
    acc_before_ref, rows_before_ref = before or (None, None)
    given = words_ref, seed[0] if seed else None, q_ref, k_ref, v_ref, tuple(loads)
    _visit(*given, acc_before_ref, rows_before_ref, *results, *scratch, axes=axes, **static)
    if travel:
        pl.when(is_last_step(3))(travel.arrive)


def _visit(
    words_ref,  # int32, all visits
    seed_ref,  # int32 [2] or None
    q_ref,  # [tile_q, D]
    k_ref,  # [tile_kv, D]
    v_ref,  # [tile_kv, Dv]
    load_refs,  # see tiles.operands
    acc_before_ref,  # [tile_q, Dv], see Sums; or None
    rows_before_ref,  # [2, tile_q]
    o_ref,  # [tile_q, Dv]; or acc of Sums
    lse_ref,  # [1 or 2, tile_q] float32: lse and the correction, see Forward; or rows of Sums
    acc_ref,  # [tile_q, Dv] float32: sum of exp(s - m) v so far
    m_ref,  # [tile_q, 128] float32, all lanes alike: the largest score so far
    l_ref,  # [tile_q, 128] float32: sum of exp(s - m) so far, of every 128th key
    scaled_q_ref=None,  # [tile_q, D]: q times scale * log2(e), if nothing else changes the scores
    *,
    axes: tuple[tuple[str, ...], ...],
    visits: Visits,
    sizes: Sizes,
    tiles: Tiles,
    formula: Formula,
    ends: bool,
) -> None:
    b, h = pl.program_id(0), pl.program_id(1)
    word = words_ref[visits.word_index(b, h, pl.program_id(2))]
    visit = Visit(
        b=b,
        h=h,
        q=blocks.q_tile(word) * tiles.tile_q,
        kv=blocks.kv_tile(word) * tiles.tile_kv,
        sizes=sizes,
        axes=axes,
        refs=load_refs,
        seed_ref=seed_ref,
    )
    # What scores, and m, are multiplied by to be powers of 2.
    to_log2 = LOG2_E if scaled_q_ref is None else 1.0

    @pl.when(blocks.is_first(word))
    def _() -> None:
        if rows_before_ref is None:
            acc_ref[...] = jnp.zeros_like(acc_ref)
            m_ref[...] = jnp.full_like(m_ref, LOWEST)
            l_ref[...] = jnp.zeros_like(l_ref)
        else:
            acc_ref[...] = acc_before_ref[...]
            m_ref[...] = jnp.broadcast_to(rows_before_ref[0:1].T, m_ref.shape)
            lane = jax.lax.broadcasted_iota(jnp.int32, l_ref.shape, 1)
            l_ref[...] = jnp.where(lane == 0, rows_before_ref[1:2].T, 0.0)
        if scaled_q_ref is not None:
            scaled_q_ref[...] = scaled_queries(q_ref[...], formula)

    def scores(block: SubBlock) -> jax.Array:
        queries = (q_ref if scaled_q_ref is None else scaled_q_ref)[pl.ds(block.q, block.sub_q)]
        s = product(queries, k_ref[pl.ds(block.kv, block.sub_kv)], (1, 1))
        if scaled_q_ref is None:
            s = changed_scores(s * formula.scale, formula.score, visit, block, transposed=False)
        seen = visible(formula.mask, visit, block, transposed=False)
        return s if seen is None else jnp.where(seen, s, NEGATIVE_INFINITY)

    def values(block: SubBlock) -> jax.Array:
        tile = v_ref[pl.ds(block.kv, block.sub_kv)]
        return rows_inside(tile, visit.kv + block.kv, sizes.kv_len) if block.kind == END else tile

    def power(x: jax.Array) -> jax.Array:
        return jnp.exp2(x if to_log2 == 1.0 else x * to_log2)

    def softmax(pattern: Pattern) -> None:
        todo = sub_blocks(pattern, tiles)
        begins = sorted({block.q for block in todo})
        rows = {begin: pl.ds(begin, tiles.sub_q) for begin in begins}
        m = {begin: m_ref[rows[begin]] for begin in begins}
        l = {begin: l_ref[rows[begin]] for begin in begins}
        acc = {begin: acc_ref[rows[begin]] for begin in begins}
        waiting = [scores(block) for block in todo[:AHEAD]]
        for place, block in enumerate(todo):
            if place + AHEAD < len(todo):
                waiting.append(scores(todo[place + AHEAD]))
            s = waiting.pop(0)
            at = block.q
            # m' = max(m, max(s));  p = exp(s - m');  l' = l exp(m - m') + sum(p);  acc' likewise with p v
            m_new = jnp.maximum(m[at], jnp.max(s, axis=1, keepdims=True))
            p = power(s - lanes(m_new, tiles.sub_kv))
            decay = power(m[at] - m_new)
            l[at] = l[at] * decay + lane_sums(p)
            if formula.dropout_p:
                p = jnp.where(kept(visit, block, formula.dropout_p, transposed=False), p, 0.0)
            weighted = product(p.astype(v_ref.dtype), values(block), (1, 0))
            acc[at] = acc[at] * lanes(decay, weighted.shape[1]) + weighted
            m[at] = m_new
        for begin in begins:
            m_ref[rows[begin]], l_ref[rows[begin]], acc_ref[rows[begin]] = m[begin], l[begin], acc[begin]

    for number, pattern in visits.branches():
        pl.when(blocks.pattern_of(word) == number)(functools.partial(softmax, pattern))

    @pl.when(blocks.is_last(word))
    def _() -> None:
        total = jnp.sum(l_ref[...], axis=1, keepdims=True)
        if not ends:
            o_ref[...] = acc_ref[...]
            lse_ref[0:1], lse_ref[1:2] = m_ref[:, :1].T, total.T
            return
        divisor = jnp.where(total == 0.0, 1.0, total) * (1 - formula.dropout_p)
        o_ref[...] = (acc_ref[...] / divisor).astype(o_ref.dtype)
        # log(0) = -inf is the lse of a row that sees nothing.
        m, log_total = m_ref[:, :1] * (to_log2 / LOG2_E), jnp.log(total)
        lse = m + log_total
        lse_ref[0:1] = lse.T
        if formula.may_be_huge:
            lse_ref[1:2] = jnp.where(total == 0.0, 1.0, jnp.exp((lse - m) - log_total)).T


def sub_blocks(pattern: Pattern, tiles: Tiles) -> list[SubBlock]:
    """The sub-blocks of a tile that are not skipped, those of the first keys first."""
    return [
        SubBlock(i * tiles.sub_q, j * tiles.sub_kv, tiles.sub_q, tiles.sub_kv, pattern[i][j])
        for j in range(len(pattern[0]))
        for i in range(len(pattern))
        if pattern[i][j] != SKIP
    ]


def lane_sums(p: jax.Array) -> jax.Array:
    """`p` [rows, n * 128] summed over every 128th column: [rows, 128]."""
    return functools.reduce(jnp.add, (p[:, i : i + LANES] for i in range(0, p.shape[1], LANES)))

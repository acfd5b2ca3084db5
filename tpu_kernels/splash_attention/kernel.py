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
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge.shapes import pallas_call
from tpu_kernels.splash_attention import blocks
from tpu_kernels.splash_attention.blocks import END, SKIP, AlignedLoad, Pattern, Sizes, Visits
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
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
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

    Returns:
        o [B, Hq, L, Dv], lse [B, Hq, L] float32, and p / exp(s - lse) for each query, [B, Hq, L] float32:
        what rounding lse has cost, so that the backward knows p. None unless the formula `may_be_huge`: a
        bias may be finfo.min or -1e9 for a whole row, and lse is the same number then.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, value_dim = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    sizes = Sizes(batch, heads, q_len, kv_len)
    tiles = tiles.clipped(q_len, kv_len)
    visits = blocks.plan(formula.mask, aligned, sizes, tiles, "q", q_end=False)

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

    rows = 2 if formula.may_be_huge else 1
    loads = operands(aligned, tiles, where, transposed=False)
    prefetched = [jnp.asarray(visits.words, jnp.int32)] + ([] if seed is None else [seed])
    o, lse = pallas_call(
        functools.partial(
            _body,
            visits=visits,
            sizes=sizes,
            tiles=tiles,
            axes=tuple(load.axes for load in loads),
            has_seed=seed is not None,
            formula=formula,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, heads, visits.steps),
            in_specs=[
                pl.BlockSpec((None, None, tiles.tile_q, head_dim), q_map),
                pl.BlockSpec((None, None, tiles.tile_kv, head_dim), kv_map),
                pl.BlockSpec((None, None, tiles.tile_kv, value_dim), kv_map),
                *(load.spec for load in loads),
            ],
            out_specs=[
                pl.BlockSpec((None, None, tiles.tile_q, value_dim), q_map),
                pl.BlockSpec((None, None, rows, tiles.tile_q), lse_map),
            ],
            scratch_shapes=[
                pltpu.VMEM((tiles.tile_q, value_dim), jnp.float32),
                pltpu.VMEM((tiles.tile_q, LANES), jnp.float32),
                pltpu.VMEM((tiles.tile_q, LANES), jnp.float32),
                *([pltpu.VMEM((tiles.tile_q, head_dim), q.dtype)] if formula.score is None else []),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, q_len, value_dim), out_dtype),
            jax.ShapeDtypeStruct((batch, heads, rows, q_len), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
        name="splash_attention_forward",
    )(*prefetched, q, k, v, *(load.array for load in loads))
    return o, lse[:, :, 0], lse[:, :, 1] if formula.may_be_huge else None


def _body(*refs: Any, has_seed: bool, axes: tuple[tuple[str, ...], ...], **static: Any) -> None:
    words_ref, *rest = refs
    seed_ref = rest.pop(0) if has_seed else None
    q_ref, k_ref, v_ref, *rest = rest
    load_refs, results = tuple(rest[: len(axes)]), rest[len(axes) :]
    _visit(words_ref, seed_ref, q_ref, k_ref, v_ref, load_refs, *results, axes=axes, **static)


def _visit(
    words_ref,  # int32, all visits
    seed_ref,  # int32 [2] or None
    q_ref,  # [tile_q, D]
    k_ref,  # [tile_kv, D]
    v_ref,  # [tile_kv, Dv]
    load_refs,  # see tiles.operands
    o_ref,  # [tile_q, Dv]
    lse_ref,  # [1 or 2, tile_q] float32: lse, and what `forward` returns as p / exp(s - lse)
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
        acc_ref[...] = jnp.zeros_like(acc_ref)
        m_ref[...] = jnp.full_like(m_ref, LOWEST)
        l_ref[...] = jnp.zeros_like(l_ref)
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

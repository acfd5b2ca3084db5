"""Splash attention in Pallas for TPU: the gradient of an array that the scores depend on, such as a bias.

The score expression reads such an array by an aligned load, one element for some of (b, h, q, kv). Its
gradient is the sum of ds dscore/dload over the others. Here a tile of the gradient stays in VMEM while the
grid runs over what is summed; tiles of the scores in which nothing is visible cost a step, but no work.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge.shapes import pallas_call
from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import INDICES, Load, loads
from tpu_kernels.splash_attention import blocks
from tpu_kernels.splash_attention.backward import backward_rows
from tpu_kernels.splash_attention.blocks import AlignedLoad, Pattern, Sizes, Visits
from tpu_kernels.splash_attention.kernel import sub_blocks
from tpu_kernels.splash_attention.tiles import (
    LOG2_E,
    Formula,
    SubBlock,
    Visit,
    kept,
    loader,
    operands,
    positions,
    product,
    visible,
)
from tpu_kernels.splash_attention.tiling import Tiles

LARGEST_TILE = 1024
"""Along each axis: tiles of [q, kv] arrays, and of their gradients in float32, are in VMEM twice each."""


def load_gradient(
    slot: int,
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
    vmem_limit_bytes: int,
) -> jax.Array:
    """The gradient of what the loads of `slot` read, for the cotangents of o and lse.

    Args:
        slot: of a floating array that the score loads.
        q, k, v, aligned, seed, o, lse, d_o, d_lse, formula: as in `backward.backward`.
        tiles: sizes; tiles longer than `LARGEST_TILE` are cut.
        vmem_limit_bytes: what the compiler lets the kernel use of VMEM.

    Returns:
        An array in the shape and dtype of `aligned[slot].array`, summed in float32.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_len, value_dim = k.shape[2], v.shape[3]
    group = heads // k.shape[1]
    sizes = Sizes(batch, heads, q_len, kv_len)
    tiles = _cut(tiles).clipped(q_len, kv_len)
    visits = blocks.plan(formula.mask, aligned, sizes, tiles, "q", q_end=True)
    counts = {"b": batch, "h": heads, "q": pl.cdiv(q_len, tiles.tile_q), "kv": pl.cdiv(kv_len, tiles.tile_kv)}
    blocks.check_fits(visits.batch_entries * visits.heads, counts["q"] * counts["kv"], tiles)
    axes, array = aligned[slot].axes, aligned[slot].array
    grid = _Grid(axes, counts)

    def q_map(*at: Any) -> tuple[Any, ...]:
        # q, do are (B, Hq, L, D). The step's q tile.
        b, h, q_tile, _ = grid.where(*at)
        return b, h, q_tile, 0

    def rows_map(*at: Any) -> tuple[Any, ...]:
        # rows is (B, Hq, 2, L). The step's q tile.
        b, h, q_tile, _ = grid.where(*at)
        return b, h, 0, q_tile

    def kv_map(*at: Any) -> tuple[Any, ...]:
        # k, v are (B, Hkv, S, D). The step's kv tile, of the head that the query head reads.
        b, h, _, kv_tile = grid.where(*at)
        return b, h // group, kv_tile, 0

    # The gradient is (b?, h?, L, S), (b?, h?, S, 1) or (b?, h?, 1, L). Without q and kv it is the latter
    # for a single q tile, and summed up afterwards.
    outer = [name for name in axes if name in ("b", "h")]
    match "q" in axes, "kv" in axes:
        case True, True:
            block, inner, lengths = (tiles.tile_q, tiles.tile_kv), ("q", "kv"), (q_len, kv_len)
        case False, True:
            block, inner, lengths = (tiles.tile_kv, 1), ("kv", None), (kv_len, 1)
        case True, False:
            block, inner, lengths = (1, tiles.tile_q), (None, "q"), (1, q_len)
        case _:
            block, inner, lengths = (1, tiles.tile_q), (None, None), (1, tiles.tile_q)

    def gradient_map(*at: Any) -> tuple[Any, ...]:
        place: dict[str, Any] = dict(zip(INDICES, grid.where(*at), strict=True))
        return tuple(0 if name is None else place[name] for name in (*outer, *inner))

    operand_loads = operands(aligned, tiles, grid.where, transposed=True)
    d_o = d_o.astype(v.dtype)
    delta = jnp.sum(d_o.astype(jnp.float32) * o.astype(jnp.float32), axis=-1) - d_lse
    prefetched = [_patterns_of_tiles(visits, counts)] + ([] if seed is None else [seed])
    gradient = pallas_call(
        functools.partial(
            _body,
            slot=slot,
            grid=grid,
            visits=visits,
            sizes=sizes,
            tiles=tiles,
            axes=tuple(load.axes for load in operand_loads),
            has_seed=seed is not None,
            formula=formula,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=tuple(counts[name] for name in grid.order),
            in_specs=[
                pl.BlockSpec((None, None, tiles.tile_q, head_dim), q_map),
                pl.BlockSpec((None, None, tiles.tile_kv, head_dim), kv_map),
                pl.BlockSpec((None, None, tiles.tile_kv, value_dim), kv_map),
                pl.BlockSpec((None, None, tiles.tile_q, value_dim), q_map),
                pl.BlockSpec((None, None, 2, tiles.tile_q), rows_map),
                *(load.spec for load in operand_loads),
            ],
            out_specs=pl.BlockSpec((*(None for _ in outer), *block), gradient_map),
        ),
        out_shape=jax.ShapeDtypeStruct((*(counts[name] for name in outer), *lengths), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=grid.semantics, vmem_limit_bytes=vmem_limit_bytes
        ),
        name="splash_attention_load_gradient",
    )(
        *prefetched,
        q,
        k,
        v,
        d_o,
        backward_rows(lse, delta, log2=False),
        *(load.array for load in operand_loads),
    )
    if inner == (None, None):
        gradient = jnp.sum(gradient, axis=-1)
    return gradient.reshape(array.shape).astype(array.dtype)


def _cut(tiles: Tiles) -> Tiles:
    """No tile longer than `LARGEST_TILE`, unless its sub-block is."""
    sizes = asdict(tiles)
    for axis in ("q", "kv"):
        sub = sizes[f"sub_{axis}"]
        sizes[f"tile_{axis}"] = max(min(sizes[f"tile_{axis}"], LARGEST_TILE) // sub, 1) * sub
    return Tiles(**sizes)


@dataclass(frozen=True)
class _Grid:
    """Every tile of the scores: the axes of the load, and inside of them those that are summed over."""

    axes: tuple[str, ...]
    counts: Mapping[str, int]

    @property
    def order(self) -> tuple[str, ...]:
        return (*self.axes, *(name for name in INDICES if name not in self.axes))

    @property
    def semantics(self) -> list[Literal["parallel", "arbitrary"]]:
        return ["parallel" if name in self.axes else "arbitrary" for name in self.order]

    def where(self, *at: Any) -> tuple[Any, Any, Any, Any]:
        """(b, h, q tile, kv tile) of a grid step; what follows its indices is ignored."""
        b, h, q_tile, kv_tile = (at[self.order.index(name)] for name in INDICES)
        return b, h, q_tile, kv_tile

    def is_first(self) -> Any:
        """Whether a tile of the gradient begins."""
        summed = [pl.program_id(place) == 0 for place in range(len(self.axes), len(INDICES))]
        return functools.reduce(jnp.logical_and, summed, jnp.bool_(True))


def _patterns_of_tiles(visits: Visits, counts: Mapping[str, int]) -> jax.Array:
    """The pattern number of every tile, flat int32 [batch entries * heads * q tiles * kv tiles]."""
    words = jnp.asarray(visits.words, jnp.int32).reshape(visits.batch_entries * visits.heads, -1)
    tile = blocks.q_tile(words) * counts["kv"] + blocks.kv_tile(words)
    found = jnp.zeros((words.shape[0], counts["q"] * counts["kv"]), jnp.int32)
    # What fills a list up has pattern 0, at a tile that was visited.
    found = found.at[jnp.arange(words.shape[0])[:, None], tile].max(blocks.pattern_of(words))
    return found.reshape(-1)


def _body(*refs: Any, has_seed: bool, axes: tuple[tuple[str, ...], ...], **static: Any) -> None:
    patterns_ref, *rest = refs
    seed_ref = rest.pop(0) if has_seed else None
    q_ref, k_ref, v_ref, do_ref, rows_ref, *rest = rest
    load_refs, (gradient_ref,) = tuple(rest[: len(axes)]), rest[len(axes) :]
    arrays = q_ref, k_ref, v_ref, do_ref, rows_ref, load_refs, gradient_ref
    _step(patterns_ref, seed_ref, *arrays, axes=axes, **static)


def _step(
    patterns_ref,  # int32, of all tiles
    seed_ref,  # int32 [2] or None
    q_ref,  # [tile_q, D]
    k_ref,  # [tile_kv, D]
    v_ref,  # [tile_kv, Dv]
    do_ref,  # [tile_q, Dv]
    rows_ref,  # [2, tile_q] float32: lse, see backward_rows, and delta
    load_refs,  # see tiles.operands
    gradient_ref,  # [tile_q, tile_kv], [tile_kv, 1] or [1, tile_q] float32
    *,
    slot: int,
    grid: _Grid,
    axes: tuple[tuple[str, ...], ...],
    visits: Visits,
    sizes: Sizes,
    tiles: Tiles,
    formula: Formula,
) -> None:
    b, h, q_tile, kv_tile = grid.where(*(pl.program_id(place) for place in range(len(INDICES))))
    counts = grid.counts
    place = visits.list_index(b, h) * counts["q"] * counts["kv"] + q_tile * counts["kv"] + kv_tile
    number = patterns_ref[place]
    visit = Visit(
        b=b,
        h=h,
        q=q_tile * tiles.tile_q,
        kv=kv_tile * tiles.tile_kv,
        sizes=sizes,
        axes=axes,
        refs=load_refs,
        seed_ref=seed_ref,
    )

    score = formula.score
    assert score is not None, "what no score loads has no gradient"

    @pl.when(grid.is_first())
    def _() -> None:
        gradient_ref[...] = jnp.zeros_like(gradient_ref)

    def of_sub_block(block: SubBlock) -> jax.Array:
        """The gradient of each element's own load, [sub_kv, sub_q]."""
        q_rows, kv_rows = pl.ds(block.q, block.sub_q), pl.ds(block.kv, block.sub_kv)
        x = product(k_ref[kv_rows], q_ref[q_rows], (1, 1)) * formula.scale
        dp = product(v_ref[kv_rows], do_ref[q_rows], (1, 1))
        env = {**positions(visit, block, transposed=True), "score": x}
        load = loader(visit, block, transposed=True)
        own = next(node for node in loads(score) if node.slot == slot)
        values = jnp.broadcast_to(jnp.asarray(load(own), jnp.float32), x.shape)

        def changed(values: jax.Array) -> jax.Array:
            def instead(node: Load) -> Any:
                return values if node.slot == slot else load(node)

            return jnp.broadcast_to(evaluate(score, env, instead), x.shape)

        s, pull_back = jax.vjp(changed, values)
        p = jnp.exp2((s - rows_ref[0:1, q_rows]) * LOG2_E)
        if formula.dropout_p:
            kept_here = kept(visit, block, formula.dropout_p, transposed=True)
            dp = jnp.where(kept_here, dp / (1 - formula.dropout_p), 0.0)
        (gradient,) = pull_back(p * (dp - rows_ref[1:2, q_rows]))
        seen = visible(formula.mask, visit, block, transposed=True)
        # Masked scores have any p, and behind an end there may be NaN.
        return gradient if seen is None else jnp.where(seen, gradient, 0.0)

    def gradients(pattern: Pattern) -> None:
        for block in sub_blocks(pattern, tiles):
            q_rows, kv_rows = pl.ds(block.q, block.sub_q), pl.ds(block.kv, block.sub_kv)
            gradient = of_sub_block(block)
            if "q" in grid.axes and "kv" in grid.axes:
                gradient_ref[q_rows, kv_rows] += gradient.T
            elif "kv" in grid.axes:
                gradient_ref[kv_rows] += jnp.sum(gradient, axis=1, keepdims=True)
            else:
                gradient_ref[:, q_rows] += jnp.sum(gradient, axis=0, keepdims=True)

    for branch, pattern in visits.branches():
        pl.when(number == branch)(functools.partial(gradients, pattern))

"""What the kernels share inside a visit: positions, scores with their changes, masks, and aligned loads.

Scores of a sub-block are [queries, keys] in the forward and, `transposed`, [keys, queries] in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import Constant, Expression, Load, nodes_of
from tpu_kernels.splash_attention import dropout
from tpu_kernels.splash_attention.blocks import END, FULL, AlignedLoad, Sizes
from tpu_kernels.splash_attention.tiling import LANES, Tiles

NEGATIVE_INFINITY = float("-inf")
LOG2_E = math.log2(math.e)
_HUGE = 1024.0
"""A float32 of this size is rounded to 2**-14, which is the error of exp of it."""


# Aligned loads as operands --------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """An aligned load as a kernel gets it: its array, laid out for blocks, and how to cut it."""

    axes: tuple[str, ...]
    array: jax.Array
    spec: pl.BlockSpec


IndexMap = Callable[..., tuple[Any, Any, Any, Any]]
"""From the arguments of an index map to (b, h, q tile, kv tile)."""


def operands(
    aligned: Sequence[AlignedLoad], tiles: Tiles, where: IndexMap, *, transposed: bool
) -> list[Operand]:
    """The aligned loads as operands of a kernel whose grid steps are at `where`."""
    return [_operand(load, tiles, where, transposed) for load in aligned]


def _operand(load: AlignedLoad, tiles: Tiles, where: IndexMap, transposed: bool) -> Operand:
    axes, array = load.axes, _kernel_dtype(load)
    per_q, per_kv = "q" in axes, "kv" in axes
    if not per_q and not per_kv:
        return Operand(axes, array.reshape(-1), pl.BlockSpec(memory_space=pltpu.SMEM))
    outer = [name for name in axes if name in ("b", "h")]
    if per_q and per_kv:
        block = (tiles.tile_q, tiles.tile_kv)
    elif per_q != transposed:  # one number for each row of scores: a column
        array = array[..., None]
        block = (tiles.tile_q if per_q else tiles.tile_kv, 1)
    else:
        array = array[..., None, :]
        block = (1, tiles.tile_q if per_q else tiles.tile_kv)

    def index(*arguments: Any) -> tuple[Any, ...]:
        # array is (*outer, q | 1, kv | 1), or the last two swapped. Load the visit's block of it.
        b, h, q, kv = where(*arguments)
        at = {"b": b, "h": h}
        if per_q and per_kv:
            return (*(at[name] for name in outer), q, kv)
        tile = q if per_q else kv
        return (*(at[name] for name in outer), *((tile, 0) if block[1] == 1 else (0, tile)))

    return Operand(axes, array, pl.BlockSpec((*(None for _ in outer), *block), index))


def _kernel_dtype(load: AlignedLoad) -> jax.Array:
    """The array in a dtype that a TPU kernel can hold: bools as integers, other integers as int32."""
    array = load.array
    tile = "q" in load.axes and "kv" in load.axes
    if array.dtype == jnp.bool_:
        return array.astype(jnp.int8 if tile else jnp.int32)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(jnp.int32)
    if array.dtype == jnp.bfloat16 and tile:
        return array
    return array.astype(jnp.float32)


# Inside a visit -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """What is computed from the products of queries and keys.

    Attributes:
        mask: True where a score counts, with aligned loads; None if all do.
        score: the score that a scaled product becomes, with aligned loads; None for itself.
        scale: factor of the products.
        dropout_p: share of the probabilities that is dropped, in [0, 1).
    """

    mask: Expression | None
    score: Expression | None
    scale: float
    dropout_p: float

    @property
    def may_be_huge(self) -> bool:
        """Whether all scores of a row may be so large that log(sum(exp(s - m))) is lost beside m."""
        parts = () if self.score is None else nodes_of(self.score)
        return any(
            isinstance(part, Load) or (isinstance(part, Constant) and abs(part.value) >= _HUGE)
            for part in parts
        )


@dataclass(frozen=True)
class Visit:
    """Where a visit is, and what its scores depend on. Traced values are of the grid step.

    Attributes:
        b, h: batch entry and query head.
        q, kv: position of the first query and the first key of the tile.
        sizes: of the scores.
        axes: of the aligned loads, by slot.
        refs: of the aligned loads, by slot.
        seed_ref: int32 [2] in SMEM; None without dropout.
    """

    b: Any
    h: Any
    q: Any
    kv: Any
    sizes: Sizes
    axes: tuple[tuple[str, ...], ...]
    refs: tuple[Any, ...]
    seed_ref: Any = None


@dataclass(frozen=True)
class SubBlock:
    """A sub-block of a visit: its first query and key in the tile, and its kind."""

    q: int
    kv: int
    sub_q: int
    sub_kv: int
    kind: int


def positions(visit: Visit, block: SubBlock, *, transposed: bool) -> dict[str, Any]:
    """The variables of expressions in a sub-block: scalars, and a column and a row of indices."""
    q_shape = (1, block.sub_q) if transposed else (block.sub_q, 1)
    kv_shape = (block.sub_kv, 1) if transposed else (1, block.sub_kv)
    q_axis, kv_axis = (1, 0) if transposed else (0, 1)
    return {
        "b": visit.b,
        "h": visit.h,
        "q": visit.q + block.q + jax.lax.broadcasted_iota(jnp.int32, q_shape, q_axis),
        "kv": visit.kv + block.kv + jax.lax.broadcasted_iota(jnp.int32, kv_shape, kv_axis),
        "q_len": visit.sizes.q_len,
        "kv_len": visit.sizes.kv_len,
    }


def loader(visit: Visit, block: SubBlock, *, transposed: bool) -> Callable[[Load], Any]:
    """What loads give in a sub-block: a scalar, a column, a row or a tile."""

    def load(node: Load) -> Any:
        axes, ref = visit.axes[node.slot], visit.refs[node.slot]
        per_q, per_kv = "q" in axes, "kv" in axes
        q, kv = pl.ds(block.q, block.sub_q), pl.ds(block.kv, block.sub_kv)
        if per_q and per_kv:
            tile = ref[q, kv]
            if tile.dtype == jnp.int8:
                tile = tile.astype(jnp.int32)
            elif tile.dtype == jnp.bfloat16:
                tile = tile.astype(jnp.float32)
            return tile.T if transposed else tile
        if per_q:
            return ref[:, q] if transposed else ref[q, :]
        if per_kv:
            return ref[kv, :] if transposed else ref[:, kv]
        place = 0
        for name, length in (("b", visit.sizes.batch), ("h", visit.sizes.heads)):
            if name in axes:
                place = place * length + (visit.b if name == "b" else visit.h)
        return ref[place]

    return load


def scaled_queries(rows: jax.Array, formula: Formula) -> jax.Array:
    """Queries whose products with keys are scores in powers of 2: times scale * log2(e), and rounded again.

    Forward and backward take these where nothing else changes the scores, so that both have the same ones.
    """
    return (rows.astype(jnp.float32) * (formula.scale * LOG2_E)).astype(rows.dtype)


def changed_scores(
    scores: jax.Array, score: Expression | None, visit: Visit, block: SubBlock, *, transposed: bool
) -> jax.Array:
    """What scaled products of a sub-block become, before the mask. Differentiable in `scores`."""
    if score is None:
        return scores
    env = {**positions(visit, block, transposed=transposed), "score": scores}
    changed = evaluate(score, env, loader(visit, block, transposed=transposed))
    return jnp.broadcast_to(changed, scores.shape)


def visible(mask: Expression | None, visit: Visit, block: SubBlock, *, transposed: bool) -> jax.Array | None:
    """Which scores of a sub-block count; None if all do. What is past an end of the arrays does not."""
    if block.kind == FULL:
        return None
    where = positions(visit, block, transposed=transposed)
    shape = (block.sub_kv, block.sub_q) if transposed else (block.sub_q, block.sub_kv)
    found = None
    if mask is not None:
        found = evaluate(mask, where, loader(visit, block, transposed=transposed))
        found = jnp.broadcast_to(found, shape)
    if block.kind == END:
        inside = where["kv"] < visit.sizes.kv_len
        inside = jnp.broadcast_to(inside, shape)
        if visit.sizes.q_len % block.sub_q:
            inside &= jnp.broadcast_to(where["q"] < visit.sizes.q_len, shape)
        found = inside if found is None else found & inside
    return found


def kept(visit: Visit, block: SubBlock, rate: float, *, transposed: bool) -> jax.Array:
    """Which probabilities of a sub-block dropout keeps."""
    where = positions(visit, block, transposed=transposed)
    seed = (visit.seed_ref[0], visit.seed_ref[1])
    return dropout.keep(seed, visit.b, visit.h, where["q"], where["kv"], rate)


def rows_inside(block: jax.Array, begin: Any, length: int) -> jax.Array:
    """`block` [rows, ...] of an array with `length` rows, from row `begin` on: zero past the end.

    There stands whatever was in memory, and 0 * NaN is NaN.
    """
    rows = begin + jax.lax.broadcasted_iota(jnp.int32, (block.shape[0], 1), 0)
    return jnp.where(rows < length, block, jnp.zeros_like(block))


def lanes(column: jax.Array, width: int) -> jax.Array:
    """`column` [rows, 128], all lanes of a row alike, as [rows, width]."""
    if width <= LANES:
        return column[:, :width]
    repeated = jnp.tile(column, (1, -(-width // LANES)))
    return repeated if width % LANES == 0 else repeated[:, :width]


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """The matrix product of `a` and `b` over dimension `contract` of each, in float32.

    float32 operands are multiplied as float32, not rounded to bfloat16 first.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )

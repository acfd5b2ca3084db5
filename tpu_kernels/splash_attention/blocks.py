"""Which tiles of the scores a kernel visits, in which order, and what it does in each.

A mask is an expression. Over a whole block its interval bounds say whether everything, something or nothing
is visible, so nothing of the size of the scores is ever made. What a mask says without values of arrays is
settled here, in numpy, as a list of visits. Where it depends on arrays (lengths, segments, a mask given as a
tensor), the list is computed by XLA before the kernel, and the grid has as many steps as it turns out to
need.

A visit is one int32 word, which the kernel and its index maps read from SMEM:

    bit 0       first visit of its output tile
    bit 1       last visit of its output tile
    bits 2-5    pattern: 0 empty (nothing visible: only results to write), 1 generic (every sub-block masked),
                2 full, 3 and more the patterns of this mask
    bits 6-17   kv tile
    bits 18-30  q tile

A *pattern* is the matrix of sub-block kinds of a tile. Masks that are known have few (a causal one has the
tiles on its diagonal), and each gets a branch of its own in the kernel with just its sub-blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tpu_kernels.expressions.expression import Expression, Load, loads, variables
from tpu_kernels.expressions.intervals import bounds
from tpu_kernels.splash_attention.tiling import Tiles

SKIP, MASKED, FULL, END = 0, 1, 2, 3
"""Kinds of sub-blocks: nothing visible; the mask is applied; all visible; masked, and reaches past an end."""

EMPTY_TILE, GENERIC_TILE, FULL_TILE, FIRST_PATTERN = 0, 1, 2, 3
MAX_PATTERNS = 6
"""More than these are visited as generic tiles: each is code that has to be compiled and loaded."""

MAX_Q_TILES, MAX_KV_TILES = 1 << 13, 1 << 12
MAX_WORDS = 1 << 17
"""Half of the smallest SMEM."""

Order = Literal["q", "kv"]
Pattern = tuple[tuple[int, ...], ...]
"""The kind of each sub-block, [q sub-blocks][kv sub-blocks]."""


@dataclass(frozen=True)
class Sizes:
    """What the scores are: [batch, heads, q_len, kv_len], all at least 1."""

    batch: int
    heads: int
    q_len: int
    kv_len: int


@dataclass(frozen=True)
class AlignedLoad:
    """An array that a load without gathers reads: its axes are some of b, h, q, kv, in this order."""

    array: Any
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Cases:
    """A mask that is one of several, by a number that only the running program knows: a rank's place.

    Attributes:
        masks: all of them, without loads.
        index: which one it is, a traced integer.
    """

    masks: tuple[Expression, ...]
    index: Any

    def changed(self, change: Callable[[Expression], Expression]) -> Cases:
        """With each mask changed."""
        return Cases(tuple(map(change, self.masks)), self.index)


@dataclass(frozen=True)
class Visits:
    """The visits of a kernel.

    Attributes:
        words: int32 [batch_entries * heads * length], flat; a numpy array if the mask is known.
        batch_entries, heads: 1, or as many as there are: whether they have lists of their own.
        length: words of each list.
        steps: how many of them the longest list needs: the size of the grid. A traced int32 if it depends on
            arrays.
        patterns: those of pattern numbers 3 and more.
        generic: the pattern of generic tiles.
        full: the pattern of full tiles.
        has_empty, has_generic, has_full: whether there may be such visits.
    """

    words: Any
    batch_entries: int
    heads: int
    length: int
    steps: Any
    patterns: tuple[Pattern, ...]
    generic: Pattern
    full: Pattern
    has_empty: bool
    has_generic: bool
    has_full: bool

    def list_index(self, b: Any, h: Any) -> Any:
        """Which list of visits batch entry `b` and head `h` have."""
        b = b if self.batch_entries > 1 else 0
        h = h if self.heads > 1 else 0
        return b * self.heads + h

    def word_index(self, b: Any, h: Any, n: Any) -> Any:
        """Where the word of step `n` of batch entry `b` and head `h` stands in `words`."""
        return self.list_index(b, h) * self.length + n

    def branches(self) -> list[tuple[int, Pattern]]:
        """The pattern numbers that occur and have work to do, and their patterns."""
        found = [(GENERIC_TILE, self.generic)] if self.has_generic else []
        found += [(FULL_TILE, self.full)] if self.has_full else []
        return found + [(FIRST_PATTERN + n, pattern) for n, pattern in enumerate(self.patterns)]


class TooManyVisits(ValueError):
    """The lists of visits do not fit in SMEM."""


def check_fits(lists: int, length: int, tiles: Tiles) -> None:
    """Raises `TooManyVisits` if so many lists of this length do not fit in SMEM."""
    if lists * length > MAX_WORDS:
        each = f"{lists} lists, as the mask differs between batch entries or heads" if lists > 1 else "1 list"
        raise TooManyVisits(
            f"splash_attention: {each}, of {length} visits are more than SMEM holds ({MAX_WORDS} in all); "
            f"take larger tiles than {tiles.tile_q} x {tiles.tile_kv}, or fewer batch entries or heads at a "
            f"time"
        )


def is_first(word: Any) -> Any:
    """Whether it is the first visit of its output tile."""
    return (word & 1) != 0


def is_last(word: Any) -> Any:
    """Whether it is the last visit of its output tile."""
    return (word & 2) != 0


def pattern_of(word: Any) -> Any:
    """The pattern number of a visit."""
    return (word >> 2) & 15


def kv_tile(word: Any) -> Any:
    """The kv tile of a visit."""
    return (word >> 6) & (MAX_KV_TILES - 1)


def q_tile(word: Any) -> Any:
    """The q tile of a visit."""
    return word >> 18


def plan(
    mask: Expression | None,
    aligned: Sequence[AlignedLoad],
    sizes: Sizes,
    tiles: Tiles,
    order: Order,
    *,
    q_end: bool,
    every: bool = True,
    cases: Cases | None = None,
) -> Visits:
    """The visits of a kernel with this mask.

    Args:
        mask: bool, with aligned loads only; None if all is visible.
        aligned: what the loads of slot i read.
        sizes: of the scores.
        tiles: of the kernel.
        order: `q` lists the visits of a q tile one after the other, which is for outputs that are tiled by
            q; `kv` is the other way round.
        q_end: whether sub-blocks that reach past the last query are of kind `END`, not only those that
            reach past the last key.
        every: whether an output tile that sees nothing is visited all the same. Else only that of the first
            one in an otherwise empty list is.
        cases: what the mask can be, where that is known although the mask loads arrays.

    Raises:
        TooManyVisits: the lists do not fit in SMEM.
        ValueError: there are more tiles than a word can count.
    """
    end = _end_kinds(sizes, tiles, q_end)
    generic_kind = END if (end == END).any() or (end == SKIP).any() else MASKED
    nq, nkv = end.shape[0] * tiles.sub_q // tiles.tile_q, end.shape[1] * tiles.sub_kv // tiles.tile_kv
    if nq > MAX_Q_TILES or nkv > MAX_KV_TILES:
        raise ValueError(
            f"splash_attention: {nq} x {nkv} tiles, more than {MAX_Q_TILES} x {MAX_KV_TILES}; "
            f"take larger tiles"
        )
    per_tile = [
        _per_tile(_static_kinds(one, sizes, tiles, q_end), tiles)
        for one in (cases.masks if cases else [mask])
    ]
    patterns: tuple[Pattern, ...] = ()
    if cases is not None:
        numbers, patterns = _numbered(np.stack(np.broadcast_arrays(*per_tile)))
        listed = _chosen([_static_visits(one, order, every) for one in numbers], cases.index)
    elif mask is not None and loads(mask):
        listed = _dynamic_visits(mask, aligned, sizes, tiles, order, every, per_tile[0])
    else:
        numbers, patterns = _numbered(per_tile[0])
        listed = _static_visits(numbers, order, every)
    shape = per_tile[0].shape[-2:]
    check_fits(listed.words.shape[0] * listed.words.shape[1], listed.words.shape[2], tiles)
    return Visits(
        words=listed.words.reshape(-1),
        batch_entries=listed.words.shape[0],
        heads=listed.words.shape[1],
        length=listed.words.shape[2],
        steps=listed.steps,
        patterns=patterns,
        generic=((generic_kind,) * shape[1],) * shape[0],
        full=((FULL,) * shape[1],) * shape[0],
        has_empty=listed.has_empty,
        has_generic=listed.has_generic,
        has_full=listed.has_full,
    )


# Masks that are known -------------------------------------------------------------------------------


def _static_kinds(mask: Expression | None, sizes: Sizes, tiles: Tiles, q_end: bool) -> np.ndarray:
    """The kind of every sub-block, int8 [batch | 1, heads | 1, q sub-blocks, kv sub-blocks], whole tiles.

    Of a mask that loads arrays: what is true whatever they hold.
    """
    end = _end_kinds(sizes, tiles, q_end)[None, None]
    if mask is None:
        return end
    everywhere, anywhere = _bounds(mask, sizes, tiles.sub_q, tiles.sub_kv, end.shape[2:], {}, np)
    kinds = np.where(everywhere, FULL, np.where(anywhere, MASKED, SKIP)).astype(np.int8)
    kinds = np.where((end == END) & (kinds != SKIP), END, kinds)
    return np.where(end == SKIP, SKIP, kinds)


def _per_tile(kinds: np.ndarray, tiles: Tiles) -> np.ndarray:
    """[batch, heads, q tile, kv tile, q sub-block, kv sub-block]."""
    each_q, each_kv = tiles.tile_q // tiles.sub_q, tiles.tile_kv // tiles.sub_kv
    batch, heads, q, kv = kinds.shape
    return kinds.reshape(batch, heads, q // each_q, each_q, kv // each_kv, each_kv).transpose(
        0, 1, 2, 4, 3, 5
    )


def _end_kinds(sizes: Sizes, tiles: Tiles, q_end: bool) -> np.ndarray:
    """The kind of every sub-block if all is visible: `END` at the ends of the arrays, `SKIP` behind them."""
    q = _along(sizes.q_len, tiles.tile_q, tiles.sub_q)
    if not q_end:
        q = np.where(q == END, FULL, q)
    kv = _along(sizes.kv_len, tiles.tile_kv, tiles.sub_kv)
    both = np.where((q[:, None] == END) | (kv == END), END, FULL)
    return np.where((q[:, None] == SKIP) | (kv == SKIP), SKIP, both).astype(np.int8)


def _along(length: int, tile: int, sub: int) -> np.ndarray:
    """FULL, END or SKIP for each sub-block of one axis, in whole tiles."""
    begin = np.arange(-(-length // tile) * tile // sub) * sub
    return np.where(begin + sub <= length, FULL, np.where(begin < length, END, SKIP))


def _numbered(per_tile: np.ndarray) -> tuple[np.ndarray, tuple[Pattern, ...]]:
    """The pattern number of each tile, in the shape [..., q tile, kv tile], and the patterns."""
    shape = per_tile.shape
    flat = per_tile.reshape(-1, shape[-2] * shape[-1])
    distinct, inverse = np.unique(flat, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    counts = Counter(inverse.tolist())
    special = [
        n for n in range(len(distinct)) if (distinct[n] != SKIP).any() and not (distinct[n] == FULL).all()
    ]
    special.sort(key=lambda n: (-counts[n], n))
    number = np.full(len(distinct), GENERIC_TILE)
    for n, row in enumerate(distinct):
        if (row == SKIP).all():
            number[n] = EMPTY_TILE
        elif (row == FULL).all():
            number[n] = FULL_TILE
    chosen = special[:MAX_PATTERNS]
    for place, n in enumerate(chosen):
        number[n] = FIRST_PATTERN + place
    patterns = tuple(
        tuple(tuple(int(kind) for kind in line) for line in distinct[n].reshape(shape[-2:])) for n in chosen
    )
    return number[inverse].reshape(shape[:-2]), patterns


@dataclass(frozen=True)
class _Listed:
    words: Any  # [batch | 1, heads | 1, length]
    steps: Any
    has_empty: bool
    has_generic: bool
    has_full: bool


def _static_visits(numbers: np.ndarray, order: Order, every: bool) -> _Listed:
    """The lists of tiles whose pattern numbers are known."""
    if order == "kv":
        numbers = numbers.swapaxes(2, 3)
    batch, heads, outer, inner = numbers.shape
    visited = numbers != EMPTY_TILE
    if every:
        visited[..., 0] |= ~visited.any(axis=-1)  # one visit to write an output tile that sees nothing
    else:
        visited[..., 0, 0] |= ~visited.any(axis=(-2, -1))
    counts = visited.reshape(batch, heads, -1).sum(axis=-1)
    length = int(counts.max())
    words = np.zeros((batch, heads, length), np.int32)
    for b in range(batch):
        for h in range(heads):
            outers, inners = np.nonzero(visited[b, h])
            n = len(outers)
            first = np.r_[True, outers[1:] != outers[:-1]]
            last = np.r_[first[1:], True]
            q, kv = (outers, inners) if order == "q" else (inners, outers)
            line = first | last * 2 | numbers[b, h, outers, inners] << 2 | kv << 6 | q << 18
            words[b, h, :n] = line
            words[b, h, n:] = line[-1] & ~63  # nothing to do, and no new tile to fetch
    used = numbers[visited]
    return _Listed(
        words,
        length,
        has_empty=bool((used == EMPTY_TILE).any()),
        has_generic=bool((used == GENERIC_TILE).any()),
        has_full=bool((used == FULL_TILE).any()),
    )


def _chosen(cases: Sequence[_Listed], index: Any) -> _Listed:
    """The lists of one of several cases."""
    length = max(case.words.shape[2] for case in cases)
    words = []
    for case in cases:
        idle = case.words[..., -1:] & ~63  # nothing to do, and no new tile to fetch
        missing = length - case.words.shape[2]
        words.append(np.concatenate([case.words, np.repeat(idle, missing, axis=2)], axis=2))
    return _Listed(
        jnp.asarray(np.stack(words))[index],
        jnp.asarray(np.array([case.steps for case in cases], np.int32))[index],
        has_empty=any(case.has_empty for case in cases),
        has_generic=any(case.has_generic for case in cases),
        has_full=any(case.has_full for case in cases),
    )


# Masks that depend on arrays ------------------------------------------------------------------------


def _dynamic_visits(
    mask: Expression,
    aligned: Sequence[AlignedLoad],
    sizes: Sizes,
    tiles: Tiles,
    order: Order,
    every: bool,
    per_tile: np.ndarray,
) -> _Listed:
    """The lists as XLA computes them, over the tiles that may be visible whatever the arrays hold."""
    nq, nkv = per_tile.shape[2:4]
    possible = (per_tile != SKIP).any(axis=(0, 1, 4, 5))
    whole = (_end_kinds(sizes, tiles, q_end=True) == FULL).reshape(nq, tiles.tile_q // tiles.sub_q, nkv, -1)
    whole = whole.all(axis=(1, 3))
    ranges = {load: _block_range(aligned[load.slot], sizes, tiles) for load in loads(mask)}
    everywhere, anywhere = _bounds(mask, sizes, tiles.tile_q, tiles.tile_kv, (nq, nkv), ranges, jnp)
    if order == "kv":
        possible, whole = possible.T, whole.T
        everywhere, anywhere = (jnp.swapaxes(x, 2, 3) for x in (everywhere, anywhere))
    batch, heads = anywhere.shape[:2]

    # Candidates, one after the other as they would be visited: numbers of tiles.
    candidates = possible.copy()
    if every:
        candidates[:, 0] |= ~possible.any(axis=1)
    else:
        candidates[0, 0] |= ~possible.any()
    outers, inners = np.nonzero(candidates)
    begins = np.r_[True, outers[1:] != outers[:-1]]
    line = np.cumsum(begins) - 1  # which output tile, counted
    visible = anywhere[:, :, outers, inners] & jnp.asarray(possible[outers, inners])
    full = everywhere[:, :, outers, inners] & jnp.asarray(whole[outers, inners])
    if every:  # one visit to write an output tile that sees nothing
        seen = jax.ops.segment_max(
            jnp.moveaxis(visible, 2, 0).astype(jnp.int32), line, num_segments=int(line[-1]) + 1
        )
        none_seen = jnp.moveaxis(seen, 0, 2)[:, :, line] <= 0
        visited = visible | (jnp.asarray(begins) & none_seen)
    else:
        first_of_all = jnp.arange(len(outers)) == 0
        visited = visible | (first_of_all & ~visible.any(axis=-1, keepdims=True))
    number = jnp.where(visible, jnp.where(full, FULL_TILE, GENERIC_TILE), EMPTY_TILE)
    # What is visited goes to the front, in order.
    rank = jnp.argsort(~visited, axis=-1, stable=True)
    counts = jnp.sum(visited, axis=-1, dtype=jnp.int32)
    place = jnp.minimum(jnp.arange(len(outers)), counts[..., None] - 1)
    chosen = jnp.take_along_axis(rank, place, axis=-1)
    tile = jnp.asarray(line, jnp.int32)[chosen]
    beyond = jnp.arange(len(outers)) >= counts[..., None]
    edge = jnp.full((batch, heads, 1), -1, jnp.int32)
    first = tile != jnp.concatenate([edge, tile[..., :-1]], axis=-1)
    last = (tile != jnp.concatenate([tile[..., 1:], edge], axis=-1)) | (
        jnp.arange(len(outers)) == counts[..., None] - 1
    )
    flags = first | last.astype(jnp.int32) << 1
    flags = flags | jnp.take_along_axis(number, chosen, axis=-1).astype(jnp.int32) << 2
    q, kv = (outers, inners) if order == "q" else (inners, outers)
    tiles_of = jnp.asarray(kv << 6 | q << 18, jnp.int32)[chosen]
    words = jnp.where(beyond, tiles_of, tiles_of | flags)
    return _Listed(words, jnp.max(counts), has_empty=True, has_generic=True, has_full=bool(whole.any()))


def _block_range(load: AlignedLoad, sizes: Sizes, tiles: Tiles) -> tuple[Any, Any]:
    """The least and the largest element of `load` in each tile, to broadcast against [b, h, nq, nkv]."""
    array = load.array.astype(jnp.int32) if load.array.dtype == jnp.bool_ else load.array
    lo = hi = array
    for name, length, tile in (("q", sizes.q_len, tiles.tile_q), ("kv", sizes.kv_len, tiles.tile_kv)):
        if name in load.axes:
            axis = load.axes.index(name)
            lo, hi = _reduced(lo, jnp.min, axis, length, tile), _reduced(hi, jnp.max, axis, length, tile)
    shape = [lo.shape[load.axes.index(name)] if name in load.axes else 1 for name in ("b", "h", "q", "kv")]
    return lo.reshape(shape), hi.reshape(shape)


def _reduced(array: Any, reduce: Any, axis: int, length: int, tile: int) -> Any:
    """`array` reduced over each tile of one axis; the last tile has what there is."""
    missing = -length % tile
    pad = [(0, missing if a == axis else 0) for a in range(array.ndim)]
    array = jnp.pad(array, pad, mode="edge")
    shape = (*array.shape[:axis], -1, tile, *array.shape[axis + 1 :])
    return reduce(array.reshape(shape), axis=axis + 1)


# Both -----------------------------------------------------------------------------------------------


def _bounds(
    mask: Expression,
    sizes: Sizes,
    block_q: int,
    block_kv: int,
    shape: tuple[int, ...],
    loaded: Mapping[Load, tuple[Any, Any]],
    xp: Any,
) -> tuple[Any, Any]:
    """(everything visible, anything visible) of all blocks, [batch | 1, heads | 1, *shape]."""
    used = variables(mask).union(*(load_axes(load) for load in loaded))
    index = {
        "b": xp.arange(sizes.batch if "b" in used else 1).reshape(-1, 1, 1, 1),
        "h": xp.arange(sizes.heads if "h" in used else 1).reshape(1, -1, 1, 1),
    }
    # Blocks behind an end, which are skipped anyhow, have the bounds of the last position.
    begin_q = xp.minimum(xp.arange(shape[0]) * block_q, sizes.q_len - 1).reshape(1, 1, -1, 1)
    begin_kv = xp.minimum(xp.arange(shape[1]) * block_kv, sizes.kv_len - 1).reshape(1, 1, 1, -1)
    ranges = {
        **{name: (value, value) for name, value in index.items()},
        "q": (begin_q, xp.minimum(begin_q + block_q, sizes.q_len) - 1),
        "kv": (begin_kv, xp.minimum(begin_kv + block_kv, sizes.kv_len) - 1),
        "q_len": (sizes.q_len, sizes.q_len),
        "kv_len": (sizes.kv_len, sizes.kv_len),
    }
    everywhere, anywhere = bounds(mask, ranges, lambda load: loaded.get(load, _unknown(load)), xp)
    full_shape = (index["b"].shape[0], index["h"].shape[1], *shape)
    return xp.broadcast_to(everywhere, full_shape), xp.broadcast_to(anywhere, full_shape)


def load_axes(load: Load) -> tuple[str, ...]:
    """The index variables of an aligned load."""
    return tuple(sorted(variables(load)))


def _unknown(load: Load) -> tuple[Any, Any]:
    """Bounds of a load of which nothing is known."""
    if load.kind == "bool":
        return False, True
    if load.kind == "int":
        return np.iinfo(np.int32).min, np.iinfo(np.int32).max
    return -math.inf, math.inf

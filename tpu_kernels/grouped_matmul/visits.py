"""Which tiles of rows a kernel visits for which group, worked out on the device from the sizes of the groups.

Groups are ranges of rows, one behind the other. A tile of rows that several groups share is visited once for
each, in a row, so that its output stays in VMEM meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """The visits of a grid, in order, int32 [most]; those from `total` on are not made.

    Attributes:
        group: the number of the group; that of no group is -1, for rows that belong to none.
        tile: the number of the tile of rows.
        first, end: the rows of the tile that belong to the group, from `first` to before `end`.
        total: how many there are, a scalar; at least one.
    """

    group: jax.Array
    tile: jax.Array
    first: jax.Array
    end: jax.Array
    total: jax.Array


def row_ranges(
    group_sizes: jax.Array, rows: int, groups: int, offset: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Where each of `groups` groups begins and ends, int32 [groups].

    Sizes are made safe: a negative one counts as 0, and no group reaches beyond the last row.

    Args:
        group_sizes: int32 [all groups].
        rows: how many there are.
        groups: how many of the groups count.
        offset: int32 [], the first group that counts; None for 0.
    """
    sizes = jnp.clip(group_sizes, 0, rows)
    # A sum that stops at `rows`: the plain one could overflow.
    ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    if offset is None:
        return starts[:groups], ends[:groups]
    return (
        jax.lax.dynamic_slice(starts, (offset,), (groups,)),
        jax.lax.dynamic_slice(ends, (offset,), (groups,)),
    )


def of_all_rows(starts: jax.Array, ends: jax.Array, rows: int, tile_m: int) -> Visits:
    """Visits that see every row once: those before the first group and behind the last belong to no group."""
    zero = jnp.zeros(1, jnp.int32)
    last = jnp.full(1, rows, jnp.int32)
    groups = jnp.arange(-1, starts.shape[0] + 1, dtype=jnp.int32).at[-1].set(-1)
    starts, ends = jnp.concatenate([zero, starts, ends[-1:]]), jnp.concatenate([starts[:1], ends, last])
    tiles = -(-rows // tile_m)
    return _visits(groups, starts, ends, rows, tile_m, tiles + groups.shape[0] - 1, empty=False)


def of_groups(starts: jax.Array, ends: jax.Array, rows: int, tile_m: int) -> Visits:
    """Visits of every group, at least one of each, also of those without rows."""
    groups = jnp.arange(starts.shape[0], dtype=jnp.int32)
    tiles = -(-rows // tile_m)
    return _visits(groups, starts, ends, rows, tile_m, tiles + groups.shape[0], empty=True)


def _visits(
    groups: jax.Array, starts: jax.Array, ends: jax.Array, rows: int, tile_m: int, most: int, *, empty: bool
) -> Visits:
    first_tile = jnp.minimum(starts // tile_m, -(-rows // tile_m) - 1)
    tiles = jnp.where(ends > starts, (ends - 1) // tile_m - first_tile + 1, int(empty))
    until = jnp.cumsum(tiles)  # visits up to the end of each group
    number = jnp.arange(most, dtype=jnp.int32)
    of = jnp.searchsorted(until, number, side="right", method="compare_all")
    of = jnp.minimum(of, groups.shape[0] - 1).astype(jnp.int32)
    # One gather for all: each is an operation of its own on the chip, and takes longer to start than to run.
    group, start, end, tile = jnp.stack([groups, starts, ends, first_tile - (until - tiles)])[:, of]
    tile = tile + number
    begin = tile * tile_m
    return Visits(
        group=group,
        tile=tile,
        first=jnp.clip(start - begin, 0, tile_m),
        end=jnp.clip(end - begin, 0, tile_m),
        total=until[-1],
    )

"""What the row-wise kernels share: their tiling, and their blocks.

A row-wise kernel sees its input as `x: [rows, cols]` and works on blocks of whole rows. Arrays of length
`cols` (weight, bias) are seen as `[1, cols]`, because a TPU vector register has two dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

SUBLANES = 8
"""Rows of a vector register of 32-bit values: blocks have a multiple of it, or all rows."""


@dataclass(frozen=True)
class RowTiling:
    """How many rows of `x` one grid step holds in VMEM.

    `tile_rows` is a positive multiple of 8. An array with fewer rows than that is one block.
    Raises `TypeError` or `ValueError` otherwise.
    """

    tile_rows: int

    def __post_init__(self) -> None:
        if not isinstance(self.tile_rows, int) or isinstance(self.tile_rows, bool):
            raise TypeError(f"tile_rows must be an int, got {self.tile_rows!r}")
        if self.tile_rows <= 0 or self.tile_rows % SUBLANES:
            raise ValueError(f"tile_rows must be a positive multiple of {SUBLANES}, got {self.tile_rows}")

    def block_rows(self, rows: int) -> int:
        """Rows of a block of an array with `rows` rows: never more than there are."""
        return min(self.tile_rows, rows)

    def steps(self, rows: int) -> int:
        """Grid steps for `rows` rows; the last block may reach past the end."""
        return -(-rows // self.block_rows(rows))


def as_rows(x: jax.Array) -> jax.Array:
    """`[..., cols]` to `[rows, cols]`."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def row_block(tile_rows: int, cols: int) -> pl.BlockSpec:
    """Blocks of an array `[rows, cols]`: step i holds the `tile_rows` rows from `i * tile_rows` on."""

    def rows_map(i: jax.Array) -> tuple[jax.Array, int]:
        # array is (rows, cols). Load the [tile_rows, cols] block of this step.
        return i, 0

    return pl.BlockSpec((tile_rows, cols), rows_map)


def vector_block(cols: int) -> pl.BlockSpec:
    """The one block of an array `[1, cols]`, the same at every step."""

    def whole_map(i: jax.Array) -> tuple[int, int]:
        # array is (1, cols). Load all of it; it stays in VMEM from step to step.
        del i
        return 0, 0

    return pl.BlockSpec((1, cols), whole_map)


def mask_past_end(values: jax.Array, *, rows: int) -> jax.Array:
    """Zero where this step's block reaches past the last row: what is loaded there is not ours.

    `values: [tile_rows, cols]`, inside a kernel body. Only sums over rows need it: rows are independent
    otherwise, and what a block writes past the end is dropped.
    """
    tile_rows = values.shape[0]
    if rows % tile_rows == 0:
        return values
    row = pl.program_id(0) * tile_rows + jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
    return jnp.where(row < rows, values, 0.0)

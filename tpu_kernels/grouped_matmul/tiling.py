"""Tile sizes of grouped matmul."""

from __future__ import annotations

from dataclasses import dataclass, fields

LANES = 128
"""Columns of a vector register."""

ROW_UNIT = 32
"""Rows of a register of 8-bit numbers, and of whole ones of wider: where a slice of rows may begin."""


def slices(tile_m: int) -> tuple[int, ...]:
    """How many rows may be multiplied of a tile of `tile_m` that groups share, fewest first.

    One slice has all rows of a group: each writes, or adds to, the whole result, so that two would take
    longer than one with rows that are not needed. Each is code of its own, hence few large ones.
    """
    few = (128, 256, 384, 512)
    larger = (half << shift for shift in range(tile_m.bit_length()) for half in (768, 1024))
    return (*(rows for rows in (*few, *larger) if rows < tile_m), tile_m)


@dataclass(frozen=True)
class GroupedTiling:
    """Tiles of the three products of a grouped matmul: the output, and the gradients of both operands.

    Each is a product of [m, k] with [k, n], and cut along these. For the output, m counts the rows of
    `lhs`, k its columns, n the columns of the output. For `dlhs` m counts rows, k the columns of the
    output, n those of `lhs`. For `drhs` m counts the rows, which are summed over, k the columns of `lhs`
    and n those of the output.

    All are positive multiples of 128; a size larger than the array stands for the whole of it. Raises
    `TypeError` or `ValueError` otherwise.
    """

    tile_m: int
    tile_k: int
    tile_n: int
    dlhs_tile_m: int
    dlhs_tile_k: int
    dlhs_tile_n: int
    drhs_tile_m: int
    drhs_tile_k: int
    drhs_tile_n: int

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"{field.name} must be an int, got {size!r}")
            if size <= 0 or size % LANES:
                raise ValueError(f"{field.name} must be a positive multiple of {LANES}, got {size}")

    @property
    def output(self) -> Tiles:
        """The tiles of the output's kernel."""
        return Tiles(self.tile_m, self.tile_k, self.tile_n)

    @property
    def dlhs(self) -> Tiles:
        """Those of the gradient of `lhs`."""
        return Tiles(self.dlhs_tile_m, self.dlhs_tile_k, self.dlhs_tile_n)

    @property
    def drhs(self) -> Tiles:
        """Those of the gradient of `rhs`."""
        return Tiles(self.drhs_tile_m, self.drhs_tile_k, self.drhs_tile_n)


@dataclass(frozen=True)
class Tiles:
    """The tile sizes of one kernel; see `GroupedTiling`."""

    tile_m: int
    tile_k: int
    tile_n: int

    def clipped(self, m: int, k: int, n: int) -> Tiles:
        """No larger than the arrays, but for a few rows: all of a dimension in place of a larger tile."""
        rows = -(-m // ROW_UNIT) * ROW_UNIT
        return Tiles(min(self.tile_m, rows), min(self.tile_k, k), min(self.tile_n, n))

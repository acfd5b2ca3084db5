"""Tile sizes of splash attention."""

from __future__ import annotations

from dataclasses import dataclass, fields

LANES = 128
"""Columns of a vector register. The scores of a tile have queries or keys along it, forward and backward."""


@dataclass(frozen=True)
class SplashTiling:
    """How scores are cut into tiles, and tiles into sub-blocks.

    A grid step, a *visit*, holds `tile_q` queries and `tile_kv` keys in VMEM. It works through them in
    sub-blocks of `sub_q` x `sub_kv` scores, which are skipped, masked or taken whole. The same for the
    backward, with a `backward_` in front. `backward_scores_stay` says what its matrix units hold while the
    other operand streams past: scores, or rows of q and do.

    All sizes are positive multiples of 128, and a tile's are multiples of its sub-block's. Arrays may have
    any length: the last tile reaches past their end. Raises `TypeError` or `ValueError` otherwise.
    """

    tile_q: int
    tile_kv: int
    sub_q: int
    sub_kv: int
    backward_tile_q: int
    backward_tile_kv: int
    backward_sub_q: int
    backward_sub_kv: int
    backward_scores_stay: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name == "backward_scores_stay":
                if not isinstance(size, bool):
                    raise TypeError(f"{field.name} must be a bool, got {size!r}")
                continue
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"{field.name} must be an int, got {size!r}")
            if size <= 0 or size % LANES:
                raise ValueError(f"{field.name} must be a positive multiple of {LANES}, got {size}")
        for grid in (self.forward, self.backward):
            if grid.tile_q % grid.sub_q or grid.tile_kv % grid.sub_kv:
                raise ValueError(f"tiles must be multiples of their sub-blocks, got {grid}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """All fields, in their order."""
        return (
            self.tile_q,
            self.tile_kv,
            self.sub_q,
            self.sub_kv,
            self.backward_tile_q,
            self.backward_tile_kv,
            self.backward_sub_q,
            self.backward_sub_kv,
            self.backward_scores_stay,
        )

    @property
    def forward(self) -> Tiles:
        """The sizes of the forward kernel."""
        return Tiles(self.tile_q, self.tile_kv, self.sub_q, self.sub_kv)

    @property
    def backward(self) -> Tiles:
        """The sizes of the backward kernels."""
        return Tiles(self.backward_tile_q, self.backward_tile_kv, self.backward_sub_q, self.backward_sub_kv)


@dataclass(frozen=True)
class Tiles:
    """The tile sizes of one kernel; see `SplashTiling`."""

    tile_q: int
    tile_kv: int
    sub_q: int
    sub_kv: int

    def clipped(self, q_len: int, kv_len: int) -> Tiles:
        """No larger than the arrays need: whole sub-blocks, and sub-blocks of whole registers."""
        sub_q, sub_kv = min(self.sub_q, _rounded(q_len, LANES)), min(self.sub_kv, _rounded(kv_len, LANES))
        tile_q = min(self.tile_q // sub_q * sub_q, _rounded(q_len, sub_q))
        tile_kv = min(self.tile_kv // sub_kv * sub_kv, _rounded(kv_len, sub_kv))
        return Tiles(tile_q, tile_kv, sub_q, sub_kv)


def _rounded(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`, at least one."""
    return max(-(-size // unit), 1) * unit

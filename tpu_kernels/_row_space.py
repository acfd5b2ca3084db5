"""The space of tilings of row-wise kernels: which are legal on a chip, and which is the default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.problem import ArraySpec, Problem, numpy_dtype
from autotune.spec import Candidate
from bridge.chips import Chip
from tpu_kernels._rows import SUBLANES, RowTiling

KERNEL_DTYPES = ("bfloat16", "float32")
"""Dtypes that the TPU compiler loads into vector registers and these kernels compute with."""

LANES = 128
"""Columns of a vector register: VMEM is laid out in multiples of it."""

MAX_TILE_ROWS = 4096
"""Beyond this a block of even one register's width hides the cost of a grid step many times over."""

DEFAULT_BLOCK_BYTES = 1 << 20
"""A block this large takes longer to move than a grid step takes to start, on every chip; several fit."""

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Footprint:
    """What one phase of a row-wise kernel holds in VMEM.

    Attributes:
        blocks: row blocks of the dtype of `x` that are read or written, each held twice (one is moved
            while the other is worked on).
        vectors: arrays of length `cols`, counted as float32, each held twice.
        temporaries: float32 copies of a block that the compiler keeps on its stack.
        row_temporaries: arrays of one float32 per row there, each of which takes a register's width.
            Both were found by compiling ever larger tilings with libtpu 0.0.52 until one did not fit.
    """

    blocks: int
    vectors: int
    temporaries: int
    row_temporaries: int

    def bytes(self, tiling: RowTiling, x: ArraySpec) -> int:
        """VMEM bytes with `tiling`, columns padded to whole registers."""
        rows, cols = rows_and_cols(x)
        tile_rows = _round_up(tiling.block_rows(max(rows, 1)), SUBLANES)
        tile_cols = _round_up(cols, LANES)
        blocks = 2 * self.blocks * tile_rows * tile_cols * numpy_dtype(x.dtype).itemsize
        vectors = 2 * self.vectors * tile_cols * _FLOAT32_BYTES
        temporaries = (
            tile_rows * (self.temporaries * tile_cols + self.row_temporaries * LANES) * _FLOAT32_BYTES
        )
        return blocks + vectors + temporaries


def rows_and_cols(x: ArraySpec) -> tuple[int, int]:
    """`x` as the kernel sees it: all leading dimensions are rows."""
    return math.prod(x.shape[:-1]), x.shape[-1]


def row_space(problem: Problem, footprints: Mapping[str, Footprint], chip: Chip) -> tuple[Candidate, ...]:
    """Tile sizes in powers of two up to all rows, each with its VMEM and what speaks against it.

    A tiling serves the forward and the backward, so it must fit with each of `footprints`.
    """
    x = problem.required("x")
    rows, _ = rows_and_cols(x)
    sizes = [SUBLANES]
    while sizes[-1] < min(rows, MAX_TILE_ROWS):
        sizes.append(2 * sizes[-1])
    return tuple(
        Candidate(
            tiling,
            max(_vmem(x, tiling, footprints).values()),
            unsupported_dtypes(problem) + row_illegal_reasons(problem, tiling, footprints, chip),
        )
        for tiling in map(RowTiling, sizes)
    )


def default_row_tiling(problem: Problem, footprints: Mapping[str, Footprint], chip: Chip) -> RowTiling:
    """The largest legal tiling with at most `DEFAULT_BLOCK_BYTES` of `x` in a block.

    The kernels are bound by HBM traffic, so larger blocks gain nothing; smaller ones pay for more steps.
    """
    x = problem.required("x")
    row_bytes = _round_up(x.shape[-1], LANES) * numpy_dtype(x.dtype).itemsize
    legal = [c.tiling for c in row_space(problem, footprints, chip) if c.legal]
    fitting = [tiling for tiling in legal if tiling.tile_rows * row_bytes <= DEFAULT_BLOCK_BYTES]
    return fitting[-1] if fitting else RowTiling(SUBLANES)


def row_unsupported_reasons(
    problem: Problem, footprints: Mapping[str, Footprint], chip: Chip
) -> tuple[str, ...]:
    """Why no tiling computes `problem` on `chip`; empty if one does."""
    return unsupported_dtypes(problem) + row_illegal_reasons(problem, RowTiling(SUBLANES), footprints, chip)


def unsupported_dtypes(problem: Problem) -> tuple[str, ...]:
    """Which arguments have a dtype the kernels don't compute with."""
    return tuple(
        f"{name} is {spec.dtype} and the kernel computes with {' and '.join(KERNEL_DTYPES)}"
        for name, spec in problem.arrays
        if spec is not None and spec.dtype not in KERNEL_DTYPES
    )


def row_illegal_reasons(
    problem: Problem, tiling: RowTiling, footprints: Mapping[str, Footprint], chip: Chip
) -> tuple[str, ...]:
    """Why the kernel cannot run with `tiling` on `chip`; empty if it can."""
    x = problem.required("x")
    return tuple(
        f"the {phase} needs about {_mebibytes(size)} of VMEM for blocks of "
        f"{tiling.tile_rows} x {x.shape[-1]} {x.dtype} and {chip.name} allows "
        f"{_mebibytes(chip.vmem_limit_bytes)}"
        for phase, size in _vmem(x, tiling, footprints).items()
        if size > chip.vmem_limit_bytes
    )


def _vmem(x: ArraySpec, tiling: RowTiling, footprints: Mapping[str, Footprint]) -> dict[str, int]:
    return {phase: footprint.bytes(tiling, x) for phase, footprint in footprints.items()}


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

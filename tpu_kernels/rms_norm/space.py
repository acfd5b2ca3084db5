"""RMS norm: problems, tile space, default tiling and cost."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.problem import ArraySpec, Problem
from autotune.spec import Candidate, Cost
from bridge.chips import Chip
from tpu_kernels._row_space import (
    Footprint,
    default_row_tiling,
    row_illegal_reasons,
    row_space,
    row_unsupported_reasons,
    rows_and_cols,
)
from tpu_kernels._rows import RowTiling

FOOTPRINTS = {
    "forward": Footprint(blocks=2, vectors=1, temporaries=1, row_temporaries=1),  # x; y
    "backward": Footprint(blocks=3, vectors=2, temporaries=3, row_temporaries=1),  # x, g; dx
}


def make_problem(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Problem:
    """The problem for `shapes["x"]`, with a weight and the usual eps.

    Raises `ValueError` for other shapes.
    """
    if set(shapes) != {"x"} or not shapes["x"]:
        raise ValueError(f"rms_norm takes one shape, of x, with at least one dimension, got {dict(shapes)}")
    x = ArraySpec(shapes["x"], dtype)
    return Problem.of("rms_norm", {"x": x, "weight": ArraySpec(x.shape[-1:], dtype)}, {"eps": 1e-6})


def space(problem: Problem, chip: Chip) -> tuple[Candidate, ...]:
    """All tilings worth considering, legal and not."""
    return row_space(problem, FOOTPRINTS, chip)


def unsupported_reasons(problem: Problem, chip: Chip) -> tuple[str, ...]:
    """Why no tiling computes `problem` on `chip`; empty if one does."""
    return row_unsupported_reasons(problem, FOOTPRINTS, chip)


def illegal_reasons(problem: Problem, tiling: RowTiling, chip: Chip) -> tuple[str, ...]:
    """Why the kernel cannot run with `tiling` on `chip`; empty if it can."""
    return row_illegal_reasons(problem, tiling, FOOTPRINTS, chip)


def default_tiling(problem: Problem, chip: Chip) -> RowTiling:
    """The tiling used when nobody chose one."""
    return default_row_tiling(problem, FOOTPRINTS, chip)


def costs(problem: Problem) -> dict[str, Cost]:
    """Unavoidable work: every array moved once; operations per element as in the formulas of `kernel.py`."""
    x = problem.required("x")
    rows, cols = rows_and_cols(x)
    weight = problem.array("weight")
    weight_bytes = 0 if weight is None else weight.nbytes
    return {
        "forward": Cost(
            # square, add, scale by rstd; times weight
            flops=rows * cols * (3 + (weight is not None)),
            bytes_read=x.nbytes + weight_bytes,
            bytes_written=x.nbytes,
        ),
        "backward": Cost(
            # square, add, n; h * n, add, n * projection, subtract, scale; h = g * weight, g * n, add
            flops=rows * cols * (8 + 3 * (weight is not None)),
            bytes_read=2 * x.nbytes + weight_bytes,
            bytes_written=x.nbytes + weight_bytes,
        ),
    }

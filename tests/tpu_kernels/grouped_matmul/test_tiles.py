"""The default tiles: legal, and chosen at once for sizes of any size."""

from __future__ import annotations

import tracemalloc

import pytest

from autotune.problem import ArraySpec, Problem
from bridge.chips import chip
from tpu_kernels.grouped_matmul import space


def problem(m: int, k: int, n: int, groups: int) -> Problem:
    arrays = {
        "lhs": ArraySpec((m, k), "bfloat16"),
        "rhs": ArraySpec((groups, k, n), "bfloat16"),
        "group_sizes": ArraySpec((groups,), "int32"),
    }
    return space.problem_of(arrays, out_dtype="bfloat16")


@pytest.mark.parametrize("name", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize(
    "sizes",
    [
        (2**31 - 1, 512, 512, 8),  # as symbolic sizes are tried with
        (512, 512, 512, 2**31 - 1),
        (2**31 - 1, 512, 512, 2**31 - 1),
        (2**40, 2**20, 2**20, 2**20),
        (1, 1, 1, 1),
        (0, 8, 8, 2),
    ],
)
def test_any_sizes_have_tiles_without_arrays_of_that_size(sizes: tuple[int, ...], name: str) -> None:
    tracemalloc.start()
    try:
        tiling = space.default_tiling(problem(*sizes), chip(name))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert not space.illegal_reasons(problem(*sizes), tiling, chip(name))

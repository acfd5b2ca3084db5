"""Grouped matmul: problems, tile space, default tiling and cost."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from autotune.problem import ArraySpec, Problem, numpy_dtype
from autotune.spec import Candidate, Cost
from bridge.chips import Chip
from tpu_kernels._vmem import excess_reasons, vmem_allowed
from tpu_kernels.grouped_matmul.tiling import LANES, GroupedTiling, Tiles

KERNEL_DTYPES = ("bfloat16", "float32")
"""Dtypes that the kernels multiply."""

_TILES_M = (128, 256, 512)
_TILES = (128, 256, 512, 1024, 2048, 4096)
_CODE = 1 << 31
"""Products of one step at most: all of them are code, and more takes the compiler a minute."""

_FLOAT32_BYTES = 4


# Problems -----------------------------------------------------------------------------------------


def make_problem(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Problem:
    """The problem for `shapes["lhs"]`, [M, K], and `shapes["rhs"]`, [G, K, N], by default [4, K, K].

    Raises `ValueError` for other shapes.
    """
    if not {"lhs"} <= set(shapes) <= {"lhs", "rhs"} or len(shapes["lhs"]) != 2:
        raise ValueError(f"grouped_matmul takes shapes of lhs [M, K] and rhs [G, K, N], got {dict(shapes)}")
    lhs = shapes["lhs"]
    rhs = shapes.get("rhs", (4, lhs[1], lhs[1]))
    if len(rhs) != 3 or rhs[1] != lhs[1]:
        raise ValueError(f"grouped_matmul: lhs [M, K] and rhs [G, K, N] don't belong together: {lhs}, {rhs}")
    arrays = {
        "lhs": ArraySpec(lhs, dtype),
        "rhs": ArraySpec(rhs, dtype),
        "group_sizes": ArraySpec(rhs[:1], "int32"),
    }
    return problem_of(arrays, out_dtype=dtype)


def problem_of(
    arrays: Mapping[str, ArraySpec | None], *, transpose_rhs: bool = False, out_dtype: str
) -> Problem:
    """The problem of lhs, rhs and group_sizes; how large groups are is data, and changes nothing here."""
    params = {"transpose_rhs": transpose_rhs, "out_dtype": out_dtype}
    return Problem.of("grouped_matmul", arrays, params)


def dimensions(problem: Problem) -> tuple[int, int, int, int]:
    """M, K, N and G."""
    (m, k), rhs = problem.required("lhs").shape, problem.required("rhs").shape
    return m, k, rhs[1 if problem.param("transpose_rhs") else 2], rhs[0]


# The space ----------------------------------------------------------------------------------------


def space(problem: Problem, chip: Chip) -> tuple[Candidate, ...]:
    """Tilings worth considering, legal and not, those that need the least VMEM first.

    The three kernels don't depend on each other's sizes: each is varied with the others' default.
    """
    default = default_tiling(problem, chip)
    chosen = default.output, default.dlhs, default.drhs
    found = {default}
    for place, sizes in enumerate(_sizes(problem)):
        for tiles in _all_tiles(*sizes):
            output, dlhs, drhs = (tiles if i == place else kept for i, kept in enumerate(chosen))
            found.add(tiling_of(output, dlhs, drhs))
    candidates = [
        Candidate(
            tiling,
            max(vmem_bytes(problem, tiling).values()),
            unsupported_dtypes(problem) + illegal_reasons(problem, tiling, chip),
        )
        for tiling in found
    ]
    return tuple(sorted(candidates, key=lambda c: (c.vmem_bytes, str(c.tiling))))


def tiling_of(output: Tiles, dlhs: Tiles, drhs: Tiles) -> GroupedTiling:
    """The tiling with these sizes."""
    return GroupedTiling(
        output.tile_m,
        output.tile_k,
        output.tile_n,
        dlhs.tile_m,
        dlhs.tile_k,
        dlhs.tile_n,
        drhs.tile_m,
        drhs.tile_k,
        drhs.tile_n,
    )


@functools.lru_cache(maxsize=1024)
def default_tiling(problem: Problem, chip: Chip) -> GroupedTiling:
    """Of the tilings that fit, the one with the least time by the roofline, HBM beside the matrix units.

    Where many have it, most rows at once: that hides the start of a visit. Then the least traffic.
    """
    best = [
        _fastest(problem, phase, sizes, chip) for phase, sizes in zip(_BYTES, _sizes(problem), strict=True)
    ]
    return tiling_of(*best)


def _fastest(problem: Problem, phase: str, sizes: tuple[int, int, int], chip: Chip) -> Tiles:
    m, k, n = sizes
    item = numpy_dtype(problem.required("lhs").dtype).itemsize
    computing = 2 * m * k * n / chip.bf16_flops_per_second

    def cost(tiles: Tiles) -> tuple[float, ...]:
        moved = _TRAFFIC[phase](problem, m, k, n, tiles)
        moving = moved * item / chip.hbm_bytes_per_second
        return max(moving, computing), -tiles.tile_m, moved, -tiles.tile_k

    allowed = vmem_allowed(chip)
    fitting = (t for t in _all_tiles(m, k, n) if _BYTES[phase](problem, t.clipped(m, k, n)) <= allowed)
    return min(fitting, key=cost, default=_SMALLEST)


_SMALLEST = Tiles(LANES, LANES, LANES)


def _sizes(problem: Problem) -> tuple[tuple[int, int, int], ...]:
    """m, k and n of the three kernels."""
    m, k, n, _ = dimensions(problem)
    return (m, k, n), (m, n, k), (m, k, n)


def _all_tiles(m: int, k: int, n: int) -> Iterator[Tiles]:
    """Tiles up to the size of the arrays, and of moderate work in one step."""

    def up_to(sizes: tuple[int, ...], size: int) -> list[int]:
        return [tile for tile in sizes if tile < size] + [_round_up(max(size, 1), LANES)]

    tiles_m = [tile for tile in _TILES_M if tile < m + LANES]
    for tile_m, tile_k, tile_n in itertools.product(tiles_m, up_to(_TILES, k), up_to(_TILES, n)):
        if tile_m * tile_k * tile_n <= _CODE:
            yield Tiles(tile_m, tile_k, tile_n)


def unsupported_reasons(problem: Problem, chip: Chip) -> tuple[str, ...]:
    """Why no tiling computes `problem` on `chip`; empty if one does."""
    smallest = tiling_of(_SMALLEST, _SMALLEST, _SMALLEST)
    return unsupported_dtypes(problem) + illegal_reasons(problem, smallest, chip)


def unsupported_dtypes(problem: Problem) -> tuple[str, ...]:
    """Which dtypes the kernels don't compute with."""
    dtypes = {name: problem.required(name).dtype for name in ("lhs", "rhs")}
    reasons = tuple(
        f"{name} is {dtype} and the kernel computes with {' and '.join(KERNEL_DTYPES)}"
        for name, dtype in (*dtypes.items(), ("out_dtype", problem.param("out_dtype")))
        if dtype not in KERNEL_DTYPES
    )
    if not reasons and len(set(dtypes.values())) > 1:
        reasons = (f"lhs and rhs must have the same dtype, got {' and '.join(dtypes.values())}",)
    return reasons


def illegal_reasons(problem: Problem, tiling: GroupedTiling, chip: Chip) -> tuple[str, ...]:
    """Why the kernels cannot run with `tiling` on `chip`; empty if they can."""
    return excess_reasons(vmem_bytes(problem, tiling), chip)


# VMEM and HBM -------------------------------------------------------------------------------------


def vmem_bytes(problem: Problem, tiling: GroupedTiling) -> dict[str, int]:
    """VMEM that each kernel needs, estimated."""
    tiles = (tiling.output, tiling.dlhs, tiling.drhs)
    return {
        phase: _BYTES[phase](problem, each.clipped(*sizes))
        for phase, each, sizes in zip(_BYTES, tiles, _sizes(problem), strict=True)
    }


def _product_bytes(problem: Problem, k: int, tiles: Tiles, out_dtype: str) -> int:
    item = numpy_dtype(problem.required("lhs").dtype).itemsize
    tile_m, tile_k, tile_n = (_round_up(size, LANES) for size in (tiles.tile_m, tiles.tile_k, tiles.tile_n))
    out = tile_m * tile_n
    blocks = (tile_m + tile_n) * tile_k * item + out * numpy_dtype(out_dtype).itemsize
    sums = 1 if tiles.tile_k >= k else 2  # the product as a value, and the scratch
    return 2 * blocks + sums * out * _FLOAT32_BYTES


def _output_bytes(problem: Problem, tiles: Tiles) -> int:
    return _product_bytes(problem, dimensions(problem)[1], tiles, problem.param("out_dtype"))


def _dlhs_bytes(problem: Problem, tiles: Tiles) -> int:
    return _product_bytes(problem, dimensions(problem)[2], tiles, problem.required("lhs").dtype)


def _drhs_bytes(problem: Problem, tiles: Tiles) -> int:
    item = numpy_dtype(problem.required("rhs").dtype).itemsize
    tile_m, tile_k, tile_n = (_round_up(size, LANES) for size in (tiles.tile_m, tiles.tile_k, tiles.tile_n))
    out = tile_k * tile_n
    return 2 * (tile_m * (tile_k + tile_n) + out) * item + 2 * out * _FLOAT32_BYTES


_BYTES = {"output": _output_bytes, "gradient of lhs": _dlhs_bytes, "gradient of rhs": _drhs_bytes}


def _product_traffic(problem: Problem, m: int, k: int, n: int, tiles: Tiles) -> int:
    groups = problem.required("rhs").shape[0]
    # A group's matrix stays from visit to visit if it is one tile along k; else every visit loads it again.
    loads = groups if tiles.tile_k >= k else groups + -(-m // tiles.tile_m)
    return m * k * -(-n // tiles.tile_n) + loads * k * n + m * n


def _drhs_traffic(problem: Problem, m: int, k: int, n: int, tiles: Tiles) -> int:
    return m * k * -(-n // tiles.tile_n) + m * n * -(-k // tiles.tile_k) + problem.required("rhs").size


_TRAFFIC = {"output": _product_traffic, "gradient of lhs": _product_traffic, "gradient of rhs": _drhs_traffic}
"""Elements read and written by each kernel, if groups are equal."""


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# Cost ---------------------------------------------------------------------------------------------


def costs(problem: Problem) -> dict[str, Cost]:
    """Unavoidable work if every row belongs to a group; arrays are moved once.

    Matrices of groups without rows need not be read: those of `example_sizes` are not counted.
    """
    m, k, n, groups = dimensions(problem)
    lhs, rhs = problem.required("lhs"), problem.required("rhs")
    used = rhs.nbytes // max(groups, 1) * int(np.count_nonzero(example_sizes(m, groups)))
    out_bytes = m * n * numpy_dtype(problem.param("out_dtype")).itemsize
    flops = 2 * m * k * n
    return {
        "forward": Cost(
            flops=flops, matmul_flops=flops, bytes_read=lhs.nbytes + used, bytes_written=out_bytes
        ),
        "backward": Cost(
            flops=2 * flops,
            matmul_flops=2 * flops,
            bytes_read=lhs.nbytes + used + out_bytes,
            bytes_written=lhs.nbytes + rhs.nbytes,
        ),
    }


def example_sizes(rows: int, groups: int) -> np.ndarray:
    """Sizes of groups as routers give them, int32 [groups]: few large ones, many small ones, some empty."""
    generator = np.random.default_rng(0)
    shares = generator.permutation(1 / np.arange(1, groups + 1))
    shares[generator.random(groups) < 0.1] = 0
    total = shares.sum()
    if not total:
        return np.full(groups, rows // max(groups, 1), np.int32)
    return generator.multinomial(rows, shares / total).astype(np.int32)

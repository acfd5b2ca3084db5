"""Grouped matmul: problems, tile space, default tiling and cost."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from autotune.problem import ArraySpec, Problem, numpy_dtype
from autotune.spec import Candidate, Cost
from bridge.chips import Chip
from tpu_kernels._vmem import excess_reasons, vmem_allowed
from tpu_kernels.grouped_matmul.tiling import LANES, ROW_UNIT, GroupedTiling, Tiles, slices

KERNEL_DTYPES = ("bfloat16", "float32")
"""Dtypes that the kernels multiply and return."""

QUANTIZED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that come with scales."""

_TILES_M = (128, 256, 512, 1024)
_TILES = (128, 256, 512, 1024, 2048, 4096)
_CODE = 1 << 31
"""Products of one step at most: all of them are code, and more takes the compiler a minute."""

_FLOAT32_BYTES = 4

_STEP_SECONDS = 0.2e-6
"""What a step of a grid costs beside its products and copies, about: read off schedules."""

_SUM_CYCLES, _REGISTER = 0.3, 1024
"""What it costs to add products to a register of sums in VMEM, about, and how many sums one has."""

_MOST_ROWS, _MOST_GROUPS = 1 << 20, 1024
"""What estimates are made for at most: one visit after the other is looked at."""

_ALIKE = 1.01
"""Estimates this close to each other don't tell which is faster."""


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
    arrays: Mapping[str, ArraySpec | None],
    *,
    transpose_rhs: bool = False,
    gated: bool = False,
    activation: str | None = None,
    out_dtype: str,
) -> Problem:
    """The problem of lhs, rhs and group_sizes, and of `up`, `bias`, scales and `existing_out` where given.

    How large groups are is data, and changes nothing here.
    """
    params = {
        "transpose_rhs": transpose_rhs,
        "gated": gated,
        "activation": activation,
        "out_dtype": out_dtype,
    }
    return Problem.of("grouped_matmul", arrays, params)


def _optional(problem: Problem, name: str) -> ArraySpec | None:
    return dict(problem.arrays).get(name)


def dimensions(problem: Problem) -> tuple[int, int, int, int]:
    """M, K, N and G."""
    (m, k), rhs = problem.required("lhs").shape, problem.required("rhs").shape
    n = rhs[1 if problem.param("transpose_rhs") else 2]
    return m, k, n // 2 if problem.param("gated") else n, rhs[0]


def matrices(problem: Problem) -> int:
    """How many each group has: 2 with gating."""
    return 2 if problem.param("gated") or _optional(problem, "up") is not None else 1


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
    """Of the tilings that fit, the one that is fastest by the roofline of each visit.

    Of those about as fast as it, the one with most rows at once, which wait least for the next group's
    matrix; then the one with the least code in a step, which compiles fastest.
    """
    best = [
        _fastest(problem, phase, sizes, chip) for phase, sizes in zip(_BYTES, _sizes(problem), strict=True)
    ]
    return tiling_of(*best)


def _fastest(problem: Problem, phase: str, sizes: tuple[int, int, int], chip: Chip) -> Tiles:
    allowed = vmem_allowed(chip)
    seconds = {
        tiles: _seconds(problem, phase, sizes, tiles, chip)
        for tiles in _all_tiles(*sizes)
        if _BYTES[phase](problem, tiles.clipped(*sizes)) <= allowed
        and (phase != "output" or _divides_blocks(problem, tiles))
    }
    enough = _ALIKE * min(seconds.values(), default=0.0)

    def order(tiles: Tiles) -> tuple[float, ...]:
        return -tiles.tile_m, tiles.tile_k * tiles.tile_n, seconds[tiles]

    return min((tiles for tiles in seconds if seconds[tiles] <= enough), key=order, default=_SMALLEST)


def _seconds(problem: Problem, phase: str, sizes: tuple[int, int, int], tiles: Tiles, chip: Chip) -> float:
    """About how long a kernel takes with skewed groups and with equal ones, together."""
    rows, groups = _part(sizes[0], problem.required("rhs").shape[0])
    summed = phase == "gradient of rhs"
    made = (_example_visits(rows, groups, tiles.tile_m, skewed, summed) for skewed in (True, False))
    count = matrices(problem) if phase == "output" else 1
    items = _items(problem, phase)
    return sum(
        seconds_of_visits(visits, tiles, sizes[1:], chip, items=items, count=count, summed=summed)
        for visits in made
    )


def seconds_of_visits(
    made: ExampleVisits,
    tiles: Tiles,
    sizes: tuple[int, int],
    chip: Chip,
    *,
    items: tuple[int, int, int],
    count: int = 1,
    summed: bool = False,
) -> float:
    """About how long a kernel takes for some visits.

    A visit computes while the blocks of the next one are copied, and no other: so the matrix of a group, or
    the sum over its rows, is waited for where the visit before it is short. The compiler's schedule takes
    0.85 to 1.50 times as long, in the median 1.00: see benchmarks/grouped_matmul_vs_peers.py.

    Args:
        made: the visits, for tiles of `tiles.tile_m`.
        sizes: k and n, as tiles count them.
        items: bytes of an element of both operands and of the result.
        count: how many matrices each group has.
        summed: whether rows are summed over, for a matrix of each group.
    """
    k, n = sizes
    steps_k, steps_n = -(-k // tiles.tile_k), -(-n // tiles.tile_n)
    lhs, rhs, out = items
    # A matrix unit has as many rows as it has columns: fewer take as long.
    multiplied = np.where(made.rows > 0, np.maximum(made.rows, chip.mxu_size), 0)
    if summed:
        copied = made.new_tile * tiles.tile_m * (tiles.tile_k * lhs + tiles.tile_n * rhs)
        copied = copied + made.new_group * tiles.tile_k * tiles.tile_n * out
        steps, repeats = 1, steps_k * steps_n
        sums = (made.rows > 0) * tiles.tile_k * tiles.tile_n
    else:
        rows, matrix = tiles.tile_m * tiles.tile_k * lhs, count * tiles.tile_k * tiles.tile_n * rhs
        once = made.new_tile * rows + made.new_group * matrix
        copied = once if steps_k == 1 else steps_k * (rows + matrix)  # a block stays while it is wanted next
        copied = copied + made.new_tile * tiles.tile_m * tiles.tile_n * out
        steps, repeats = steps_k, steps_n
        sums = made.rows * tiles.tile_n * count * (steps_k if steps_k > 1 else 0)
    # Blocks at the end of k and n are multiplied whole.
    products = multiplied * (steps * tiles.tile_k * tiles.tile_n * count)
    cores = chip.cores_per_device
    cycles = 2 * products / chip.mxu_flops_per_cycle + _SUM_CYCLES * sums / _REGISTER
    computing = cycles / (chip.sustained_clock_hz * cores)
    copying = copied / (chip.hbm_bytes_per_second * chip.hbm_efficiency * cores / chip.tensor_cores)
    visits = np.maximum(computing, np.roll(copying, -1)) + steps * _STEP_SECONDS
    return float(visits.sum()) * repeats


def _part(rows: int, groups: int) -> tuple[int, int]:
    """As many rows and groups as tell which tiles are faster, in proportion: symbolic sizes may be huge."""
    if groups > _MOST_GROUPS:
        rows, groups = -(-rows * _MOST_GROUPS // groups), _MOST_GROUPS
    return min(rows, _MOST_ROWS), groups


_SMALLEST = Tiles(LANES, LANES, LANES)


def _sizes(problem: Problem) -> tuple[tuple[int, int, int], ...]:
    """m, k and n of the three kernels."""
    m, k, n, _ = dimensions(problem)
    wide = 2 * n if problem.param("gated") else n  # gradients of both matrices at once
    return (m, k, n), (m, wide, k), (m, k, wide)


def _all_tiles(m: int, k: int, n: int) -> Iterator[Tiles]:
    """Tiles up to the size of the arrays, and of moderate work in one step."""

    def up_to(sizes: tuple[int, ...], size: int) -> list[int]:
        whole = _round_up(max(size, 1), LANES)
        parts = {whole // count for count in (1, 2, 4) if whole % (count * LANES) == 0}
        return sorted(parts.union(tile for tile in sizes if tile < size))

    tiles_m = [tile for tile in _TILES_M if tile < m + LANES]
    for tile_m, tile_k, tile_n in itertools.product(tiles_m, up_to(_TILES, k), up_to(_TILES, n)):
        if tile_m * tile_k * tile_n <= _CODE:
            yield Tiles(tile_m, tile_k, tile_n)


def unsupported_reasons(problem: Problem, chip: Chip) -> tuple[str, ...]:
    """Why no tiling computes `problem` on `chip`; empty if one does."""
    smallest = tiling_of(_SMALLEST, _SMALLEST, _SMALLEST)
    return unsupported_dtypes(problem) + illegal_reasons(problem, smallest, chip)


def unsupported_dtypes(problem: Problem) -> tuple[str, ...]:
    """Which dtypes, and which scales, the kernels don't compute with."""
    lhs, rhs, out = problem.required("lhs").dtype, problem.required("rhs").dtype, problem.param("out_dtype")
    reasons = tuple(
        f"{name} is {dtype} and the kernel computes with {', '.join(allowed[:-1])} and {allowed[-1]}"
        for name, dtype, allowed in (
            ("lhs", lhs, KERNEL_DTYPES + QUANTIZED_DTYPES),
            ("rhs", rhs, KERNEL_DTYPES + QUANTIZED_DTYPES),
            ("out_dtype", out, KERNEL_DTYPES),
        )
        if dtype not in allowed
    )
    if not reasons and lhs != rhs and not {lhs, rhs} & set(QUANTIZED_DTYPES):
        reasons = (f"lhs and rhs must have the same dtype, got {lhs} and {rhs}",)
    blocks = _scale_blocks(problem)
    if blocks > 1 and problem.required("lhs").shape[1] // blocks % LANES:
        reasons += (
            f"a scale is of {problem.required('lhs').shape[1] // blocks} elements of K, and the kernel takes "
            f"multiples of {LANES}, or all",
        )
    return reasons


def _scale_blocks(problem: Problem) -> int:
    """How many blocks along K have factors of their own."""
    lhs, rhs = _optional(problem, "lhs_scale"), _optional(problem, "rhs_scale")
    of_lhs = lhs.shape[1] if lhs is not None and len(lhs.shape) == 2 else 1
    of_rhs = rhs.shape[1] if rhs is not None and len(rhs.shape) == 3 else 1
    return max(of_lhs, of_rhs)


def _divides_blocks(problem: Problem, tiles: Tiles) -> bool:
    """Whether a tile has whole blocks of factors, or is part of one."""
    k, blocks = problem.required("lhs").shape[1], _scale_blocks(problem)
    tile_k = min(tiles.tile_k, k)
    return blocks == 1 or not tile_k % (k // blocks) or not k // blocks % tile_k


def illegal_reasons(problem: Problem, tiling: GroupedTiling, chip: Chip) -> tuple[str, ...]:
    """Why the kernels cannot run with `tiling` on `chip`; empty if they can."""
    reasons = excess_reasons(vmem_bytes(problem, tiling), chip)
    if not _divides_blocks(problem, tiling.output):
        block = problem.required("lhs").shape[1] // _scale_blocks(problem)
        reasons += (f"tile_k is {tiling.tile_k}, and scales are of {block} elements of K",)
    return reasons


# VMEM and HBM -------------------------------------------------------------------------------------


def vmem_bytes(problem: Problem, tiling: GroupedTiling) -> dict[str, int]:
    """VMEM that each kernel needs, estimated."""
    tiles = (tiling.output, tiling.dlhs, tiling.drhs)
    return {
        phase: _BYTES[phase](problem, each.clipped(*sizes))
        for phase, each, sizes in zip(_BYTES, tiles, _sizes(problem), strict=True)
    }


def _item(problem: Problem, name: str) -> int:
    """Bytes of an element of lhs or rhs; of gradients, those of what it is without a scale."""
    return numpy_dtype(problem.required(name).dtype).itemsize


def _plain_item(problem: Problem) -> int:
    """Bytes of an element of the operands of gradients."""
    return max(_item(problem, "lhs"), _item(problem, "rhs"), numpy_dtype("bfloat16").itemsize)


def _padded(tiles: Tiles) -> tuple[int, int, int]:
    return _round_up(tiles.tile_m, LANES), _round_up(tiles.tile_k, LANES), _round_up(tiles.tile_n, LANES)


def _output_bytes(problem: Problem, tiles: Tiles) -> int:
    k, count = dimensions(problem)[1], matrices(problem)
    tile_m, tile_k, tile_n = _padded(tiles)
    lhs, rhs = _item(problem, "lhs"), _item(problem, "rhs")
    multiplied = max(lhs, rhs)  # what is narrower becomes as wide, as a value
    out = tile_m * tile_n
    written = numpy_dtype(problem.param("out_dtype")).itemsize
    saved = lhs * count if count > 1 or problem.param("activation") else 0  # the sums, for gradients
    existing = _optional(problem, "existing_out")
    read = 0 if existing is None else numpy_dtype(existing.dtype).itemsize
    blocks = tile_m * tile_k * lhs + count * tile_n * tile_k * rhs + out * (written + saved + read)
    values = (multiplied > lhs) * tile_m * tile_k + count * (multiplied > rhs) * tile_n * tile_k
    sums = count * (1 if tiles.tile_k >= k else 2)  # the products as values, and the scratch
    return 2 * blocks + values * multiplied + sums * out * _FLOAT32_BYTES


def _dlhs_bytes(problem: Problem, tiles: Tiles) -> int:
    item, out_item = _plain_item(problem), _plain_item(problem)
    tile_m, tile_k, tile_n = _padded(tiles)
    inner = _sizes(problem)[1][1]
    if _optional(problem, "up") is not None:  # two products, summed in float32
        out_item = 2 * _FLOAT32_BYTES
    out = tile_m * tile_n
    sums = 1 if tiles.tile_k >= inner else 2
    return 2 * ((tile_m + tile_n) * tile_k * item + out * out_item) + sums * out * _FLOAT32_BYTES


def _drhs_bytes(problem: Problem, tiles: Tiles) -> int:
    item = _plain_item(problem)
    tile_m, tile_k, tile_n = _padded(tiles)
    out = tile_k * tile_n
    return 2 * (tile_m * (tile_k + tile_n) + out) * item + 2 * out * _FLOAT32_BYTES


_BYTES = {"output": _output_bytes, "gradient of lhs": _dlhs_bytes, "gradient of rhs": _drhs_bytes}


def _items(problem: Problem, phase: str) -> tuple[int, int, int]:
    """Bytes of an element of what a kernel multiplies, and of its result."""
    if phase != "output":
        item = _plain_item(problem)
        return item, item, item
    return _item(problem, "lhs"), _item(problem, "rhs"), numpy_dtype(problem.param("out_dtype")).itemsize


class ExampleVisits(NamedTuple):
    """Tiles of rows that are visited for a group, in order.

    Attributes:
        new_tile, new_group: whether the one before is of another tile, and of another group.
        rows: how many are multiplied.
    """

    new_tile: np.ndarray
    new_group: np.ndarray
    rows: np.ndarray


@functools.lru_cache(maxsize=64)
def _example_visits(m: int, groups: int, tile_m: int, skewed: bool, empty: bool) -> ExampleVisits:
    sizes = example_sizes(m, groups) if skewed else np.full(groups, m // max(groups, 1))
    return visits_of_sizes(sizes, m, tile_m, slices(tile_m), empty=empty)


def visits_of_sizes(
    sizes: np.ndarray, m: int, tile_m: int, at_once: tuple[int, ...], *, empty: bool
) -> ExampleVisits:
    """The visits of groups of these sizes; see `visits`, which works them out on the device.

    Args:
        m: how many rows there are.
        at_once: how many rows may be multiplied of a tile that groups share; the last is `tile_m`.
        empty: whether groups without rows are visited, too.
    """
    sizes = sizes.astype(np.int64)
    ends = np.cumsum(sizes)
    first_tile = np.minimum(ends - sizes, m - 1) // tile_m
    count = np.where(sizes > 0, (ends - 1) // tile_m - first_tile + 1, int(empty))
    group = np.repeat(np.arange(len(sizes)), count)
    tile = np.arange(len(group)) + (first_tile - np.cumsum(count) + count)[group]
    first = np.clip((ends - sizes)[group] - tile * tile_m, 0, tile_m)
    end = np.clip(ends[group] - tile * tile_m, 0, tile_m)
    fitting = np.searchsorted(at_once, end - first // ROW_UNIT * ROW_UNIT)
    shared = np.where(end > first, np.array(at_once)[fitting], 0)
    return ExampleVisits(
        np.diff(tile, prepend=-1) != 0,
        np.diff(group, prepend=-1) != 0,
        np.where(end - first == tile_m, tile_m, shared),
    )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# Cost ---------------------------------------------------------------------------------------------


def costs(problem: Problem) -> dict[str, Cost]:
    """Unavoidable work if every row belongs to a group; arrays are moved once.

    Matrices of groups without rows need not be read: those of `example_sizes` are not counted.
    """
    m, k, n, groups = dimensions(problem)
    count, lhs, rhs = matrices(problem), problem.required("lhs"), problem.required("rhs")
    weights = rhs.nbytes if _optional(problem, "up") is None else 2 * rhs.nbytes
    used = weights // max(groups, 1) * int(np.count_nonzero(example_sizes(m, groups)))
    out_bytes = m * n * numpy_dtype(problem.param("out_dtype")).itemsize
    sums_bytes = m * n * count * _plain_item(problem)  # what gradients are computed of
    flops = 2 * m * k * n * count
    return {
        "forward": Cost(
            flops=flops, matmul_flops=flops, bytes_read=lhs.nbytes + used, bytes_written=out_bytes
        ),
        "backward": Cost(
            flops=2 * flops,
            matmul_flops=2 * flops,
            bytes_read=lhs.nbytes + used + max(out_bytes, sums_bytes),
            bytes_written=lhs.nbytes + weights,
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

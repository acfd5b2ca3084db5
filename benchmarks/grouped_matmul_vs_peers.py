"""Our grouped matmul beside JAX's megablox and Tokamax's ragged_dot, each at its best tiles.

    python benchmarks/grouped_matmul_vs_peers.py [--chips v5e,v6e,tpu7x] [--rows 16384,65536] [--both]
        [--passes forward,dlhs,drhs] [--match TEXT] [--candidates 4] [--products 2147483648] [--seconds 120]
        [--resume] [--json FILE]

Scored by the TPU compiler's schedule, the same scorer for all; nothing runs on a TPU. bfloat16, shapes of
three models, groups of equal and of skewed sizes. *ratio* is our time over that of the best peer: below 1,
ours is faster. Of each kernel, the tiles that a roofline finds best are compiled, as many and as long for
each. Peers may use as much VMEM as ours, by a flag of XLA, which is more than they get by default. Tokamax
takes part if it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from autotune.problem import ArraySpec
from autotune.schedule.operands import kernel_calls
from autotune.schedule.program import load_program
from autotune.score import Score, Workload
from autotune.score.schedule import SPARSE_CORE_OPTIONS, explain_program
from bridge import topology
from bridge.chips import Chip, chip
from tpu_kernels._vmem import vmem_allowed
from tpu_kernels.grouped_matmul import space, visits
from tpu_kernels.grouped_matmul.product import Static, product, summed
from tpu_kernels.grouped_matmul.tiling import Tiles, slices

RESULTS = Path(__file__).parent / "results" / "grouped_matmul_vs_peers.json"
PASSES = ("forward", "dlhs", "drhs")
ROWS = (4096, 16384, 65536, 262144)
MODELS = {
    "Mixtral 8x7B": (8, 4096, 14336),
    "Qwen3 30B-A3B": (128, 2048, 768),
    "DeepSeek V3": (256, 7168, 2048),
    "DeepSeek V3, half of the experts": (128, 7168, 2048),
}
"""Groups, and K and N of the products that lead up; those that lead down have them the other way round.

With matrices of 7 GB, what libtpu 0.0.52 compiles for v5e can't be executed here: that is what the half is
for."""

ITEM, SUM_ITEM = 2, 4
"""Bytes of a bfloat16, and of what products are summed in."""


@dataclass(frozen=True)
class Case:
    """One product: rows [M, K] by matrices [G, K, N] (`forward`), or a gradient of it.

    `dlhs` is [M, N] by the transposed matrices, `drhs` the sum over each group's rows of [M, K] by [M, N].
    """

    model: str
    direction: str
    passed: str
    m: int
    k: int
    n: int
    groups: int

    def __str__(self) -> str:
        return f"{self.model} {self.direction}, {self.m} rows, {self.passed}"

    @property
    def dims(self) -> tuple[int, int, int]:
        """m, k and n as tiles count them: for `dlhs` k is what is summed over."""
        return (self.m, self.n, self.k) if self.passed == "dlhs" else (self.m, self.k, self.n)

    @property
    def flops(self) -> int:
        """Useful operations."""
        return 2 * self.m * self.k * self.n

    def sizes(self) -> dict[str, np.ndarray]:
        """The sizes of groups that are scored."""
        return {
            "equal": np.full(self.groups, self.m // self.groups, np.int32),
            "zipf": space.example_sizes(self.m, self.groups),
        }

    def least_bytes(self, sizes: np.ndarray) -> tuple[int, int]:
        """Bytes that must be read and written. Matrices of groups without rows are not read."""
        matrix = ITEM * self.k * self.n
        lhs, out = ITEM * self.m * self.k, ITEM * self.m * self.n
        used = int(np.count_nonzero(sizes)) * matrix
        if self.passed == "drhs":
            return lhs + out, self.groups * matrix
        return (lhs + used, out) if self.passed == "forward" else (out + used, lhs)


def selection(rows: list[int], both: bool) -> Iterator[Case]:
    """The products."""
    for (model, (groups, k, n)), m, direction in itertools.product(MODELS.items(), rows, ("up", "down")):
        if direction == "down":
            if not both:
                continue
            k, n = n, k
        for passed in PASSES:
            yield Case(model, direction, passed, m, k, n, groups)


# The kernels ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One kernel with one choice of tiles, and how many blocks of an input it holds at a time."""

    kernel: str
    tiles: Tiles
    buffers: int = 2

    def __str__(self) -> str:
        sizes = f"{self.tiles.tile_m}/{self.tiles.tile_k}/{self.tiles.tile_n}"
        return sizes + (f" x{self.buffers}" if self.buffers != 2 else "")


Kernel = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def ours(case: Case, candidate: Candidate, on: Chip) -> Kernel:
    """The kernels below the public function: a tiling of it has tiles of all three."""
    tiles = candidate.tiles
    dtype = jnp.dtype(jnp.bfloat16)
    static = Static(tiles, tiles, tiles, case.passed == "dlhs", dtype, vmem_allowed(on))

    def call(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        starts, ends = visits.row_ranges(sizes, case.m, case.groups, None)
        return (summed if case.passed == "drhs" else product)(static, lhs, rhs, starts, ends)

    return call


def megablox(case: Case, candidate: Candidate, on: Chip) -> Kernel:
    del on
    kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    options: dict[str, Any] = {"preferred_element_type": jnp.bfloat16, "tiling": _sizes(candidate.tiles)}
    if case.passed == "drhs":
        return lambda lhs, grad, sizes: kernels.tgmm(lhs.T, grad, sizes, **options)
    options["transpose_rhs"] = case.passed == "dlhs"
    return lambda lhs, rhs, sizes: kernels.gmm(lhs, rhs, sizes, **options)


def tokamax(case: Case, candidate: Candidate, on: Chip) -> Kernel:
    # Private: the public function asks the device for its kind, and there is none.
    del on
    kernels = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel")
    options: dict[str, Any] = {
        "precision": (jax.lax.Precision.DEFAULT,) * 2,
        "out_dtype": jnp.bfloat16,
        "tiling": _sizes(candidate.tiles),
        "input_buffer_count": candidate.buffers,
    }
    if case.passed == "drhs":
        return lambda lhs, grad, sizes: kernels.tgmm(lhs.T, grad, group_sizes=sizes, **options)
    options["transpose_rhs"] = case.passed == "dlhs"
    return lambda lhs, rhs, sizes: kernels.gmm(lhs, rhs, group_sizes=sizes, **options)


def _sizes(tiles: Tiles) -> tuple[int, int, int]:
    return tiles.tile_m, tiles.tile_k, tiles.tile_n


KERNELS: Mapping[str, Callable[[Case, Candidate, Chip], Kernel]] = {
    "ours": ours,
    "megablox": megablox,
    "Tokamax": tokamax,
}


def installed() -> list[str]:
    """The kernels that can be compiled here."""
    return [name for name in KERNELS if name != "Tokamax" or importlib.util.find_spec("tokamax")]


# Which tiles are tried ------------------------------------------------------------------------------

TILES_M = (128, 256, 512, 1024)


def candidates(case: Case, kernel: str, on: Chip, count: int, products: int) -> list[Candidate]:
    """Tiles that fit, those with the least time by the roofline first: of equal and skewed sizes in turns.

    A step multiplies no more than `products`: all of them are code, which takes time to compile.
    """
    m, k, n = case.dims
    tiles = [
        Tiles(tile_m, tile_k, tile_n)
        for tile_m, tile_k, tile_n in itertools.product(TILES_M, _parts(k), _parts(n))
        if tile_m * tile_k * tile_n <= products and m % tile_m == 0
    ]
    found = [Candidate(kernel, each) for each in tiles]
    if kernel == "Tokamax":
        found += [Candidate(kernel, each, 3) for each in tiles]
    found = [each for each in found if vmem_bytes(case, each) <= vmem_allowed(on)]
    orders = [
        sorted(found, key=lambda each, sizes=sizes: estimate(case, each, sizes, on))
        for sizes in case.sizes().values()
    ]
    turns = dict.fromkeys(each for pair in zip(*orders, strict=True) for each in pair)
    return list(turns)[:count]


def _parts(size: int) -> list[int]:
    """Powers of two, and equal parts of the whole, that are multiples of 128."""
    halves = {size >> shift for shift in range(4) if (size >> shift) % 128 == 0}
    return sorted(halves | {tile for tile in (256, 512, 1024, 2048, 4096) if tile < size})


def vmem_bytes(case: Case, candidate: Candidate) -> int:
    """VMEM of blocks and sums, about the same for all kernels."""
    m, k, n = _sizes(candidate.tiles)
    if case.passed == "drhs":
        return candidate.buffers * ITEM * m * (k + n) + k * n * (2 * ITEM + 2 * SUM_ITEM)
    return candidate.buffers * ITEM * m * k + 2 * ITEM * k * n + m * n * (2 * ITEM + 2 * SUM_ITEM)


def visits_of(case: Case, candidate: Candidate, sizes: np.ndarray) -> space.ExampleVisits:
    """What the kernel visits. Peers multiply a whole tile each time; ours, a slice of it."""
    tile_m = candidate.tiles.tile_m
    at_once = slices(tile_m) if candidate.kernel == "ours" else (tile_m,)
    return space.visits_of_sizes(sizes, case.m, tile_m, at_once, empty=case.passed == "drhs")


def estimate(case: Case, candidate: Candidate, sizes: np.ndarray, on: Chip) -> float:
    """Seconds, by a roofline of each step, the same for all kernels."""
    made = visits_of(case, candidate, sizes)
    summed = case.passed == "drhs"
    return space.seconds_of_visits(
        made, candidate.tiles, case.dims[1:], on, items=(ITEM, ITEM, ITEM), summed=summed
    )


# Scores ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The prediction for one kernel with its best tiles.

    Attributes:
        case, chip, kernel, sizes, tiles: what was scored.
        milliseconds: the time.
        visits: tiles of rows that are visited, for each tile of the other dimensions.
        teraflops: useful operations in that time.
        limit: `mxu` or `hbm`: which of both needs more time at least, at published peaks.
        roofline_share: that least time over the time.
        reachable_share: the same with the rates that long programs reach.
        bound, mxu, hbm, confidence: of the score.
        tried: how many choices of tiles were scored, of those with at most
        products: products in a step.
        default: our default tiles, and
        default_milliseconds: the time with them. None for peers.
    """

    case: str
    chip: str
    kernel: str
    sizes: str
    tiles: str
    milliseconds: float
    visits: int
    teraflops: float
    limit: str
    roofline_share: float
    reachable_share: float
    bound: str
    mxu: float
    hbm: float
    confidence: str
    tried: int
    products: int
    default: str | None = None
    default_milliseconds: float | None = None


def avals(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of a kernel."""
    k, n, matrices = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((case.m, case.k), (case.m, case.n), (case.groups, case.k, case.n))
    )
    sizes = jax.ShapeDtypeStruct((case.groups,), jnp.int32)
    return {"forward": (k, matrices, sizes), "dlhs": (n, matrices, sizes), "drhs": (k, n, sizes)}[case.passed]


def scores(case: Case, candidate: Candidate, on: Chip, timeout: float) -> dict[str, Score]:
    """The score with each of the sizes. They are data, so one program serves all."""
    work = Workload(
        f"{candidate.kernel} {candidate}, {case}",
        KERNELS[candidate.kernel](case, candidate, on),
        avals(case),
        matmul_flops=case.flops,
    )
    options = {
        **dict.fromkeys(SPARSE_CORE_OPTIONS, False),
        "xla_tpu_scoped_vmem_limit_kib": vmem_allowed(on) // 1024,
    }
    found = {}
    with topology.compile_for(
        work.fn, work.avals, on, dumps=True, compiler_options=options, timeout=timeout
    ) as compiled:
        assert compiled.dumps is not None
        program = load_program(compiled.dumps, on)
        for name, sizes in case.sizes().items():
            read, written = case.least_bytes(sizes)
            known = replace(work, values={2: sizes}, bytes_read=read, bytes_written=written)
            calls = kernel_calls(compiled.jaxpr, {2: sizes})
            found[name] = explain_program(program, calls, known, compiled.versions).score
    return found


def default_of(case: Case, on: Chip) -> Candidate:
    """Our default tiles."""
    arrays = {
        "lhs": ArraySpec((case.m, case.k), "bfloat16"),
        "rhs": ArraySpec((case.groups, case.k, case.n), "bfloat16"),
        "group_sizes": ArraySpec((case.groups,), "int32"),
    }
    tiling = space.default_tiling(space.problem_of(arrays, out_dtype="bfloat16"), on)
    tiles = {"forward": tiling.output, "dlhs": tiling.dlhs, "drhs": tiling.drhs}[case.passed]
    return Candidate("ours", tiles.clipped(*case.dims))


def best(
    case: Case, on: Chip, count: int, products: int, seconds: float, log: list[dict[str, Any]]
) -> list[Row]:
    """The row of each kernel with each of the sizes, at the tiles that score best; appends to `log`."""
    rows = []
    default = default_of(case, on)
    for kernel in installed():
        wanted = candidates(case, kernel, on, count, products)
        if kernel == "ours" and math.prod(_sizes(default.tiles)) <= products:
            wanted = [default, *(each for each in wanted if each != default)][:count]
        until = time.monotonic() + seconds
        found: dict[Candidate, dict[str, Score]] = {}
        for candidate in wanted:
            left = until - time.monotonic()
            if found and left <= 0:
                break
            try:
                scored = scores(case, candidate, on, max(left, seconds / 2))
            except Exception as error:  # one choice of tiles that does not compile must not hide the others
                print(f"no prediction: {on.name} {kernel} {candidate} {case}: {str(error)[:120]!r}")
                continue
            doubtful = [score.reasons[0] for score in scored.values() if score.confidence == "low"]
            if doubtful:
                print(f"no prediction: {on.name} {kernel} {candidate} {case}: {doubtful[0]}")
                continue
            found[candidate] = scored
            log.append(
                {
                    "case": str(case),
                    "chip": on.name,
                    "kernel": kernel,
                    "tiles": str(candidate),
                    "milliseconds": {name: score.time_s * 1e3 for name, score in scored.items()},
                }
            )
        for name in case.sizes() if found else ():
            winner = min(found, key=lambda each, name=name: found[each][name].time_s)
            row = row_of(case, on, winner, name, found[winner][name], len(found), products)
            if kernel == "ours" and default in found:
                usual = found[default][name].time_s * 1e3
                row = replace(row, default=str(default), default_milliseconds=usual)
            rows.append(row)
    return rows


def row_of(
    case: Case, on: Chip, candidate: Candidate, name: str, score: Score, tried: int, products: int
) -> Row:
    """The row of one score."""
    sizes = case.sizes()[name]
    cores = on.cores_per_device / on.tensor_cores
    moved = sum(case.least_bytes(sizes))
    computing = case.flops / (on.bf16_flops_per_second * cores)
    copying = moved / (on.hbm_bytes_per_second * cores)
    reachable = max(
        case.flops / (on.mxu_flops_per_cycle * on.sustained_clock_hz * on.cores_per_device),
        copying / on.hbm_efficiency,
    )
    return Row(
        str(case),
        on.name,
        candidate.kernel,
        name,
        str(candidate),
        score.time_s * 1e3,
        len(visits_of(case, candidate, sizes).rows),
        case.flops / score.time_s / 1e12,
        "mxu" if computing >= copying else "hbm",
        max(computing, copying) / score.time_s,
        reachable / score.time_s,
        score.bound,
        score.units.get("mxu", 0.0),
        score.units.get("hbm", 0.0),
        score.confidence,
        tried,
        products,
    )


def show(rows: list[Row]) -> None:
    """The rows of one case on one chip, and how ours compares."""
    for name in dict.fromkeys(row.sizes for row in rows):
        chosen = [row for row in rows if row.sizes == name]
        for row in chosen:
            print(
                f"{row.case:42} {row.chip:6} {name:5} {row.kernel:8} {row.tiles:18} "
                f"{row.milliseconds:9.4f} ms {row.visits:5} visits  "
                f"{row.roofline_share:6.1%} of roofline ({row.limit}), "
                f"{row.reachable_share:6.1%} of reachable  mxu {row.mxu:4.0%}  bound: {row.bound}"
            )
        times = ratio(chosen)
        if times is not None:
            mine = next(row for row in chosen if row.kernel == "ours")
            usual = mine.default_milliseconds
            print(
                f"{'':42} {mine.chip:6} {name:5} ratio {times:.3f}"
                + (f"; default {mine.default}: {usual / mine.milliseconds:.3f} of our best" if usual else ""),
                flush=True,
            )


def ratio(rows: list[Row]) -> float | None:
    """Our time over that of the best peer; of rows of one case, chip and sizes."""
    mine = [row.milliseconds for row in rows if row.kernel == "ours"]
    peers = [row.milliseconds for row in rows if row.kernel != "ours"]
    return mine[0] / min(peers) if mine and peers else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chips", default="v5e,v6e,tpu7x", help="names with commas")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows with commas")
    parser.add_argument("--passes", default=",".join(PASSES), help="of forward, dlhs and drhs")
    parser.add_argument("--both", action="store_true", help="also the products that lead down")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--candidates", type=int, default=4, help="tiles to compile of each kernel, at most")
    parser.add_argument(
        "--products", type=int, default=1 << 31, help="of one step, at most: more takes longer to compile"
    )
    parser.add_argument("--seconds", type=float, default=120, help="for each kernel in each case, about")
    parser.add_argument("--resume", action="store_true", help="keep the cases that the file has")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    del sys.argv[1:]  # Tokamax reads the command line, too, and stumbles over what it does not know

    rows: list[Row] = []
    log: list[dict[str, Any]] = []
    if options.resume and options.json.exists():
        report = json.loads(options.json.read_text())
        rows, log = [Row(**row) for row in report["rows"]], report["scored"]
    have = {(row.case, row.chip) for row in rows}
    wanted = [
        case
        for case in selection([int(rows) for rows in options.rows.split(",")], options.both)
        if options.match in str(case) and case.passed in options.passes.split(",")
    ]
    names: list[str] = options.chips.split(",")
    for case, name in itertools.product(wanted, names):
        if (str(case), name) in have:
            continue
        found = best(case, chip(name), options.candidates, options.products, options.seconds, log)
        show(found)
        rows += found
        write(options.json, rows, log)  # after each case: a whole run takes hours
    summarise(rows)


def write(path: Path, rows: list[Row], log: list[dict[str, Any]]) -> None:
    """The report so far."""
    versions = {name: topology.compiler_versions()[name] for name in ("jax", "libtpu")}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["tokamax"] = importlib.metadata.version("tokamax")
    report = {
        "versions": versions,
        "dtype": "bfloat16",
        "rows": [asdict(row) for row in rows],
        "scored": log,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def summarise(rows: list[Row]) -> None:
    """In how many cases ours is fastest, and by how much."""
    for name in dict.fromkeys(row.sizes for row in rows):
        of_sizes = [row for row in rows if row.sizes == name]
        keys = dict.fromkeys((row.case, row.chip) for row in of_sizes)
        found = [ratio([row for row in of_sizes if (row.case, row.chip) == key]) for key in keys]
        ratios = [each for each in found if each is not None]
        if ratios:
            print(
                f"{name}: {len(ratios)} cases: ours is fastest in {sum(r < 1 for r in ratios)}, by 10% or "
                f"more in {sum(r <= 0.9 for r in ratios)}; ratios {min(ratios):.3f} to {max(ratios):.3f}"
            )


if __name__ == "__main__":
    main()

"""Predicted times beside published ones: how far the score `schedule` can be trusted.

    python benchmarks/schedule_vs_published.py [--tokamax] [--wheel FILE.whl] [--entries 24] [--resume]
        [--json FILE] [--plot FILE.svg]

Nothing runs on a TPU: the kernels are compiled for the chip and their schedules executed. See
benchmarks/README.md for where the published times come from and how to read the table.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import schedule_tokamax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.report.svg import element, picture, text, title
from autotune.score import Workload
from autotune.score.schedule import ScheduleScorer
from bridge.chips import chip
from bridge.topology import compiler_versions

RESULTS = Path(__file__).parent / "results" / "schedule_vs_published.json"
DISPATCH_MS = 0.108
"""The documentation times calls with `timeit`, which counts the way to the device and back. This is what the
row of 1024 with large tiles leaves after its predicted time, so that row is no independent check."""


@dataclass(frozen=True)
class Published:
    """A time somebody measured, and how to compile what was measured.

    Attributes:
        source: whose table it is.
        kernel: what ran.
        name: the problem.
        chip: the chip.
        milliseconds: the published time.
        config: tiles and the like, as published.
        fitted: whether a constant of this project was fitted to it.
        workload: makes what is compiled.
    """

    source: str
    kernel: str
    name: str
    chip: str
    milliseconds: float
    config: Mapping[str, Any]
    fitted: bool
    workload: Callable[[], Workload]


@dataclass(frozen=True)
class Row:
    """One comparison; `ratio` is published over predicted."""

    source: str
    kernel: str
    name: str
    chip: str
    config: Mapping[str, Any]
    published_ms: float
    predicted_ms: float
    ratio: float
    fitted: bool
    bound: str
    confidence: str
    reasons: tuple[str, ...]


# JAX's matmul documentation -----------------------------------------------------------------------


def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, steps: int) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == steps - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(x: jax.Array, y: jax.Array, *, tile_m: int, tile_k: int, tile_n: int) -> jax.Array:
    """A matmul with float32 accumulation in VMEM, one block of the result after the other."""
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        functools.partial(matmul_kernel, steps=k // tile_k),
        grid=(m // tile_m, n // tile_n, k // tile_k),
        in_specs=[
            pl.BlockSpec((tile_m, tile_k), lambda i, j, k: (i, k)),
            pl.BlockSpec((tile_k, tile_n), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((tile_m, tile_n), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((tile_m, tile_n), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="matmul",
    )(x, y)


# (size, (tile_m, tile_k, tile_n), milliseconds less DISPATCH_MS, whether a constant was fitted to it)
JAX_MATMUL_V5E = (
    (1024, (128, 128, 128), 0.190, False),
    (4096, (128, 128, 128), 11.66, True),
    (8192, (128, 128, 128), 91.7, True),
    (1024, (512, 1024, 1024), 0.019, True),
    (4096, (512, 1024, 1024), 0.781, False),
    (8192, (512, 1024, 1024), 5.99, False),
)


def jax_matmuls() -> Iterator[Published]:
    """The table for v5e of JAX's documentation, "Matrix multiplication" of Pallas on TPU."""
    for size, (tile_m, tile_k, tile_n), milliseconds, fitted in JAX_MATMUL_V5E:
        fn = functools.partial(matmul, tile_m=tile_m, tile_k=tile_k, tile_n=tile_n)
        aval = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
        name = f"matmul {size} cube, tiles {tile_m}/{tile_k}/{tile_n}"
        work = Workload(name, fn, (aval, aval), matmul_flops=2 * size**3)
        config = {"tile_m": tile_m, "tile_k": tile_k, "tile_n": tile_n}
        yield Published(
            "JAX documentation", "matmul", name, "v5e", milliseconds, config, fitted, lambda work=work: work
        )


def tokamax_times(table: schedule_tokamax.Table) -> Iterator[Published]:
    """The times of one of Tokamax's tables."""
    for entry in table.entries:
        config = schedule_tokamax.short(entry.config)
        source = f"Tokamax {table.release}"
        yield Published(
            source, entry.kernel, entry.name, entry.chip, entry.milliseconds, config, False, entry.workload
        )


# Comparison ---------------------------------------------------------------------------------------


def compare(published: Published) -> Row | str:
    """Predicts the time of one entry; or says why it cannot."""
    try:
        score = ScheduleScorer(chip(published.chip)).score(published.workload())
    except Exception as error:  # one entry that does not compile must not hide the others
        return f"{published.chip} {published.name}: {type(error).__name__}: {str(error)[:200]}"
    predicted = score.time_s * 1e3
    return Row(
        published.source,
        published.kernel,
        published.name,
        published.chip,
        published.config,
        published.milliseconds,
        predicted,
        published.milliseconds / predicted,
        published.fitted,
        score.bound,
        score.confidence,
        score.reasons,
    )


@dataclass(frozen=True)
class Summary:
    """The errors of one kernel on one chip, rows that a constant was fitted to left out.

    Attributes:
        group: source, kernel and chip.
        rows: how many.
        median_error, ninth_decile_error: of max(ratio, 1 / ratio) - 1.
        bias: median of published over predicted times.
        low_confidence: rows of low confidence among them.
    """

    group: str
    rows: int
    median_error: float
    ninth_decile_error: float
    bias: float
    low_confidence: int


def compare_unless(known: Row | None, published: Published) -> Row | str:
    """The row that is known; else `compare`."""
    return known or compare(published)


def summaries(rows: Sequence[Row]) -> Iterator[Summary]:
    """The errors of each kernel on each chip."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if not row.fitted:
            groups.setdefault(f"{row.source}, {row.kernel}, {row.chip}", []).append(row)
    for name, group in groups.items():
        errors = sorted(max(row.ratio, 1 / row.ratio) - 1 for row in group)
        ninth = errors[math.ceil(0.9 * len(errors)) - 1]
        low = sum(row.confidence == "low" for row in group)
        bias = statistics.median(row.ratio for row in group)
        yield Summary(name, len(errors), statistics.median(errors), ninth, bias, low)


def print_table(rows: Sequence[Row]) -> None:
    width = max(len(row.name) for row in rows)
    print(f"{'chip':6} {'problem':{width}} {'published':>10} {'predicted':>10} {'ratio':>6}  bound")
    for row in rows:
        note = " (fitted to)" if row.fitted else ""
        note += "" if row.confidence != "low" else f" low confidence: {row.reasons[0]}"
        print(
            f"{row.chip:6} {row.name:{width}} {row.published_ms:10.3f} {row.predicted_ms:10.3f} "
            f"{row.ratio:6.3f}  {row.bound}{note}"
        )


def plot(rows: Sequence[Row]) -> str:
    """Published over predicted times, both on logarithmic axes, as SVG."""
    size, margin = 420.0, 46.0
    logs = [math.log10(value) for row in rows for value in (row.published_ms, row.predicted_ms)]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    colours = {"v5e": "#2f6fde", "v5p": "#2a9d6f", "v6e": "#8b5cf6", "tpu7x": "#e07b39"}

    def place(value: float) -> float:
        return margin + (math.log10(value) - low) / (high - low) * (size - 2 * margin)

    parts = [element("rect", width=size, height=size, fill="#ffffff")]
    for factor, dash in ((1.0, "0"), (1.25, "4 4"), (0.8, "4 4")):
        ends = [10.0**low, 10.0**high]
        parts.append(
            element(
                "line",
                x1=place(ends[0]),
                x2=place(ends[1]),
                y1=size - place(ends[0]) - math.log10(factor) / (high - low) * (size - 2 * margin),
                y2=size - place(ends[1]) - math.log10(factor) / (high - low) * (size - 2 * margin),
                stroke="#8794a5",
                stroke_dasharray=dash,
            )
        )
    for power in range(low, high + 1):
        parts.append(text(place(10.0**power), size - margin + 16, f"{10.0**power:g} ms", anchor="middle"))
        parts.append(text(margin - 6, size - place(10.0**power) + 4, f"{10.0**power:g}", anchor="end"))
    for row in rows:
        x, y = place(row.predicted_ms), size - place(row.published_ms)
        name = title(f"{row.chip} {row.name}: {row.ratio:.3f}")
        parts.append(element("circle", name, cx=x, cy=y, r=4, fill=colours[row.chip], fill_opacity=0.75))
    for number, name in enumerate(sorted({row.chip for row in rows})):
        parts.append(element("circle", cx=margin + 12, cy=34.0 + 16 * number, r=4, fill=colours[name]))
        parts.append(text(margin + 22, 38.0 + 16 * number, name))
    parts.append(text(size - margin, size - 10, "predicted; dashed: 25% off", anchor="end"))
    parts.append(text(margin - 40, 12.0, "published, ms"))
    style = element("style", "text{font:11px system-ui,sans-serif;fill:#5b6675}")
    return picture(size, size, [style, *parts], "published over predicted times")


def same_problem(row: Row | Published) -> str:
    """What tells one problem from another."""
    return json.dumps([row.source, row.chip, row.name, row.config], sort_keys=True)


def report(about: Mapping[str, Any], results: Sequence[Row | str]) -> dict[str, Any]:
    """What is written as JSON."""
    rows = [row for row in results if isinstance(row, Row)]
    return {
        **about,
        "summary": [asdict(group) for group in summaries(rows)],
        "failures": [result for result in results if isinstance(result, str)],
        "rows": [asdict(row) for row in rows],
    }


def wanted_times(options: argparse.Namespace) -> tuple[list[Published], dict[str, Any]]:
    """The published times to compare with, and what a report says of how they were chosen."""
    versions = {name: compiler_versions()[name] for name in ("jax", "libtpu")}
    tables: list[schedule_tokamax.Table] = []
    no_times: dict[str, str] = {}
    if options.tokamax or options.wheel:
        schedule_tokamax.check_sizes()
        installed = schedule_tokamax.Release.installed()
        versions["tokamax"] = installed.version
        if options.tokamax:
            tables += installed.tables(options.entries)
            no_times = installed.chips_without_times()
        if options.wheel:
            other = schedule_tokamax.Release.of_wheel(options.wheel)
            tables += other.tables(options.entries, ["ragged_dot"])
    sample = {
        "entries": options.entries,
        "chosen": "evenly spaced in the order of the table, first and last included",
        "tables": [
            {name: getattr(table, name) for name in ("release", "chip", "kernel", "problems", "timed")}
            | {"sampled": len(table.entries)}
            for table in tables
        ],
        "no_times": no_times,
    }
    wanted = [*jax_matmuls(), *(time for table in tables for time in tokamax_times(table))]
    return wanted, {"versions": versions, "sample": sample}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokamax", action="store_true", help="also the tables of the installed Tokamax")
    parser.add_argument("--wheel", type=Path, help="also the tables of ragged_dot of another release")
    parser.add_argument("--entries", type=int, default=24, help="sampled entries of each table of Tokamax")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the file of --json has")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the rows")
    parser.add_argument("--plot", type=Path, help="where to write a picture")
    options = parser.parse_args()
    del sys.argv[1:]  # Tokamax reads the command line, too, and stumbles over what it does not know

    wanted, about = wanted_times(options)
    kept: dict[str, Row] = {}
    if options.resume and options.json.is_file():
        before = json.loads(options.json.read_text())
        if before["versions"] != about["versions"]:
            raise SystemExit(f"{options.json} was made with {before['versions']}: leave out --resume")
        kept = {same_problem(row): row for row in (Row(**fields) for fields in before["rows"])}
    options.json.parent.mkdir(exist_ok=True)
    results: list[Row | str] = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        tasks = [threads.submit(compare_unless, kept.get(same_problem(time)), time) for time in wanted]
        for result in (task.result() for task in tasks):
            results.append(result)
            if isinstance(result, Row):
                kept.pop(same_problem(result), None)
            done = [*results, *kept.values()]  # rows kept for later are not lost if this is interrupted
            options.json.write_text(json.dumps(report(about, done), indent=2) + "\n")
            print(f"{len(results)} of {len(wanted)}", file=sys.stderr, flush=True)
    rows = [result for result in results if isinstance(result, Row)]
    print_table(rows)
    print()
    for group in summaries(rows):
        print(
            f"{group.group}: {group.rows} rows, median error {group.median_error:.1%}, 90th percentile "
            f"{group.ninth_decile_error:.1%}, median of published over predicted {group.bias:.3f}"
        )
    for name, why in about["sample"]["no_times"].items():
        print(f"no published times for {name}: {why}")
    for failure in (result for result in results if isinstance(result, str)):
        print(f"no prediction: {failure}")
    if options.plot:
        options.plot.write_text(plot(rows))


if __name__ == "__main__":
    main()

"""Predicted times beside published ones: how far the score `schedule` can be trusted.

    python benchmarks/schedule_vs_published.py [--tokamax] [--entries 12] [--json FILE] [--plot FILE.svg]

Nothing runs on a TPU: the kernels are compiled for the chip and their schedules executed. See
benchmarks/README.md for where the published times come from and how to read the table.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.resources
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.report.svg import element, picture, text, title
from autotune.score import Workload
from autotune.score.schedule import ScheduleScorer
from bridge.chips import chip

RESULTS = Path(__file__).parent / "results" / "schedule_vs_published.json"
DISPATCH_MS = 0.108
"""The documentation times calls with `timeit`, which counts the way to the device and back. This is what the
row of 1024 with large tiles leaves after its predicted time, so that row is no independent check."""


@dataclass(frozen=True)
class Published:
    """A time somebody measured, and how to compile what was measured.

    Attributes:
        source: whose table it is.
        name: the problem.
        chip: the chip.
        milliseconds: the published time.
        fitted: whether a constant of this project was fitted to it.
        workload: makes what is compiled.
    """

    source: str
    name: str
    chip: str
    milliseconds: float
    fitted: bool
    workload: Callable[[], Workload]


@dataclass(frozen=True)
class Row:
    """One comparison; `ratio` is published over predicted."""

    source: str
    name: str
    chip: str
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
        yield Published("JAX documentation", name, "v5e", milliseconds, fitted, lambda work=work: work)


# Tokamax's tuning tables --------------------------------------------------------------------------

TOKAMAX_TABLES = {"v5e": "tpu_v5_lite", "tpu7x": "tpu7x"}


def ragged_entries(chip_name: str, entries: int) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    """A sample of Tokamax's tuning table for ragged_dot: problem, the tiles found best, milliseconds."""
    folder = importlib.resources.files("tokamax") / "data" / "autotuning" / TOKAMAX_TABLES[chip_name]
    table = json.loads((folder / "pallas_mosaic_tpu_ragged_dot.json").read_text())
    found = []
    for recorded, results in table.items():
        problem = json.loads(recorded)
        if results and not problem["return_residuals"]:
            (config, result), *_ = results.items()
            found.append((problem, json.loads(config), statistics.median(result["evaluation_times_ms"])))
    chosen = np.random.default_rng(0).choice(len(found), min(entries, len(found)), replace=False)
    return [found[place] for place in sorted(chosen)]


def tokamax_ragged_dots(chip_name: str, entries: int) -> Iterator[Published]:
    """A sample of the times of Tokamax's ragged_dot kernels, with the tiles that its tuner found best."""
    for problem, config, milliseconds in ragged_entries(chip_name, entries):
        name = f"ragged_dot {ragged_kind(problem)} {problem['lhs']} {problem['rhs']}"
        make = functools.partial(ragged_workload, name, problem, config)
        yield Published("Tokamax", name, chip_name, milliseconds, False, make)


def ragged_kind(problem: dict[str, Any]) -> str:
    """`forward`, or the gradient of the left (`dlhs`) or right side (`drhs`)."""
    numbers = problem["ragged_dot_dimension_numbers"]
    if not numbers["rhs_group_dimensions"]:
        return "drhs"
    return "dlhs" if numbers["dot_dimension_numbers"][0][1] == [2] else "forward"


def ragged_workload(name: str, problem: dict[str, Any], config: dict[str, Any]) -> Workload:
    """Tokamax's own kernel for a problem of its table, with the tiles of `config`."""
    # Private: the public function asks the device for its kind, and there is none.
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as kernels  # pyright: ignore[reportMissingImports]

    kind = ragged_kind(problem)
    common: dict[str, Any] = {
        "precision": (jax.lax.Precision.DEFAULT,) * 2,
        "out_dtype": jnp.bfloat16,
        "tiling": (config["tile_m"], config["tile_k"], config["tile_n"]),
        "input_buffer_count": config["input_buffer_count"],
    }

    def call(lhs, rhs, sizes):
        if kind == "drhs":
            scopes = config.get("combine_scopes", False)
            return kernels.tgmm(lhs.T, rhs, group_sizes=sizes, combine_scopes=scopes, **common)
        return kernels.gmm(lhs, rhs, group_sizes=sizes, transpose_rhs=kind == "dlhs", **common)

    sizes = _group_sizes(problem["group_sizes"])
    avals = (_aval(problem["lhs"]), _aval(problem["rhs"]), jax.ShapeDtypeStruct(sizes.shape, jnp.int32))
    return Workload(name, call, avals, {2: sizes})


def _group_sizes(recorded: Sequence[int] | dict[str, int]) -> np.ndarray:
    """The recorded sizes; where only their number and sum are, those that Tokamax tunes with then.

    They are random. Equal groups would end at the edges of tiles, which share no tile then: too fast by half.
    """
    if not isinstance(recorded, dict):
        return np.asarray(recorded, np.int32)
    from tokamax._src.ops.ragged_dot import base  # pyright: ignore[reportMissingImports]

    sizes = base.generate_group_sizes(m=recorded["total_size"], num_groups=recorded["num_groups"])
    return np.asarray(sizes, np.int32)


def tokamax_attention(entries: int) -> Iterator[Published]:
    """A sample of the times of Tokamax's attention kernel on tpu7x, those without bias or explicit mask."""
    folder = importlib.resources.files("tokamax") / "data" / "autotuning" / TOKAMAX_TABLES["tpu7x"]
    table = json.loads((folder / "pallas_mosaic_tpu_flash_attention.json").read_text())
    found = []
    for recorded, results in table.items():
        problem = json.loads(recorded)
        plain = problem["bias"] is None and problem["mask"]["bool_mask"] is None
        if results and plain and not problem["return_residuals"]:
            found.append((problem, results))
    chosen = np.random.default_rng(0).choice(len(found), min(entries, len(found)), replace=False)
    for problem, results in (found[place] for place in sorted(chosen)):
        (config, result), *_ = results.items()
        milliseconds = statistics.median(result["evaluation_times_ms"])
        mask = "causal" if problem["mask"]["is_causal"] else "full"
        name = f"attention {mask} q {problem['q']} k {problem['k']}"
        make = functools.partial(_attention_workload, name, problem, json.loads(config))
        yield Published("Tokamax", name, "tpu7x", milliseconds, False, make)


def _attention_workload(name: str, problem: dict[str, Any], config: dict[str, Any]) -> Workload:
    from tokamax._src.ops.attention import pallas_mosaic_tpu as attention  # pyright: ignore[reportMissingImports]

    class Attention(attention.PallasMosaicTpuFlashAttention):
        """The op, on a device that is not there."""

        def supported_on(self, device: object) -> bool:
            return True

    op = Attention(config=attention.Config(**config))

    def call(q, k, v):
        return op(
            q,
            k,
            v,
            logits_scale=problem["logits_scale"],
            logits_soft_cap=problem["logits_soft_cap"],
            is_causal=problem["mask"]["is_causal"],
        )

    return Workload(name, call, tuple(_aval(problem[tensor]) for tensor in "qkv"))


def _aval(text: str) -> jax.ShapeDtypeStruct:
    from bridge.aot.avals import parse_aval

    return parse_aval(text)


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
        published.name,
        published.chip,
        published.milliseconds,
        predicted,
        published.milliseconds / predicted,
        published.fitted,
        score.bound,
        score.confidence,
        score.reasons,
    )


def summary(rows: Sequence[Row]) -> str:
    """Median and 90th percentile of the error of one group of rows, those fitted to left out."""
    errors = sorted(math.exp(abs(math.log(row.ratio))) - 1 for row in rows if not row.fitted)
    if not errors:
        return "no independent rows"
    ninth = errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)]
    bias = math.exp(statistics.median(math.log(row.ratio) for row in rows if not row.fitted))
    return (
        f"{len(errors)} rows: median error {statistics.median(errors):.1%}, 90th percentile {ninth:.1%}, "
        f"median of published over predicted {bias:.3f}"
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokamax", action="store_true", help="also the tables of the installed Tokamax")
    parser.add_argument("--entries", type=int, default=12, help="sampled entries of each table of Tokamax")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the rows")
    parser.add_argument("--plot", type=Path, help="where to write a picture")
    options = parser.parse_args()
    del sys.argv[1:]  # Tokamax reads the command line, too, and stumbles over what it does not know

    wanted = list(jax_matmuls())
    if options.tokamax:
        for name in TOKAMAX_TABLES:
            wanted += tokamax_ragged_dots(name, options.entries)
        wanted += tokamax_attention(options.entries)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = list(threads.map(compare, wanted))
    rows = [row for row in results if isinstance(row, Row)]
    print_table(rows)
    print()
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.source}, {row.name.split()[0]}, {row.chip}", []).append(row)
    for name, group in groups.items():
        print(f"{name}: {summary(group)}")
    for failure in (result for result in results if isinstance(result, str)):
        print(f"no prediction: {failure}")
    versions = {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}
    report = {"versions": versions, "rows": [asdict(row) for row in rows]}
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.plot:
        options.plot.write_text(plot(rows))


if __name__ == "__main__":
    main()

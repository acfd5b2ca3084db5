"""Scores all tilings of some spaces, and keeps the results for tests of searches.

    python benchmarks/record_spaces.py [--match TEXTS] [--jobs 1] [--seconds 120] [--folder DIR] [--list]

One file for each space; see `autotune.search.recorded`. The scores are of the TPU compiler's schedule, and
nothing runs on a TPU. What is recorded already is not scored again, so a run may be stopped at any time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autotune.score import Workload
from autotune.score.replay import Recorder
from autotune.score.schedule import ScheduleScorer, compile_with_dumps
from autotune.search.recorded import RecordedSpace
from autotune.search.subject import Subject, kernel_subject
from autotune.spec import Candidate, KernelSpec
from bridge.chips import chip
from tpu_kernels.catalog import CATALOG

FOLDER = Path(__file__).parent.parent / "tests" / "autotune" / "search" / "recorded"

FORWARD = ("tile_q", "tile_kv", "sub_q", "sub_kv")
BACKWARD = ("backward_tile_q", "backward_tile_kv", "backward_sub_q", "backward_sub_kv")
OUTPUT = ("tile_m", "tile_k", "tile_n")
DRHS = ("drhs_tile_m", "drhs_tile_k", "drhs_tile_n")


@dataclass(frozen=True)
class Case:
    """A space to record.

    Attributes:
        file: name of its file, without the ending.
        kernel: name of the kernel.
        shapes: as in `KernelSpec.make_problem`.
        chip: name of the chip.
        phases: what is scored.
        fields: sizes that are varied; None for all.
        within: (smallest, largest) of the values of some sizes, where the whole space takes too long.
        rows: whether rows of a tile are tried in finer steps than the kernel's space has.
    """

    file: str
    kernel: str
    shapes: Mapping[str, tuple[int, ...]]
    chip: str
    phases: tuple[str, ...] = ("forward",)
    fields: tuple[str, ...] | None = None
    within: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    rows: bool = False


def splash(name: str, q: tuple[int, ...], on: str, **options: Any) -> Case:
    """The forward of splash attention, unless told otherwise."""
    options = {"fields": FORWARD} | options
    k = (q[0], max(1, q[1] // 4), *q[2:]) if "grouped" in name else q
    return Case(f"splash_{name}_{on}", "splash_attention", {"q": q, "k": k}, on, **options)


def grouped(name: str, lhs: tuple[int, int], rhs: tuple[int, int, int], on: str, **options: Any) -> Case:
    """The output of grouped matmul, unless told otherwise."""
    options = {"fields": OUTPUT} | options
    return Case(f"grouped_{name}_{on}", "grouped_matmul", {"lhs": lhs, "rhs": rhs}, on, **options)


def rows(kernel: str, name: str, x: tuple[int, int], on: str, *phases: str) -> Case:
    """A row-wise kernel."""
    return Case(f"{kernel}_{name}_{on}", kernel, {"x": x}, on, phases or ("forward",), rows=True)


LARGE = {"sub_q": (256, 512), "sub_kv": (256, 512)}
LARGER = {"tile_q": (512, 4096), "tile_kv": (512, 4096), **LARGE}
LARGE_BACKWARD = {"backward_sub_q": (256, 512), "backward_sub_kv": (256, 512)}

CASES: tuple[Case, ...] = (
    splash("512x128", (1, 4, 512, 128), "v6e"),
    rows("layer_norm", "2048x1024", (2048, 1024), "v5e"),
    splash("512x256", (1, 2, 512, 256), "v5e"),
    rows("rms_norm", "8192x256", (8192, 256), "v6e"),
    splash("512x80_grouped", (1, 4, 512, 80), "v6e"),
    rows("rms_norm", "1024x2048", (1024, 2048), "tpu7x"),
    rows("layer_norm", "16384x128", (16384, 128), "tpu7x"),
    splash("512x64", (1, 2, 512, 64), "v5e"),
    splash("512x128", (1, 4, 512, 128), "tpu7x"),
    grouped("1024x512", (1024, 512), (4, 512, 512), "v6e"),
    rows("rms_norm", "2048x512", (2048, 512), "v5e"),
    splash("1024x64_large", (1, 2, 1024, 64), "v6e", within=LARGE),
    grouped("1024x512_drhs", (1024, 512), (4, 512, 512), "v5e", phases=("backward",), fields=DRHS),
    rows("layer_norm", "4096x256", (4096, 256), "v6e", "forward", "backward"),
    grouped("2048x256", (2048, 256), (8, 256, 1024), "v5e"),
    splash("1024x128_large", (1, 4, 1024, 128), "v5e", within=LARGE),
    rows("rms_norm", "4096x1024", (4096, 1024), "tpu7x", "forward", "backward"),
    grouped("2048x1024", (2048, 1024), (4, 1024, 512), "tpu7x"),
    splash("1024x64_grouped", (1, 8, 1024, 64), "tpu7x", within=LARGE),
    grouped("4096x512", (4096, 512), (16, 512, 512), "v5e"),
    rows("layer_norm", "8192x128", (8192, 128), "v5e"),
    splash("1536x80_large", (1, 2, 1536, 80), "v6e", within=LARGE),
    grouped("512x1024", (512, 1024), (8, 1024, 512), "v6e"),
    splash("2048x128_larger", (1, 2, 2048, 128), "v6e", within=LARGER),
    splash("2048x64_larger", (1, 2, 2048, 64), "tpu7x", within=LARGER),
    splash(  # large arrays: what XLA keeps in VMEM between two kernels gives scores of low confidence
        "1024x128_backward_large",
        (4, 8, 1024, 128),
        "v6e",
        phases=("backward",),
        fields=BACKWARD,
        within=LARGE_BACKWARD,
    ),
    grouped("1024x768", (1024, 768), (16, 768, 512), "tpu7x"),
    splash("2048x64_larger", (1, 4, 2048, 64), "v5e", within=LARGER),
    splash("1024x80_large", (1, 2, 1024, 80), "tpu7x", within=LARGE),
    grouped("2048x512", (2048, 512), (4, 512, 768), "v6e"),
    rows("layer_norm", "4096x512", (4096, 512), "tpu7x"),
    splash("1024x256_large", (1, 2, 1024, 256), "v6e", within=LARGE),
)


def subject(case: Case) -> Subject:
    """The candidates of a case."""
    (spec,) = (spec for spec in CATALOG if spec.name == case.kernel)
    problem = spec.make_problem(case.shapes, "bfloat16")
    spec = dataclasses.replace(spec, space=fine_rows(spec)) if case.rows else spec
    found = kernel_subject(problem, spec, chip(case.chip), phases=case.phases, fields=case.fields)
    kept = [
        candidate
        for candidate in found.candidates
        if candidate.tiling == found.default
        or all(low <= getattr(candidate.tiling, n) <= high for n, (low, high) in case.within.items())
    ]
    return dataclasses.replace(found, candidates=tuple(kept))


def fine_rows(spec: KernelSpec) -> Any:
    """A space of row-wise tiles with three sizes between powers of two."""

    def space(problem: Any, on: Any) -> Sequence[Candidate]:
        from tpu_kernels.layer_norm import space as of_layer_norm
        from tpu_kernels.rms_norm import space as of_rms_norm

        module = of_rms_norm if spec.name == "rms_norm" else of_layer_norm
        largest = max(candidate.tiling.tile_rows for candidate in spec.space(problem, on))
        powers = [1 << shift for shift in range(10)]
        sizes = sorted({8 * part * power // 4 for part in (4, 5, 6, 7) for power in powers})
        tilings = [spec.tiling_type(size) for size in sizes if size % 8 == 0 and size <= largest]
        return tuple(
            Candidate(
                tiling,
                max(f.bytes(tiling, problem.required("x")) for f in module.FOOTPRINTS.values()),
                module.illegal_reasons(problem, tiling, on),
            )
            for tiling in tilings
        )

    return space


def record(case: Case, path: Path, jobs: int, seconds: float) -> None:
    """Score what is missing of a case, and save after each score."""
    made = subject(case)
    space = RecordedSpace.of(made, case.phases)
    if path.exists():
        found = RecordedSpace.load(path)
        if found != space:
            raise SystemExit(f"{path} has another space: delete it to record again")
        space = found
    if not space.missing:
        return
    saving = threading.Lock()

    def save() -> None:
        with saving:
            space.save(path)

    in_time = functools.partial(compile_with_dumps, timeout=seconds)
    scorer = Recorder(ScheduleScorer(made.chip, in_time), space.recording, save)

    def score(workload: Workload) -> None:
        try:
            scorer.score(workload)
        except Exception as error:  # it is recorded
            print(f"  {workload.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)

    start, missing = time.perf_counter(), space.missing
    legal = [candidate.tiling for candidate in made.candidates if candidate.legal]
    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(score, (workload for tiling in legal for workload in made.workloads(tiling))))
    taken = time.perf_counter() - start
    print(f"{case.file}: {len(legal)} tilings, {missing} scores in {taken:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--match", default="", help="texts with commas: only files with one of them in the name"
    )
    parser.add_argument("--jobs", type=int, default=1, help="scores at once")
    parser.add_argument("--seconds", type=float, default=120, help="that a compile may take")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--list", action="store_true", help="only show the spaces")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if not any(text in case.file for text in options.match.split(",")):
            continue
        if options.list:
            legal = sum(candidate.legal for candidate in subject(case).candidates)
            print(f"{case.file}: {legal} tilings, {len(case.phases)} scores each")
        else:
            record(case, options.folder / f"{case.file}.json", options.jobs, options.seconds)


if __name__ == "__main__":
    main()

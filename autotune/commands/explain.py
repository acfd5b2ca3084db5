"""`tpu-autotune explain`: how long a kernel takes on a chip, what limits it, and where the time goes."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.report.activity import code_blocks
from autotune.report.page import BOUND_TEXTS, UNIT_NAMES, report_page, seconds, size
from autotune.schedule.errors import DumpError, RunawayError
from autotune.schedule.records import STALLS
from autotune.score.protocol import Score, Workload
from autotune.score.roofline import RooflineScorer
from autotune.score.schedule import Explanation, ScheduleScorer
from autotune.targets import UsageError, add_target_arguments, workloads
from bridge.aot.errors import CompileError, CompilerMissing
from bridge.chips import chip, chips

BAR_WIDTH = 30
CODE_ROWS = 5


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("explain", help="predicted time of a kernel, what limits it, and why")
    parser.set_defaults(run=run)
    add_target_arguments(parser)
    add_score_arguments(parser)
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page with pictures")


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of commands that score."""
    parser.add_argument("--chip", default="v5e", choices=list(chips()), help="default: %(default)s")
    parser.add_argument(
        "--phase",
        default="forward",
        help="phase of a catalog's kernel: forward or backward (default: %(default)s)",
    )
    parser.add_argument(
        "--value",
        action="append",
        default=[],
        metavar="PLACE=VALUE",
        help="value of an argument that decides what runs, such as group sizes: 2=[256,256] or 2=a.npy "
        "(default: typical ones for a catalog's kernel)",
    )
    parser.add_argument(
        "--source",
        default="schedule",
        choices=("schedule", "roofline"),
        help="the compiler's schedule, or a lower bound that needs no compiler (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Score TARGET. Returns 0, or 1 if it does not compile or cannot be scored."""
    workload = chosen_workload(options)
    explained = explain(workload, options)
    if explained is None:
        return 1
    score, explanation = explained
    write_report(options.report, [explanation] if explanation else [])
    print(
        json.dumps(record(workload, score), indent=2) if options.json else _text(workload, score, explanation)
    )
    return 0


def chosen_workload(options: argparse.Namespace) -> Workload:
    """The workload of TARGET and `--phase`, with the values of `--value`."""
    workload, *others = workloads(options)
    if others:
        phases = {each.name.rpartition(" ")[2]: each for each in (workload, *others)}
        if options.phase not in phases:
            raise UsageError(f"--phase must be one of {', '.join(phases)}, got {options.phase!r}")
        workload = phases[options.phase]
    given = dict(_value(text, len(workload.avals)) for text in options.value)
    return dataclasses.replace(workload, values={**workload.values, **given})


def explain(workload: Workload, options: argparse.Namespace) -> tuple[Score, Explanation | None] | None:
    """The score of a workload, with its runs if there are any; None after printing why there is no score."""
    on = chip(options.chip)
    try:
        if options.source == "roofline":
            return RooflineScorer(on).score(workload), None
        explanation = ScheduleScorer(on).explain(workload)
        return explanation.score, explanation
    except CompilerMissing as error:
        error.advice = f"{error.advice}; or use --source roofline"
        raise
    except (CompileError, DumpError, RunawayError) as error:
        print(f"tpu-autotune: {workload.name} has no score: {error}", file=sys.stderr)
        return None
    except ValueError as error:
        raise UsageError(str(error)) from error


def write_report(path: Path | None, explanations: Sequence[Explanation]) -> None:
    """Write the page of `--report`, if it was asked for. Raises `UsageError` where it cannot be."""
    if path is None:
        return
    if not explanations:
        raise UsageError("--report needs the compiler's schedule: leave out --source roofline")
    try:
        path.write_text(report_page(explanations), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--report: cannot write {path}: {error}") from error


def record(workload: Workload, score: Score) -> dict[str, Any]:
    """What `--json` prints of a score: the fields most asked for, then the whole score."""
    return {
        "name": workload.name,
        "chip": score.chip,
        "time_ms": score.time_s * 1e3,
        "source": score.source,
        "bound": score.bound,
        "confidence": score.confidence,
        "reasons": list(score.reasons),
        "unknowns": list(score.unknowns),
        "dma_bytes": score.dma_bytes_read + score.dma_bytes_written,
        "ici_bytes_sent": score.ici_bytes_sent,
        "ici_bytes_received": score.ici_bytes_received,
        "vmem_bytes": score.vmem_bytes,
        "mxu_utilization": score.units.get("mxu", 0.0),
        "score": json.loads(score.to_json()),
    }


def _value(text: str, arguments: int) -> tuple[int, np.ndarray]:
    place, _, literal = text.partition("=")
    try:
        index = int(place)
        value = np.load(literal) if literal.endswith(".npy") else np.asarray(ast.literal_eval(literal))
    except (ValueError, SyntaxError, OSError) as error:
        raise UsageError(
            f"--value must be PLACE=VALUE, such as 2=[256,256] or 2=a.npy, got {text!r}: {error}"
        ) from error
    if not 0 <= index < arguments:
        raise UsageError(f"--value {text!r}: there are {arguments} arguments, counted from 0")
    return index, value.astype(np.int32) if value.dtype == np.int64 else value


# Text ---------------------------------------------------------------------------------------------


def _text(workload: Workload, score: Score, explanation: Explanation | None) -> str:
    lines = [
        f"{workload.name} on {score.chip}: {seconds(score.time_s)} "
        f"({score.source}, {score.confidence} confidence; nothing ran on a TPU)",
        *(f"  ! {reason}" for reason in score.reasons),
        "",
        f"bound: {score.bound}. {BOUND_TEXTS[score.bound]}",
        f"moved: {size(score.dma_bytes_read)} read, {size(score.dma_bytes_written)} written",
    ]
    if score.devices > 1:
        lines.append(
            f"between {score.devices} devices: {size(score.ici_bytes_sent)} sent, "
            f"{size(score.ici_bytes_received)} received by the one that takes longest"
        )
    if explanation is None:
        return "\n".join(lines)
    lines.append(
        f"VMEM: {size(score.vmem_bytes)}; spills and fills: {score.spills:,}; grid steps: "
        + ("unknown" if score.grid_steps is None else f"{score.grid_steps:,}")
    )
    lines += ["", "use of the units:", *_units(score), "", "time by kernel and XLA operation:"]
    for kernel in sorted(score.kernels, key=lambda kernel: -kernel.time_s):
        note = ", a roofline" if kernel.estimated else ""
        lines.append(
            f"  {_share(kernel.time_s, score.time_s)}  {seconds(kernel.time_s):>9}  {kernel.name} "
            f"({'kernel' if kernel.is_kernel else 'XLA'}, {kernel.calls} calls, {kernel.bound}{note})"
        )
    lines += ["", "where the time goes (code by address in the schedule):", *_code(score, explanation)]
    return "\n".join(lines)


def _units(score: Score) -> list[str]:
    width = max(len(name) for name in UNIT_NAMES.values())
    bars = {unit: "#" * round(min(share, 1) * BAR_WIDTH) for unit, share in score.units.items()}
    return [
        f"  {UNIT_NAMES.get(unit, unit):{width}}  {bars[unit]:{BAR_WIDTH}} {share:6.1%}"
        for unit, share in score.units.items()
    ]


def _code(score: Score, explanation: Explanation) -> list[str]:
    run = max(explanation.runs, key=lambda run: run.cycles)
    lines = []
    for block in code_blocks(run.functions, CODE_ROWS):
        busiest = f", {UNIT_NAMES.get(block.unit, block.unit)} {block.unit_share:.0%}" if block.unit else ""
        lines.append(
            f"  {_share(block.cycles, run.cycles)}  {block.function} {block.start:#x}-{block.end - 1:#x}: "
            f"{block.executions:,} x {block.cycles // block.executions:,} cycles{busiest}"
        )
    on_others = run.stalled_cycles[STALLS.index("remote")]
    lines.append(f"  {_share(sum(run.stalled_cycles) - on_others, run.cycles)}  waiting for copies")
    if on_others:
        lines.append(f"  {_share(on_others, run.cycles)}  waiting for other devices")
    return lines


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:6.1%}"


def compare_table(names: Sequence[str], scores: Sequence[Score]) -> str:
    """Scores side by side."""
    rows: list[tuple[str, list[str]]] = [
        ("time", [seconds(score.time_s) for score in scores]),
        ("bound", [score.bound for score in scores]),
        ("read", [size(score.dma_bytes_read) for score in scores]),
        ("written", [size(score.dma_bytes_written) for score in scores]),
        *(
            [
                ("sent", [size(score.ici_bytes_sent) for score in scores]),
                ("received", [size(score.ici_bytes_received) for score in scores]),
            ]
            if any(score.devices > 1 for score in scores)
            else []
        ),
        ("VMEM", [size(score.vmem_bytes) for score in scores]),
        ("spills and fills", [f"{score.spills:,}" for score in scores]),
        ("grid steps", ["unknown" if s.grid_steps is None else f"{s.grid_steps:,}" for s in scores]),
        (
            "stalled",
            [
                _share(score.time_s - score.breakdown.get("compute", score.time_s), score.time_s)
                for score in scores
            ],
        ),
        *(
            (UNIT_NAMES[unit], [f"{s.units.get(unit, 0):.1%}" for s in scores])
            for unit in UNIT_NAMES
            if any(unit in s.units for s in scores)
        ),
        ("confidence", [score.confidence for score in scores]),
    ]
    head = max(len(name) for name, _ in rows)
    widths = [max(len(name), *(len(row[place]) for _, row in rows)) for place, name in enumerate(names)]
    lines = [" " * head + "".join(f"  {name:>{width}}" for name, width in zip(names, widths, strict=True))]
    for name, cells in rows:
        lines.append(
            f"{name:{head}}"
            + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        )
    return "\n".join(lines)

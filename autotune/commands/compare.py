"""`tpu-autotune compare`: two kernels, or two tilings of one, side by side."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from autotune.commands.explain import (
    add_score_arguments,
    chosen_workload,
    compare_table,
    explain,
    record,
    write_report,
)
from autotune.score.protocol import Score, rank
from autotune.targets import UsageError, add_catalog_argument, add_problem_arguments

TOO_CLOSE = 0.03
"""Share by which two times must differ for one to be called faster: predictions err by about as much."""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("compare", help="two kernels, or two tilings of one, side by side")
    parser.set_defaults(run=run)
    for name in ("first", "second"):
        parser.add_argument(
            name,
            metavar="TARGET",
            help="path.py:function, or a kernel of the catalog, tiles in brackets: rms_norm[tile_rows=64]",
        )
    add_problem_arguments(parser, required=False)
    parser.add_argument(
        "--arg", action="append", default=[], help="an argument of both functions, such as f32[8,128]"
    )
    add_catalog_argument(parser)
    add_score_arguments(parser)
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write a page with pictures of both")


def run(options: argparse.Namespace) -> int:
    """Score both targets. Returns 0, or 1 if one has no score."""
    names = [options.first, options.second]
    records, scores, explanations = [], [], []
    for name in names:
        workload = chosen_workload(_for_target(options, name))
        explained = explain(workload, options)
        if explained is None:
            return 1
        score, explanation = explained
        scores.append(score)
        records.append({"target": name} | record(workload, score))
        explanations += [explanation] if explanation else []
    write_report(options.report, explanations)
    verdict, faster = _verdict(names, scores)
    if options.json:
        ratio = scores[1].time_s / scores[0].time_s if scores[0].time_s else None
        print(json.dumps({"faster": faster, "second_over_first": ratio, "results": records}, indent=2))
    else:
        print(f"{compare_table(names, scores)}\n\n{verdict}")
    return 0


def _for_target(options: argparse.Namespace, target: str) -> argparse.Namespace:
    """The options of one target: its name, and the tiling in its brackets."""
    match = re.fullmatch(r"(?P<name>[^\[\]]+)(?:\[(?P<tiling>[^\[\]]*)\])?", target)
    if match is None:
        raise UsageError(
            f"TARGET must be a name, or a name and tile sizes such as rms_norm[tile_rows=64], got {target!r}"
        )
    tiles = [part for part in (match["tiling"] or "").split(",") if part.strip()]
    return argparse.Namespace(**(vars(options) | {"target": match["name"], "tile": tiles}))


def _verdict(names: list[str], scores: list[Score]) -> tuple[str, str | None]:
    """A sentence on which is faster, and its name; None where that cannot be said."""
    try:
        first, second = rank(scores)
    except ValueError as error:
        return f"Which one is faster cannot be said: {error}.", None
    ratio = scores[second].time_s / scores[first].time_s
    if ratio < 1 + TOO_CLOSE:
        return f"They differ by {ratio - 1:.1%}: too close to tell. Prefer what takes less VMEM.", None
    return f"{names[first]} is {ratio:.3g} times as fast as {names[second]}.", names[first]

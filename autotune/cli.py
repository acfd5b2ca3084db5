"""`tpu-autotune`: kernels on TPU chips, without a TPU: tilings, whether they compile, how long they take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from autotune.commands import check, compare, doctor, explain
from autotune.problem import Problem
from autotune.score.roofline import roofline
from autotune.spec import Candidate, KernelSpec
from autotune.targets import (
    UsageError,
    add_catalog_argument,
    add_problem_arguments,
    find_kernel,
    load_catalog,
    make_problem,
)
from bridge.aot.errors import CompilerMissing
from bridge.chips import Chip, chip, chips


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; 2 after printing what is wrong with the request."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs on a TPU, so do not look for one
    options = _parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except (UsageError, CompilerMissing) as error:
        print(f"tpu-autotune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tpu-autotune", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    list_command = commands.add_parser("list", help="the kernels of a catalog")
    list_command.set_defaults(run=_list)

    show = commands.add_parser("show", help="the tile space of a kernel for one shape and chip")
    show.set_defaults(run=_show)
    show.add_argument("op", metavar="OP", help="a kernel of the catalog")
    add_problem_arguments(show, required=True)
    show.add_argument("--chip", default="v6e", choices=list(chips()), help="default: %(default)s")

    for command in (list_command, show):
        add_catalog_argument(command)
        command.add_argument("--json", action="store_true", help="print one JSON object")

    for module in (check, explain, compare, doctor):
        module.register(commands)
    return parser


# list ---------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> None:
    catalog = load_catalog(options.catalog)
    if options.json:
        print(json.dumps({"kernels": [_kernel_record(spec) for spec in catalog]}, indent=2))
        return
    width = max((len(spec.name) for spec in catalog), default=0)
    for spec in catalog:
        print(f"{spec.name:{width}}  {spec.formula}")
        print(f"{'':{width}}  {spec.summary} Arrays: {', '.join(spec.arguments)}.")


def _kernel_record(spec: KernelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "summary": spec.summary,
        "formula": spec.formula,
        "arguments": list(spec.arguments),
        "implementations": list(spec.implementations),
        "tiling": [field.name for field in dataclasses.fields(spec.tiling_type)],
    }


# show ---------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> None:
    spec = find_kernel(load_catalog(options.catalog), options.op)
    problem = make_problem(spec, options.shape, options.dtype)
    record = _space_record(spec, problem, chip(options.chip))
    print(json.dumps(record, indent=2) if options.json else _space_text(record))


def _space_record(spec: KernelSpec, problem: Problem, on: Chip) -> dict[str, Any]:
    unsupported = spec.unsupported_reasons(problem, on)
    candidates = spec.space(problem, on)
    return {
        "problem": str(problem),
        "chip": on.name,
        "chip_provenance": dict(on.provenance),
        "vmem_limit_bytes": on.vmem_limit_bytes,
        "unsupported": list(unsupported),
        "default": None if unsupported else dataclasses.asdict(spec.default_tiling(problem, on)),
        "legal": [_candidate_record(c) for c in candidates if c.legal],
        "illegal": [_candidate_record(c) | {"reasons": list(c.reasons)} for c in candidates if not c.legal],
        "phases": {phase: _cost_record(cost, on) for phase, cost in spec.costs(problem).items()},
    }


def _candidate_record(candidate: Candidate) -> dict[str, Any]:
    return {"tiling": dataclasses.asdict(candidate.tiling), "vmem_bytes": candidate.vmem_bytes}


def _cost_record(cost: Any, on: Chip) -> dict[str, Any]:
    bound = roofline(cost, on)
    return {
        "flops": cost.flops,
        "matmul_flops": cost.matmul_flops,
        "bytes_read": cost.bytes_read,
        "bytes_written": cost.bytes_written,
        "time_ms": bound.seconds * 1e3,
        "source": "roofline",
        "bound": bound.bound,
    }


def _space_text(record: dict[str, Any]) -> str:
    lines = [
        f"{record['problem']} on {record['chip']} (VMEM limit {_mebibytes(record['vmem_limit_bytes'])})",
        "",
        "tilings:",
    ]
    for entry in record["legal"]:
        mark = "  <- default" if entry["tiling"] == record["default"] else ""
        lines.append(f"  {_tiling(entry)}  VMEM about {_mebibytes(entry['vmem_bytes'])}{mark}")
    if not record["legal"]:
        lines.append("  none is legal")
    if record["illegal"]:
        lines += ["", "illegal:"]
        lines += [f"  {_tiling(entry)}  {'; '.join(entry['reasons'])}" for entry in record["illegal"]]
    lines += [
        "",
        "unavoidable work and roofline (a lower bound, no measurement; vector arithmetic is not counted):",
    ]
    for phase, cost in record["phases"].items():
        moved = cost["bytes_read"] + cost["bytes_written"]
        lines.append(
            f"  {phase:9}{cost['flops']:.3g} flops, {_mebibytes(moved)} moved, "
            f"at least {cost['time_ms']:.4g} ms ({cost['bound']})"
        )
    return "\n".join(lines)


def _tiling(entry: dict[str, Any]) -> str:
    return " ".join(f"{name}={value:<5}" for name, value in entry["tiling"].items())


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"

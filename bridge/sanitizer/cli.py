"""`python -m bridge.sanitize script.py [arguments]`: runs a script with its kernels checked."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from bridge.sanitizer.report import DEFAULT_SEEDS, SanitizerReport, sanitize

FOUND = 1
"""The exit status if something was found."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script.

    Returns:
        1 if there are findings; else the script's own exit status. Bad use ends with 2.
    """
    options = _parser().parse_args(arguments)
    if options.seeds < 1:
        _parser().error(f"--seeds must be at least 1, got {options.seeds}")
    script = Path(options.script)
    if not script.is_file():
        _parser().error(f"no such script: {script}; give the path of a Python file")
    where = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with sanitize(seeds=options.seeds) as report, where:
        status = _run(script, options.arguments)
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    elif report.kernels or not _is_one_of_several():
        print(_in_words(report), file=sys.stderr)
    return status if report.ok else FOUND


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bridge.sanitize",
        description="Run a script, and check the Pallas kernels that it runs: races, missing waits and "
        "barriers, indices out of bounds, unwritten memory. The exit status is 1 if there are findings.",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=DEFAULT_SEEDS,
        metavar="N",
        help=f"try each call in N orders (default {DEFAULT_SEEDS})",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON; what the script prints goes to stderr"
    )
    parser.add_argument("script", help="the path of a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script finds in sys.argv")
    return parser


def _run(script: Path, arguments: Sequence[str]) -> int:
    """Run a script as `python script.py arguments` does. Returns its exit status."""
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _is_one_of_several() -> bool:
    """Whether torchrun has started this process: then one of them has the report."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _in_words(report: SanitizerReport) -> str:
    return f"\n-- bridge.sanitize --\n{report}"

"""`tpu-autotune doctor`: is the TPU compiler there, and does it work."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from typing import Any

from autotune.targets import add_chips_argument, chosen_chips
from bridge.chips import Chip

PACKAGES = ("torch", "jax", "jaxlib", "libtpu")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: what was looked at.
        good: whether it is as it must be.
        found: what was found.
        fix: what to do if it is not good.
    """

    what: str
    good: bool
    found: str
    fix: str = ""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("doctor", help="whether the TPU compiler is installed and works")
    parser.set_defaults(run=run)
    add_chips_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Look at everything. Returns 0 if all of it is good, else 1."""
    findings = examine(chosen_chips(options))
    good = all(finding.good for finding in findings)
    if options.json:
        print(json.dumps({"good": good, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return 0 if good else 1
    for finding in findings:
        print(f"{'ok  ' if finding.good else 'BAD '} {finding.what}: {finding.found}")
        if not finding.good and finding.fix:
            print(f"     -> {finding.fix}")
    print("\nall good" if good else "\nnot good: see the lines marked BAD")
    return 0 if good else 1


def examine(for_chips: tuple[Chip, ...]) -> list[Finding]:
    """Versions, the library, a worker, a tiny kernel for each chip; ends where going on makes no sense."""
    findings = [_system(), *map(_package, PACKAGES), _library()]
    if not findings[-1].good:
        return findings
    findings.append(_worker())
    if not findings[-1].good:
        return findings
    return [*findings, *map(_tiny_kernel, for_chips)]


def _system() -> Finding:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(
        "system", platform.system() == "Linux", found, "libtpu runs on Linux only; use a container"
    )


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", f"pip install {name}")


def _library() -> Finding:
    given = os.environ.get("TPU_LIBRARY_PATH")
    if given:
        fix = "TPU_LIBRARY_PATH names a file that is not there: unset it, or name libtpu.so"
        return Finding("libtpu library", os.path.isfile(given), f"{given} (TPU_LIBRARY_PATH)", fix)
    spec = importlib.util.find_spec("libtpu")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = os.path.join(folder, "libtpu.so")
        if os.path.isfile(path):
            return Finding("libtpu library", True, f"{path} ({os.path.getsize(path) / 2**20:.0f} MiB)")
    return Finding("libtpu library", False, "not found", "pip install libtpu (no TPU is needed)")


def _worker() -> Finding:
    from bridge.topology import CompileError, compiler_versions

    start = time.perf_counter()
    try:
        versions = compiler_versions()
    except CompileError as error:
        return Finding("compiler process", False, f"{error.what}. {error.details}", error.advice)
    built = versions["platform"].strip().splitlines()[-1]
    return Finding("compiler process", True, f"starts in {time.perf_counter() - start:.1f} s; {built}")


def _tiny_kernel(on: Chip) -> Finding:
    from bridge.topology import CompileError, compile_for

    what = f"a kernel for {on.name}"
    start = time.perf_counter()
    try:
        with compile_for(_add_one, ["f32[16,128]"], on, dumps=True) as compiled:
            assert compiled.dumps is not None
            schedules = len(list(compiled.dumps.glob("*-packed-bundles-post-ra.txt")))
    except CompileError as error:
        fix = "jax, jaxlib and libtpu must fit together: pip install 'jax[tpu]' installs a set that does"
        return Finding(what, False, error.what, error.advice or fix)
    seconds = time.perf_counter() - start
    if not schedules:
        fix = "this libtpu writes no schedules: `check` works, scores do not; use libtpu 0.0.52"
        return Finding(what, False, "compiles, but its schedule was not written", fix)
    return Finding(what, True, f"compiles in {seconds:.1f} s, and its schedule can be read")


def _add_one(x: Any) -> Any:
    import jax
    from jax.experimental import pallas as pl

    def body(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...] + 1

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="add_one")(x)

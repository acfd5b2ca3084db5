"""Finds the files of one compilation among the compiler's dumps.

libtpu writes `<time>-<function>-<number>-<label>.txt`, one function per kernel and per XLA operation, and
`TLP`, the program that calls them. The number depends on which passes were dumped; only the label counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.schedule.errors import DumpError

PROGRAM = "TLP"
"""The function that runs first and calls all others."""

BUNDLES = "packed-bundles-post-ra"
UTILIZATION = "pre-delay_hlo-static-per-bundle-utilization"

_FILE = re.compile(rf"\d+-(?P<name>.+)-\d+-(?P<label>{BUNDLES}|{UTILIZATION})\.txt")


@dataclass(frozen=True)
class FunctionFiles:
    """The files of one function.

    Attributes:
        name: name of the HLO instruction, such as `matmul.1`; `TLP` for the program.
        bundles: the schedule, one line per cycle.
        utilization: use of the units, one row per cycle; None if it was not written.
    """

    name: str
    bundles: Path
    utilization: Path | None


@dataclass(frozen=True)
class Harvest:
    """What one compilation left.

    Attributes:
        functions: the files of each function by name, the program included.
        hlo: text of the scheduled HLO module; empty if it was not written.
        vmem_report: the VMEM report; None if it was not written (libtpu 0.0.23 has none).
    """

    functions: Mapping[str, FunctionFiles]
    hlo: str
    vmem_report: Path | None


def harvest(folder: Path) -> Harvest:
    """The files of the one program compiled into `folder`.

    Raises:
        DumpError: there is no program, or more than one.
    """
    found: dict[str, dict[str, list[Path]]] = {}
    for path in sorted(folder.glob("*.txt")):
        match = _FILE.fullmatch(path.name)
        if match:
            found.setdefault(match["name"], {}).setdefault(match["label"], []).append(path)
    programs = found.get(PROGRAM, {}).get(BUNDLES, [])
    if len(programs) != 1:
        raise DumpError(
            f"expected the dumps of one program, *-{PROGRAM}-*-{BUNDLES}.txt, in {folder}, got "
            f"{len(programs)}; compile one function per folder, with compile_for(..., dumps=True)"
        )
    functions = {name: _files(name, files) for name, files in found.items() if BUNDLES in files}
    return Harvest(functions, _hlo(folder), next(iter(sorted(folder.glob("*vmem_report.html"))), None))


def _files(name: str, files: Mapping[str, list[Path]]) -> FunctionFiles:
    utilization = files.get(UTILIZATION, [None])
    return FunctionFiles(name, files[BUNDLES][-1], utilization[-1])


def _hlo(folder: Path) -> str:
    texts = sorted(folder.glob(f"*-{PROGRAM}-hlo.txt"))
    return texts[-1].read_text() if texts else ""

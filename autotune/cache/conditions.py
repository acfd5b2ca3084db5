"""What must be the same for a tuned tiling to hold: the kernel's code, the chip, the compiler, the scorer."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from autotune.cache.kernel import Kernel
from autotune.cache.source import UNREADABLE
from autotune.score.protocol import SOURCES
from bridge.chips import Chip

SCORERS: Mapping[str, str] = {"measured": "1", "schedule": "1", "roofline": "1"}
"""Version of the scorer behind each source. Raise it when the same program gets another score than before."""

COMPILER = ("jax", "jaxlib", "libtpu")
"""The packages that compile kernels."""

_LIMITS = (
    "tensor_cores",
    "devices_per_chip",
    "mxu_size",
    "vmem_bytes",
    "vmem_limit_bytes",
    "smem_bytes",
    "chip_config",
)
"""Figures of a chip that decide what is compiled. A predicted time depends on all of its figures."""

_UNIMPORTANT = ("name", "device_kind", "provenance", "topologies")
_DIGITS = 16


def conditions(
    kernel: Kernel, on: Chip, source: str, versions: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The conditions under which a score made now holds.

    Args:
        versions: those that the score names; else those installed here.

    Raises:
        ValueError: `source` is none of `SOURCES`; or the kernel's source cannot be read.
    """
    present = present_conditions(kernel, on, source)
    if present["kernel"] is None:
        raise ValueError(f"{kernel.name}: its source cannot be read, so nobody could tell when it changes")
    named = {name: version for name, version in (versions or {}).items() if name in COMPILER}
    return {name: value for name, value in sorted((present | named).items()) if value is not None}


def present_conditions(kernel: Kernel, on: Chip, source: str) -> dict[str, str | None]:
    """All conditions as they are here and now; None for one that is not known.

    Raises `ValueError` if `source` is none of `SOURCES`.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    code = kernel.source_digest()
    return {
        "chip": _chip_digest(on, source == "measured"),
        "kernel": None if code == UNREADABLE else code,
        "scorer": SCORERS[source],
        **{name: compiler_version(name) for name in COMPILER},
    }


def broken(named: Mapping[str, str], present: Mapping[str, str | None]) -> tuple[str, ...]:
    """Why `named` conditions do not hold, one sentence each; empty if they do.

    Without a compiler here its version decides nothing. Code that cannot be read, and conditions
    that this release does not know, do not hold.
    """
    reasons = []
    for name, value in named.items():
        now = present.get(name)
        if now is None and name in COMPILER:
            continue
        if now != value:
            reasons.append(f"made with {name} {value}, and here it is {now or 'unknown'}")
    return tuple(reasons)


@functools.cache
def compiler_version(package: str) -> str | None:
    """Version of a package of the compiler, as `bridge.topology` tells it; None if it is not installed.

    Nothing is imported for it.
    """
    library = os.environ.get("TPU_LIBRARY_PATH") if package == "libtpu" else None
    if library:
        return _version_beside(Path(library).resolve()) or f"unknown, {library}"
    for name in ("libtpu", "libtpu-nightly") if package == "libtpu" else (package,):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _version_beside(library: Path) -> str | None:
    """Version of the package that installed this file."""
    for name in ("libtpu", "libtpu-nightly"):
        for package in importlib.metadata.distributions(name=name, path=[str(library.parent.parent)]):
            named_so = [file for file in package.files or () if file.name == library.name]
            if any(Path(str(package.locate_file(file))).resolve() == library for file in named_so):
                return package.version
    return None


def _chip_digest(on: Chip, limits_only: bool) -> str:
    names = _LIMITS if limits_only else [f.name for f in fields(on) if f.name not in _UNIMPORTANT]
    values: list[tuple[str, Any]] = [(name, getattr(on, name)) for name in sorted(names)]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:_DIGITS]

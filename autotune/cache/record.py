"""Entries of what was just found."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping
from typing import Any

from autotune.cache.conditions import conditions
from autotune.cache.entry import Entry, Failure, Provenance, tiling_fields
from autotune.cache.kernel import Kernel
from autotune.problem import Problem
from bridge.chips import Chip

_DISTRIBUTION = "tpu-kernels-sdk"


def new_entry(
    kernel: Kernel,
    problem: Problem,
    on: Chip,
    source: str,
    tiling: Any,
    time_s: float | None,
    *,
    failures: Mapping[Any, str] | None = None,
    tried: int = 0,
    versions: Mapping[str, str] | None = None,
) -> Entry:
    """An entry with the conditions and the provenance of here and now, for `store`.

    Args:
        kernel: the kernel that was tuned.
        problem: what it was tuned for.
        on: the chip it was tuned for.
        source: where times come from: `Score.source`.
        tiling: the best tiling; None if every one failed.
        time_s: its time; None if there is none.
        failures: why other tilings failed, by tiling.
        tried: how many tilings got a score.
        versions: those that the scores name (`Score.versions`); else those installed here.

    Raises:
        ValueError, TypeError: `Entry` does not hold these values; or the kernel's source cannot be read.
    """
    return Entry(
        problem=problem,
        chip=on.name,
        source=source,
        tiling=None if tiling is None else tiling_fields(tiling),
        time_s=time_s,
        failures=tuple(Failure(tiling_fields(failed), reason) for failed, reason in (failures or {}).items()),
        conditions=conditions(kernel, on, source, versions),
        provenance=Provenance(
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), tool=_tool_version(), tried=tried
        ),
    )


def _tool_version() -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""

"""VMEM that each function takes, from the compiler's VMEM report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.schedule.errors import DumpError

_BEGIN = "const DATA ="


@dataclass(frozen=True)
class VmemUse:
    """VMEM of one function in bytes.

    Attributes:
        kernel: blocks, buffers and scratch that the kernel asked for, padding included.
        spills: for registers that did not fit.
        other: temporaries of XLA.
    """

    kernel: int
    spills: int
    other: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.kernel + self.spills + self.other


def read_vmem_report(path: Path) -> Mapping[str, VmemUse]:
    """VMEM by function. Raises `DumpError` where the report is not of the known form."""
    text = path.read_text()
    begin = text.find(_BEGIN)
    if begin < 0:
        raise DumpError(f"{path.name}: expected {_BEGIN!r} in the VMEM report")
    try:
        data, _ = json.JSONDecoder().raw_decode(text[begin + len(_BEGIN) :].lstrip())
        return {name: _use(entry["blocks"]) for name, entry in (data["hlo_breakdowns"] or {}).items()}
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise DumpError(f"{path.name}: the VMEM report is not of the known form: {error!r}") from error


def _use(blocks: list[dict[str, Any]]) -> VmemUse:
    kernel = spills = other = 0
    for block in blocks:
        size = sum(entry["size"] + entry.get("padding", 0) for entry in block["allocations"])
        size = max(size, block.get("block_size", 0))
        if "SPILL" in block["block_type"]:
            spills += size
        elif block["block_type"] == "SCOPED":
            kernel += size
        else:
            other += size
    return VmemUse(kernel, spills, other)

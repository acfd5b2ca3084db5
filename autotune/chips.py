"""The chips tilings are chosen for: their limits and rates, read from `chips.json`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Chip:
    """One TPU chip.

    Attributes:
        name: `v5e`, `v5p`, `v6e` or `tpu7x`.
        tensor_cores: TensorCores on the chip; rates below are of the whole chip.
        hbm_bytes_per_second: HBM bandwidth.
        bf16_flops_per_second: peak of the matrix units with bfloat16 operands.
        vmem_limit_bytes: VMEM that one kernel may use unless it asks for more.
        provenance: (field, "kind: source") of each value.
    """

    name: str
    tensor_cores: int
    hbm_bytes_per_second: float
    bf16_flops_per_second: float
    vmem_limit_bytes: int
    provenance: tuple[tuple[str, str], ...]


@functools.cache
def chips() -> Mapping[str, Chip]:
    """All chips by name."""
    entries = json.loads(resources.files("autotune").joinpath("chips.json").read_text())["chips"]
    return {name: _chip(name, fields) for name, fields in entries.items()}


def chip(name: str) -> Chip:
    """The chip called `name`. Raises `ValueError` with the valid names."""
    if name not in chips():
        raise ValueError(f"unknown chip {name!r}; expected one of {', '.join(chips())}")
    return chips()[name]


def _chip(name: str, fields: Mapping[str, Mapping[str, float | str]]) -> Chip:
    def number(field: str) -> float:
        return float(fields[field]["value"])

    return Chip(
        name=name,
        tensor_cores=int(number("tensor_cores")),
        hbm_bytes_per_second=number("hbm_bytes_per_second"),
        bf16_flops_per_second=number("bf16_flops_per_second"),
        vmem_limit_bytes=int(number("vmem_limit_bytes")),
        provenance=tuple((field, f"{entry['kind']}: {entry['source']}") for field, entry in fields.items()),
    )

"""TPU chips: their limits and rates, read from `chips.json`, the one place where such figures are kept.

Each figure comes with its kind (published, measured, derived, fitted, guess) and its source. Importing this
module imports neither torch nor JAX.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

KINDS = ("published", "measured", "derived", "fitted", "guess")
"""How a figure is known: said by its source; measured with the TPU compiler, or by its source on hardware;
computed from other figures; fitted to published times; a guess."""


@dataclass(frozen=True)
class Chip:
    """One TPU chip. Rates, HBM and links are of the whole chip; VMEM, SMEM and MXUs of one TensorCore.

    Attributes:
        name: `v4`, `v5e`, `v5p`, `v6e` or `tpu7x`.
        device_kind: what JAX calls a device of it.
        tensor_cores: TensorCores of the chip.
        devices_per_chip: devices that JAX sees for one chip; 2 on tpu7x, whose cores are a device each.
        sparse_cores: SparseCores of the chip.
        mxus_per_core: matrix units of a core.
        mxu_size: rows and columns of a matrix unit.
        mxu_flops_per_cycle: bfloat16 operations of all matrix units of a core in one cycle.
        clock_hz: cycles per second, at most.
        clock_efficiency: the share of that clock which long programs reach.
        bf16_flops_per_second: peak of the matrix units with bfloat16 operands.
        fp8_flops_per_second, int8_flops_per_second, int4_flops_per_second: the same with other operands;
            None where the chip does not compute with them.
        hbm_bytes: HBM.
        hbm_bytes_per_second: HBM bandwidth.
        hbm_efficiency: the share of that bandwidth which DMAs reach.
        dma_latency_seconds: time from the start of a small DMA to its end.
        dma_granule_bytes: unit in which DMAs move data.
        vmem_bytes: vector memory of a core.
        vmem_limit_bytes: VMEM that one kernel may use unless it asks for more.
        smem_bytes: scalar memory of a core.
        ici_links: links to neighbouring chips.
        ici_bytes_per_second: bandwidth of one link in one direction.
        ici_latency_seconds: time to a neighbouring chip.
        ici_wrap_size: an axis of a slice is a ring if its size is a multiple of this.
        on_chip_bytes_per_second: bandwidth between two devices of one chip, in one direction; None where a
            chip is one device.
        on_chip_latency_seconds: time from one device of a chip to the other; None in the same case.
        chip_config: name of the configuration libtpu compiles for: which cores make a device.
        topologies: shapes of the slices offered, in chips.
        provenance: (field, "kind: source") of each figure.
    """

    name: str
    device_kind: str
    tensor_cores: int
    devices_per_chip: int
    sparse_cores: int
    mxus_per_core: int
    mxu_size: int
    mxu_flops_per_cycle: int
    clock_hz: float
    clock_efficiency: float
    bf16_flops_per_second: float
    fp8_flops_per_second: float | None
    int8_flops_per_second: float | None
    int4_flops_per_second: float | None
    hbm_bytes: int
    hbm_bytes_per_second: float
    hbm_efficiency: float
    dma_latency_seconds: float
    dma_granule_bytes: int
    vmem_bytes: int
    vmem_limit_bytes: int
    smem_bytes: int
    ici_links: int
    ici_bytes_per_second: float
    ici_latency_seconds: float
    ici_wrap_size: int
    on_chip_bytes_per_second: float | None
    on_chip_latency_seconds: float | None
    chip_config: str
    topologies: tuple[str, ...]
    provenance: tuple[tuple[str, str], ...]

    @property
    def sustained_clock_hz(self) -> float:
        """Cycles per second of long programs."""
        return self.clock_hz * self.clock_efficiency

    @property
    def cores_per_device(self) -> int:
        """TensorCores of what a program sees as one device."""
        return self.tensor_cores // self.devices_per_chip


@functools.cache
def chips() -> Mapping[str, Chip]:
    """All chips by name, oldest first."""
    data = json.loads(resources.files("bridge").joinpath("chips.json").read_text(encoding="utf-8"))
    return {name: _chip(name, entry, data["sources"]) for name, entry in data["chips"].items()}


def chip(name: str) -> Chip:
    """The chip called `name`. Raises `ValueError` with the valid names."""
    try:
        return chips()[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown chip {name!r}; expected one of {', '.join(chips())}") from None


def _chip(name: str, entry: Mapping[str, Mapping[str, Any]], sources: Mapping[str, str]) -> Chip:
    expected = {field.name for field in fields(Chip)} - {"name", "provenance"}
    if set(entry) != expected:
        raise ValueError(f"chips.json, {name}: unexpected or missing {', '.join(set(entry) ^ expected)}")
    values = {field: _value(figure["value"]) for field, figure in entry.items()}
    provenance = tuple((field, f"{f['kind']}: {sources[f['source']]}") for field, f in entry.items())
    return Chip(name=name, provenance=provenance, **values)


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

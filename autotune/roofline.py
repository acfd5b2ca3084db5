"""The roofline: a lower bound of a kernel's time from its unavoidable work. No compiler, no hardware."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.chips import Chip
from autotune.spec import Cost


@dataclass(frozen=True)
class Roofline:
    """Least time a chip needs for some work.

    Attributes:
        seconds: the longer of memory and matrix-unit time. Vector arithmetic is not bounded here.
        bound: `hbm` or `mxu`, whichever is longer.
    """

    seconds: float
    bound: str


def roofline(cost: Cost, chip: Chip) -> Roofline:
    """The roofline of `cost` on all cores of `chip`."""
    memory = cost.bytes_moved / chip.hbm_bytes_per_second
    matmul = cost.matmul_flops / chip.bf16_flops_per_second
    return Roofline(memory, "hbm") if memory >= matmul else Roofline(matmul, "mxu")

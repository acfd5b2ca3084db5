"""The roofline: a lower bound of a time from unavoidable work. No compiler, no hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.score.protocol import Score, Workload
from autotune.spec import Cost
from bridge.chips import Chip


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


@dataclass(frozen=True)
class RooflineScorer:
    """Scores by the roofline of a workload's declared work. It knows nothing of tilings: all score the same.

    Attributes:
        chip: the chip scored for.
    """

    chip: Chip

    @property
    def source(self) -> str:
        """`roofline`."""
        return "roofline"

    def score(self, workload: Workload) -> Score:
        """The roofline of what `workload` declares, on one chip or on all devices of its mesh.

        Raises:
            ValueError: it declares no bytes.
        """
        if workload.bytes_read is None or workload.bytes_written is None:
            raise ValueError(
                f"{workload.name}: a roofline needs the bytes that must be read and written; the workload "
                "declares none. Install libtpu to score the compiler's schedule instead."
            )
        devices = math.prod(workload.mesh.axis_sizes) if workload.mesh is not None else 1
        chips = devices / self.chip.devices_per_chip if workload.mesh is not None else 1
        cost = Cost(
            flops=workload.flops or workload.matmul_flops or 0,
            bytes_read=workload.bytes_read,
            bytes_written=workload.bytes_written,
            matmul_flops=workload.matmul_flops or 0,
        )
        bound = roofline(cost, self.chip)
        reasons = ["a roofline is a lower bound; it does not depend on the tiling"]
        if workload.matmul_flops is None:
            reasons.append("the workload declares no operations of the matrix units")
        if devices > 1:
            reasons.append("what devices send each other is not counted")
        busy = bound.seconds or 1.0
        return Score(
            time_s=bound.seconds / chips,
            source=self.source,
            bound=bound.bound,
            units={
                "hbm": cost.bytes_moved / self.chip.hbm_bytes_per_second / busy,
                "mxu": cost.matmul_flops / self.chip.bf16_flops_per_second / busy,
            },
            breakdown={},
            dma_bytes_read=cost.bytes_read,
            dma_bytes_written=cost.bytes_written,
            vmem_bytes=0,
            spills=0,
            grid_steps=None,
            confidence="medium" if workload.matmul_flops is not None else "low",
            reasons=tuple(reasons),
            unknowns=(),
            chip=self.chip.name,
            devices=devices,
        )

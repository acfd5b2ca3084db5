"""What a run of a program was like: of one core as a whole, and of each function on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autotune.schedule.records import Copies, Rates, Span
from autotune.schedule.scalar import Function
from autotune.schedule.utilization import UnitUse
from autotune.schedule.vmem import VmemUse


@dataclass(frozen=True)
class Moved:
    """Bytes that copies moved.

    Attributes:
        read: from HBM.
        written: to HBM.
        sent: to other devices.
        received: from other devices.
    """

    read: int = 0
    written: int = 0
    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class FunctionRun:
    """What one function did during the run, all its calls together.

    Attributes:
        name: name of the HLO instruction.
        calls: how often it was called.
        cycles: from begin to end, stalls included.
        stalled_cycles: of them, waiting for copies and for other devices.
        stalled_on_others: of those, waiting for other devices.
        bytes_read: bytes its copies brought from HBM.
        bytes_written: bytes its copies brought to HBM.
        bytes_sent: bytes it sent to other devices; of a collective operation, the least it must send.
        bytes_received: bytes that it got from other devices.
        link_cycles: cycles that the link it sends most through was busy with that.
        function: its code; None if its time is an estimate.
        counts: how often each block ran.
        units: use of the units; None if the compiler wrote none.
        vmem: VMEM it takes; None if the compiler wrote no report.
        unknowns: what could not be known, each with how often it mattered.
    """

    name: str
    calls: int
    cycles: float
    stalled_cycles: float
    stalled_on_others: float
    bytes_read: int
    bytes_written: int
    bytes_sent: int
    bytes_received: int
    link_cycles: float
    function: Function | None
    counts: tuple[int, ...]
    units: UnitUse | None
    vmem: VmemUse | None
    unknowns: Mapping[str, int]

    @property
    def estimated(self) -> bool:
        """Whether its time is an estimate from the bytes it must move."""
        return self.function is None

    @property
    def grid_loop_trips(self) -> int | None:
        """How often the loop over the grid ran: up to 2 more than it has steps, for the pipeline."""
        if self.function is None or self.function.grid_loop is None:
            return None
        return self.counts[self.function.grid_loop]

    @property
    def mxu_visits(self) -> int:
        """Executions of the code that feeds the matrix units most often: block visits of a sparse kernel."""
        busy = self.units.block_busy_cycles if self.units else ()
        return max((n for n, use in zip(self.counts, busy, strict=False) if use.get("mxu", 0) > 0), default=0)


@dataclass(frozen=True)
class Run:
    """One core's run of a program.

    Attributes:
        core: number of the core in its device.
        rank: place of its device in the mesh.
        cycles: from the first instruction to the last.
        stalled_cycles: on reads from HBM, on writes to HBM, on copies within the core, on other devices.
        bytes_read: bytes that copies brought from HBM.
        bytes_written: bytes that copies brought to HBM.
        bytes_sent: bytes sent to other devices.
        bytes_received: bytes that came from other devices.
        link_cycles: cycles that the busiest link of the mesh was busy.
        functions: every function that was called, in order of the first call.
        spans: every call.
        copies: every copy.
        stalls: (begin, end) of every stall, in cycles.
        rates: the speed of copies.
    """

    core: int
    rank: int
    cycles: float
    stalled_cycles: tuple[float, ...]
    bytes_read: int
    bytes_written: int
    bytes_sent: int
    bytes_received: int
    link_cycles: float
    functions: tuple[FunctionRun, ...]
    spans: tuple[Span, ...]
    copies: Copies
    stalls: tuple[np.ndarray, np.ndarray]
    rates: Rates

    @property
    def hbm_cycles(self) -> float:
        """Cycles the HBM channel was busy."""
        return (self.bytes_read + self.bytes_written) / self.rates.bytes_per_cycle

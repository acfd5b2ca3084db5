"""How busy each unit is: rows of the compiler's per-bundle utilization, times how often each bundle ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.schedule.errors import DumpError
from autotune.schedule.scalar import Block

UNITS: Mapping[str, tuple[str, ...]] = {
    "mxu": ("MATMUL", "MXU"),
    "mxu_push": ("MATPUSH",),
    "vpu": ("VALU",),
    "eup": ("EUP",),
    "xlu": ("XLU",),
    "pop": ("VPOP",),
    "load": ("VLOAD",),
    "store": ("VSTORE",),
    "scalar": ("SALU",),
}
"""Units and the columns that may stand for them; releases name the first one `MATMUL` or `MXU`."""

SPILL_COLUMNS = ("VSTORE:SPILL", "VLOAD:FILL")


@dataclass(frozen=True)
class UtilizationTable:
    """Slots used in each cycle of a function.

    Attributes:
        columns: names, as printed.
        capacity: slots of each column in one cycle.
        slots: slots used; one row per address, one column per name.
    """

    columns: tuple[str, ...]
    capacity: np.ndarray
    slots: np.ndarray

    def column(self, *names: str) -> int | None:
        """The place of the first of `names` that there is."""
        return next((self.columns.index(name) for name in names if name in self.columns), None)


@dataclass(frozen=True)
class UnitUse:
    """Work of the units while a function ran.

    Attributes:
        busy_cycles: for each unit, the cycles it needs at least for the work it was given.
        capacity: instructions that each unit takes in a cycle.
        spill_stores: vector registers written to VMEM because there were too few.
        spill_loads: vector registers read back.
        block_busy_cycles: the same as `busy_cycles`, by block and unit.
    """

    busy_cycles: Mapping[str, float]
    capacity: Mapping[str, int]
    spill_stores: int
    spill_loads: int
    block_busy_cycles: tuple[Mapping[str, float], ...]


def read_utilization(name: str, path: Path) -> UtilizationTable:
    """The table in `path`. Raises `DumpError` where the text is not of the known form."""
    lines = path.read_text().splitlines()
    if len(lines) < 4 or "UTILIZATION" not in lines[3]:
        raise DumpError(f"{name}: expected CAPACITY and UTILIZATION headings in {path.name}, got {lines[:4]}")
    columns = tuple(column.strip() for column in lines[1].split(","))
    try:
        capacity = np.array(lines[2].split(), dtype=np.int64)
        slots = np.array([line.split() for line in lines[4:] if line.strip()], dtype=np.int64)
    except ValueError as error:
        raise DumpError(f"{name}: {path.name} must hold numbers only: {error}") from None
    if capacity.shape != (len(columns),) or (slots.size and slots.shape[1:] != (len(columns),)):
        raise DumpError(
            f"{name}: {path.name} has {len(columns)} columns, but rows of {slots.shape[1:]} numbers"
        )
    return UtilizationTable(columns, capacity, slots.reshape(-1, len(columns)))


def unit_use(table: UtilizationTable, blocks: Sequence[Block], counts: Sequence[int]) -> UnitUse:
    """Unit use of a run that executed each block as often as `counts` says.

    Raises:
        DumpError: the table has another length than the code, so it belongs to something else.
    """
    length = blocks[-1].end
    if len(table.slots) != length:
        raise DumpError(f"the utilization has {len(table.slots)} rows for code of {length} cycles")
    sums = np.add.reduceat(table.slots, [block.start for block in blocks], axis=0)
    executed = sums * np.asarray(counts, dtype=np.int64)[:, None]
    by_unit: list[tuple[str, np.ndarray]] = []
    capacity: dict[str, int] = {}
    for unit, names in UNITS.items():
        place = table.column(*names)
        if place is not None and table.capacity[place] > 0:
            by_unit.append((unit, executed[:, place] / table.capacity[place]))
            capacity[unit] = int(table.capacity[place])
    spills = [table.column(name) for name in SPILL_COLUMNS]
    totals = [0 if place is None else int(executed[:, place].sum()) for place in spills]
    return UnitUse(
        {unit: float(busy.sum()) for unit, busy in by_unit},
        capacity,
        totals[0],
        totals[1],
        tuple({unit: float(busy[index]) for unit, busy in by_unit} for index in range(len(blocks))),
    )

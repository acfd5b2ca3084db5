"""Runs a compiled program on a chip that is not there: harvest, translate, execute, add up.

The program itself (`TLP`) is executed as well as everything it calls. So copies that XLA starts ahead of a
kernel overlap with what runs meanwhile, operands that XLA keeps in VMEM cost what they cost, several kernels
in one program share the HBM channel, and operations of XLA take the time of their own schedules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autotune.schedule.bundles import Parameter, read_listing
from autotune.schedule.errors import RunawayError
from autotune.schedule.harvest import PROGRAM, FunctionFiles, Harvest, harvest
from autotune.schedule.hlo import HBM_SPACE, ArrayType, HloInstruction, instructions, twin
from autotune.schedule.scalar import Function, translate
from autotune.schedule.statements import ALLOCATION_BITS
from autotune.schedule.timeline import LOOP_TRIPS_LIMIT, READ, WRITE, Copies, Machine, Rates, Span
from autotune.schedule.utilization import UnitUse, read_utilization, unit_use
from autotune.schedule.vmem import VmemUse, read_vmem_report
from bridge.chips import Chip

Operands = Mapping[str, Sequence[np.ndarray | None]]
"""32-bit words of a kernel's operands as they lie in memory, by the name of its function; None if unknown."""


@dataclass(frozen=True)
class Dialect:
    """How the code of one chip differs.

    Attributes:
        delay_slots: bundles after a branch that run anyway.
        hbm_unit_bytes: unit of HBM addresses.
    """

    delay_slots: int
    hbm_unit_bytes: int


# Read off dumps of libtpu 0.0.52: the distance from the branch that closes a loop to the code after it, and
# the constants of the bounds checks of copies.
DIALECTS: Mapping[str, Dialect] = {
    "v4": Dialect(1, 512),
    "v5e": Dialect(4, 512),
    "v5p": Dialect(4, 32),
    "v6e": Dialect(4, 512),
    "tpu7x": Dialect(6, 32),
}

VMEM_BYTES_PER_CYCLE = 4096
"""Speed assumed of XLA operations within VMEM whose schedule is not executed: one vector register a cycle."""

_ITEM_BITS = re.compile(r"[a-z]+(\d+)")


@dataclass(frozen=True)
class FunctionRun:
    """What one function did during the run, all its calls together.

    Attributes:
        name: name of the HLO instruction.
        calls: how often it was called.
        cycles: from begin to end, stalls included.
        stalled_cycles: of them, waiting for copies.
        bytes_read: bytes its copies brought from HBM.
        bytes_written: bytes its copies brought to HBM.
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
    bytes_read: int
    bytes_written: int
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
        core: number of the core.
        cycles: from the first instruction to the last.
        stalled_cycles: (on reads from HBM, on writes to HBM, on copies within the core).
        bytes_read: bytes that copies brought from HBM.
        bytes_written: bytes that copies brought to HBM.
        functions: every function that was called, in order of the first call.
        spans: every call.
        copies: every copy.
        stalls: (begin, end) of every stall, in cycles.
        rates: the speed of copies.
    """

    core: int
    cycles: float
    stalled_cycles: tuple[float, float, float]
    bytes_read: int
    bytes_written: int
    functions: tuple[FunctionRun, ...]
    spans: tuple[Span, ...]
    copies: Copies
    stalls: tuple[np.ndarray, np.ndarray]
    rates: Rates

    @property
    def hbm_cycles(self) -> float:
        """Cycles the HBM channel was busy."""
        return (self.bytes_read + self.bytes_written) / self.rates.bytes_per_cycle


@dataclass(frozen=True)
class Program:
    """A compiled program, ready to run.

    Attributes:
        chip: what it was compiled for.
        functions: its code by name; `TLP` is the program that calls the others.
        files: where each one came from.
        module: instructions of the scheduled HLO module.
        vmem: VMEM by function.
    """

    chip: Chip
    functions: Mapping[str, Function]
    files: Mapping[str, FunctionFiles]
    module: Mapping[str, HloInstruction]
    vmem: Mapping[str, VmemUse]

    def run(self, operands: Operands | None = None) -> tuple[Run, ...]:
        """Run it on every core of a device.

        Operations of XLA whose code depends on values, which nobody gives, take the time of a roofline. Cores
        of a chip share its HBM bandwidth; a core of the device that copies nothing leaves it its share.

        Raises:
            RunawayError: it does not end.
        """
        given = operands or {}
        missing = _callees(self.functions) - set(self.functions)
        estimates = {name: self._estimate(name) for name in missing if self._is_xla(name)}
        runs = self._run_cores(given, estimates)
        doubtful = {f.name for run in runs for f in run.functions if f.unknowns and self._is_xla(f.name)}
        if doubtful:
            runs = self._run_cores(given, estimates | {name: self._estimate(name) for name in doubtful})
        return runs

    def _run_cores(self, operands: Operands, estimates: Mapping[str, float]) -> tuple[Run, ...]:
        cores = range(self.chip.cores_per_device)
        runs = [self._run_core(core, self.chip.tensor_cores, operands, estimates) for core in cores]
        working = [run.core for run in runs if run.bytes_read + run.bytes_written]
        if len(working) == 1 and len(runs) > 1:
            sharing = self.chip.tensor_cores // self.chip.cores_per_device
            runs[working[0]] = self._run_core(working[0], sharing, operands, estimates)
        return tuple(runs)

    def _is_xla(self, name: str) -> bool:
        """Whether it is an operation of XLA, rather than a kernel or the program."""
        return name in self.module and not self.module[name].is_kernel

    def _estimate(self, name: str) -> float:
        """Cycles of an operation of XLA by the bytes of its operands and results, on one core."""
        instruction = self.module[name]
        arrays = list(instruction.results)
        for operand in instruction.operands:
            arrays += self.module[operand].results if operand in self.module else ()
        rates = core_rates(self.chip, self.chip.tensor_cores)
        in_hbm = sum(array_bytes(array) for array in arrays if array.space == HBM_SPACE)
        elsewhere = sum(array_bytes(array) for array in arrays if array.space != HBM_SPACE)
        latency = 2 * rates.latency_cycles if in_hbm else 0.0
        return in_hbm / rates.bytes_per_cycle + latency + elsewhere / VMEM_BYTES_PER_CYCLE

    def _run_core(self, core: int, sharing: int, operands: Operands, estimates: Mapping[str, float]) -> Run:
        rates = core_rates(self.chip, sharing)
        bases = {name: self._bases(function.parameters) for name, function in self.functions.items()}
        machine = Machine(rates, self.functions, operands, bases, core, estimates)
        try:
            cycles = machine.run(PROGRAM)
        except RunawayError:
            raise RunawayError(
                f"the program did not end within {LOOP_TRIPS_LIMIT} loop trips; its grid is too large to "
                "execute, or a loop bound is wrong"
            ) from None
        copied = _bytes_by_function(machine.copies, list(self.functions))
        return Run(
            core,
            cycles,
            (machine.stalled_on[0], machine.stalled_on[1], machine.stalled_on[2]),
            sum(read for read, _ in copied.values()),
            sum(written for _, written in copied.values()),
            tuple(self._function_run(name, machine, copied) for name in _in_order(machine.spans)),
            tuple(machine.spans),
            machine.copies,
            (np.asarray(machine.stalls[0]), np.asarray(machine.stalls[1])),
            rates,
        )

    def _function_run(
        self, name: str, machine: Machine, copied: Mapping[str, tuple[int, int]]
    ) -> FunctionRun:
        spans = [span for span in machine.spans if span.name == name]
        estimated = name not in machine.counts or not any(machine.counts[name])
        function = None if estimated else self.functions[name]
        counts = () if function is None else tuple(machine.counts[name])
        use, table = None, self.files[name].utilization if function else None
        if function is not None and table is not None:
            use = unit_use(read_utilization(name, table), function.blocks, counts)
        read, written = copied.get(name, (0, 0))
        return FunctionRun(
            name,
            machine.calls[name],
            sum(span.end - span.begin for span in spans),
            sum(span.stalled for span in spans),
            read,
            written,
            function,
            counts,
            use,
            self.vmem.get(name),
            dict(machine.unknowns.get(name, {})),
        )

    def _bases(self, parameters: Sequence[Parameter]) -> dict[int, int]:
        """An address for each operand. In HBM, arrays must not overlap: bounds checks compare addresses.

        All are odd. Copies take addresses as they are or times 16, and so the two cannot be mistaken.
        """
        unit = DIALECTS[self.chip.name].hbm_unit_bytes
        bases: dict[int, int] = {}
        free = 1
        for parameter in parameters:
            if parameter.space in ("vmem", "smem"):
                bases[parameter.index] = ((parameter.index + 1) << ALLOCATION_BITS) + 1
            elif parameter.space == "hbm":
                bases[parameter.index] = free
                free += 2 * math.ceil(_padded_bytes(parameter.shape) / unit / 2)
        return bases


def load_program(folder: Path, chip: Chip) -> Program:
    """The program whose dumps lie in `folder`, compiled for `chip`.

    Raises:
        DumpError: files are missing or not of the known form.
        ValueError: the code of this chip is not known.
    """
    dialect = DIALECTS.get(chip.name)
    if dialect is None:
        raise ValueError(f"schedules of {chip.name} are not known; expected one of {', '.join(DIALECTS)}")
    found: Harvest = harvest(folder)
    module = instructions(found.hlo)
    files = {name: entry for name, entry in found.functions.items() if not name.startswith("<")}
    functions = {
        name: translate(read_listing(name, entry.bundles), dialect.delay_slots)
        for name, entry in files.items()
    }
    for name in _callees(functions) - set(functions):
        same = twin(name, module, iter(list(functions)))
        if same is not None:
            functions[name], files[name] = replace(functions[same], name=name), files[same]
    vmem = read_vmem_report(found.vmem_report) if found.vmem_report else {}
    return Program(chip, functions, files, module, vmem)


def core_rates(chip: Chip, sharing: int) -> Rates:
    """Speed of copies on `chip` if `sharing` cores use its HBM."""
    return Rates(
        chip.hbm_bytes_per_second * chip.hbm_efficiency / sharing / chip.sustained_clock_hz,
        chip.dma_latency_seconds * chip.sustained_clock_hz,
        chip.dma_granule_bytes,
    )


def array_bytes(array: ArrayType) -> int:
    """Bytes of an array without padding."""
    bits = _ITEM_BITS.match(array.dtype)
    return math.prod(array.shape) * (int(bits[1]) if bits else 8) // 8


def _callees(functions: Mapping[str, Function]) -> set[str]:
    """Everything that is called, without the runtime's own work before and after the program."""
    called = {callee for function in functions.values() for callee in function.callees}
    return {name for name in called if not name.startswith("<")}


def _bytes_by_function(copies: Copies, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(bytes read from HBM, bytes written to HBM) by function."""
    kinds = np.frombuffer(copies.kind, dtype=np.int8)
    owners = np.asarray(copies.owner)
    nbytes = np.asarray(copies.nbytes)
    moved = [
        np.bincount(owners[kinds == kind], nbytes[kinds == kind], minlength=len(names))
        for kind in (READ, WRITE)
    ]
    return {name: (int(moved[0][n]), int(moved[1][n])) for n, name in enumerate(names)}


def _in_order(spans: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys(span.name for span in sorted(spans, key=lambda span: span.begin)))


def _padded_bytes(shape: str) -> int:
    """Bytes of an array such as `bf16[1000,100]`, its last two sizes rounded up to whole tiles."""
    dtype, _, sizes = shape.partition("[")
    bits = _ITEM_BITS.match(dtype)
    dims = [int(size) for size in re.findall(r"\d+", sizes.split("]")[0])]
    if dims:
        dims[-1] = -(-dims[-1] // 128) * 128
    if len(dims) > 1:
        dims[-2] = -(-dims[-2] // 32) * 32
    return math.prod(dims) * (int(bits[1]) if bits else 8) // 8

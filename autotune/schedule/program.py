"""Runs a compiled program on a chip that is not there: harvest, translate, execute, add up.

The program itself (`TLP`) is executed as well as everything it calls. So copies that XLA starts ahead of a
kernel overlap with what runs meanwhile, operands that XLA keeps in VMEM cost what they cost, several kernels
in one program share the HBM channel, and operations of XLA take the time of their own schedules. A program
for a mesh runs on all its devices at once if they have to do with each other (`ranks`), else on one of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from autotune.schedule.bundles import Parameter, read_listing
from autotune.schedule.collectives import Collective, collective, least_cycles, link_bytes, moved_bytes
from autotune.schedule.errors import RunawayError
from autotune.schedule.harvest import PROGRAM, FunctionFiles, Harvest, harvest
from autotune.schedule.hlo import HBM_SPACE, HloInstruction, array_bytes, instructions, twin
from autotune.schedule.network import Link, Slice, bytes_per_cycle
from autotune.schedule.ranks import Ranks
from autotune.schedule.records import READ, RECEIVED, REMOTE, WRITE, Copies, Identity, Rates, Span
from autotune.schedule.runs import FunctionRun, Moved, Run
from autotune.schedule.scalar import Function, translate
from autotune.schedule.statements import ALLOCATION_BITS
from autotune.schedule.timeline import LOOP_TRIPS_LIMIT, Machine
from autotune.schedule.utilization import read_utilization, unit_use
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
        chip_shift: the bit from which on the address of a signal names a chip.
    """

    delay_slots: int
    hbm_unit_bytes: int
    chip_shift: int = 17


# Read off dumps of libtpu 0.0.52: the distance from the branch that closes a loop to the code after it, the
# constants of the bounds checks of copies, and how the address of a signal to another chip is made.
DIALECTS: Mapping[str, Dialect] = {
    "v4": Dialect(1, 512, chip_shift=18),
    "v5e": Dialect(4, 512),
    "v5p": Dialect(4, 32),
    "v6e": Dialect(4, 512),
    "tpu7x": Dialect(6, 32),
}

VMEM_BYTES_PER_CYCLE = 4096
"""Speed assumed of XLA operations within VMEM whose schedule is not executed: one vector register a cycle."""

_ITEM_BITS = re.compile(r"[a-z]+(\d+)")


@dataclass(frozen=True)
class Program:
    """A compiled program, ready to run.

    Attributes:
        chip: what it was compiled for.
        functions: its code by name; `TLP` is the program that calls the others.
        files: where each one came from.
        module: instructions of the scheduled HLO module.
        vmem: VMEM by function.
        around: the devices it was compiled for; None for one device.
        collectives: its collective operations.
    """

    chip: Chip
    functions: Mapping[str, Function]
    files: Mapping[str, FunctionFiles]
    module: Mapping[str, HloInstruction]
    vmem: Mapping[str, VmemUse]
    around: Slice | None = None
    collectives: Mapping[str, Collective] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """How many devices run it."""
        return len(self.around.places) if self.around else 1

    @property
    def communicates(self) -> bool:
        """Whether its devices have to do with each other; else they all do the same."""
        far = bool(self.collectives) or any(function.far for function in self.functions.values())
        return self.around is not None and far

    def run(self, operands: Operands | Sequence[Operands] | None = None) -> tuple[Run, ...]:
        """Run it on every core of every device; on those of one device if all devices do the same.

        Operations of XLA whose code depends on values, which nobody gives, and collective operations take the
        time of a roofline. Cores of a chip share its HBM bandwidth; a core of the device that copies nothing
        leaves it its share.

        Args:
            operands: those of the kernels, or a sequence of such, one for each device.

        Raises:
            RunawayError: it does not end.
        """
        by_rank = [operands or {}] if isinstance(operands, Mapping | None) else list(operands)
        count = self.devices if self.communicates else 1
        given = [by_rank[min(rank, len(by_rank) - 1)] for rank in range(count)]
        missing = _callees(self.functions) - set(self.functions)
        estimated = {name for name in missing if self._is_xla(name)}
        runs = self._run_cores(given, estimated)
        doubtful = {f.name for run in runs for f in run.functions if f.unknowns and self._is_xla(f.name)}
        return self._run_cores(given, estimated | doubtful) if doubtful else runs

    def _run_cores(self, operands: Sequence[Operands], estimated: set[str]) -> tuple[Run, ...]:
        runs = self._run_all(self.chip.tensor_cores, operands, estimated)
        working = {run.core for run in runs if run.bytes_read + run.bytes_written}
        cores = self.chip.cores_per_device
        if len(working) == 1 and cores > 1:
            alone = self._run_all(self.chip.tensor_cores // cores, operands, estimated)
            runs = tuple(a if a.core in working else b for a, b in zip(alone, runs, strict=True))
        return runs

    def _is_xla(self, name: str) -> bool:
        """Whether it is an operation of XLA, rather than a kernel or the program."""
        return name in self.module and not self.module[name].is_kernel

    def _estimate(self, name: str, rank: int) -> float:
        """Cycles of an operation of XLA by the bytes of its operands and results, on one core."""
        instruction = self.module[name]
        arrays = list(instruction.results)
        for operand in instruction.operands:
            arrays += self.module[operand].results if operand in self.module else ()
        rates = core_rates(self.chip, self.chip.tensor_cores)
        in_hbm = sum(array_bytes(array) for array in arrays if array.space == HBM_SPACE)
        elsewhere = sum(array_bytes(array) for array in arrays if array.space != HBM_SPACE)
        latency = 2 * rates.latency_cycles if in_hbm else 0.0
        local = in_hbm / rates.bytes_per_cycle + latency + elsewhere / VMEM_BYTES_PER_CYCLE
        if name not in self.collectives or self.around is None:
            return local
        return max(local, least_cycles(self.collectives[name], self._group(name, rank), self.around))

    def _group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks that take part in a collective operation together with `rank`."""
        return next((group for group in self.collectives[name].groups if rank in group), (rank,))

    def _run_all(self, sharing: int, operands: Sequence[Operands], estimated: set[str]) -> tuple[Run, ...]:
        """Run all cores of as many devices as there are operands for."""
        rates = core_rates(self.chip, sharing)
        bases = {name: self._bases(function.parameters) for name, function in self.functions.items()}
        ranks: Ranks | None = None
        if self.around is not None and self.communicates:
            groups = {name: operation.groups for name, operation in self.collectives.items()}
            ranks = Ranks(self.around, DIALECTS[self.chip.name].chip_shift, groups)
        machines = [
            Machine(
                rates,
                self.functions,
                given,
                bases,
                self._identity(rank, core, ranks),
                {name: self._estimate(name, rank) for name in estimated},
                ranks,
            )
            for rank, given in enumerate(operands)
            for core in range(self.chip.cores_per_device)
        ]
        try:
            cycles = ranks.run(machines, PROGRAM) if ranks else [m.run(PROGRAM) for m in machines]
        except RunawayError:
            raise RunawayError(
                f"the program did not end within {LOOP_TRIPS_LIMIT} loop trips; its grid is too large to "
                "execute, or a loop bound is wrong"
            ) from None
        links: dict[Link, float] = dict(ranks.network.busy) if ranks else {}
        for machine in machines:
            for name in self.collectives:
                if machine.core_in_device == 0 and machine.rank == self._group(name, machine.rank)[0]:
                    for link, busy in self._collective_links(name, machine).items():
                        links[link] = links.get(link, 0.0) + busy
        busiest = max(links.values(), default=0.0)
        return tuple(self._run_of(m, took, busiest) for m, took in zip(machines, cycles, strict=True))

    def _identity(self, rank: int, core: int, ranks: Ranks | None) -> Identity:
        if ranks is None or self.around is None:
            return Identity(core=core, core_in_device=core)
        place = self.around.places[rank]
        return Identity(rank, self.around.chip_number(place), place.core + core, core)

    def _collective_links(self, name: str, machine: Machine) -> dict[Link, float]:
        """Cycles that all calls of a collective operation keep links busy with, those of the whole group."""
        if name not in self.collectives or self.around is None:
            return {}
        loads = link_bytes(self.collectives[name], self._group(name, machine.rank), self.around)
        return {
            link: nbytes / bytes_per_cycle(self.chip, [link]) * machine.calls[name]
            for link, nbytes in loads.items()
        }

    def _run_of(self, machine: Machine, cycles: float, link_cycles: float) -> Run:
        moved = _bytes_by_function(machine.copies, list(self.functions))
        functions = tuple(
            self._function_run(name, machine, moved.get(name, Moved())) for name in _in_order(machine.spans)
        )
        everything = [*moved.values(), *(self._collective_bytes(f.name, machine) for f in functions)]
        return Run(
            machine.core_in_device,
            machine.rank,
            cycles,
            tuple(machine.stalled_on),
            sum(each.read for each in everything),
            sum(each.written for each in everything),
            sum(each.sent for each in everything),
            sum(each.received for each in everything),
            link_cycles,
            functions,
            tuple(machine.spans),
            machine.copies,
            (np.asarray(machine.stalls[0]), np.asarray(machine.stalls[1])),
            machine.rates,
        )

    def _collective_bytes(self, name: str, machine: Machine) -> Moved:
        """What a collective operation sends and gets in all its calls."""
        if name not in self.collectives or machine.core_in_device:
            return Moved()
        sent, received = moved_bytes(self.collectives[name], self._group(name, machine.rank), machine.rank)
        return Moved(sent=sent * machine.calls[name], received=received * machine.calls[name])

    def _function_run(self, name: str, machine: Machine, moved: Moved) -> FunctionRun:
        spans = [span for span in machine.spans if span.name == name]
        estimated = name not in machine.counts or not any(machine.counts[name])
        function = None if estimated else self.functions[name]
        counts = () if function is None else tuple(machine.counts[name])
        use, table = None, self.files[name].utilization if function else None
        if function is not None and table is not None:
            use = unit_use(read_utilization(name, table), function.blocks, counts)
        together = self._collective_bytes(name, machine)
        links = [*machine.link_cycles[name].values(), *self._collective_links(name, machine).values()]
        return FunctionRun(
            name,
            machine.calls[name],
            sum(span.end - span.begin for span in spans),
            sum(span.stalled for span in spans),
            sum(span.stalled_on_others for span in spans),
            moved.read,
            moved.written,
            moved.sent + together.sent,
            moved.received + together.received,
            max(links, default=0.0),
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


def load_program(folder: Path, chip: Chip, around: Slice | None = None) -> Program:
    """The program whose dumps lie in `folder`, compiled for `chip`, and for the devices of `around`.

    Raises:
        DumpError: files are missing or not of the known form.
        ValueError: the code of this chip is not known.
    """
    dialect = DIALECTS.get(chip.name)
    if dialect is None:
        raise ValueError(f"schedules of {chip.name} are not known; expected one of {', '.join(DIALECTS)}")
    found: Harvest = harvest(folder)
    module = instructions(found.hlo)
    devices = len(around.places) if around else 1
    collectives = {
        name: operation
        for name, instruction in module.items()
        if not instruction.is_kernel and (operation := collective(instruction, module, devices)) is not None
    }
    files = {
        name: entry
        for name, entry in found.functions.items()
        if not name.startswith("<") and name not in collectives
    }
    functions = {
        name: translate(read_listing(name, entry.bundles), dialect.delay_slots, devices)
        for name, entry in files.items()
    }
    for name in _callees(functions) - set(functions) - set(collectives):
        same = twin(name, module, iter(list(functions)))
        if same is not None:
            functions[name], files[name] = replace(functions[same], name=name), files[same]
    vmem = read_vmem_report(found.vmem_report) if found.vmem_report else {}
    return Program(chip, functions, files, module, vmem, around if devices > 1 else None, collectives)


def core_rates(chip: Chip, sharing: int) -> Rates:
    """Speed of copies on `chip` if `sharing` cores use its HBM."""
    return Rates(
        chip.hbm_bytes_per_second * chip.hbm_efficiency / sharing / chip.sustained_clock_hz,
        chip.dma_latency_seconds * chip.sustained_clock_hz,
        chip.dma_granule_bytes,
    )


def _callees(functions: Mapping[str, Function]) -> set[str]:
    """Everything that is called, without the runtime's own work before and after the program."""
    called = {callee for function in functions.values() for callee in function.callees}
    return {name for name in called if not name.startswith("<")}


def _bytes_by_function(copies: Copies, names: Sequence[str]) -> dict[str, Moved]:
    """What the copies of each function moved."""
    kinds = np.frombuffer(copies.kind, dtype=np.int8)
    owners = np.asarray(copies.owner)
    nbytes = np.asarray(copies.nbytes)
    sums = [
        np.bincount(owners[kinds == kind], nbytes[kinds == kind], minlength=len(names))
        for kind in (READ, WRITE, REMOTE, RECEIVED)
    ]
    return {name: Moved(*(int(total[number]) for total in sums)) for number, name in enumerate(names)}


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

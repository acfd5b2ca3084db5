"""Scores by the TPU compiler's schedule: compile for the chip, execute the schedule, judge the result.

No hardware is needed. What the compiler decided (which instruction is issued when) is taken as it is; only
copies are modelled, by the chip's bandwidth and latency. What cannot be known gives low confidence. A program
over a mesh is executed on all its devices, and scored by the one that takes longest.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from autotune.schedule.hlo import HloInstruction, kernel_names
from autotune.schedule.network import Place, Slice
from autotune.schedule.operands import KernelCall, kernel_calls, operand_words
from autotune.schedule.program import Program, load_program
from autotune.schedule.records import STALLS
from autotune.schedule.runs import FunctionRun, Run
from autotune.schedule.utilization import UNITS
from autotune.score.protocol import KernelScore, Score, Workload
from bridge.chips import Chip

VERIFIED_CHIPS = ("v5e", "tpu7x")
"""Chips for which predictions agreed with published times: see benchmarks/schedule_vs_published.py."""

PIPELINE_STAGES = 2
"""The loop over a grid runs up to this much longer, to start the first copy and end the last."""

BUSY_ENOUGH = 0.5
"""Share of the time from which on a unit counts as what limits a program."""

CHANNEL_BUSY_ENOUGH = 0.8
"""The same of HBM and links; below it, waiting for copies is waiting for their latency."""

STALLED_ENOUGH = 0.3
"""Share of stalls from which on a program waits for copies rather than computes."""

ESTIMATED_TOLERATED = 0.02
"""Share of the time that may be a roofline of XLA operations before confidence is low."""

SPARSE_CORE_OPTIONS = (
    "xla_tpu_enable_offloading_gather_to_sparsecore",
    "xla_tpu_enable_offloading_scatter_to_sparsecore",
    "xla_tpu_offload_gather_to_sparsecore",
    "xla_tpu_enable_offloading_copy_to_sparsecore",
)
"""Options of XLA that are off when a score is made: its own gathers, scatters and copies stay on the
TensorCore, whose schedules can be executed. Those of SparseCores cannot."""

MESH_OPTIONS = (
    *(
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}"
        for kind in (
            "all_gather",
            "2d_all_gather",
            "3d_all_gather",
            "all_reduce",
            "reduce_scatter",
            "nd_reduce_scatter",
            "dense_all_to_all",
            "ragged_all_to_all",
        )
    ),
    "xla_tpu_enable_async_collective_fusion",
    "xla_enable_async_all_gather",
    "xla_enable_async_all_reduce",
    "xla_enable_async_reduce_scatter_fusion",
)
"""The same for programs over a mesh: collective operations stay on the TensorCore, and apart from
others, since they are a roofline and those are executed."""

PERMUTE_OPTION = "xla_enable_async_collective_permute"
"""The same where a mesh is a part of a slice: the code of a permutation that runs beside others reads tables
of the runtime then, and cannot be executed."""

ROUNDING = 1e-6
"""By how much sums of floats may disagree."""

BOUND_UNITS = ("mxu", "vpu", "eup", "xlu", "load", "store", "scalar")


class Compiled(Protocol):
    """What a compiler returns: see `bridge.topology.compile_for`."""

    @property
    def dumps(self) -> Path | None:
        """Folder with the compiler's dumps."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of jax and libtpu."""
        ...


Compile = Callable[[Workload, Chip], contextlib.AbstractContextManager[tuple[Compiled, Any]]]
"""Compiles a workload with dumps, and gives the result and the traced jaxpr."""


@dataclass(frozen=True)
class ScheduleScorer:
    """Scores by executing the schedule that libtpu makes.

    Attributes:
        chip: the chip compiled and scored for.
        compile: compiles a workload; the default uses `bridge.topology`.
    """

    chip: Chip
    compile: Compile | None = None

    @property
    def source(self) -> str:
        """`schedule`."""
        return "schedule"

    def score(self, workload: Workload) -> Score:
        """The score of `workload`.

        Raises:
            bridge.topology.CompileError: it does not compile for the chip.
            DumpError: the dumps of this release of libtpu cannot be read.
            RunawayError: its grid is too large to execute.
        """
        return self.explain(workload).score

    def explain(self, workload: Workload) -> Explanation:
        """The score of `workload` and the runs it stems from."""
        with (self.compile or compile_with_dumps)(workload, self.chip) as (compiled, jaxpr):
            assert compiled.dumps is not None
            program = load_program(compiled.dumps, self.chip, _slice(compiled, self.chip))
            versions = dict(compiled.versions)
            calls = kernel_calls(jaxpr, _flat_values(workload), ranks=program.devices)
            return explain_program(program, calls, workload, versions)


@dataclass(frozen=True)
class Explanation:
    """A score with what it was derived from.

    Attributes:
        score: the score.
        workload: what was scored.
        program: the compiled program.
        runs: its run on each core of the device that takes longest.
        everywhere: its run on each core of every device that was executed: one, if all do the same.
    """

    score: Score
    workload: Workload
    program: Program
    runs: tuple[Run, ...]
    everywhere: tuple[Run, ...] = ()


def explain_program(
    program: Program,
    calls: Sequence[Sequence[KernelCall]],
    workload: Workload,
    versions: Mapping[str, str],
) -> Explanation:
    """The score of a compiled program.

    Args:
        program: what was compiled.
        calls: for each device, the kernels of the traced function with what is known of their operands.
        workload: what is known of the work.
        versions: versions to record.
    """
    module = program.module
    operands = [operand_words(of_rank, module) for of_rank in calls]
    _, matched, unmatched = operands[0]
    everywhere = program.run([words for words, _, _ in operands])
    slowest = max(everywhere, key=lambda run: run.cycles)
    runs = tuple(run for run in everywhere if run.rank == slowest.rank)
    unknowns = _unknowns(everywhere, slowest)
    unknowns += [f"{name}: cannot tell which pallas_call it is" for name in unmatched]
    ran = {function.name for function in slowest.functions}
    unknowns += [
        f"{name}: did not run on the TensorCore; kernels of SparseCores cannot be scored"
        for name in kernel_names(module)
        if name not in ran
    ]
    kernels = tuple(
        _kernel_score(function, slowest, program.chip, module, matched)
        for function in slowest.functions
        if function.name != "TLP"
    )
    reasons = [*unknowns, *_implausible(program, everywhere, kernels, matched, module, workload)]
    confidence = "low" if reasons else "high"
    if not reasons:
        reasons = _not_compared(program)
        confidence = "medium" if reasons else "high"
    steps = [kernel.grid_steps for kernel in kernels if kernel.is_kernel]
    busy = _busy(slowest.functions)
    score = Score(
        time_s=slowest.cycles / program.chip.sustained_clock_hz,
        source="schedule",
        bound=_bound(
            slowest.cycles,
            (sum(slowest.stalled_cycles), slowest.stalled_cycles[STALLS.index("remote")]),
            (slowest.hbm_cycles, slowest.link_cycles),
            busy,
        ),
        units=_units(slowest.cycles, slowest.hbm_cycles, slowest.link_cycles, busy),
        breakdown=_breakdown(slowest, program),
        dma_bytes_read=sum(run.bytes_read for run in runs),
        dma_bytes_written=sum(run.bytes_written for run in runs),
        vmem_bytes=max((kernel.vmem_bytes for kernel in kernels), default=0),
        spills=sum(kernel.spills for kernel in kernels),
        grid_steps=None if None in steps else sum(step for step in steps if step is not None),
        confidence=confidence,
        reasons=tuple(reasons),
        unknowns=tuple(unknowns),
        chip=program.chip.name,
        versions=dict(versions),
        kernels=kernels,
        ici_bytes_sent=sum(run.bytes_sent for run in runs),
        ici_bytes_received=sum(run.bytes_received for run in runs),
        devices=program.devices,
    )
    return Explanation(score, workload, program, runs, everywhere)


def _unknowns(runs: Sequence[Run], slowest: Run) -> list[str]:
    """What was not known on any core, that of the slowest one first."""
    found: dict[str, int] = {}
    for run in (slowest, *runs):
        for function in run.functions:
            for what, count in function.unknowns.items():
                found.setdefault(f"{function.name}: {what}", count)
    return [what + (f" ({count} times)" if count > 1 else "") for what, count in found.items()]


def _not_compared(program: Program) -> list[str]:
    """Why nobody can say how far to trust the time, although nothing is unknown."""
    chip = program.chip
    found: list[str] = []
    if chip.name not in VERIFIED_CHIPS:
        found.append(f"times on {chip.name} were not compared with measured ones")
    if program.communicates:
        found.append(
            f"the speed of links between {chip.name} chips is published or a guess; copies between devices "
            "were not compared with measured ones"
        )
    return found


@contextlib.contextmanager
def compile_with_dumps(
    workload: Workload, chip: Chip, timeout: float | None = None
) -> Iterator[tuple[Compiled, Any]]:
    """Compile a workload through `bridge.topology`, which also traces it as for the chip.

    `timeout` is in seconds; None for that of `compile_for`.
    """
    from bridge import topology
    from bridge.aot.topologies import smallest

    compile_for = functools.partial(
        topology.compile_for,
        workload.fn,
        workload.avals,
        chip,
        mesh=workload.mesh,
        in_specs=workload.in_specs,
        out_specs=workload.out_specs,
        dumps=True,
        timeout=topology.TIMEOUT if timeout is None else timeout,
    )
    options: list[str] = list(SPARSE_CORE_OPTIONS)
    if workload.mesh is not None:
        devices = math.prod(workload.mesh.axis_sizes)
        options += MESH_OPTIONS
        options += [PERMUTE_OPTION] if devices < smallest(chip, devices).devices else []
    try:
        compiled = compile_for(compiler_options=dict.fromkeys(options, False))
    except topology.CompileError as error:
        if not any(option in error.details for option in options):
            raise  # else this release of libtpu has other options
        compiled = compile_for()
    with compiled:
        yield compiled, compiled.jaxpr


def _slice(compiled: Compiled, chip: Chip) -> Slice | None:
    """The devices a program was compiled for; None for one, and for a compiler that does not say."""
    devices, topology = getattr(compiled, "devices", ()), getattr(compiled, "topology", None)
    if len(devices) < 2 or topology is None:
        return None
    return Slice(chip, tuple(topology.shape), tuple(Place(*device) for device in devices))


# Parts of a score ---------------------------------------------------------------------------------


def _kernel_score(
    function: FunctionRun,
    run: Run,
    chip: Chip,
    module: Mapping[str, HloInstruction],
    matched: Mapping[str, KernelCall],
) -> KernelScore:
    busy = _busy([function])
    moved = (function.bytes_read, function.bytes_written)
    hbm_cycles = sum(moved) / run.rates.bytes_per_cycle
    call = matched.get(function.name)
    steps = call.grid_steps if call else None
    instruction = module.get(function.name)
    return KernelScore(
        name=function.name,
        is_kernel=instruction is not None and instruction.is_kernel,
        calls=function.calls,
        time_s=function.cycles / chip.sustained_clock_hz,
        stalled_s=function.stalled_cycles / chip.sustained_clock_hz,
        estimated=function.estimated,
        bound=_bound(
            function.cycles,
            (function.stalled_cycles, function.stalled_on_others),
            (hbm_cycles, function.link_cycles),
            busy,
        ),
        units=_units(function.cycles, hbm_cycles, function.link_cycles, busy),
        dma_bytes_read=moved[0],
        dma_bytes_written=moved[1],
        vmem_bytes=function.vmem.total if function.vmem else 0,
        spills=function.units.spill_stores + function.units.spill_loads if function.units else 0,
        grid_steps=None if steps is None else steps * function.calls,
        mxu_visits=function.mxu_visits,
        ici_bytes_sent=function.bytes_sent,
        ici_bytes_received=function.bytes_received,
    )


def _busy(functions: Sequence[FunctionRun]) -> dict[str, float]:
    """Busy cycles of each unit in all of `functions`."""
    uses = [function.units.busy_cycles for function in functions if function.units]
    return {
        unit: sum(use.get(unit, 0.0) for use in uses) for unit in UNITS if any(unit in use for use in uses)
    }


def _units(
    cycles: float, hbm_cycles: float, link_cycles: float, busy: Mapping[str, float]
) -> dict[str, float]:
    if not cycles:
        return {}
    channels = {"hbm": hbm_cycles / cycles} | ({"ici": link_cycles / cycles} if link_cycles else {})
    return channels | {unit: value / cycles for unit, value in busy.items()}


def _bound(
    cycles: float, stalls: tuple[float, float], channels: tuple[float, float], busy: Mapping[str, float]
) -> str:
    """What limits a program: where it would gain most if it were faster.

    Args:
        cycles: all of them.
        stalls: those of all waits, and of waits for other devices.
        channels: those in which HBM is busy, and the busiest link.
        busy: those of each unit.
    """
    if not cycles:
        return "latency"
    (stalled, on_others), (hbm, link) = stalls, channels
    if max(hbm, link) >= CHANNEL_BUSY_ENOUGH * cycles:
        return "hbm" if hbm >= link else "ici"
    if stalled >= STALLED_ENOUGH * cycles:
        return "ici" if 2 * on_others > stalled else "dma_latency"
    units = {unit: busy.get(unit, 0.0) for unit in BOUND_UNITS}
    busiest = max(units, key=lambda unit: units[unit])
    return busiest if units[busiest] >= BUSY_ENOUGH * (cycles - stalled) else "latency"


def _breakdown(run: Run, program: Program) -> dict[str, float]:
    clock = program.chip.sustained_clock_hz
    stalled = {
        f"stalled_on_{name}": cycles / clock
        for name, cycles in zip(STALLS, run.stalled_cycles, strict=True)
        if name != "remote" or program.communicates
    }
    computing = run.cycles / clock
    for seconds in stalled.values():
        computing -= seconds
    return {"compute": computing} | stalled


# Sanity -------------------------------------------------------------------------------------------


def _implausible(
    program: Program,
    runs: Sequence[Run],
    kernels: Sequence[KernelScore],
    matched: Mapping[str, KernelCall],
    module: Mapping[str, HloInstruction],
    workload: Workload,
) -> list[str]:
    """What cannot be: such a score comes from a mistake in reading the schedule, whatever it says."""
    found: list[str] = []
    for run in runs:
        for function in run.functions:
            found += _wrong_trips(function, matched)
    estimated = sum(kernel.time_s for kernel in kernels if kernel.estimated)
    total = max(run.cycles for run in runs) / program.chip.sustained_clock_hz
    if estimated > ESTIMATED_TOLERATED * total:
        names = ", ".join(kernel.name for kernel in kernels if kernel.estimated)
        found.append(f"{estimated / total:.0%} of the time is a roofline of XLA operations: {names}")
    found += _too_few_matmuls(program, runs, workload)
    alike = 1 if program.communicates else program.devices  # how many devices each run stands for
    moved = {
        "read": (alike * sum(run.bytes_read for run in runs), workload.bytes_read),
        "written": (alike * sum(run.bytes_written for run in runs), workload.bytes_written),
    }
    for what, (got, least) in moved.items():
        if least is not None and got < least:
            found.append(f"{got} bytes are {what}, but at least {least} must be")
    return found


def _wrong_trips(function: FunctionRun, matched: Mapping[str, KernelCall]) -> list[str]:
    call, trips = matched.get(function.name), function.grid_loop_trips
    steps = call.grid_steps if call else None
    if steps is None or trips is None or steps <= 1:
        return []
    # A core of several runs its share of the grid, so only one step less than all is impossible to tell.
    if trips > (steps + PIPELINE_STAGES) * function.calls:
        return [f"{function.name}: {trips} trips of the loop over a grid of {steps} steps"]
    return []


def _too_few_matmuls(program: Program, runs: Sequence[Run], workload: Workload) -> list[str]:
    """Useful operations can be no more than the matrix units have done."""
    flops = workload.matmul_flops
    if not flops:
        return []
    chip = program.chip
    busy = sum(_busy(run.functions).get("mxu", 0.0) for run in runs)
    busy *= 1 if program.communicates else program.devices
    done = busy * chip.mxu_flops_per_cycle * _speed_up(chip, workload)
    if flops > done * (1 + ROUNDING):
        return [f"{flops:.4g} operations of the matrix units are useful, but at most {done:.4g} were done"]
    return []


def _speed_up(chip: Chip, workload: Workload) -> float:
    """How much faster than bfloat16 the matrix units are with the narrowest argument of the workload."""
    from bridge.aot.avals import is_aval, to_aval

    peaks = {
        "int4": chip.int4_flops_per_second,
        "int8": chip.int8_flops_per_second,
        "float8": chip.fp8_flops_per_second,
    }
    dtypes = [str(to_aval(aval).dtype).lstrip("u") for aval in workload.avals if is_aval(aval)]
    used = [peak for name, peak in peaks.items() if peak and any(d.startswith(name) for d in dtypes)]
    # Units take a whole number of times as many narrow numbers; published peaks are rounded.
    return max([1.0, *(float(round(peak / chip.bf16_flops_per_second)) for peak in used)])


def _flat_values(workload: Workload) -> dict[int, np.ndarray]:
    """Known values by place among the array arguments, which is what a traced function counts."""
    from bridge.aot.avals import is_aval

    places = [place for place, aval in enumerate(workload.avals) if is_aval(aval)]
    return {
        places.index(place): np.asarray(value) for place, value in workload.values.items() if place in places
    }

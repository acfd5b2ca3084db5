"""What happened when, out of a run: how busy the channel was over time, and a closer look at a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.schedule.records import READ, REMOTE, WRITE, Span
from autotune.schedule.runs import FunctionRun, Run

WINDOW_COPIES = 28
"""Copies that the closer look shows."""


@dataclass(frozen=True)
class Interval:
    """Something that lasts from `begin` to `end`, in cycles, and what to call it."""

    begin: float
    end: float
    label: str


@dataclass(frozen=True)
class Window:
    """A stretch of a run in which single copies can be seen.

    Attributes:
        begin, end: the stretch, in cycles.
        reads, writes: copies from and to HBM on the channel.
        sends: copies to other devices, on the links between them.
        stalls: waits.
    """

    begin: float
    end: float
    reads: tuple[Interval, ...]
    writes: tuple[Interval, ...]
    sends: tuple[Interval, ...]
    stalls: tuple[Interval, ...]


@dataclass(frozen=True)
class CodeBlock:
    """A stretch of a function's code and what it takes.

    Attributes:
        function: the function.
        start, end: addresses.
        executions: how often it ran.
        cycles: cycles of all executions, without stalls.
        unit: the unit it keeps busiest, and
        unit_share: the share of its cycles in which that unit is busy.
    """

    function: str
    start: int
    end: int
    executions: int
    cycles: int
    unit: str
    unit_share: float


def occupancy(run: Run, bins: int) -> dict[str, np.ndarray]:
    """Share of each of `bins` equal stretches in which something happens.

    The channel reads (`read`), it writes (`write`), any link sends (`sent`), the core is stalled (`stalled`).
    """
    edges = np.linspace(0.0, run.cycles, bins + 1)
    kinds = np.asarray(run.copies.kind)
    begin, end = np.asarray(run.copies.begin), np.asarray(run.copies.end)
    chosen = {"read": kinds == READ, "write": kinds == WRITE, "sent": kinds == REMOTE}
    found = {name: _covered(*_united(begin[mask], end[mask]), edges) for name, mask in chosen.items()}
    return found | {"stalled": _covered(*run.stalls, edges)}


def window(run: Run) -> Window | None:
    """The middle of the longest kernel, wide enough for some copies; None if nothing is copied."""
    begin, end = np.asarray(run.copies.begin), np.asarray(run.copies.end)
    kinds = np.asarray(run.copies.kind)
    on_channel = np.flatnonzero((kinds == READ) | (kinds == WRITE) | (kinds == REMOTE))
    if not len(on_channel):
        return None
    span = _busiest_span(run, begin[on_channel])
    inside = on_channel[(begin[on_channel] >= span.begin) & (begin[on_channel] <= span.end)]
    inside = inside if len(inside) else on_channel
    middle = len(inside) // 2
    chosen = inside[max(0, middle - WINDOW_COPIES // 2) : middle + WINDOW_COPIES // 2]
    first, last = float(begin[chosen[0]]), float(end[chosen[-1]])
    margin = 0.02 * (last - first) + run.rates.latency_cycles * (len(inside) <= WINDOW_COPIES)
    low, high = max(0.0, first - margin), min(run.cycles, last + margin)

    def copies(kind: int) -> tuple[Interval, ...]:
        numbers = np.flatnonzero((kinds == kind) & (end >= low) & (begin <= high))
        return tuple(
            Interval(float(begin[n]), float(end[n]), f"{run.copies.nbytes[n]:,} bytes") for n in numbers
        )

    stall_begin, stall_end = run.stalls
    waits = np.flatnonzero((stall_end >= low) & (stall_begin <= high))
    stalls = tuple(
        Interval(float(stall_begin[n]), float(stall_end[n]), f"{stall_end[n] - stall_begin[n]:,.0f} cycles")
        for n in waits
    )
    return Window(low, high, copies(READ), copies(WRITE), copies(REMOTE), stalls)


def code_blocks(functions: Sequence[FunctionRun], most: int) -> list[CodeBlock]:
    """The stretches of code that take the most cycles."""
    found: list[CodeBlock] = []
    for function in functions:
        if function.function is None or function.units is None:
            continue
        uses = function.units.block_busy_cycles
        for block, count, use in zip(function.function.blocks, function.counts, uses, strict=True):
            cycles = block.cycles * count
            if cycles:
                unit = max(use, key=lambda name: use[name])
                share = use[unit] / cycles
                found.append(
                    CodeBlock(
                        function.name, block.start, block.end, count, cycles, unit if share else "", share
                    )
                )
    return sorted(found, key=lambda block: -block.cycles)[:most]


def _united(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same time as intervals that do not overlap."""
    if not len(begin):
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], begin[1:] > reach[:-1]])
    return begin[first], np.concatenate([reach[:-1][first[1:]], reach[-1:]])


def _covered(begin: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of each stretch between `edges` that intervals, which do not overlap, cover."""
    if not len(begin):
        return np.zeros(len(edges) - 1)
    order = np.argsort(begin)
    times = np.stack([begin[order], end[order]], axis=1).reshape(-1)
    total = np.concatenate([[0.0], np.cumsum(end[order] - begin[order])])
    covered = np.stack([total[:-1], total[1:]], axis=1).reshape(-1)
    return np.diff(np.interp(edges, times, covered)) / np.maximum(np.diff(edges), 1e-12)


def _busiest_span(run: Run, copies: np.ndarray) -> Span:
    """The call, other than the program's own, during which most copies begin."""
    calls = [span for span in run.spans if span.name != "TLP"] or list(run.spans)
    return max(calls, key=lambda span: int(((copies >= span.begin) & (copies <= span.end)).sum()))

"""Makes findings of what was seen in the runs of a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bridge.interpretation.signs import DEVICE, Kind, Load, Run, Sign
from bridge.sanitizer.findings import FIXES, Finding
from bridge.sanitizer.runs import Outcomes

_EXPLAINS: tuple[Kind, ...] = ("race", "dma_not_waited", "missing_barrier", "semaphore_left")
"""Findings that explain why results differ: that is no finding of its own, and its reason can't be told."""


def judged(
    found: Outcomes, op: str, kernels: Sequence[tuple[str, str]], ranks: Sequence[int]
) -> list[Finding]:
    """The findings of a call.

    Args:
        op: its name.
        kernels: name and line of each kernel in the program.
        ranks: the rank of each device; empty for one device.
    """
    findings: list[Finding] = []
    for outcome in found.outcomes:
        findings += _once_each(_finding(sign, op, ranks, outcome.run) for sign in outcome.observed.signs)
    if any(finding.kind in _EXPLAINS for finding in findings):
        return findings
    findings += _uninitialised(found, op, kernels, ranks)
    if found.by_order is not None:
        text = (
            "The same inputs give another result when copies, ranks or parallel steps come in another order."
        )
        findings.append(_of_the_program("order_dependent_result", text, op, kernels, ranks, found.by_order))
    return findings


def _once_each(findings: Iterable[Finding]) -> Iterable[Finding]:
    """What was seen in one run: on several ranks or many times, it counts once."""
    merged: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        known = merged.get(finding.identity)
        merged[finding.identity] = finding if known is None else known.merged(finding, again=False)
    return merged.values()


def _finding(sign: Sign, op: str, ranks: Sequence[int], run: Run) -> Finding:
    names = [f"rank {ranks[device]}" if ranks else "the kernel" for device in sign.devices]
    text = sign.text
    for name in names:
        text = text.replace(DEVICE, name, 1)
    return Finding(
        kind=sign.kind,
        op=op,
        kernel=sign.kernel.name,
        ranks=tuple(sorted({ranks[device] for device in sign.devices})) if ranks else (),
        line=sign.line,
        other_line=sign.other,
        message=text[:1].upper() + text[1:]
        if ranks or not text.startswith("the kernel")
        else "The" + text[3:],
        fix=FIXES[sign.kind],
        copies=run.copies,
        seed=run.seed,
    )


def _uninitialised(
    found: Outcomes, op: str, kernels: Sequence[tuple[str, str]], ranks: Sequence[int]
) -> Iterator[Finding]:
    """Loads of unwritten memory that matter: the result depends on what it holds, or there is none."""
    failed = any(outcome.error is not None for outcome in found.outcomes)
    if found.by_memory is None and not failed:
        return
    every = [load for outcome in found.outcomes for load in outcome.observed.loads]
    padding = all(load.padding for load in every)
    if padding and found.by_memory is None:
        return
    matters = "the program did not come to its end" if found.by_memory is None else "the result depends on it"
    where = "lies beyond the end of the array" if padding else "nobody has written"
    for outcome in found.outcomes:
        yield from _once_each(
            _finding(_loaded(load, f"some of which {where}, and {matters}"), op, ranks, outcome.run)
            for load in outcome.observed.loads
            if load.padding == padding
        )
    if not every and found.by_memory is not None:
        text = (
            "Part of the result is memory that the kernel never wrote: it changes with what was there before."
        )
        yield _of_the_program("uninitialised_read", text, op, kernels, ranks, found.by_memory)


def _loaded(load: Load, why: str) -> Sign:
    text = f"{DEVICE} loads {load.what}, {why}."
    return Sign("uninitialised_read", load.kernel, (load.device,), load.line, text)


def _of_the_program(
    kind: Kind, text: str, op: str, kernels: Sequence[tuple[str, str]], ranks: Sequence[int], run: Run
) -> Finding:
    return Finding(
        kind=kind,
        op=op,
        kernel=", ".join(dict.fromkeys(name for name, _ in kernels)),
        ranks=tuple(sorted(ranks)),
        line=kernels[0][1] if kernels else "",
        other_line="",
        message=text,
        fix=FIXES[kind],
        copies=run.copies,
        seed=run.seed,
    )

"""Checks one call of an op: from `bridge.execute` and `bridge.ranks.simulation` into the sanitizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr

from bridge.avals import Avals
from bridge.counters import KernelUse, count_compile, counters
from bridge.interpretation import Interpreted, KernelRun, interpret_kernels
from bridge.interpretation.checks import kernels_of, with_checks
from bridge.interpretation.precision import in_passes
from bridge.precision import current_passes
from bridge.program import Program
from bridge.sanitizer.judge import judged
from bridge.sanitizer.report import NotCheckable, SanitizerReport
from bridge.sanitizer.runs import run_all


@dataclass(frozen=True)
class Checked:
    """A program that is ready to be checked.

    Attributes:
        jaxpr: the program, with its kernels checked.
        kernels: name and line of each kernel that is checked.
        unchecked: those that are not, and why.
    """

    jaxpr: ClosedJaxpr
    kernels: tuple[tuple[str, str], ...]
    unchecked: tuple[KernelRun, ...]

    @classmethod
    def of(cls, interpreted: Interpreted) -> Checked:
        """A program from `interpret_kernels(..., "tpu")`."""
        jaxpr = with_checks(interpreted.jaxpr)
        unchecked = tuple(kernel for kernel in interpreted.kernels if kernel.how != "tpu")
        return cls(jaxpr, kernels_of(jaxpr), unchecked)


def check(
    report: SanitizerReport,
    op: str,
    checked: Checked,
    run: Callable[[], Sequence[jax.Array]],
    ranks: Sequence[int] = (),
) -> Sequence[jax.Array]:
    """Run a program several times, and report what is wrong with it.

    Args:
        op: the op's name.
        checked: what `run` runs.
        run: runs it once, on the same inputs each time.
        ranks: the rank of each device, if there are several.

    Returns:
        The results of the first run.

    Raises:
        Exception: what the first run raised.
        NotCheckable: none of its kernels was launched.
    """
    for kernel in checked.unchecked:
        report.count(op, kernel.name, 1, kernel.reason)
    found = run_all(run, max(len(ranks), 1), report.seeds if checked.kernels else 1)
    first = found.outcomes[0]
    if first.error is not None and not first.observed.launches:
        words = str(first.error).strip().partition("\n")[0]
        for name, _ in checked.kernels:
            report.count(op, name, 1, f"The TPU interpreter can't run it: {words}")
        raise NotCheckable from first.error
    report.count_runs(len(found.outcomes))
    for outcome in found.outcomes:
        for name, launches in outcome.observed.launches.items():
            report.count(op, name, launches)
    report.add(judged(found, op, checked.kernels, ranks))
    if first.error is not None:
        raise first.error
    assert first.results is not None
    return first.results


def call(report: SanitizerReport, program: Program, arrays: Sequence[Any], wide: bool) -> Sequence[jax.Array]:
    """`program.call(arrays, wide)`, checked: for a program of one device."""
    passes = current_passes()
    with jax.enable_x64(wide):
        avals = Avals(tuple(a.shape for a in arrays), tuple(a.dtype for a in arrays), wide)
        compiled: _Compiled = program.remember(
            ("sanitized", avals, passes), lambda: _Compiled(program, avals, passes)
        )
        if not compiled.checked.kernels and not compiled.checked.unchecked:
            return program.call(arrays, wide)
        counters.calls += 1
        name = program.definition.name
        with contextlib.suppress(NotCheckable):
            return check(report, name, compiled.checked, lambda: compiled.jitted(*arrays))
    return program.call(arrays, wide)


class _Compiled:
    """A program of one device, at some shapes."""

    def __init__(self, program: Program, avals: Avals, passes: int) -> None:
        name = program.definition.name
        jaxpr = program.abstract(lambda fn, structs: jax.make_jaxpr(fn)(*structs), avals)
        if passes:
            jaxpr = in_passes(jaxpr, passes)
        interpreted = interpret_kernels(jaxpr, "tpu")
        self.checked = checked = Checked.of(interpreted)
        if interpreted.kernels:
            count_compile(
                name,
                tuple(
                    KernelUse(name, k.name, k.how, "" if k.how == "tpu" else k.reason)
                    for k in interpreted.kernels
                ),
            )
        self.jitted = jax.jit(
            lambda *arrays: tuple(eval_jaxpr(checked.jaxpr.jaxpr, checked.jaxpr.consts, *arrays))
        )

"""Runs a program several times on the same inputs, and compares the results."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from bridge.interpretation import interpreter_lock, tpu_interpreter
from bridge.interpretation.checks import checking
from bridge.interpretation.observer import Observer
from bridge.interpretation.signs import Observed, Run

Program = Callable[[], Sequence[jax.Array]]


@dataclass
class Outcome:
    """What came of one run.

    Attributes:
        results: what the program returned; None if it raised.
        error: what it raised.
        is_random: whether several devices have drawn random bits: from one generator, in no order.
    """

    run: Run
    observed: Observed
    results: Sequence[jax.Array] | None = None
    error: Exception | None = None
    is_random: bool = False


@dataclass
class Outcomes:
    """What came of all runs.

    Attributes:
        outcomes: of each, the first one first.
        by_order: a run whose results differ from the first one's, in another order and with the same memory.
        by_memory: a run whose results differ because unwritten memory held something else.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    by_order: Run | None = None
    by_memory: Run | None = None


def planned(seeds: int) -> Iterator[Run]:
    """The runs of a call. In the second one, memory that nobody has written holds something else."""
    for seed in range(seeds):
        yield Run("on_wait", seed)
        yield Run("eager", seed, "nan" if seed else "numbers")


def run_all(program: Program, devices: int, seeds: int) -> Outcomes:
    """Run a program as planned.

    After a run that fails, only runs in the usual order follow: a deadlock may take long to be sure of.
    """
    found = Outcomes()
    failed = False
    for run in planned(seeds):
        if failed and run.seed:
            break
        outcome = _once(program, devices, run)
        found.outcomes.append(outcome)
        failed = failed or outcome.error is not None
        if failed and not outcome.observed.launches:
            break  # it can't even be compiled
        if len(found.outcomes) > 1:
            _compare(program, devices, found, outcome)
    return found


def _compare(program: Program, devices: int, found: Outcomes, outcome: Outcome) -> None:
    """Compare a run's results with the first one's, and drop them."""
    first, run = found.outcomes[0], outcome.run
    if not _same(outcome, first):
        if run.fill == first.run.fill:
            found.by_order = found.by_order or run
        else:  # Is it the order, or the memory? A run in this order, with the first one's memory, tells.
            again = _once(program, devices, Run(run.copies, run.seed, first.run.fill))
            found.outcomes.append(again)
            if not _same(again, first):
                found.by_order = found.by_order or run
            if not _same(again, outcome):
                found.by_memory = run
            again.results = None
    outcome.results = None


def _once(program: Program, devices: int, run: Run) -> Outcome:
    observer = Observer(run)
    outcome = Outcome(run, observer.observed)
    try:
        with _no_tracebacks(), interpreter_lock(devices, observer), checking(observer):
            results = jax.block_until_ready(program())
        outcome.results = results  # not before: what fails on several devices is raised at the end
    except Exception as error:
        outcome.error = error
    outcome.is_random = devices > 1 and tpu_interpreter.has_drawn_random_bits()
    return outcome


@contextlib.contextmanager
def _no_tracebacks() -> Iterator[None]:
    """Keeps JAX from logging what a kernel raises: the same in each run, and told by the findings."""
    logger = logging.getLogger("jax._src.callback")

    def keep(record: logging.LogRecord) -> bool:
        return "io_callback failed" not in str(record.msg)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _same(one: Outcome, other: Outcome) -> bool:
    """Whether results are the same, bit for bit; if there are none, or they can't be compared, they are."""
    if one.results is None or other.results is None or one.is_random:
        return True
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(one.results, other.results, strict=True)
    )

"""Lookup: which tiling holds for a problem on a chip, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autotune.cache import contexts, shipped, user
from autotune.cache.conditions import broken, present_conditions
from autotune.cache.entry import Entry, tiling_text
from autotune.cache.kernel import Kernel
from autotune.cache.layer import Layer
from autotune.problem import Problem
from autotune.score.protocol import SOURCES
from bridge.chips import Chip

_log = logging.getLogger(__name__)
_REMEMBERED = 4096
"""Problems remembered for each kernel and chip, and pairs of these. Lengths that never come twice would fill
the memory."""

_logged: set[str] = set()


@dataclass(frozen=True)
class Found:
    """A tiling that holds.

    Attributes:
        tiling: an instance of the kernel's tiling type, legal for the problem.
        entry: where it was found.
        kind: the layer: `context`, `user` or `shipped`.
        path: the file; None if it is none.
        exact: whether the entry is of this problem; else of another one in its bucket.
    """

    tiling: Any
    entry: Entry
    kind: str
    path: str | None
    exact: bool


@dataclass(frozen=True)
class Considered:
    """An entry that a lookup looked at.

    Attributes:
        entry: the entry.
        kind: its layer.
        path: its file; None if it is none.
        exact: whether it is of this problem; else of another one in its bucket.
        reasons: why it is not used, one sentence each; empty if it can be.
        stale: whether the reason is that its conditions don't hold.
        tiling: its tiling; None if there is none.
    """

    entry: Entry
    kind: str
    path: str | None
    exact: bool
    reasons: tuple[str, ...]
    stale: bool
    tiling: Any


class _Here:
    """Conditions as they are here, made once for each source."""

    def __init__(self, kernel: Kernel, on: Chip) -> None:
        self._kernel, self._on = kernel, on
        self._present: dict[str, dict[str, str | None]] = {}

    def broken(self, entry: Entry) -> tuple[str, ...]:
        """Why `entry` does not hold; empty if it does."""
        if entry.source not in self._present:
            self._present[entry.source] = present_conditions(self._kernel, self._on, entry.source)
        return broken(entry.conditions, self._present[entry.source])


class _Table:
    """What was found of one kernel on one chip. It keeps the chip, so that no other gets its id."""

    def __init__(self, on: Chip) -> None:
        self.on = on
        self.found: dict[Problem, Found | None] = {}


def lookup(kernel: Kernel, problem: Problem, on: Chip, source: str | None = None) -> Found | None:
    """The tiling for `problem` on a chip; None if none is known that holds.

    Contexts come first, the innermost before outer ones; then the user's files; then what the kernel's
    package ships. Within one of them, entries of this problem come before those of its bucket, and measured
    times before those of a schedule, and these before a roofline's. An entry whose conditions don't hold,
    and a tiling that is illegal for the problem or known to fail, are passed over, with one line in the log.

    A result is remembered until `store` or `reload` is called.

    Args:
        source: entries of other sources are not looked at.
    """
    # This runs at each call of a kernel. A chip is found by its id: to hash its figures takes too long.
    warm = contexts.stack.get().warm
    try:
        return warm[kernel, id(on), source].found[problem]
    except KeyError:
        return _look_up(warm, kernel, problem, on, source)


def _look_up(
    warm: dict[Any, _Table], kernel: Kernel, problem: Problem, on: Chip, source: str | None
) -> Found | None:
    result = None
    for seen in considered(kernel, problem, on, source):
        if not seen.reasons:
            result = Found(seen.tiling, seen.entry, seen.kind, seen.path, seen.exact)
            break
        _log_once(problem, on, seen)
    if len(warm) >= _REMEMBERED:
        warm.clear()
    table = warm.setdefault((kernel, id(on), source), _Table(on))
    if len(table.found) >= _REMEMBERED:
        table.found.clear()
    table.found[problem] = result
    return result


def considered(kernel: Kernel, problem: Problem, on: Chip, source: str | None = None) -> Iterator[Considered]:
    """The entries that `lookup` looks at, in its order; the first without reasons is what it takes."""
    if problem.kernel != kernel.name:
        raise ValueError(f"expected a problem of {kernel.name}, got {problem}")
    if source is not None and source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    here = _Here(kernel, on)
    failed: dict[str, str] | None = None
    for layer in _layers(kernel, on):
        exact = [(entry, True) for entry in layer.of_problem(problem, on.name)]
        near: list[tuple[Entry, bool]] = []
        if kernel.bucket is not None:
            near = [(entry, False) for entry in layer.of_bucket(problem, on.name, kernel.bucket)]
        exact.sort(key=lambda pair: SOURCES.index(pair[0].source))
        # Among others of the bucket, the source still comes first: a stable sort keeps their order.
        near.sort(key=lambda pair: SOURCES.index(pair[0].source))
        for entry, is_exact in (*exact, *near):
            if source is not None and entry.source != source:
                continue
            if failed is None:
                failed = _failed(kernel, problem, on, None, here)
            yield _judge(kernel, problem, on, layer, entry, is_exact, failed, here.broken(entry))


def known_failures(kernel: Kernel, problem: Problem, on: Chip, source: str) -> dict[str, str]:
    """Why tilings failed for exactly this problem when scored by `source`, by `tiling_text`.

    There is no need to try them again: of everything they depend on, nothing has changed.
    """
    return _failed(kernel, problem, on, source, _Here(kernel, on))


def tuned(kernel: Kernel, problem: Problem, on: Chip, source: str) -> Entry | None:
    """The entry of exactly this problem, scored by `source`, that holds; None if it is yet to be tuned.

    It may be one whose tilings all failed.
    """
    here = _Here(kernel, on)
    for layer in _layers(kernel, on):
        for entry in layer.of_problem(problem, on.name):
            if entry.source == source and not here.broken(entry):
                return entry
    return None


def _layers(kernel: Kernel, on: Chip) -> Iterator[Layer]:
    here = contexts.stack.get()
    yield from here.layers
    if "user" in here.below:
        yield user.layer(on.name)
    if "shipped" in here.below:
        yield shipped.layer(kernel.package, on.name)


def _failed(kernel: Kernel, problem: Problem, on: Chip, source: str | None, here: _Here) -> dict[str, str]:
    """Failures in all layers, because what failed once is not right elsewhere."""
    failed: dict[str, str] = {}
    for layer in _layers(kernel, on):
        for entry in layer.of_problem(problem, on.name):
            if not entry.failures or (source is not None and entry.source != source):
                continue
            if not here.broken(entry):
                for failure in entry.failures:
                    failed.setdefault(tiling_text(failure.tiling), failure.reason)
    return failed


def _judge(
    kernel: Kernel,
    problem: Problem,
    on: Chip,
    layer: Layer,
    entry: Entry,
    exact: bool,
    failed: dict[str, str],
    stale: tuple[str, ...],
) -> Considered:
    def considered(*reasons: str, tiling: Any = None) -> Considered:
        return Considered(entry, layer.kind, layer.path, exact, reasons, bool(stale), tiling)

    if stale:
        return considered(*stale)
    if entry.tiling is None:
        return considered(f"all {len(entry.failures)} tilings that were tried failed")
    fields = dict(entry.tiling)
    try:
        tiling = kernel.make_tiling(fields)
    except (TypeError, ValueError) as error:
        return considered(f"{kernel.tiling_type.__name__} does not take it: {error}", tiling=fields)
    if tiling_text(fields) in failed:
        return considered(f"it failed for this problem: {failed[tiling_text(fields)]}", tiling=tiling)
    illegal = kernel.illegal_reasons(problem, tiling, on) if kernel.illegal_reasons else ()
    return considered(*illegal, tiling=tiling)


def _log_once(problem: Problem, on: Chip, seen: Considered) -> None:
    """Why an entry is passed over, once: those of before an update all together, others for each problem."""
    origin = seen.kind if seen.path is None else f"{seen.kind}, {seen.path}"
    why = "; ".join(seen.reasons)
    if seen.stale:
        level = logging.INFO
        message = f"{problem.kernel} on {on.name}: tilings ({origin}) do not hold any more: {why}"
    elif seen.tiling is None:
        return  # there is none to be passed over
    else:
        level = logging.WARNING
        tuned_for = "" if seen.exact else f", tuned for {seen.entry.problem}"
        message = f"{problem} on {on.name}: {seen.tiling} ({origin}{tuned_for}) is not used: {why}"
    if message in _logged:
        return
    if len(_logged) >= _REMEMBERED:
        _logged.clear()
    _logged.add(message)
    _log.log(level, "%s", message)

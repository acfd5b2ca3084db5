"""The report of a sanitizer, and the context in which kernels are checked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bridge.sanitizer.findings import Finding

DEFAULT_SEEDS = 3


class SanitizerError(AssertionError):
    """The sanitizer has found something; the message has it all."""


class NotCheckable(Exception):
    """The interpreter can't run a program, for the reason that is the cause; it must be run as usual."""


@dataclass(frozen=True)
class CheckedKernel:
    """A kernel that ran while a report was open.

    Attributes:
        op: the op that was called.
        name: the kernel's.
        launches: how often it ran, over all calls and their runs.
        unchecked: why it could not be checked, as a sentence; else empty.
    """

    op: str
    name: str
    launches: int
    unchecked: str = ""


class SanitizerReport:
    """What `bridge.sanitize` has found so far.

    Attributes:
        seeds: how many orders each call is tried in.
    """

    def __init__(self, seeds: int = DEFAULT_SEEDS) -> None:
        self.seeds = seeds
        self._lock = threading.Lock()
        self._findings: dict[tuple[Any, ...], Finding] = {}
        self._launches: dict[tuple[str, str, str], int] = {}
        self._runs = 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found; each once, in the order in which it was seen."""
        with self._lock:
            return tuple(self._findings.values())

    @property
    def ok(self) -> bool:
        """Whether nothing was found. True, too, if no kernel ran: see `kernels`."""
        return not self.findings

    @property
    def kernels(self) -> tuple[CheckedKernel, ...]:
        """The kernels that ran."""
        with self._lock:
            return tuple(
                CheckedKernel(op, name, launches, why) for (op, name, why), launches in self._launches.items()
            )

    @property
    def runs(self) -> int:
        """How often programs were run."""
        with self._lock:
            return self._runs

    def raise_if_any(self) -> None:
        """Raise what was found.

        Raises:
            SanitizerError: there are findings.
        """
        if not self.ok:
            raise SanitizerError(str(self))

    def as_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        return {
            "ok": self.ok,
            "findings": [finding.as_json() for finding in self.findings],
            "kernels": [vars(kernel) for kernel in self.kernels],
            "runs": self.runs,
        }

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.findings), self._summary()])

    def __repr__(self) -> str:
        return f"<SanitizerReport: {self._summary()}>"

    def _summary(self) -> str:
        kernels = self.kernels
        checked = {(kernel.op, kernel.name) for kernel in kernels if not kernel.unchecked}
        count = len(self.findings)
        found = f"{count or 'no'} finding{'' if count == 1 else 's'}"
        lines = [f"{found} in {len(checked)} kernel{'' if len(checked) == 1 else 's'}, {self.runs} runs"]
        lines += [
            f"kernel {kernel.name} of {kernel.op} was not checked: {kernel.unchecked}"
            for kernel in kernels
            if kernel.unchecked
        ]
        return "\n".join(lines)

    # -- filled by `calls` ----------------------------------------------------------------------------

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings; those that are known already are merged."""
        with self._lock:
            for finding in findings:
                known = self._findings.get(finding.identity)
                self._findings[finding.identity] = finding if known is None else known.merged(finding)

    def count(self, op: str, kernel: str, launches: int, unchecked: str = "") -> None:
        """Count launches of a kernel."""
        with self._lock:
            key = (op, kernel, unchecked)
            self._launches[key] = self._launches.get(key, 0) + launches

    def count_runs(self, runs: int) -> None:
        """Count runs of a program."""
        with self._lock:
            self._runs += runs


_open: list[SanitizerReport] = []
"""The reports whose contexts are open; the innermost is last."""


def current_report() -> SanitizerReport | None:
    """The report to fill, if kernels are checked now."""
    return _open[-1] if _open else None


@contextlib.contextmanager
def sanitize(*, seeds: int = DEFAULT_SEEDS) -> Iterator[SanitizerReport]:
    """Within this context, every kernel that runs in this process, in any thread, is checked.

    Each call of an op runs its program several times on the same inputs: with copies made late and at once,
    each with `seeds` orders. What the call returns or raises is that of the first run, which is what mode
    "tpu" gives. So a finding ends no program that has a result; `report.raise_if_any()` does.

    This holds in every mode of interpretation; only where it is "reference", and an op has one, no kernel
    runs. Contexts nest: the innermost has the findings.

    Args:
        seeds: how many orders each call is tried in, at least 1. The first is the usual one.

    Raises:
        ValueError: `seeds` is less than 1.
    """
    if seeds < 1:
        raise ValueError(
            f"bridge.sanitize: seeds must be at least 1, got {seeds}; 1 tries the usual order only."
        )
    report = SanitizerReport(seeds)
    _open.append(report)
    try:
        yield report
    finally:
        _open.remove(report)

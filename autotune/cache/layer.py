"""Entries of one origin, found by problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autotune.cache.entry import Entry
from autotune.problem import Problem


class Layer:
    """Entries of one origin, found by problem and chip.

    Attributes:
        kind: `context`, `user` or `shipped`.
        path: the file; None if it is none.
        entries: all of them, in a fixed order.
    """

    def __init__(self, kind: str, path: str | None, entries: Iterable[Entry]) -> None:
        self.kind = kind
        self.path = path
        self.entries = tuple(sorted(entries, key=lambda entry: entry.identity))
        self._by_problem: dict[tuple[str, str], list[Entry]] = {}
        self._buckets: dict[object, dict[tuple[str, str], list[Entry]]] = {}
        for entry in self.entries:
            self._by_problem.setdefault((str(entry.problem), entry.chip), []).append(entry)

    def of_problem(self, problem: Problem, chip: str) -> list[Entry]:
        """Entries of exactly this problem."""
        return self._by_problem.get((str(problem), chip), [])

    def of_bucket(self, problem: Problem, chip: str, bucket: Callable[[Problem], Problem]) -> list[Entry]:
        """Entries of other problems in the bucket of `problem`.

        First come those of the problem that stands for it, then those of larger problems before smaller ones.
        """
        key = problem.kernel, bucket
        groups = self._buckets.get(key)
        if groups is None:
            groups = self._buckets[key] = self._grouped(problem.kernel, bucket)
        text, standing = str(problem), str(bucket(problem))
        found = [entry for entry in groups.get((standing, chip), []) if str(entry.problem) != text]
        return sorted(found, key=lambda entry: (str(entry.problem) != standing, -_elements(entry.problem)))

    def _grouped(
        self, kernel: str, bucket: Callable[[Problem], Problem]
    ) -> dict[tuple[str, str], list[Entry]]:
        groups: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            if entry.problem.kernel != kernel:
                continue
            try:
                standing = bucket(entry.problem)
            except (AttributeError, LookupError, TypeError, ValueError):
                continue  # a problem of an earlier release, with other arguments
            groups.setdefault((str(standing), entry.chip), []).append(entry)
        return groups


def _elements(problem: Problem) -> int:
    return sum(spec.size for _, spec in problem.arrays if spec is not None)

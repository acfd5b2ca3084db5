"""The candidates of a search, and which are next to each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from autotune.spec import Candidate


class Neighbour(NamedTuple):
    """A candidate that differs from another in one size.

    Attributes:
        place: its place in the space.
        direction: the size that differs, and whether it is larger (1) or smaller (-1).
    """

    place: int
    direction: tuple[str, int]


class Space:
    """Legal candidates in a fixed order. Strategies speak of them by their places.

    Attributes:
        candidates: the candidates.
        start: place of the default tiling; of the candidate in the middle if the default is not among them.
        has_default: whether it is.
    """

    def __init__(self, candidates: Sequence[Candidate], default: Any = None) -> None:
        """A space. Raises `ValueError` if there are no candidates, or one is illegal or there twice."""
        self.candidates = tuple(candidates)
        if not self.candidates:
            raise ValueError("expected at least one candidate, got none")
        illegal = next((c for c in self.candidates if not c.legal), None)
        if illegal is not None:
            raise ValueError(f"{illegal.tiling} is illegal: {'; '.join(illegal.reasons)}")
        self._places = {candidate.tiling: place for place, candidate in enumerate(self.candidates)}
        if len(self._places) < len(self.candidates):
            raise ValueError("a tiling is there twice")
        self.has_default = default in self._places
        self.start = self._places.get(default, len(self.candidates) // 2)
        names = [field.name for field in dataclasses.fields(self.candidates[0].tiling)]
        sizes = {name: self._reaching(name) for name in names}
        # Values of each size in order, and each candidate as places among them.
        values = {name: sorted(set(column), key=_order) for name, column in sizes.items()}
        self._values = {name: found for name, found in values.items() if len(found) > 1}
        self._sizes = {name: sizes[name] for name in self._values}
        self._coordinates = [
            tuple(self._values[name].index(column[place]) for name, column in self._sizes.items())
            for place in range(len(self.candidates))
        ]

    def _reaching(self, name: str) -> list[Any]:
        """A size of all candidates. One beyond all others that only the default has counts as the largest
        of the others: spaces go as far as the arrays do, and a default that reaches past them does the same.
        """
        column = [getattr(candidate.tiling, name) for candidate in self.candidates]
        others = [value for place, value in enumerate(column) if place != self.start]
        if self.has_default and others and all(_is_size(value) for value in column):
            column[self.start] = min(column[self.start], max(others))
        return column

    def __len__(self) -> int:
        return len(self.candidates)

    def place(self, candidate: Candidate) -> int:
        """The place of a candidate. Raises `KeyError` if it is not in the space."""
        return self._places[candidate.tiling]

    def neighbours(self, place: int) -> tuple[Neighbour, ...]:
        """Candidates with the next larger or smaller value of one size, and the same in all others."""
        here = self._coordinates[place]
        found: dict[tuple[str, int], tuple[int, int]] = {}
        for other, there in enumerate(self._coordinates):
            steps = [(axis, b - a) for axis, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]
            if len(steps) != 1:
                continue
            ((axis, step),) = steps
            direction = (list(self._values)[axis], 1 if step > 0 else -1)
            found[direction] = min(found.get(direction, (abs(step), other)), (abs(step), other))
        return tuple(Neighbour(other, direction) for direction, (_, other) in sorted(found.items()))

    def features(self) -> np.ndarray:
        """A row of numbers from 0 to 1 for each candidate: sizes on a scale of powers of two, and VMEM.

        What is no size (a flag, a word) counts by its place among the values that there are. Of a size that
        is not always a power of two, the power of two in it counts, too: it decides what it divides.
        """
        columns: list[list[float]] = []
        for name, own in self._sizes.items():
            found = self._values[name]
            columns.append([_scaled(value, found) for value in own])
            if all(_is_size(value) for value in found) and any(value & (value - 1) for value in found):
                columns.append([math.log2(value & -value) for value in own])
        columns.append([math.log2(max(c.vmem_bytes, 1)) for c in self.candidates])
        table = np.array(columns, np.float64).T
        low, high = table.min(axis=0), table.max(axis=0)
        return ((table - low) / np.where(high > low, high - low, 1.0))[:, high > low]


def _order(value: Any) -> tuple[int, Any]:
    """Numbers by size, then all else by its text."""
    return (0, value) if isinstance(value, int | float) else (1, repr(value))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _scaled(value: Any, values: Sequence[Any]) -> float:
    """The logarithm of a size; the place among `values` of anything else."""
    return math.log2(value) if _is_size(value) else float(values.index(value))

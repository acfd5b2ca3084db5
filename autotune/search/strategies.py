"""Which candidate to score next. No strategy scores anything: it is asked, and told.

All are made of a space and a seed, and do the same with the same seed and the same answers.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from autotune.search.space import Space
from autotune.spec import Candidate


class Strategy(Protocol):
    """Ask for candidates, score them, tell what came of it, ask again.

    No candidate is given twice. None is given that is not in the space.
    """

    @property
    def adaptive(self) -> bool:
        """Whether what is told changes what is given. If not, everything may be asked for at once."""
        ...

    def ask(self, n: int) -> list[Candidate]:
        """At most `n` candidates, all of them at the same time.

        There may be fewer, and none while candidates given before are not told of. None although all are
        told of is the end. Raises `ValueError` if `n` is not positive.
        """
        ...

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        """What came of a candidate that was given: its time, or None if it has none.

        Raises `ValueError` if it was not given, or was told of before.
        """
        ...


class Memory:
    """What was given, and what came of it."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.given: dict[int, None] = {}
        self.told: dict[int, float | None] = {}

    @property
    def waiting(self) -> list[int]:
        """Places that were given and not told of."""
        return [place for place in self.given if place not in self.told]

    @property
    def left(self) -> list[int]:
        """Places that were not given."""
        return [place for place in range(len(self.space)) if place not in self.given]

    def give(self, places: list[int]) -> list[Candidate]:
        """The candidates at `places`, which are given from now on."""
        self.given.update(dict.fromkeys(places))
        return [self.space.candidates[place] for place in places]

    def tell(self, candidate: Candidate, seconds: float | None) -> int:
        """Keep a result. Returns the place; raises as `Strategy.tell` does."""
        try:
            place = self.space.place(candidate)
        except KeyError:
            raise ValueError(f"{candidate.tiling} is not in the space") from None
        if place not in self.given:
            raise ValueError(f"{candidate.tiling} was not asked for")
        if place in self.told:
            raise ValueError(f"{candidate.tiling} was told of before")
        self.told[place] = seconds
        return place


def check_count(n: int) -> None:
    """Raises `ValueError` if `n` is not positive."""
    if n < 1:
        raise ValueError(f"n must be positive, got {n}")


class InOrder:
    """Gives candidates in an order that nothing changes."""

    adaptive = False

    def __init__(self, space: Space, order: list[int]) -> None:
        self._memory = Memory(space)
        self._order = order

    def ask(self, n: int) -> list[Candidate]:
        """The next candidates."""
        check_count(n)
        begin = len(self._memory.given)
        return self._memory.give(self._order[begin : begin + n])

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        """Nothing follows from it."""
        self._memory.tell(candidate, seconds)


def exhaustive(space: Space, seed: int = 0) -> Strategy:
    """All candidates, the default first, then in the order of the space."""
    del seed
    return InOrder(space, [space.start, *(p for p in range(len(space)) if p != space.start)])


def random(space: Space, seed: int = 0) -> Strategy:
    """All candidates, the default first, then in any order."""
    others = [place for place in range(len(space)) if place != space.start]
    shuffled = np.random.default_rng(seed).permutation(others) if others else []
    return InOrder(space, [space.start, *(int(place) for place in shuffled)])


class LocalSearch:
    """Pattern search: from the default, along one size at a time, onward where it got faster.

    A step that helped is tried again in the same direction before others. Where no step helps, it begins
    again at a candidate that was not given yet, any of them.
    """

    adaptive = True

    def __init__(self, space: Space, seed: int = 0) -> None:
        self._memory = Memory(space)
        self._random = np.random.default_rng(seed)
        self._here: int | None = None
        self._queue: list[int] = [space.start]
        self._directions: dict[int, tuple[str, int]] = {}

    def ask(self, n: int) -> list[Candidate]:
        """Neighbours of the best candidate since the last beginning."""
        check_count(n)
        self._queue = [place for place in self._queue if place not in self._memory.given]
        left = self._memory.left
        if not self._queue and not self._memory.waiting and left:
            self._here = None
            self._queue = [int(self._random.choice(left))]
            self._directions = {}
        chosen, self._queue = self._queue[:n], self._queue[n:]
        return self._memory.give(chosen)

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        """Go there if it is faster."""
        place = self._memory.tell(candidate, seconds)
        if seconds is None:
            return
        here = None if self._here is None else self._memory.told[self._here]
        if here is not None and seconds >= here:
            return
        came_by = self._directions.get(place)
        self._here = place
        neighbours = self._memory.space.neighbours(place)
        self._directions |= {n.place: n.direction for n in neighbours}
        shuffled = [neighbours[i] for i in self._random.permutation(len(neighbours))]
        shuffled.sort(key=lambda neighbour: neighbour.direction != came_by)
        self._queue = [neighbour.place for neighbour in shuffled]

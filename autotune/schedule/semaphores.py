"""Semaphores of one core: what has arrived, when, and who must wait for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Arrival:
    """Something that a semaphore is counted up by.

    Attributes:
        time: when, in cycles.
        amount: by how much.
        kind: what brought it: a kind of copy, `timeline.LOCAL` or `timeline.REMOTE`.
        remote: another core sent it.
    """

    time: float
    amount: int
    kind: int
    remote: bool = False


@dataclass(slots=True)
class Semaphore:
    """One semaphore.

    Attributes:
        arrivals: what has not been taken yet, in the order it counts.
        owed: what was taken before it arrived: code may count down first, and wait until it is repaid.
    """

    arrivals: deque[Arrival] = field(default_factory=deque)
    owed: int = 0

    def arrive(self, arrival: Arrival) -> None:
        """Count up. What other cores send is put in order of time; they need not run in order."""
        if not arrival.remote:
            self.arrivals.append(arrival)
            return
        later = 0
        while later < len(self.arrivals) and self.arrivals[-1 - later].time > arrival.time:
            later += 1
        self.arrivals.insert(len(self.arrivals) - later, arrival)

    def reached(self, amount: int, now: float, kind: int) -> tuple[int, float, int]:
        """When it holds `amount`: (how much is missing still, when, the kind of what came last).

        `now` and `kind` are the answer where nothing has to be waited for.
        """
        missing, ready = amount + self.owed, now
        for arrival in self.arrivals:
            if missing <= 0:
                break
            missing -= arrival.amount
            if arrival.time > ready:
                ready, kind = arrival.time, arrival.kind
        return missing, ready, kind

    def take(self, amount: int, now: float) -> None:
        """Count down by `amount` at time `now`."""
        self.owed += amount
        self.settle(now)

    def settle(self, now: float) -> None:
        """Pay what is owed with what has arrived."""
        while self.owed > 0 and self.arrivals and self.arrivals[0].time <= now:
            first = self.arrivals[0]
            part = min(self.owed, first.amount)
            first.amount -= part
            self.owed -= part
            if not first.amount:
                self.arrivals.popleft()

    def forget_local(self) -> None:
        """Drop what belongs to a call that has ended; what other cores sent may be for the next one."""
        self.owed = 0
        self.arrivals = deque(arrival for arrival in self.arrivals if arrival.remote)

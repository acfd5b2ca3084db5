"""What the sanitizer finds, as values and in words."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from bridge.interpretation.signs import CopyMode, Kind

_BOUNDS = "Keep the index within the array: check index maps and pl.ds, and guard the ends with pl.when."

FIXES: dict[Kind, str] = {
    "race": (
        "Wait for the one before the other starts: for a copy's semaphore before its memory is used again; "
        "for a signal of the rank that used the memory (a credit) before another one writes there."
    ),
    "out_of_bounds_read": _BOUNDS,
    "out_of_bounds_write": _BOUNDS,
    "uninitialised_read": (
        "Write the memory before it is read (at the first grid step, with pl.when), write every block of a "
        "result, and mask what lies beyond the end of a ragged array with jnp.where."
    ),
    "semaphore_left": (
        "Let the kernel wait for as much as is signalled, before it ends: the next kernel finds what is left."
    ),
    "dma_not_waited": (
        "Wait for the copy before the kernel ends, on both ranks of a remote one: copy.wait(), or "
        "wait_send() and wait_recv()."
    ),
    "missing_barrier": (
        "At the start of the kernel, signal pltpu.get_barrier_semaphore() of each rank that will write here, "
        "and wait for as many signals as there are ranks that this one will write to."
    ),
    "deadlock": (
        "Signal each semaphore as often as it is waited for, on every rank; check device ids, and the sizes "
        "of copies that are waited for."
    ),
    "order_dependent_result": (
        "Wait for each copy or signal by a semaphore of its own where the order matters, and mark a "
        'dimension of the grid that carries something over as "arbitrary".'
    ),
    "error": "Read the error: the kernel could not be run to its end.",
}
"""What to do about each kind of finding."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a kernel.

    Attributes:
        kind: what is wrong.
        op: the op that was called.
        kernel: the kernel's name.
        ranks: whose doing it is; empty for an op of one device.
        line: of the kernel's source, as "file:line".
        other_line: the second line that takes part: of a race, the other access.
        message: what was seen, as a sentence.
        fix: what to do, as a sentence.
        copies: when copies were made in the run that showed it first: "on_wait" (late) or "eager".
        seed: that run's seed; 0 takes everything in its usual order.
        times: how many runs showed it.
    """

    kind: Kind
    op: str
    kernel: str
    ranks: tuple[int, ...]
    line: str
    other_line: str
    message: str
    fix: str
    copies: CopyMode
    seed: int
    times: int = 1

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for findings that are one and the same, seen in several runs, calls or on several ranks."""
        return self.kind, self.op, self.kernel, self.line, self.other_line

    def merged(self, other: Finding, again: bool = True) -> Finding:
        """One finding for two with the same identity: as it was seen first.

        Args:
            again: whether the other one was seen in another run.
        """
        ranks = tuple(sorted({*self.ranks, *other.ranks}))
        return dataclasses.replace(self, ranks=ranks, times=self.times + again * other.times)

    def as_json(self) -> dict[str, Any]:
        """The attributes, for `json.dumps`."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        many = "s" if len(self.ranks) > 1 else ""
        ranks = f", rank{many} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        lines = [f"{self.kind}: kernel {self.kernel} of {self.op}{ranks}", f"  at {_short(self.line)}"]
        if self.other_line and self.other_line != self.line:
            lines.append(f"  and {_short(self.other_line)}")
        lines.append(f"  {_short(self.message)}")
        lines.append(f"  Fix: {self.fix}")
        runs = "1 run" if self.times == 1 else f"{self.times} runs"
        lines.append(f"  Seen in {runs}, first with copies made {_WHEN[self.copies]}, seed {self.seed}.")
        return "\n".join(lines)


_WHEN = {"on_wait": "late (on_wait)", "eager": "at once (eager)"}


def _short(text: str) -> str:
    """A text with paths below the current directory made relative."""
    return text.replace(os.getcwd() + os.sep, "")

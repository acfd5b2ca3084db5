"""What came of a search: of each candidate, and in all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from autotune.score.protocol import Score
from autotune.search.subject import tiling_text
from autotune.spec import Candidate

Status = Literal["scored", "failed", "uncertain", "wrong"]


@dataclass(frozen=True)
class Outcome:
    """What came of a candidate.

    Attributes:
        candidate: the candidate.
        status: `scored`; `failed`, it does not compile or can't be scored; `uncertain`, its score has low
            confidence; or `wrong`, its results are not those of the reference. Only `scored` ones can win.
        reason: why it can't win; empty if it can.
        scores: those of each workload, as far as it got.
        took_s: seconds that scoring took.
    """

    candidate: Candidate
    status: Status
    reason: str = ""
    scores: tuple[Score, ...] = ()
    took_s: float = field(default=0.0, compare=False)

    @property
    def time_s(self) -> float:
        """The times of all workloads together."""
        return sum(score.time_s for score in self.scores)

    @property
    def vmem_bytes(self) -> int:
        """VMEM: what the compiler says; if it does not, what was estimated."""
        said = [score.vmem_bytes for score in self.scores]
        return max(said) if said and all(said) else self.candidate.vmem_bytes


@dataclass(frozen=True)
class Progress:
    """How far a search is, after each candidate.

    Attributes:
        outcome: what came of it.
        best: the fastest so far; None if none has a time.
        done: candidates done.
        budget: candidates that will be done, unless the search ends before.
        left_s: seconds until then, about.
    """

    outcome: Outcome
    best: Outcome | None
    done: int
    budget: int
    left_s: float


@dataclass(frozen=True)
class Tuned:
    """What tuning found.

    Attributes:
        name: what was tuned.
        chip: name of the chip.
        source: the source of all its times.
        best: the winner; None if tuning was interrupted before there was one.
        outcomes: of all candidates scored, in the order in which they were asked for.
        pruned: candidates that were left out before, with their reasons.
        legal: how many candidates there were to choose from.
        strategy, seed, budget: how the search was done.
        checked: whether the winner's results were compared with a reference.
        interrupted: whether somebody stopped it.
        took_s: seconds it took.
    """

    name: str
    chip: str
    source: str
    best: Outcome | None
    outcomes: tuple[Outcome, ...]
    pruned: tuple[Candidate, ...]
    legal: int
    strategy: str
    seed: int
    budget: int
    checked: bool
    interrupted: bool
    took_s: float = field(compare=False)

    def count(self, status: Status) -> int:
        """How many candidates have this status."""
        return sum(outcome.status == status for outcome in self.outcomes)

    def table(self) -> str:
        """All candidates: times, fastest first, and why the others can't win."""
        lines = [f"{self.name} on {self.chip}, times by {self.source}"]
        good = [outcome for outcome in self.outcomes if outcome.status == "scored"]
        for outcome in sorted(good, key=lambda outcome: outcome.time_s):
            mark = "  <- best" if outcome is self.best else ""
            lines.append(
                f"  {outcome.time_s * 1e3:10.4g} ms  {_mebibytes(outcome.vmem_bytes)}  "
                f"{tiling_text(outcome.candidate.tiling)}{mark}"
            )
        for outcome in self.outcomes:
            if outcome.status != "scored":
                text = tiling_text(outcome.candidate.tiling)
                lines.append(f"  {outcome.status:>13}  {text}: {outcome.reason}")
        for candidate in self.pruned:
            text = tiling_text(candidate.tiling)
            lines.append(f"  {'left out':>13}  {text}: {'; '.join(candidate.reasons)}")
        return "\n".join(lines)


class NothingWorks(RuntimeError):
    """No candidate can be used. The message has the reason of each.

    Attributes:
        tuned: what was tried.
    """

    def __init__(self, tuned: Tuned) -> None:
        super().__init__(f"no tiling can be used. {tuned.table()}")
        self.tuned = tuned


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:8.2f} MiB"

"""Choose a tiling: leave out what can't run, search, check the winner.

    from autotune.score.schedule import ScheduleScorer
    from autotune.search import kernel_subject
    from autotune.tune import tune

    tuned = tune(kernel_subject(problem, spec, chip), ScheduleScorer(chip))
    print(tuned.table())

What is scored, in which order and how many at a time is the strategy's; see `autotune.search`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from autotune.score.protocol import Score, Scorer
from autotune.score.replay import NotRecordedError
from autotune.search import STRATEGIES, Space, Strategy, Subject
from autotune.search.outcome import NothingWorks as NothingWorks
from autotune.search.outcome import Outcome as Outcome
from autotune.search.outcome import Progress as Progress
from autotune.search.outcome import Status
from autotune.search.outcome import Tuned as Tuned
from autotune.spec import Candidate
from bridge.aot.errors import CompilerMissing

TIE = 0.005
"""Times closer than this share don't tell which is faster."""

SHARE, FEW = 4, 4
"""Unless told otherwise, one of so many candidates is scored, and at least so many."""

BLIND = ("roofline",)
"""Sources whose times don't depend on the tiling. With them the default stays as it is."""


def tune(
    subject: Subject,
    scorer: Scorer,
    *,
    strategy: str = "model",
    seed: int = 0,
    budget: int | None = None,
    jobs: int = 1,
    check: bool = True,
    tie: float = TIE,
    on_progress: Callable[[Progress], None] | None = None,
) -> Tuned:
    """The fastest tiling that a search finds, and everything it tried.

    Of those about as fast, the one that takes the least VMEM wins; of those, the first in the order of the
    space. What wins was run, interpreted, and compared with the reference, if there is one.

    An interrupt (Ctrl-C) ends the search, and the best so far is checked and returned.

    Args:
        subject: what to tune; see `autotune.search`.
        scorer: gives the times. All have its source.
        strategy: one of `autotune.search.STRATEGIES`.
        seed: with the same seed, jobs and scores the search does the same.
        budget: candidates to score at most; by default a quarter of the legal ones, but at least four.
        jobs: candidates that are scored at a time, each by a thread.
        check: whether the winner's results are checked.
        tie: the share by which times must differ to tell which is faster.
        on_progress: called after each candidate.

    Raises:
        NothingWorks: no candidate is legal, has a time, and gives right results.
        CompilerMissing: the scorer needs a compiler that is not installed.
        NotRecordedError: the scorer replays a recording that lacks a candidate.
        ValueError: an argument that makes no sense, or a score of another source or chip.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if jobs < 1 or (budget is not None and budget < 1):
        raise ValueError(f"budget and jobs must be positive, got {budget} and {jobs}")
    begin = time.perf_counter()
    legal = [candidate for candidate in subject.candidates if candidate.legal]
    if scorer.source in BLIND:
        legal = [c for c in legal if c.tiling == subject.default] or legal[:1]
    budget = min(budget or max(len(legal) // SHARE, FEW), len(legal))
    run = _Run(subject, scorer, budget, jobs, tie, on_progress)
    interrupted = False
    if legal:
        try:
            run.search(STRATEGIES[strategy](Space(legal, subject.default), seed))
        except KeyboardInterrupt:
            interrupted = True
    best = None
    try:
        best = run.winner(check)
    except KeyboardInterrupt:  # nobody may win unchecked
        interrupted = True
    tuned = Tuned(
        name=subject.name,
        chip=subject.chip.name,
        source=scorer.source,
        best=best,
        outcomes=tuple(run.outcomes.values()),
        pruned=tuple(candidate for candidate in subject.candidates if not candidate.legal),
        legal=len(legal),
        strategy=strategy,
        seed=seed,
        budget=budget,
        checked=best is not None and check and subject.check is not None,
        interrupted=interrupted,
        took_s=time.perf_counter() - begin,
    )
    if best is None and not interrupted:
        raise NothingWorks(tuned)
    return tuned


class _Run:
    """One search: scores what a strategy asks for."""

    def __init__(
        self,
        subject: Subject,
        scorer: Scorer,
        budget: int,
        jobs: int,
        tie: float,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.subject, self.scorer = subject, scorer
        self.budget, self.jobs, self.tie = budget, jobs, tie
        self.on_progress = on_progress
        self.outcomes: dict[Candidate, Outcome] = {}
        self._begin = time.perf_counter()

    def search(self, strategy: Strategy) -> None:
        """Until the budget is spent, or the strategy has no more.

        What is asked for together is waited for together: else the next question would depend on which
        was done first, and no search could be repeated.
        """
        with ThreadPoolExecutor(self.jobs) as threads:
            try:
                while left := self.budget - len(self.outcomes):
                    batch = strategy.ask(min(self.jobs, left) if strategy.adaptive else left)
                    if not batch:
                        break
                    self._score_all(threads, strategy, batch)
            except BaseException as error:
                threads.shutdown(wait=False, cancel_futures=True)
                if isinstance(error, KeyboardInterrupt):
                    _end_compilers()
                raise

    def _score_all(self, threads: ThreadPoolExecutor, strategy: Strategy, batch: list[Candidate]) -> None:
        tasks = [threads.submit(self._score, candidate) for candidate in batch]
        try:
            for candidate, task in zip(batch, tasks, strict=True):
                outcome = task.result()
                self._keep(outcome)
                strategy.tell(candidate, outcome.time_s if outcome.status == "scored" else None)
        except KeyboardInterrupt:  # what others have finished meanwhile is worth keeping
            for task in tasks:
                if _succeeded(task) and task.result().candidate not in self.outcomes:
                    self.outcomes[task.result().candidate] = task.result()
            raise

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes[outcome.candidate] = outcome
        if self.on_progress is None:
            return
        done = len(self.outcomes)
        passed = time.perf_counter() - self._begin
        best = _preferred(list(self.outcomes.values()), self.tie, self._places())
        self.on_progress(Progress(outcome, best, done, self.budget, passed / done * (self.budget - done)))

    def _places(self) -> dict[Candidate, int]:
        return {candidate: place for place, candidate in enumerate(self.subject.candidates)}

    def _score(self, candidate: Candidate) -> Outcome:
        begin = time.perf_counter()
        scores: list[Score] = []
        status: Status = "scored"
        reason = ""
        try:
            for workload in self.subject.workloads(candidate.tiling):
                scores.append(self._checked(self.scorer.score(workload)))
        except (CompilerMissing, NotRecordedError, _ForeignScore):
            raise  # no candidate's fault
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {_first_line(error)}"
        else:
            low = [score for score in scores if score.confidence == "low"]
            strange = [s.time_s for s in scores if not (math.isfinite(s.time_s) and s.time_s > 0)]
            if strange or not scores:
                status, reason = "failed", f"its time is {strange[0] if strange else 'not known'}"
            elif low and self.scorer.source not in BLIND:
                status, reason = "uncertain", "; ".join(low[0].reasons) or "its score has low confidence"
        return Outcome(candidate, status, reason, tuple(scores), time.perf_counter() - begin)

    def _checked(self, score: Score) -> Score:
        for what, wanted in (("source", self.scorer.source), ("chip", self.subject.chip.name)):
            if getattr(score, what) != wanted:
                raise _ForeignScore(f"a score of {what} {wanted} was expected, got {getattr(score, what)}")
        return score

    def winner(self, check: bool) -> Outcome | None:
        """The best candidate whose results are right. Those found wrong before it are marked so."""
        places = self._places()
        while (best := _preferred(list(self.outcomes.values()), self.tie, places)) is not None:
            wrong = self.subject.check(best.candidate.tiling) if check and self.subject.check else ""
            if not wrong:
                return best
            self.outcomes[best.candidate] = dataclasses.replace(best, status="wrong", reason=wrong)
        return None


class _ForeignScore(ValueError):
    """A score that can't be compared with the others."""


def _preferred(outcomes: list[Outcome], tie: float, places: dict[Candidate, int]) -> Outcome | None:
    """The fastest; of those that tie with it the one with the least VMEM; of those the first."""
    good = [outcome for outcome in outcomes if outcome.status == "scored"]
    if not good:
        return None
    limit = min(outcome.time_s for outcome in good) * (1 + tie)
    ties = [outcome for outcome in good if outcome.time_s <= limit]
    return min(ties, key=lambda outcome: (outcome.vmem_bytes, places[outcome.candidate]))


def _succeeded(task: Future[Outcome]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _end_compilers() -> None:
    """Ends compilations, which threads would wait for otherwise. The next one starts another pool."""
    pool = sys.modules.get("bridge.aot.pool")  # where it is not loaded, nothing is being compiled
    if pool is not None:
        pool.shared().close()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]

"""Tuning: what is tried, what wins, what is said of the rest."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from autotune.score import Score
from autotune.score.replay import NotRecordedError, Recording, ReplayScorer
from autotune.search import STRATEGIES, Subject
from autotune.spec import Candidate
from autotune.tune import NothingWorks, Progress, Tuned, tune
from bridge.aot.errors import CompilerMissing

from .formulas import FormulaScorer, Tiles, bowl, make_subject, score

BEST = Tiles(512, 256)


def winner(tuned: Tuned) -> Tiles:
    assert tuned.best is not None
    return tuned.best.candidate.tiling


def exhaustively(subject: Subject, scorer: FormulaScorer, **options: object) -> Tuned:
    return tune(subject, scorer, strategy="exhaustive", budget=32, **options)  # pyright: ignore[reportArgumentType]


# The search ---------------------------------------------------------------------------------------


def test_the_fastest_wins_and_the_source_is_shown() -> None:
    scorer = FormulaScorer(bowl)
    tuned = exhaustively(make_subject(), scorer)
    assert winner(tuned) == BEST
    assert (tuned.source, tuned.chip, tuned.legal, tuned.count("scored")) == ("schedule", "v6e", 32, 32)
    assert len(scorer.asked) == len(set(scorer.asked)) == 32
    first, second, *_ = tuned.table().splitlines()
    assert first == "bowl on v6e, times by schedule"
    assert second.endswith("[tile_m=512, tile_n=256, turned=False]  <- best")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("jobs", [1, 3])
def test_the_budget_is_kept_and_the_search_repeats(strategy: str, jobs: int) -> None:
    def run() -> Tuned:
        return tune(make_subject(), FormulaScorer(bowl), strategy=strategy, seed=2, budget=7, jobs=jobs)

    tuned = run()
    assert len(tuned.outcomes) == 7
    assert tuned == run()


def test_a_quarter_is_scored_unless_told_otherwise() -> None:
    assert len(tune(make_subject(), FormulaScorer(bowl)).outcomes) == 8
    few = dataclasses.replace(make_subject(), candidates=make_subject().candidates[:6])
    assert len(tune(few, FormulaScorer(bowl)).outcomes) == 4


def test_several_are_scored_at_a_time() -> None:
    together = threading.Barrier(3, timeout=10)

    def seconds(tiling: Tiles) -> float:
        together.wait()
        return bowl(tiling)

    assert (
        len(tune(make_subject(), FormulaScorer(seconds), strategy="random", budget=6, jobs=3).outcomes) == 6
    )


def test_progress_is_told() -> None:
    told: list[Progress] = []
    tuned = tune(make_subject(), FormulaScorer(bowl), budget=5, on_progress=told.append)
    assert [(p.done, p.budget) for p in told] == [(n, 5) for n in range(1, 6)]
    assert [p.outcome for p in told] == list(tuned.outcomes)
    assert told[-1].best == tuned.best and told[-1].left_s == 0 and told[0].left_s >= 0
    best = [p.best.time_s for p in told if p.best is not None]
    assert best == sorted(best, reverse=True) and len(best) == 5


@pytest.mark.parametrize(
    "options", [{"strategy": "magic"}, {"budget": 0}, {"jobs": 0}], ids=lambda options: next(iter(options))
)
def test_arguments_that_make_no_sense(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        tune(make_subject(), FormulaScorer(bowl), **options)  # pyright: ignore[reportArgumentType]


# Which one wins -----------------------------------------------------------------------------------


def test_near_ties_go_to_less_vmem_and_then_to_the_first() -> None:
    def seconds(tiling: Tiles) -> float:
        return {Tiles(1024, 1024): 1.0, Tiles(512, 256): 1.004, Tiles(256, 512): 1.004}.get(tiling, 1.006)

    assert winner(exhaustively(make_subject(), FormulaScorer(seconds))) == Tiles(256, 512)
    assert winner(exhaustively(make_subject(), FormulaScorer(seconds), tie=0.0)) == Tiles(1024, 1024)
    assert winner(exhaustively(make_subject(), FormulaScorer(seconds), tie=0.01)) == Tiles(128, 128)


def test_vmem_is_what_the_compiler_says() -> None:
    def seconds(tiling: Tiles) -> Score:
        return score(1.0, vmem_bytes=100 if tiling == Tiles(1024, 512) else 200)

    assert winner(exhaustively(make_subject(), FormulaScorer(seconds))) == Tiles(1024, 512)


def test_times_of_phases_are_added_up() -> None:
    plain = make_subject()
    both = dataclasses.replace(plain, workloads=lambda tiling: 2 * plain.workloads(tiling))
    tuned = tune(both, FormulaScorer(bowl), budget=1)
    assert tuned.best is not None and tuned.best.time_s == 2 * bowl(Tiles(128, 128))


def test_low_confidence_never_wins() -> None:
    def seconds(tiling: Tiles) -> Score:
        sure = "low" if tiling == BEST else "high"
        return score(bowl(tiling), confidence=sure)

    tuned = exhaustively(make_subject(), FormulaScorer(seconds))
    assert winner(tuned) != BEST
    assert tuned.count("uncertain") == 1 and "a branch was not known" in tuned.table()


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_time_that_is_none_never_wins(strange: float) -> None:
    tuned = exhaustively(make_subject(), FormulaScorer(lambda t: strange if t == BEST else bowl(t)))
    assert winner(tuned) != BEST
    assert f"its time is {strange}" in tuned.table()


def test_with_the_roofline_the_default_stays() -> None:
    scorer = FormulaScorer(lambda tiling: 1.0, source="roofline")
    tuned = tune(make_subject(), scorer)
    assert winner(tuned) == Tiles(128, 128) and tuned.source == "roofline"
    assert len(scorer.asked) == 1


def test_scores_of_another_source_or_chip_are_refused() -> None:
    with pytest.raises(ValueError, match="chip v6e was expected, got v5e"):
        tune(make_subject(), FormulaScorer(lambda tiling: score(1.0, on="v5e")))
    measured = dataclasses.replace(score(1.0), source="measured")
    with pytest.raises(ValueError, match="source schedule was expected, got measured"):
        tune(make_subject(), FormulaScorer(lambda tiling: measured))


# What can't win -----------------------------------------------------------------------------------


def test_what_fails_is_left_out_with_its_reason() -> None:
    def seconds(tiling: Tiles) -> float:
        if tiling.tile_m >= 512:
            raise TimeoutError("60 seconds have passed\nand more")
        return bowl(tiling)

    tuned = exhaustively(make_subject(), FormulaScorer(seconds))
    assert winner(tuned) == Tiles(256, 256)
    assert tuned.count("failed") == 16
    assert "turned=True]: TimeoutError: 60 seconds have passed\n" in tuned.table()


def test_all_fail() -> None:
    def seconds(tiling: Tiles) -> float:
        raise RuntimeError(f"no way at {tiling.tile_m}")

    with pytest.raises(NothingWorks) as raised:
        tune(make_subject(), FormulaScorer(seconds), budget=5)
    assert raised.value.tuned.best is None
    assert raised.value.tuned.count("failed") == 5
    assert "no way at 128" in str(raised.value)


def test_nothing_is_legal() -> None:
    plain = make_subject()
    illegal = tuple(dataclasses.replace(c, reasons=("too large",)) for c in plain.candidates)
    scorer = FormulaScorer(bowl)
    with pytest.raises(NothingWorks, match="left out .*: too large"):
        tune(dataclasses.replace(plain, candidates=illegal), scorer)
    assert not scorer.asked


def test_what_is_illegal_is_never_scored() -> None:
    plain = make_subject()
    kept = tuple(
        dataclasses.replace(c, reasons=("a reason",)) if c.tiling.tile_m > 256 else c
        for c in plain.candidates
    )
    scorer = FormulaScorer(bowl)
    tuned = exhaustively(dataclasses.replace(plain, candidates=kept), scorer)
    assert len(tuned.pruned) == 16 and len(scorer.asked) == 16
    assert not any("tile_m=512" in name for name in scorer.asked)
    assert "[tile_m=512, tile_n=128, turned=False]: a reason" in tuned.table()


@pytest.mark.parametrize("error", [CompilerMissing("install it"), NotRecordedError("not there")])
def test_what_is_no_fault_of_a_candidate_ends_the_search(error: Exception) -> None:
    def seconds(tiling: Tiles) -> float:
        raise error

    with pytest.raises(type(error)):
        tune(make_subject(), FormulaScorer(seconds), jobs=2)


def test_a_recording_without_the_space_is_an_error() -> None:
    with pytest.raises(NotRecordedError):
        tune(make_subject(), ReplayScorer(Recording({"else": score(1.0)})))


# The check of results -----------------------------------------------------------------------------


def test_a_wrong_winner_makes_way_for_the_next() -> None:
    checked: list[Tiles] = []

    def check(tiling: Tiles) -> str:
        checked.append(tiling)
        return "3 of 4 elements are NaN" if tiling.tile_m == 512 else ""

    subject = dataclasses.replace(make_subject(), check=check)
    tuned = exhaustively(subject, FormulaScorer(bowl))
    assert winner(tuned).tile_m != 512 and tuned.checked
    assert tuned.best is not None and tuned.best.status == "scored"
    assert checked[0] == BEST and checked[-1] == winner(tuned)
    assert tuned.count("wrong") == len(checked) - 1
    assert "wrong  [tile_m=512, tile_n=256, turned=False]: 3 of 4" in tuned.table()
    unchecked = exhaustively(subject, FormulaScorer(bowl), check=False)
    assert winner(unchecked) == BEST and not unchecked.checked


def test_all_are_wrong() -> None:
    subject = dataclasses.replace(make_subject(), check=lambda tiling: "it is wrong")
    with pytest.raises(NothingWorks, match="it is wrong") as raised:
        tune(subject, FormulaScorer(bowl), budget=4)
    assert raised.value.tuned.count("wrong") == 4


# Interrupts ---------------------------------------------------------------------------------------


def test_an_interrupt_keeps_what_is_done_and_checks_it() -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    subject = dataclasses.replace(make_subject(), check=lambda tiling: "")
    tuned = tune(subject, FormulaScorer(bowl), strategy="random", on_progress=interrupt)
    assert tuned.interrupted and tuned.checked
    assert len(tuned.outcomes) >= 3 and tuned.best in tuned.outcomes


def test_an_interrupt_before_anything_is_done() -> None:
    def interrupted(tiling: Tiles) -> float:
        raise KeyboardInterrupt

    tuned = tune(make_subject(), FormulaScorer(interrupted))
    assert tuned.interrupted and tuned.best is None and not tuned.outcomes


def test_an_interrupt_of_the_check_gives_no_winner() -> None:
    def check(tiling: Tiles) -> str:
        raise KeyboardInterrupt

    tuned = tune(dataclasses.replace(make_subject(), check=check), FormulaScorer(bowl), budget=3)
    assert tuned.interrupted and tuned.best is None and tuned.count("scored") == 3


def test_candidates_may_tie_in_everything() -> None:
    tuned = exhaustively(
        dataclasses.replace(
            make_subject(), candidates=tuple(Candidate(c.tiling, 1) for c in make_subject().candidates)
        ),
        FormulaScorer(lambda tiling: 1.0),
    )
    assert winner(tuned) == make_subject().candidates[0].tiling

"""Searches on spaces whose candidates were all scored by the compiler's schedule; see recorded/."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.search.recorded import RecordedSpace
from autotune.tune import tune

PATHS = sorted((Path(__file__).parent / "recorded").glob("*.json"))
SHARE = 4
"""One candidate of so many is scored."""
GOOD = 1.02
"""A pick takes at most so many times as long as what an exhaustive search finds."""

every_space = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def test_there_are_twenty_spaces() -> None:
    assert len(PATHS) >= 20


@every_space
def test_every_candidate_was_recorded(path: Path) -> None:
    space = RecordedSpace.load(path)
    assert space.missing == 0
    assert 20 <= len(space.candidates) <= 60
    assert space.recording.source == "schedule"


@every_space
def test_a_quarter_of_the_compilations_is_enough(path: Path) -> None:
    space = RecordedSpace.load(path)
    subject, scorer = space.subject(), space.scorer()
    every = tune(subject, scorer, strategy="exhaustive", budget=len(space.candidates), tie=0.0)
    assert every.best is not None and len(every.outcomes) == len(space.candidates)
    for seed in range(5):
        tuned = tune(subject, scorer, seed=seed)
        assert len(tuned.outcomes) * SHARE <= len(space.candidates)
        assert tuned.best is not None
        assert tuned.best.time_s <= GOOD * every.best.time_s, f"seed {seed}\n{tuned.table()}"

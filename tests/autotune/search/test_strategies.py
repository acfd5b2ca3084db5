"""What every strategy promises, and what each does."""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from autotune.search import STRATEGIES, Space, Strategy
from autotune.search.model import expected_gain, fit
from autotune.spec import Candidate

from .formulas import Tiles, bowl, make_subject

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def make_space(count: int | None = None) -> Space:
    subject = make_subject()
    return Space(subject.candidates[:count], subject.default)


def play(
    strategy: Strategy, seconds: Callable[[Tiles], float | None], batch: int = 1, most: int = 1000
) -> list[Tiles]:
    """The tilings that a strategy gives, in order, until it has no more."""
    given: list[Tiles] = []
    while len(given) < most and (asked := strategy.ask(min(batch, most - len(given)))):
        assert len(asked) <= batch
        for candidate in asked:
            given.append(candidate.tiling)
            strategy.tell(candidate, seconds(candidate.tiling))
    return given


def fails_sometimes(tiling: Tiles) -> float | None:
    return None if tiling.tile_m == 256 else bowl(tiling)


@every_strategy
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(
    count=st.integers(1, 20), batch=st.integers(1, 7), seed=st.integers(0, 9), fail=st.booleans()
)
def test_each_candidate_is_given_once_and_then_it_ends(
    name: str, count: int, batch: int, seed: int, fail: bool
) -> None:
    space = make_space(count)
    given = play(STRATEGIES[name](space, seed), fails_sometimes if fail else bowl, batch)
    assert len(given) == len(set(given)) == count
    assert set(given) == {candidate.tiling for candidate in space.candidates}


@every_strategy
def test_the_same_seed_does_the_same(name: str) -> None:
    def run(seed: int, batch: int) -> list[Tiles]:
        return play(STRATEGIES[name](make_space(), seed), bowl, batch)

    assert run(3, 1) == run(3, 1)
    assert run(3, 4) == run(3, 4)
    if name in ("random", "local"):
        assert any(run(3, 1) != run(seed, 1) for seed in range(4, 8))


@every_strategy
def test_the_default_comes_first(name: str) -> None:
    space = make_space()
    assert STRATEGIES[name](space, 1).ask(1)[0].tiling == make_subject().default
    without = Space(space.candidates[3:])  # no default: the one in the middle
    assert STRATEGIES[name](without, 1).ask(1) == [without.candidates[len(without) // 2]]


@every_strategy
def test_nothing_is_told_that_was_not_asked(name: str) -> None:
    space = make_space()
    strategy = STRATEGIES[name](space, 0)
    (first,) = strategy.ask(1)
    other = next(candidate for candidate in space.candidates if candidate != first)
    with pytest.raises(ValueError, match="was not asked for"):
        strategy.tell(other, 1.0)
    with pytest.raises(ValueError, match="not in the space"):
        strategy.tell(Candidate(Tiles(1, 1), 0), 1.0)
    strategy.tell(first, 1.0)
    with pytest.raises(ValueError, match="told of before"):
        strategy.tell(first, 1.0)
    with pytest.raises(ValueError, match="must be positive"):
        strategy.ask(0)


@every_strategy
def test_all_fail(name: str) -> None:
    assert len(play(STRATEGIES[name](make_space(), 0), lambda tiling: None, 3)) == 32


def test_local_search_waits_for_answers() -> None:
    strategy = STRATEGIES["local"](make_space(), 0)
    (first,) = strategy.ask(5)
    assert strategy.ask(5) == []  # where to go from here is not known yet
    strategy.tell(first, 1.0)
    assert strategy.ask(5)


def test_local_search_goes_down_one_size_at_a_time() -> None:
    given = play(STRATEGIES["local"](make_space(), 0), bowl, most=16)
    assert Tiles(512, 256) in given
    near = [
        sum(getattr(a, name) != getattr(b, name) for name in ("tile_m", "tile_n", "turned"))
        for a, b in zip(given[:1] * 3, given[1:4], strict=True)
    ]
    assert near[0] == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_model_finds_the_best_of_a_bowl_in_a_quarter(seed: int) -> None:
    given = play(STRATEGIES["model"](make_space(), seed), bowl, most=8)
    assert min(map(bowl, given)) == bowl(Tiles(512, 256))


# Spaces -------------------------------------------------------------------------------------------


def test_spaces_have_legal_candidates_once() -> None:
    candidates = make_subject().candidates
    with pytest.raises(ValueError, match="at least one candidate"):
        Space(())
    with pytest.raises(ValueError, match="is illegal: too large"):
        Space((*candidates, Candidate(Tiles(1, 1), 0, ("too large",))))
    with pytest.raises(ValueError, match="there twice"):
        Space((candidates[0], candidates[0]))


def test_neighbours_differ_in_one_size_by_the_next_value() -> None:
    space = make_space()
    place = {candidate.tiling: place for place, candidate in enumerate(space.candidates)}
    near = space.neighbours(place[Tiles(256, 128)])
    assert {(space.candidates[n.place].tiling, n.direction) for n in near} == {
        (Tiles(128, 128), ("tile_m", -1)),
        (Tiles(512, 128), ("tile_m", 1)),
        (Tiles(256, 256), ("tile_n", 1)),
        (Tiles(256, 128, True), ("turned", 1)),
    }
    with_gap = Space([c for c in space.candidates if c.tiling.tile_m != 512 or c.tiling.tile_n != 128])
    place = {candidate.tiling: place for place, candidate in enumerate(with_gap.candidates)}
    up = [n.place for n in with_gap.neighbours(place[Tiles(256, 128)]) if n.direction == ("tile_m", 1)]
    assert [with_gap.candidates[p].tiling for p in up] == [Tiles(1024, 128)]


def test_features_are_between_0_and_1() -> None:
    features = make_space().features()
    assert features.shape == (32, 4)  # three sizes and VMEM
    assert features.min() == 0 and features.max() == 1
    fine = Space([Candidate(Tiles(size, 128), 1) for size in (128, 192, 256)]).features()
    assert fine[:, 0] == pytest.approx([0, math.log2(1.5), 1])
    assert fine[:, 1] == pytest.approx([0.5, 0, 1])  # the power of two in it
    one = Space(make_subject().candidates[:1])
    assert one.features().shape == (1, 0)


def test_a_default_beyond_all_others_counts_as_the_largest_of_them() -> None:
    beyond = Candidate(Tiles(4096, 128), 4 * 1024 * 128)
    space = Space([*make_subject().candidates, beyond], beyond.tiling)
    twin = [candidate.tiling for candidate in space.candidates].index(Tiles(1024, 128))
    assert (space.features()[space.start] == space.features()[twin]).all()
    near = {(space.candidates[n.place].tiling, n.direction) for n in space.neighbours(space.start)}
    assert (Tiles(512, 128), ("tile_m", -1)) in near


# The model ----------------------------------------------------------------------------------------


def test_models_go_through_what_is_known() -> None:
    known = np.array([[0.0], [0.4], [1.0]])
    values = np.array([1.0, 0.5, 2.0])
    models = fit(known, values, np.array([[0.0], [0.4], [1.0], [0.7]]))
    assert sum(model.weight for model in models) == pytest.approx(1)
    for model in models:
        assert model.mean[:3] == pytest.approx(values, abs=0.05)
        assert model.deviation[3] > 2 * model.deviation[:3].max()
    for model in fit(known, np.ones(3), known):
        assert model.mean == pytest.approx(np.ones(3))


def test_expected_gain_of_a_normal_value() -> None:
    gain = expected_gain(np.array([0.0, 0.0, 5.0]), np.array([1.0, 2.0, 1.0]), 0.0)
    assert gain[0] == pytest.approx(1 / math.sqrt(2 * math.pi))
    assert gain[1] == pytest.approx(2 * gain[0])
    assert 0 <= gain[2] < 1e-6

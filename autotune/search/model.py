"""A search by models: Gaussian processes of the logarithm of the time, fitted anew after each result.

The constants were chosen on recorded spaces, in the middle of a range (TRUST from 0.25 to 0.35, DEVIATION
from 0.2 to 0.5) in which nearly all searches find the best; see benchmarks/search_replay.py.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from autotune.search.space import Space
from autotune.search.strategies import Memory, check_count
from autotune.spec import Candidate

TRUST = 0.3
"""By how much the logarithm of the time is expected to grow with the distance from the default, which
somebody chose with care: of what is far from it, its neighbours must show that it is faster."""

DEVIATION = 0.3
"""By how much logarithms of times differ, as far as is known before any are; counts as much as one result."""

LENGTHS = (0.3, 0.6, 1.2, 2.4)
"""How far the model may think that a candidate says something about others; all sizes range from 0 to 1."""

SLOPES = (0.0, 1.0, 4.0)
"""How much of the variance may be a slope along each size, beside what is local."""

NOISE = 1e-4
"""Variance, as a share, that no candidate explains of another."""


class ModelSearch:
    """Gives the candidate that is expected to improve most on the best time.

    First comes the default. A candidate without a time counts as slower than the slowest.
    """

    adaptive = True

    def __init__(self, space: Space, seed: int = 0) -> None:
        self._memory = Memory(space)
        self._features = space.features()
        # Of candidates that promise the same, the first in this order is taken.
        order = np.random.default_rng(seed).permutation(len(space))
        self._order = {int(place): number for number, place in enumerate(order)}
        away = _distances(self._features, self._features[[space.start]])[:, 0]
        self._expected = TRUST * away if space.has_default else 0 * away

    def ask(self, n: int) -> list[Candidate]:
        """The most promising candidates."""
        check_count(n)
        chosen: list[int] = []
        while len(chosen) < n:
            left = [place for place in self._memory.left if place not in chosen]
            if not left:
                break
            chosen.append(self._next(left, [*self._memory.waiting, *chosen]))
        return self._memory.give(chosen)

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        """Learn a time."""
        self._memory.tell(candidate, seconds)

    def _next(self, left: list[int], waiting: list[int]) -> int:
        if self._memory.space.start in left:
            return self._memory.space.start
        left = sorted(left, key=lambda place: self._order[place])
        times = {place: math.log(t) for place, t in self._memory.told.items() if t}
        if not times:
            return left[0]
        slowest = max(times.values()) + 1.0
        known = [*self._memory.told]
        values = np.array([times.get(place, slowest) for place in known])
        if waiting:  # as if each came out as the models expect, so that the next one is elsewhere
            models = self._models(known, values, waiting)
            expected = np.sum([model.weight * model.mean for model in models], axis=0)
            known, values = [*known, *waiting], np.concatenate([values, expected])
        best = min(times.values())
        gains = [
            model.weight * expected_gain(model.mean, model.deviation, best)
            for model in self._models(known, values, left)
        ]
        return left[int(np.argmax(np.sum(gains, axis=0)))]

    def _models(self, known: list[int], values: np.ndarray, asked: list[int]) -> list[Model]:
        found = fit(self._features[known], values - self._expected[known], self._features[asked])
        return [model._replace(mean=model.mean + self._expected[asked]) for model in found]


class Model(NamedTuple):
    """What one model says of some candidates.

    Attributes:
        weight: how likely it is among the models.
        mean: the values it expects.
        deviation: by how much they may differ.
    """

    weight: float
    mean: np.ndarray
    deviation: np.ndarray


def fit(known: np.ndarray, values: np.ndarray, asked: np.ndarray) -> list[Model]:
    """What models with `LENGTHS` and `SLOPES` say at `asked`, [n, d], of `values`, [m], at `known`, [m, d].

    With few values no model stands out, so none is chosen.
    """
    offset, count = values.mean(), len(known) + 1
    models, likelihoods = [], []
    for length, slope in itertools.product(LENGTHS, SLOPES):
        covariance = _covariance(known, known, length, slope) + NOISE * np.eye(len(known))
        lower = np.linalg.cholesky(covariance)
        white = np.linalg.solve(lower, values - offset)
        variance = (float(white @ white) + DEVIATION**2) / count
        likelihoods.append(-0.5 * count * math.log(variance) - float(np.log(np.diag(lower)).sum()))
        across = np.linalg.solve(lower, _covariance(known, asked, length, slope))
        own = _covariance(asked, asked, length, slope).diagonal()
        spread = np.maximum(own - (across**2).sum(axis=0), 1e-12) * variance
        models.append((offset + across.T @ white, np.sqrt(spread)))
    weights = np.exp(np.array(likelihoods) - max(likelihoods))
    weights /= weights.sum()
    return [Model(float(w), mean, deviation) for w, (mean, deviation) in zip(weights, models, strict=True)]


def expected_gain(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """By how much each is expected to be below `best`, where it is."""
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    below = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(z / math.sqrt(2)))
    return deviation * (z * below + density)


def _covariance(a: np.ndarray, b: np.ndarray, length: float, slope: float) -> np.ndarray:
    """A Matérn kernel (once differentiable), and a linear one around the middle."""
    r = math.sqrt(3) * _distances(a, b) / length
    return (1 + r) * np.exp(-r) + slope * ((a - 0.5) @ (b - 0.5).T)


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2))

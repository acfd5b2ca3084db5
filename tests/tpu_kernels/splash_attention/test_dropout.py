"""The dropout hash: its rate, its independence, and that it is a function of the position alone."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from numpy.typing import ArrayLike

from tpu_kernels.splash_attention.dropout import keep, threshold

RATES = (0.0, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3)


def kept(
    seed: tuple[int, int] = (1, 2),
    *,
    b: ArrayLike = 0,
    h: ArrayLike = 0,
    q: ArrayLike = range(512),
    kv: ArrayLike = range(512),
    p: float = 0.5,
) -> np.ndarray:
    """Which of the positions are kept, bool, in the order of the arguments; an int is one index."""
    axes = [np.atleast_1d(np.asarray(a, np.int32)) for a in (b, h, q, kv)]
    b, h, q, kv = map(jnp.asarray, np.ix_(*axes))
    return np.asarray(keep(jnp.asarray(seed, jnp.int32), b, h, q, kv, p)).squeeze()


def assert_rate(found: np.ndarray, p: float) -> None:
    """Five standard deviations: a right rate fails once in 1.7 million."""
    allowed = 5 * math.sqrt(p * (1 - p) / found.size)
    assert abs((~found).mean() - p) <= allowed


@pytest.mark.parametrize("p", RATES)
def test_rate(p: float) -> None:
    assert_rate(kept(p=p), p)
    assert_rate(kept(b=range(64), h=range(64), q=3, kv=range(64), p=p), p)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rate_of_every_row_and_column(p: float) -> None:
    found = ~kept(p=p)
    for rates in (found.mean(0), found.mean(1)):
        # 512 rates of 512 draws each: six standard deviations, once in a million for all of them.
        assert np.abs(rates - p).max() <= 6 * math.sqrt(p * (1 - p) / 512)
        # And no less spread than chance has: the variance of the rates is p (1 - p) / 512, known to about
        # sqrt(2 / 512) of itself.
        spread = rates.var() / (p * (1 - p) / 512)
        assert abs(spread - 1) <= 6 * math.sqrt(2 / 512)


@pytest.mark.parametrize("axis", range(4), ids=["b", "h", "q", "kv"])
@pytest.mark.parametrize("step", [1, 2, 64, 1024])
def test_neighbours_are_independent(axis: int, step: int) -> None:
    near = [np.arange(n) for n in (4, 4, 128, 128)]
    far = list(near)
    far[axis] = near[axis] + step
    agree = kept(b=near[0], h=near[1], q=near[2], kv=near[3]) == kept(b=far[0], h=far[1], q=far[2], kv=far[3])
    assert_rate(agree, 0.5)


@pytest.mark.parametrize("other", [(1, 3), (0, 2), (2, 1), (-1, 2), (1, -(2**31)), (1 << 30, 2)])
def test_seeds_are_independent(other: tuple[int, int]) -> None:
    assert_rate(kept() == kept(other), 0.5)


def test_pairs_of_rows_are_independent() -> None:
    """All pairs of 256 rows: a linear relation between rows would show as a correlation of some pair."""
    signs = kept(q=range(256), kv=range(4096)) * 2.0 - 1
    correlations = signs @ signs.T / 4096
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() <= 6.5 / math.sqrt(4096)  # 32,640 pairs: once in 300,000


def test_the_same_in_plain_python() -> None:
    """A seed means the same in every version: the definition once more, in whole numbers modulo 2**32."""
    M = 2**32

    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) % M
        x = ((x ^ x >> 15) * 0x846CA68B) % M
        return x ^ x >> 16

    def is_kept(seed: tuple[int, int], b: int, h: int, q: int, kv: int, p: float) -> bool:
        row = mix((mix((mix((mix(mix(seed[0] % M) ^ seed[1] % M) + b) % M) + h) % M) + q) % M)
        x = (kv * 0x85EBCA6B) % M ^ row
        x = ((x ^ x >> 16) * 0x7FEB352D) % M
        x = (((x ^ x >> 15) + mix(row ^ 0x9E3779B9)) * 0x846CA68B) % M
        return (x ^ x >> 16) >> 1 >= p * 2**31

    seed, b, h, q, kv = (7, -(2**31)), (0, 5), (0, 3), range(3), range(70_000, 70_020)
    expected = [[[[is_kept(seed, i, j, k, l, 0.3) for l in kv] for k in q] for j in h] for i in b]
    assert np.array_equal(kept(seed, b=b, h=h, q=q, kv=kv, p=0.3), expected)


def test_more_is_dropped_at_a_higher_rate() -> None:
    low, high = kept(p=0.2), kept(p=0.3)
    assert not (high & ~low).any()


def test_threshold_stays_an_int32() -> None:
    assert threshold(0.0) == 0
    assert threshold(0.5) == 2**30
    assert threshold(1 - 2**-53) == 2**31 - 1


def test_a_tile_in_a_kernel_sees_the_same() -> None:
    def body(seed_ref, out_ref):
        q = 256 + jax.lax.broadcasted_iota(jnp.int32, (8, 1), 0)
        kv = 384 + jax.lax.broadcasted_iota(jnp.int32, (1, 128), 1)
        out_ref[...] = keep(seed_ref, jnp.int32(0), jnp.int32(0), q, kv, 0.5).astype(jnp.int32)

    tile = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.int32), interpret=True)(
        jnp.asarray((1, 2), jnp.int32)
    )
    assert np.array_equal(np.asarray(tile, bool), kept()[256:264, 384:512])


def test_64_bits_change_nothing() -> None:
    narrow = kept()
    with jax.enable_x64(True):
        assert np.array_equal(kept(), narrow)

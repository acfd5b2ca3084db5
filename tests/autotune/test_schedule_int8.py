"""Matmuls of narrow numbers: how many the matrix units take at once is what the chips are published with."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from autotune.score import Score, Workload
from autotune.score.schedule import ScheduleScorer
from bridge.chips import chip

pytest.importorskip("libtpu", reason="needs the TPU compiler, libtpu")

SIZE, TILE = 512, 256


def matmul(x: jax.Array, y: jax.Array, *, sum_dtype: jnp.dtype) -> jax.Array:
    """A matmul that sums up in its result, one block after the other."""

    def body(x_ref, y_ref, o_ref) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=sum_dtype)

    return pl.pallas_call(
        body,
        grid=(SIZE // TILE,) * 3,
        in_specs=[
            pl.BlockSpec((TILE, TILE), lambda i, j, k: (i, k)),
            pl.BlockSpec((TILE, TILE), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((TILE, TILE), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((SIZE, SIZE), sum_dtype),
        name="matmul",
    )(x, y)


@functools.cache
def score(chip_name: str, dtype: str) -> Score:
    aval = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.dtype(dtype))
    sum_dtype = jnp.dtype("int32" if dtype.startswith("int") else "float32")
    nbytes = SIZE * SIZE * jnp.dtype(dtype).itemsize
    return ScheduleScorer(chip(chip_name)).score(
        Workload(
            "matmul",
            functools.partial(matmul, sum_dtype=sum_dtype),
            (aval, aval),
            matmul_flops=2 * SIZE**3,
            bytes_read=2 * nbytes,
            bytes_written=SIZE * SIZE * 4,
        )
    )


def busy_cycles(chip_name: str, dtype: str) -> float:
    found = score(chip_name, dtype)
    return found.units["mxu"] * found.time_s * chip(chip_name).sustained_clock_hz


@pytest.mark.parametrize(
    ("chip_name", "dtype", "rate"),
    [
        ("v5e", "int8", 2),
        ("v5p", "int8", 2),
        ("v6e", "int8", 2),
        ("tpu7x", "int8", 1),  # it has no units for integers: they become bfloat16
        ("v6e", "float8_e4m3fn", 1),  # the published peak is that of bfloat16
        ("tpu7x", "float8_e4m3fn", 2),
    ],
)
def test_narrow_numbers_take_the_cycles_that_the_published_peaks_imply(
    chip_name: str, dtype: str, rate: int
) -> None:
    narrow, wide = score(chip_name, dtype), score(chip_name, "bfloat16")
    assert narrow.confidence != "low", narrow.reasons
    # No axis of the grid is said to be parallel, so one of the two cores of a v5p does it all.
    expected = 2 * SIZE**3 / chip(chip_name).mxu_flops_per_cycle
    assert busy_cycles(chip_name, "bfloat16") == pytest.approx(expected)
    assert busy_cycles(chip_name, dtype) == pytest.approx(expected / rate)
    assert 0 < narrow.units["mxu"] <= 1 and 0 < wide.units["mxu"] <= 1
    assert wide.dma_bytes_read == 2 * narrow.dma_bytes_read  # blocks of half the bytes, as often
    assert narrow.time_s < wide.time_s


def test_numbers_that_the_chip_has_no_peak_for_are_not_trusted() -> None:
    # v5e has no units for float8: what the compiler counts for it is more than bfloat16 could be.
    found = score("v5e", "float8_e4m3fn")
    assert found.confidence == "low"
    assert "operations of the matrix units are useful" in found.reasons[0]

"""Scores, rankings and the roofline."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from autotune.score import KernelScore, Score, Workload, best, rank
from autotune.score.roofline import RooflineScorer
from bridge.chips import chip

KERNEL = KernelScore(
    name="matmul.1",
    is_kernel=True,
    calls=1,
    time_s=0.9e-3,
    stalled_s=0.1e-3,
    estimated=False,
    bound="mxu",
    units={"mxu": 0.7},
    dma_bytes_read=10,
    dma_bytes_written=5,
    vmem_bytes=1 << 20,
    spills=0,
    grid_steps=64,
    mxu_visits=64,
)
SCORE = Score(
    time_s=1e-3,
    source="schedule",
    bound="mxu",
    units={"mxu": 0.6, "hbm": 0.2},
    breakdown={"compute": 0.9e-3, "stalled_on_read": 0.1e-3},
    dma_bytes_read=10,
    dma_bytes_written=5,
    vmem_bytes=1 << 20,
    spills=0,
    grid_steps=64,
    confidence="high",
    reasons=(),
    unknowns=(),
    chip="v5e",
    versions={"libtpu": "0.0.52"},
    kernels=(KERNEL,),
)


def test_scores_go_through_json() -> None:
    assert Score.from_json(SCORE.to_json()) == SCORE
    assert json.loads(SCORE.to_json())["kernels"][0]["grid_steps"] == 64


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"time_s": 1}', SCORE.to_json().replace("time_s", "seconds")]
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a score"):
        Score.from_json(text)


@pytest.mark.parametrize("field", ["source", "confidence"])
def test_words_outside_the_list_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be one of"):
        dataclasses.replace(SCORE, **{field: "perhaps"})


def test_rank_orders_by_time() -> None:
    scores = [dataclasses.replace(SCORE, time_s=time) for time in (3.0, 1.0, 2.0)]
    assert rank(scores) == [1, 2, 0]
    assert best(scores) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "roofline"}, "one source, got roofline and schedule"),
        ({"chip": "v6e"}, "one chip, got v5e and v6e"),
        ({"confidence": "low", "reasons": ("a branch",)}, r"score 1 has low confidence \(a branch\)"),
    ],
)
def test_rank_refuses_what_cannot_be_compared(changes: dict[str, object], message: str) -> None:
    scores = [SCORE, dataclasses.replace(SCORE, **changes)]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=message):
        rank(scores)
    if "confidence" in changes:
        assert rank(scores, allow_low_confidence=True) == [0, 1]
    with pytest.raises(ValueError, match="at least one"):
        rank([])


def workload(**work: int) -> Workload:
    aval = jax.ShapeDtypeStruct((8, 128), np.float32)
    return Workload("double", lambda x: x * 2, (aval,), **work)  # pyright: ignore[reportArgumentType]


def test_roofline_is_the_longer_of_memory_and_matrix_units() -> None:
    v5e = chip("v5e")
    memory = RooflineScorer(v5e).score(workload(bytes_read=819_000, bytes_written=0, matmul_flops=197))
    assert (memory.time_s, memory.bound) == (pytest.approx(1e-6), "hbm")
    assert memory.units == {"hbm": pytest.approx(1.0), "mxu": pytest.approx(1e-6)}
    compute = RooflineScorer(v5e).score(workload(bytes_read=0, bytes_written=1, matmul_flops=197_000_000))
    assert (compute.time_s, compute.bound) == (pytest.approx(1e-6), "mxu")
    assert compute.source == "roofline"
    assert compute.confidence == "medium"


def test_roofline_needs_declared_work() -> None:
    with pytest.raises(ValueError, match="declares none"):
        RooflineScorer(chip("v5e")).score(workload())
    assert RooflineScorer(chip("v5e")).score(workload(bytes_read=1, bytes_written=1)).confidence == "low"

"""Problems and costs: the words of the protocol."""

from __future__ import annotations

import pytest

from autotune import ArraySpec, Cost, Problem, chip
from autotune.score.roofline import roofline


def test_problems_are_keys() -> None:
    def make(shape: tuple[int, ...]) -> Problem:
        return Problem.of("op", {"x": ArraySpec(shape, "bfloat16"), "mask": None}, {"causal": True})

    assert make((2, 3)) == make((2, 3)) and hash(make((2, 3))) == hash(make((2, 3)))
    assert make((2, 3)) != make((3, 2))
    assert str(make((2, 3))) == "op(x=bfloat16[2,3], mask=none, causal=True)"


def test_arguments_by_name() -> None:
    problem = Problem.of("op", {"x": ArraySpec((2, 3), "float32"), "mask": None}, {"eps": 0.1})
    assert problem.required("x").shape == (2, 3)
    assert problem.array("mask") is None
    assert problem.param("eps") == 0.1
    with pytest.raises(ValueError, match="'mask' is required"):
        problem.required("mask")
    with pytest.raises(KeyError):
        problem.array("y")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("int8", 1), ("bool", 1), ("float8_e4m3fn", 1), ("float64", 8)],
)
def test_bytes(dtype: str, size: int) -> None:
    assert ArraySpec((3, 5), dtype).nbytes == 15 * size


def test_bad_arrays() -> None:
    with pytest.raises(ValueError, match="negative"):
        ArraySpec((-1,), "float32")
    with pytest.raises(ValueError, match="unknown dtype 'float33'"):
        ArraySpec((1,), "float33")


def test_roofline_is_the_longer_of_memory_and_matrix_units() -> None:
    v6e = chip("v6e")
    memory = roofline(Cost(flops=10, bytes_read=1638, bytes_written=1638), v6e)
    assert (memory.bound, memory.seconds) == ("hbm", pytest.approx(2e-9))
    matmul = roofline(Cost(flops=918_000, matmul_flops=918_000, bytes_read=1, bytes_written=1), v6e)
    assert (matmul.bound, matmul.seconds) == ("mxu", pytest.approx(1e-9))

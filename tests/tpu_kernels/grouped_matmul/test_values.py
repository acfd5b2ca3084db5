"""Grouped matmul against a loop in float64, forward and gradients, within bounds derived from rounding."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import bridge
from tpu_kernels import GroupedTiling, grouped_matmul
from tpu_kernels.grouped_matmul.tiling import slices

from . import oracle

SMALL = GroupedTiling(128, 128, 128, 128, 128, 128, 128, 128, 128)
TALL = GroupedTiling(1024, 128, 128, 1024, 128, 128, 1024, 128, 128)
UNEQUAL = GroupedTiling(256, 128, 256, 512, 256, 128, 256, 128, 256)

every_implementation = pytest.mark.parametrize("impl", ["pallas", "reference"])


@every_implementation
@pytest.mark.parametrize(
    ("m", "k", "n", "sizes", "options"),
    [
        (1, 1, 1, [1], {}),
        (300, 70, 90, [0, 128, 5, 0, 167], {"tiling": SMALL}),  # whole tiles, shared ones, empty groups
        (300, 200, 150, [100, 0, 90], {"tiling": SMALL, "transpose_rhs": True}),  # a tail; inner tiles
        (700, 130, 60, [3, 290, 1, 300, 40, 66], {"tiling": UNEQUAL}),
        pytest.param(260, 64, 64, [0, 0, 0], {}, marks=pytest.mark.slow),
        (40, 20, 30, [7, 9, 10, 3, 2], {"groups": 2, "group_offset": 2}),
        (40, 20, 30, [7, 9, 10], {"groups": 1, "group_offset": 2, "transpose_rhs": True}),
    ],
)
def test_values(m: int, k: int, n: int, sizes: list[int], options: dict[str, Any], impl: str) -> None:
    if impl == "reference":
        options = {name: value for name, value in options.items() if name != "tiling"}
    case = oracle.make_case(m, k, n, sizes, impl=impl, **options)
    oracle.check(case, oracle.run(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    case = oracle.make_case(90, 40, 50, [30, 0, 44], dtype=dtype)
    oracle.check(case, oracle.run(case))


def test_the_output_has_the_dtype_asked_for() -> None:
    case = oracle.make_case(90, 40, 50, [30, 0, 44], dtype=torch.bfloat16, out_dtype=torch.float32)
    oracle.check(case, oracle.run(case))


def test_on_tpu_the_numbers_are_the_same() -> None:
    case = oracle.make_case(150, 40, 50, [30, 0, 100])
    for on_cpu, on_tpu in zip(oracle.run(case), oracle.run(case, "tpu"), strict=True):
        assert torch.equal(on_cpu, on_tpu)


def test_in_the_tpu_interpreter() -> None:
    """It fills what is past the end, and not yet written, with NaN."""
    case = oracle.make_case(140, 130, 40, [20, 0, 110], tiling=SMALL)
    with bridge.interpret("tpu"):
        oracle.check(case, oracle.run(case))


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_sizes_of_groups(data: st.DataObject) -> None:
    """One shape, so one program: the sizes are data."""
    m = 300
    cuts = sorted(data.draw(st.lists(st.integers(0, m), min_size=5, max_size=5)))
    sizes = [end - begin for begin, end in zip([0, *cuts], cuts, strict=False)]
    case = oracle.make_case(m, 24, 40, sizes, tiling=SMALL)
    oracle.check(case, oracle.run(case))


def test_slices_of_a_tile_that_groups_share() -> None:
    """Groups of about as many rows as each slice has, at its beginning and elsewhere."""
    assert slices(96) == (96,)
    assert slices(640) == (128, 256, 384, 512, 640)
    assert slices(2048) == (128, 256, 384, 512, 768, 1024, 1536, 2048)
    m = 1000
    for rows, more, before in itertools.product(slices(1024), (-1, 0, 1), (0, 37, 400)):
        size = min(rows + more, m - before)
        case = oracle.make_case(m, 8, 16, [before, size, m - before - size], tiling=TALL)
        oracle.check(case, oracle.run(case))


def test_no_elements() -> None:
    for m, k, n, sizes in ((0, 3, 4, [0, 0]), (5, 0, 4, [2, 1]), (5, 3, 0, [2, 1])):
        case = oracle.make_case(m, k, n, sizes)
        oracle.check(case, oracle.run(case))
    output, dlhs, drhs = oracle.run(oracle.make_case(5, 3, 4, []))  # no groups at all
    assert not output.any() and not dlhs.any() and drhs.shape == (0, 3, 4)


# Derivatives ---------------------------------------------------------------------------------------------


def test_second_derivatives_of_the_kernels() -> None:
    sizes = torch.tensor([20, 0, 33])

    def second(call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        case = oracle.make_case(60, 30, 40, sizes.tolist())
        leaves = [t.to(dtype).requires_grad_() for t in (case.lhs, case.rhs)]
        output = call(*leaves, sizes)
        first = torch.autograd.grad(output, leaves, output * case.cotangent.to(dtype), create_graph=True)
        dlhs, drhs = first
        return list(torch.autograd.grad((dlhs * dlhs).sum() + (drhs * drhs).sum(), leaves))

    exact = second(oracle.loop, torch.float64)
    found = second(lambda *given: grouped_matmul(*given, impl="pallas"), torch.float32)
    for got, want in zip(found, exact, strict=True):
        # Four products after one another, of sums of at most 60 terms.
        assert (got.double() - want).abs().max() <= 4 * 64 * torch.finfo(torch.float32).eps * want.abs().max()


def test_gradgradcheck() -> None:
    case = oracle.make_case(7, 3, 4, [2, 0, 3], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (case.lhs, case.rhs)]

    def call(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        return grouped_matmul(lhs, rhs, case.sizes)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_belongs_to_others_leaks_nowhere(value: float) -> None:
    """Rows of no group, and rows and matrices of other groups."""
    case = oracle.make_case(150, 20, 30, [40, 60], tiling=SMALL)
    clean = oracle.run(case)
    case.lhs[100:], case.cotangent[100:] = value, value
    for got, want in zip(oracle.run(case), clean, strict=True):
        assert torch.equal(got, want)
    case.lhs[100:], case.cotangent[100:] = 0, 0
    case.lhs[:40], case.rhs[0] = value, value
    output, dlhs, drhs = oracle.run(case)
    assert torch.equal(output[40:], clean[0][40:]) and not output[:40].isfinite().any()
    assert torch.equal(dlhs[40:], clean[1][40:]) and torch.equal(drhs[1], clean[2][1])

"""Faults that people reported of other grouped matmuls: here each is right.

The numbers in the names are those of the list the project started from.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tpu_kernels
from tpu_kernels import GroupedTiling, grouped_matmul, transposed_grouped_matmul

from . import oracle

every_implementation = pytest.mark.parametrize(
    "impl", ["pallas", pytest.param("reference", marks=pytest.mark.slow)]
)


@every_implementation
def test_54_groups_without_rows_have_no_gradient(impl: Any) -> None:
    """Peers leave in the gradient of their matrices what an earlier call has left in memory."""
    used, some = [1] * 18 + [14], [4] * 6 + [0] * 12 + [8]
    for sizes in (used, some):  # the first call uses all groups
        case = oracle.make_case(32, 64, 43, sizes, impl=impl)
        found = oracle.run(case)
        oracle.check(case, found)
    assert not found[2][6:18].any()
    sums = transposed_grouped_matmul(case.lhs, case.cotangent, case.sizes, impl=impl)
    torch.testing.assert_close(sums, found[2], rtol=0, atol=0)


@every_implementation
@pytest.mark.parametrize("sizes", [[64, 0, 10, 20], [0, 0, 0, 0]])
def test_55_fewer_rows_in_groups_than_there_are(sizes: list[int], impl: str) -> None:
    """Peers leave the rest undefined, and let NaN in it into gradients."""
    case = oracle.make_case(256, 40, 56, sizes, impl=impl)
    rest = sum(sizes)
    case.lhs[rest:] = torch.nan
    output, dlhs, drhs = oracle.run(case)
    assert not output[rest:].any() and not dlhs[rest:].any()
    case.lhs[rest:] = 0
    oracle.check(case, [output, dlhs, drhs])


@pytest.mark.parametrize("rows", [1, 7, 200, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tile_m", [384, pytest.param(128, marks=pytest.mark.slow)])
def test_57_rows_that_no_tile_divides(rows: int, tile_m: int) -> None:
    """Peers refuse them."""
    tiling = GroupedTiling(tile_m, 128, 128, tile_m, 128, 128, tile_m, 128, 128)
    case = oracle.make_case(rows, 24, 40, [rows // 2, 0, rows - rows // 2], tiling=tiling)
    oracle.check(case, oracle.run(case))


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (torch.tensor([4, -2, 6]), ValueError, r"must not be negative, got \[4, -2, 6\]"),
        (torch.tensor([4, 8, 40]), ValueError, "at most the 12 rows of lhs, got 52"),
        (torch.tensor([4, 4]), RuntimeError, r"group_sizes must be \[3\]"),
        (torch.tensor([4.0, 4.0, 4.0]), TypeError, "must be integers, got torch.float32"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_59_sizes_that_are_none(
    sizes: torch.Tensor, error: type[Exception], message: str, device: str
) -> None:
    """Peers read and write past the end, or give numbers."""
    lhs, rhs = torch.randn(12, 8, device=device), torch.randn(3, 8, 8, device=device)
    with pytest.raises(error, match=message):
        grouped_matmul(lhs, rhs, sizes.to(device))


@pytest.mark.parametrize("offsets", [[4, 2, 12], [4, 8, 40], [-1, 4, 8]])
@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_59_offsets_that_are_none(offsets: list[int], device: str) -> None:
    """torch takes them without a word."""
    lhs, rhs = torch.randn(12, 8, device=device), torch.randn(3, 8, 8, device=device)
    with tpu_kernels.overrides(), pytest.raises(ValueError, match="offs must not decrease, and be between"):
        F.grouped_mm(lhs, rhs, offs=torch.tensor(offsets, dtype=torch.int32, device=device))


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_60_sizes_as_programs_have_them(device: str) -> None:
    """int64, int32, or what bincount gives; beside tensors with gradients, in a compiled function; others at
    each step. One graph, and nothing waits for the sizes."""
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    def step(lhs: torch.Tensor, rhs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        sizes = torch.bincount(experts, minlength=4)[:4]
        return grouped_matmul(lhs * 2, rhs, sizes)

    rhs = torch.randn(4, 6, 5).to(device).requires_grad_()
    lhs = torch.randn(9, 6).to(device)
    for dtype in (torch.int64, torch.int32):
        sizes = torch.tensor([3, 0, 2, 4], dtype=dtype, device=device)
        expected = oracle.loop(lhs.cpu(), rhs.detach().cpu(), sizes.cpu())
        torch.testing.assert_close(grouped_matmul(lhs, rhs, sizes).detach().cpu(), expected)
    torch._dynamo.config.capture_dynamic_output_shape_ops, before = (
        True,
        torch._dynamo.config.capture_dynamic_output_shape_ops,
    )
    try:
        compiled = torch.compile(step, fullgraph=True, backend=count)
        for experts in ([0, 0, 0, 2, 2, 3, 3, 3, 3], [1] * 9, [3] * 9):
            given = torch.tensor(experts, device=device)
            expected = oracle.loop(lhs.cpu() * 2, rhs.detach().cpu(), given.cpu().bincount(minlength=4))
            torch.testing.assert_close(compiled(lhs, rhs, given).detach().cpu(), expected)
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = before
    assert graphs == 1


def test_60_offsets_are_no_sizes() -> None:
    with pytest.raises(ValueError, match=r"Offsets are no sizes: offsets.diff\(\) makes sizes"):
        grouped_matmul(torch.randn(9, 6), torch.randn(4, 6, 5), torch.tensor([3, 3, 5, 9]))


@every_implementation
def test_62_slices_of_the_experts(impl: str) -> None:
    """One with some, one with none, one whose experts have no rows: the parts add up exactly."""
    sizes = [3, 0, 5, 2, 0, 0, 0, 0, 4, 1, 0, 7, 2, 2, 3, 1]
    case = oracle.make_case(32, 24, 20, sizes, groups=16, impl=impl)
    whole = oracle.run(case)
    total = [torch.zeros_like(t) for t in whole[:2]]
    for first, last in ((0, 4), (4, 8), (8, 8), (8, 16)):
        part = oracle.Case(
            case.lhs,
            case.rhs[first:last],
            case.sizes,
            case.cotangent,
            {"group_offset": first, "impl": impl},
        )
        output, dlhs, drhs = oracle.run(part)
        total[0] += output
        total[1] += dlhs
        assert torch.equal(drhs, whole[2][first:last])
    assert torch.equal(total[0], whole[0]) and torch.equal(total[1], whole[1])

"""Nothing is found in the kernels of this library."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import bridge
from autotune import KernelSpec
from bridge import SanitizerReport, get_pallas_mesh, ranks
from tpu_kernels import all_gather_matmul, matmul_reduce_scatter, ragged_all_to_all
from tpu_kernels.catalog import CATALOG
from tpu_kernels.collectives import api

SHAPES = {
    "splash_attention": {"q": (1, 2, 37, 40)},
    "grouped_matmul": {"lhs": (37, 40), "rhs": (3, 40, 50)},
}
"""No multiple of a register in any dimension; of the others (37, 130)."""


def assert_clean(report: SanitizerReport, kernels: int) -> None:
    assert report.ok, report
    assert len([kernel for kernel in report.kernels if not kernel.unchecked]) == kernels, report.kernels
    assert not any(kernel.unchecked for kernel in report.kernels), report.kernels


def values_and_gradients(spec: KernelSpec, dtype: str, seeds: int) -> SanitizerReport:
    problem = spec.make_problem(SHAPES.get(spec.name, {"x": (37, 130)}), dtype)
    values = spec.values(problem)
    leaves = [
        None
        if array is None
        else torch.from_numpy(values[name])
        if name in values
        else torch.randn(array.shape).to(getattr(torch, array.dtype)).requires_grad_()
        for name, array in problem.arrays
    ]
    with bridge.sanitize(seeds=seeds) as report:
        output = spec.torch_call(problem, *leaves)
        output.backward(torch.randn_like(output))
    return report


@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_kernels_of_the_catalog(spec: KernelSpec) -> None:
    assert_clean(values_and_gradients(spec, "float32", 1), 2)


@pytest.mark.slow
@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_of_the_catalog_in_many_orders(spec: KernelSpec, dtype: str) -> None:
    assert_clean(values_and_gradients(spec, dtype, 5), 2)


def all_collectives(dtype: torch.dtype) -> None:
    mesh, size, rank = get_pallas_mesh("x"), dist.get_world_size(), dist.get_rank()
    x = (torch.arange(3 * size * 2 * size) % 17 + rank).reshape(3 * size, 2 * size).to(dtype)
    x = api.reduce_scatter(api.all_gather(x, mesh, "x", 0), mesh, "x", 0)
    x = api.all_to_all(x, mesh, "x", 1, 1)
    for shift in (1, 2):
        x = api.ppermute(x, mesh, "x", shift)
    api.halo_exchange(x, mesh, "x", 1, 2)


@pytest.mark.parametrize(
    ("size", "dtype", "seeds"),
    [
        (2, torch.float32, 1),
        (4, torch.float32, 1),
        *[
            pytest.param(size, dtype, 5, marks=pytest.mark.slow)
            for size in (2, 4, 7)
            for dtype in (torch.float32, torch.bfloat16)
        ],
    ],
)
def test_collectives(size: int, dtype: torch.dtype, seeds: int) -> None:
    with bridge.sanitize(seeds=seeds) as report:
        ranks.run(all_collectives, size, dtype)
    assert_clean(report, 5)


def products_and_ragged(dtype: torch.dtype) -> None:
    mesh, size, rank = get_pallas_mesh("x"), dist.get_world_size(), dist.get_rank()
    x, w = torch.randn(5, 7).to(dtype).requires_grad_(), torch.randn(7, 6).to(dtype).requires_grad_()
    gathered = all_gather_matmul(x, w, mesh, "x")
    matmul_reduce_scatter(gathered, w.new_ones(6, 3), mesh, "x").sum().backward()
    counts = torch.tensor([(rank + target) % 3 for target in range(size)], dtype=torch.int32)
    rows, _ = ragged_all_to_all(torch.randn(2 * size, 4).to(dtype), counts, mesh, "x", 2 * size)
    assert rows.shape == (2 * size, 4)


@pytest.mark.parametrize(
    ("size", "seeds"),
    [(2, 1), *[pytest.param(size, 5, marks=pytest.mark.slow) for size in (2, 4)]],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_products_and_ragged_rows(size: int, seeds: int, dtype: torch.dtype) -> None:
    with bridge.sanitize(seeds=seeds) as report:
        ranks.run(products_and_ragged, size, dtype)
    assert report.ok, report
    names = {kernel.name for kernel in report.kernels}
    for part in ("all_gather_matmul", "matmul_reduce_scatter", "ragged"):
        assert any(part in name for name in names), names
    assert not any(kernel.unchecked for kernel in report.kernels), report.kernels

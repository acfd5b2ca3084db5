"""Every kernel of the catalog, forward and gradient, compiles for every chip that it says it supports."""

from __future__ import annotations

import pytest

from autotune.problem import Problem
from autotune.spec import KernelSpec
from autotune.targets import kernel_workloads
from bridge.chips import chip, chips
from bridge.topology import compile_for
from tpu_kernels.catalog import CATALOG


def compiles(spec: KernelSpec, problem: Problem, name: str) -> None:
    empty = any(array is not None and not array.size for _, array in problem.arrays)
    for workload in kernel_workloads(spec, problem):
        compiled = compile_for(workload.fn, workload.avals, name)
        assert bool(compiled.kernels) != empty, f"{workload.name}: {compiled.kernels}"
        for kernel in compiled.kernels:
            assert kernel.vmem_bytes is not None and kernel.vmem_bytes <= chip(name).vmem_bytes


# The older ones are slow tests.
QUICK = ("v5e", "v6e", "tpu7x")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in chips()]
)
@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_kernel_compiles(spec: KernelSpec, name: str) -> None:
    shapes = {
        "splash_attention": {"q": (1, 2, 512, 128)},
        "grouped_matmul": {"lhs": (1000, 256), "rhs": (5, 256, 512)},
    }
    compiles(spec, spec.make_problem(shapes.get(spec.name, {"x": (512, 1024)}), "bfloat16"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", chips())
@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_every_example_compiles(spec: KernelSpec, name: str) -> None:
    supported = [e for e in spec.examples if not spec.unsupported_reasons(e.problem, chip(name))]
    assert supported
    for example in supported:
        compiles(spec, example.problem, name)

"""The tile space of row-wise kernels, and the tiling itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpu_kernels
from autotune import KernelSpec, chip, chips
from tpu_kernels._rows import RowTiling
from tpu_kernels.catalog import CATALOG

ROW_WISE = tuple(spec for spec in CATALOG if spec.tiling_type is RowTiling)

every_kernel = pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
every_row_kernel = pytest.mark.parametrize("spec", ROW_WISE, ids=lambda spec: spec.name)


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-8, ValueError), (12, ValueError), (8.0, TypeError), (True, TypeError)],
)
def test_tilings_check_themselves(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"tile_rows must be .*{value}"):
        RowTiling(value)


@every_row_kernel
def test_candidates_fit_or_say_why_not(spec: KernelSpec) -> None:
    for on in chips().values():
        candidates = spec.space(spec.make_problem({"x": (100_000, 4096)}, "bfloat16"), on)
        assert any(c.legal for c in candidates) and any(not c.legal for c in candidates)
        for candidate in candidates:
            assert candidate.legal == (candidate.vmem_bytes <= on.vmem_limit_bytes)
            assert all("VMEM" in reason and on.name in reason for reason in candidate.reasons)
        sizes = [c.vmem_bytes for c in candidates]
        assert sizes == sorted(sizes)


@every_row_kernel
def test_space_ends_where_one_block_holds_all_rows(spec: KernelSpec) -> None:
    candidates = spec.space(spec.make_problem({"x": (20, 128)}, "float32"), chip("v6e"))
    assert [c.tiling for c in candidates] == [RowTiling(8), RowTiling(16), RowTiling(32)]


@every_kernel
def test_default_is_a_legal_candidate_wherever_there_is_one(spec: KernelSpec) -> None:
    for example in spec.examples:
        for on in chips().values():
            if not spec.unsupported_reasons(example.problem, on):
                legal = [c.tiling for c in spec.space(example.problem, on) if c.legal]
                assert spec.default_tiling(example.problem, on) in legal, (example.problem, on.name)


@every_row_kernel
def test_rows_too_wide_for_one_chip_fit_another(spec: KernelSpec) -> None:
    problem = spec.make_problem({"x": (2, 70_000)}, "float32")
    assert "allows 16.0 MiB" in " ".join(spec.unsupported_reasons(problem, chip("v5e")))
    assert not spec.unsupported_reasons(problem, chip("v6e"))


def test_the_simulated_chip_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 70_001)
    tpu_kernels.rms_norm(x, (70_001,), impl="pallas")
    monkeypatch.setenv("BRIDGE_CHIP", "v5e")
    with pytest.raises(ValueError, match="v5e allows 16.0 MiB"):
        tpu_kernels.rms_norm(x[:, :-1], (70_000,), impl="pallas")


@every_kernel
@pytest.mark.parametrize("shapes", [{}, {"x": ()}, {"y": (2, 3)}, {"x": (2, 3), "y": (3,)}])
def test_shapes_that_make_no_problem(spec: KernelSpec, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=spec.name):
        spec.make_problem(shapes, "float32")


@every_row_kernel
def test_costs_move_every_array_once(spec: KernelSpec) -> None:
    problem = spec.make_problem({"x": (64, 256)}, "bfloat16")
    x, vector = 64 * 256 * 2, 256 * 2
    vectors = (len(spec.arguments) - 1) * vector
    costs = spec.costs(problem)
    assert (costs["forward"].bytes_read, costs["forward"].bytes_written) == (x + vectors, x)
    # The bias itself is not needed for any gradient.
    assert (costs["backward"].bytes_read, costs["backward"].bytes_written) == (2 * x + vector, x + vectors)

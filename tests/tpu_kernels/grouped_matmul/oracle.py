"""Grouped matmul as a loop over groups in float64, and how far float32 arithmetic may be from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tpu_kernels import grouped_matmul


@dataclass(frozen=True)
class Case:
    """A call, and a cotangent of its output.

    Attributes:
        lhs, rhs, sizes: the arguments; sizes has those of all groups.
        cotangent: [M, N], of the dtype of lhs.
        options: keyword arguments; `group_offset` is an int here.
    """

    lhs: torch.Tensor
    rhs: torch.Tensor
    sizes: torch.Tensor
    cotangent: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)


def make_case(
    m: int,
    k: int,
    n: int,
    sizes: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    groups: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Normal values. `groups` is how many matrices there are; None for one of each group."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    groups = len(sizes) if groups is None else groups
    matrix = (n, k) if options.get("transpose_rhs") else (k, n)
    return Case(
        normal(m, k),
        normal(groups, *matrix),
        torch.tensor(sizes, dtype=torch.int64),
        normal(m, n),
        options,
    )


def run(case: Case, device: str = "cpu") -> list[torch.Tensor]:
    """The output and both gradients, on the CPU."""
    lhs, rhs = (t.to(device).detach().requires_grad_() for t in (case.lhs, case.rhs))
    output = grouped_matmul(lhs, rhs, case.sizes.to(device), **case.options)
    gradients = torch.autograd.grad(output, (lhs, rhs), case.cotangent.to(output))
    return [t.detach().cpu() for t in (output, *gradients)]


def loop(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    sizes: torch.Tensor,
    *,
    group_offset: int = 0,
    transpose_rhs: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The same, group by group, with torch."""
    del options
    parts, begin = [], 0
    columns = rhs.shape[1 if transpose_rhs else 2]
    for number, size in enumerate(sizes.tolist()):
        rows, place = lhs[begin : begin + size], number - group_offset
        if 0 <= place < rhs.shape[0]:
            parts.append(rows @ (rhs[place].mT if transpose_rhs else rhs[place]))
        else:
            parts.append(lhs.new_zeros(size, columns))
        begin += size
    return torch.cat([*parts, lhs.new_zeros(lhs.shape[0] - begin, columns)])


def check(case: Case, found: list[torch.Tensor]) -> None:
    """Each number is as near to the exact one as float32 sums, rounded once, may be.

    A sum of n products errs by at most n u times the sum of their magnitudes, u the unit roundoff of float32
    (of float64 for float64), in whatever order it is summed.
    """

    def with_gradients(lhs: torch.Tensor, rhs: torch.Tensor, cotangent: torch.Tensor) -> list[torch.Tensor]:
        lhs, rhs = lhs.detach().requires_grad_(), rhs.detach().requires_grad_()
        output = loop(lhs, rhs, case.sizes, **case.options)
        return [output.detach(), *torch.autograd.grad(output, (lhs, rhs), cotangent)]

    lhs, rhs, cotangent = (t.detach().double() for t in (case.lhs, case.rhs, case.cotangent))
    exact = with_gradients(lhs, rhs, cotangent)
    sums = with_gradients(lhs.abs(), rhs.abs(), cotangent.abs())
    arithmetic = torch.finfo(torch.float64 if case.lhs.dtype == torch.float64 else torch.float32)
    (m, k), n = case.lhs.shape, case.cotangent.shape[1]
    dtypes = [case.options.get("out_dtype") or case.lhs.dtype, case.lhs.dtype, case.rhs.dtype]
    for name, got, want, size, terms, dtype in zip(
        ("output", "dlhs", "drhs"), found, exact, sums, (k, n, m), dtypes, strict=True
    ):
        assert (got.shape, got.dtype) == (want.shape, dtype), name
        # u twice: float64's own rounding of the oracle, where that is what is checked.
        bound = 2 * (terms + 2) * arithmetic.eps / 2 * size
        rounding = torch.finfo(dtype)
        bound = bound + rounding.eps / 2 * (want.abs() + bound) + rounding.smallest_normal
        error = (got.double() - want).abs()
        assert bool((error <= bound).all()), (name, float((error - bound).max()), float(error.max()))

"""`transposed_grouped_matmul` against a loop in float64, what it takes and refuses, and ways to call it."""

from __future__ import annotations

# Tests call with wrong types on purpose.
# pyright: reportArgumentType=false
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import bridge
from bridge.topology import compile_for
from tpu_kernels import GroupedTiling, transposed_grouped_matmul
from tpu_kernels.grouped_matmul.transposed import transposed

SMALL = GroupedTiling(*[128] * 9)
UNEQUAL = GroupedTiling(256, 128, 256, 512, 256, 128, 256, 128, 256)

LHS, RHS, SIZES = torch.randn(12, 4), torch.randn(12, 5), torch.tensor([2, 0, 6])


def loop(lhs: torch.Tensor, rhs: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The same, group by group, with torch."""
    parts, begin = [lhs.new_zeros(0, lhs.shape[1], rhs.shape[1])], 0
    for size in sizes.tolist():
        parts.append((lhs[begin : begin + size].T @ rhs[begin : begin + size])[None])
        begin += size
    return torch.cat(parts)


def operands(m: int, k: int, n: int, groups: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """lhs, rhs and a cotangent of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = (m, k), (m, n), (groups, k, n)
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes]


def run(given: list[torch.Tensor], sizes: torch.Tensor, device: str = "cpu", **options: Any) -> Any:
    """The output and both gradients, on the CPU."""
    lhs, rhs = (t.to(device).detach().requires_grad_() for t in given[:2])
    output = transposed_grouped_matmul(lhs, rhs, sizes.to(device), **options)
    gradients = torch.autograd.grad(output, (lhs, rhs), given[2].to(output))
    return [t.detach().cpu() for t in (output, *gradients)]


def check(
    given: list[torch.Tensor], sizes: torch.Tensor, found: list[torch.Tensor], out: torch.dtype
) -> None:
    """Each number is as near to the exact one as float32 sums, rounded once, may be.

    A sum of n products errs by at most n u times the sum of their magnitudes, u the unit roundoff of float32
    (of float64 for float64), in whatever order it is summed.
    """

    def with_gradients(values: list[torch.Tensor]) -> list[torch.Tensor]:
        lhs, rhs = (t.detach().requires_grad_() for t in values[:2])
        output = loop(lhs, rhs, sizes)
        return [output.detach(), *torch.autograd.grad(output, (lhs, rhs), values[2])]

    doubles = [t.double() for t in given]
    exact, sums = with_gradients(doubles), with_gradients([t.abs() for t in doubles])
    dtype, (m, k), n = given[0].dtype, given[0].shape, given[1].shape[1]
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    for got, want, size, terms, each in zip(found, exact, sums, (m, n, k), (out, dtype, dtype), strict=True):
        assert (got.shape, got.dtype) == (want.shape, each)
        # u twice: float64's own rounding of the oracle, where that is what is checked.
        bound = 2 * (terms + 2) * unit * size
        rounding = torch.finfo(each)
        bound = bound + rounding.eps / 2 * (want.abs() + bound) + rounding.smallest_normal
        assert bool(((got.double() - want).abs() <= bound).all())


# Values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["pallas", "reference"])
@pytest.mark.parametrize(
    ("shape", "sizes", "tiling"),
    [
        pytest.param((1, 1, 1), [1], None, marks=pytest.mark.slow),
        ((300, 70, 90), [0, 128, 5, 0, 167], SMALL),  # whole tiles, shared ones, empty groups
        ((300, 200, 150), [100, 0, 90], SMALL),  # a tail; several tiles of the output
        pytest.param((700, 130, 60), [3, 290, 1, 300, 40, 66], UNEQUAL, marks=pytest.mark.slow),
        pytest.param((260, 64, 64), [0, 0, 0], None, marks=pytest.mark.slow),
    ],
)
def test_values(shape: tuple[int, int, int], sizes: list[int], tiling: Any, impl: str) -> None:
    given = operands(*shape, len(sizes))
    found = run(given, torch.tensor(sizes), impl=impl, tiling=tiling if impl == "pallas" else None)
    check(given, torch.tensor(sizes), found, torch.float32)
    empty = torch.tensor(sizes) == 0
    assert not found[0][empty].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    sizes = torch.tensor([30, 0, 44])
    given = operands(90, 40, 50, 3, dtype)
    check(given, sizes, run(given, sizes), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_the_output_has_the_dtype_asked_for(dtype: torch.dtype) -> None:
    sizes = torch.tensor([30, 0, 44])
    given = operands(90, 40, 50, 3, dtype)
    check(given, sizes, run(given, sizes, out_dtype=torch.float32), torch.float32)


def test_on_tpu_the_numbers_are_the_same() -> None:
    sizes, given = torch.tensor([30, 0, 100]), operands(150, 40, 50, 3)
    for on_cpu, on_tpu in zip(run(given, sizes), run(given, sizes, "tpu"), strict=True):
        assert torch.equal(on_cpu, on_tpu)


def test_in_the_tpu_interpreter() -> None:
    """It fills what is past the end, and not yet written, with NaN."""
    sizes, given = torch.tensor([20, 0, 110]), operands(140, 130, 40, 3)
    with bridge.interpret("tpu"):
        check(given, sizes, run(given, sizes, tiling=SMALL), torch.float32)


@pytest.mark.parametrize("shape", [(0, 3, 4), (5, 0, 4), (5, 3, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int]) -> None:
    given, sizes = operands(*shape, 2), torch.tensor([0, 0])
    check(given, sizes, run(given, sizes), torch.float32)
    assert transposed_grouped_matmul(given[0], given[1], sizes[:0]).shape == (0, *shape[1:])


@pytest.mark.slow
def test_second_derivatives() -> None:
    sizes = torch.tensor([20, 0, 33])

    def second(call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        lhs, rhs, cotangent = (t.to(dtype) for t in operands(60, 30, 40, 3))
        leaves = [lhs.requires_grad_(), rhs.requires_grad_()]
        output = call(*leaves, sizes)
        dlhs, drhs = torch.autograd.grad(output, leaves, output * cotangent, create_graph=True)
        return list(torch.autograd.grad((dlhs * dlhs).sum() + (drhs * drhs).sum(), leaves))

    exact = second(loop, torch.float64)
    found = second(lambda *given: transposed_grouped_matmul(*given, impl="pallas"), torch.float32)
    for got, want in zip(found, exact, strict=True):
        # Four products after one another, of sums of at most 60 terms.
        assert (got.double() - want).abs().max() <= 4 * 64 * torch.finfo(torch.float32).eps * want.abs().max()


def test_gradgradcheck() -> None:
    leaves = [t.requires_grad_() for t in operands(7, 3, 4, 3, torch.float64)[:2]]

    def call(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        return transposed_grouped_matmul(lhs, rhs, torch.tensor([2, 0, 3]))

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_what_belongs_to_others_leaks_nowhere(value: float, impl: str) -> None:
    """Rows of no group, and rows of other groups."""
    given, sizes = operands(150, 20, 30, 2), torch.tensor([40, 60])
    options: dict[str, Any] = {"impl": impl, "tiling": SMALL if impl == "pallas" else None}
    clean = run(given, sizes, **options)
    given[0][100:], given[1][100:] = value, value
    for got, want in zip(run(given, sizes, **options), clean, strict=True):
        assert torch.equal(got, want)
    given[0][:40] = value
    output, dlhs, drhs = run(given, sizes, **options)
    assert torch.equal(output[1], clean[0][1]) and not output[0].isfinite().any()
    assert torch.equal(dlhs, clean[1]) and torch.equal(drhs[40:], clean[2][40:])


# What it takes and refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"lhs": LHS.int()}, TypeError, "lhs must be float16, .*int32"),
        ({"rhs": RHS.double()}, TypeError, "the same dtype, got torch.float32 and torch.float64"),
        ({"rhs": RHS[None]}, RuntimeError, r"rhs \[M, N\], got \[12, 4\] and \[1, 12, 5\]"),
        ({"rhs": RHS[:11]}, RuntimeError, r"got \[12, 4\] and \[11, 5\]"),
        ({"group_sizes": SIZES.float()}, TypeError, "group_sizes must be integers, got torch.float32"),
        ({"group_sizes": SIZES[None]}, RuntimeError, r"group_sizes must be \[G\], .*got \[1, 3\]"),
        (
            {"group_sizes": SIZES.to("tpu")},
            RuntimeError,
            "on one device, got lhs on cpu and group_sizes on tpu",
        ),
        ({"group_sizes": torch.tensor([2, -1, 3])}, ValueError, r"must not be negative, got \[2, -1, 3\]"),
        ({"group_sizes": torch.tensor([2, 8, 9])}, ValueError, "at most the 12 rows of lhs, got 19"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be a floating torch.dtype"),
        ({"impl": "cuda"}, ValueError, "expected one of 'auto', 'pallas'"),
        ({"lhs": LHS.half(), "rhs": RHS.half(), "impl": "pallas"}, ValueError, "lhs is float16"),
        ({"impl": "reference", "tiling": SMALL}, ValueError, "the reference is used, which has no tiles"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"lhs": LHS, "rhs": RHS, "group_sizes": SIZES}
    with pytest.raises(error, match=message):
        transposed_grouped_matmul(**given | changed)


@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_sizes_that_nobody_checks_are_made_safe(impl: Any) -> None:
    """In a compiled function, say: a negative size is 0, and there are no rows behind the last."""
    compiled = torch.compile(transposed_grouped_matmul, fullgraph=True, backend="aot_eager")
    for sizes, safe in (
        ([2, -5, 6], [2, 0, 6]),
        ([-3, 9, 40], [0, 9, 3]),
        ([2**31 - 1] * 2 + [5], [12, 0, 0]),
    ):
        found = compiled(LHS, RHS, torch.tensor(sizes), impl=impl)
        torch.testing.assert_close(found, loop(LHS, RHS, torch.tensor(safe)))


# Ways to call ------------------------------------------------------------------------------------------


def test_compiled_with_gradients() -> None:
    sizes, given = torch.tensor([5, 0, 11]), operands(20, 6, 7, 3)
    compiled = torch.compile(transposed_grouped_matmul, fullgraph=True, backend="aot_eager")
    lhs, rhs = (t.requires_grad_() for t in given[:2])
    output = compiled(lhs, rhs, sizes)
    gradients = torch.autograd.grad(output, (lhs, rhs), given[2])
    check([t.detach() for t in given], sizes, [output.detach(), *gradients], torch.float32)


def test_vmap() -> None:
    lhs, sizes = torch.randn(2, 12, 4), torch.tensor([[2, 0, 6], [1, 9, 2]])
    found = torch.vmap(lambda a, s: transposed_grouped_matmul(a, RHS, s))(lhs, sizes)
    expected = torch.stack([loop(a, RHS, s) for a, s in zip(lhs, sizes, strict=True)])
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_opcheck(device: str) -> None:
    lhs, rhs = (t.to(device).requires_grad_() for t in (LHS.clone(), RHS.clone()))
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":
        checks.append("test_autograd_registration")
    arguments = (lhs, rhs, SIZES.to(device, torch.int32), torch.float32, None, "auto")
    torch.library.opcheck(
        torch.ops.tpu_kernels.transposed_grouped_matmul.default, arguments, test_utils=checks
    )


@pytest.mark.slow
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_kernels_compile_for_tpus(out_dtype: type) -> None:
    def both(lhs, rhs, group_sizes, cotangent):
        def call(lhs, rhs):
            return transposed(lhs, rhs, group_sizes, out_dtype, impl="pallas")  # type: ignore[arg-type]

        output, pull_back = jax.vjp(call, lhs, rhs)
        return output, pull_back(cotangent)

    avals = (
        jax.ShapeDtypeStruct((1000, 200), jnp.bfloat16),
        jax.ShapeDtypeStruct((1000, 300), jnp.bfloat16),
        jax.ShapeDtypeStruct((5,), jnp.int32),
        jax.ShapeDtypeStruct((5, 200, 300), out_dtype),
    )
    assert len(compile_for(both, avals, "v6e").kernels) == 3

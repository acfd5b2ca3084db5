"""What `grouped_matmul` takes and refuses, and the ways to call it."""

from __future__ import annotations

# Tests call with wrong types on purpose.
# pyright: reportArgumentType=false
from typing import Any

import pytest
import torch

import bridge
from tpu_kernels import GroupedTiling, grouped_matmul

from . import oracle

LHS, RHS, SIZES = torch.randn(12, 4), torch.randn(3, 4, 5), torch.tensor([2, 0, 6])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"lhs": LHS.int()}, TypeError, "lhs must be float16, .*int32"),
        ({"rhs": RHS.double()}, TypeError, "the same dtype, got torch.float32 and torch.float64"),
        ({"rhs": RHS[0]}, RuntimeError, r"rhs \[G, K, N\], got \[12, 4\] and \[4, 5\]"),
        ({"rhs": RHS.mT}, RuntimeError, r"transpose_rhs=True takes \[G, N, K\]"),
        ({"group_sizes": SIZES.float()}, TypeError, "group_sizes must be integers, got torch.float32"),
        ({"group_sizes": [2, 0, 6]}, TypeError, "group_sizes must be a torch.Tensor, got list"),
        ({"group_sizes": SIZES[:2]}, RuntimeError, r"group_sizes must be \[3\], .*got \[2\]"),
        ({"group_sizes": torch.tensor([2, -1, 3])}, ValueError, r"must not be negative, got \[2, -1, 3\]"),
        ({"group_sizes": torch.tensor([2, 8, 9])}, ValueError, "at most the 12 rows of lhs, got 19"),
        ({"group_offset": 1}, ValueError, "between 0 and 0, got 1"),
        ({"group_offset": True}, TypeError, "group_offset must be an int, a tensor or None"),
        ({"group_offset": 0, "group_sizes": SIZES[:2]}, RuntimeError, "at least the 3 that rhs has"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be a floating torch.dtype"),
        ({"impl": "cuda"}, ValueError, "expected one of 'auto', 'pallas'"),
        ({"lhs": LHS.half(), "rhs": RHS.half(), "impl": "pallas"}, ValueError, "lhs is float16"),
        (
            {"impl": "reference", "tiling": GroupedTiling(*[128] * 9)},
            ValueError,
            "the reference is used, which has no tiles",
        ),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"lhs": LHS, "rhs": RHS, "group_sizes": SIZES}
    with pytest.raises(error, match=message):
        grouped_matmul(**given | changed)


@pytest.mark.parametrize("size", [0, 100, -128, 1.5])
def test_tilings_that_are_none(size: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="tile_n must be"):
        GroupedTiling(128, 128, size, *[128] * 6)


@pytest.mark.parametrize("sizes", [[2, -5, 6], [-3, 9, 40], [12, 12, 12], [2**31 - 1, 2**31 - 1, 5]])
@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_sizes_that_nobody_checks_are_made_safe(sizes: list[int], impl: Any) -> None:
    """In a compiled function, say: a negative size is 0, and there are no rows behind the last."""
    compiled = torch.compile(grouped_matmul, fullgraph=True, backend="aot_eager")
    safe, left = [], 12
    for size in sizes:
        safe.append(min(max(size, 0), left))
        left -= safe[-1]
    found = compiled(LHS, RHS, torch.tensor(sizes), impl=impl)
    torch.testing.assert_close(found, oracle.loop(LHS, RHS, torch.tensor(safe)))


@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_offsets_as_data(impl: Any) -> None:
    sizes = torch.tensor([2, 1, 5, 0, 4])
    for offset in (0, 1, 2, 9, -1):  # the last two are out of range: they mean 2 and 0
        found = grouped_matmul(LHS, RHS, sizes, group_offset=torch.tensor(offset), impl=impl)
        expected = oracle.loop(LHS, RHS, sizes, group_offset=max(min(offset, 2), 0))
        torch.testing.assert_close(found, expected)


# Ways to call --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_other_sizes_compile_nothing(device: str) -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(grouped_matmul, fullgraph=True, backend=count)
    lhs, rhs = LHS.to(device), RHS.to(device)
    for sizes in ([2, 0, 6], [12, 0, 0], [1, 2, 3]):
        given = torch.tensor(sizes, device=device)
        before = bridge.stats().compiles if sizes != [2, 0, 6] else None
        found = compiled(lhs, rhs, given)
        torch.testing.assert_close(found.cpu(), oracle.loop(LHS, RHS, given.cpu()))
        assert before is None or bridge.stats().compiles == before
    assert graphs == 1


def test_any_number_of_tokens_in_one_graph() -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(grouped_matmul, fullgraph=True, backend=count, dynamic=True)
    for tokens in (5, 12, 40, 7):
        lhs, sizes = torch.randn(tokens, 4), torch.tensor([1, tokens - 3, 1])
        torch.testing.assert_close(compiled(lhs, RHS, sizes), oracle.loop(lhs, RHS, sizes))
    assert graphs <= 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_opcheck(device: str) -> None:
    lhs, rhs = (t.to(device).requires_grad_() for t in (LHS.clone(), RHS.clone()))
    sizes = SIZES.to(device, torch.int32)
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":
        checks.append("test_autograd_registration")
    arguments = (lhs, rhs, sizes, None, False, torch.float32, None, "auto")
    torch.library.opcheck(torch.ops.tpu_kernels.grouped_matmul.default, arguments, test_utils=checks)


def test_compiled_with_gradients() -> None:
    case = oracle.make_case(20, 6, 7, [5, 0, 11])
    compiled = torch.compile(grouped_matmul, fullgraph=True, backend="aot_eager")
    lhs, rhs = case.lhs.requires_grad_(), case.rhs.requires_grad_()
    output = compiled(lhs, rhs, case.sizes)
    oracle.check(case, [output.detach(), *torch.autograd.grad(output, (lhs, rhs), case.cotangent)])


def test_vmap() -> None:
    lhs, sizes = torch.randn(2, 12, 4), torch.tensor([[2, 0, 6], [1, 9, 2]])
    found = torch.vmap(lambda a, s: grouped_matmul(a, RHS, s))(lhs, sizes)
    expected = torch.stack([oracle.loop(a, RHS, s) for a, s in zip(lhs, sizes, strict=True)])
    torch.testing.assert_close(found, expected)

"""`permute` and `unpermute` against loops over tokens and their choices."""

from __future__ import annotations

# Tests call with wrong types on purpose.
# pyright: reportArgumentType=false
import io
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import bridge
from tpu_kernels import Permuted, permute, unpermute

from . import oracle


def check_order(permuted: Permuted, tokens: torch.Tensor, experts: torch.Tensor, *given: Any) -> None:
    """All of a `Permuted`, exactly. `given`: how many experts, capacity, the first."""
    tokens, experts = tokens.cpu(), experts.cpu()
    rows, sizes, order, places = (t.detach().cpu() for t in permuted)
    k = experts.shape[1]
    of_expert, dropped = oracle.places(experts, *given)
    assert sizes.dtype == order.dtype == places.dtype == torch.int32 and rows.dtype == tokens.dtype
    assert sizes.tolist() == [len(pairs) for pairs in of_expert]
    live = [pair for pairs in of_expert for pair in pairs]
    assert order.tolist()[: len(live)] == [t * k + j for t, j in live]
    assert sorted(order.tolist()) == list(range(experts.numel()))
    expected = torch.full(experts.shape, -1, dtype=torch.int32)
    for place, (t, j) in enumerate(live):
        expected[t, j] = place
    assert torch.equal(places, expected)
    assert rows.shape == (experts.numel(), tokens.shape[1])
    assert torch.equal(rows[: len(live)], tokens[[t for t, _ in live]])
    assert not rows[len(live) :].any() and len(dropped) == rows.shape[0] - len(live)


def check_sums(
    got: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None
) -> None:
    """A float32 sum of k products errs by k u times the sum of their magnitudes, and is rounded once."""
    tokens, k = places.shape
    exact = torch.zeros(tokens, rows.shape[1], dtype=torch.float64)
    size = torch.zeros_like(exact)
    for t in range(tokens):
        for j in range(k):
            if places[t, j] >= 0:
                term = rows[places[t, j]].double() * (1 if weights is None else weights[t, j].double())
                exact[t] += term
                size[t] += term.abs()
    assert got.shape == exact.shape and got.dtype == rows.dtype
    float32, rounding = torch.finfo(torch.float32), torch.finfo(rows.dtype)
    bound = (k + 1) * float32.eps / 2 * size
    bound = bound + rounding.eps / 2 * (exact.abs() + bound) + rounding.smallest_normal
    assert bool(((got.double() - exact).abs() <= bound).all())


EXPERTS = torch.tensor([[1, 9], [0, 1], [-1, 1], [2, 2], [4, 0], [1, 1], [5, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("capacity", [None, 0, 1, 3, 2**40])
def test_there_and_back(dtype: torch.dtype, capacity: int | None, device: torch.device) -> None:
    tokens, weights = torch.randn(7, 3).to(dtype), torch.randn(7, 2)
    permuted = permute(tokens.to(device), EXPERTS.to(device), 5, capacity=capacity)
    check_order(permuted, tokens, EXPERTS, 5, capacity)
    rows = torch.randn(14, 4).to(dtype)
    for factors in (None, weights, weights.bfloat16()):
        out = unpermute(rows.to(device), permuted, None if factors is None else factors.to(device))
        check_sums(out.cpu(), rows, permuted.places.cpu(), factors)


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_routing(data: st.DataObject) -> None:
    """Few shapes, so few programs; choices and capacities are data."""
    count, k = data.draw(st.sampled_from([(6, 2), (5, 3), (1, 1), (0, 2)]))
    chosen = data.draw(st.lists(st.sampled_from([1, 0, 2, 5, -1]), min_size=count * k, max_size=count * k))
    experts = torch.tensor(chosen, dtype=torch.int32).reshape(count, k)
    capacity = data.draw(st.sampled_from([1, 2, 3, 0, 7, None]))
    first = data.draw(st.sampled_from([0, 2]))
    tokens, weights = torch.randn(count, 2), torch.randn(count, k)
    permuted = permute(tokens, experts, 4, capacity=capacity, first_expert=first)
    check_order(permuted, tokens, experts, 4, capacity, first)
    rows = torch.randn(count * k, 3)
    check_sums(unpermute(rows, permuted, weights), rows, permuted.places, weights)


@pytest.mark.parametrize(
    ("tokens", "k", "width", "number"), [(0, 2, 3, 4), (1, 1, 1, 1), (3, 0, 2, 4), (3, 2, 0, 4), (3, 2, 2, 0)]
)
def test_sizes_at_the_edge(tokens: int, k: int, width: int, number: int) -> None:
    x = torch.randn(tokens, width, requires_grad=True)
    experts = torch.randint(0, max(number, 1), (tokens, k))
    weights = torch.randn(tokens, k, requires_grad=True)
    for capacity in (None, 1):
        permuted = permute(x, experts, number, capacity=capacity)
        check_order(permuted, x.detach(), experts, number, capacity)
        out = unpermute(permuted.tokens, permuted, weights)
        assert out.shape == x.shape
        for leaf, gradient in zip((x, weights), torch.autograd.grad(out.sum(), (x, weights)), strict=True):
            assert gradient.shape == leaf.shape


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integers(dtype: torch.dtype) -> None:
    experts = torch.tensor([[1, 0], [3, 100]]).to(dtype)
    tokens = torch.randn(2, 3)
    check_order(permute(tokens, experts, 4), tokens, experts, 4)


def test_far_out_of_range_is_out_of_range() -> None:
    tokens = torch.randn(3, 2)
    experts = torch.tensor([[2**62, 0], [-(2**63), 2**32], [2**32 + 1, 1]])
    for first in (0, 1):
        check_order(permute(tokens, experts, 2, first_expert=first), tokens, experts, 2, None, first)
    narrow = torch.tensor([[2**31 - 1, 0], [-(2**31), 1]], dtype=torch.int32)
    for first in (0, 1):
        permuted = permute(tokens[:2], narrow, 2, first_expert=first)
        check_order(permuted, tokens[:2], narrow, 2, None, first)


def test_ranks_with_slices_of_the_experts_add_up() -> None:
    tokens, weights = torch.randn(7, 3), torch.randn(7, 2)
    whole = permute(tokens, EXPERTS, 6)
    parts = [permute(tokens, EXPERTS, 3, first_expert=first) for first in (0, 3)]
    assert torch.equal(torch.cat([part.group_sizes for part in parts]), whole.group_sizes)
    total = sum(unpermute(part.tokens, part, weights) for part in parts)
    torch.testing.assert_close(total, unpermute(whole.tokens, whole, weights))


def test_all_dropped(device: torch.device) -> None:
    tokens = torch.randn(4, 3, device=device, requires_grad=True)
    weights = torch.randn(4, 2, device=device, requires_grad=True)
    permuted = permute(tokens, torch.full((4, 2), 7, device=device), 5)
    out = unpermute(permuted.tokens + math.nan, permuted, weights)
    assert not out.any() and not permuted.group_sizes.any() and bool((permuted.places == -1).all())
    for gradient in torch.autograd.grad(out.sum(), (tokens, weights)):
        assert not gradient.any()


def test_what_is_dropped_leaks_nowhere() -> None:
    """NaN in rows of dropped pairs, in their weights and in the tokens that are all dropped."""
    tokens, weights = torch.randn(7, 3), torch.randn(7, 2)
    experts = EXPERTS.clone()
    experts[3] = 9

    def run(x: torch.Tensor, w: torch.Tensor, behind: float) -> list[torch.Tensor]:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        permuted = permute(x, experts, 5, capacity=3)
        live = int(permuted.group_sizes.sum())
        rows = torch.cat([permuted.tokens[:live], permuted.tokens[live:] + behind])
        out = unpermute(rows, permuted, w)
        return [permuted.tokens, out, *torch.autograd.grad(out.square().sum(), (x, w)), permuted.places]

    *clean, places = run(tokens, weights, 0)
    tokens[3] = math.nan
    weights[places < 0] = math.nan
    *dirty, _ = run(tokens, weights, math.nan)
    for got, want in zip(dirty, clean, strict=True):
        assert torch.equal(got, want)
    assert not clean[3][places < 0].any() and clean[3][places >= 0].all()  # gradient of weights


# Derivatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_of_every_order(weighted: bool) -> None:
    tokens = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)

    def call(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        permuted = permute(x, EXPERTS, 5, capacity=3)
        rows = permuted.tokens.sin()  # so that second derivatives are not 0
        return permuted.tokens, unpermute(rows, permuted, w if weighted else None)

    leaves = (tokens, weights if weighted else weights.detach())
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.slow
def test_third_derivatives() -> None:
    tokens = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)

    def first(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        permuted = permute(x, EXPERTS, 5, capacity=3)
        out = unpermute(permuted.tokens.sin(), permuted, w).square().sum()
        return torch.autograd.grad(out, (x, w), create_graph=True)

    assert torch.autograd.gradgradcheck(first, (tokens, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tokens_gradient_is_summed_in_float32(dtype: torch.dtype) -> None:
    tokens = torch.randn(30, 4).to(dtype).requires_grad_()
    experts = torch.randint(-1, 6, (30, 8))
    permuted = permute(tokens, experts, 6)
    cotangent = torch.randn(240, 4).to(dtype)
    (gradient,) = torch.autograd.grad(permuted.tokens, tokens, cotangent)
    check_sums(gradient, cotangent, permuted.places, None)


def test_gradients_scatter_nothing() -> None:
    """On a TPU a scatter goes row by row. Here: no program of forward or backward has one."""
    import jax
    import jax.numpy as jnp

    from tpu_kernels.moe import permutation

    permuted = permute(torch.randn(7, 3), EXPERTS, 5, capacity=3)
    order, places = (jnp.asarray(t.numpy()) for t in (permuted.order, permuted.places))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = permutation._permute(x, order, places)
        return jnp.sum(permutation._unpermute(jnp.sin(rows), w, order, places) ** 2)

    def second(x: jax.Array, w: jax.Array) -> jax.Array:
        return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))  # pyright: ignore[reportReturnType]

    program = str(jax.make_jaxpr(jax.grad(second, (0, 1)))(jnp.ones((7, 3)), jnp.ones((7, 2))))
    assert "gather" in program and "scatter" not in program
    sort = jax.make_jaxpr(lambda e, c: permutation._sort(e, c, 5, 0))(jnp.ones((7, 2), int), jnp.int32(3))
    assert "sort" in str(sort) and "scatter" not in str(sort)


# Ways to call ---------------------------------------------------------------------------------------------


def there_and_back(
    tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, capacity: int | None = 3
) -> torch.Tensor:
    permuted = permute(tokens, experts, 5, capacity=capacity)
    return unpermute(permuted.tokens.sin(), permuted, weights)


def test_compiled_once_for_any_routing(device: torch.device) -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(there_and_back, fullgraph=True, backend=count)
    tokens, weights = torch.randn(7, 3, device=device), torch.randn(7, 2, device=device)
    for experts in (EXPERTS, torch.full((7, 2), 3), torch.full((7, 2), -1), torch.randint(0, 5, (7, 2))):
        experts = experts.to(device)
        before = bridge.stats().compiles if graphs else None
        found = compiled(tokens, experts, weights)
        assert before is None or bridge.stats().compiles == before
        torch.testing.assert_close(found, there_and_back(tokens, experts, weights))
    assert graphs == 1


def test_compiled_with_gradients(device: torch.device) -> None:
    leaves = [torch.randn(7, n, device=device, requires_grad=True) for n in (3, 2)]
    found = []
    for call in (there_and_back, torch.compile(there_and_back, fullgraph=True, backend="aot_eager")):
        out = call(leaves[0], EXPERTS.to(device), leaves[1])
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_other_capacities_compile_nothing() -> None:
    tokens, weights = torch.randn(7, 3), torch.randn(7, 2)
    there_and_back(tokens, EXPERTS, weights, 1)
    before = bridge.stats().compiles
    for capacity in (2, 5, 0):
        there_and_back(tokens, EXPERTS, weights, capacity)
    assert bridge.stats().compiles == before


def test_any_number_of_tokens_in_one_exported_program() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, e: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return there_and_back(x, e, w)

    count = torch.export.Dim("tokens", min=2, max=64)
    shapes = {name: {0: count} for name in ("x", "e", "w")}
    given = torch.randn(7, 3), EXPERTS, torch.randn(7, 2)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), given, dynamic_shapes=shapes), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    given = torch.randn(11, 3), torch.randint(-1, 6, (11, 2)), torch.randn(11, 2)
    torch.testing.assert_close(loaded(*given), there_and_back(*given))


def test_vmap() -> None:
    tokens, experts, weights = torch.randn(3, 7, 2), torch.randint(-1, 6, (3, 7, 2)), torch.randn(3, 7, 2)
    found = torch.vmap(there_and_back)(tokens, experts, weights)
    gradients = torch.vmap(torch.func.grad(lambda *a: there_and_back(*a).square().sum()))(
        tokens, experts, weights
    )
    for i in range(3):
        leaf = tokens[i].clone().requires_grad_()
        expected = there_and_back(leaf, experts[i], weights[i])
        torch.testing.assert_close(found[i], expected)
        (gradient,) = torch.autograd.grad(expected.square().sum(), leaf)
        torch.testing.assert_close(gradients[i], gradient)


def test_opcheck(device: torch.device) -> None:
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device.type == "cpu":
        checks.append("test_autograd_registration")
    ops = torch.ops.tpu_kernels
    permuted = permute(torch.randn(7, 3, device=device), EXPERTS.to(device), 5)
    leaf = lambda *shape: torch.randn(shape, device=device, requires_grad=True)
    order, places = permuted.order, permuted.places
    capacity = torch.full((), 3, dtype=torch.int32, device=device)
    for op, arguments in (
        (ops.sort_by_expert, (EXPERTS.to(device, torch.int32), capacity, 5, 0)),
        (ops.permute, (leaf(7, 3), order, places)),
        (ops.unpermute, (leaf(14, 3), leaf(7, 2), order, places)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=checks)


# Refusals -------------------------------------------------------------------------------------------------

TOKENS = torch.randn(7, 3)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"tokens": TOKENS.int()}, TypeError, "tokens must be float16, .*int32"),
        ({"experts": EXPERTS.float()}, TypeError, "experts must be integers, got torch.float32"),
        ({"experts": [[1]]}, TypeError, "experts must be a torch.Tensor, got list"),
        ({"experts": EXPERTS[:6]}, RuntimeError, r"experts \[T, k\], got \[7, 3\] and \[6, 2\]"),
        ({"experts": EXPERTS[:, 0]}, RuntimeError, r"got \[7, 3\] and \[7\]"),
        ({"tokens": TOKENS[0]}, RuntimeError, r"tokens must be \[T, D\]"),
        ({"experts": EXPERTS.to("tpu")}, RuntimeError, "tokens on cpu and experts on tpu:0"),
        ({"num_experts": -1}, ValueError, "num_experts must be at least 0, got -1"),
        ({"num_experts": 5.0}, TypeError, "num_experts must be an int, got 5.0"),
        ({"capacity": -1}, ValueError, "capacity must be at least 0, got -1"),
        ({"capacity": 1.5}, TypeError, "capacity must be an int, got 1.5"),
        ({"first_expert": -1}, ValueError, "first_expert must be at least 0, got -1"),
    ],
)
def test_refusals_of_permute(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"permute: .*{message}"):
        permute(**({"tokens": TOKENS, "experts": EXPERTS, "num_experts": 5} | changed))


PERMUTED = Permuted(torch.zeros(14, 3), torch.zeros(5).int(), torch.arange(14).int(), torch.zeros(7, 2).int())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"rows": torch.zeros(14, 3).int()}, TypeError, "rows must be float16"),
        ({"rows": torch.zeros(13, 3)}, RuntimeError, r"rows must be \[14, D\], got \[13, 3\]"),
        ({"rows": torch.zeros(14)}, RuntimeError, r"rows must be \[14, D\], got \[14\]"),
        ({"permuted": tuple(PERMUTED)}, TypeError, "permuted must be what permute returned, got tuple"),
        ({"weights": torch.zeros(7, 3)}, RuntimeError, r"weights must be \[7, 2\], got \[7, 3\]"),
        ({"weights": torch.zeros(7, 2).int()}, TypeError, "weights must be float16"),
        ({"weights": torch.zeros(7, 2, device="tpu")}, RuntimeError, "rows on cpu and weights on tpu:0"),
    ],
)
def test_refusals_of_unpermute(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"unpermute: .*{message}"):
        unpermute(**({"rows": torch.zeros(14, 3), "permuted": PERMUTED} | changed))

"""`gated_mlp`, `moe_layer` and the balancing loss against loops over experts in float64."""

from __future__ import annotations

# Tests call with wrong types on purpose.
# pyright: reportArgumentType=false
import io
import math
from typing import Any

import pytest
import torch

import bridge
from tpu_kernels import gated_mlp, load_balancing_loss, moe_layer

from . import oracle

WIDTH, INNER, NUMBER = 6, 10, 4


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def weights_of(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """gate, up and down, not transposed, of about unit gain."""
    shapes = ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH))
    return [(normal(NUMBER, *shape) / shape[0] ** 0.5).to(dtype) for shape in shapes]


def layouts(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> list[Any]:
    """The ways to give the same weights: (gate, up, down) and options."""
    turned = [w.mT.contiguous() for w in (gate, up, down)]
    return [
        ((gate, up, down), {}),
        (turned, {"transpose_weights": True}),
        ((None, None, down), {"gate_up": torch.cat([gate, up], dim=-1)}),
        (
            (None, None, turned[2]),
            {"gate_up": torch.cat(turned[:2], dim=-2), "transpose_weights": True},
        ),
    ]


on_tpu_quickly = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), "tpu"], ids=str
)


# The MLP --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_mlp(activation: str) -> None:
    gate, up, down = weights_of()
    x, sizes = normal(9, WIDTH), torch.tensor([3, 0, 4, 1])  # the last row is in no group
    group = [0, 0, 0, 2, 2, 2, 2, 3]
    rows = [oracle.mlp(x[i], gate[g], up[g], down[g], activation) for i, g in enumerate(group)]
    expected = torch.stack([*rows, torch.zeros(WIDTH, dtype=torch.float64)])
    for weights, options in layouts(gate, up, down):
        found = gated_mlp(x, *weights, group_sizes=sizes, activation=activation, **options)
        # A dozen float64 operations on numbers of a few units.
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_mlp_without_groups(device: torch.device) -> None:
    gate, up, down = (w[0] for w in weights_of())
    x = normal(5, WIDTH)
    expected = oracle.mlp(x, gate, up, down)
    for weights, options in layouts(gate, up, down):
        given: Any = [None if w is None else w.to(device) for w in weights]
        options = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
        found = gated_mlp(x.to(device), given[0], given[1], given[2], **options)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-13, atol=1e-13)
    assert gated_mlp(x[:0], gate, up, down).shape == (0, WIDTH)


@pytest.mark.slow
def test_mlp_gradients() -> None:
    leaves = [t.requires_grad_() for t in (normal(5, WIDTH), *weights_of())]
    sizes = torch.tensor([2, 0, 1, 1])
    call = lambda x, gate, up, down: gated_mlp(x, gate, up, down, sizes)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_hidden_values_are_rounded_once() -> None:
    """Powers of two that bfloat16 can't add: gate and up are kept in float32 until they are multiplied."""
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    gate, up = torch.tensor([[1.0], [2.0**-9]]).bfloat16(), torch.tensor([[1.0], [-(2.0**-9)]]).bfloat16()
    down = torch.tensor([[1.0]]).bfloat16()
    # (1 + e)(1 - e) = 1 - e², which rounds to 1. Rounded before: 1 * (1 - e), for 1 + e is no bfloat16.
    assert gated_mlp(x, gate, up, down, activation="relu").item() == 1.0


# The layer ------------------------------------------------------------------------------------------------


def expected_layer(
    x: torch.Tensor,
    router: torch.Tensor,
    weights: list[torch.Tensor],
    k: int,
    capacity: int | None = None,
    activation: str = "silu",
    **rule: Any,
) -> torch.Tensor:
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    factors, experts = oracle.route(tokens @ router.T, k, **rule)
    out = oracle.layer(tokens, experts, factors, *weights, capacity=capacity, activation=activation)
    return out.reshape(x.shape)


RULES: list[dict[str, Any]] = [
    {},
    {"capacity": 3, "renormalize": False},
    {"score": "sigmoid", "bias": torch.tensor([0.3, -0.2, 0.1, 0.0]), "scale": 2.5},
    {"groups": 2, "top_groups": 1, "group_score": "top2", "activation": "gelu"},
    {"capacity": 0},
]


@pytest.mark.parametrize(
    "rule",
    [RULES[1], RULES[2], *(pytest.param(r, marks=pytest.mark.slow) for r in (RULES[0], *RULES[3:]))],
    ids=str,
)
def test_layer_and_its_gradients(rule: dict[str, Any], device: torch.device) -> None:
    x, router, weights = normal(2, 5, WIDTH), normal(NUMBER, WIDTH), weights_of()
    leaves = [t.requires_grad_() for t in (x, router, *weights)]
    expected = expected_layer(x, router, weights, 2, **rule) + 0 * x  # it has a gradient if all is dropped
    cotangent = normal(2, 5, WIDTH)
    wanted = torch.autograd.grad(expected, leaves, cotangent, materialize_grads=True, allow_unused=True)
    given = [t.detach().to(device).requires_grad_() for t in leaves]
    on_device = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in rule.items()}
    found = moe_layer(*given, k=2, **on_device)
    got = torch.autograd.grad(found, given, cotangent.to(device))
    for a, b in zip((found, *got), (expected, *wanted), strict=True):
        # Some hundred float64 operations after one another, on numbers up to a hundred.
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_within_rounding(dtype: torch.dtype, device: torch.device) -> None:
    x, router, weights = normal(12, WIDTH, dtype=dtype), normal(NUMBER, WIDTH, dtype=dtype), weights_of(dtype)
    found = moe_layer(*(t.to(device) for t in (x, router, *weights)), k=2).cpu().double()
    exact = [t.double() for t in (x, router, *weights)]
    logits = exact[0] @ exact[1].T
    factors, experts = oracle.route(logits, 2)
    expected = oracle.layer(exact[0], experts, factors, *exact[2:])
    # The layer with all magnitudes, and no activation: silu and what its slope makes of an error are at most
    # 1.1 of it. An error of 2 (K + 1) u of gate and up, (N + 1) u of the product with down, and those of the
    # weights, which are a softmax of logits that err by (K + 1) u of their magnitudes.
    size = oracle.layer(exact[0].abs(), experts, factors, *(w.abs() for w in exact[2:]), activation="relu")
    u = torch.finfo(torch.float32).eps / 2
    of_logits = 2 * (WIDTH + 1) * float((exact[0].abs() @ exact[1].abs().T).max())
    terms = 2.2 * (WIDTH + 1) + INNER + 1 + of_logits + 2 * NUMBER + 2 * float(logits.abs().max()) + 40
    # Rounded to the dtype three times: hidden values, rows and the sum.
    rounding = 3 * torch.finfo(dtype).eps / 2
    assert found.shape == expected.shape
    assert bool(((found - expected).abs() <= 1.1 * (terms * u + rounding) * 1.1 * size).all())


def test_every_layout_of_weights_and_shape_of_tokens() -> None:
    x, router, weights = normal(2, 3, 2, WIDTH), normal(NUMBER, WIDTH), weights_of()
    expected = expected_layer(x, router, weights, 2)
    logits = x @ router.T
    for given, options in layouts(*weights)[::3]:
        found = moe_layer(x, router, *given, k=2, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        out, returned = moe_layer(x, None, *given, k=2, logits=logits, return_logits=True, **options)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(returned, logits)
    one, returned = moe_layer(x[0, 0, 0], router, *weights, k=2, return_logits=True)
    torch.testing.assert_close(one, expected[0, 0, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returned, logits[0, 0, 0], rtol=1e-12, atol=1e-12)
    none = moe_layer(x[:0], router, *weights, k=2)
    assert none.shape == (0, 3, 2, WIDTH)


@pytest.mark.parametrize(
    ("factor", "capacity"), [(1.0, 6), (0.5, 3), (1.3, 8), (1.5, 9), (0.0, 0), (100, 24)]
)
def test_capacity_factor(factor: float, capacity: int) -> None:
    """12 tokens with 2 choices of 4 experts: 6 for each if all have the same."""
    x, router, weights = normal(12, WIDTH), normal(NUMBER, WIDTH), weights_of()
    found = moe_layer(x, router, *weights, k=2, capacity_factor=factor)
    assert torch.equal(found, moe_layer(x, router, *weights, k=2, capacity=capacity))


def test_logits_are_float32_in_autocast(device: torch.device) -> None:
    """Two experts whose logits bfloat16 can't tell apart."""
    x = torch.ones(1, 2, device=device)
    router = torch.tensor([[1.0, 0.0], [1.0, 2.0**-12]], device=device)
    weights = [torch.ones(2, 2, 2, device=device)] * 3
    with torch.autocast(device.type, torch.bfloat16):
        _, logits = moe_layer(x, router, *weights, k=1, return_logits=True, impl="reference")
    assert logits.dtype == torch.float32 and logits.tolist() == [[1.0, 1.0 + 2.0**-12]]
    low = moe_layer(
        x.bfloat16(), router, *(w.bfloat16() for w in weights), k=1, return_logits=True, impl="reference"
    )
    assert low[0].dtype == torch.bfloat16 and torch.equal(low[1], logits)


@pytest.mark.slow
def test_gradgradcheck() -> None:
    leaves = [t.requires_grad_() for t in (normal(3, WIDTH), normal(NUMBER, WIDTH), *weights_of())]
    call = lambda *given: moe_layer(*given, k=2, capacity=1)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


# Ways to call ---------------------------------------------------------------------------------------------


@on_tpu_quickly
def test_compiled_once_for_any_routing(device: str) -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    call = lambda *given: moe_layer(*given, k=2, capacity_factor=1.25)
    compiled = torch.compile(call, fullgraph=True, backend=count)
    weights = [w.to(device) for w in weights_of()]
    for seed in range(3):
        x, router = (normal(n, WIDTH).to(device) for n in (8, NUMBER))
        if seed == 2:
            x = x[:1].expand(8, WIDTH).contiguous()  # all to the same experts: most are dropped
        before = bridge.stats().compiles if seed else None
        found = compiled(x, router, *weights)
        assert before is None or bridge.stats().compiles == before
        torch.testing.assert_close(found, call(x, router, *weights))
    assert graphs == 1


@pytest.mark.slow
def test_compiled_with_gradients(device: torch.device) -> None:
    leaves = [
        t.to(device).requires_grad_() for t in (normal(2, 4, WIDTH), normal(NUMBER, WIDTH), *weights_of())
    ]
    call = lambda *given: moe_layer(*given, k=2, capacity_factor=1.0)
    results = []
    for each in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = each(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_any_number_of_tokens_in_one_graph() -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    call = lambda *given: moe_layer(*given, k=2, capacity_factor=1.25)
    compiled = torch.compile(call, fullgraph=True, backend=count)
    router, weights = normal(NUMBER, WIDTH), weights_of()
    for tokens in (8, 12, 33, 5):
        x = normal(tokens, WIDTH)
        torch.testing.assert_close(compiled(x, router, *weights), call(x, router, *weights))
    assert graphs == 2  # one for 8 tokens, one for any number


@pytest.mark.slow
def test_any_number_of_tokens_in_one_exported_program() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, router: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            gate, up, down = weights
            return moe_layer(x, router, gate, up, down, k=2, capacity_factor=1.25)

    router, weights = normal(NUMBER, WIDTH), weights_of()
    shapes = ({0: torch.export.Dim("tokens", min=2, max=64)}, None, (None,) * 3)
    program = torch.export.export(Layer(), (normal(6, WIDTH), router, *weights), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = normal(9, WIDTH)
    found = torch.export.load(file).module()(x, router, *weights)
    torch.testing.assert_close(found, Layer()(x, router, *weights))


@pytest.mark.slow
def test_vmap_over_layers() -> None:
    x, router = normal(2, 5, WIDTH), normal(2, NUMBER, WIDTH)
    many = [torch.stack(pair) for pair in zip(weights_of(), weights_of(), strict=True)]
    call = lambda *given: moe_layer(*given, k=2, capacity=2)
    found = torch.vmap(call)(x, router, *many)
    for i in range(2):
        torch.testing.assert_close(found[i], call(x[i], router[i], *(w[i] for w in many)))


# The balancing loss ---------------------------------------------------------------------------------------


def test_load_balancing_loss(device: torch.device) -> None:
    logits = normal(7, 5).requires_grad_()
    experts = torch.randint(-1, 6, (7, 2))
    probable = logits.softmax(1).mean(0)
    often = [sum(e == n for row in experts.tolist() for e in row) / 14 for n in range(5)]
    expected = 5 * sum(f * p for f, p in zip(often, probable, strict=True))
    assert isinstance(expected, torch.Tensor)
    given = logits.detach().to(device).requires_grad_()
    found = load_balancing_loss(given, experts.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-13, atol=0)
    (got,), (want,) = torch.autograd.grad(found, given), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-12, atol=1e-15)


def test_load_balancing_loss_is_1_where_all_is_even() -> None:
    even = torch.arange(12).reshape(6, 2) % 4
    assert load_balancing_loss(torch.zeros(6, 4), even).item() == 1
    assert load_balancing_loss(torch.zeros(0, 4), even[:0]).item() == 0


# Refusals -------------------------------------------------------------------------------------------------

X, ROUTER = torch.zeros(5, WIDTH), torch.zeros(NUMBER, WIDTH)
GATE, UP, DOWN = (torch.zeros(NUMBER, *shape) for shape in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)))
SIZES = torch.tensor([1, 2, 0, 1])
BOTH = torch.zeros(NUMBER, WIDTH, 2 * INNER)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"gate_up": BOTH}, ValueError, "gate_up stands in for gate and up"),
        ({"gate": None}, ValueError, "give gate and up, or gate_up"),
        ({"x": X.int()}, TypeError, "x must be float16"),
        (
            {"up": UP.double()},
            TypeError,
            "x and up must have the same dtype, got torch.float32 and torch.float64",
        ),
        ({"gate": GATE.mT}, RuntimeError, r"gate \[G, K, N\], .* got x \[5, 6\], gate \[4, 10, 6\]"),
        ({"transpose_weights": True}, RuntimeError, r"gate \[G, N, K\].* down \[G, D, N\]"),
        ({"down": DOWN[:3]}, RuntimeError, r"down \[3, 10, 6\]"),
        ({"group_sizes": None}, RuntimeError, r"without group_sizes .*gate \[K, N\]"),
        ({"gate": None, "up": None, "gate_up": GATE}, RuntimeError, r"gate_up \[G, K, 2 N\]"),
        ({"group_sizes": SIZES[:2]}, RuntimeError, r"group_sizes must be \[4\], .*got \[2\]"),
        ({"group_sizes": SIZES.float()}, TypeError, "group_sizes must be integers"),
        ({"down": DOWN.to("tpu")}, RuntimeError, "x on cpu and down on tpu:0"),
        ({"activation": "tanh"}, ValueError, "activation must be one of 'relu', .*got 'tanh'"),
        ({"transpose_weights": 1}, TypeError, "transpose_weights must be a bool"),
    ],
)
def test_refusals_of_the_mlp(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"x": X, "gate": GATE, "up": UP, "down": DOWN, "group_sizes": SIZES}
    with pytest.raises(error, match=f"gated_mlp: .*{message}"):
        gated_mlp(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"logits": torch.zeros(5, NUMBER)}, ValueError, "moe_layer: give router or logits"),
        ({"router": None}, ValueError, "moe_layer: give router or logits"),
        ({"router": ROUTER.int()}, TypeError, "moe_layer: router must be float16"),
        ({"router": ROUTER[:3]}, RuntimeError, r"moe_layer: .*router \[3, 6\] and down \[4, 10, 6\]"),
        ({"router": None, "logits": torch.zeros(4, 4)}, RuntimeError, r"moe_layer: .*logits \[4, 4\]"),
        ({"router": ROUTER.to("tpu")}, RuntimeError, "moe_layer: .*x on cpu and router on tpu:0"),
        ({"x": torch.zeros(())}, RuntimeError, "moe_layer: x must be"),
        ({"down": DOWN[0]}, RuntimeError, r"moe_layer: .*down \[10, 6\]"),
        ({"capacity": 3, "capacity_factor": 1.0}, ValueError, "moe_layer: give capacity or capacity_factor"),
        ({"capacity_factor": -1.0}, ValueError, "moe_layer: capacity_factor must be at least 0"),
        ({"capacity_factor": math.nan}, ValueError, "moe_layer: capacity_factor must be .* finite, got nan"),
        ({"capacity_factor": "1"}, TypeError, "moe_layer: capacity_factor must be a float"),
        ({"capacity_factor": 1.0, "k": 9}, ValueError, "moe_layer: k must be between 1 and 4"),
        ({"k": 5}, ValueError, "route_top_k: k must be between 1 and 4"),
        ({"up": None}, ValueError, "gated_mlp: give gate and up"),
    ],
)
def test_refusals_of_the_layer(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"x": X, "router": ROUTER, "gate": GATE, "up": UP, "down": DOWN, "k": 2}
    with pytest.raises(error, match=message):
        moe_layer(**(given | changed))


@pytest.mark.parametrize(
    ("logits", "experts", "error", "message"),
    [
        (X.int(), SIZES[:, None], TypeError, "logits must be float16"),
        (X, X, TypeError, "experts must be integers"),
        (X, SIZES[:, None], RuntimeError, r"got \[5, 6\] and \[4, 1\]"),
    ],
)
def test_refusals_of_the_loss(logits: Any, experts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"load_balancing_loss: .*{message}"):
        load_balancing_loss(logits, experts)

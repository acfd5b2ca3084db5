"""`route_top_k` against a loop over tokens in float64, and against the routers of models."""

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
from tpu_kernels import route_top_k

from . import oracle

V3 = {"score": "sigmoid", "groups": 4, "top_groups": 2, "group_score": "top2", "scale": 2.5}
RULES: list[dict[str, Any]] = [
    {},
    {"renormalize": False, "scale": 3.0},
    {"score": "sigmoid"},
    {"score": "sigmoid", "renormalize": False},
    {"groups": 4, "top_groups": 2, "renormalize": False},
    {"groups": 2, "top_groups": 1, "group_score": "top2"},
    {"groups": 12, "top_groups": 4},
    V3,
]

every_rule = pytest.mark.parametrize(
    "rule", [pytest.param(r, marks=() if r in ({}, V3) else pytest.mark.slow) for r in RULES], ids=str
)


def weights_bound(logits: torch.Tensor, scale: float = 1.0) -> float:
    """How far a float32 weight may be from the exact one.

    A softmax of differences up to d errs relatively by (E + d + a few) u, E for its sum. A sigmoid errs by a
    few u, and so does the division by a sum of k <= E of them. Weights are at most `scale`.
    """
    finite = logits[logits.isfinite()].double()
    spread = float(finite.max() - finite.min()) if finite.numel() else 0.0
    return (2 * logits.shape[1] + 2 * spread + 32) * torch.finfo(torch.float32).eps / 2 * scale


def compare(logits: torch.Tensor, k: int, device: str = "cpu", **rule: Any) -> None:
    on_device = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in rule.items()}
    weights, experts = route_top_k(logits.to(device), k, **on_device)
    expected_weights, expected_experts = oracle.route(logits.double(), k, **rule)
    assert experts.dtype == torch.int32 and weights.dtype == torch.float32
    assert experts.shape == weights.shape == (logits.shape[0], k)
    assert torch.equal(experts.cpu(), expected_experts)
    if weights.numel():
        error = (weights.cpu().double() - expected_weights).abs().max()
        assert error <= weights_bound(logits, rule.get("scale", 1.0))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_values(rule: dict[str, Any], device: torch.device) -> None:
    compare(torch.randn(20, 12), 3, device.type, **rule)


@every_rule
def test_a_bias_is_for_the_choice_alone(rule: dict[str, Any]) -> None:
    logits, bias = torch.randn(20, 12), torch.randn(12)
    compare(logits, 3, bias=bias, **rule)
    assert not torch.equal(route_top_k(logits, 3, bias=bias, **rule)[1], route_top_k(logits, 3, **rule)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_small_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    compare(torch.randn(20, 12).to(dtype), 3)
    compare(torch.randn(20, 12).to(dtype), 3, bias=torch.randn(12), **V3)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "rule"),
    [
        (0, 4, 2, {}),
        (1, 1, 1, {}),
        (1, 1, 1, {"score": "sigmoid", "groups": 1, "top_groups": 1}),
        (3, 5, 5, {"score": "sigmoid"}),
        (3, 6, 4, {"groups": 3, "top_groups": 2}),
        (0, 6, 4, {"groups": 3, "top_groups": 3, "group_score": "top2"}),
    ],
)
def test_sizes_at_the_edge(tokens: int, experts: int, k: int, rule: dict[str, Any]) -> None:
    compare(torch.randn(tokens, experts), k, **rule)


def test_routers_of_models() -> None:
    logits, bias = torch.randn(40, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    pairs = [
        (route_top_k(logits, 2), oracle.mixtral(logits, 2)),
        (route_top_k(logits, 4), oracle.gpt_oss(logits, 4)),
        (route_top_k(logits, 4, renormalize=False), oracle.qwen3(logits, 4)),
        (
            route_top_k(logits, 4, groups=4, top_groups=2, renormalize=False, scale=16.0),
            oracle.deepseek_v2(logits, 4, 4, 2, 16.0),
        ),
        (route_top_k(logits, 4, bias=bias, **V3), oracle.deepseek_v3(logits, 4, bias, 4, 2, 2.5)),
    ]
    for (weights, experts), (expected_weights, expected_experts) in pairs:
        assert torch.equal(experts.long(), expected_experts)
        assert weights.dtype == torch.float64
        # At most 16, in float64, by formulas that round differently.
        torch.testing.assert_close(weights, expected_weights, rtol=1e-14, atol=1e-14)


# Ties, and what is no number ------------------------------------------------------------------------------


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_ties_go_to_the_lower_expert(data: st.DataObject) -> None:
    """These logits have the sigmoids 0, 1/2 and 1 exactly, and sums of those and the bias are exact."""
    values = st.lists(st.sampled_from([-math.inf, 0.0, -0.0, 60.0]), min_size=24, max_size=24)
    logits = torch.tensor(data.draw(values)).reshape(3, 8)
    biases = st.lists(st.sampled_from([0.0, 0.25, 0.5, -1.0]), min_size=8, max_size=8)
    bias = torch.tensor(data.draw(biases)) if data.draw(st.booleans()) else None
    k, groups, top_groups, group_score = data.draw(
        st.sampled_from([(4, None, None, "max"), (3, 2, 1, "max"), (4, 4, 2, "top2"), (5, 4, 3, "max")])
    )
    compare(
        logits,
        k,
        score="sigmoid",
        bias=bias,
        groups=groups,
        top_groups=top_groups,
        group_score=group_score,
    )


def test_the_order_is_that_of_a_stable_sort(device: torch.device) -> None:
    logits = torch.randint(-2, 3, (50, 9)).float()
    logits[logits == 0] *= torch.where(
        torch.rand(int((logits == 0).sum())) < 0.5, -1.0, 1.0
    )  # zeros of both signs
    _, experts = route_top_k(logits.to(device), 9)
    assert torch.equal(experts.cpu().long(), logits.sort(dim=1, descending=True, stable=True).indices)


def test_where_scores_saturate_the_logits_decide() -> None:
    logits = torch.tensor([[20.0, 40.0, 30.0, 90.0]])  # all of them sigmoid 1 in float32
    assert route_top_k(logits, 3, score="sigmoid")[1].tolist() == [[3, 1, 2]]


@every_rule
def test_nan_goes_to_experts_that_exist(rule: dict[str, Any]) -> None:
    logits = torch.randn(6, 12)
    logits[0] = math.nan
    logits[1, 5], logits[2, 0], logits[2, 11] = math.nan, -math.nan, math.nan
    logits[3], logits[4] = -math.inf, math.inf
    for bias in (None, torch.full((12,), math.nan), torch.full((12,), -math.inf)):
        weights, experts = route_top_k(logits, 3, bias=bias, **rule)
        assert int(experts.min()) >= 0 and int(experts.max()) < 12
        assert all(len(set(row)) == 3 for row in experts.tolist())
        if bias is None:
            assert 5 in experts[1] and 0 in experts[2]  # NaN is the highest
            assert bool(weights[5].isfinite().all())  # and no other token's
    if "groups" in rule:
        size = 12 // rule["groups"]
        assert all(len({e // size for e in row}) <= rule["top_groups"] for row in experts.tolist())


@pytest.mark.parametrize("value", [-200.0, -math.inf])
def test_no_weight_is_nan_where_all_sigmoids_are_0(value: float) -> None:
    logits = torch.full((2, 4), value, requires_grad=True)
    weights, _ = route_top_k(logits, 2, score="sigmoid")
    (gradient,) = torch.autograd.grad(weights[:, 0].sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), logits)
    assert not weights.any() and not gradient.any() and not second.any()


def test_weights_of_small_sigmoids_are_divided_by_their_sum() -> None:
    """And by the 1e-20 that is added to it, in the second row."""
    logits = torch.tensor([[-30.0, -31.0], [-46.0, -47.0], [-60.0, -60.0]], requires_grad=True)
    found, _ = route_top_k(logits, 2, score="sigmoid")
    exact = logits.detach().double().requires_grad_()
    wanted, _ = oracle.route(exact, 2, score="sigmoid")
    bound = weights_bound(logits.detach())
    assert (found.double() - wanted).abs().max() <= bound and wanted[1].sum() < 0.9
    (got,) = torch.autograd.grad(found[:, 0].sum(), logits)
    (expected,) = torch.autograd.grad(wanted[:, 0].sum(), exact)
    assert (got.double() - expected).abs().max() <= 4 * bound  # a product of four such numbers


def test_chosen_experts_of_no_probability_still_share_the_weight() -> None:
    """Softmax gives those of the group that a bias prefers 0 in float32; their own softmax does not."""
    logits = torch.tensor([[200.0, 100.0, 1.0, 1.0]])
    weights, experts = route_top_k(logits, 2, bias=torch.tensor([0.0, 0.0, 2.0, 2.0]))
    assert experts.tolist() == [[2, 3]] and weights.tolist() == [[0.5, 0.5]]


# Derivatives ----------------------------------------------------------------------------------------------


@every_rule
def test_gradients(rule: dict[str, Any]) -> None:
    logits = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(12, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(5, 3, dtype=torch.float64)
    found, experts = route_top_k(logits, 3, bias=bias, **rule)
    wanted, _ = oracle.route(logits, 3, bias=bias.detach(), **rule)
    (got,) = torch.autograd.grad(found, logits, cotangent, retain_graph=True)
    (expected,) = torch.autograd.grad(wanted, logits, cotangent)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    assert torch.autograd.grad(found, bias, cotangent, allow_unused=True) == (None,)
    assert not experts.requires_grad


def test_gradgradcheck() -> None:
    logits = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    rule: dict[str, Any] = V3 | {"bias": torch.randn(8, dtype=torch.float64)}
    for options in ({}, rule):
        call = lambda x, options=options: route_top_k(x, 2, **options)[0]
        assert torch.autograd.gradcheck(call, logits)
        assert torch.autograd.gradgradcheck(call, logits, fast_mode=True)


# Ways to call ---------------------------------------------------------------------------------------------


def test_compiled_once(device: torch.device) -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(lambda x, b: route_top_k(x, 2, bias=b, **V3), fullgraph=True, backend=count)
    for _ in range(3):
        logits, bias = torch.randn(6, 8, device=device), torch.randn(8, device=device)
        for got, want in zip(compiled(logits, bias), route_top_k(logits, 2, bias=bias, **V3), strict=True):
            assert torch.equal(got, want)
    assert graphs == 1


def test_any_number_of_tokens_in_one_exported_program() -> None:
    class Router(torch.nn.Module):
        def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return route_top_k(logits, 2, **V3)

    shapes = {"logits": {0: torch.export.Dim("tokens", min=2, max=64)}}
    file = io.BytesIO()
    torch.export.save(torch.export.export(Router(), (torch.randn(6, 8),), dynamic_shapes=shapes), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    logits = torch.randn(9, 8)
    for got, want in zip(loaded(logits), route_top_k(logits, 2, **V3), strict=True):
        assert torch.equal(got, want)


def test_vmap() -> None:
    logits = torch.randn(3, 4, 8)
    weights, experts = torch.vmap(lambda x: route_top_k(x, 2, **V3))(logits)
    for i in range(3):
        want = route_top_k(logits[i], 2, **V3)
        assert torch.equal(experts[i], want[1])
        torch.testing.assert_close(weights[i], want[0])


def test_opcheck(device: torch.device) -> None:
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device.type == "cpu":
        checks.append("test_autograd_registration")
    logits = torch.randn(6, 8, device=device, requires_grad=True)
    arguments = (logits, torch.randn(8, device=device), 2, "sigmoid", 4, 2, "top2", True, 2.5)
    torch.library.opcheck(torch.ops.tpu_kernels.route_top_k.default, arguments, test_utils=checks)


def test_nothing_is_compiled_again_for_other_logits() -> None:
    route_top_k(torch.randn(6, 8), 2, **V3)
    before = bridge.stats().compiles
    route_top_k(torch.randn(6, 8), 2, **V3)
    assert bridge.stats().compiles == before


# Refusals -------------------------------------------------------------------------------------------------

LOGITS = torch.randn(4, 6)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"logits": LOGITS.int()}, TypeError, "logits must be float16, .*int32"),
        ({"logits": [[1.0]]}, TypeError, "logits must be a torch.Tensor, got list"),
        ({"logits": LOGITS[0]}, RuntimeError, r"logits must be \[T, E\], got \[6\]"),
        ({"bias": torch.zeros(6).int()}, TypeError, "bias must be float16"),
        ({"bias": torch.zeros(5)}, RuntimeError, r"bias must be \[6\], .*got \[5\]"),
        ({"bias": torch.zeros(6, device="tpu")}, RuntimeError, "logits on cpu and bias on tpu:0"),
        ({"k": 0}, ValueError, "k must be between 1 and 6, for the 6 experts of logits, got 0"),
        ({"k": 7}, ValueError, "k must be between 1 and 6, .*got 7"),
        ({"k": True}, TypeError, "k must be an int, got True"),
        ({"k": 2.0}, TypeError, "k must be an int, got 2.0"),
        ({"score": "relu"}, ValueError, "score must be one of 'softmax', 'sigmoid', got 'relu'"),
        ({"group_score": "mean"}, ValueError, "group_score must be one of 'max', 'top2', got 'mean'"),
        ({"groups": 2}, ValueError, "together, got groups=2 and top_groups=None"),
        ({"top_groups": 2}, ValueError, "together, got groups=None and top_groups=2"),
        ({"groups": 4, "top_groups": 1}, ValueError, "6 experts don't divide into 4 groups"),
        ({"groups": 0, "top_groups": 1}, ValueError, "groups must be between 1 and 6"),
        ({"groups": 2, "top_groups": 3}, ValueError, "top_groups must be between 1 and 2, the 2 groups"),
        ({"groups": 2.0, "top_groups": 1}, TypeError, "groups must be an int"),
        (
            {"k": 4, "groups": 3, "top_groups": 1},
            ValueError,
            "k must be at most 2, the experts of 1 groups of 2, got 4",
        ),
        (
            {"groups": 6, "top_groups": 2, "group_score": "top2"},
            ValueError,
            "'top2' needs groups of at least 2 experts, got groups of 1",
        ),
        ({"renormalize": 1}, TypeError, "renormalize must be a bool, got 1"),
        ({"scale": "2"}, TypeError, "scale must be a float, got '2'"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"route_top_k: .*{message}"):
        route_top_k(**({"logits": LOGITS, "k": 2} | changed))

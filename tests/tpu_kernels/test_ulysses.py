"""`tpu_kernels.ulysses_attention`: against attention written out in float64, within bounds derived for it."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bridge import get_pallas_mesh
from bridge.ranks import RankError, run
from tpu_kernels import ScoreMod, masks, shard_sequence, splash_attention, ulysses_attention, unshard_sequence
from tpu_kernels.masks import Mask
from tpu_kernels.ring_attention.layouts import Layout

from .splash_attention import oracle
from .splash_attention.oracle import Case, Gradients

Axis = str | tuple[str, str]


def make(
    length: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    mask: Mask | None = None,
    visible: torch.Tensor | None = None,
    **options: Any,
) -> Case:
    """Two batch entries, and cotangents for both results. Of `options`, some are tensors with gradients."""
    q, k = torch.randn(2, heads, length, 8), torch.randn(2, kv_heads, length, 8)
    v, g = torch.randn(2, kv_heads, length, 6), torch.randn(2, heads, length, 6)
    moved = {
        name: options.pop(name)
        for name in ("bias", "sinks", "alibi_slopes", "table", "weights")
        if name in options
    }
    tensors = {name: t.to(dtype) for name, t in {"query": q, "key": k, "value": v}.items()} | moved
    return Case(tensors, g.to(dtype), torch.randn(2, heads, length), visible, mask, options)


def spread(case: Case, layout: Layout, mesh: Any, axis: Axis, device: str) -> Gradients:
    """What one rank has of the results and gradients. The loss is that of rank 0, over the whole."""
    length = case.scores[2]

    def function(q: Any, k: Any, v: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = {name: options.pop(name) for name in ("q_segment_ids", "kv_segment_ids") if name in options}
        parts = (shard_sequence(t, mesh, axis, 2, layout) for t in (q, k, v))
        ids = {name: shard_sequence(t, mesh, axis, 1, layout) for name, t in ids.items()}
        o, lse = ulysses_attention(*parts, mesh, axis, layout=layout, length=length, **ids, **options)
        assert o.is_contiguous()
        whole = (unshard_sequence(t, mesh, axis, 2, length, layout) for t in (o, lse))
        o, lse = whole
        return o, lse

    assert case.g_lse is not None
    if dist.get_rank():
        case = replace(case, g=torch.zeros_like(case.g), g_lse=torch.zeros_like(case.g_lse))
    return oracle.run(case, device=device, function=function)


def together(found: list[Gradients]) -> Gradients:
    """Every rank has the results; gradients add up."""
    for name in ("o", "lse"):
        assert all(torch.equal(one[name], found[0][name]) for one in found)
    whole = {name: torch.stack([one[name] for one in found]).sum(0) for name in found[0]}
    return whole | {"o": found[0]["o"], "lse": found[0]["lse"]}


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def _causal(length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> Case:
    return make(length, heads, kv_heads, dtype, masks.causal(), causal(length))


def _segments(length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> Case:
    ids = torch.stack([torch.arange(length) // 5, torch.arange(length) // 4])
    visible = causal(length) & (ids[:, None, :, None] == ids[:, None, None, :])
    return make(length, heads, kv_heads, dtype, masks.causal(), visible, q_segment_ids=ids)


def _by_head(length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> Case:
    """All that depends on the head: in a mask by itself and in an index, in a score_mod, and tensors."""
    table = torch.rand(heads, length, length) < 0.8
    h, q, kv = torch.arange(heads)[:, None, None], torch.arange(length)[:, None], torch.arange(length)
    mask = masks.tensor(table) & masks.function(lambda b, h, q, kv: q - kv <= 3 + h)
    tensors = {
        "bias": torch.randn(2, heads, length, length, dtype=dtype),
        "sinks": torch.randn(heads, dtype=dtype),
        "alibi_slopes": torch.rand(heads, dtype=dtype),
        "weights": torch.rand(heads, dtype=dtype) + 0.5,
    }
    return make(length, heads, kv_heads, dtype, mask, table & (q - kv <= 3 + h), soft_cap=5.0, **tensors)


def _own_tensors(length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> Case:
    """Tensors that each rank has its part of, in the same program."""
    tensors = {"sinks": torch.randn(heads, dtype=dtype), "alibi_slopes": torch.rand(heads, dtype=dtype)}
    return make(length, heads, kv_heads, dtype, masks.causal(), causal(length), **tensors)


SLOW = pytest.mark.slow
CASES = [
    pytest.param(1, "zigzag", _causal, (13, 2, 1), torch.float32, "cpu", id="1 rank"),
    pytest.param(2, "contiguous", _segments, (13, 4, 2), torch.float32, "tpu", id="segments"),
    pytest.param(2, "zigzag", _by_head, (9, 4, 2), torch.float64, "cpu", id="by head, float64", marks=SLOW),
    pytest.param(4, "zigzag", _causal, (17, 4, 1), torch.bfloat16, "cpu", id="one key head"),
    pytest.param(
        4, "contiguous", _own_tensors, (5, 12, 3), torch.float64, "cpu", id="three key heads", marks=SLOW
    ),
    pytest.param(2, "zigzag", _by_head, (9, 4, 2), torch.float32, "cpu", id="by head", marks=SLOW),
    pytest.param(2, "contiguous", _causal, (13, 4, 2), torch.float16, "cpu", id="float16", marks=SLOW),
    pytest.param(4, "contiguous", _causal, (13, 8, 2), torch.float64, "tpu", id="float64", marks=SLOW),
    pytest.param(8, "zigzag", _segments, (33, 8, 4), torch.float32, "cpu", id="8 ranks", marks=SLOW),
]


@pytest.mark.parametrize(("size", "layout", "form", "sizes", "dtype", "device"), CASES)
def test_results_and_gradients(
    size: int, layout: Layout, form: Callable[..., Case], sizes: tuple[int, int, int], dtype: Any, device: str
) -> None:
    case = form(*sizes, dtype)
    found = run(lambda: spread(case, layout, get_pallas_mesh("x"), "x", device), size)
    oracle.check(case, together(found), "reference" if dtype == torch.float64 else "pallas")


def test_what_depends_on_the_head() -> None:
    """The forward alone: ranks have programs of their own here, which take long to make."""
    case = _by_head(9, 4, 2, torch.float64)
    given = dict(case.tensors)
    q, k, v, weights = (given.pop(name) for name in ("query", "key", "value", "weights"))

    def check() -> torch.Tensor:
        mesh = get_pallas_mesh("x")
        parts = (shard_sequence(t, mesh, "x", 2, layout="zigzag") for t in (q, k, v))
        options = {"layout": "zigzag", "length": 9, "mask": case.mask, "soft_cap": 5.0, **given}
        options["score_mod"] = lambda score, b, h, q, kv: score * weights[h]
        return unshard_sequence(
            ulysses_attention(*parts, mesh, "x", **options), mesh, "x", 2, 9, layout="zigzag"
        )

    for o in run(check, 2):
        torch.testing.assert_close(o, oracle.expected(case)["o"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a")])
def test_two_axes(axis: tuple[str, str]) -> None:
    """Each rank's heads have sinks of their own, so heads and their tensors must go the same way."""
    case = _own_tensors(7, 4, 2, torch.float64)

    def check() -> torch.Tensor:
        mesh = get_pallas_mesh(("a", "b"), (2, 2))
        q, k, v, sinks, slopes = case.tensors.values()
        parts = (shard_sequence(t, mesh, axis, 2, layout="zigzag") for t in (q, k, v))
        options = {"mask": masks.causal(), "sinks": sinks, "alibi_slopes": slopes, "length": 7}
        o = ulysses_attention(*parts, mesh, axis, layout="zigzag", **options)
        return unshard_sequence(o, mesh, axis, 2, 7, layout="zigzag")

    for o in run(check, 4):
        torch.testing.assert_close(o, oracle.expected(case)["o"], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a")])
def test_gradients_along_two_axes(axis: tuple[str, str]) -> None:
    case = _own_tensors(11, 4, 2, torch.float64)
    found = run(lambda: spread(case, "zigzag", get_pallas_mesh(("a", "b"), (2, 2)), axis, "cpu"), 4)
    oracle.check(case, together(found), "reference")


def test_ranks_that_differ_in_another_axis() -> None:
    """They have other sequences, and nothing to do with each other."""
    cases = [_causal(9, 2, 2, torch.float64) for _ in range(2)]

    def check() -> torch.Tensor:
        mesh = get_pallas_mesh(("data", "x"), (2, 2))
        case = cases[dist.get_rank() // 2]
        parts = (
            shard_sequence(case.tensors[name], mesh, "x", 2, layout="zigzag")
            for name in ("query", "key", "value")
        )
        o = ulysses_attention(*parts, mesh, "x", layout="zigzag", length=9, mask=masks.causal())
        return unshard_sequence(o, mesh, "x", 2, 9, layout="zigzag")

    found = run(check, 4)
    for i, case in enumerate(cases):
        for o in found[2 * i : 2 * i + 2]:
            torch.testing.assert_close(o, oracle.expected(case)["o"], rtol=1e-12, atol=1e-12)


def test_queries_and_keys_of_different_lengths() -> None:
    q, k = torch.randn(2, 6, 4, dtype=torch.float64), torch.randn(2, 10, 4, dtype=torch.float64)
    q_ids, kv_ids = torch.arange(6) // 3, torch.arange(10) // 5

    def check() -> torch.Tensor:
        mesh = get_pallas_mesh("x")
        parts = (shard_sequence(t, mesh, "x", 1, "contiguous") for t in (q, k, k))
        ids = [shard_sequence(t, mesh, "x", 0, "contiguous") for t in (q_ids, kv_ids)]
        o = ulysses_attention(*parts, mesh, "x", q_segment_ids=ids[0], kv_segment_ids=ids[1])
        return unshard_sequence(o, mesh, "x", 1, 6, "contiguous")

    scores = (q @ k.mT / 2).masked_fill(q_ids[:, None] != kv_ids, -math.inf)
    for o in run(check, 2):
        torch.testing.assert_close(o, scores.softmax(-1) @ k, rtol=1e-12, atol=1e-12)


def test_padding_has_no_result_and_no_gradient() -> None:
    """Whatever it holds."""

    def check() -> None:
        mesh = get_pallas_mesh("x")
        last = dist.get_rank() == 1
        parts = [torch.randn(2, 4, 8) for _ in range(3)]  # of five positions, the last rank has one
        if last:
            for part in parts:
                part[:, 1:] = math.nan
        parts = [part.requires_grad_() for part in parts]
        o, lse = ulysses_attention(*parts, mesh, "x", length=5, return_lse=True)
        assert not o.isnan().any()
        assert bool((o[:, 1:] == 0).all()) == last
        assert bool((lse[:, 1:] == -math.inf).all()) == last
        for gradient in torch.autograd.grad(o.sum() + lse[:, :1].sum(), parts):
            assert not gradient.isnan().any()
            assert not last or not gradient[:, 1:].any()

    run(check, 2)


def test_second_gradients() -> None:
    tensors = [torch.randn(2, 4, 7, 8, dtype=torch.float64) for _ in range(3)]

    def second(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.pow(3).sum() for g in first), leaves))

    expected = second(lambda q, k, v: splash_attention(q, k, v, mask=masks.causal()))

    def check() -> list[torch.Tensor]:
        mesh = get_pallas_mesh("x")

        def function(*whole: torch.Tensor) -> torch.Tensor:
            parts = (shard_sequence(t, mesh, "x", 2, layout="zigzag") for t in whole)
            return ulysses_attention(*parts, mesh, "x", layout="zigzag", length=7, mask=masks.causal())

        return second(function)

    found = run(check, 2)
    for one, two, want in zip(*found, expected, strict=True):
        torch.testing.assert_close(one + two, want, rtol=1e-10, atol=1e-10)


def test_dropout_differs_by_head_on_all_ranks() -> None:
    """With equal scores and values that are the unit matrix, the output is what has been kept."""
    length, heads = 16, 4

    def check() -> torch.Tensor:
        mesh = get_pallas_mesh("x")
        zeros = torch.zeros(heads, length // 2, length)
        unit = torch.eye(length).expand(heads, length, length)
        value = shard_sequence(unit, mesh, "x", 1, "contiguous")
        o = ulysses_attention(zeros, zeros, value, mesh, "x", dropout_p=0.5, seed=7)
        again = ulysses_attention(zeros, zeros, value, mesh, "x", dropout_p=0.5, seed=7)
        assert torch.equal(o, again)
        other = ulysses_attention(zeros, zeros, value, mesh, "x", dropout_p=0.5, seed=8)
        assert not torch.equal(o, other)
        return unshard_sequence(o, mesh, "x", 1, length, "contiguous")

    o = run(check, 2)[0]
    kept = o > 0
    assert torch.equal(o, torch.where(kept, 2 / length, 0.0))
    # Of independent bits half are equal; 8 standard deviations of their number, sqrt(256) / 2, are 64.
    for a in range(heads):
        for b in range(a):
            assert abs(int((kept[a] == kept[b]).sum()) - length**2 / 2) < 64, (a, b)


def test_compiled() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        slopes = torch.rand(4, dtype=torch.float32)
        score_mod = ScoreMod.trace(lambda score, b, h, q, kv: score - slopes[h] * (q - kv))

        def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return ulysses_attention(q * 2, k, v, mesh, "x", mask=masks.causal(), score_mod=score_mod)

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        torch.manual_seed(dist.get_rank())
        one = [torch.randn(1, heads, 4, 8).requires_grad_() for heads in (4, 2, 2)]
        two = [t.detach().clone().requires_grad_() for t in one]
        got, expected = compiled(*one), step(*two)
        assert torch.equal(got, expected)
        got.sum().backward()
        expected.sum().backward()
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    run(check, 2)


def test_autocast() -> None:
    def check() -> None:
        q = torch.randn(2, 4, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert ulysses_attention(q, q, q, get_pallas_mesh("x"), "x").dtype == torch.bfloat16

    run(check, 1)


def _mistakes(mesh: Any) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    q, odd, keys = torch.zeros(1, 4, 6, 8), torch.zeros(1, 3, 6, 8), torch.zeros(1, 4, 5, 8)
    ids, small = torch.zeros(1, 5, dtype=torch.int32), torch.zeros(2)
    layout: Any = "striped"

    def call(q: torch.Tensor = q, k: torch.Tensor = q, **options: Any) -> Callable[[], Any]:
        return lambda: ulysses_attention(q, k, k, mesh, "x", **options)

    return [
        (call(odd, odd), ValueError, "multiple of 2 heads, .* got 3; tpu_kernels.ring_attention"),
        (call(q[0, 0], q[0, 0]), RuntimeError, r"query must be \[..., heads, length, head dimension\]"),
        (call(length=13), ValueError, "2 ranks with 6 positions each have 12, got length=13"),
        (call(q, keys, length=9), ValueError, "this rank has 6 and 5 of them; leave it out"),
        (call(length=True), TypeError, "length must be an int"),
        (call(layout=layout), ValueError, "layout must be one of"),
        (call(sinks=small), RuntimeError, r"sinks must have all 4 query heads along dimension -1, got \[2\]"),
        (call(bias=torch.zeros(2, 12, 12)), RuntimeError, "bias must have all 4 query heads"),
        (call(mask=torch.ones(2, 12, 12) > 0), RuntimeError, "mask must have all 4 query heads"),
        (
            call(mask=masks.tensor(torch.ones(2, 12, 12) > 0)),
            ValueError,
            r"must be \[4 or 1, 12 or 1, 12 or 1\]",
        ),
        (
            call(score_mod=lambda score, b, h, q, kv: score + small[h]),
            RuntimeError,
            r"shape \[2\] is indexed by h in dimension 0 .* needs all 4 heads",
        ),
        (call(q_segment_ids=ids), RuntimeError, r"length 6 of this rank's part, got \[1, 5\]"),
        (call(q_segment_ids=ids.float()), TypeError, "q_segment_ids must be integers"),
        (call(soft_cup=1.0), TypeError, "soft_cup"),
        (call(q.half(), q), TypeError, "must have the same dtype"),
    ]


def test_mistakes() -> None:
    def check() -> None:
        for call, error, text in _mistakes(get_pallas_mesh("x")):
            with pytest.raises(error, match=text):
                call()

    run(check, 2)


@pytest.mark.parametrize("differing", ["scale", "mask", "layout", "length"])
def test_ranks_with_other_arguments(differing: str) -> None:
    """All collectives are the same then, and what is computed between them is not: numbers would be wrong."""

    def check() -> None:
        mesh, first = get_pallas_mesh("x"), dist.get_rank() == 0
        x = torch.zeros(1, 2, 4, 8)
        options: Any = {
            "scale": {"scale": 0.1 if first else None},
            "mask": {"mask": masks.causal() if first else None},
            "layout": {"layout": "zigzag" if first else "contiguous"},
            "length": {"length": 7 if first else 8},
        }[differing]
        ulysses_attention(x, x, x, mesh, "x", **options)

    with pytest.raises(RankError, match="the ranks of a mesh must make the same calls"):
        run(check, 2)

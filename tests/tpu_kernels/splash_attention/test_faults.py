"""Faults that people reported of other attention kernels and of bridges to them: here each is right.

The numbers in the names are those of the list the project started from.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpu_kernels import masks, splash_attention
from tpu_kernels.splash_attention.tiling import SplashTiling

from . import oracle

every_implementation = pytest.mark.parametrize("impl", ["pallas", "reference"])
quick_in_the_kernel = pytest.mark.parametrize(
    "impl", ["pallas", pytest.param("reference", marks=pytest.mark.slow)]
)


def random_case(
    q_len: int,
    kv_len: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    heads: int = 1,
    dtype: torch.dtype = torch.float32,
    mask: Any = None,
    visible: torch.Tensor | None = None,
) -> oracle.Case:
    """A call with normal values."""
    value_dim = head_dim if value_dim is None else value_dim
    shapes = {"query": (q_len, head_dim), "key": (kv_len, head_dim), "value": (kv_len, value_dim)}
    tensors = {name: torch.randn(1, heads, *shape).to(dtype) for name, shape in shapes.items()}
    g = torch.randn(1, heads, q_len, value_dim).to(dtype)
    return oracle.Case(tensors, g, mask=mask, visible=visible)


@quick_in_the_kernel
def test_36_a_row_that_sees_nothing(impl: str) -> None:
    """Peers give it the mean of some block of values, and a gradient."""
    visible = torch.ones(256, 256, dtype=torch.bool).tril()
    visible[5] = False
    case = random_case(256, 256, 128, mask=visible, visible=visible)
    results = oracle.run(case, impl=impl)
    assert not results["o"][0, 0, 5].any() and not results["query"][0, 0, 5].any()
    oracle.check(case, results, impl)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_37_the_lowest_number_is_a_number(impl: str, dtype: torch.dtype) -> None:
    """A row whose bias is all finfo.min is the mean of all values, as in torch; not 0, and not NaN."""
    case = random_case(140, 140, 64, dtype=dtype)
    bias = torch.zeros(140, 140, dtype=dtype).masked_fill(
        torch.ones(140, 140).triu(1) > 0, torch.finfo(dtype).min
    )
    bias[5] = torch.finfo(dtype).min
    q, k, v = (case.tensors[name] for name in ("query", "key", "value"))
    o = splash_attention(q, k, v, bias=bias, impl=impl)  # pyright: ignore[reportArgumentType]
    q, k, v, bias, o = (t.double() for t in (q, k, v, bias, o))
    p = (q @ k.mT / 8 + bias).softmax(-1)
    assert bool((p[..., 5, :] == 1 / 140).all())
    # A mean of values of v: in bfloat16 p, its products with v and the result may be rounded. In float32 p
    # errs as its score: 64 roundings of sums of size 4, of either sign, are together one of sqrt(64) * 4.
    units = 3 if dtype == torch.bfloat16 else 8 * 4
    assert bool(((o - p @ v).abs() <= units * torch.finfo(dtype).eps / 2 * (p @ v.abs())).all())


def test_37_float16_scores_survive_its_lowest_number() -> None:
    q, k, v = (t.half() for t in torch.randn(3, 1, 1, 9, 16))
    row = torch.full((9, 9), torch.finfo(torch.float16).min, dtype=torch.float16)
    o = splash_attention(q, k, v, bias=row)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    # float32 holds scores next to -65504 to 2**-8 (half of a unit there): p is off by that much.
    assert (o - expected).abs().max() <= 2 * (2**-8 + torch.finfo(torch.float16).eps) * v.abs().max()
    assert (o - v.double().mean(2)).abs().max() > 0.1


@quick_in_the_kernel
def test_39_causal_and_a_mask(impl: str) -> None:
    visible = torch.rand(130, 130) < 0.5
    case = random_case(
        130,
        130,
        16,
        mask=masks.causal() & masks.tensor(visible),
        visible=visible & torch.ones(130, 130, dtype=torch.bool).tril(),
    )
    oracle.check(case, oracle.run(case, impl=impl), impl)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(1, 1), (80, 80), (256, 256), (192, 128)]
    + [
        pytest.param(*dims, marks=pytest.mark.slow)
        for dims in ((8, 8), (64, 64), (72, 72), (96, 96), (112, 112), (64, 200))
    ],
)
def test_41_head_dims(head_dim: int, value_dim: int) -> None:
    """With the default scale, which is that of the dimension before any padding."""
    case = random_case(40, 40, head_dim, value_dim)
    oracle.check(case, oracle.run(case, impl="pallas"), "pallas")


LENGTHS = [(1, 1), (7, 77), (77, 7), (127, 129), (129, 127), (1, 200), (200, 1), (300, 1025)]
QUICK = [(77, 7, True), (127, 129, True), (200, 1, False), (300, 1025, False)]
"""The others take as long, to compile what is interpreted, and are slow tests."""


@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal"),
    QUICK
    + [
        pytest.param(*lengths, causal, marks=pytest.mark.slow)
        for causal in (False, True)
        for lengths in LENGTHS
        if (*lengths, causal) not in QUICK
    ],
)
def test_42_lengths(q_len: int, kv_len: int, causal: bool) -> None:
    mask, visible = None, None
    if causal:
        mask, visible = masks.causal(), torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    case = random_case(q_len, kv_len, 16, mask=mask, visible=visible)
    oracle.check(case, oracle.run(case, impl="pallas"), "pallas")


@pytest.mark.parametrize(
    ("shape", "impl"),
    [
        ((1, 1, 64, 64), "reference"),
        ((1, 1, 1, 64), "pallas"),
        ((2, 1, 64), "reference"),
        pytest.param((1, 1, 64, 64), "pallas", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 64), "reference", marks=pytest.mark.slow),
        pytest.param((2, 1, 64), "pallas", marks=pytest.mark.slow),
    ],
)
def test_44_the_gradient_of_a_bias_alone(shape: tuple[int, ...], impl: str) -> None:
    """Also where it is expanded: by us, or by the caller."""
    q, k, v, g = torch.randn(4, 1, 2, 64, 32)
    for expand in (False, True):
        bias = torch.randn(shape, requires_grad=True)
        given = bias.expand(1, 2, 64, 64) if expand else bias
        o = splash_attention(q, k, v, bias=given, impl=impl)  # pyright: ignore[reportArgumentType]
        (gradient,) = torch.autograd.grad(o, bias, g)
        wide = bias.detach().double().requires_grad_()
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide)
        (expected,) = torch.autograd.grad(exact, wide, g.double())
        case = oracle.Case({"query": q, "key": k, "value": v, "bias": bias.detach()}, g)
        allowed = torch.from_numpy(oracle.tolerances(case, impl)["bias"])
        assert gradient.shape == bias.shape and expected.abs().max() > 0.1
        assert bool(((gradient - expected).abs() <= allowed + 2**-24 * expected.abs()).all())


def test_48_packed_segments_of_odd_lengths() -> None:
    lengths = [128, 128, 128, 57, 159]
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[None]
    q, k, v = (t.bfloat16() for t in torch.randn(3, 1, 1, 600, 80))
    packed = splash_attention(q, k, v, mask=masks.causal(), q_segment_ids=ids, impl="pallas")
    parts = [
        splash_attention(*part, mask=masks.causal(), impl="pallas")
        for part in zip(*(t.split(lengths, 2) for t in (q, k, v)), strict=True)
    ]
    case = oracle.Case(
        {"query": q, "key": k, "value": v}, torch.zeros_like(q), visible=ids[0, :, None] == ids
    )
    allowed = 2 * torch.from_numpy(oracle.tolerances(case, "pallas")["o"])
    difference = (packed.double() - torch.cat(parts, 2).double()).abs()
    assert bool((difference <= allowed + torch.finfo(torch.bfloat16).eps * packed.abs().double()).all())


@pytest.mark.parametrize("name", ["key", "value"])
def test_what_no_query_sees_leaks_nothing(name: str) -> None:
    """NaN in tiles that are skipped as a whole, behind the lengths, reaches neither results nor gradients."""
    q, k, v, g = torch.randn(4, 1, 1, 300, 32)
    expected = splash_attention(q[:, :, :100], k[:, :, :100], v[:, :, :100], impl="pallas")
    spoiled = {"key": k, "value": v, name: {"key": k, "value": v}[name].clone()}
    spoiled[name][:, :, 256:] = float("nan")
    q, k, v = (t.requires_grad_() for t in (q, spoiled["key"], spoiled["value"]))
    small = SplashTiling(128, 128, 128, 128, 128, 128, 128, 128)
    o = splash_attention(q, k, v, mask=masks.lengths(torch.tensor([100])), impl="pallas", tiling=small)
    assert torch.isfinite(o).all()
    torch.testing.assert_close(o[:, :, :100], expected, rtol=1e-4, atol=1e-5)
    for t, gradient in zip((q, k, v), torch.autograd.grad(o, (q, k, v), g), strict=True):
        assert torch.isfinite(gradient).all() and gradient.shape == t.shape


def test_27_sizes_of_a_compiled_result() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        return splash_attention(q, q, q)

    q = torch.randn(2, 3, 33, 80)
    o = torch.compile(attend, fullgraph=True, backend="aot_eager")(q)
    assert o.shape == q.shape and o.stride() == (3 * 33 * 80, 33 * 80, 80, 1)
    assert o.untyped_storage().nbytes() == q.numel() * 4

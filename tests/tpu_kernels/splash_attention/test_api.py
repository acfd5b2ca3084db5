"""`tpu_kernels.splash_attention`: what it takes, what it means, and what it refuses."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpu_kernels
from tpu_kernels import ScoreMod, SplashTiling, masks, splash_attention


def make(
    *shape: int, heads: int = 2, kv_heads: int | None = None, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """query [*shape, heads, 5, 4], key [*shape, kv_heads, 7, 4] and value [*shape, kv_heads, 7, 3]."""
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = ((heads, 5, 4), (kv_heads, 7, 4), (kv_heads, 7, 3))
    return [torch.randn(*shape, *size, dtype=dtype) for size in sizes]


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to float64's rounding in sums of a few numbers of size 1."""
    assert actual.shape == wanted.shape
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


# Shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 3)])
def test_any_number_of_batch_dimensions(batch: tuple[int, ...]) -> None:
    q, k, v = make(*batch)
    o, lse = splash_attention(q, k, v, return_lse=True)
    close(o, F.scaled_dot_product_attention(q, k, v))
    close(lse, torch.logsumexp(q @ k.mT / 2, -1))
    assert o.is_contiguous() and lse.is_contiguous()


def test_without_the_heads_dimension() -> None:
    q, k, v = (t[0] for t in make())
    o, lse = splash_attention(q, k, v, bias=torch.ones(5, 7, dtype=q.dtype), return_lse=True)
    close(o, F.scaled_dot_product_attention(q, k, v))
    assert lse.shape == (5,)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape"),
    [
        ((2, 1), (1, 3), (1, 3)),  # batch of key and value, heads of query
        ((2, 4), (1, 1), (2, 4)),  # heads of key and value differ
        ((2, 3, 4), (3, 4), (1, 1, 4)),  # ranks differ
        ((1, 2), (5, 2), (1, 2)),  # batch of key alone
    ],
)
def test_broadcasting_as_torch(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> None:
    q, k, v = (
        torch.randn(*shape, n, d, dtype=torch.float64, requires_grad=True)
        for shape, n, d in ((q_shape, 5, 4), (k_shape, 7, 4), (v_shape, 7, 3))
    )
    ours, torchs = splash_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
    close(ours, torchs)
    g = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (q, k, v), g), torch.autograd.grad(torchs, (q, k, v), g), strict=True
    ):
        close(mine, theirs)


@pytest.mark.parametrize(("heads", "k_heads", "v_heads"), [(4, 2, 2), (4, 1, 1), (6, 2, 3), (4, 2, 4)])
def test_grouped_heads(heads: int, k_heads: int, v_heads: int) -> None:
    q, k, _ = make(2, heads=heads, kv_heads=k_heads)
    v = make(2, heads=v_heads)[2]
    repeated = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    close(splash_attention(q, k, v), F.scaled_dot_product_attention(q, *repeated))


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "value_dim"),
    [
        ((0, 2, 5, 4), (0, 2, 7, 4), 3),
        ((2, 2, 0, 4), (2, 2, 7, 4), 3),
        ((2, 2, 5, 4), (2, 2, 0, 4), 3),
        ((2, 2, 5, 0), (2, 2, 7, 0), 3),
        ((2, 2, 5, 4), (2, 2, 7, 4), 0),
        ((2, 0, 5, 4), (2, 0, 7, 4), 3),
    ],
)
def test_empty(q_shape: tuple[int, ...], k_shape: tuple[int, ...], value_dim: int) -> None:
    q, k = torch.randn(q_shape, requires_grad=True), torch.randn(k_shape, requires_grad=True)
    v = torch.randn(*k_shape[:-1], value_dim, requires_grad=True)
    mask = masks.causal("bottom_right") & masks.key_padding(torch.ones(k_shape[0], k_shape[2]) > 0)
    bias = torch.zeros(q_shape[1], 1, k_shape[2])
    o, lse = splash_attention(q, k, v, mask=mask, bias=bias, return_lse=True)
    assert o.shape == (*q_shape[:-1], value_dim) and lse.shape == q_shape[:-1]
    if k_shape[2] == 0:
        assert not o.any() and (lse == -torch.inf).all()
    if q_shape[-1] == 0:  # scores of nothing are 0: the mean of what a query sees
        torch.testing.assert_close(o[0, 0, -1], v[0, 0].mean(0))
    o.sum().backward()
    for t in (q, k, v):
        assert t.grad is not None and t.grad.shape == t.shape and not t.grad.isnan().any()


@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_one_query_and_one_key(impl: Any) -> None:
    q, k, v = (torch.randn(1, 1, 1, 1) for _ in range(3))
    assert torch.equal(splash_attention(q, k, v, impl=impl), v)


# Arguments ----------------------------------------------------------------------------------------


def test_order_of_score_changes() -> None:
    q, k, v = make(2)
    bias, slopes = torch.randn(2, 5, 7, dtype=torch.float64), torch.tensor([0.5, 0.25], dtype=torch.float64)
    s = 0.3 * q @ k.mT
    s = 2 * torch.tanh(s / 2)
    s = s * 3 + 1
    s = s - slopes[:, None, None] * (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
    s = s + bias
    ours, lse = splash_attention(
        q,
        k,
        v,
        scale=0.3,
        soft_cap=2,
        score_mod=lambda score, b, h, i, j: score * 3 + 1,
        alibi_slopes=slopes,
        bias=bias,
        return_lse=True,
    )
    close(ours, s.softmax(-1) @ v)
    close(lse, s.logsumexp(-1))


def test_a_traced_score_mod_is_the_same() -> None:
    q, k, v = make(2)
    table = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + table[b]

    traced = ScoreMod.trace(score_mod)
    a = splash_attention(q, k, v, score_mod=score_mod, sinks=torch.zeros(2, dtype=torch.float64))
    b = splash_attention(q, k, v, score_mod=traced, sinks=torch.zeros(2, dtype=torch.float64))
    assert torch.equal(a, b)
    (gradient,) = torch.autograd.grad(b.sum(), table)
    assert gradient.abs().min() > 0


def test_bool_masks_and_expressions_agree() -> None:
    q, k, v = make(2)
    dense = torch.ones(5, 7, dtype=torch.bool).tril(2)
    expected = F.scaled_dot_product_attention(q, k, v, dense)
    for mask in (dense, dense[None, None].expand(2, 2, 5, 7), masks.causal("bottom_right")):
        close(splash_attention(q, k, v, mask=mask), expected)
    merged = splash_attention(q, k, v, mask=masks.causal(offset=3) & masks.causal(offset=2))
    close(merged, expected)


def test_masks_count_all_batch_dimensions_as_one() -> None:
    q, k, v = make(2, 3)
    lengths = torch.tensor([1, 2, 3, 4, 5, 7])
    ours = splash_attention(q, k, v, mask=masks.lengths(lengths))
    dense = (torch.arange(7) < lengths[:, None]).view(2, 3, 1, 1, 7)
    close(ours, F.scaled_dot_product_attention(q, k, v, dense))
    close(splash_attention(q, k, v, mask=dense), ours)


def test_segments() -> None:
    q, k, v = make(2, 3)
    q_ids, kv_ids = torch.randint(0, 2, (3, 5)), torch.randint(0, 2, (2, 1, 7))
    dense = q_ids[:, None, :, None] == kv_ids[:, :, None, None, :]
    ours = splash_attention(q, k, v, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    close(ours, F.scaled_dot_product_attention(q, k, v, dense))
    same = splash_attention(q, q, q, q_segment_ids=q_ids)
    close(same, F.scaled_dot_product_attention(q, q, q, q_ids[:, None, :, None] == q_ids[:, None, None]))


def test_sinks_take_probability() -> None:
    q, k, v = make(2)
    sinks = torch.tensor([0.5, -torch.inf], dtype=torch.float64)
    s = torch.cat([q @ k.mT / 2, sinks[:, None, None].expand(2, 2, 5, 1)], -1)
    o, lse = splash_attention(q, k, v, sinks=sinks, return_lse=True)
    close(o, s.softmax(-1)[..., :-1] @ v)
    close(lse, s.logsumexp(-1))


# The quick sample of test_fuzz.py has such rows with sinks in the kernel.
@pytest.mark.parametrize("impl", [pytest.param("pallas", marks=pytest.mark.slow), "reference"])
def test_a_row_that_sees_nothing(impl: Any) -> None:
    q, k, v = (t.requires_grad_() for t in make(1, dtype=torch.float32))
    sinks = torch.tensor([1.0, 2.0], requires_grad=True)
    visible = torch.ones(5, 7, dtype=torch.bool)
    visible[3] = False
    o, lse = splash_attention(q, k, v, mask=visible, return_lse=True, impl=impl)
    assert not o[0, :, 3].any() and (lse[0, :, 3] == -torch.inf).all() and lse.isfinite().sum() == 8
    q_grad, k_grad, v_grad = torch.autograd.grad(o[0, :, 3].sum(), (q, k, v))
    assert not (q_grad.any() or k_grad.any() or v_grad.any())
    o, lse = splash_attention(q, k, v, mask=visible, sinks=sinks, return_lse=True, impl=impl)
    assert not o[0, :, 3].any() and torch.equal(lse[0, :, 3], sinks)
    (sink_grad,) = torch.autograd.grad(lse[0, :, 3].sum(), sinks)
    assert torch.equal(sink_grad, torch.ones(2))


# Dropout ------------------------------------------------------------------------------------------


def test_dropout_is_a_function_of_the_seed() -> None:
    q, k, v = make(2)
    first = splash_attention(q, k, v, dropout_p=0.5, seed=3)
    assert torch.equal(first, splash_attention(q, k, v, dropout_p=0.5, seed=torch.tensor(3)))
    assert torch.equal(
        first, splash_attention(q, k, v, dropout_p=0.5, seed=torch.tensor([3, 0], dtype=torch.int32))
    )
    assert not torch.equal(first, splash_attention(q, k, v, dropout_p=0.5, seed=4))
    assert not torch.equal(first, splash_attention(q, k, v, dropout_p=0.5, seed=3 + 2**32))
    negative = splash_attention(q, k, v, dropout_p=0.5, seed=-1)
    assert torch.equal(negative, splash_attention(q, k, v, dropout_p=0.5, seed=torch.tensor([-1])))
    assert torch.equal(negative, splash_attention(q, k, v, dropout_p=0.5, seed=2**64 - 1))


def test_dropout_draws_from_torchs_generator(device: torch.device) -> None:
    q, k, v = (t.to(device) for t in make(2))
    torch.manual_seed(5)
    first, second = (splash_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, splash_attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_dropout_keeps_the_mean() -> None:
    q, k = torch.zeros(1, 1, 2000, 1), torch.zeros(1, 1, 50, 1)
    v = torch.ones(1, 1, 50, 1)
    o = splash_attention(q, k, v, dropout_p=0.2, seed=1, impl="reference")
    # 100,000 draws of 0 or 1.25, so a standard deviation of 0.5 for each.
    assert abs(o.mean() - 1) < 5 * 0.5 / 100_000**0.5
    assert not splash_attention(q, k, v, dropout_p=1.0).any()


# Dtypes and autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v = (t.to(device) for t in make(2, dtype=dtype))
    bias = torch.randn(5, 7, device=device)
    o, lse = splash_attention(q, k, v, bias=bias, return_lse=True)
    assert o.dtype == dtype and o.device.type == device.type
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    q, k, v, bias, o = (t.cpu().double() for t in (q, k, v, bias, o))
    p = (q @ k.mT / 2 + bias).softmax(-1)
    # A mean of values of v: in half precision p, its products with v and the result may be rounded. In the
    # arithmetic's own, p errs as its score, of size 4 and rounded 4 times; exp, sums and quotient as much.
    units = 3 if dtype in (torch.float16, torch.bfloat16) else 2 * 4 * 4
    assert bool(((o - p @ v).abs() <= units * torch.finfo(dtype).eps / 2 * (p @ v.abs())).all())


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_torch(device: torch.device, compiled: bool) -> None:
    q, k, v = (t.to(device) for t in make(2, dtype=torch.float32))
    k, v = k.half(), v.half()
    slopes = torch.tensor([0.3, 0.7], device=device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return splash_attention(q, k, v, alibi_slopes=slopes)

    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    with torch.autocast(device.type, torch.bfloat16):
        o = function(q, k, v)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, attend(q.bfloat16(), k.bfloat16(), v.bfloat16()))  # slopes as they are
    with torch.autocast(device.type, torch.bfloat16):
        assert splash_attention(q.double(), k.double(), v.double()).dtype == torch.float64


# Refusals -------------------------------------------------------------------------------------------

IDS = torch.arange(9)
Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 8)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": Q[0, 0, 0]}, RuntimeError, r"query must be \[..., heads, length, head dimension\].*\[8\]"),
    ({"query": Q.long()}, TypeError, "query must be float16, .* got torch.int64"),
    ({"query": Q.bfloat16()}, TypeError, "must have the same dtype, got query torch.bfloat16, key"),
    ({"query": Q[..., :4]}, RuntimeError, r"same last dimension, got query \[2, 4, 5, 4\], key"),
    ({"value": V[:, :, 1:]}, RuntimeError, r"same length.*value \[2, 2, 6, 8\]"),
    ({"query": Q[:, :3]}, RuntimeError, r"multiple of the heads.*query \[2, 3, 5, 8\]"),
    ({"key": K[:, :0], "value": V[:, :0]}, RuntimeError, "multiple of the heads"),
    ({"key": K.expand(3, 2, 2, 7, 8)[:, :1].expand(3, 3, 2, 7, 8)}, RuntimeError, "batch dimensions"),
    ({"mask": torch.zeros(5, 7)}, TypeError, "bool, got torch.float32.*bias="),
    ({"mask": torch.zeros(2, 5, 7) > 0}, RuntimeError, r"mask must broadcast .*\[2, 4, 5, 7\].*\[2, 5, 7\]"),
    ({"mask": "causal"}, TypeError, "tpu_kernels.masks or a bool tensor, got str"),
    (
        {"mask": masks.key_padding(torch.ones(2, 6) > 0)},
        ValueError,
        r"keep of masks.key_padding must be \[2 or 1, 7\] \(\[B or 1, S\]\), got \[2, 6\]",
    ),
    ({"mask": masks.key_padding(torch.ones(9) > 0)}, ValueError, r"must be \[7\] \(\[S\]\), got \[9\]"),
    ({"mask": masks.key_padding(torch.ones(2, 1) > 0)}, ValueError, r"\[B or 1, S\].*got \[2, 1\]"),
    ({"mask": masks.tensor(torch.ones(2, 5, 5, 7) > 0)}, ValueError, r"\[2 or 1, 4 or 1, 5 or 1, 7 or 1\]"),
    ({"mask": masks.causal() & ~masks.tensor(torch.ones(6, 7) > 0)}, ValueError, r"\[5 or 1, 7 or 1\]"),
    ({"mask": masks.lengths(torch.ones(3).int())}, ValueError, r"kv_lengths of masks.lengths.*got \[3\]"),
    ({"mask": masks.prefix_lm(torch.ones(3).int())}, ValueError, r"prefix of masks.prefix_lm.*got \[3\]"),
    ({"mask": masks.segments(IDS[:1], IDS[:7])}, ValueError, r"q_ids of masks.segments must be \[5\].*\[1\]"),
    ({"mask": masks.segments(IDS[:5], IDS)}, ValueError, r"kv_ids of masks.segments must be \[7\].*\[9\]"),
    (
        {"mask": masks.segments(IDS[:5])},
        ValueError,
        r"q_ids of masks.segments, which stand for the keys, must be \[7\]",
    ),
    (
        {"mask": masks.full() & masks.segments(IDS[:5], IDS[:7]) | masks.key_padding(IDS > 0)},
        ValueError,
        r"keep of masks.key_padding must be \[7\]",
    ),
    (
        {"mask": masks.function(lambda b, h, q, kv: IDS[kv] > IDS[:4][q])},
        RuntimeError,
        r"shape \[4\].*at least 5 elements",
    ),
    (
        {"mask": masks.Mask("bool0[q]", (torch.ones(5, 7) > 0,))},
        RuntimeError,
        r"\[5, 7\] is indexed in 1 dim",
    ),
    (
        {"score_mod": ScoreMod("add(score,float0[b,h])", (Q[0, 0, 0],))},
        RuntimeError,
        r"\[8\] is indexed in 2 dim",
    ),
    ({"bias": torch.zeros(7, 5)}, RuntimeError, r"bias must broadcast .*\[7, 5\]"),
    ({"bias": torch.zeros(5, 7).double()}, TypeError, "bias is float64 and query torch.float32"),
    ({"bias": torch.zeros(5, 7, device="tpu")}, RuntimeError, "one device, got query on cpu and bias on tpu"),
    ({"sinks": torch.zeros(2)}, RuntimeError, r"sinks must be \[4\].*\[2\]"),
    ({"alibi_slopes": torch.zeros(3)}, RuntimeError, r"alibi_slopes must be \[4\].*\[3\]"),
    ({"alibi_slopes": torch.zeros(3, 4)}, RuntimeError, r"alibi_slopes must be .* or \[2, 4\].*\[3, 4\]"),
    ({"alibi_slopes": torch.zeros(1, 2, 4)}, RuntimeError, r"alibi_slopes must be .*\[1, 2, 4\]"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap must be positive"),
    ({"soft_cap": True}, TypeError, "soft_cap must be a float"),
    ({"scale": "1"}, TypeError, "scale must be a float"),
    ({"scale": np.True_}, TypeError, "scale must be a float"),
    ({"dropout_p": True}, TypeError, "dropout_p must be a float"),
    ({"dropout_p": 1.5}, ValueError, "between 0 and 1, got 1.5"),
    ({"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed must be an integer"),
    ({"dropout_p": 0.5, "seed": 2**64}, ValueError, "64 bits"),
    ({"dropout_p": 0.5, "seed": torch.zeros(3, dtype=torch.int32)}, ValueError, r"int32 of shape \[2\]"),
    ({"q_segment_ids": torch.zeros(5, dtype=torch.int32)}, RuntimeError, "kv_segment_ids is None"),
    ({"kv_segment_ids": torch.zeros(7, dtype=torch.int32)}, RuntimeError, "without q_segment_ids"),
    ({"q_segment_ids": torch.zeros(5), "kv_segment_ids": torch.zeros(7)}, TypeError, "must be integers"),
    (
        {"score_mod": "x"},
        TypeError,
        r"a function \(score, b, h, q, kv\) -> score or a tpu_kernels.ScoreMod, got str",
    ),
    ({"score_mod": lambda s, b, h, q, kv: s.sum().item()}, ValueError, "item"),
    ({"impl": "cuda"}, ValueError, "'auto', 'pallas', 'reference', got str 'cuda'"),
    (
        {"impl": "reference", "tiling": SplashTiling(128, 128, 128, 128, 128, 128, 128, 128)},
        ValueError,
        r"got SplashTiling\(tile_q=128.* has no tiles",
    ),
]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    REFUSED,
    ids=[" ".join(changed) + str(i) for i, (changed, *_) in enumerate(REFUSED)],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        splash_attention(**{"query": Q, "key": K, "value": V, **changed})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.int64, 2**40),
        (torch.uint32, 2**31),
        (torch.uint64, 2**32),
        (torch.uint64, 2**63),
        (torch.uint64, 2**64 - 1),
    ],
)
def test_ids_that_do_not_fit_int32(dtype: torch.dtype, number: int, compiled: bool) -> None:
    def attend(ids: torch.Tensor) -> torch.Tensor:
        return splash_attention(Q, K, V, q_segment_ids=ids, kv_segment_ids=ids[:1].expand(7))

    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    ids = torch.tensor([0, 1, number, 2, 3], dtype=dtype)
    with pytest.raises(OverflowError, match="as_int32"):
        function(ids)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_ids(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v = (t.to(device) for t in make(2, dtype=torch.float32))
    ids = torch.tensor([0, 1, 200, 200, 0]), torch.tensor([200, 0, 0, 1, 1, 200, 7])
    wanted = splash_attention(q, k, v, q_segment_ids=ids[0].to(device), kv_segment_ids=ids[1].to(device))
    q_ids, kv_ids = (t.to(dtype).to(device) for t in ids)
    assert torch.equal(splash_attention(q, k, v, q_segment_ids=q_ids, kv_segment_ids=kv_ids), wanted)
    assert torch.equal(splash_attention(q, k, v, mask=masks.segments(q_ids, kv_ids)), wanted)


def test_what_code_indexes_may_be_larger() -> None:
    ids = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 3])
    ours = splash_attention(Q, K, V + 1, mask=masks.function(lambda b, h, q, kv: ids[q] == ids[kv]))
    assert torch.equal(ours, splash_attention(Q, K, V + 1, mask=masks.segments(ids[:5], ids[:7])))


def test_numbers_of_numpy() -> None:
    q, k, v = make(2, dtype=torch.float32)
    numbers: dict[str, Any] = {"scale": 0.25, "soft_cap": 2.0, "dropout_p": 0.5}
    wanted = splash_attention(q, k, v, seed=1, **numbers)
    for kind in (np.float32, np.float64, np.float16):
        given: Any = {name: kind(number) for name, number in numbers.items()}
        assert torch.equal(splash_attention(q, k, v, seed=1, **given), wanted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gt(q,kv)", "a changed score is a float, got the bool"),
        ("add(q,kv)", "a changed score is a float, got the int"),
        ("add(score,float0[h])", "needs capture 0, got 0 captures"),
        ("add(score", "expected"),
    ],
)
def test_a_score_mod_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoreMod(text)


def test_exported() -> None:
    assert tpu_kernels.splash_attention is splash_attention
    assert tpu_kernels.masks is masks


def test_masks_of_jax_functions_and_arrays(device: torch.device) -> None:
    """What a JAX function indexes, and arrays in place of tensors, become tensors of the call's device."""
    q, k, v = (torch.randn(2, 2, 9, 8).to(device) for _ in range(3))
    ids = np.array([[0] * 4 + [1] * 5, [0] * 9], np.int32)
    in_jax = jnp.asarray(ids)
    expected = splash_attention(q, k, v, mask=masks.segments(torch.from_numpy(ids).to(device)))

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        return in_jax[b, i] == in_jax[b, j]

    for mask in (masks.function(same, "jax"), masks.segments(in_jax), masks.segments(ids)):
        torch.testing.assert_close(splash_attention(q, k, v, mask=mask), expected, rtol=0, atol=0)


def test_integers_of_numpy_are_integers() -> None:
    assert masks.sliding_window(np.int64(4)).text == masks.sliding_window(4).text
    assert masks.causal(offset=np.int32(3)).text == masks.causal(offset=3).text


def test_more_refusals_that_say_what_to_do() -> None:
    q, k = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 9, 8)
    with pytest.raises(ValueError, match="give kv_ids, too"):
        splash_attention(q, k, k, mask=masks.segments(torch.zeros(1, 5, dtype=torch.int32)))
    with pytest.raises(TypeError, match=r"masks.tensor\(...\)"):
        masks.causal() & torch.ones(9, 9, dtype=torch.bool)  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(TypeError, match=r"masks.function\(...\)"):
        masks.causal() | (lambda b, h, i, j: i == j)  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(RuntimeError, match="one device, got query on meta and seed on cpu"):
        meta = q.to("meta")
        splash_attention(meta, meta, meta, dropout_p=0.5, seed=torch.tensor(3))


def test_the_gradient_of_a_bfloat16_table_is_summed_in_float32() -> None:
    """Each of 31 numbers has a sum of up to 300 terms, which was 7% off when rounded on the way."""
    q, k, v, d_o = torch.randn(4, 1, 1, 300, 16).bfloat16()
    numbers = torch.randn(31).bfloat16()

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        table = numbers.to(dtype).requires_grad_()
        o = splash_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + table[torch.clamp(i - j + 15, 0, 30)], impl="pallas"
        )
        return torch.autograd.grad(o, table, d_o)[0].double()

    exact, rounded = gradient(torch.float32), gradient(torch.bfloat16)
    assert (rounded - exact).norm() <= torch.finfo(torch.bfloat16).eps * exact.norm()

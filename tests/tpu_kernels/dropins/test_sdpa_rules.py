"""Torch's rules for attention, on cpu under `overrides()` and on tpu after `install()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tpu_kernels.dropins.install import overrides

from .conftest import Ours
from .oracle import Attention, check

INF = float("inf")
torchs: Any = scaled_dot_product_attention


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def qkv(*batch: int, rows: int = 5, columns: int = 7, dtype: torch.dtype = torch.float32) -> Any:
    return [normal(*batch, n, 8, dtype=dtype) for n in (rows, columns, columns)]


def attention(*args: Any, **kwargs: Any) -> Attention:
    return Attention(*args, **kwargs)


# Shapes ------------------------------------------------------------------------------------------------

SHAPES = {
    "plain": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "rank 2": ((5, 8), (7, 8), (7, 8)),
    "rank 3": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "rank 5": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    "mixed ranks": ((2, 3, 5, 8), (7, 8), (3, 7, 8)),
    "one batch of keys": ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    "one batch of queries": ((1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "one head of keys": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "one head of queries": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "one head of values": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 7, 8)),
    "values wider in batch": ((1, 3, 5, 8), (1, 3, 7, 8), (2, 3, 7, 8)),
    "value dimension": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 3)),
    "single elements": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_broadcast_as_torchs(ours: Ours, shapes: Any) -> None:
    q, k, v = (normal(*shape) for shape in shapes)
    call = Attention(q, k, v)
    result = check(call, ours.device, ours)
    assert ours.used() == 1
    args, kwargs = call.arguments(call.query, call.key, call.value)
    assert result.shape == torchs(*args, **kwargs).shape


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 0.0), (torch.float32, -2.0), (torch.bfloat16, None), (torch.float16, 3)],
)
def test_dtypes_and_scales(ours: Ours, dtype: torch.dtype, scale: float | None) -> None:
    result = check(attention(*qkv(2, 3, dtype=dtype), scale=scale), ours.device, ours)
    assert result.dtype == dtype and ours.used() == 1


@pytest.mark.parametrize(
    ("lengths", "dims", "kind"),
    [((1, 200), (80, 80), "mask"), ((129, 77), (192, 128), "causal"), ((200, 1), (1, 1), "full")],
    ids=str,
)
def test_sizes_that_are_no_multiple_of_anything(ours: Ours, lengths: Any, dims: Any, kind: str) -> None:
    q, k, v = (
        normal(1, 1, lengths[0], dims[0]),
        normal(1, 1, lengths[1], dims[0]),
        normal(1, 1, lengths[1], dims[1]),
    )
    mask = torch.rand(lengths) > 0.4 if kind == "mask" else None
    check(Attention(q, k, v, mask, is_causal=kind == "causal"), ours.device, ours)
    assert ours.used() == 1


# Grouped heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads",
    [
        (4, 1, 1),
        (6, 3, 2),
        *(pytest.param(heads, marks=pytest.mark.slow) for heads in ((4, 2, 2), (4, 4, 4), (8, 2, 4))),
    ],
    ids=str,
)
def test_grouped_heads(ours: Ours, heads: tuple[int, int, int]) -> None:
    batch = () if heads[1] == 1 else (2,)
    q, k, v = (normal(*batch, h, n, 8) for h, n in zip(heads, (5, 7, 7), strict=True))
    mask = torch.rand(heads[0], 5, 7) > 0.3  # its heads are the query's
    check(Attention(q, k, v, mask, enable_gqa=True), ours.device, ours)
    assert ours.used() == 1


@pytest.mark.parametrize(
    ("heads", "gqa"),
    [((4, 2), False), ((4, 3), True), ((6, 4), True), ((2, 4), True), ((4, 0), True)],
    ids=str,
)
def test_heads_that_do_not_divide_are_an_error(ours: Ours, heads: tuple[int, int], gqa: bool) -> None:
    q, k = normal(1, heads[0], 5, 8), normal(1, heads[1], 5, 8)
    with pytest.raises(RuntimeError, match="head|size of tensor"):
        ours(q, k, k, enable_gqa=gqa)


def test_grouped_heads_need_a_dimension_of_heads(ours: Ours) -> None:
    with pytest.raises(IndexError):
        ours(*qkv(), enable_gqa=True)


# Masks -------------------------------------------------------------------------------------------------

MASKS = [
    *(
        ("bool", shape)
        for shape in [(5, 7), (1, 7), (5, 1), (3, 5, 7), (2, 1, 5, 7), (2, 3, 1, 7), (1, 1, 1, 1)]
    ),
    *(("float", shape) for shape in [(5, 7), (1, 1), (1, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)]),
    ("bool and causal", (2, 1, 5, 7)),
    ("float and causal", (5, 7)),
]


SLOW_MASKS = (
    *(("bool", shape) for shape in [(1, 7), (5, 1), (3, 5, 7), (1, 1, 1, 1)]),
    *(("float", shape) for shape in [(1, 1), (5, 7), (2, 1, 1, 7)]),
)
"""Each shape compiles: quick ones have each dimension in full and as 1, but not in all combinations."""


@pytest.mark.parametrize(
    ("kind", "shape"),
    [pytest.param(*mask, marks=pytest.mark.slow if mask in SLOW_MASKS else ()) for mask in MASKS],
    ids=str,
)
def test_masks_broadcast_and_have_a_gradient(ours: Ours, kind: str, shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.4 if kind.startswith("bool") else torch.randn(shape)
    call = attention(*qkv(2, 3), mask, is_causal="causal" in kind)
    check(call, ours.device, ours)
    assert ours.used() == 1


def test_a_mask_that_is_expanded_has_its_gradient_in_its_own_shape(ours: Ours) -> None:
    bias = normal(1, 1, 1, 7).to(ours.device).requires_grad_()
    q, k, v = (t.to(ours.device) for t in qkv(2, 3))
    ours(q, k, v, bias.expand(2, 3, 5, 7)).sum().backward()
    wide = bias.detach().cpu().double().requires_grad_()
    torchs(*(t.cpu().double() for t in (q, k, v)), wide.expand(2, 3, 5, 7)).sum().backward()
    assert bias.grad is not None and wide.grad is not None
    # 30 rows, each with 7 products of a probability and a sum of 8 values.
    torch.testing.assert_close(bias.grad.cpu().double(), wide.grad, rtol=0, atol=30 * 64 * 2**-24 * 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_mask_goes_with_any_query(ours: Ours, dtype: torch.dtype) -> None:
    for mask in (normal(5, 7), normal(5, 7, dtype=dtype)):
        assert ours(*qkv(2, 3, dtype=dtype), mask).dtype == dtype
    assert ours.used() == 2


WRONG_MASKS = {
    "integers": torch.ones(5, 7, dtype=torch.int32),
    "narrower than the query": torch.ones(5, 7, dtype=torch.bfloat16),
    "float64": torch.ones(5, 7, dtype=torch.float64),
    "batch in place of heads": torch.ones(2, 5, 7, dtype=torch.bool),
    "too many dimensions": torch.ones(1, 2, 3, 5, 7),
    "another length": torch.ones(5, 6),
    "larger batch": torch.ones(4, 3, 5, 7),
}


@pytest.mark.parametrize("mask", WRONG_MASKS.values(), ids=WRONG_MASKS.keys())
def test_wrong_masks_are_torchs_errors(ours: Ours, mask: torch.Tensor) -> None:
    tensors = qkv(2, 3)
    with pytest.raises(RuntimeError) as error:
        torchs(*tensors, mask)
    with pytest.raises(type(error.value)):
        ours(*tensors, mask)
    assert ours.used() == 0


@pytest.mark.parametrize("shape", [(), (1,), (7,)], ids=str)
def test_masks_of_less_than_two_dimensions_are_the_devices_affair(ours: Ours, shape: tuple[int, ...]) -> None:
    """torch's CPU kernel refuses them, and its math, which `tpu` has, does not."""
    tensors, mask = qkv(2, 3), normal(*shape)
    if ours.device.type == "cpu":
        with pytest.raises(IndexError):
            ours(*tensors, mask)
    else:
        want = torchs(*(t.double() for t in tensors), mask.double().expand(5, 7))
        # 8 products, 7 terms and a few roundings; scores and values below 8.
        torch.testing.assert_close(ours(*tensors, mask).cpu().double(), want, rtol=0, atol=64 * 8 * 2**-24)


# Rows that see little, and special numbers --------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "bool"), (torch.bfloat16, "-inf"), (torch.float16, "bool")]
)
def test_a_row_that_sees_nothing_is_zero_and_passes_no_gradient(
    ours: Ours, dtype: torch.dtype, kind: str
) -> None:
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    mask[5] = False
    given = mask if kind == "bool" else torch.zeros(64, 64, dtype=dtype).masked_fill(~mask, -INF)
    q, k, v = (
        t.to(ours.device).requires_grad_() for t in (normal(1, 1, 64, 32, dtype=dtype) for _ in range(3))
    )
    result = ours(q, k, v, given)
    assert ours.used() == 1
    assert torch.equal(result[0, 0, 5].cpu(), torch.zeros(32, dtype=dtype)) and not result.isnan().any()
    for gradient in torch.autograd.grad(result[0, 0, 5].sum(), (q, k, v), retain_graph=True):
        assert not gradient.any()
    for gradient in torch.autograd.grad(result.sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_lowest_finite_number_does_not_mask(ours: Ours, dtype: torch.dtype) -> None:
    """A row of them has one score for all keys, but in float16: the mean over all values, not zero."""
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(6, 9, dtype=dtype).masked_fill(~torch.ones(6, 9, dtype=torch.bool).tril(), lowest)
    mask[3] = lowest
    q, k, v = (normal(1, 2, n, 8, dtype=dtype) for n in (6, 9, 9))
    result = ours(q, k, v, mask).cpu()
    assert ours.used() == 1
    # Scores are float32 here and in torch; the lowest number swallows them, or does not.
    want = torchs(q.float(), k.float(), v.float(), mask.float())
    unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(result.float(), want, rtol=2 * unit, atol=64 * 8 * max(unit / 16, 2**-24))
    mean = v.float().mean(-2)
    assert torch.allclose(result[:, :, 3].float(), mean, atol=16 * unit) == (dtype != torch.float16)


def test_special_numbers_go_where_torch_lets_them(ours: Ours) -> None:
    tensors = qkv(1, 2)
    bias = normal(5, 7)
    bias[2, 3] = INF
    result = ours(*tensors, bias).cpu()
    assert result[:, :, 2].isnan().all() and not result[:, :, [0, 1, 3, 4]].isnan().any()
    tensors[2][0, 0, 1] = torch.nan
    assert torch.equal(ours(*tensors).isnan().cpu(), torchs(*tensors).isnan())


def test_a_block_diagonal_mask_of_an_odd_length(ours: Ours) -> None:
    """Four segments, the last one of padding that sees itself: each row as if its segment were alone."""
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([128, 128, 128, 57, 159]))
    q, k, v = (normal(1, 1, 600, 80, dtype=torch.bfloat16) for _ in range(3))
    result = ours(q, k, v, ids[:, None] == ids).cpu().double()
    want = torch.cat([torchs(*(t[:, :, ids == i].double() for t in (q, k, v))) for i in range(5)], dim=-2)
    # The result is a mean of values below 8 and is rounded to bfloat16, as are probabilities in the kernel.
    torch.testing.assert_close(result, want, rtol=2**-8, atol=2 * 2**-9 * float(v.abs().max()))


@pytest.mark.parametrize("case", ["upper left", "longer", "shorter"])
def test_is_causal_counts_from_the_upper_left(ours: Ours, case: str) -> None:
    rows, columns = {"upper left": (6, 6), "longer": (9, 4), "shorter": (4, 9)}[case]
    tensors = qkv(1, 2, rows=rows, columns=columns)
    check(Attention(*tensors, is_causal=True), ours.device, ours)


# Nothing to compute ------------------------------------------------------------------------------------

EMPTY = {
    "no batch": ((0, 2, 5, 8), (0, 2, 7, 8), (0, 2, 7, 8)),
    "no queries": ((1, 2, 0, 8), (1, 2, 7, 8), (1, 2, 7, 8)),
    "no keys": ((1, 2, 5, 8), (1, 2, 0, 8), (1, 2, 0, 8)),
    "no heads": ((1, 0, 5, 8), (1, 0, 7, 8), (1, 0, 7, 8)),
    "no head dimension": ((1, 2, 5, 0), (1, 2, 7, 0), (1, 2, 7, 8)),
    "no value dimension": ((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 0)),
}


@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_empty_sizes(ours: Ours, shapes: Any, is_causal: bool) -> None:
    tensors: Any = [normal(*shape) for shape in shapes]
    want = torchs(*tensors, is_causal=is_causal)
    leaves = [t.to(ours.device).requires_grad_() for t in tensors]
    got = ours(*leaves, is_causal=is_causal)
    assert got.shape == want.shape
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=7 * 8 * 2**-24)
    if shapes[1][-2] == 0:
        assert torch.equal(got.cpu(), torch.zeros(1, 2, 5, 8))
    for leaf, gradient in zip(leaves, torch.autograd.grad(got.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape


# Errors ------------------------------------------------------------------------------------------------

ERRORS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "rank 1": lambda: ((normal(8), normal(8), normal(8)), {}),
    "head dimensions": lambda: ((normal(1, 2, 5, 8), normal(1, 2, 5, 9), normal(1, 2, 5, 8)), {}),
    "batches": lambda: ((normal(2, 2, 5, 8), normal(3, 2, 5, 8), normal(3, 2, 5, 8)), {}),
    "dtypes": lambda: ((normal(1, 2, 5, 8), normal(1, 2, 5, 8).bfloat16(), normal(1, 2, 5, 8)), {}),
    "integers": lambda: (tuple(t.int() for t in qkv(1, 2)), {}),
    "complex": lambda: (tuple(t.cfloat() for t in qkv(1, 2)), {}),
    "dropout above 1": lambda: ((*qkv(1, 2), None, 2.0), {}),
    "no tensor": lambda: ((*qkv(1, 2)[:2], None), {}),
    "mask of another type": lambda: ((*qkv(1, 2), 3), {}),
    "is_causal of another type": lambda: ((*qkv(1, 2), None, 0.0, "yes"), {}),
    "scale by position": lambda: ((*qkv(1, 2), None, 0.0, False, 1.0), {}),
    "unknown argument": lambda: (tuple(qkv(1, 2)), {"causal": True}),
    "missing argument": lambda: (tuple(qkv(1, 2)[:2]), {}),
}


@pytest.mark.parametrize("make", ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_of_torchs_type(ours: Ours, make: Callable[[], Any]) -> None:
    args, kwargs = make()
    with pytest.raises(Exception) as error:
        torchs(*args, **kwargs)
    with pytest.raises(error.type):
        ours(*args, **kwargs)
    assert ours.used() == 0


def test_lengths_of_key_and_value_must_agree(ours: Ours) -> None:
    """torch's own kernel for the CPU computes something; ours says what is wrong."""
    with pytest.raises(RuntimeError, match="same length"):
        ours(normal(1, 2, 5, 8), normal(1, 2, 6, 8), normal(1, 2, 7, 8))


def test_tensors_must_be_on_one_device(ours: Ours) -> None:
    q, k, v = (t.to(ours.device) for t in qkv(1, 2))
    other = "cpu" if ours.device.type == "tpu" else "tpu"
    with ours.standing_in():
        with pytest.raises(RuntimeError, match="same device"):
            torchs(q, k.to(other), v)
        with pytest.raises(RuntimeError, match="same device"):
            torchs(q, k, v, torch.ones(5, 7, device=other))
    assert ours.used() == 0


# Layout, autocast, backends, dropout --------------------------------------------------------------------


def test_the_result_lies_in_memory_as_the_query_does(ours: Ours) -> None:
    """As torch's fused kernels do: heads of a projection can be joined again with a view."""
    x = normal(2, 5, 24).to(ours.device)
    q = x.unflatten(-1, (3, 8)).transpose(1, 2)
    result = ours(q, q, q)
    assert result.stride() == torchs(q.cpu(), q.cpu(), q.cpu()).stride()
    assert result.transpose(1, 2).view(2, 5, 24).shape == x.shape
    assert ours(q.contiguous(), q, q).is_contiguous()


def test_strides_of_the_arguments_do_not_matter(ours: Ours) -> None:
    q, k, v = (t.to(ours.device) for t in qkv(2, 3))
    want = ours(q, k, v)
    spread = [torch.stack([t, t * 0], -1)[..., 0] for t in (q, k, v)]
    assert torch.equal(ours(*spread), want)
    assert torch.equal(ours(q.mT.contiguous().mT, k, v.flip(-1).flip(-1)), want)
    one = normal(1, 1, 7, 8).to(ours.device).expand(2, 3, 7, 8)
    assert torch.equal(ours(q, one, one), ours(q, one.contiguous(), one.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast(ours: Ours, dtype: torch.dtype) -> None:
    tensors = [t.to(ours.device, dtype) for t in qkv(2, 3)]
    mask = normal(5, 7).to(ours.device, dtype)
    with torch.autocast(ours.device.type, torch.bfloat16):
        result = ours(*tensors, mask)
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    if dtype != torch.float64:
        assert torch.equal(result, ours(*(t.bfloat16() for t in (*tensors, mask))))


def test_float64_is_torchs(ours: Ours) -> None:
    tensors: Any = [t.double() for t in qkv(2, 3)]
    mask = torch.rand(5, 7) > 0.3
    got = ours(*tensors, mask, is_causal=True).cpu()
    assert ours.used() == 0 and got.dtype == torch.float64
    torch.testing.assert_close(
        got, torchs(*tensors, mask & torch.ones(5, 7).tril().bool()), rtol=0, atol=1e-13
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_torchs() -> None:
    """On the CPU: the device `tpu` has none."""
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    want = torchs(nested, nested, nested)
    with overrides():
        got = torchs(nested, nested, nested)
        with torch.autocast("cpu", torch.bfloat16):
            assert torchs(nested, nested, nested).dtype == torch.bfloat16
        with pytest.raises((RuntimeError, ValueError)):
            torchs(nested, nested, nested, is_causal=True, attn_mask=torch.ones(5, 5))
    assert torch.equal(got.values(), want.values())


def test_math_means_math(ours: Ours) -> None:
    tensors: Any = [t.to(ours.device) for t in qkv(2, 3)]
    with sdpa_kernel(SDPBackend.MATH):
        want = torchs(*(t.cpu() for t in tensors))
        assert torch.equal(ours(*tensors).cpu(), want) and ours.used() == 0
        with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
            ours(*tensors, torch.ones(5, 7, dtype=torch.bool), is_causal=True)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.OVERRIDEABLE):
        with sdpa_kernel([backend, SDPBackend.MATH]):
            ours(*tensors)
            assert ours.used() == 1


def test_dropout_is_applied_always_and_repeats_with_the_seed(ours: Ours) -> None:
    q, k = (t.to(ours.device) for t in qkv(2, 4, rows=64, columns=96)[:2])
    v = torch.eye(96).expand(2, 4, 96, 96).to(ours.device)  # the result is the dropped softmax itself
    with torch.no_grad():
        torch.manual_seed(3)
        first = ours(q, k, v, dropout_p=0.25)
        second = ours(q, k, v, dropout_p=0.25)
        torch.manual_seed(3)
        again = ours(q, k, v, dropout_p=0.25)
        full = ours(q, k, v)
    assert ours.used() == 4
    assert torch.equal(first, again) and not torch.equal(first, second)
    kept = first != 0
    torch.testing.assert_close(first[kept], full[kept] / 0.75, rtol=64 * 2**-24, atol=0)
    n, dropped = kept.numel(), int((~kept).sum())
    assert abs(dropped - 0.25 * n) < 6 * (n * 0.25 * 0.75) ** 0.5
    assert not ours(q, k, v, dropout_p=1.0).any()


def test_dropout_uses_the_same_mask_in_the_backward(ours: Ours) -> None:
    q, k, v = (t.to(ours.device).requires_grad_() for t in qkv(1, 2, rows=16, columns=16))
    eye = torch.eye(16).expand(1, 2, 16, 16).to(ours.device)
    torch.manual_seed(1)
    dropped = ours(q.detach(), k.detach(), eye, dropout_p=0.5)
    torch.manual_seed(1)
    result = ours(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(result.sum(), v)
    # sum over rows of 16 probabilities below 2, and the factor 2 of dropout.
    torch.testing.assert_close(
        dv, dropped.sum(-2)[..., None].expand_as(dv), rtol=0, atol=16 * 32 * 2 * 2**-24
    )

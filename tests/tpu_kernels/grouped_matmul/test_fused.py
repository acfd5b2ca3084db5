"""Bias, activations, gating, 8-bit operands and existing results, against float64, with all gradients."""

from __future__ import annotations

# Tests call with wrong types on purpose.
# pyright: reportArgumentType=false
from dataclasses import replace
from typing import Any

import pytest
import torch

import bridge
from autotune.problem import ArraySpec
from tpu_kernels import GroupedTiling, grouped_matmul
from tpu_kernels.grouped_matmul import space
from tpu_kernels.grouped_matmul.spec import SPEC

from . import fused, fuzz
from .fused import Call

SMALL = GroupedTiling(*[128] * 9)
SIZES = [100, 0, 57, 3]
M, K, N = 170, 130, 72


def make(
    *,
    dtype: torch.dtype = torch.float32,
    lhs: torch.dtype | None = None,
    rhs: torch.dtype | None = None,
    pair: bool = False,
    gated: bool = False,
    transpose_rhs: bool = False,
    bias: bool = False,
    blocks: int | None = None,
    existing: torch.dtype | None = None,
    sizes: tuple[int, int, int] = (M, K, N),
    **more: Any,
) -> Call:
    """Normal values. `blocks` is how many blocks 8-bit operands have factors for; None for none at all."""
    draw = fuzz.Draw(7)
    m, k, n = sizes
    wide, groups = 2 * n if gated else n, len(SIZES)
    matrix = (wide, k) if transpose_rhs else (k, wide)

    def values(own: torch.dtype | None, *shape: int) -> torch.Tensor:
        if own == torch.int8:
            return torch.randint(-128, 128, shape, generator=draw.torch).to(own)
        return draw.normal(*shape).to(own or dtype)

    def factors(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw.torch) / 64

    count, few = 2 if pair else 1, blocks == 1
    scale = (groups, wide) if few else (groups, blocks or 1, wide)
    return Call(
        lhs=values(lhs, m, k),
        rhs=tuple(values(rhs, groups, *matrix) for _ in range(count)),
        sizes=torch.tensor(SIZES),
        cotangent=draw.normal(m, n).bfloat16().to(dtype),
        bias=tuple(draw.normal(groups, wide).to(dtype) for _ in range(count * bias)),
        lhs_scale=factors(*((m,) if few else (m, blocks))) if blocks and lhs else None,
        rhs_scale=tuple(factors(*scale) for _ in range(count)) if blocks and rhs else (),
        existing_out=None if existing is None else draw.normal(m, n).to(existing),
        gated=gated,
        transpose_rhs=transpose_rhs,
        **more,
    )


CALLS: dict[str, dict[str, Any]] = {
    "bias": {"bias": True, "dtype": torch.bfloat16},
    "relu": {"bias": True, "activation": "relu"},
    "silu, transposed": {"activation": "silu", "transpose_rhs": True},
    "gelu": {"activation": "gelu", "dtype": torch.bfloat16},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "sigmoid": {"activation": "sigmoid", "bias": True},
    "SwiGLU, two matrices": {"pair": True, "activation": "silu", "bias": True, "dtype": torch.bfloat16},
    "SwiGLU, one array": {"gated": True, "activation": "silu", "bias": True},
    "SwiGLU, halves that begin where a tile does": {
        "gated": True,
        "activation": "silu",
        "sizes": (M, 40, 128),
        "dtype": torch.bfloat16,
    },
    "GeGLU, rows of an array": {
        "gated": True,
        "activation": "gelu",
        "transpose_rhs": True,
        "sizes": (170, 40, 64),
    },
    "GeGLU, rows of an array, ragged": {"gated": True, "activation": "gelu", "transpose_rhs": True},
    "gate without activation": {"pair": True, "transpose_rhs": True},
    "added": {"existing": torch.float32, "dtype": torch.bfloat16, "out_dtype": torch.float32},
    "added, activated": {"existing": torch.bfloat16, "dtype": torch.bfloat16, "activation": "silu"},
    "int8 matrices": {"rhs": torch.int8, "dtype": torch.bfloat16, "blocks": 1},
    "int8 matrices, float32": {"rhs": torch.int8, "blocks": 1, "transpose_rhs": True},
    "float8 matrices, blocks": {"rhs": torch.float8_e4m3fn, "blocks": 2, "sizes": (M, 256, N)},
    "float8 both": {"lhs": torch.float8_e5m2, "rhs": torch.float8_e4m3fn, "blocks": 1, "bias": True},
    "int8 both, blocks": {"lhs": torch.int8, "rhs": torch.int8, "blocks": 2, "sizes": (M, 256, N)},
    "int8 rows": {"lhs": torch.int8, "blocks": 1, "dtype": torch.bfloat16},
    "no scales": {"lhs": torch.float8_e4m3fn, "rhs": torch.float8_e4m3fn, "out_dtype": torch.bfloat16},
    "int8 SwiGLU": {"rhs": torch.int8, "blocks": 1, "gated": True, "activation": "silu", "bias": True},
}
TILED = {"SwiGLU, two matrices", "sigmoid", "float8 matrices, blocks", "added"}
"""Also with tiles along the inner dimension, which the default has none of."""

SLOW = {
    "relu",
    "silu, transposed",
    "gelu_tanh",
    "int8 matrices, float32",
    "int8 rows",
    "no scales",
    "added, activated",
}
"""What others have parts of, together."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CALLS]
)
def test_values(name: str) -> None:
    call = make(**CALLS[name], options={"impl": "pallas"})
    fused.check(call, fused.run(call))


@pytest.mark.parametrize("name", sorted(TILED))
def test_tiles_along_the_inner_dimension(name: str) -> None:
    call = make(**CALLS[name], options={"impl": "pallas", "tiling": SMALL})
    fused.check(call, fused.run(call))


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("SwiGLU, one array", "int8 both, blocks", "added")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in CALLS
    ],
)
def test_reference(name: str) -> None:
    call = make(**CALLS[name], options={"impl": "reference"})
    fused.check(call, fused.run(call))


@pytest.mark.parametrize("name", ["SwiGLU, one array", "int8 matrices"])
def test_on_tpu_the_numbers_are_the_same(name: str) -> None:
    call = make(**CALLS[name])
    on_cpu, on_tpu = fused.run(call), fused.run(call, "tpu")
    for of, value in on_cpu.items():
        assert torch.equal(value, on_tpu[of]), of


def test_in_the_tpu_interpreter() -> None:
    """It fills what is past the end, and not yet written, with NaN."""
    call = make(**CALLS["SwiGLU, two matrices"], options={"tiling": SMALL})
    with bridge.interpret("tpu"):
        fused.check(call, fused.run(call))


def test_the_check_finds_wrong_numbers() -> None:
    """The bounds are close to what happens: half a percent of the largest number exceeds each."""
    call = make(**CALLS["SwiGLU, one array"] | {"existing": torch.float32}, options={"impl": "reference"})
    found = fused.run(call)
    fused.check(call, found)
    for name, value in found.items():
        wrong = value.clone().flatten()
        wrong[wrong.abs().argmax()] *= 1.005
        with pytest.raises(AssertionError, match=f"^{name}: off by"):
            fused.check(call, {**found, name: wrong.view_as(value)})


@pytest.mark.parametrize("left_out", ["bias", "lhs_scale", "rhs_scale", "existing_out", "activation"])
def test_the_check_finds_what_is_left_out(left_out: str) -> None:
    call = make(
        lhs=torch.int8,
        rhs=torch.int8,
        blocks=1,
        bias=True,
        activation="silu",
        existing=torch.float32,
        options={"impl": "reference"},
    )
    without = replace(call, **{left_out: () if left_out in ("bias", "rhs_scale") else None})
    found = fused.run(call) | {"output": fused.run(without)["output"]}
    with pytest.raises(AssertionError, match="^output: off by"):
        fused.check(call, found)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_tanh", "sigmoid"])
def test_the_catalog_knows_gates_and_activations(activation: Any) -> None:
    arrays = {"lhs": ArraySpec((37, 12), "float32"), "rhs": ArraySpec((3, 16, 12), "float32")}
    arrays["group_sizes"] = ArraySpec((3,), "int32")
    for gated in (False, True):
        problem = space.problem_of(
            arrays, transpose_rhs=True, gated=gated, activation=activation, out_dtype="float32"
        )
        given = torch.randn(37, 12), torch.randn(3, 16, 12), torch.tensor([5, 0, 20])
        expected = SPEC.torch_equivalent(problem, *given)
        torch.testing.assert_close(SPEC.torch_call(problem, *given, impl="reference"), expected)
        reference = SPEC.reference(*(t.numpy() for t in given), **dict(problem.params))
        torch.testing.assert_close(torch.from_dlpack(reference), expected)


def test_rows_of_no_group() -> None:
    """They are what was there, whatever their rows of lhs hold; else 0, though the activation of 0 is not."""
    call = make(activation="sigmoid", bias=True)
    call.lhs[sum(SIZES) :] = torch.nan
    assert not fused.compute(call)[sum(SIZES) :].any()
    there = torch.randn(M, N)
    added = fused.compute(replace(call, existing_out=there))
    assert torch.equal(added[sum(SIZES) :], there[sum(SIZES) :])


# Random ones ---------------------------------------------------------------------------------------------

QUICK = (1, 5, 9, 10, 13, 26)
"""Seeds that together have everything."""


@pytest.mark.parametrize("seed", QUICK)
def test_random_calls(seed: int) -> None:
    call = fuzz.make_call(seed, fuzz.SMALL)
    fused.check(call, fused.run(call))


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({*range(150)} - {*QUICK}))
def test_more_random_calls(seed: int) -> None:
    call = fuzz.make_call(seed, fuzz.SMALL)
    fused.check(call, fused.run(call))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_large_random_calls(seed: int) -> None:
    call = fuzz.make_call(seed, fuzz.LARGE)
    fused.check(call, fused.run(call))


def test_the_quick_sample_has_everything() -> None:
    calls = [fuzz.make_call(seed, fuzz.SMALL) for seed in QUICK]
    assert {call.activation for call in calls} == set(fuzz.ACTIVATIONS)
    dtypes = {t.dtype for call in calls for t in (call.lhs, *call.rhs)}
    assert dtypes == {*fuzz.EIGHT_BITS, torch.bfloat16, torch.float32}
    for has in (
        lambda c: c.bias,
        lambda c: c.gated,
        lambda c: len(c.rhs) == 2,
        lambda c: c.lhs_scale is not None,
        lambda c: c.rhs_scale and c.rhs_scale[0].dim() == 3,
        lambda c: c.group_offset is not None,
        lambda c: c.existing_out is not None,
        lambda c: c.transpose_rhs,
        lambda c: "tiling" in c.options,
    ):
        assert any(map(has, calls))


# Derivatives ---------------------------------------------------------------------------------------------


def test_second_derivatives() -> None:
    draw = fuzz.Draw(3)
    lhs, gate, up = draw.normal(9, 3), draw.normal(2, 3, 4), draw.normal(2, 3, 4)
    bias, sizes = draw.normal(2, 4), torch.tensor([4, 3])
    leaves = [t.requires_grad_() for t in (lhs, gate, up, bias)]

    def call(lhs: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return grouped_matmul(lhs, (gate, up), sizes, bias=(bias, bias), activation="silu")

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.slow
def test_second_derivatives_of_the_kernels() -> None:
    draw = fuzz.Draw(3)
    given = [draw.normal(60, 30), draw.normal(3, 30, 2 * 40), draw.normal(3, 80)]
    sizes = torch.tensor([20, 0, 33])

    def second(dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in given]
        lhs, rhs, bias = leaves
        output = grouped_matmul(lhs, rhs, sizes, bias=bias, gated=True, activation="gelu_tanh", **options)
        first = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves))

    for got, want in zip(second(torch.float32, impl="pallas"), second(torch.float64), strict=True):
        # Six products after one another, of sums of at most 80 terms, and cancellation within them.
        assert (got.double() - want).abs().max() <= 64 * 80 * torch.finfo(
            torch.float32
        ).eps * want.abs().max()


def test_compiled() -> None:
    compiled = torch.compile(grouped_matmul, fullgraph=True, backend="aot_eager")
    call = make(**CALLS["int8 SwiGLU"])
    fused.check(call, fused.run(call, function=compiled))


# Refusals ------------------------------------------------------------------------------------------------

X, W = torch.randn(12, 4), torch.randn(3, 4, 6)
Q = torch.randint(-128, 128, (3, 4, 6), dtype=torch.int8)


@pytest.mark.parametrize(
    ("rhs", "options", "error", "message"),
    [
        (W, {"activation": "swish"}, ValueError, "activation must be one of relu, silu, .*got 'swish'"),
        (W, {"bias": torch.randn(3, 5)}, RuntimeError, r"bias must be \[3, 6\], got \[3, 5\]"),
        (W, {"bias": torch.zeros(3, 6, dtype=torch.int32)}, TypeError, "bias must be float16"),
        (
            W,
            {"bias": (torch.randn(3, 6), torch.randn(3, 6))},
            TypeError,
            "bias must be a torch.Tensor, got tuple",
        ),
        ((W, W), {"bias": torch.randn(3, 6)}, TypeError, "rhs is a pair, so bias must be a pair"),
        ((W, W, W), {}, TypeError, "rhs must be a pair of tensors, got tuple of 3"),
        ((W, W[:, :, :5]), {}, RuntimeError, "the same shape"),
        ((W, W.double()), {}, TypeError, "the same dtype"),
        ((W, W), {"gated": True}, TypeError, "gated=True is for one rhs"),
        (W[:, :, :5], {"gated": True}, RuntimeError, "an odd number"),
        (W, {"rhs_scale": torch.rand(3, 6)}, TypeError, "rhs_scale is for rhs of int8"),
        (Q, {"rhs_scale": torch.rand(3, 5)}, RuntimeError, r"rhs_scale must be \[3, 6\] or \[3, B, 6\]"),
        (Q, {"rhs_scale": torch.rand(3, 3, 6)}, RuntimeError, "K = 4 does not divide"),
        (Q, {"rhs_scale": torch.ones(3, 6, dtype=torch.int32)}, TypeError, "rhs_scale must be float16"),
        (W, {"existing_out": torch.randn(12, 5)}, RuntimeError, r"existing_out must be \[12, 6\]"),
        (W, {"existing_out": torch.randn(12, 6).to("tpu")}, RuntimeError, "existing_out on tpu"),
        (Q, {"rhs_scale": torch.rand(3, 2, 6), "impl": "pallas"}, ValueError, "of 2 elements of K"),
    ],
)
def test_refusals(rhs: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        grouped_matmul(X, rhs, torch.tensor([2, 0, 6]), **options)


def test_eight_bits_get_no_gradient() -> None:
    rhs = W.to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(TypeError, match=r"rhs of torch.float8_e4m3fn gets no gradient.*rhs.detach\(\)"):
        grouped_matmul(X, rhs, torch.tensor([2, 0, 6]))


def test_both_scales_have_the_same_blocks() -> None:
    lhs = torch.randint(-128, 128, (12, 4), dtype=torch.int8)
    with pytest.raises(RuntimeError, match=r"equal blocks along K, got \[2, 4\]"):
        grouped_matmul(
            lhs,
            Q,
            torch.tensor([2, 0, 6]),
            lhs_scale=torch.rand(12, 2),
            rhs_scale=torch.rand(3, 4, 6),
        )


def test_tiles_that_cut_blocks_of_factors() -> None:
    call = make(rhs=torch.int8, blocks=2, sizes=(M, 2 * 384, 72))
    tiling = GroupedTiling(128, 256, 128, *[128] * 6)
    with pytest.raises(ValueError, match="tile_k is 256, and scales are of 384 elements of K"):
        fused.compute(replace(call, options={"tiling": tiling}))

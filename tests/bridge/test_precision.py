"""float32 matrix products in 1, 3 or 6 passes over bfloat16 parts: aten ops on tpu tensors, and jax_ops.

The oracle splits with numpy and ml_dtypes and multiplies in float64. What may differ is the rounding of sums
in float32: at most n * 2**-24 of the sum of magnitudes for n terms, of all passes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import bridge
from bridge import precision as precision_module
from bridge.device import extension
from bridge.interpretation import MODES
from bridge.precision import Precision, emulate_precision, precision

PASSES = {"medium": 1, "high": 3, "highest": 6}
PAIRS = {
    1: [(0, 0)],
    3: [(0, 0), (0, 1), (1, 0)],
    6: [(0, 0), (0, 1), (1, 0), (0, 2), (2, 0), (1, 1)],
}
Product = Callable[..., Any]

every_mode = pytest.mark.parametrize("mode", PASSES)


# ---------------------------------------------------------------------------------- the oracle


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    """hi, mid and lo of a float32 tensor, in float64 on the CPU."""
    rest = x.detach().cpu().numpy()
    assert rest.dtype == np.float32
    found = []
    for _ in range(3):
        part = rest.astype(ml_dtypes.bfloat16).astype(np.float32)
        found.append(torch.from_numpy(part.astype(np.float64)))
        rest = rest - part
    return found


def in_passes(product: Product, lhs: torch.Tensor, rhs: torch.Tensor, mode: str) -> torch.Tensor:
    """In float64; of the float32 numbers themselves for the mode "exact"."""
    if mode == "exact":
        return product(lhs.detach().cpu().double(), rhs.detach().cpu().double())
    left, right = parts(lhs), parts(rhs)
    return sum(product(left[i], right[j]) for i, j in PAIRS[PASSES[mode]])  # type: ignore[return-value]


def check(
    actual: torch.Tensor, product: Product, lhs: torch.Tensor, rhs: torch.Tensor, mode: str, terms: int
) -> None:
    """`actual` is product(lhs, rhs) in the passes of `mode`, each element a sum of at most `terms` terms."""
    expected = in_passes(product, lhs, rhs, mode)
    size = product(lhs.detach().cpu().double().abs(), rhs.detach().cpu().double().abs())
    bound = (terms + 12) * 2.0**-24 * size.abs() * 1.01
    assert actual.dtype is torch.float32
    assert actual.shape == expected.shape
    worst = (actual.detach().cpu().double() - expected).abs() - bound
    assert worst.numel() == 0 or worst.max() <= 0, f"beyond the bound by {worst.max():.3g}"


def random(*shape: int, device: torch.device | str = "tpu", requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cpu").to(device).requires_grad_(requires_grad)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    emulate_precision(False)
    torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------------------------- aten ops

BINARY: dict[str, tuple[Product, tuple[int, ...], tuple[int, ...], int]] = {
    # product, shapes, terms in a sum
    "mm": (torch.mm, (5, 7), (7, 3), 7),
    "mm of one row": (torch.mm, (1, 64), (64, 1), 64),
    "bmm": (torch.bmm, (2, 5, 7), (2, 7, 3), 7),
    "mv": (torch.mv, (5, 7), (7,), 7),
    "dot": (torch.dot, (33,), (33,), 33),
    "vdot": (torch.vdot, (33,), (33,), 33),
    "inner": (torch.inner, (4, 9), (5, 9), 9),
    "vecdot": (torch.linalg.vecdot, (33,), (33,), 33),
    "matmul with broadcasting": (torch.matmul, (2, 1, 5, 7), (3, 7, 4), 7),
    "matmul by a vector": (torch.matmul, (2, 5, 7), (7,), 7),
    "linear": (torch.nn.functional.linear, (2, 5, 7), (3, 7), 7),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (2, 5, 7), (2, 4, 7), 7),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 2), (5, 3, 7), (3, 7, 2), 21),
    "conv1d": (torch.nn.functional.conv1d, (2, 3, 9), (4, 3, 3), 9),
    "conv2d in groups": (
        lambda x, w: torch.nn.functional.conv2d(x, w, stride=2, padding=1, groups=2),
        (2, 4, 7, 6),
        (6, 2, 3, 3),
        18,
    ),
    "conv3d": (torch.nn.functional.conv3d, (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), 16),
    "transposed convolution": (
        lambda x, w: torch.nn.functional.conv_transpose2d(x, w, stride=2, dilation=2),
        (2, 3, 5, 4),
        (3, 4, 3, 3),
        27,
    ),
    "dilated convolution without a batch": (
        lambda x, w: torch.nn.functional.conv2d(x, w, dilation=2),
        (3, 9, 8),
        (4, 3, 3, 3),
        27,
    ),
    "conv_tbc": (
        lambda x, w: torch.conv_tbc(x, w, torch.zeros(5, dtype=x.dtype, device=x.device), 1),
        (6, 2, 4),
        (3, 4, 5),
        12,
    ),
}


@every_mode
@pytest.mark.parametrize("name", BINARY)
def test_product_of_tpu_tensors_is_that_of_the_parts(name: str, mode: str) -> None:
    product, left, right, terms = BINARY[name]
    lhs, rhs = random(*left), random(*right)
    with precision(mode):
        actual = product(lhs, rhs)
    assert actual.device.type == "tpu"
    check(actual, product, lhs, rhs, mode, terms)


# The operands whose gradients are products of single elements, which a TPU multiplies in float32.
ELEMENTWISE = {"mv": (0,), "matmul by a vector": (0,), "dot": (0, 1), "vdot": (0, 1), "vecdot": (0, 1)}


@every_mode
@pytest.mark.parametrize("name", BINARY)
def test_gradient_of_a_product_is_that_of_the_parts(name: str, mode: str) -> None:
    product, left, right, _ = BINARY[name]
    lhs, rhs = random(*left, requires_grad=True), random(*right, requires_grad=True)
    with precision(mode):
        out = product(lhs, rhs)
        weight = random(*out.shape)
        found = torch.autograd.grad(out, [lhs, rhs], weight)
    terms = max(out.numel(), lhs.numel(), rhs.numel())
    for index, (grad, operand, other) in enumerate(zip(found, (lhs, rhs), (rhs, lhs), strict=True)):

        def backward(w: torch.Tensor, other: torch.Tensor, i: int = index, x: Any = operand) -> torch.Tensor:
            """The gradient of one operand, which is linear in the weight and in the other operand."""
            x = torch.zeros(x.shape, dtype=torch.float64, requires_grad=True)
            value = product(x, other) if i == 0 else product(other, x)
            return torch.autograd.grad(value, x, w)[0]

        elementwise = index in ELEMENTWISE.get(name, ())
        check(grad, backward, weight, other, "exact" if elementwise else mode, terms)


ADDED: dict[str, tuple[Product, Product, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = {
    # op, its product, shapes of the addend and the operands, terms
    "addmm": (torch.addmm, torch.mm, (5, 3), (5, 7), (7, 3), 7),
    "addmm of a row": (torch.addmm, torch.mm, (3,), (5, 7), (7, 3), 7),
    "addmv": (torch.addmv, torch.mv, (5,), (5, 7), (7,), 7),
    "baddbmm": (torch.baddbmm, torch.bmm, (2, 5, 3), (2, 5, 7), (2, 7, 3), 7),
    "addbmm": (torch.addbmm, lambda x, y: torch.bmm(x, y).sum(0), (5, 3), (2, 5, 7), (2, 7, 3), 14),
}


@every_mode
@pytest.mark.parametrize("beta, alpha", [(1, 1), (0.5, 2), (0, 1), (0, 3)])
@pytest.mark.parametrize("name", ADDED)
def test_product_with_an_addend(name: str, beta: float, alpha: float, mode: str) -> None:
    op, product, shape, left, right, terms = ADDED[name]
    addend, lhs, rhs = random(*shape), random(*left), random(*right)
    if beta == 0:
        addend.fill_(torch.nan)  # and is not looked at
    with precision(mode):
        actual = op(addend, lhs, rhs, beta=beta, alpha=alpha)
    scaled = torch.zeros(()) if beta == 0 else addend.cpu() * beta  # powers of two: exact
    expected = scaled.double() + alpha * in_passes(product, lhs, rhs, mode)
    size = scaled.double().abs() + alpha * product(lhs.cpu().double().abs(), rhs.cpu().double().abs())
    assert ((actual.cpu().double() - expected).abs() <= (terms + 16) * 2.0**-24 * size).all()


@every_mode
@pytest.mark.parametrize("name", ADDED)
def test_in_place_and_out_forms_give_what_the_plain_form_gives(name: str, mode: str) -> None:
    op, _, shape, left, right, _ = ADDED[name]
    lhs, rhs = random(*left), random(*right)
    with precision(mode):
        addend = random(*op(random(*shape), lhs, rhs).shape)
        expected = op(addend, lhs, rhs, beta=0.5, alpha=2)
        out = torch.empty(0, device="tpu")
        assert op(addend, lhs, rhs, beta=0.5, alpha=2, out=out) is out
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        base = torch.stack([addend, addend], -1)  # write to a view
        view, version = base[..., 0], base._version
        assert getattr(view, f"{op.__name__}_")(lhs, rhs, beta=0.5, alpha=2) is view
    torch.testing.assert_close(base[..., 0], expected, rtol=0, atol=0)
    torch.testing.assert_close(base[..., 1], addend, rtol=0, atol=0)
    assert base._version == version + 1


@every_mode
@pytest.mark.parametrize("name", ["mm", "bmm", "mv", "dot", "vdot"])
def test_out_form_of_a_plain_product(name: str, mode: str) -> None:
    product, left, right, _ = BINARY[name]
    lhs, rhs = random(*left), random(*right)
    with precision(mode):
        expected = product(lhs, rhs)
        out = torch.empty_like(expected)
        assert product(lhs, rhs, out=out) is out
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="dtype|type"):
            product(lhs, rhs, out=torch.empty_like(expected, dtype=torch.float64))


def test_out_may_be_an_operand() -> None:
    x = random(4, 4)
    with precision("medium"):
        expected = x @ x
        torch.mm(x, x, out=x)
    assert torch.equal(x, expected)


@every_mode
def test_bias_is_added_in_float32(mode: str) -> None:
    x, w, bias = random(2, 3, 8, 8), random(4, 3, 3, 3), random(4)
    with precision(mode):
        with_bias = torch.nn.functional.conv2d(x, w, bias)
        without = torch.nn.functional.conv2d(x, w)
        torch.testing.assert_close(with_bias, without + bias[:, None, None], rtol=0, atol=0)
        torch.testing.assert_close(
            torch.nn.functional.linear(x, w[0, :2, 0].repeat(1, 3)[:, :8], bias[:2]),
            torch.nn.functional.linear(x, w[0, :2, 0].repeat(1, 3)[:, :8]) + bias[:2],
            rtol=0,
            atol=0,
        )


@every_mode
def test_grouped_product(mode: str) -> None:
    x, w = random(6, 16), random(2, 16, 8)
    ends = torch.tensor([2, 6], dtype=torch.int32, device="tpu")
    with precision(mode):
        actual = torch.nn.functional.grouped_mm(x, w, offs=ends)
    check(actual[:2], torch.mm, x[:2], w[0], mode, 16)
    check(actual[2:], torch.mm, x[2:], w[1], mode, 16)


@every_mode
def test_attention_is_made_of_products_in_passes(mode: str) -> None:
    q, k, v = random(2, 3, 8, 16), random(2, 3, 8, 16), random(2, 3, 8, 16)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with precision(mode):
        actual = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        scores = (q * 0.5) @ (k * 0.5).transpose(-1, -2)  # sqrt(1 / sqrt(16)): torch scales both
        expected = scores.softmax(-1) @ v
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    if mode != "highest":
        assert (actual - exact).abs().max() > {"medium": 1e-4, "high": 1e-6}[mode]


@pytest.mark.parametrize("use_gelu", [False, True])
def test_activation_comes_after_the_product(use_gelu: bool) -> None:
    bias, x, y = random(3), random(5, 7), random(7, 3)
    act = torch.nn.functional.gelu if use_gelu else torch.relu
    with precision("medium"):
        actual = torch._addmm_activation(bias, x, y, use_gelu=use_gelu)
        torch.testing.assert_close(actual, act(torch.addmm(bias, x, y)), rtol=0, atol=0)
    exact = torch._addmm_activation(bias, x, y, use_gelu=use_gelu)
    torch.testing.assert_close(exact, act(torch.addmm(bias, x, y)), rtol=1e-6, atol=1e-6)


@every_mode
def test_fused_encoder_layer_computes_as_its_parts(mode: str) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, device="tpu").eval()
    x = random(2, 16, 32)
    with torch.no_grad():
        exact = layer(x)
        with precision(mode):
            fused = layer(x)
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                expected = layer(x)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
    # Heads of 16: both scale by powers of two, so the numbers that are rounded are nearly the same.
    assert (fused - expected).abs().mean() < 1e-5
    if mode == "medium":
        assert (fused - exact).abs().mean() > 1e-4


def test_matrix_exp_is_made_of_products_in_passes() -> None:
    x = random(6, 6) * 0.3
    exact = torch.matrix_exp(x)
    with precision("medium"):
        rounded = torch.matrix_exp(x)
    with precision("highest"):
        close = torch.matrix_exp(x)
    torch.testing.assert_close(close, exact, rtol=1e-5, atol=1e-6)
    assert 1e-4 < (rounded - exact).abs().max() < 0.1


LAYERS: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
    "LSTM": lambda: torch.nn.LSTM(16, 16, device="tpu"),
    "GRU": lambda: torch.nn.GRU(16, 16, device="tpu"),
    "RNN": lambda: torch.nn.RNN(16, 16, device="tpu"),
    "attention": lambda: _self_attention(torch.nn.MultiheadAttention(16, 2, device="tpu")),
    "attention in eval": lambda: _self_attention(torch.nn.MultiheadAttention(16, 2, device="tpu").eval()),
}


def _self_attention(layer: torch.nn.Module) -> Callable[[torch.Tensor], Any]:
    return lambda x: layer(x, x, x)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_follow_the_setting(name: str) -> None:
    layer = LAYERS[name]()
    x = random(6, 3, 16)

    def output(mode: str | None) -> torch.Tensor:
        with torch.no_grad(), precision(mode) if mode else contextlib.nullcontext():
            found = layer(x)
        return found if isinstance(found, torch.Tensor) else found[0]

    error = {mode: (output(mode) - output(None)).abs().mean().item() for mode in PASSES}
    assert error["medium"] > 1e-4
    assert error["medium"] > 100 * error["high"] > 100 * error["highest"]


@every_mode
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in torch.func.jvp
def test_torch_func_transforms(mode: str) -> None:
    lhs, rhs, tangent = random(3, 5, 7), random(7, 4), random(7, 4)
    with precision(mode):
        mapped = torch.vmap(torch.mm, (0, None))(lhs, rhs)
        pushed = torch.func.jvp(lambda y: lhs[0] @ y, (rhs,), (tangent,))[1]
        gradient = torch.func.grad(lambda y: (lhs[0] @ y * tangent[:5]).sum())(rhs)
    check(mapped, torch.matmul, lhs, rhs, mode, 7)
    check(pushed, torch.mm, lhs[0], tangent, mode, 7)
    check(gradient, lambda x, w: x.t() @ w, lhs[0], tangent[:5], mode, 5)


def test_inference_mode() -> None:
    lhs, rhs = random(5, 7), random(7, 4)
    with torch.inference_mode(), precision("medium"):
        check(lhs @ rhs, torch.mm, lhs, rhs, "medium", 7)


# ---------------------------------------------------------------------------------- exact values


@pytest.mark.parametrize(
    "mode, square, unit",
    [
        ("medium", 1.0, 1.0),
        ("high", 1 + 2.0**-8, 1 + 2.0**-9),
        ("highest", 1 + 2.0**-8 + 2.0**-18, 1 + 2.0**-9 + 2.0**-18),
    ],
)
def test_each_pass_adds_its_part(mode: str, square: float, unit: float) -> None:
    x = torch.tensor([1 + 2.0**-9], device="tpu")  # hi 1, mid 2**-9
    y = torch.tensor([1 + 2.0**-9 + 2.0**-18], device="tpu")  # hi 1, mid 2**-9, lo 2**-18
    with precision(mode):
        assert torch.dot(x, x).item() == square
        assert torch.dot(y, torch.ones_like(y)).item() == unit
        assert torch.dot(torch.ones_like(y), y).item() == unit


def test_without_a_setting_products_are_exact() -> None:
    x = torch.tensor([1 + 2.0**-11], device="tpu")
    assert torch.dot(x, x).item() == 1 + 2.0**-10 + 2.0**-22
    with precision("medium"):
        assert torch.dot(x, x).item() == 1
    assert torch.dot(x, x).item() == 1 + 2.0**-10 + 2.0**-22


@every_mode
def test_bfloat16_values_are_multiplied_exactly(mode: str) -> None:
    x, y = random(5, 8).bfloat16().float(), random(8, 3).bfloat16().float()
    with precision(mode):
        rounded = x @ y
    torch.testing.assert_close(rounded, x @ y, rtol=0, atol=0)


@every_mode
@pytest.mark.parametrize(
    "x, y, product",
    [
        (np.inf, 1.0, np.inf),
        (np.inf, -1.0, -np.inf),
        (np.inf, 0.999, np.inf),  # hi 1, mid negative
        (-np.inf, 1 + 2.0**-9, -np.inf),
        (np.inf, np.inf, np.inf),
        (np.inf, 0.0, np.nan),
        (np.nan, 1.0, np.nan),
        (1.0, np.nan, np.nan),
        (3.4e38, 0.5, np.inf),  # rounds to a bfloat16 infinity
        (3.38e38, 0.5, None),
        (1e-30, 1e-30, 0.0),
    ],
)
def test_values_that_are_not_finite_or_very_large(
    x: float, y: float, product: float | None, mode: str
) -> None:
    op = kernel_op("matmul")
    lhs, rhs = torch.tensor([[x, 0.0]] * 8), torch.tensor([[y], [1.0]])
    with precision(mode):
        found = [(lhs.to("tpu") @ rhs.to("tpu"))[0].item(), op(lhs, rhs)[0, 0].item()]
    for value in found:
        if product is None:
            assert value == pytest.approx(x * y, rel=2.0**-8)
        else:
            np.testing.assert_equal(value, product)


@every_mode
def test_an_infinity_spoils_only_the_sums_it_is_in(mode: str) -> None:
    lhs, rhs = random(4, 5), random(5, 3)
    lhs[1, 2] = torch.inf
    with precision(mode):
        actual = lhs @ rhs
    assert torch.equal(actual[1].cpu(), torch.inf * rhs[2].sign().cpu())
    rows = torch.tensor([0, 2, 3])
    check(actual.cpu()[rows], torch.mm, lhs.cpu()[rows], rhs, mode, 5)


# ---------------------------------------------------------------------------------- shapes, dtypes, errors


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 9),
    k=st.integers(0, 40),
    n=st.integers(0, 9),
    mode=st.sampled_from(sorted(PASSES)),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_of_any_shape(m: int, k: int, n: int, mode: str, transposed: bool, seed: int) -> None:
    torch.manual_seed(seed)
    lhs = random(k, m).t() if transposed else random(m, k)
    rhs = random(n, k).t() if transposed else random(k, n)
    with precision(mode):
        check(lhs @ rhs, torch.mm, lhs, rhs, mode, k)
        check(torch.bmm(lhs[None], rhs[None])[0], torch.mm, lhs, rhs, mode, k)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64]
)
def test_other_dtypes_are_not_touched(dtype: torch.dtype) -> None:
    x, y = (random(5, 7) * 8).to(dtype), (random(7, 3) * 8).to(dtype)
    exact = x @ y
    with precision("medium"):
        assert torch.equal(x @ y, exact)
        assert torch.equal(torch.mm(x, y, out=torch.empty_like(exact)), exact)


def test_cpu_tensors_are_not_touched() -> None:
    x, y = random(5, 7, device="cpu"), random(7, 3, device="cpu")
    exact = x @ y
    with precision("medium"):
        assert torch.equal(x @ y, exact)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mm(random(2, 3), random(4, 5)),
        lambda: torch.addmm(random(9), random(2, 3), random(3, 5)),
        lambda: torch.mm(random(2, 3), random(3, 5, device="cpu")),
        lambda: torch.nn.functional.conv2d(random(1, 2, 3, 3), random(1, 3, 2, 2)),
    ],
)
def test_wrong_arguments_raise_the_error_they_raise_without_emulation(call: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError) as without:
        call()
    with precision("medium"), pytest.raises(RuntimeError) as emulated:
        call()
    assert str(emulated.value) == str(without.value)


# ---------------------------------------------------------------------------------- the setting


def is_emulated() -> bool:
    x = torch.tensor([1 + 2.0**-9], device="tpu")
    return torch.dot(x, x).item() == 1


def test_contexts_nest_and_end_with_an_error() -> None:
    with precision("medium"):
        with contextlib.suppress(ZeroDivisionError), precision(Precision.HIGHEST):
            assert not is_emulated()
            raise ZeroDivisionError
        assert is_emulated()
    assert not is_emulated()


def test_context_works_as_a_decorator() -> None:
    assert precision("medium")(is_emulated)()
    assert not is_emulated()


def test_torch_tpu_names() -> None:
    assert [p.name for p in torch.tpu.Precision] == ["DEFAULT", "HIGH", "HIGHEST"]
    assert [p.passes for p in torch.tpu.Precision] == [1, 3, 6]
    with torch.tpu.precision(torch.tpu.Precision.DEFAULT):
        assert is_emulated()


@pytest.mark.parametrize("mode", ["default", "", None, 3])
def test_unknown_precision_is_refused(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"the precision given is .*; it must be one of .*HIGH \('high'\)"):
        with precision(mode):
            pass


def test_switch_follows_torchs_setting() -> None:
    emulate_precision()
    assert not is_emulated()  # torch's default is "highest"
    torch.set_float32_matmul_precision("medium")
    assert is_emulated()
    with precision("high"):
        assert not is_emulated()
    emulate_precision(False)
    assert not is_emulated()


def test_switch_takes_a_bool() -> None:
    with pytest.raises(TypeError, match="takes True or False, got 'medium'"):
        emulate_precision("medium")  # type: ignore[arg-type]


def in_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_context_holds_for_its_thread_alone() -> None:
    with precision("medium"):
        assert not in_thread(is_emulated)
        assert is_emulated()

    def other() -> bool:
        with precision("medium"):
            return is_emulated() and not in_thread(is_emulated)

    assert in_thread(other)
    assert not is_emulated()


def test_switch_holds_for_every_thread() -> None:
    torch.set_float32_matmul_precision("medium")
    emulate_precision()
    assert in_thread(is_emulated)


@pytest.mark.parametrize("run", [lambda call: call(), in_thread], ids=["here", "in a thread"])
@pytest.mark.parametrize("op", ["aten", "jax_op"])
def test_backward_follows_its_caller(op: str, run: Callable[[Callable[[], Any]], Any]) -> None:
    product = torch.mm if op == "aten" else kernel_op("matmul")
    one = torch.full((8, 8), 0.0, device="tpu")
    one[0, 0] = 1 + 2.0**-9

    def gradient(forward: str, backward: str) -> float:
        x = one.clone().requires_grad_()
        with precision(forward):
            out = product(x, one)
        with precision(backward):
            return torch.autograd.grad(out, x, one)[0][0, 0].item()

    assert run(lambda: gradient("high", "medium")) == 1
    assert run(lambda: gradient("medium", "high")) == 1 + 2.0**-8


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_environment_variable_switches_emulation_on_for_every_device() -> None:
    last = "tpu:1" if extension.loaded() else "tpu:0"
    code = f"""
import sys, torch
x = torch.tensor([[1 + 2.0**-9]], device="{last}")
torch.set_float32_matmul_precision("medium")
out = x @ x
print(out.item(), out.device, torch.addmm(x, x, x).device, "jax" in sys.modules)
"""
    done = child(code, BRIDGE_TPU_PRECISION="on", BRIDGE_DEVICE_COUNT="2" if extension.loaded() else "1")
    assert done.stdout.split() == ["1.0", last, last, "False"], done.stderr


def test_wrong_environment_variable_is_refused() -> None:
    done = child("import bridge.precision", BRIDGE_TPU_PRECISION="yes")
    assert "the environment variable BRIDGE_TPU_PRECISION is 'yes'; it must be 'on' or 'off'" in done.stderr


def test_process_that_asks_for_nothing_keeps_the_kernels_it_has() -> None:
    code = "import sys, torch; x = torch.ones(2, 2, device='tpu') @ torch.ones(2, 2, device='tpu'); "
    done = child(code + "print('bridge.device.matmul' in sys.modules)", BRIDGE_TPU_PRECISION="")
    assert done.stdout.split() == ["False"], done.stderr


# ---------------------------------------------------------------------------------- jax_op


def matmul_kernel(x: Any, y: Any, dot: Callable[[Any, Any], Any], tile: int = 4) -> Any:
    def body(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        o_ref[...] = dot(x_ref[...], y_ref[...]).astype(o_ref.dtype)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32),
        grid=(x.shape[0] // tile,),
        in_specs=[
            pl.BlockSpec((tile, x.shape[1]), lambda i: (i, 0)),  # x: rows of step i
            pl.BlockSpec(y.shape, lambda i: (0, 0)),  # y: all of it
        ],
        out_specs=pl.BlockSpec((tile, y.shape[1]), lambda i: (i, 0)),
        name="matmul",
    )(x, y)


@jax.custom_vjp
def _dot_with_a_rule(x: Any, y: Any) -> Any:
    return jnp.dot(x, y)


_dot_with_a_rule.defvjp(
    lambda x, y: (jnp.dot(x, y), (x, y)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g)
)


def _in_a_loop(x: Any, y: Any) -> Any:
    """Row by row, in a scan with a branch."""

    def step(carry: int, row: Any) -> tuple[int, Any]:
        return carry + 1, jax.lax.cond(carry >= 0, lambda: row @ y, lambda: jnp.zeros(y.shape[1]))

    return jax.lax.scan(step, 0, x)[1]


def _precise(precision: Any) -> Callable[[Any, Any], Any]:
    return lambda x, y: jax.lax.dot(x, y, precision=precision)


DOTS: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": jnp.dot,
    "DEFAULT": _precise(jax.lax.Precision.DEFAULT),
    "HIGH": _precise(jax.lax.Precision.HIGH),
    "HIGHEST": _precise(jax.lax.Precision.HIGHEST),
    "HIGH for one operand": _precise((jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH)),
    "float32 results of bfloat16": lambda x, y: jnp.dot(
        x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    ),
    "mixed": lambda x, y: jax.lax.dot_general(
        x.astype(jnp.bfloat16), y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    ),
    "loop": _in_a_loop,
    "custom_vjp": _dot_with_a_rule,
}


def kernel_op(name: str) -> bridge.JaxOp:
    """x @ y in a Pallas kernel, with the dot of this name."""
    found = _ops.get(name)
    if found is None:
        dot = DOTS[name]

        def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
            return matmul_kernel(x, y, dot)

        def reference(x: Any, y: Any) -> Any:
            return dot(x, y).astype(jnp.float32)

        found = _ops[name] = bridge.jax_op(
            f"precision_tests::k{len(_ops)}", matmul, reference=reference, overwrite=True
        )
    return found


_ops: dict[str, bridge.JaxOp] = {}


@every_mode
@pytest.mark.parametrize("interpretation", MODES)
def test_dot_in_a_kernel_is_that_of_the_parts(interpretation: str, device: torch.device, mode: str) -> None:
    lhs, rhs = random(8, 32, device=device), random(32, 6, device=device)
    op = kernel_op("matmul")
    with bridge.interpret(interpretation), precision(mode):
        actual = op(lhs, rhs)
    assert actual.device.type == device.type
    check(actual, torch.mm, lhs, rhs, mode, 32)


@every_mode
@pytest.mark.parametrize(
    "name, own",
    [("DEFAULT", None), ("HIGH", "high"), ("HIGHEST", "highest"), ("HIGH for one operand", "high")],
)
def test_precision_that_a_kernel_gives_is_kept(name: str, own: str | None, mode: str) -> None:
    lhs, rhs = random(8, 32), random(32, 6)
    with precision(mode):
        actual = kernel_op(name)(lhs, rhs)
    if name == "HIGH for one operand" and mode == "highest":
        own = "highest"  # that of the other one, which says nothing
    check(actual, torch.mm, lhs, rhs, own or mode, 32)


@every_mode
@pytest.mark.parametrize("interpretation", ["fast", "tpu"])
@pytest.mark.parametrize("name", ["loop", "custom_vjp"])
def test_dots_are_found_in_nested_programs(name: str, interpretation: str, mode: str) -> None:
    lhs, rhs = random(8, 32), random(32, 6)
    with bridge.interpret(interpretation), precision(mode):
        actual = kernel_op(name)(lhs, rhs)
    check(actual, torch.mm, lhs, rhs, mode, 32)


@every_mode
def test_dots_of_bfloat16_are_not_touched(mode: str) -> None:
    lhs, rhs = random(8, 32), random(32, 6)
    exact = kernel_op("float32 results of bfloat16")(lhs, rhs)
    with precision(mode):
        torch.testing.assert_close(kernel_op("float32 results of bfloat16")(lhs, rhs), exact, rtol=0, atol=0)
        mixed = kernel_op("mixed")(lhs, rhs)
    check(mixed, torch.mm, lhs.bfloat16().float(), rhs, mode, 32)


def test_a_compiled_program_of_another_precision_is_not_used() -> None:
    lhs, rhs = random(8, 32), random(32, 6)
    op = kernel_op("matmul")
    exact = op(lhs, rhs)
    for mode in [*PASSES, *PASSES]:
        with precision(mode):
            check(op(lhs, rhs), torch.mm, lhs, rhs, mode, 32)
        assert torch.equal(op(lhs, rhs), exact)


@every_mode
def test_gradient_of_a_jax_op_is_that_of_the_parts(device: torch.device, mode: str) -> None:
    lhs, rhs = (
        random(8, 32, device=device, requires_grad=True),
        random(32, 6, device=device, requires_grad=True),
    )
    weight = random(8, 6, device=device)
    with precision(mode):
        found = torch.autograd.grad(kernel_op("matmul")(lhs, rhs), [lhs, rhs], weight)
    check(found[0], lambda w, y: w @ y.t(), weight, rhs, mode, 6)
    check(found[1], lambda w, x: x.t() @ w, weight, lhs, mode, 8)


@every_mode
def test_vmap_of_a_jax_op(mode: str) -> None:
    lhs, rhs = random(3, 8, 32), random(32, 6)
    with precision(mode):
        actual = torch.vmap(kernel_op("matmul"), (0, None))(lhs, rhs)
    check(actual, torch.matmul, lhs, rhs, mode, 32)


@every_mode
def test_convolution_and_ragged_dot_in_a_jax_op(mode: str) -> None:
    @bridge.jax_op("precision_tests::conv", overwrite=True)
    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID")

    @bridge.jax_op("precision_tests::ragged", overwrite=True)
    def ragged(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, w, sizes)

    x, w = random(2, 3, 8, 8), random(4, 3, 3, 3)
    rows, weights = random(6, 16), random(2, 16, 8)
    with precision(mode):
        check(conv(x, w), torch.nn.functional.conv2d, x, w, mode, 27)
        out = ragged(rows, weights, torch.tensor([2, 4], dtype=torch.int32, device="tpu"))
    check(out[:2], torch.mm, rows[:2], weights[0], mode, 16)
    check(out[2:], torch.mm, rows[2:], weights[1], mode, 16)


@pytest.mark.parametrize(
    "algorithm, passes", [("BF16_BF16_F32", 1), ("BF16_BF16_F32_X3", 3), ("BF16_BF16_F32_X6", 6)]
)
def test_algorithm_named_in_a_dot_is_kept(algorithm: str, passes: int) -> None:
    preset = jax.lax.DotAlgorithmPreset[algorithm]

    @bridge.jax_op("precision_tests::preset", overwrite=True)
    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot(x, y, precision=preset)

    lhs, rhs = random(8, 32), random(32, 6)
    own = next(mode for mode, count in PASSES.items() if count == passes)
    for mode in ("medium", "highest"):
        with precision(mode):
            check(dot(lhs, rhs), torch.mm, lhs, rhs, own, 32)


# ---------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "tpu"])
def test_compiled_function_follows_the_setting_at_each_call(backend: str) -> None:
    op = kernel_op("matmul")

    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return op(x, y), x @ y

    compiled = torch.compile(both, backend=backend, fullgraph=True)
    lhs, rhs = random(8, 32, requires_grad=True), random(32, 6)
    weight = random(8, 6)
    exact = both(lhs, rhs)
    for mode in [*PASSES, *PASSES]:
        for a, b in zip(compiled(lhs, rhs), exact, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        with precision(mode):
            for out in compiled(lhs, rhs):
                check(out, torch.mm, lhs, rhs, mode, 32)
                grad = torch.autograd.grad(out, lhs, weight, retain_graph=True)[0]
                check(grad, lambda w, y: w @ y.t(), weight, rhs, mode, 6)


def _with_context_inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x * 1
    with torch.tpu.precision("medium"):
        out = x @ y
    return out + 0


def test_context_inside_a_compiled_function_breaks_the_graph() -> None:
    lhs, rhs = random(8, 32), random(32, 6)
    compiled = torch.compile(_with_context_inside, backend="eager")
    check(compiled(lhs, rhs), torch.mm, lhs, rhs, "medium", 32)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.tpu.precision is not part of a graph"):
        torch.compile(_with_context_inside, backend="eager", fullgraph=True)(lhs, rhs)


# ---------------------------------------------------------------------------------- docs


def test_figures_in_the_docs_are_true() -> None:
    text = (Path(precision_module.__file__).parents[1] / "docs" / "precision.md").read_text()
    snippet, shown = re.findall(r"```python\n(import torch\n.*?)```\s*```text\n(.*?)```", text, re.DOTALL)[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(snippet, "docs/precision.md", "exec"), {})
    figures, expected = (
        dict(map(str.split, printed.getvalue().splitlines())),
        dict(map(str.split, shown.splitlines())),
    )
    assert figures.keys() == expected.keys() == {"float32", *PASSES}
    for mode, figure in figures.items():
        rounding_of_sums = mode in ("float32", "highest")  # their order differs between processors
        assert float(figure) == pytest.approx(float(expected[mode]), rel=1.0 if rounding_of_sums else 0.1)

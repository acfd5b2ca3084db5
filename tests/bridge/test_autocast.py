"""Ops under torch.autocast: with `autocast=True` as torch's own matmul, without it not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
import torch

from bridge import jax_op


@jax_op("t_autocast::matmul", autocast=True)
def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return x @ y


@jax_op("t_autocast::plain")
def plain(x: jax.Array) -> jax.Array:
    return x * 2


@jax_op("t_autocast::to_half", autocast=torch.float16)
def to_half(x: jax.Array) -> jax.Array:
    return x * 2


@jax_op("t_autocast::mixture", autocast=True)
def mixture(xs: Sequence[jax.Array], bias: jax.Array | None, index: jax.Array, scale: float) -> jax.Array:
    total = jnp.stack(xs).sum(axis=0) * scale
    return total[index] if bias is None else total[index] + bias


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("left", "right"), list(itertools.product(FLOATS, FLOATS)))
def test_the_dtype_rule_is_torch_s(
    left: torch.dtype, right: torch.dtype, wanted: torch.dtype, device: torch.device
) -> None:
    x, y = torch.randn(3, 4).to(device, left), torch.randn(4, 2).to(device, right)
    with torch.autocast(device.type, wanted):
        theirs, ours, through_torch = torch.matmul(x, y), matmul(x, y), torch.ops.t_autocast.matmul(x, y)
    assert ours.dtype is theirs.dtype is through_torch.dtype is wanted
    # Four products, each of operands and result rounded to the wanted dtype.
    limit = 8 * torch.finfo(wanted).eps
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=limit, atol=limit)


def test_float64_and_integers_are_left_alone(device: torch.device) -> None:
    x, y = (
        torch.randn(3, 4, dtype=torch.float64).to(device),
        torch.randn(4, 2, dtype=torch.float64).to(device),
    )
    with torch.autocast(device.type, torch.bfloat16):
        assert matmul(x, y).dtype is torch.matmul(x, y).dtype is torch.float64
        assert matmul(x.long(), y.long()).dtype is torch.int64


def test_without_the_flag_autocast_does_nothing(device: torch.device) -> None:
    x = torch.randn(3).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert plain(x).dtype is torch.float32
        assert torch.ops.t_autocast.plain(x).dtype is torch.float32


def test_a_dtype_of_its_own(device: torch.device) -> None:
    x = torch.randn(3).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert to_half(x).dtype is torch.float16
    assert to_half(x).dtype is torch.float32


def test_outside_disabled_and_of_another_device(device: torch.device) -> None:
    x, y = torch.randn(3, 4).to(device), torch.randn(4, 2).to(device)
    assert matmul(x, y).dtype is torch.float32
    with torch.autocast(device.type, torch.bfloat16):
        with torch.autocast(device.type, enabled=False):
            assert matmul(x, y).dtype is torch.float32
        assert matmul(x, y).dtype is torch.bfloat16
    other = "tpu" if device.type == "cpu" else "cpu"
    with torch.autocast(other, torch.bfloat16):
        assert matmul(x, y).dtype is torch.float32


def test_lists_optionals_and_indices(device: torch.device) -> None:
    xs = [torch.randn(3).to(device), torch.randn(3).to(device, torch.bfloat16)]
    index = torch.tensor([2, 0]).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert mixture(xs, None, index, 2.0).dtype is torch.bfloat16
        assert mixture(xs, torch.randn(2).to(device), index, 2.0).dtype is torch.bfloat16


def test_gradients_have_the_dtype_of_their_inputs(device: torch.device) -> None:
    x = torch.randn(3, 4).to(device).requires_grad_()
    y = torch.randn(4, 2).to(device, torch.float16).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        out = matmul(x, y)
    out.float().sum().backward()
    assert out.dtype is torch.bfloat16
    assert x.grad is not None and x.grad.dtype is torch.float32
    assert y.grad is not None and y.grad.dtype is torch.float16
    want = y.detach().cpu().float().sum(1).expand(3, 4)
    limit = 8 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(x.grad.cpu(), want, rtol=limit, atol=limit)


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_as_eager(inside: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 4).to(device).requires_grad_()
    y = torch.randn(4, 2).to(device, torch.bfloat16)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if inside:
            with torch.autocast(device.type, torch.bfloat16):
                return matmul(x, y), plain(x)
        return matmul(x, y), plain(x)

    def run(f: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            product, doubled = f(x)
        product.float().sum().backward()
        assert x.grad is not None
        gradient, x.grad = x.grad, None
        return [product.detach(), doubled.detach(), gradient]

    eager = run(model)
    assert [t.dtype for t in eager] == [torch.bfloat16, torch.float32, torch.float32]
    for got, want in zip(run(torch.compile(model, fullgraph=True, backend="aot_eager")), eager, strict=True):
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0)

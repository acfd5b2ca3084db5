"""`torch.autocast("tpu")`: lower precision where torch's policy has it, float32 where it does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bridge.device import autocast


def test_policy() -> None:
    x, w = torch.randn(4, 4, device="tpu"), torch.randn(4, 4, device="tpu")
    half = x.bfloat16()
    with torch.autocast("tpu"):
        for result in (x @ w, F.linear(x, w), torch.einsum("ij,jk->ik", x, w), torch.bmm(x[None], w[None])):
            assert result.dtype is torch.bfloat16
        assert F.conv1d(x[None], torch.ones(2, 4, 1, device="tpu")).dtype is torch.bfloat16
        for result in (half.softmax(-1), half.exp(), half.sum(), F.layer_norm(half, (4,)), half.pow(2)):
            assert result.dtype is torch.float32
        assert torch.addcmul(half, half, x).dtype is torch.float32
        assert torch.cat([half, x]).dtype is torch.stack([half, x]).dtype is torch.float32
        assert torch.cat([half, half]).dtype is torch.bfloat16
        assert (half + 1).dtype is torch.bfloat16 and (half + x).dtype is torch.float32
        assert (x.double() @ w.double()).dtype is torch.float64
        assert F.scaled_dot_product_attention(x[None], x[None], x[None]).dtype is torch.bfloat16
        with torch.autocast("tpu", enabled=False):
            assert (x @ w).dtype is torch.float32
    with torch.autocast("tpu", dtype=torch.float16):
        assert (x @ w).dtype is torch.float16
    assert (x @ w).dtype is torch.float32


def test_every_op_of_the_policy_exists() -> None:
    for name in (*autocast._LOWER_PRECISION, *autocast._FLOAT32, *autocast._WIDEST):
        assert autocast._op(name)._schema.name.startswith("aten::")


def test_values_and_gradients_are_those_of_explicit_casts() -> None:
    x, w = torch.randn(3, 5, device="tpu"), torch.randn(5, 2, device="tpu", requires_grad=True)
    with torch.autocast("tpu"):
        loss = (x @ w).softmax(-1).square().sum()
    loss.backward()
    got = w.grad
    explicit = w.detach().clone().requires_grad_()
    (x.bfloat16() @ explicit.bfloat16()).float().softmax(-1).square().sum().backward()
    assert got is not None and got.dtype is torch.float32
    assert explicit.grad is not None and torch.equal(got, explicit.grad)


def test_cpu_tensors_are_not_touched() -> None:
    with torch.autocast("tpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_unsafe_and_unsupported_are_refused() -> None:
    p = torch.full((2,), 0.5, device="tpu")
    with torch.autocast("tpu"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(p, p)
    with pytest.warns(UserWarning, match="target dtype is not supported"):
        torch.autocast("tpu", dtype=torch.float64)

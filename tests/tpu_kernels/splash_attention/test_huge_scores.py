"""Rows whose scores are all huge: log(sum(exp(s - m))) is lost beside m in lse, and gradients are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tpu_kernels import masks, splash_attention

L, S, D = 9, 11, 8


def shifts(value: float) -> torch.Tensor:
    """A bias that is `value` for all keys of the rows from 4 on, and 0 before."""
    bias = torch.zeros(L, S)
    bias[4:] = value
    return bias


def gradients(
    attend: Callable[..., torch.Tensor], dtype: torch.dtype, bias: torch.Tensor
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_o = (
        torch.randn(1, 2, length, D, generator=generator).to(dtype).requires_grad_()
        for length in (L, S, S, L)
    )
    inputs = [q, k, v, bias.clone().requires_grad_()]
    return [t.float() for t in torch.autograd.grad(attend(*inputs), inputs, d_o.detach())]


def with_mean(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention in float64 of scores that were rounded to float32, as a huge bias rounds them."""
    scores = (q.double() @ k.double().mT / D**0.5).float() + bias
    # The sum of a small and a huge number, with the derivative 1 for both.
    return (scores.double().softmax(-1) @ v.double()).to(q.dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.finfo(torch.float32).min, torch.float32),
        pytest.param(torch.finfo(torch.float32).min, torch.bfloat16, marks=pytest.mark.slow),
        (-1e4, torch.float32),
        *(
            pytest.param(value, dtype, marks=pytest.mark.slow)
            for value in (-1e9, 1e6)
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
def test_gradients(value: float, dtype: torch.dtype) -> None:
    want = gradients(with_mean, dtype, shifts(value))
    got = gradients(lambda q, k, v, b: splash_attention(q, k, v, bias=b, impl="pallas"), dtype, shifts(value))
    # Products are of numbers rounded to dtype, and sums of about S of them; scores themselves are rounded
    # to float32 at the size of the bias, which may differ by a bit between two ways to compute them.
    rounded = min(abs(value) * 2.0**-23, 1.0) if abs(value) < 1e8 else 0.0
    error = 4 * S**0.5 * torch.finfo(dtype).eps + 4 * rounded
    for name, ours, wanted in zip("qkvb", got, want, strict=True):
        assert (ours - wanted).norm() <= error * wanted.norm() + 1e-6, name


def test_a_huge_constant_in_a_score_function() -> None:
    """Not only arrays bring huge numbers."""

    def later_ones(s, b, h, q, kv):
        return torch.where(q < 4, s, -1e9)

    want = gradients(with_mean, torch.float32, shifts(-1e9))[2]
    got = gradients(
        lambda q, k, v, b: splash_attention(q, k, v, score_mod=later_ones, impl="pallas") + 0 * b.sum(),
        torch.float32,
        shifts(0.0),
    )[2]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_with_dropout_sinks_and_lse() -> None:
    """The kernel's gradients are those of the reference also for what else depends on a row's sum."""
    lengths = torch.tensor([S - 2])

    def attend(impl: Any) -> Callable[..., torch.Tensor]:
        def call(q, k, v, b):
            o, lse = splash_attention(
                q,
                k,
                v,
                bias=b,
                mask=masks.lengths(lengths),
                dropout_p=0.25,
                seed=3,
                return_lse=True,
                impl=impl,
            )
            return o * (1 + (lse - lse.detach()).unsqueeze(-1))

        return call

    for value in (torch.finfo(torch.float32).min, -1e9):
        want = gradients(attend("reference"), torch.float32, shifts(value))
        got = gradients(attend("pallas"), torch.float32, shifts(value))
        for ours, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)

"""A few calls with the kernel itself, forward and backward, in place of its reference."""

from __future__ import annotations

import pytest
import torch

from .conftest import Ours
from .oracle import Attention, check


@pytest.fixture
def interpretation() -> str:
    return "fast"


def causal_and_padding() -> torch.Tensor:
    mask = torch.ones(2, 1, 70, 70, dtype=torch.bool).tril()
    mask[1, ..., :9] = False
    return mask


CALLS = {
    "causal": lambda q, k, v: Attention(q, k, v, is_causal=True),
    "causal and padding as a tensor": lambda q, k, v: Attention(q, k, v, causal_and_padding()),
    "any bool tensor": lambda q, k, v: Attention(q, k, v, torch.rand(4, 70, 70) > 0.5),
    "bias": lambda q, k, v: Attention(q, k, v, torch.randn(1, 1, 70)),
}


@pytest.mark.parametrize(
    "name",
    [
        "causal and padding as a tensor",
        "bias",
        pytest.param("causal", marks=pytest.mark.slow),
        pytest.param("any bool tensor", marks=pytest.mark.slow),
    ],
)
def test_right_to_rounding(ours: Ours, name: str) -> None:
    q, k, v = (torch.randn(2, heads, 70, 24) for heads in (4, 2, 2))
    call = CALLS[name](q, k, v)
    check(
        Attention(call.query, call.key, call.value, call.mask, call.is_causal, enable_gqa=True),
        ours.device,
        ours,
    )
    assert ours.used() == 1

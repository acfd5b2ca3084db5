"""What `varlen_attention` refuses."""

from __future__ import annotations

# Tests call with wrong types on purpose.
# pyright: reportArgumentType=false
from typing import Any

import pytest
import torch

from tpu_kernels import varlen_attention

T = torch.zeros(6, 2, 4)
ENDS = torch.tensor([0, 4, 6])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"query": None}, TypeError, "query must be a torch.Tensor, got NoneType"),
        ({"value": [[1.0]]}, TypeError, "value must be a torch.Tensor, got list"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be a torch.Tensor, got NoneType"),
        ({"alibi_slopes": torch.ones(3)}, RuntimeError, r"alibi_slopes must be \[2\], .* or \[2, 2\].*\[3\]"),
        ({"alibi_slopes": torch.ones(2, dtype=torch.int32)}, TypeError, "alibi_slopes must be .*int32"),
        ({"window_size": None}, TypeError, "window_size must be two ints.*got None"),
        ({"window_size": 3}, TypeError, "window_size must be two ints.*got 3"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size must be two ints"),
        ({"window_size": (1.5, 0)}, TypeError, r"window_size must be two ints.*got \(1.5, 0\)"),
        ({"window_size": (True, 0)}, TypeError, "window_size must be two ints"),
        ({"window_size": (-3, 0)}, ValueError, r"at least -1, which is for all, got \(-3, 0\)"),
        ({"window_size": (0, -2)}, ValueError, "at least -1"),
    ],
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"query": T, "key": T, "value": T, "cu_seqlens_q": ENDS}
    with pytest.raises(error, match=message):
        varlen_attention(**given | changed)


@pytest.mark.parametrize("number", [6, 2**31 - 1, 2**40])
def test_a_window_larger_than_all(number: int) -> None:
    q = torch.randn(6, 2, 4)
    for window, wanted in (((number, 0), (-1, 0)), ((0, number), (0, -1))):
        ours = varlen_attention(q, q, q, ENDS, window_size=window)
        assert torch.equal(ours, varlen_attention(q, q, q, ENDS, window_size=wanted))


def test_a_window_may_be_a_list() -> None:
    q = torch.randn(6, 2, 4)
    ours = varlen_attention(q, q, q, ENDS, window_size=[1, 0])
    assert torch.equal(ours, varlen_attention(q, q, q, ENDS, window_size=(1, 0)))

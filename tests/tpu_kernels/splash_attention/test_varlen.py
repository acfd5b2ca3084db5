"""Packed sequences against one call for each of them."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpu_kernels import varlen_attention
from tpu_kernels.splash_attention.varlen import places_of, visible_keys

from . import oracle

Q_LENGTHS, K_LENGTHS = [3, 0, 5, 2, 4], [4, 2, 5, 0, 1]


def make(dtype: torch.dtype = torch.float64, padding: int = 3) -> list[torch.Tensor]:
    """query [17, 4, 6], key [15, 2, 6] and value [15, 2, 5], the last 3 tokens of each are padding."""
    tokens = [sum(Q_LENGTHS) + padding, sum(K_LENGTHS) + padding]
    shapes = (tokens[0], 4, 6), (tokens[1], 2, 6), (tokens[1], 2, 5)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def ends(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def one_by_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: Any,
    alignment: str,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    parts = []
    for number, (queries, keys, values) in enumerate(
        zip(
            q[: sum(Q_LENGTHS)].split(Q_LENGTHS),
            k[: sum(K_LENGTHS)].split(K_LENGTHS),
            v[: sum(K_LENGTHS)].split(K_LENGTHS),
            strict=True,
        )
    ):
        shift = len(keys) - len(queries) if alignment == "bottom_right" else 0
        distance = torch.arange(len(keys)) - torch.arange(len(queries))[:, None] - shift
        visible = torch.ones_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            visible &= distance >= -window[0]
        if window[1] >= 0:
            visible &= distance <= window[1]
        heads = (t.transpose(0, 1)[None] for t in (queries, keys, values))
        bias = torch.zeros(visible.shape, dtype=q.dtype)
        if slopes is not None:
            bias = -(slopes if slopes.dim() == 1 else slopes[number])[:, None, None] * distance.abs()
        bias = bias.masked_fill(~visible, -torch.inf)
        parts.append(F.scaled_dot_product_attention(*heads, bias, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat([*parts, torch.zeros(len(q) - sum(Q_LENGTHS), 4, 5, dtype=q.dtype)])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 1), (0, -1)])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_each_sequence_by_itself(window: Any, alignment: Any, device: torch.device) -> None:
    q, k, v = make()
    k[-3:], v[-3:] = torch.randn(3, 2, 6), torch.randn(3, 2, 5)
    o, lse = varlen_attention(
        *(t.to(device) for t in (q, k, v)),
        ends(Q_LENGTHS, torch.int64).to(device),
        ends(K_LENGTHS).to(device),
        window_size=window,
        alignment=alignment,
        return_lse=True,
    )
    torch.testing.assert_close(o.cpu(), one_by_one(q, k, v, window, alignment), rtol=1e-12, atol=1e-12)
    assert lse.shape == (17, 4) and (lse[-3:] == -torch.inf).all() and o.is_contiguous()


@pytest.mark.parametrize("window", [(-1, 0), (1, 1)])
def test_gradients_of_the_kernels(window: Any) -> None:
    """Also of sequences without queries or keys, of queries that see nothing, and of padding: all zero."""
    given = [t.requires_grad_() for t in make(torch.float32)]
    cu = ends(Q_LENGTHS), ends(K_LENGTHS)
    o = varlen_attention(*given, *cu, window_size=window, impl="pallas")
    g = torch.randn_like(o)
    wide = [t.detach().double().requires_grad_() for t in given]
    want = one_by_one(*wide, window, "bottom_right")
    found = [o.detach(), *torch.autograd.grad(o, given, g)]
    exact = [want.detach(), *torch.autograd.grad(want, wide, g.double())]

    # The same call with all scores, to bound what rounding does to them.
    first, end = visible_keys(places_of(*cu, len(g)), window)
    kv = torch.arange(len(given[1]))
    q, k, v, cotangent = (t.detach().transpose(0, 1)[None] for t in (*given, g))
    visible = (first[:, None] <= kv) & (kv < end[:, None])
    case = oracle.Case({"query": q, "key": k, "value": v}, cotangent, visible=visible)
    allowed = oracle.tolerances(case, "pallas")
    for name, ours, right in zip(("o", "query", "key", "value"), found, exact, strict=True):
        bound = torch.from_numpy(allowed[name])[0].transpose(0, 1) + 2.0**-24 * right.abs()
        assert bound.max() < 1e-3 * right.abs().max()
        assert bool(((ours - right).abs() <= bound).all()), name


@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("shape", [(4,), (5, 4)])
def test_alibi(shape: tuple[int, ...], alignment: Any, impl: Any, device: torch.device) -> None:
    """Slopes of heads, and of the heads of each sequence; the position is that within the sequence."""
    dtype = torch.float64 if impl == "reference" else torch.float32
    given = [*make(dtype), torch.rand(shape, dtype=dtype)]
    here = [t.to(device).requires_grad_() for t in given]
    cu = [ends(lengths).to(device) for lengths in (Q_LENGTHS, K_LENGTHS)]
    o = varlen_attention(
        *here[:3], *cu, window_size=(3, -1), alignment=alignment, alibi_slopes=here[3], impl=impl
    )
    g = torch.randn(o.shape, dtype=dtype)
    wide = [t.double().requires_grad_() for t in given]
    want = one_by_one(*wide[:3], (3, -1), alignment, wide[3])
    found = [o, *torch.autograd.grad(o, here, g.to(device))]
    exact = [want, *torch.autograd.grad(want, wide, g.double())]
    # At most 5 keys, scores below 20, distances below 6: some hundred roundings, each of what is below 10.
    allowed = 1000 * torch.finfo(dtype).eps
    for ours, right in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double().cpu(), right, rtol=allowed, atol=allowed)


def test_the_kernel_and_other_lengths_of_a_compiled_function() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return varlen_attention(q, k, v, cu, window_size=(-1, 0), alibi_slopes=slopes, impl="pallas")

    slopes = torch.tensor([[0.5, 0.1], [2.0, 1.0]])
    q = torch.randn(20, 2, 8)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.compiler.set_stance("default"):
        for lengths in ([5, 15], [20, 0], [1, 7]):
            o = compiled(q, q, q, ends(lengths))
            reference = varlen_attention(
                q, q, q, ends(lengths), window_size=(-1, 0), alibi_slopes=slopes, impl="reference"
            )
            torch.testing.assert_close(o, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "error", "message"),
    [
        (torch.zeros(2), None, TypeError, "cu_seqlens_q must be integers"),
        (ends([1]), ends([1, 1]), RuntimeError, "the same sequences, got 1 and 2"),
        (ends([1])[None], None, RuntimeError, r"must be \[sequences \+ 1\]"),
    ],
)
def test_refusals(cu_q: torch.Tensor, cu_k: torch.Tensor | None, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        varlen_attention(*make(), cu_q, cu_k)
    with pytest.raises(RuntimeError, match=r"query must be \[tokens, heads, head dimension\]"):
        varlen_attention(torch.zeros(1, 2, 3, 4), *make()[1:], ends([1]))

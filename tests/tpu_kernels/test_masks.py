"""The masks by name, against their definitions, and how they combine."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpu_kernels import masks
from tpu_kernels.expressions import Constant, ExpressionError, Variable, text
from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import INDICES
from tpu_kernels.expressions.hoist import load_from

B, H, L, S = 2, 2, 5, 7
Q, KV = np.arange(L)[:, None], np.arange(S)
IDS = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]])
KV_IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [1, 1, 0, 0, 5, 5, 5]])


def dense(mask: masks.Mask) -> np.ndarray:
    """bool [B, H, L, S]."""
    env: dict[str, Any] = {
        name: np.arange(size).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(zip(INDICES, (B, H, L, S), strict=True))
    }
    env |= {"q_len": L, "kv_len": S}
    captures = [np.asarray(capture) for capture in mask.captures]
    return np.broadcast_to(evaluate(mask.expression, env, load_from(captures, env)), (B, H, L, S))


LENGTHS = torch.tensor([3, 7])
KEEP = torch.tensor([[True, False, True, True, False, True, True], [True] * 7])
VISIBLE = torch.arange(B * H * L * S).reshape(B, H, L, S) % 3 == 0

DEFINITIONS: dict[str, tuple[Callable[[], masks.Mask], Any]] = {
    "full()": (masks.full, True),
    "causal()": (masks.causal, KV <= Q),
    "causal(alignment='bottom_right')": (lambda: masks.causal("bottom_right"), KV <= Q + 2),
    "causal(offset=-1)": (lambda: masks.causal(offset=-1), KV <= Q - 1),
    "sliding_window(2)": (lambda: masks.sliding_window(2), (KV <= Q) & (KV >= Q - 2)),
    "sliding_window(1, 2)": (lambda: masks.sliding_window(1, 2), (KV <= Q + 2) & (KV >= Q - 1)),
    "sliding_window(None, 1)": (lambda: masks.sliding_window(None, 1), KV <= Q + 1),
    "sliding_window(2, None, alignment='bottom_right')": (
        lambda: masks.sliding_window(2, None, alignment="bottom_right"),
        KV >= Q,
    ),
    "chunked(3)": (lambda: masks.chunked(3), KV // 3 == Q // 3),
    "chunked(3, alignment='bottom_right')": (
        lambda: masks.chunked(3, alignment="bottom_right"),
        KV // 3 == (Q + 2) // 3,
    ),
    "prefix_lm(3)": (lambda: masks.prefix_lm(3), (KV < 3) | (KV <= Q)),
    "prefix_lm(prefix)": (
        lambda: masks.prefix_lm(LENGTHS),
        (KV < LENGTHS.numpy()[:, None, None, None]) | (KV <= Q),
    ),
    "segments(q_ids, kv_ids)": (
        lambda: masks.segments(IDS, KV_IDS),
        IDS.numpy()[:, None, :, None] == KV_IDS.numpy()[:, None, None],
    ),
    "lengths(kv_lengths)": (lambda: masks.lengths(LENGTHS), KV < LENGTHS.numpy()[:, None, None, None]),
    "key_padding(keep)": (lambda: masks.key_padding(KEEP), KEEP.numpy()[:, None, None]),
    "tensor(visible)": (lambda: masks.tensor(VISIBLE), VISIBLE.numpy()),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definitions(name: str) -> None:
    make, expected = DEFINITIONS[name]
    mask = make()
    assert repr(mask) == name
    np.testing.assert_array_equal(dense(mask), np.broadcast_to(expected, (B, H, L, S)))
    np.testing.assert_array_equal(dense(~mask), ~dense(mask))


def test_a_dimension_of_one_or_none_stands_for_all() -> None:
    np.testing.assert_array_equal(
        dense(masks.tensor(VISIBLE[:1, :, :, :1])), np.broadcast_to(VISIBLE[:1, :, :, :1], (B, H, L, S))
    )
    np.testing.assert_array_equal(
        dense(masks.tensor(VISIBLE[0, 1])), np.broadcast_to(VISIBLE[0, 1], (B, H, L, S))
    )
    np.testing.assert_array_equal(dense(masks.tensor(VISIBLE[0])), np.broadcast_to(VISIBLE[0], (B, H, L, S)))
    one = masks.segments(IDS[0], KV_IDS[:1])
    np.testing.assert_array_equal(
        dense(one), dense(masks.segments(IDS[:1].repeat(2, 1), KV_IDS[:1].repeat(2, 1)))
    )
    assert one.text == "eq(int0[q],int1[0,kv])"


def test_combinations() -> None:
    a, c, d = masks.causal(), masks.segments(IDS, KV_IDS), masks.key_padding(KEEP)
    np.testing.assert_array_equal(dense(a & c | ~d), dense(a) & dense(c) | ~dense(d))
    np.testing.assert_array_equal(dense(a ^ c), dense(a) ^ dense(c))
    assert dense(masks.full() & a).tolist() == dense(a).tolist() and (masks.full() & a).text == a.text
    assert repr(a & c & ~(a | d)) == "causal() & segments(q_ids, kv_ids) & (~(causal() | key_padding(keep)))"
    assert (
        repr((a | d) & a) == "(causal() | key_padding(keep)) & causal()"
        and repr(a | d & a) == "causal() | (key_padding(keep) & causal())"
    )


def test_a_tensor_of_both_is_one_capture() -> None:
    both = masks.segments(IDS) & ~masks.segments(IDS, KV_IDS) | masks.key_padding(KEEP)
    assert len(both.captures) == 3
    assert both.captures[0] is IDS and both.captures[1] is KV_IDS and both.captures[2] is KEEP


def test_combinations_keep_what_sizes_must_be() -> None:
    both = masks.key_padding(KEEP) ^ ~masks.segments(IDS, KV_IDS) & masks.key_padding(KEEP)
    assert [(one.slot, one.axes) for one in both.sized] == [
        (0, ("b?", "kv")),
        (1, ("b?", "q")),
        (2, ("b?", "kv")),
        (0, ("b?", "kv")),
    ]
    assert not masks.function(lambda b, h, q, kv: IDS[b, q] == h).sized


def test_functions_of_torch_and_jax() -> None:
    ids = jnp.asarray(IDS)
    by_torch = masks.function(lambda b, h, q, kv: (q >= kv) & (IDS[b, q] == h))
    by_jax = masks.function(lambda b, h, q, kv: (q >= kv) & (ids[b, q] == h), "jax")
    assert by_torch.text == by_jax.text == "and(ge(q,kv),eq(int0[b,q],h))"
    np.testing.assert_array_equal(dense(by_torch), dense(by_jax))
    assert by_torch.captures == (IDS,) and "lambda" in repr(by_torch)


def test_of_an_expression_and_of_text() -> None:
    mask = masks.Mask.of(Variable("q").eq(Variable("h")))
    assert mask.text == "eq(q,h)" and text(mask.expression) == mask.text and repr(mask) == "Mask('eq(q,h)')"
    assert masks.Mask("true").expression is Constant(True)


def test_copies_and_pickles() -> None:
    mask = masks.causal() & masks.segments(IDS)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert other.text == mask.text and torch.equal(other.captures[0], IDS)


def test_in_a_compiled_function() -> None:
    def call(x: torch.Tensor, ids: torch.Tensor, window: int) -> tuple[torch.Tensor, str, int]:
        mask = masks.causal() & (masks.full() ^ masks.segments(ids)) | masks.sliding_window(
            window
        ) & masks.chunked(2)
        return x + mask.captures[0].sum(), mask.text, len(mask.captures)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for window in (2, 3):
        actual, expected = compiled(torch.ones(2), IDS, window), call(torch.ones(2), IDS, window)
        assert actual[1:] == expected[1:] and torch.equal(actual[0], expected[0])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.causal("left"), ValueError, "'top_left' or 'bottom_right', got 'left'"),  # type: ignore[arg-type]
        (lambda: masks.causal(offset=1.0), TypeError, "offset must be an int, got 1.0"),  # type: ignore[arg-type]
        (lambda: masks.sliding_window(True), TypeError, "left must be an int"),
        (lambda: masks.chunked(0), ValueError, "at least 1, got 0"),
        (lambda: masks.segments([1, 2]), TypeError, "tensor or array of integers, got list"),
        (lambda: masks.segments(IDS.float()), TypeError, "must be integers, got torch.float32"),
        (lambda: masks.segments(np.zeros(3)), TypeError, "must be integers, got float64"),
        (lambda: masks.lengths(IDS), ValueError, r"1 dimensions, got shape \[2, 5\]"),
        (lambda: masks.tensor(IDS), TypeError, "must be bool, got torch.int64"),
        (lambda: masks.tensor(VISIBLE[0, 0, 0]), ValueError, "2 or 3 or 4 dimensions"),
        (lambda: masks.Mask("q"), ExpressionError, "a mask is a bool, got the int"),
        (lambda: masks.Mask("gt(score,0.0)"), ExpressionError, "can't depend on the score"),
        (lambda: masks.Mask("bool1[q]", (IDS,)), ExpressionError, "needs capture 1, got 1"),
        (lambda: bool(masks.causal()), TypeError, "neither true nor false"),
        (lambda: masks.function(lambda b, h, q, kv: q >= kv, "tf"), ValueError, "'torch' or 'jax'"),  # type: ignore[arg-type]
    ],
)
def test_errors(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()

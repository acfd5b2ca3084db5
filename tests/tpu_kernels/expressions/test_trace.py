"""Traced functions: the same numbers as torch gives under vmap, for functions as people write them."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

from tpu_kernels.expressions import ExpressionError, text
from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import INDICES
from tpu_kernels.expressions.hoist import load_from
from tpu_kernels.expressions.trace import from_jax, from_torch

B, H, L, S = 2, 3, 12, 12
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2], [0] * 5 + [1] * 7])
PREFIXES = torch.tensor([3, 7], dtype=torch.int32)
SLOPES = torch.exp2(-8 * torch.arange(1, H + 1) / H)
TABLE = torch.linspace(-1, 1, H * (L + S - 1)).reshape(H, L + S - 1)
BIAS = torch.linspace(0, 1, B * H * L * S).reshape(B, H, L, S)
SCALE = torch.tensor(1.5)


def positions() -> dict[str, np.ndarray]:
    """b, h, q, kv, each along its own dimension."""
    return {
        name: np.arange(size, dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(zip(INDICES, (B, H, L, S), strict=True))
    }


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def sliding_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv <= 4) & (q >= kv)


def document(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (DOCUMENTS[b, q] == DOCUMENTS[b, kv]) & (q >= kv)


def document_in_steps(b: Any, h: Any, q: Any, kv: Any) -> Any:
    mine = DOCUMENTS[b]
    return mine[q] == mine[..., kv]


def prefix_lm(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv < PREFIXES[b]) | (q >= kv)


def natten(b: Any, h: Any, q: Any, kv: Any, width: int = 4, reach: int = 1) -> Any:
    q_x, q_y, kv_x, kv_y = q // width, q % width, kv // width, kv % width
    middle_x = q_x.clamp(reach, L // width - 1 - reach)
    middle_y = q_y.clamp(reach, width - 1 - reach)
    return ((middle_x - kv_x).abs() <= reach) & ((middle_y - kv_y).abs() <= reach)


def dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
    distance = torch.abs(q - kv)
    return torch.logical_and(distance <= 6, distance % 3 == 0)


def block_diffusion(b: Any, h: Any, q: Any, kv: Any, n: int = 6, size: int = 2) -> Any:
    noisy_q, noisy_kv = q < n, kv < n
    block_q = torch.where(noisy_q, q // size, (q - n) // size)
    block_kv = torch.where(noisy_kv, kv // size, (kv - n) // size)
    diagonal = (block_q == block_kv) & (noisy_q == noisy_kv)
    offset = (block_q > block_kv) & noisy_q & ~noisy_kv
    clean = (block_q >= block_kv) & ~noisy_q & ~noisy_kv
    return diagonal | offset | clean


def by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(h % 2 == 0, q >= kv, q - kv < 3)


def strided(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return ((torch.div(kv, 4, rounding_mode="floor") + 1) * 4 >= q) ^ torch.fmod(q - kv, 4).eq(0)


MASK_MODS = (
    causal,
    sliding_window,
    document,
    document_in_steps,
    prefix_lm,
    natten,
    dilated,
    block_diffusion,
    by_head,
    strided,
    and_masks(causal, document),
    or_masks(and_masks(causal, sliding_window), prefix_lm),
)


def alibi(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + SLOPES[h] * (kv - q)


def alibi_by_formula(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + torch.exp2(-((h + 1) * 8.0 / H)) * (kv - q)


def relative_bias(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + TABLE[h, q - kv + S - 1]


def relative_bias_from_the_end(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + TABLE[h][q - kv]  # negative distances count from the end


def relative_position(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + (q - kv)


def full_bias(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * SCALE + BIAS[b, h, q, kv]


def soft_cap(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def causal_score(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(q >= kv, score, -float("inf"))


def masked_fill(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score.masked_fill(q < kv, torch.finfo(torch.float32).min)


def in_place(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    score *= SCALE
    score += q % 3
    return score.clamp_(max=2)


def functions(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    x = F.softplus(score) + F.gelu(score) + F.silu(score) - torch.relu(score) + torch.sigmoid(score)
    x = x + score.square() + score.abs().sqrt() + torch.rsqrt(score**2 + 1) + torch.log1p(score.abs())
    return x + torch.maximum(score, torch.tensor(0.5)) + torch.expm1(score) * torch.sin(score) + score.pow(3)


SCORE_MODS = (
    alibi,
    alibi_by_formula,
    relative_bias,
    relative_bias_from_the_end,
    relative_position,
    full_bias,
    soft_cap,
    causal_score,
    masked_fill,
    in_place,
    functions,
)


@pytest.mark.parametrize("mask_mod", MASK_MODS, ids=lambda f: f.__qualname__)
def test_mask_mods(mask_mod: Callable[..., Any]) -> None:
    e, captures = from_torch(mask_mod, INDICES, "bool")
    env = positions()
    value = evaluate(e, env, load_from([capture.numpy() for capture in captures], env))
    expected = create_mask(mask_mod, B, H, L, S, device="cpu")
    assert 0 < expected.sum() < expected.numel()
    np.testing.assert_array_equal(np.broadcast_to(value, expected.shape), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the vmap it is compared with
@pytest.mark.parametrize("score_mod", SCORE_MODS, ids=lambda f: f.__name__)
def test_score_mods(score_mod: Callable[..., Any]) -> None:
    e, captures = from_torch(score_mod, ("score", *INDICES), "float")
    scores = torch.randn(B, H, L, S)
    env = positions()
    load = load_from([capture.numpy() for capture in captures], env)
    value = np.broadcast_to(evaluate(e, {**env, "score": scores.numpy()}, load), scores.shape)
    vmapped = score_mod
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        vmapped = torch.vmap(vmapped, in_dims=dims)
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex():
        expected = vmapped(scores.clone(), *(torch.arange(n) for n in (B, H, L, S)))
    # At most twenty roundings of terms below 100.
    np.testing.assert_allclose(value, expected, rtol=20 * 2.0**-24, atol=20 * 100 * 2.0**-24)


def test_texts_are_what_one_would_write() -> None:
    assert text(from_torch(document, INDICES)[0]) == "and(eq(int0[b,q],int0[b,kv]),ge(q,kv))"
    written = text(from_torch(relative_bias, ("score", *INDICES))[0])
    assert written == "add(score,float0[h,sub(add(sub(q,kv),12),1)])"


def test_captures_are_the_tensors_themselves() -> None:
    slopes, scale = torch.nn.Parameter(SLOPES.clone()), torch.nn.Parameter(torch.tensor(2.0))

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * scale + slopes[h] * q - slopes[h]

    e, captures = from_torch(score_mod, ("score", *INDICES))
    assert len(captures) == 2 and {id(c) for c in captures} == {id(slopes), id(scale)}
    assert text(e) == "%0=float1[h];sub(add(mul(score,float0[]),mul(%0,to_float(q))),%0)"
    # What is computed of them before they are indexed keeps its gradient.
    _, (derived,) = from_torch(lambda score, b, h, q, kv: score + slopes.exp()[h], ("score", *INDICES))
    derived.sum().backward()
    torch.testing.assert_close(slopes.grad, SLOPES.exp())


def test_numbers_are_constants() -> None:
    fill = torch.tensor(-7.0)
    e, captures = from_torch(lambda s, q: torch.where(q > 2, s, torch.tensor(-math.inf)) + 1, ("score", "q"))
    assert captures == () and text(e) == "add(select(gt(q,2),score,-inf),1.0)"
    e, captures = from_torch(lambda s, q: torch.where(q > 2, s, fill), ("score", "q"))
    assert captures == (fill,) and text(e) == "select(gt(q,2),score,float0[])"
    assert text(from_torch(lambda q: True, ("q",), "bool")[0]) == "true"


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda s, q, kv: s if q >= kv else -s, "torch.where"),
        (lambda s, q, kv: s * q.item(), "item"),
        (lambda s, q, kv: torch.cumsum(s, 0), "cumsum"),
        (lambda s, q, kv: s + SLOPES, r"shape \[3\].*index it"),
        (lambda s, q, kv: BIAS[0, q], r"shape \[12, 12\]"),
        (lambda s, q, kv: s + BIAS[0, 0, 0, 0:2][q], None),
        (lambda s, q, kv: BIAS[q, 1:2], "must be a number or `:`"),
        (lambda s, q, kv: SLOPES[q, kv], "too many indices"),
        (lambda s, q, kv: BIAS[q, 3, 0, 0], "outside of dimension 1"),
        (lambda s, q, kv: SLOPES[s], "must be an integer"),
        (lambda s, q, kv: s.to(torch.bfloat16), "bfloat16.*float32"),
        (lambda s, q, kv: "no", "must be a number or a 0-d tensor, got str"),
        (lambda s, q, kv: torch.nn.functional.linear(s[None], TABLE), "index"),
    ],
)
def test_what_torch_functions_may_not_do(fn: Callable[..., Any], message: str | None) -> None:
    if message is None:
        from_torch(fn, ("score", "q", "kv"))
        return
    with pytest.raises(ExpressionError, match=message) as error:
        from_torch(fn, ("score", "q", "kv"))
    # A line here, not of this package.
    assert "test_trace.py" in str(error.value)


def test_the_result_must_be_of_the_kind() -> None:
    with pytest.raises(ExpressionError, match="must return a bool, got int"):
        from_torch(lambda q, kv: q - kv, ("q", "kv"), "bool")
    assert text(from_torch(lambda q, kv: q - kv, ("q", "kv"), "float")[0]) == "to_float(sub(q,kv))"


def test_an_argument_that_escapes_says_so() -> None:
    kept: list[torch.Tensor] = []
    from_torch(lambda q: kept.append(q) or True, ("q",))
    with pytest.raises(ExpressionError, match="after it returned"):
        kept[0] + 1


# JAX.

J_DOCUMENTS, J_SLOPES, J_TABLE = jnp.asarray(DOCUMENTS), jnp.asarray(SLOPES), jnp.asarray(TABLE)

JAX_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "document": lambda s, b, h, q, kv: (J_DOCUMENTS[b, q] == J_DOCUMENTS[b][kv]) & (q >= kv),
    "window": lambda s, b, h, q, kv: jnp.abs(q - kv) <= 3,
    "grid": lambda s, b, h, q, kv: (jnp.abs(q // 4 - kv // 4) <= 1) & ((q - 7) % 4 == kv % 4),
    "alibi": lambda s, b, h, q, kv: s - J_SLOPES[h] * (q - kv),
    "table": lambda s, b, h, q, kv: s + J_TABLE[:, q - kv + S - 1][h],
    "taken": lambda s, b, h, q, kv: s + jnp.take(J_SLOPES, h) * jnp.exp(J_SLOPES)[h],
    "cap": lambda s, b, h, q, kv: jnp.where(q >= kv, 2 * jnp.tanh(s / 2), -jnp.inf),
    "functions": lambda s, b, h, q, kv: (
        jax.nn.relu(s) + jax.nn.softplus(s) + jax.nn.gelu(s) + s**3 + jnp.clip(s, -1, 1)
    ),
    "filled": lambda s, b, h, q, kv: J_TABLE.at[h, q].get(mode="fill", fill_value=0) + jnp.round(s),
    "branches": lambda s, b, h, q, kv: jax.lax.select_n(h, s, s + 1, s * q),
}


@pytest.mark.parametrize("name", JAX_FUNCTIONS)
def test_jax_functions(name: str) -> None:
    fn = JAX_FUNCTIONS[name]
    e, captures = from_jax(fn, ("score", *INDICES))
    scores = jax.random.normal(jax.random.key(0), (B, H, L, S))
    env = positions()
    value = evaluate(e, {**env, "score": scores}, load_from(captures, env))
    each = functools.reduce(
        lambda f, dims: jax.vmap(f, in_axes=dims),
        (
            (0, None, None, None, 0),
            (0, None, None, 0, None),
            (0, None, 0, None, None),
            (0, 0, None, None, None),
        ),
        fn,
    )
    expected = each(scores, *(jnp.arange(n) for n in (B, H, L, S)))
    np.testing.assert_allclose(np.broadcast_to(value, expected.shape), expected, rtol=2.0**-20, atol=2.0**-20)


def test_what_jax_functions_may_not_do() -> None:
    with pytest.raises(ExpressionError, match=r"(?s)`cumsum`.*test_trace.py"):
        from_jax(lambda s: jnp.cumsum(s[None])[0], ("score",))
    with pytest.raises(ExpressionError, match=r"shape \[3\]"):
        from_jax(lambda s: s + J_SLOPES, ("score",))
    with pytest.raises(ExpressionError, match="must return a bool"):
        from_jax(lambda q: q + 1, ("q",), "bool")
    with pytest.raises(ExpressionError, match="unknown variable 'i'"):
        from_jax(lambda i: i, ("i",))
    with pytest.raises(ExpressionError, match="one scalar, got 2"):
        from_jax(lambda q: (q, q), ("q",))


@pytest.mark.parametrize(
    "fn",
    [
        lambda q: q.double() + 1e9,
        lambda q: q.to(torch.float64) * 2,
        lambda q: torch.full_like(q, 1e9, dtype=torch.float64),
        lambda q: q * torch.tensor(0.1, dtype=torch.float64),
    ],
)
def test_float64_in_a_torch_function(fn: Any) -> None:
    assert from_torch(fn, ("q",))[0].kind == "float"
    with pytest.raises(ExpressionError, match="float64: expressions compute in float32"):
        from_torch(fn, ("q",), narrow=False)


def test_torch_functions_in_inference_mode() -> None:
    """There, torch does not take operations apart before they are seen."""
    with torch.inference_mode():
        assert text(from_torch(lambda q: q.float() * 2, ("q",))[0]) == "mul(to_float(q),2.0)"
        with pytest.raises(ExpressionError, match="torch's `sum` can't be part"):
            from_torch(lambda q: q.sum(), ("q",))

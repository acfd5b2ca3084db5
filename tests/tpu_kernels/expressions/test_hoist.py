"""Hoisting: the same values and gradients, from arrays that are as small as they can be."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings

from tpu_kernels.expressions import Expression, ExpressionError, Load, Variable, text
from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import INDICES, apply, convert, loads, nodes_of, variables
from tpu_kernels.expressions.hoist import Hoisted, hoist, load_from, materialise

from .strategies import Unspecified, evaluate_in_numpy, expressions

b, h, q, kv, score = (Variable(name) for name in ("b", "h", "q", "kv", "score"))
SIZES = {"b": 2, "h": 3, "q": 5, "kv": 4}


def positions() -> dict[str, Any]:
    env = {
        name: np.arange(size, dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(SIZES.items())
    }
    return {**env, "q_len": 5, "kv_len": 4}


def from_aligned(hoisted: tuple[Hoisted, ...], arrays: list[jax.Array]) -> Any:
    """Loads as a kernel does them: of blocks, here of the whole, with the axes in their places."""

    def load(node: Load) -> jax.Array:
        axes = hoisted[node.slot].axes
        assert node.index == tuple(Variable(name) for name in axes)
        shape = [SIZES[name] if name in axes else 1 for name in INDICES]
        return arrays[node.slot].reshape(shape)

    return load


def evaluate_hoisted(e: Expression, captures: list[Any], score: Any = None) -> jax.Array:
    new, hoisted = hoist(e)
    arrays = materialise(hoisted, captures, SIZES)
    for one, array in zip(hoisted, arrays, strict=True):
        assert array.shape == tuple(SIZES[name] for name in one.axes)
    env = positions() if score is None else {**positions(), "score": score}
    return evaluate(new, env, from_aligned(hoisted, arrays))


CAPTURES = [
    np.arange(7, dtype=np.float32) ** 2,
    np.arange(25, dtype=np.int32).reshape(5, 5) % 3,
    (np.arange(25).reshape(5, 5) % 3) == 0,
    np.float32(0.5),
]
SLOTS: Any = {0: ("float", 1), 1: ("int", 2), 2: ("bool", 2), 3: ("float", 0)}
EXACT = (
    "add",
    "sub",
    "mul",
    "min",
    "max",
    "floor_div",
    "mod",
    "eq",
    "lt",
    "ge",
    "and",
    "or",
    "not",
    "select",
    "to_int",
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(expressions(captures=SLOTS, names=("b", "h", "q", "kv", "kv_len"), operations=EXACT, size=7))
def test_random_expressions_keep_their_values(e: Expression) -> None:
    assume(
        not any(
            n.kind == "float" and getattr(n, "op", "") in ("mul", "mod", "floor_div") for n in nodes_of(e)
        )
    )
    try:
        expected = evaluate_in_numpy(e, positions(), dict(enumerate(CAPTURES)))
    except Unspecified:
        assume(False)
        raise
    shape = np.broadcast_shapes(np.shape(expected), ())
    actual = np.asarray(
        jnp.broadcast_to(evaluate_hoisted(e, CAPTURES), np.broadcast_shapes(shape, (1, 1, 1, 1)))
    )
    np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


def hoisted_as(e: Expression) -> tuple[str, list[tuple[str, str]]]:
    new, hoisted = hoist(e)
    return text(new), [(text(one.expression), " ".join(one.axes)) for one in hoisted]


def test_vectors_and_not_their_comparison() -> None:
    document = Load(0, (b, q), "int").eq(Load(0, (b, kv), "int"))
    assert hoisted_as(document) == (
        "eq(int0[b,q],int1[b,kv])",
        [("int0[b,q]", "b q"), ("int0[b,kv]", "b kv")],
    )


def test_an_index_that_mixes_positions() -> None:
    e = score + Load(1, (h, q - kv + 7), "float")
    assert hoisted_as(e) == ("add(score,float0[h,q,kv])", [("float1[h,add(sub(q,kv),7)]", "h q kv")])


def test_what_follows_a_gather_without_more_axes_goes_with_it() -> None:
    distance = Load(0, (abs(q - kv),), "float")
    assert hoisted_as(score * apply("exp", distance * 2))[1] == [
        ("exp(mul(float0[abs(sub(q,kv))],2.0))", "q kv")
    ]
    # Not what has more axes, nor a comparison that a mask is made of: it tells about blocks by itself.
    assert hoisted_as(Load(0, (q // 2,), "int") + kv)[1] == [("int0[floor_div(q,2)]", "q")]
    seen = (q >= kv) & (Load(0, (q - kv,), "int") > 0)
    assert hoisted_as(seen) == ("and(ge(q,kv),bool0[q,kv])", [("gt(int0[sub(q,kv)],0)", "q kv")])


def test_numbers_for_whole_blocks_are_computed_before() -> None:
    slope = apply("exp2", -8.0 * (h + 1) / 12)
    new, hoisted = hoist(score - slope * (q - kv))
    assert [one.axes for one in hoisted] == [("h",)] and text(
        new
    ) == "sub(score,mul(float0[h],to_float(sub(q,kv))))"
    assert hoisted_as(kv < Load(0, (b,), "int") * 2) == ("lt(kv,int0[b])", [("mul(int0[b],2)", "b")])
    # Ints of positions alone are quick anywhere.
    assert hoisted_as((h % 2).eq(0) & (q >= kv))[1] == []


def test_aligned_captures_are_passed_as_they_are() -> None:
    bias = jnp.ones((2, 1, 5, 4), jnp.bfloat16)
    e = score + Load(0, (b, 0, q, kv), "float")
    new, hoisted = hoist(e)
    assert hoisted[0].axes == ("b", "q", "kv") and text(new) == "add(score,float0[b,q,kv])"
    (array,) = materialise(hoisted, [bias], SIZES)
    assert array.shape == (2, 5, 4) and array.dtype == jnp.bfloat16
    # Longer than needed, and in another order.
    table = np.arange(6 * 9).reshape(6, 9)
    new, hoisted = hoist(Load(0, (kv, q), "int") + 0)
    assert hoisted[0].axes == ("q", "kv")
    np.testing.assert_array_equal(materialise(hoisted, [table], SIZES)[0], table.T[:5, :4])
    # A bool stays one; the same index twice is no block.
    diagonal, seen = hoist(Load(0, (q, q), "bool"))[1], hoist(Load(0, (q, kv), "bool"))[1]
    square = np.eye(5, dtype=bool)
    assert materialise(diagonal, [square], SIZES)[0].tolist() == [True] * 5
    assert materialise(seen, [square], SIZES)[0].dtype == jnp.bool_


def test_two_expressions_share_arrays() -> None:
    mask, hoisted = hoist(Load(0, (b, q), "int").eq(Load(0, (b, kv), "int")))
    change, both = hoist(score + convert(Load(0, (b, q), "int"), "float") + Load(1, (h,), "float"), hoisted)
    assert both[:2] == hoisted and len(both) == 3
    assert (
        text(change) == "add(add(score,to_float(int0[b,q])),float2[h])"
        and text(mask) == "eq(int0[b,q],int1[b,kv])"
    )


def test_nested_loads() -> None:
    table, bucket = np.float32([5, 6, 7]), np.int32([[0, 2, 1, 0, 1], [2, 2, 0, 1, 1]])
    e = Load(0, (Load(1, (b, q), "int"),), "float") + 0.0 * score
    assert hoisted_as(e)[1] == [("float0[int1[b,q]]", "b q")]
    value = evaluate_hoisted(e, [table, bucket], jnp.zeros((2, 3, 5, 4)))
    np.testing.assert_array_equal(value[:, 0, :, 0], table[bucket])


def test_gradient_of_captures() -> None:
    table, slopes = jnp.arange(12.0).reshape(3, 4), jnp.float32([1, 2, 3])
    e = score * Load(1, (h,), "float") + Load(0, (h, abs(q - kv) % 4), "float") ** 2
    s = jax.random.normal(jax.random.key(0), (2, 3, 5, 4))
    weight = jax.random.normal(jax.random.key(1), s.shape)

    def direct(table: jax.Array, slopes: jax.Array, s: jax.Array) -> jax.Array:
        env = {**positions(), "score": s}
        return (evaluate(e, env, load_from([table, slopes], env)) * weight).sum()

    def by_hoisting(table: jax.Array, slopes: jax.Array, s: jax.Array) -> jax.Array:
        return (evaluate_hoisted(e, [table, slopes], s) * weight).sum()

    expected = jax.grad(direct, argnums=(0, 1, 2))(table, slopes, s)
    actual = jax.grad(by_hoisting, argnums=(0, 1, 2))(table, slopes, s)
    # Sums of at most 40 products in another order.
    for a, e_ in zip(actual, expected, strict=True):
        assert np.abs(e_).max() > 0
        np.testing.assert_allclose(a, e_, rtol=40 * 2.0**-24, atol=40 * 2.0**-24 * float(np.abs(e_).max()))


def test_indices_from_the_end_and_outside() -> None:
    array = np.float32([1, 2, 3])
    index = np.array([-4, -3, -1, 0, 2, 3, 100])
    value = load_from([array], {"q": index})(Load(0, (q,), "float"))
    np.testing.assert_array_equal(value, [1, 1, 3, 1, 3, 3, 3])
    (constant,) = materialise(hoist(Load(0, (Variable("q") * 0 - 1,), "float"))[1], [array], SIZES)
    assert constant.tolist() == [3] * 5


def test_no_positions_and_no_elements() -> None:
    sizes = {"b": 1, "h": 1, "q": 0, "kv": 4}
    arrays = materialise(hoist(Load(0, (q - kv,), "float"))[1], [np.zeros((0,), np.float32)], sizes)
    assert arrays[0].shape == (0, 4)


def test_errors() -> None:
    with pytest.raises(ExpressionError, match="looked up by the score"):
        hoist(Load(0, (convert(score, "int"),), "float"))
    _, hoisted = hoist(Load(0, (b, q), "int"))
    with pytest.raises(
        ExpressionError, match=r"shape \[2, 4\] has 4 elements in dimension 1, but q goes up to 4"
    ):
        materialise(hoisted, [np.zeros((2, 4), np.int32)], SIZES)
    with pytest.raises(ExpressionError, match="needs capture 0, got 0 captures"):
        materialise(hoisted, [], SIZES)
    with pytest.raises(ExpressionError, match=r"2 dimensions, but capture 0 has the shape \[5\]"):
        materialise(hoisted, [np.zeros(5, np.int32)], SIZES)


def test_no_load_is_left_but_aligned_ones() -> None:
    e = (Load(0, (q // 2,), "float") + Load(0, (kv % 3,), "float")) * score + Load(1, (b, q), "float")
    new, hoisted = hoist(e)
    assert all(load.index == tuple(Variable(n) for n in hoisted[load.slot].axes) for load in loads(new))
    assert variables(new) == {"b", "q", "kv", "score"}

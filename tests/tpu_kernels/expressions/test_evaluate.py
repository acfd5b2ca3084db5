"""Values: against numpy, and inside of a kernel that the TPU compiler accepts."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax.experimental import pallas as pl
from jax.test_util import check_grads

from bridge.topology import compile_for
from tpu_kernels.expressions import Apply, Expression, Load, Variable
from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import apply, convert, maximum, minimum, nodes_of, select
from tpu_kernels.expressions.hoist import load_from
from tpu_kernels.expressions.operations import OPERATIONS

from .strategies import FLOAT, INT, Unspecified, apply_in_numpy, evaluate_in_numpy, expressions, wrap

b, h, q, kv, score = (Variable(name) for name in ("b", "h", "q", "kv", "score"))
EXACT = tuple(
    op
    for op in OPERATIONS
    if op in INT or op in ("select", "floor", "ceil", "trunc", "round") or OPERATIONS[op].result is not None
)
"""Operations without rounding, but for floats that are added, multiplied or divided."""


def no_load(node: Load) -> Any:
    raise AssertionError(f"there is nothing to load for {node}")


# Random graphs of all that is exact.


@settings(max_examples=100, deadline=None, derandomize=True)
@given(expressions(size=8, operations=EXACT, names=("b", "q", "kv", "q_len", "kv_len")))
def test_random_expressions_of_ints_and_bools(e: Expression) -> None:
    rounded = ("add", "sub", "mul", "floor_div", "trunc_div", "mod", "rem")
    assume(not any(isinstance(n, Apply) and n.op in rounded and n.kind == "float" for n in nodes_of(e)))
    env = {
        "b": np.int32(1),
        "q": np.arange(-3, 6, dtype=np.int32)[:, None],
        "kv": np.arange(5, dtype=np.int32)[None] * 7 - 11,
        "q_len": 9,
        "kv_len": 5,
    }
    try:
        expected = evaluate_in_numpy(e, env)
    except Unspecified:
        assume(False)
        raise
    actual = np.asarray(evaluate(e, env, no_load))
    assert actual.dtype == {"bool": np.bool_, "int": np.int32, "float": np.float32}[e.kind]
    np.testing.assert_array_equal(actual, np.asarray(expected, actual.dtype))


# Each operation.

INTS = np.array([0, 1, 2, 3, 7, 31, 46341, 65536, 2**30, 2**31 - 1], np.int64)
INTS = np.concatenate([INTS, -INTS, [-(2**31)]])


@pytest.mark.parametrize("op", INT)
def test_ints_wrap_and_divide_as_python_does(op: str) -> None:
    arity = OPERATIONS[op].arity
    operands = [INTS] if arity == 1 else [x.ravel() for x in np.meshgrid(INTS, INTS)]
    if "div" in op or op in ("mod", "rem"):
        operands = [x[operands[1] != 0] for x in operands]
    if "shift" in op:
        operands = [x[(operands[1] >= 0) & (operands[1] < 32)] for x in operands]
    names = (q, kv)[:arity]
    env = {name.name: x.astype(np.int32) for name, x in zip(names, operands, strict=True)}
    expected = apply_in_numpy(op, ["int"] * arity, operands)
    np.testing.assert_array_equal(evaluate(Apply(op, names), env, no_load), expected)
    if arity == 2:
        # By a constant, which may be computed in another way.
        for divisor in {int(x) for x in operands[1]}:
            of = operands[0][operands[1] == divisor]
            value = evaluate(apply(op, q, divisor), {"q": of.astype(np.int32)}, no_load)
            np.testing.assert_array_equal(
                value, apply_in_numpy(op, ["int"] * 2, [of, np.full_like(of, divisor)])
            )


DOMAINS = {
    "log": (1e-3, 10),
    "log2": (1e-3, 10),
    "log1p": (-0.99, 10),
    "sqrt": (0, 10),
    "rsqrt": (1e-3, 10),
    "tan": (-1.2, 1.2),
    "pow": (0.1, 5),
}


def _floats(op: str, n: int = 200) -> list[np.ndarray]:
    low, high = DOMAINS.get(op, (-5, 5))
    generator = np.random.default_rng(0)
    return [generator.uniform(low, high, n).astype(np.float32) for _ in range(OPERATIONS[op].arity)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", FLOAT)
def test_floats(op: str, dtype: Any) -> None:
    operands = _floats(op)
    loads = tuple(Load(slot, (q,), "float") for slot in range(len(operands)))
    with jax.enable_x64(dtype == np.float64):
        captures = [jnp.asarray(x, dtype) for x in operands]
        actual = np.asarray(
            evaluate(Apply(op, loads), {"q": np.arange(200)}, lambda node: captures[node.slot])
        )
    assert actual.dtype == dtype
    expected = apply_in_numpy(op, ["float"] * len(operands), [x.astype(np.float64) for x in operands])
    # A few roundings by at most u of intermediate values, which are below 100 times the result or 1.
    u = np.finfo(dtype).eps / 2
    if op in (
        "floor",
        "ceil",
        "round",
        "trunc",
        "sign",
        "floor_div",
        "trunc_div",
        "neg",
        "abs",
        "min",
        "max",
    ):
        np.testing.assert_array_equal(actual, expected)
    else:
        error = np.abs(actual - expected)
        assert (error <= 100 * u * np.maximum(np.abs(expected), 1)).all(), error.max()


def test_expm1_and_log1p_near_zero() -> None:
    x = np.float32([1e-8, -1e-8, 1e-4, 0.5, -0.5, 20, -20, 0])
    for op, function in (("expm1", np.expm1), ("log1p", np.log1p)):
        inside = x[x > -1] if op == "log1p" else x
        value = evaluate(Apply(op, (score,)), {"score": inside}, no_load)
        np.testing.assert_allclose(value, function(inside.astype(np.float64)), rtol=1e-6)


def test_nan_and_infinities() -> None:
    x = np.float32([np.nan, np.inf, -np.inf, 1])
    values = {
        op: np.asarray(evaluate(e, {"score": x}, no_load)).tolist()
        for op, e in {
            "nan": apply("is_nan", score),
            "inf": apply("is_inf", score),
            "finite": apply("is_finite", score),
            "equal": score.eq(score),
            "unequal": score.ne(score),
            "not less": ~(score < 2),
        }.items()
    }
    assert values == {
        "nan": [True, False, False, False],
        "inf": [False, True, True, False],
        "finite": [False, False, False, True],
        "equal": [False, True, True, True],
        "unequal": [True, False, False, False],
        "not less": [True, True, False, False],
    }
    assert np.isnan(evaluate(maximum(score, 0), {"score": x}, no_load)).tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_shapes_and_dtypes_of_what_is_given() -> None:
    q_ids, kv_ids = np.int64([[3], [4]]), np.int8([[3, 4, 5]])
    e = Load(0, (q,), "int").eq(Load(1, (kv,), "int"))
    value = evaluate(e, {"q": 0, "kv": 0}, lambda node: [q_ids, kv_ids][node.slot])
    assert value.shape == (2, 3) and value.tolist() == [[True, False, False], [False, True, False]]
    # A bool from a tile of int8 or int32; a column of bools against a row of bools.
    both = Load(0, (q,), "bool") & Load(1, (kv,), "bool")
    tiles = [np.int8([[1], [0]]), np.int32([[2, 0, -1]])]
    value = evaluate(both, {"q": 0, "kv": 0}, lambda node: tiles[node.slot])
    assert value.dtype == jnp.bool_ and value.tolist() == [[True, False, True], [False, False, False]]
    half = evaluate(Load(0, (), "float") + 1, {}, lambda node: jnp.bfloat16(0.5))
    assert half.dtype == jnp.float32 and half == 1.5
    assert evaluate(convert(True, "float") + q, {"q": 2}, no_load) == 3
    with pytest.raises(KeyError, match="kv"):
        evaluate(q >= kv, {"q": 1}, no_load)


def test_constants_are_rounded_once_and_folded() -> None:
    third = evaluate(score * 0.1, {"score": np.float32(3)}, no_load)
    assert third == np.float32(3) * np.float32(0.1)
    with jax.enable_x64(True):
        assert evaluate(score * 0.1, {"score": np.float64(3)}, no_load) == 3 * 0.1
    # A formula of lengths is no work for the kernel.
    e = convert((Variable("kv_len") - Variable("q_len")) // 2, "float") * apply("log2", 8.0)
    jaxpr = jax.make_jaxpr(lambda: evaluate(e, {"kv_len": 11, "q_len": 3}, no_load))()
    assert jaxpr.eqns == [] and evaluate(e, {"kv_len": 11, "q_len": 3}, no_load) == 12


# Gradients.

SMOOTH = tuple(
    op for op in FLOAT if op not in ("floor", "ceil", "round", "trunc", "sign", "floor_div", "trunc_div")
)


@pytest.mark.parametrize("op", SMOOTH)
def test_gradient(op: str) -> None:
    with jax.enable_x64(True):
        operands = [jnp.asarray(x, jnp.float64) for x in _floats(op, 20)]

        def value(*arrays: jax.Array) -> jax.Array:
            loads = tuple(Load(slot, (q,), "float") for slot in range(len(arrays)))
            return evaluate(Apply(op, loads), {"q": 0}, lambda node: arrays[node.slot])

        check_grads(value, tuple(operands), order=1, modes=["rev"], eps=1e-6, atol=1e-5, rtol=1e-5)


def test_gradient_of_score_and_capture() -> None:
    slopes = jnp.float32([0.5, 2])
    e = select(q >= kv, 20 * apply("tanh", score / 20) + Load(0, (h,), "float") * (kv - q), -np.inf)
    env = {"q": jnp.arange(3)[:, None], "kv": jnp.arange(4)[None], "h": 1}

    def value(s: jax.Array, slopes: jax.Array) -> jax.Array:
        return evaluate(e, {**env, "score": s}, load_from([slopes], env))

    s = jax.random.normal(jax.random.key(0), (3, 4)) * 10
    out, pull = jax.vjp(value, s, slopes)
    ds, dslopes = pull(jnp.ones_like(out))
    seen = np.tril(np.ones((3, 4), bool))
    np.testing.assert_allclose(
        ds, np.where(seen, 1 - np.tanh(np.asarray(s, np.float64) / 20) ** 2, 0), rtol=1e-5
    )
    distance = np.arange(4)[None] - np.arange(3)[:, None]
    np.testing.assert_allclose(dslopes, [0, distance[seen].sum()])


# In a kernel.

TILE, COLUMN, ROW = (32, 256), (32, 1), (1, 256)


def in_kernel(results: Callable[..., list[Any]], score: jax.Array, *captures: jax.Array) -> jax.Array:
    """The sum of `results(env, load)` on tiles [32, 256] of `score` [64, 256]; captures are in tiles, too."""

    def body(score_ref: Any, *refs: Any) -> None:
        *capture_refs, out_ref = refs
        env = {
            "b": pl.program_id(0),
            "h": pl.program_id(0) + 1,
            "q": jax.lax.broadcasted_iota(jnp.int32, COLUMN, 0) + 32 * pl.program_id(0),
            "kv": jax.lax.broadcasted_iota(jnp.int32, ROW, 1),
            "q_len": 64,
            "kv_len": 256,
            "score": score_ref[...],
        }
        total = jnp.zeros(TILE, jnp.float32)
        for value in results(env, lambda node: capture_refs[node.slot][...]):
            total += value
        out_ref[...] = total

    def block(array: jax.Array) -> pl.BlockSpec:
        moves = array.shape[0] > 1
        # The rows of this grid step, or the one row there is.
        return pl.BlockSpec((32 if moves else 1, array.shape[1]), lambda i: (i if moves else 0, 0))

    return pl.pallas_call(
        body,
        grid=(2,),
        in_specs=[block(score), *map(block, captures)],
        out_specs=block(score),
        out_shape=jax.ShapeDtypeStruct(score.shape, jnp.float32),
    )(score, *captures)


def of_all_operations() -> list[Expression]:
    """Each operation for each kind, on tiles, columns and rows."""
    operands: dict[str, list[Any]] = {
        "bool": [score > 0, q >= 100, kv < 7],
        "int": [q - kv, kv + q * 256, convert(score, "int")],
        "float": [score * 1.5, score + q, convert(kv, "float")],
    }
    found = []
    for op, operation in OPERATIONS.items():
        for kind in operation.operands:
            of = operands[kind]
            if op == "select":
                found += [Apply(op, (c, of[0], of[1])) for c in operands["bool"]]
            else:
                found += [Apply(op, tuple(of[(i + j) % 3] for j in range(operation.arity))) for i in range(3)]
    return [convert(e, "float") for e in found]


def of_usual_masks_and_scores() -> list[Expression]:
    """Masks and score changes as people write them, with captures: a tile, columns and rows."""
    side = 16
    row, column = minimum(maximum(q // side, 3), 12), minimum(maximum(q % side, 3), 12)
    return [
        convert(e, "float")
        for e in (
            (q >= kv) & (q - kv < 128) | (kv < 17),
            (q // 96).eq(kv // 96) & ~((q + kv) % 3).eq(0),
            (abs(row - kv // side) <= 3) & (abs(column - kv % side) <= 3),
            Load(1, (q,), "int").eq(Load(2, (kv,), "int")) & (q >= kv),
            Load(0, (q, kv), "bool") & Load(3, (kv,), "bool") | ~Load(4, (q,), "bool"),
            Load(3, (kv,), "bool"),
            (b > 0) & (q > 3) | (b * 5 // 3).eq(kv % 7),
            select(b > 0, q > kv, kv > 3),
            select(q >= kv, 20.0 * apply("tanh", score / 20.0), -np.inf),
            score + Load(5, (q, kv), "float") - Load(6, (kv,), "float") * abs(q - kv),
            convert(b, "float") * 0.5 + score,
        )
    ]


CAPTURES = {
    "int8": TILE,
    "int32": COLUMN,
    "int32 ": ROW,
    "int8 ": ROW,
    "int8  ": COLUMN,
    "bfloat16": TILE,
    "float32": ROW,
}


def _captures() -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((64 if shape[0] > 1 else 1, shape[1]), jnp.dtype(name.strip()))
        for name, shape in CAPTURES.items()
    ]


@pytest.mark.parametrize("chip", [pytest.param("v5e", marks=pytest.mark.slow), "tpu7x"])
def test_compiles_in_a_kernel(chip: str) -> None:
    es = of_all_operations() + of_usual_masks_and_scores()
    kernel = functools.partial(in_kernel, lambda env, load: [evaluate(e, env, load) for e in es])
    score = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    assert compile_for(kernel, [score, *_captures()], chip).kernels


@pytest.mark.parametrize("chip", [pytest.param("v5e", marks=pytest.mark.slow), "tpu7x"])
def test_gradient_compiles_in_a_kernel(chip: str) -> None:
    es = [e for e in of_all_operations() if isinstance(e, Apply) and e.op in SMOOTH]
    es += [e for e in of_usual_masks_and_scores()[-3:]]

    def gradients(env: dict[str, Any], load: Any) -> list[Any]:
        found = []
        for e in es:
            out, pull = jax.vjp(
                lambda s, e=e: jnp.broadcast_to(evaluate(e, {**env, "score": s}, load), TILE), env["score"]
            )
            found += pull(jnp.ones_like(out))
        return found

    score = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    assert compile_for(functools.partial(in_kernel, gradients), [score, *_captures()], chip).kernels


def test_wrap() -> None:
    # The oracle's own: 2**31 is the first that wraps.
    assert [wrap(x) for x in (2**31 - 1, 2**31, -(2**31) - 1)] == [2**31 - 1, -(2**31), 2**31 - 1]

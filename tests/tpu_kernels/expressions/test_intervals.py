"""Bounds: never wrong, and exact for the masks that people use."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tpu_kernels import masks
from tpu_kernels.expressions import Apply, Expression, Load, Variable
from tpu_kernels.expressions.expression import apply, nodes_of
from tpu_kernels.expressions.intervals import bounds
from tpu_kernels.expressions.operations import OPERATIONS

from .strategies import FLOAT, INT, Unspecified, apply_in_numpy, evaluate_in_numpy, expressions

b, h, q, kv, score = (Variable(name) for name in ("b", "h", "q", "kv", "score"))
BACKENDS = pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jnp"])


def no_load(node: Load) -> Any:
    raise AssertionError(f"there is nothing to load for {node}")


# Soundness.

EDGES = [0, 1, -1, 5, -7, 46341, 65536, 2**30, 2**31 - 1, -(2**31), 2**31 - 300, -(2**31) + 300]


@st.composite
def int_ranges(draw: st.DrawFn) -> tuple[int, int]:
    lo = draw(st.sampled_from(EDGES)) if draw(st.booleans()) else draw(st.integers(-20, 20))
    return lo, min(lo + draw(st.integers(0, 4)), 2**31 - 1)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_random_expressions_stay_inside(data: st.DataObject) -> None:
    names = ("b", "q", "kv", "score")
    e = data.draw(expressions(names=names, size=6, captures={0: ("int", 1), 1: ("float", 0), 2: ("bool", 1)}))
    ranges: dict[str, Any] = {name: data.draw(int_ranges()) for name in names[:3]}
    low = data.draw(st.sampled_from([-3.0, -0.5, 0.0, 1.0]))
    ranges["score"] = low, low + data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    loads = {0: np.array([3, -2, 9]), 1: np.array(0.75), 2: np.array([True, False])}
    # Every corner and what is between.
    values = {name: np.arange(lo, hi + 1) for name, (lo, hi) in ranges.items() if name != "score"}
    values["score"] = np.linspace(*ranges["score"], 5)
    grid = dict(zip(values, np.meshgrid(*values.values(), indexing="ij"), strict=True))
    try:
        exact = np.asarray(evaluate_in_numpy(e, grid, loads))
    except Unspecified:
        assume(False)
        raise
    lo, hi = bounds(e, ranges, lambda node: (loads[node.slot].min(), loads[node.slot].max()))
    assert np.ndim(lo) == np.ndim(hi) == 0
    if e.kind == "bool":
        assert lo <= exact.all() and hi >= exact.any(), e
    else:
        known = exact[~np.isnan(exact)]
        assert (known >= lo).all() and (known <= hi).all(), e


@BACKENDS
@pytest.mark.parametrize("op", [op for op in INT if OPERATIONS[op].arity == 2])
def test_ints_of_two_operands_stay_inside(op: str, xp: Any) -> None:
    ends = np.array([-(2**31), -(2**31) + 3, -70000, -8, -3, -1, 0, 1, 2, 7, 31, 32, 46341, 2**30, 2**31 - 1])
    starts, widths = [x.ravel() for x in np.meshgrid(ends, [0, 1, 3, 40])]
    stops = np.minimum(starts + widths, 2**31 - 1)
    a, c = [x.ravel() for x in np.meshgrid(range(len(starts)), range(len(starts)))]
    ranges = {"q": (starts[a], stops[a]), "kv": (starts[c], stops[c])}
    lo, hi = bounds(Apply(op, (q, kv)), ranges, no_load, xp)
    lo, hi = np.asarray(lo, np.int64), np.asarray(hi, np.int64)
    inside = [0.0, 0.3, 0.7, 1.0]
    seen = 0
    for s in inside:
        for t in inside:
            x = np.round(starts[a] + s * (stops[a] - starts[a])).astype(np.int64)
            y = np.round(starts[c] + t * (stops[c] - starts[c])).astype(np.int64)
            fine = (
                (y >= 0) & (y < 32)
                if "shift" in op
                else (y != 0)
                if op in ("mod", "rem") or "div" in op
                else y == y
            )
            value = apply_in_numpy(op, ["int", "int"], [x[fine], y[fine]])
            assert ((lo[fine] <= value) & (value <= hi[fine])).all()
            seen += fine.sum()
    assert seen > 10000


@pytest.mark.parametrize("op", [*FLOAT, "lt", "le", "eq", "ne", "is_nan", "to_int", "to_bool"])
def test_floats_stay_inside(op: str) -> None:
    special = np.float32([-np.inf, -3e38, -5, -1, -0.3, -1e-40, 0, 1e-40, 0.4, 1, 2.5, 40, 3e38, np.inf])
    los, his = [x.ravel() for x in np.meshgrid(special, special)]
    los, his = los[los <= his], his[los <= his]
    arity = OPERATIONS[op].arity
    index = [x.ravel() for x in np.meshgrid(*[range(len(los))] * arity)]
    loads = tuple(Load(slot, (), "float") for slot in range(arity))
    lo, hi = bounds(Apply(op, loads), {}, lambda node: (los[index[node.slot]], his[index[node.slot]]))
    lo, hi = np.broadcast_to(lo, index[0].shape), np.broadcast_to(hi, index[0].shape)
    for s in (0.0, 0.5, 1.0):
        for t in (0.0, 0.5, 1.0)[: 1 if arity == 1 else 3]:
            operands = []
            for i, share in zip(index, (s, t), strict=False):
                with np.errstate(all="ignore"):
                    between = los[i] * np.float64(1 - share) + his[i] * np.float64(share)
                operands.append(
                    np.where(share == 0, los[i], np.where(share == 1, his[i], np.nan_to_num(between)))
                )
                # Where the middle of an infinite range is no number, 0 may be outside of it.
                operands[-1] = np.clip(operands[-1], los[i], his[i])
            value = np.full(index[0].shape, np.nan)
            try:
                value = apply_in_numpy(op, ["float"] * arity, operands)
            except Unspecified:
                fine = np.abs(operands[0]) < 2**31
                value[fine] = apply_in_numpy(op, ["float"], [operands[0][fine]])
            if value.dtype == bool:
                assert ((lo <= value) & (value <= hi)).all()
            else:
                ok = np.isnan(value) | ((lo <= value) & (value <= hi))
                assert ok.all(), [(los[i][~ok][:3], his[i][~ok][:3]) for i in index]


def test_nan_is_never_forgotten() -> None:
    # A NaN among what is loaded is in no range, so a comparison of it may be false.
    nan = float("nan")
    for e in (Load(0, (), "float") < 5, Load(0, (), "float") * 2 >= 0, (score - score).eq(0)):
        assert [bool(x) for x in bounds(e, {}, lambda node: (nan, nan))] == [False, True]
    assert [bool(x) for x in bounds(score.ne(score), {}, no_load)] == [False, True]
    assert [bool(x) for x in bounds(score.ne(score), {"score": (0, 1)}, no_load)][1] is True
    assert [bool(x) for x in bounds(apply("is_nan", score), {"score": (0, 1)}, no_load)] == [False, False]


def test_overflow_is_seen() -> None:
    top = {"q": (2**31 - 2, 2**31 - 1)}
    lo, hi = bounds(q + 1 > 0, top, no_load)
    assert not lo and hi
    below = {"q": (2**31 - 2**20, 2**31 - 2**19)}
    assert bool(bounds(q - 1 > 0, below, no_load)[0])


def test_missing_variables_and_operations_without_rules_may_be_anything() -> None:
    assert [bool(x) for x in bounds(h >= kv, {"kv": (3, 4)}, no_load)] == [False, True]
    assert [bool(x) for x in bounds(apply("tan", score) > 0, {"score": (0, 1)}, no_load)] == [False, True]


# Exactness, for blocks of masks.


def classify(
    mask: masks.Mask, sizes: tuple[int, int, int], tiles: tuple[int, int], xp: Any
) -> tuple[Any, Any]:
    """(true everywhere, true anywhere) for [B, q tiles, kv tiles], by bounds."""
    batch, q_len, kv_len = sizes
    q0 = np.arange(0, q_len, tiles[0])[:, None]
    kv0 = np.arange(0, kv_len, tiles[1])[None]
    ends = {"q": np.minimum(q0 + tiles[0], q_len) - 1, "kv": np.minimum(kv0 + tiles[1], kv_len) - 1}
    starts = {"q": q0, "kv": kv0, "b": np.arange(batch)[:, None, None]}
    ends["b"] = starts["b"]

    def load(node: Load) -> tuple[Any, Any]:
        """Least and greatest element over each block."""
        lo = hi = np.asarray(mask.captures[node.slot])
        shape = {"b": 1, "q": 1, "kv": 1}
        for axis, i in enumerate(node.index):
            assert isinstance(i, Variable)
            first, last = starts[i.name].ravel(), ends[i.name].ravel()
            shape[i.name] = len(first)
            lo = np.stack(
                [lo.take(range(a, z + 1), axis).min(axis) for a, z in zip(first, last, strict=True)], axis
            )
            hi = np.stack(
                [hi.take(range(a, z + 1), axis).max(axis) for a, z in zip(first, last, strict=True)], axis
            )
        return lo.reshape(tuple(shape.values())), hi.reshape(tuple(shape.values()))

    ranges: dict[str, Any] = {name: (starts[name], ends[name]) for name in starts}
    ranges |= {"q_len": (q_len, q_len), "kv_len": (kv_len, kv_len)}
    lo, hi = bounds(mask.expression, ranges, load, xp)
    shape = (batch, q0.size, kv0.size)
    return np.broadcast_to(lo, shape), np.broadcast_to(hi, shape)


def brute_force(mask: masks.Mask, sizes: tuple[int, int, int], tiles: tuple[int, int]) -> tuple[Any, Any]:
    batch, q_len, kv_len = sizes
    env = {
        "b": np.arange(batch)[:, None, None],
        "q": np.arange(q_len)[:, None],
        "kv": np.arange(kv_len)[None],
        "q_len": np.int64(q_len),
        "kv_len": np.int64(kv_len),
    }
    captures = {slot: np.asarray(capture) for slot, capture in enumerate(mask.captures)}
    seen = np.broadcast_to(evaluate_in_numpy(mask.expression, env, captures), sizes)
    q_first, kv_first = np.arange(0, q_len, tiles[0]), np.arange(0, kv_len, tiles[1])

    def over_blocks(ufunc: Any) -> Any:
        return ufunc.reduceat(ufunc.reduceat(seen, q_first, axis=1), kv_first, axis=2)

    return over_blocks(np.logical_and), over_blocks(np.logical_or)


IDS = np.array([0] * 9 + [1] * 2 + [2] * 13 + [5] * 16)
Make = Callable[[], masks.Mask]
STANDARD: dict[str, Make] = {
    "full": masks.full,
    "causal": masks.causal,
    "causal from the end": lambda: masks.causal("bottom_right"),
    "causal with an offset": lambda: masks.causal(offset=-3),
    "window": lambda: masks.sliding_window(5),
    "window on both sides": lambda: masks.sliding_window(6, 3, alignment="bottom_right"),
    "window of the future": lambda: masks.sliding_window(None, 2),
    "chunked": lambda: masks.chunked(12),
    "chunked and causal": lambda: masks.chunked(7) & masks.causal(),
    "prefix": lambda: masks.prefix_lm(11),
    "prefixes": lambda: masks.prefix_lm(np.array([3, 17])),
    "segments": lambda: masks.segments(np.stack([IDS, IDS[::-1].copy()])[:, :40]),
    "segments and causal": lambda: masks.segments(np.stack([IDS, IDS // 2])) & masks.causal(),
    "segments and window": lambda: masks.segments(np.stack([IDS, IDS // 2])) & masks.sliding_window(4),
    "lengths": lambda: masks.lengths(np.array([5, 32])),
    "lengths and causal": lambda: masks.lengths(np.array([5, 32])) & masks.causal(),
    "not causal": lambda: ~masks.causal(),
    "not in the window": lambda: ~masks.sliding_window(4, 4),
    "sink tokens and a window": lambda: masks.causal() & (masks.sliding_window(8) | masks.prefix_lm(3)),
    "neither": lambda: ~(masks.prefix_lm(9) | masks.sliding_window(3)),
}


QUICK_IN_JAX = ("prefixes", "segments and window", "sink tokens and a window")
"""What jnp gives is what numpy gives, in many times its time."""


@pytest.mark.parametrize(
    ("name", "xp"),
    [
        pytest.param(
            name,
            xp,
            id=f"{name}-{'numpy' if xp is np else 'jnp'}",
            marks=() if xp is np or name in QUICK_IN_JAX else pytest.mark.slow,
        )
        for name in STANDARD
        for xp in (np, jnp)
    ],
)
def test_standard_masks_are_classified_exactly(name: str, xp: Any) -> None:
    for lengths in ((40, 40), (23, 40), (40, 23)):
        sizes = (2, *lengths)
        if "segments" in name and lengths != (40, 40):
            continue
        for tiles in ((8, 8), (4, 16), (16, 5)):
            mask = STANDARD[name]()
            everywhere, anywhere = classify(mask, sizes, tiles, xp)
            all_seen, any_seen = brute_force(mask, sizes, tiles)
            np.testing.assert_array_equal(anywhere, any_seen, f"{sizes} {tiles}")
            np.testing.assert_array_equal(everywhere, all_seen, f"{sizes} {tiles}")


def test_a_mask_and_a_negated_one_may_be_taken_for_visible_but_never_the_other_way() -> None:
    # Each of the two is true somewhere in a block on the diagonal; bounds do not see that it is elsewhere.
    mask, sizes, tiles = masks.causal() & ~masks.sliding_window(6), (1, 40, 40), (4, 16)
    everywhere, anywhere = classify(mask, sizes, tiles, np)
    all_seen, any_seen = brute_force(mask, sizes, tiles)
    assert (everywhere <= all_seen).all() and (anywhere >= any_seen).all()
    assert anywhere.sum() < anywhere.size


# Cost.


def test_long_sequences_need_no_table_of_positions() -> None:
    blocks = 2**17 // 512
    mask = (masks.causal() & masks.sliding_window(4095)).expression

    def classify(first_q: jax.Array, first_kv: jax.Array) -> Any:
        ranges = {"q": (first_q, first_q + 511), "kv": (first_kv, first_kv + 511)}
        return bounds(mask, ranges, no_load, jnp)

    starts = jax.ShapeDtypeStruct((blocks, 1), jnp.int32), jax.ShapeDtypeStruct((1, blocks), jnp.int32)
    jaxpr = jax.make_jaxpr(classify)(*starts)
    assert _largest(jaxpr.jaxpr) == blocks * blocks  # 65536 of 17 thousand million
    first = 512 * np.arange(blocks)
    everywhere, anywhere = classify(first[:, None], first[None])
    assert anywhere.sum() == sum(min(i, 8) + 1 for i in range(blocks))
    assert everywhere.sum() == sum(min(i, 7) for i in range(blocks))


def _largest(jaxpr: Any) -> int:
    """Elements of the largest array anywhere in a program."""
    most = 0
    for equation in jaxpr.eqns:
        most = max([most, *(int(np.prod(v.aval.shape)) for v in equation.outvars)])
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            most = max(most, _largest(inner))
    return most


def test_bounds_are_made_of_32_bits() -> None:
    e = (q - kv) * 3 % 7 < 4
    lo, hi = bounds(q * 3 % 7, {"q": (np.int64(0), np.int64(1))}, no_load)
    assert lo.dtype == hi.dtype == np.int32
    jaxpr = jax.make_jaxpr(lambda a, z: bounds(e, {"q": (a, z), "kv": (0, 3)}, no_load, jnp))(3, 9)
    assert not any(v.aval.dtype.itemsize > 4 for equation in jaxpr.eqns for v in equation.outvars)
    assert all(isinstance(node, Expression) for node in nodes_of(e))

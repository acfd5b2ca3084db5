"""What values an expression can have for variables in given ranges: whole blocks of a mask at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpu_kernels.expressions.expression import Apply, Constant, Expression, Load, Variable, nodes_of
from tpu_kernels.expressions.operations import OPERATIONS
from tpu_kernels.expressions.ranges import Range, everything


def bounds(
    e: Expression,
    ranges: Mapping[str, tuple[Any, Any]],
    load: Callable[[Load], tuple[Any, Any]],
    xp: Any = np,
) -> tuple[Any, Any]:
    """(lo, hi) of the values of `e`; for a bool, whether it is (true everywhere, true anywhere).

    Sound: no value is outside. Exact for a comparison of sums in which each index occurs once, and for the
    masks of `tpu_kernels.masks`, their negations and their usual combinations, as far as loads are. Elsewhere
    it may be too wide: two conditions that hold in a block, but never for the same pair, as of a mask and a
    negated one (`causal() & ~sliding_window(6)`), count as true somewhere.

        q, kv = 512 * np.arange(4)[:, None], 512 * np.arange(4)[None, :]
        everywhere, anywhere = bounds(mask, {"q": (q, q + 511), "kv": (kv, kv + 511)}, load)

    Args:
        e: any expression.
        ranges: the first and last value of each variable, arrays or numbers that broadcast against each
            other: an element for each block. A variable that is missing may have any value.
        load: (lo, hi) of the elements that a `Load` can give, for each block. NaN in a bound says that
            nothing is known.
        xp: numpy or jnp. With jnp all arrays may be traced.

    Returns:
        Two arrays that broadcast against the ranges: bool, int32 or float32.
    """
    values: dict[Expression, Range] = {}
    with np.errstate(all="ignore") if xp is np else contextlib.nullcontext():
        for node in nodes_of(e):
            match node:
                case Variable(name):
                    values[node] = (
                        _given(xp, node.kind, ranges[name]) if name in ranges else everything(node.kind)
                    )
                case Load():
                    values[node] = _given(xp, node.kind, load(node))
                case Constant(value):
                    values[node] = _given(xp, node.kind, (value, value))
                case Apply(op, operands):
                    rule = OPERATIONS[op].bounds
                    if rule is None:
                        values[node] = everything(node.kind)
                    else:
                        values[node] = rule(xp, operands[-1].kind, *(values[operand] for operand in operands))
        result = values[e]
        return xp.asarray(result.lo), xp.asarray(result.hi)


def _given(xp: Any, kind: str, given: tuple[Any, Any]) -> Range:
    lo, hi = xp.asarray(given[0]), xp.asarray(given[1])
    if kind == "bool":
        return Range(lo != 0, hi != 0)
    if kind == "int":
        return Range(lo.astype(np.int32), hi.astype(np.int32))
    unknown = xp.isnan(lo) | xp.isnan(hi)
    lo, hi = (
        xp.where(unknown, -np.inf, lo).astype(np.float32),
        xp.where(unknown, np.inf, hi).astype(np.float32),
    )
    return Range(lo, hi, unknown)

"""Random expressions, and what they mean in numpy: a second evaluator, of Python's ints and numpy's float64.

The oracle shares nothing with the package but the names of operations. Ints are computed exactly and wrapped.
"""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tpu_kernels.expressions.expression import (
    VARIABLES,
    Apply,
    Constant,
    Expression,
    Load,
    Variable,
    nodes_of,
)
from tpu_kernels.expressions.operations import OPERATIONS, Kind

SMALL_INTS = st.integers(-9, 9)
EDGE_INTS = st.sampled_from([2**31 - 1, -(2**31), 2**31 - 700, -(2**31) + 700, 2**30, 65536, 46341, -65537])
FLOATS = st.one_of(
    st.floats(-4, 4, width=32), st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 0.1, 3e38, 1e-3])
)


def constants(kind: Kind, edges: bool = True) -> st.SearchStrategy[Expression]:
    """Constants of a kind; `edges` are those near the ends of int32."""
    if kind == "bool":
        return st.booleans().map(Constant)
    if kind == "int":
        return (st.one_of(SMALL_INTS, EDGE_INTS) if edges else SMALL_INTS).map(Constant)
    return FLOATS.map(Constant)


@st.composite
def expressions(
    draw: st.DrawFn,
    kind: Kind | None = None,
    size: int = 10,
    captures: Mapping[int, tuple[Kind, int]] | None = None,
    names: tuple[str, ...] = tuple(VARIABLES),
    operations: tuple[str, ...] = tuple(OPERATIONS),
) -> Expression:
    """An expression of up to `size` operations whose operands are any of the nodes made before.

    Args:
        kind: of the result.
        captures: kind and rank of each slot.
        names: the variables to use.
        operations: the operations to use.
    """
    pools: dict[Kind, list[Expression]] = {"bool": [], "int": [], "float": []}
    for name in names:
        pools[VARIABLES[name]].append(Variable(name))

    def operand(wanted: Kind) -> Expression:
        pool = pools[wanted]
        if not pool or draw(st.integers(0, 3)) == 0:
            return draw(constants(wanted))
        return (
            pool[draw(st.integers(max(0, len(pool) - 4), len(pool) - 1))]
            if draw(st.booleans())
            else draw(st.sampled_from(pool))
        )

    made: Expression | None = None
    for _ in range(draw(st.integers(1, size))):
        if captures and draw(st.integers(0, 3)) == 0:
            slot = draw(st.sampled_from(sorted(captures)))
            loaded, rank = captures[slot]
            made = Load(slot, tuple(operand("int") for _ in range(rank)), loaded)
        else:
            op = draw(st.sampled_from(operations))
            of = draw(st.sampled_from(OPERATIONS[op].operands))
            kinds = ["bool", of, of] if op == "select" else [of] * OPERATIONS[op].arity
            made = Apply(op, tuple(operand(k) for k in kinds))  # type: ignore[arg-type]
        pools[made.kind].append(made)
    assert made is not None
    if kind is None:
        return made
    if made.kind == kind:
        return made
    return Apply(f"to_{kind}", (made,))


# The oracle.


def wrap(value: Any) -> Any:
    """Exact ints, as object arrays, wrapped to int32."""
    return (value + 2**31) % 2**32 - 2**31


def _int_op(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """A function of Python ints, on int arrays; None where the operation says nothing of its value."""
    vectorised = np.frompyfunc(function, function.__code__.co_argcount, 1)
    return lambda *operands: np.asarray(vectorised(*(np.asarray(o).astype(object) for o in operands)))


INT: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": lambda a: abs(a),
    "sign": lambda a: (a > 0) - (a < 0),
    "min": lambda a, b: min(a, b),
    "max": lambda a, b: max(a, b),
    "floor_div": lambda a, b: a // b if b else None,
    "trunc_div": lambda a, b: (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) if b else None,
    "mod": lambda a, b: a % b if b else None,
    "rem": lambda a, b: (abs(a) % abs(b)) * (-1 if a < 0 else 1) if b else None,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "shift_left": lambda a, b: a << b if 0 <= b < 32 else None,
    "shift_right": lambda a, b: a >> b if 0 <= b < 32 else None,
    "shift_right_logical": lambda a, b: (a % 2**32) >> b if 0 <= b < 32 else None,
}

FLOAT: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "min": np.minimum,
    "max": np.maximum,
    "div": np.divide,
    "floor_div": lambda a, b: np.floor(a / b),
    "trunc_div": lambda a, b: np.trunc(a / b),
    "mod": np.mod,
    "rem": np.fmod,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
    "pow": np.power,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sigmoid": lambda a: 0.5 * (1 + np.tanh(0.5 * a)),
    "erf": lambda a: np.vectorize(math.erf, otypes=[np.float64])(a),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "atan": np.arctan,
    "atan2": np.arctan2,
}

COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "is_nan": np.isnan,
    "is_inf": np.isinf,
    "is_finite": np.isfinite,
}

BOOL: dict[str, Callable[..., Any]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
}


def apply_in_numpy(op: str, kinds: list[Kind], operands: list[Any]) -> Any:
    """The operation on numpy arrays: bool, int64 and float64. NaN or masked where it is not specified."""
    kind = kinds[-1]
    with np.errstate(all="ignore"):
        if op == "select":
            return np.where(*operands)
        if op == "to_bool":
            return operands[0] != 0
        if op == "to_float":
            return operands[0].astype(np.float64)
        if op == "to_int":
            a = operands[0].astype(np.float64)
            unspecified = ~(np.abs(np.trunc(a)) < 2.0**31)
            return _specified(np.where(unspecified, 0, np.trunc(a)).astype(np.int64), unspecified)
        if op in COMPARE:
            return COMPARE[op](*operands)
        if kind == "bool":
            return BOOL[op](*operands)
        if kind == "float":
            return FLOAT[op](*operands)
        exact = _int_op(INT[op])(*operands)
        unspecified = np.asarray(np.equal(exact, None), bool)
        known = np.asarray(np.where(unspecified, 0, exact), object)
        return _specified(np.asarray(wrap(known), np.int64), unspecified)


class Unspecified(Exception):
    """The value depends on what an operation does not specify."""


def _specified(value: np.ndarray, unspecified: np.ndarray) -> np.ndarray:
    if np.any(unspecified):
        raise Unspecified
    return value


def evaluate_in_numpy(
    e: Expression, env: Mapping[str, Any], captures: Mapping[int, np.ndarray] | None = None
) -> Any:
    """The value of `e` in int64 that wraps as int32 does, and in float64.

    Raises `Unspecified` if the expression does something that may have any value.
    """
    values: dict[Expression, Any] = {}
    for node in nodes_of(e):
        operands = [values[operand] for operand in node.operands]
        match node:
            case Variable(name):
                values[node] = np.asarray(env[name])
            case Constant(value):
                # A kernel has it as float32.
                values[node] = np.asarray(np.float64(np.float32(value)) if node.kind == "float" else value)
            case Load(slot):
                array = (captures or {})[slot]
                index = tuple(
                    np.clip(np.where(i < 0, i + n, i), 0, n - 1)
                    for i, n in zip(operands, array.shape, strict=True)
                )
                values[node] = array[index]
            case Apply(op):
                values[node] = apply_in_numpy(op, [operand.kind for operand in node.operands], operands)
    return values[e]

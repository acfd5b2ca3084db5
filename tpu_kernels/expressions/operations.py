"""The operations that expressions are made of: one table.

Each operation says what kinds it takes and gives, how jnp computes it, also on tiles in a TPU kernel, and
what values it can have for operands in given ranges (`ranges.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tpu_kernels.expressions import ranges

Kind = Literal["bool", "int", "float"]
"""What an expression's value is: bool, int32 or float32 (float64 where a reference computes in that)."""

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


class ExpressionError(ValueError):
    """What was asked for is no expression, or can't be made one."""


@dataclass(frozen=True)
class Operation:
    """One operation.

    Args:
        operands: the kinds that its operands may have; all have the same one, but for `select`, whose first
            is a bool.
        arity: how many operands it takes.
        result: the kind of the result, or None for that of the (last) operand.
        compute: the value, of jnp arrays that broadcast against each other.
        bounds: `bounds(xp, kind of the operands, *ranges)` is the `ranges.Range` of the result, or None where
            nothing better is known than the range of its kind.
    """

    operands: tuple[Kind, ...]
    arity: int
    result: Kind | None
    compute: Callable[..., Any]
    bounds: ranges.Rule | None


def result_kind(op: str, kinds: tuple[Kind, ...]) -> Kind:
    """The kind of `op` on operands of these kinds. Raises `ExpressionError` if it does not take them."""
    operation = OPERATIONS.get(op)
    if operation is None:
        raise ExpressionError(f"unknown operation {op!r}; there are {', '.join(sorted(OPERATIONS))}")
    if len(kinds) != operation.arity:
        raise ExpressionError(f"{op} takes {operation.arity} operands, got {len(kinds)}")
    same = kinds[1:] if op == "select" else kinds
    wrong_condition = op == "select" and kinds[0] != "bool"
    if wrong_condition or len(set(same)) != 1 or same[0] not in operation.operands:
        first = "a bool and two operands" if op == "select" else "operands"
        raise ExpressionError(
            f"{op} takes {first} of one kind ({' or '.join(operation.operands)}), got {', '.join(kinds)}; "
            f"convert them with to_bool, to_int or to_float"
        )
    return operation.result or same[0]


# What jnp has no function for, or one that Mosaic, the TPU's compiler of kernels, can't compile.


def _floor_div(a: Any, b: Any) -> Any:
    """The quotient, rounded down."""
    if jnp.issubdtype(jnp.result_type(a), jnp.floating):
        return jnp.floor(a / b)
    quotient, remainder = _quotient(a, b)
    return quotient - ((remainder != 0) & ((remainder < 0) != (b < 0))).astype(jnp.int32)


def _trunc_div(a: Any, b: Any) -> Any:
    """The quotient, rounded towards zero."""
    return jnp.trunc(a / b) if jnp.issubdtype(jnp.result_type(a), jnp.floating) else _quotient(a, b)[0]


def _mod(a: Any, b: Any) -> Any:
    """What `_floor_div` leaves; it has the sign of `b`."""
    if jnp.issubdtype(jnp.result_type(a), jnp.floating):
        remainder = _rem(a, b)
        return jnp.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)
    _, remainder = _quotient(a, b)
    return jnp.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


def _rem(a: Any, b: Any) -> Any:
    """What `_trunc_div` leaves; it has the sign of `a`."""
    return (
        jax.lax.rem(*_same_shape(a, b))
        if jnp.issubdtype(jnp.result_type(a), jnp.floating)
        else _quotient(a, b)[1]
    )


def _quotient(a: Any, b: Any) -> tuple[Any, Any]:
    """Quotient towards zero and remainder of int32."""
    a, b = _same_shape(a, b)
    quotient = jax.lax.div(a, b)
    return quotient, a - quotient * b


def _same_shape(*arrays: Any) -> tuple[Any, ...]:
    shape = np.broadcast_shapes(*(np.shape(array) for array in arrays))
    return tuple(jnp.broadcast_to(array, shape) for array in arrays)


def _expm1(a: Any) -> Any:
    """exp(a) - 1, accurate near zero: there by tanh(a/2) = (exp(a) - 1) / (exp(a) + 1)."""
    half = jnp.tanh(jnp.clip(a, -1, 1) / 2)
    return jnp.where(jnp.abs(a) < 1, 2 * half / (1 - half), jnp.exp(a) - 1)


def _atan(a: Any) -> Any:
    return jnp.arctan2(a, jnp.ones_like(a))


def _select(condition: Any, a: Any, b: Any) -> Any:
    if jnp.result_type(a) == jnp.bool_:
        return (condition & a) | (~condition & b)
    return jnp.where(condition, a, b)


def _eq(a: Any, b: Any) -> Any:
    return ~(a ^ b) if jnp.result_type(a) == jnp.bool_ else a == b


def _ne(a: Any, b: Any) -> Any:
    return a ^ b if jnp.result_type(a) == jnp.bool_ else a != b


def _to_bool(a: Any) -> Any:
    return a != 0


def _to_int(a: Any) -> Any:
    return jnp.where(a, 1, 0) if jnp.result_type(a) == jnp.bool_ else a.astype(jnp.int32)


def _to_float(a: Any, dtype: Any = jnp.float32) -> Any:
    return jnp.where(a, dtype(1), dtype(0)) if jnp.result_type(a) == jnp.bool_ else jnp.asarray(a, dtype)


ARITHMETIC: tuple[Kind, ...] = ("int", "float")
LOGIC: tuple[Kind, ...] = ("bool", "int")
ANY: tuple[Kind, ...] = ("bool", "int", "float")
INT: tuple[Kind, ...] = ("int",)
FLOAT: tuple[Kind, ...] = ("float",)

OPERATIONS: dict[str, Operation] = {
    # Arithmetic. Ints wrap around as int32 does.
    "add": Operation(ARITHMETIC, 2, None, jnp.add, ranges.add),
    "sub": Operation(ARITHMETIC, 2, None, jnp.subtract, ranges.sub),
    "mul": Operation(ARITHMETIC, 2, None, jnp.multiply, ranges.mul),
    "neg": Operation(ARITHMETIC, 1, None, jnp.negative, ranges.neg),
    "abs": Operation(ARITHMETIC, 1, None, jnp.abs, ranges.absolute),
    "sign": Operation(ARITHMETIC, 1, None, jnp.sign, ranges.sign),
    "min": Operation(ARITHMETIC, 2, None, jnp.minimum, ranges.minimum),
    "max": Operation(ARITHMETIC, 2, None, jnp.maximum, ranges.maximum),
    # Division. `floor_div` and `mod` round down, as Python; `trunc_div` and `rem` towards zero, as C. The
    # value of an int divided by zero is not specified.
    "div": Operation(FLOAT, 2, None, jnp.divide, ranges.div),
    "floor_div": Operation(ARITHMETIC, 2, None, _floor_div, ranges.floor_div),
    "trunc_div": Operation(ARITHMETIC, 2, None, _trunc_div, ranges.trunc_div),
    "mod": Operation(ARITHMETIC, 2, None, _mod, ranges.mod),
    "rem": Operation(ARITHMETIC, 2, None, _rem, ranges.rem),
    # Rounding. `round` takes halves to the even neighbour.
    "floor": Operation(FLOAT, 1, None, jnp.floor, ranges.floor),
    "ceil": Operation(FLOAT, 1, None, jnp.ceil, ranges.ceil),
    "round": Operation(FLOAT, 1, None, jnp.round, ranges.rounding),
    "trunc": Operation(FLOAT, 1, None, jnp.trunc, ranges.trunc),
    # Powers and logarithms.
    "pow": Operation(FLOAT, 2, None, jnp.power, None),
    "sqrt": Operation(FLOAT, 1, None, jnp.sqrt, ranges.sqrt),
    "rsqrt": Operation(FLOAT, 1, None, jax.lax.rsqrt, ranges.rsqrt),
    "exp": Operation(FLOAT, 1, None, jnp.exp, ranges.exp),
    "exp2": Operation(FLOAT, 1, None, jnp.exp2, ranges.exp2),
    "expm1": Operation(FLOAT, 1, None, _expm1, ranges.expm1),
    "log": Operation(FLOAT, 1, None, jnp.log, ranges.log),
    "log2": Operation(FLOAT, 1, None, jnp.log2, ranges.log2),
    "log1p": Operation(FLOAT, 1, None, jnp.log1p, ranges.log1p),
    # Other functions.
    "tanh": Operation(FLOAT, 1, None, jnp.tanh, ranges.tanh),
    "sigmoid": Operation(FLOAT, 1, None, jax.nn.sigmoid, ranges.sigmoid),
    "erf": Operation(FLOAT, 1, None, jax.lax.erf, ranges.between_minus_one_and_one),
    "sin": Operation(FLOAT, 1, None, jnp.sin, ranges.between_minus_one_and_one),
    "cos": Operation(FLOAT, 1, None, jnp.cos, ranges.between_minus_one_and_one),
    "tan": Operation(FLOAT, 1, None, jnp.tan, None),
    "atan": Operation(FLOAT, 1, None, _atan, None),
    "atan2": Operation(FLOAT, 2, None, jnp.arctan2, None),
    # Comparisons. A NaN is unequal to everything.
    "eq": Operation(ANY, 2, "bool", _eq, ranges.eq),
    "ne": Operation(ANY, 2, "bool", _ne, ranges.ne),
    "lt": Operation(ARITHMETIC, 2, "bool", jnp.less, ranges.lt),
    "le": Operation(ARITHMETIC, 2, "bool", jnp.less_equal, ranges.le),
    "gt": Operation(ARITHMETIC, 2, "bool", jnp.greater, ranges.gt),
    "ge": Operation(ARITHMETIC, 2, "bool", jnp.greater_equal, ranges.ge),
    "is_nan": Operation(FLOAT, 1, "bool", jnp.isnan, ranges.is_nan),
    "is_inf": Operation(FLOAT, 1, "bool", jnp.isinf, None),
    "is_finite": Operation(FLOAT, 1, "bool", jnp.isfinite, None),
    # Logic; of ints, that of their bits. A shift by less than 0 or more than 31 is not specified.
    "and": Operation(LOGIC, 2, None, jnp.bitwise_and, ranges.logical_and),
    "or": Operation(LOGIC, 2, None, jnp.bitwise_or, ranges.logical_or),
    "xor": Operation(LOGIC, 2, None, jnp.bitwise_xor, ranges.logical_xor),
    "not": Operation(LOGIC, 1, None, jnp.bitwise_not, ranges.logical_not),
    "shift_left": Operation(INT, 2, None, jnp.left_shift, ranges.shift_left),
    "shift_right": Operation(INT, 2, None, jax.lax.shift_right_arithmetic, ranges.shift_right),
    "shift_right_logical": Operation(INT, 2, None, jax.lax.shift_right_logical, ranges.shift_right_logical),
    # Choice and conversion. `to_int` rounds towards zero; a float outside of int32 gives an unspecified int.
    "select": Operation(ANY, 3, None, _select, ranges.select),
    "to_bool": Operation(ARITHMETIC, 1, "bool", _to_bool, ranges.to_bool),
    "to_int": Operation(("bool", "float"), 1, "int", _to_int, ranges.to_int),
    "to_float": Operation(LOGIC, 1, "float", _to_float, ranges.to_float),
}
"""All operations by name."""

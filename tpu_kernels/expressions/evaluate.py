"""The value of an expression, with jnp: in a TPU kernel on tiles, in a reference on whole arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_kernels.expressions.expression import Apply, Constant, Expression, Load, Variable, nodes_of
from tpu_kernels.expressions.operations import OPERATIONS


def evaluate(e: Expression, env: Mapping[str, Any], load: Callable[[Load], Any]) -> Any:
    """The value of `e`.

    Ints compute in int32 and floats in float32, or in float64 if the score or a loaded array is float64.
    Differentiable in the score and in what float loads give. In a Pallas TPU kernel, arrays are tiles
    [tile_q, tile_kv], columns [tile_q, 1], rows [1, tile_kv] and scalars.

    Args:
        e: any expression.
        env: an array or number for each variable of `e`; they broadcast against each other. Any integer dtype
            is taken as int32; any floating one below float64 as float32.
        load: the array that a `Load` stands for, which broadcasts as well. What it gives is converted to the
            load's kind: any array of numbers may stand for bools, where all but 0 is true.

    Returns:
        An array of the common shape of what `e` depends on, in bool, int32, float32 or float64.

    Raises:
        KeyError: `env` lacks a variable.
    """
    order = list(nodes_of(e))
    inputs: dict[Expression, Any] = {}
    for node in order:
        if isinstance(node, Variable):
            inputs[node] = _array(env[node.name])
        elif isinstance(node, Load):
            inputs[node] = _array(load(node))
    wide = any(node.kind == "float" and array.dtype == np.float64 for node, array in inputs.items())
    float_dtype = np.float64 if wide else np.float32
    values: dict[Expression, Any] = {}
    for node in order:
        match node:
            case Constant(value):
                dtype = {"bool": np.bool_, "int": np.int32, "float": float_dtype}[node.kind]
                values[node] = dtype(value)
            case Variable() | Load():
                values[node] = _as_kind(inputs[node], node.kind, float_dtype)
            case Apply(op, operands):
                values[node] = _compute(op, [values[operand] for operand in operands], float_dtype)
    return jnp.asarray(values[e])


def _array(value: Any) -> Any:
    """`value` with a dtype; numbers stay numbers."""
    if isinstance(value, bool | int | float | np.generic):
        return np.asarray(value)[()]
    return jnp.asarray(value)


def _compute(op: str, operands: list[Any], float_dtype: Any) -> Any:
    compute = OPERATIONS[op].compute
    if op == "to_float":
        compute = functools.partial(compute, dtype=float_dtype)
    if all(isinstance(operand, np.generic) for operand in operands):
        # A kernel would do this on scalars, for which a TPU has few operations.
        with jax.ensure_compile_time_eval():
            return np.asarray(compute(*(jnp.asarray(operand) for operand in operands)))[()]
    return compute(*_same_bool_shapes(operands))


def _as_kind(array: Any, kind: str, float_dtype: Any) -> Any:
    """`array` in the dtype of a kind."""
    if kind == "bool":
        return array if array.dtype == jnp.bool_ else array != 0
    dtype = np.int32 if kind == "int" else float_dtype
    if isinstance(array, np.generic):
        return dtype(array)
    if array.dtype == jnp.bool_:
        return jnp.where(array, dtype(1), dtype(0))
    return array if array.dtype == dtype else array.astype(dtype)


def _same_bool_shapes(arrays: list[Any]) -> list[Any]:
    """The arrays, bools among them broadcast by way of int32: Mosaic can't broadcast vectors of bools."""
    shape = np.broadcast_shapes(*(np.shape(array) for array in arrays))
    return [
        jnp.broadcast_to(jnp.where(array, np.int32(1), np.int32(0)), shape) != 0
        if array.dtype == jnp.bool_ and np.shape(array) != shape
        else array
        for array in arrays
    ]

"""A JAX function of scalars as an expression, by way of its jaxpr.

Arrays that the function uses, from its closure or as globals, are captures. What it computes of them alone is
computed once, when it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex_core

from tpu_kernels.expressions.expression import (
    VARIABLES,
    Apply,
    Constant,
    Expression,
    Load,
    Variable,
    apply,
    convert,
    maximum,
    minimum,
    power,
    select,
)
from tpu_kernels.expressions.operations import ExpressionError, Kind


def from_jax(
    fn: Callable[..., Any], names: Sequence[str], result: Kind | None = None
) -> tuple[Expression, tuple[jax.Array, ...]]:
    """`fn` as an expression, and the arrays it loads from.

        def mask_mod(b, h, q, kv):
            return (q >= kv) & (document[b, q] == document[b, kv])

        expression, captures = from_jax(mask_mod, ("b", "h", "q", "kv"), "bool")

    An index of a capture that is outside stands for the nearest element, whatever mode it has in JAX.

    Args:
        fn: takes a scalar (int32, the score float32) for each of `names` and returns one. Elementwise
            operations, and indexing of arrays by scalars, may be done with its arguments.
        names: what each argument is, of `expression.VARIABLES`.
        result: the kind that `fn` must return; an int will do for a float. None for any.

    Raises:
        ExpressionError: what `fn` does can't be an expression. The message names the operation and the line.
    """
    for name in names:
        Variable(name)  # raises if it is none
    avals = [jax.ShapeDtypeStruct((), _DTYPES[VARIABLES[name]]) for name in names]
    jaxpr = jax.make_jaxpr(fn)(*avals)
    if len(jaxpr.jaxpr.outvars) != 1:
        raise ExpressionError(f"the function must return one scalar, got {len(jaxpr.jaxpr.outvars)} results")
    tracer = _Tracer()
    (returned,) = tracer.run(jaxpr.jaxpr, jaxpr.consts, [Variable(name) for name in names], "")
    expression = tracer.expression(returned, "what the function returns", "")
    if result == "float" and expression.kind == "int":
        expression = convert(expression, "float")
    if result is not None and expression.kind != result:
        raise ExpressionError(f"the function must return a {result}, got {expression.kind}: {expression!r}")
    return expression, tuple(tracer.captures)


_DTYPES: dict[Kind, Any] = {"bool": jnp.bool_, "int": jnp.int32, "float": jnp.float32}


@dataclass(frozen=True)
class _Part:
    """`capture[index]`; a None in the index is a dimension that is left whole.

    `ones` dimensions of size 1 stand where an index was taken, in the place of each, until they are squeezed.
    """

    capture: Any
    index: tuple[Expression | None, ...]
    ones: tuple[
        int, ...
    ]  # dimensions of the capture whose index was taken and whose size of 1 is still there

    @property
    def dimensions(self) -> list[int]:
        """The dimension of the capture that each dimension of this part comes from."""
        return [i for i, e in enumerate(self.index) if e is None or i in self.ones]


class _Tracer:
    def __init__(self) -> None:
        self.captures: list[Any] = []

    def run(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], where: str) -> list[Any]:
        """The results: each an `Expression`, a `_Part`, a vector (a list of expressions) or an array."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            if isinstance(atom, jex_core.Literal):
                return Constant(np.asarray(atom.val).item()) if np.ndim(atom.val) == 0 else atom.val
            return values[atom]

        for equation in jaxpr.eqns:
            line = _line(equation) or where
            results = self.equation(equation, [read(atom) for atom in equation.invars], line)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[Any], where: str) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if not any(isinstance(operand, Expression | _Part | list) for operand in operands) or (
            all(isinstance(operand, Constant) or _is_array(operand) for operand in operands)
            and any(_is_array(operand) for operand in operands)
        ):
            return self.compute(equation, operands)
        inner = params.get("call_jaxpr", params.get("jaxpr"))
        if inner is not None and name in (
            "jit",
            "pjit",
            "closed_call",
            "core_call",
            "custom_jvp_call",
            "custom_vjp_call",
        ):
            known = _NAMED.get(params.get("name", ""))
            if known is not None and len(operands) == 2 and all(v.aval.shape == () for v in equation.invars):
                return [apply(known, *(self.expression(operand, name, where) for operand in operands))]
            closed = hasattr(inner, "consts")
            jaxpr, consts = (inner.jaxpr, inner.consts) if closed else (inner, ())
            return self.run(jaxpr, consts, operands, where)
        if name in _INDEXING:
            return [_INDEXING[name](self, operands, params, where)]
        handler = _HANDLERS.get(name)
        if handler is None or any(v.aval.shape != () for v in equation.outvars):
            shape = "" if handler is None else f" of shape {list(equation.outvars[0].aval.shape)}"
            raise _error(
                f"JAX's `{name}`{shape} can't be part of an expression, which is computed for single "
                f"elements. There are arithmetic, comparisons, jnp.where, `& | ~`, functions such as exp and "
                f"tanh, and indexing of arrays by scalars",
                where,
            )
        arguments = [self.expression(operand, f"an operand of `{name}`", where) for operand in operands]
        return [handler(arguments, params, where)]

    def compute(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """The results of an operation on captures and constants alone."""
        arrays = [
            jnp.asarray(operand.value, atom.aval.dtype) if isinstance(operand, Constant) else operand
            for operand, atom in zip(operands, equation.invars, strict=True)
        ]
        results = equation.primitive.bind(*arrays, **equation.params)
        return results if equation.primitive.multiple_results else [results]

    def expression(self, value: Any, what: str, where: str) -> Expression:
        """A scalar as an expression: a 0-d array is a capture."""
        if isinstance(value, Expression):
            return value
        if isinstance(value, _Part):
            if value.dimensions:
                raise _error(f"{what} is a part of an array, index it with q, kv, b or h", where)
            return self.load(value)
        if isinstance(value, list) or np.ndim(value):
            shape = [len(value)] if isinstance(value, list) else list(np.shape(value))
            raise _error(
                f"{what} has shape {shape}, but the function is about single elements: index it", where
            )
        return self.load(_Part(value, (), ()))

    def load(self, part: _Part) -> Expression:
        slot = next((i for i, other in enumerate(self.captures) if other is part.capture), len(self.captures))
        if slot == len(self.captures):
            self.captures.append(part.capture)
        dtype = part.capture.dtype
        kind: Kind = (
            "bool" if dtype == jnp.bool_ else "int" if jnp.issubdtype(dtype, jnp.integer) else "float"
        )
        return Load(slot, cast(tuple[Expression, ...], part.index), kind)


_NAMED = {"floor_divide": "floor_div", "remainder": "mod"}
"""jnp functions that have operations of their own; their jaxprs are longer and tell less."""


# Elementwise.


def _elementwise(op: str) -> Handler:
    return lambda arguments, params, where: apply(op, *arguments)


Handler = Callable[[list[Expression], Any, str], Expression]
_HANDLERS: dict[str, Handler] = {
    name: _elementwise(op or name)
    for entry in (
        "add add_any:add sub mul max min neg abs sign rem atan2 pow exp exp2 expm1 log log1p sqrt rsqrt tanh "
        "logistic:sigmoid erf sin cos tan atan floor ceil eq ne lt le gt ge and or xor not shift_left "
        "shift_right_arithmetic:shift_right shift_right_logical is_finite"
    ).split()
    for name, _, op in (entry.partition(":"),)
}


def _handles(*names: str) -> Callable[[Any], Any]:
    def register(handler: Any) -> Any:
        _HANDLERS.update({name: handler for name in names})
        return handler

    return register


@_handles("div")
def _div(arguments: list[Expression], params: Any, where: str) -> Expression:
    return apply("div" if arguments[0].kind == "float" else "trunc_div", *arguments)


@_handles("integer_pow")
def _integer_pow(arguments: list[Expression], params: Any, where: str) -> Expression:
    return power(arguments[0], params["y"])


@_handles("square")
def _square(arguments: list[Expression], params: Any, where: str) -> Expression:
    return arguments[0] * arguments[0]


@_handles("round")
def _round(arguments: list[Expression], params: Any, where: str) -> Expression:
    if params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        return apply("round", arguments[0])
    x = arguments[0]
    return apply("trunc", x + apply("sign", x) * 0.5)


@_handles("clamp")
def _clamp(arguments: list[Expression], params: Any, where: str) -> Expression:
    low, x, high = arguments
    return minimum(maximum(x, low), high)


@_handles("select_n")
def _select_n(arguments: list[Expression], params: Any, where: str) -> Expression:
    which, *cases = arguments
    if which.kind == "bool":
        return select(which, cases[1], cases[0])
    chosen = cases[-1]
    for i, case in enumerate(cases[:-1]):
        chosen = select(which.eq(i), case, chosen)
    return chosen


@_handles("convert_element_type")
def _convert(arguments: list[Expression], params: Any, where: str) -> Expression:
    dtype = np.dtype(params["new_dtype"])
    if dtype == jnp.bool_:
        return convert(arguments[0], "bool")
    if dtype in (np.dtype(jnp.int32), np.dtype(jnp.int64)):
        return convert(arguments[0], "int")
    if dtype in (np.dtype(jnp.float32), np.dtype(jnp.float64)):
        return convert(arguments[0], "float")
    raise _error(f"a conversion to {dtype}: expressions compute in int32 and float32; leave it out", where)


@_handles("stop_gradient", "copy", "copy_p", "optimization_barrier", "reduce_precision")
def _same(arguments: list[Expression], params: Any, where: str) -> Expression:
    return arguments[0]


# Indexing.


def _known_index(e: Expression, size: int) -> Expression:
    """An index without JAX's own treatment of negative ones, which loads do themselves."""
    match e:
        case Apply("select", (Apply("lt", (i, Constant(0))), Apply("add", (j, Constant(n))), k)):
            if i is j is k and n == size:
                return i
    return e


def _as_part(value: Any, where: str) -> _Part:
    if isinstance(value, _Part):
        return value
    if _is_array(value):
        return _Part(value, (None,) * np.ndim(value), ())
    raise _error("a position or score is one number and can't be indexed", where)


def _dynamic_slice(tracer: _Tracer, operands: list[Any], params: Any, where: str) -> Any:
    part = _as_part(operands[0], where)
    index, ones = list(part.index), list(part.ones)
    starts, sizes = operands[1:], params["slice_sizes"]
    for dimension, start, size in zip(part.dimensions, starts, sizes, strict=True):
        whole = part.capture.shape[dimension]
        if index[dimension] is None and size == 1:
            e = _known_index(tracer.expression(start, "an index", where), whole)
            index[dimension] = e
            ones.append(dimension)
        elif index[dimension] is None and size != whole:
            raise _error(f"a slice of {size} elements; index single elements", where)
    return _Part(part.capture, tuple(index), tuple(ones))


def _squeeze(tracer: _Tracer, operands: list[Any], params: Any, where: str) -> Any:
    if isinstance(operands[0], list | Expression):
        return operands[0][0] if isinstance(operands[0], list) else operands[0]
    part = _as_part(operands[0], where)
    gone = {part.dimensions[i] for i in params["dimensions"]}
    index = tuple(Constant(0) if i in gone and e is None else e for i, e in enumerate(part.index))
    return _Part(part.capture, index, tuple(i for i in part.ones if i not in gone))


def _reshape(tracer: _Tracer, operands: list[Any], params: Any, where: str) -> Any:
    value, shape = operands[0], tuple(params.get("new_sizes", params.get("shape")))
    if isinstance(value, Expression) and shape in ((), (1,)):
        return [value] if shape else value
    if isinstance(value, list) and shape in ((), (len(value),)):
        return value if shape else value[0]
    if isinstance(value, _Part):
        left = [d for d in value.dimensions if d not in value.ones]
        if shape == tuple(value.capture.shape[d] for d in left):
            return _Part(value.capture, value.index, ())
    raise _error(f"a reshape to {list(shape)}; positions and scores are single numbers", where)


def _concatenate(tracer: _Tracer, operands: list[Any], params: Any, where: str) -> Any:
    vector: list[Expression] = []
    for operand in operands:
        if isinstance(operand, list):
            vector += operand
        elif _is_array(operand) and np.ndim(operand) == 1 and not isinstance(operand, Tracer):
            vector += [Constant(value) for value in np.asarray(operand)]
        else:
            raise _error("a concatenation of what are no scalars", where)
    return vector


def _gather(tracer: _Tracer, operands: list[Any], params: Any, where: str) -> Any:
    part = _as_part(operands[0], where)
    numbers = params["dimension_numbers"]
    starts = operands[1]
    if isinstance(starts, list) and not numbers.operand_batching_dims:
        index, ones = list(part.index), list(part.ones)
        dimensions = part.dimensions
        for place, start in zip(numbers.start_index_map, starts, strict=True):
            dimension = dimensions[place]
            if params["slice_sizes"][place] != 1:
                break
            index[dimension] = _known_index(start, part.capture.shape[dimension])
            if place not in numbers.collapsed_slice_dims:
                ones.append(dimension)
        else:
            whole = all(
                index[d] is not None or params["slice_sizes"][i] == part.capture.shape[d]
                for i, d in enumerate(dimensions)
            )
            in_order = list(numbers.offset_dims) == list(range(len(numbers.offset_dims)))
            if whole and in_order:
                return _Part(part.capture, tuple(index), tuple(ones))
    raise _error("a gather that is more than indexing by scalars", where)


_INDEXING: dict[str, Callable[[_Tracer, list[Any], Any, str], Any]] = {
    "dynamic_slice": _dynamic_slice,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "broadcast_in_dim": _reshape,
    "concatenate": _concatenate,
    "gather": _gather,
}


# Helpers.


def _is_array(value: Any) -> bool:
    return not isinstance(value, Expression | _Part | list)


def _line(equation: Any) -> str:
    """Where the user's code is that an equation comes from; empty if JAX does not know."""
    # No public function tells it; without it an error only lacks the line.
    try:
        from jax._src import source_info_util

        frame = source_info_util.user_frame(equation.source_info.traceback)
        return "" if frame is None else f"{frame.file_name}:{frame.start_line}"
    except Exception:
        return ""


def _error(why: str, where: str) -> ExpressionError:
    return ExpressionError(f"{why}.\n  at {where}" if where else why)

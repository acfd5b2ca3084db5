"""A torch function of scalars, such as a `mask_mod` or `score_mod` of FlexAttention, as an expression.

The function is run once, on stand-ins for 0-d tensors that record what is done with them. The tensors that
it uses, from its closure, as globals or as attributes, are captures; those made inside from numbers are
constants.
"""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpu_kernels.expressions.expression import (
    Constant,
    Expression,
    Load,
    Operand,
    Variable,
    apply,
    as_expression,
    convert,
    maximum,
    minimum,
    power,
    select,
)
from tpu_kernels.expressions.operations import ExpressionError, Kind

_DTYPES: dict[Kind, torch.dtype] = {"bool": torch.bool, "int": torch.int32, "float": torch.float32}


def from_torch(
    fn: Callable[..., Any], names: Sequence[str], result: Kind | None = None, *, narrow: bool = True
) -> tuple[Expression, tuple[torch.Tensor, ...]]:
    """`fn` as an expression, and the tensors it loads from.

        def mask_mod(b, h, q, kv):
            return (q >= kv) & (document[b, q] == document[b, kv])

        expression, captures = from_torch(mask_mod, ("b", "h", "q", "kv"), "bool")

    Ints compute in int32 and floats in float32, whatever dtype torch would give them. An index of a capture
    that is negative counts from the end; one outside, where torch raises, stands for the nearest element.

    Args:
        fn: takes a 0-d tensor for each of `names` and returns one, or a number. It is called once. It may do
            elementwise operations with its arguments, and index tensors by 0-d tensors and numbers.
        names: what each argument is, of `expression.VARIABLES`.
        result: the kind that `fn` must return; an int will do for a float. None for any.
        narrow: whether float32 will do where `fn` asks for float64 itself (`.double()`, a number made with
            that dtype). The captures' dtypes are for the caller to see to.

    Raises:
        ExpressionError: what `fn` does can't be an expression: an operation that is not elementwise, a
            decision in Python that depends on a position. The message names the operation and the line.
    """
    tracer = _Tracer(narrow)
    arguments = [tracer.tensor(Variable(name)) for name in names]
    with _Functions(tracer), _Operations(tracer):
        returned = fn(*arguments)
        expression = tracer.expression(returned, "what the function returns")
    if result == "float" and expression.kind == "int":
        expression = convert(expression, "float")
    if result is not None and expression.kind != result:
        raise ExpressionError(
            f"{_name(fn)} must return a {result}, got {expression.kind}: {expression!r}; "
            f"{'compare it with something' if result == 'bool' else 'convert it with .float()'}"
        )
    return expression, tuple(tracer.captures)


class _Traced(torch.Tensor):
    """Stands for a number that is an expression, or for what indices so far have left of a capture."""

    expression: Expression | None
    capture: torch.Tensor | None
    places: tuple[Expression | None, ...]  # in each dimension of the capture; None where it is left

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ExpressionError(f"{func} on the argument of a function that has been traced, after it returned")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<traced {self.expression if self.expression is not None else list(self.shape)}>"


class _Tracer:
    def __init__(self, narrow: bool) -> None:
        self.narrow = narrow
        self.captures: list[torch.Tensor] = []
        # Tensors made of numbers while tracing. Held, so that no other tensor gets the same id.
        self.constants: dict[int, torch.Tensor] = {}

    def tensor(self, e: Expression) -> _Traced:
        traced = torch.Tensor._make_wrapper_subclass(_Traced, (), dtype=_DTYPES[e.kind], device="cpu")  # pyright: ignore
        traced.expression, traced.capture, traced.places = e, None, ()
        return traced

    def part(self, capture: torch.Tensor, index: tuple[Expression | None, ...]) -> _Traced:
        """`capture[index]`, where None leaves a dimension as it is."""
        if None not in index:
            return self.tensor(self.load(capture, cast(tuple[Expression, ...], index)))
        shape = tuple(size for size, i in zip(capture.shape, index, strict=True) if i is None)
        traced = torch.Tensor._make_wrapper_subclass(_Traced, shape, dtype=capture.dtype, device="cpu")  # pyright: ignore
        traced.expression, traced.capture, traced.places = None, capture, index
        return traced

    def load(self, capture: torch.Tensor, index: tuple[Expression, ...]) -> Expression:
        if capture.dtype.is_complex:
            raise _error(f"a captured tensor can't be complex, got {capture.dtype}")
        slot = next((i for i, other in enumerate(self.captures) if other is capture), len(self.captures))
        if slot == len(self.captures):
            self.captures.append(capture)
        return Load(slot, index, _kind(capture.dtype))

    def expression(self, value: Any, what: str) -> Expression:
        """A traced value, a number or a 0-d tensor as an expression."""
        if isinstance(value, bool | int | float):
            return as_expression(value)
        if isinstance(value, _Traced):
            if value.expression is not None:
                return value.expression
            shape = list(value.shape)
        elif isinstance(value, torch.Tensor):
            if value.dim() == 0:
                if id(value) in self.constants:
                    self.check_float64(value.dtype)
                    return Constant(value.item())
                return self.load(value, ())
            shape = list(value.shape)
        else:
            raise _error(f"{what} must be a number or a 0-d tensor, got {type(value).__name__}")
        raise _error(
            f"{what} has shape {shape}, but the function is about single elements: index it with b, h, q or "
            f"kv, such as `table[q, kv]`"
        )

    def check_float64(self, dtype: torch.dtype | None) -> None:
        if dtype == torch.float64 and not self.narrow:
            raise _error("float64: expressions compute in float32; use torch.float32 if that will do")

    def getitem(self, source: torch.Tensor, index: Any) -> torch.Tensor:
        """`source[index]`, where one of them is traced."""
        entries = list(index) if isinstance(index, tuple) else [index]
        if isinstance(source, _Traced):
            if source.capture is None:
                if all(entry is Ellipsis for entry in entries):
                    return source
                raise _error(
                    f"a position or score is one number and can't be indexed, got {_indices(entries)}"
                )
            capture, known = source.capture, source.places
        else:
            capture, known = source, (None,) * source.dim()
        left = [dimension for dimension, i in enumerate(known) if i is None]
        count = sum(entry is not Ellipsis for entry in entries)
        if count > len(left) or entries.count(Ellipsis) > 1:
            raise _error(f"{_indices(entries)} are too many indices for shape {list(source.shape)}")
        if Ellipsis in entries:
            place = entries.index(Ellipsis)
            entries[place : place + 1] = [slice(None)] * (len(left) - count)
        new = list(known)
        for dimension, entry in zip(left, entries, strict=False):
            if isinstance(entry, slice) and entry == slice(None):
                continue
            if isinstance(entry, slice) or entry is None:
                raise _error(f"an index beside q, kv, b or h must be a number or `:`, got {entry}")
            e = self.expression(entry, "an index")
            if e.kind != "int":
                raise _error(f"an index must be an integer, got a {e.kind}")
            size = capture.shape[dimension]
            if isinstance(e, Constant) and not -size <= e.value < size:
                raise _error(
                    f"index {e.value} is outside of dimension {dimension} of shape {list(capture.shape)}"
                )
            new[dimension] = e
        return self.part(capture, tuple(new))


class _Functions(TorchFunctionMode):
    """Sees indexing before torch asks the index for its value."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and any(isinstance(leaf, _Traced) for leaf in tree_leaves(args)):
            return self.tracer.getitem(*args)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees every operation, and records those with traced operands."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, _Traced) for leaf in leaves):
            result = func(*args, **kwargs)
            # Of numbers alone, or of what was made of them; `torch.tensor(1.0)` arrives as `lift_fresh`.
            made = func._overloadpacket.__name__ in ("lift_fresh", "lift_fresh_copy") or all(
                id(leaf) in self.tracer.constants for leaf in leaves if isinstance(leaf, torch.Tensor)
            )
            if made and isinstance(result, torch.Tensor) and not result.requires_grad:
                self.tracer.constants[id(result)] = result
            return result
        name = func._schema.name.removeprefix("aten::")
        in_place = name.endswith("_") and not name.endswith("__")
        handler = _HANDLERS.get(name.removesuffix("_") if in_place else name)
        if handler is None:
            # In inference mode, and below derivatives, ops come that torch else makes of others before.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is NotImplemented:
                raise _error(_why_not(name))
            return result
        result = handler(_Call(self.tracer, func, args, kwargs))
        if not isinstance(result, Expression):
            return result
        if not in_place:
            return self.tracer.tensor(result)
        target = args[0]
        if not isinstance(target, _Traced):
            raise _error(f"{name} would write to a captured tensor")
        kind = cast(Expression, target.expression).kind
        if _WIDER[result.kind] > _WIDER[kind]:
            raise _error(f"{name} would write a {result.kind} to a {kind}")
        target.expression = convert(result, kind)
        return target


_WIDER: dict[Kind, int] = {"bool": 0, "int": 1, "float": 2}


class _Call:
    """One call of an aten operation."""

    def __init__(self, tracer: _Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tracer = tracer
        self.name = func._schema.name.removeprefix("aten::")
        names = [argument.name for argument in func._schema.arguments]
        self.arguments = dict(zip(names, args, strict=False)) | kwargs
        self.names = names

    def operand(self, place: int | str) -> Expression:
        """An argument, by its place or name, as an expression."""
        name = self.names[place] if isinstance(place, int) else place
        return self.tracer.expression(self.arguments[name], f"an operand of torch's `{self.name}`")

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)


Handler = Callable[[_Call], Any]
_HANDLERS: dict[str, Handler] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _elementwise(op: str, arity: int) -> Handler:
    return lambda call: apply(op, *(call.operand(i) for i in range(arity)))


_HANDLERS.update(
    {
        name: _elementwise(op or name, arity)
        for arity, table in (
            (
                1,
                "neg abs sign sgn:sign exp exp2 expm1 log log2 log1p sqrt rsqrt tanh sigmoid erf sin cos tan "
                "atan bitwise_not:not",
            ),
            (
                2,
                "eq ne lt le gt ge minimum:min maximum:max atan2 floor_divide:floor_div remainder:mod "
                "fmod:rem bitwise_and:and bitwise_or:or bitwise_xor:xor __and__:and __or__:or __xor__:xor "
                "bitwise_left_shift:shift_left bitwise_right_shift:shift_right __lshift__:shift_left "
                "__rshift__:shift_right",
            ),
        )
        for name, _, op in (entry.partition(":") for entry in table.split())
    }
)


@_handles("add", "sub", "rsub")
def _add(call: _Call) -> Expression:
    a, b = call.operand(0), call.operand(1)
    if call.name == "rsub":
        a, b = b, a
    if call.get("alpha", 1) != 1:
        scaled = call.get("alpha")
        if call.name == "rsub":
            a, b = a, b * scaled
        else:
            b = b * scaled
    if a.kind == b.kind == "bool" and call.name.startswith("add"):
        return a | b
    return a + b if call.name.startswith("add") else a - b


@_handles("mul")
def _mul(call: _Call) -> Expression:
    a, b = call.operand(0), call.operand(1)
    return a & b if a.kind == b.kind == "bool" else a * b


@_handles("div")
def _div(call: _Call) -> Expression:
    op = {None: "div", "floor": "floor_div", "trunc": "trunc_div"}[call.get("rounding_mode")]
    return apply(op, call.operand(0), call.operand(1))


@_handles("pow")
def _pow(call: _Call) -> Expression:
    base, exponent = call.operand(0), call.operand(1)
    value = power(base, exponent)
    if base.kind != "float" and exponent.kind != "float" and value.kind == "float":
        raise _error(
            "an integer to the power of one that is no constant from 0 to 8; convert to float before"
        )
    return value


@_handles("where")
def _where(call: _Call) -> Expression:
    return select(call.operand(0), call.operand(1), call.operand(2))


@_handles("masked_fill")
def _masked_fill(call: _Call) -> Expression:
    x = call.operand(0)
    return select(call.operand(1), convert(call.operand(2), x.kind), x)


@_handles("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(call: _Call) -> Expression:
    value = call.operand(0)
    for name, limit in (("min", maximum), ("min_val", maximum), ("max", minimum), ("max_val", minimum)):
        if call.get(name) is not None:
            value = limit(value, call.operand(name))
    return value


@_handles("floor", "ceil", "round", "trunc", "fix")
def _round(call: _Call) -> Expression:
    x = call.operand(0)
    if call.get("decimals", 0) != 0:
        scale = 10.0 ** call.get("decimals")
        return apply("round", x * scale) / scale
    return (
        x if x.kind == "int" else apply("trunc" if call.name.startswith("fix") else call.name.rstrip("_"), x)
    )


@_handles("logical_and", "logical_or", "logical_xor", "logical_not")
def _logical(call: _Call) -> Expression:
    operands = [convert(call.operand(i), "bool") for i in range(1 if call.name == "logical_not" else 2)]
    return apply(call.name.removeprefix("logical_").rstrip("_"), *operands)


@_handles("relu")
def _relu(call: _Call) -> Expression:
    return maximum(call.operand(0), 0)


@_handles("silu")
def _silu(call: _Call) -> Expression:
    x = call.operand(0)
    return x * apply("sigmoid", x)


@_handles("gelu")
def _gelu(call: _Call) -> Expression:
    x = call.operand(0)
    if call.get("approximate", "none") == "tanh":
        return 0.5 * x * (1 + apply("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + apply("erf", x * math.sqrt(0.5)))


@_handles("leaky_relu")
def _leaky_relu(call: _Call) -> Expression:
    x = call.operand(0)
    return select(x > 0, x, x * call.get("negative_slope", 0.01))


@_handles("softplus")
def _softplus(call: _Call) -> Expression:
    x = call.operand(0)
    beta, threshold = call.get("beta", 1), call.get("threshold", 20)
    scaled = x * beta
    # log(1 + exp(y)), for large y without overflow.
    soft = (maximum(scaled, 0) + apply("log1p", apply("exp", -abs(scaled)))) / beta
    return select(scaled > threshold, x, soft)


@_handles("reciprocal")
def _reciprocal(call: _Call) -> Expression:
    return 1 / call.operand(0)


@_handles("log10")
def _log10(call: _Call) -> Expression:
    return apply("log", call.operand(0)) * (1 / math.log(10))


@_handles("sinh", "cosh")
def _hyperbolic(call: _Call) -> Expression:
    x = convert(call.operand(0), "float")
    if call.name.startswith("cosh"):
        return (apply("exp", x) + apply("exp", -x)) * 0.5
    return (apply("expm1", x) - apply("expm1", -x)) * 0.5


@_handles("lerp")
def _lerp(call: _Call) -> Expression:
    start = call.operand(0)
    return start + call.operand(2) * (call.operand(1) - start)


@_handles("isnan", "isinf", "isfinite")
def _classify(call: _Call) -> Expression:
    x = call.operand(0)
    if x.kind != "float":
        return Constant(call.name == "isfinite")
    return apply({"isnan": "is_nan", "isinf": "is_inf", "isfinite": "is_finite"}[call.name], x)


_WRAPPING = (torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
"""Their arithmetic is that of other numbers than int32's."""


@_handles("_to_copy")
def _to_copy(call: _Call) -> Any:
    source = call.arguments["self"]
    dtype = call.get("dtype")
    if isinstance(source, _Traced) and source.expression is None:
        raise _error(f"a conversion of a tensor of shape {list(source.shape)}; index it first")
    if dtype in (torch.float16, torch.bfloat16):
        raise _error(f"a conversion to {dtype}: expressions compute in float32; leave it out")
    if dtype in _WRAPPING:
        raise _error(f"a conversion to {dtype}: expressions compute in int32; use torch.int32")
    call.tracer.check_float64(dtype)
    x = call.operand(0)
    return x if dtype is None else convert(x, _kind(dtype))


@_handles("clone", "detach", "alias", "contiguous", "lift_fresh", "lift_fresh_copy", "positive")
def _same(call: _Call) -> Any:
    return call.operand(0)


@_handles("view", "reshape", "_unsafe_view", "expand", "squeeze", "broadcast_to")
def _reshape(call: _Call) -> Any:
    shape = call.get("size", call.get("shape", ()))
    if list(shape):
        raise _error(f"torch's `{call.name}` to shape {list(shape)}: positions and scores are single numbers")
    return call.operand(0)


@_handles(
    "fill", "full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "new_empty", "zero"
)
def _filled(call: _Call) -> Any:
    if list(call.get("size", ())):
        raise _error(f"torch's `{call.name}` of shape {list(call.get('size'))}: use a tensor from outside")
    like = call.operand(0)
    if call.name.startswith(("fill", "full", "new_full")):
        value: Operand = call.operand("fill_value" if "fill_value" in call.arguments else "value")
    else:
        value = 1 if "ones" in call.name else 0
    dtype = call.get("dtype")
    call.tracer.check_float64(dtype)
    return convert(value, like.kind if dtype is None else _kind(dtype))


@_handles("copy")
def _copy(call: _Call) -> Any:
    return convert(call.operand(1), call.operand(0).kind)


@_handles("index", "mod_index")
def _index(call: _Call) -> Any:
    indices = [slice(None) if i is None else i for i in call.arguments["indices"]]
    return call.tracer.getitem(call.arguments["self"], tuple(indices))


@_handles("select")
def _select(call: _Call) -> Any:
    source, dimension = call.arguments["self"], call.arguments["dim"] % call.arguments["self"].dim()
    return call.tracer.getitem(source, (slice(None),) * dimension + (call.arguments["index"],))


# Errors.

_ASKS_FOR_VALUES = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"})


def _why_not(name: str) -> str:
    if name in _ASKS_FOR_VALUES:
        return (
            "Python needs the value of something that depends on a position or the score (`if`, `and`, `or`, "
            "`not`, `int()`, `.item()`), and there is none: the function is run once for all positions. Use "
            "torch.where, `&`, `|` and `~`"
        )
    return (
        f"torch's `{name}` can't be part of an expression, which is computed element by element. There are "
        f"arithmetic, comparisons, torch.where, `& | ~`, functions such as exp and tanh, and indexing of "
        f"tensors"
    )


def _error(why: str) -> ExpressionError:
    """An error that names the line of the traced function, or of the one that asked for the trace."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("torch", "tpu_kernels"):
            file, line = frame.f_code.co_filename, frame.f_lineno
            return ExpressionError(f"{why}.\n  at {file}:{line}: {linecache.getline(file, line).strip()}")
        frame = frame.f_back
    return ExpressionError(why)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _indices(entries: Sequence[Any]) -> str:
    return f"[{', '.join(':' if entry == slice(None) else repr(entry) for entry in entries)}]"


def _kind(dtype: torch.dtype) -> Kind:
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"

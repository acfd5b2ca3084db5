"""Expressions: small immutable graphs of elementwise operations on indices, scores and captured arrays.

    >>> causal = Variable("q") >= Variable("kv")
    >>> text(causal)
    'ge(q,kv)'
    >>> parse("ge(q,kv)") is causal
    True

An expression is bool, int (int32) or float (float32), its *kind*. It is made of

- variables: the indices `b h q kv`, the lengths `q_len kv_len` (int) and `score` (float),
- constants,
- loads: one element of a *capture*, an array that the caller gives, named by its slot in a list,
- operations, those of `operations.OPERATIONS`.

Equal expressions are the same object: a node is looked up before it is made. So comparing and hashing take no
time, and what occurs twice in a formula is there once and computed once. All functions here visit every node
once, without recursion, however often it is used and however deep the graph is.
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar, cast

import numpy as np

from tpu_kernels.expressions.operations import INT32_MAX, INT32_MIN, ExpressionError, Kind, result_kind

VARIABLES: dict[str, Kind] = {
    "b": "int",
    "h": "int",
    "q": "int",
    "kv": "int",
    "q_len": "int",
    "kv_len": "int",
    "score": "float",
}
"""All variables and their kinds: batch, query head, query and key position; their numbers; the score."""

INDICES = ("b", "h", "q", "kv")
"""The variables that are positions, in the order of the axes of a score array."""

Operand: TypeAlias = "Expression | bool | int | float"

_nodes: weakref.WeakValueDictionary[tuple[Any, ...], Expression] = weakref.WeakValueDictionary()
_nodes_lock = threading.Lock()

N = TypeVar("N", bound="Expression")


class Expression:
    """A node, with the nodes it depends on. Make one from variables with Python's operators, or by `trace`.

    `==` asks whether two expressions are the same and gives a bool; `eq` and `ne` compare their values. The
    other operators make expressions: `+ - * / // % ** & | ^ ~ << >> < <= > >=`, `abs()`. Python's `/`, `//`
    and `%` mean what they mean for Python's numbers.
    """

    __slots__ = ("__weakref__", "kind")

    kind: Kind

    @property
    def operands(self) -> tuple[Expression, ...]:
        """The nodes that this one is computed from."""
        return ()

    def __reduce__(self) -> tuple[Callable[[str], Expression], tuple[str]]:
        return parse, (text(self),)

    def __copy__(self) -> Expression:
        return self

    def __deepcopy__(self, memo: Any) -> Expression:
        return self

    def __repr__(self) -> str:
        return f"<{text(self)}>"

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"the value of {self!r} is not known, it stands for all positions at once. Use `&`, `|`, `~` and "
            f"`select` instead of `and`, `or`, `not` and `if`"
        )

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"an expression can't be changed: {name}")

    # Comparisons of values.

    def eq(self, other: Operand) -> Expression:
        """Whether the values are equal."""
        return apply("eq", self, other)

    def ne(self, other: Operand) -> Expression:
        """Whether the values differ."""
        return apply("ne", self, other)

    def __lt__(self, other: Operand) -> Expression:
        return apply("lt", self, other)

    def __le__(self, other: Operand) -> Expression:
        return apply("le", self, other)

    def __gt__(self, other: Operand) -> Expression:
        return apply("gt", self, other)

    def __ge__(self, other: Operand) -> Expression:
        return apply("ge", self, other)

    # Arithmetic.

    def __add__(self, other: Operand) -> Expression:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Expression:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Expression:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Expression:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Expression:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Expression:
        return apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Expression:
        return apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Expression:
        return apply("div", other, self)

    def __floordiv__(self, other: Operand) -> Expression:
        return apply("floor_div", self, other)

    def __rfloordiv__(self, other: Operand) -> Expression:
        return apply("floor_div", other, self)

    def __mod__(self, other: Operand) -> Expression:
        return apply("mod", self, other)

    def __rmod__(self, other: Operand) -> Expression:
        return apply("mod", other, self)

    def __pow__(self, other: Operand) -> Expression:
        return power(self, other)

    def __rpow__(self, other: Operand) -> Expression:
        return power(other, self)

    def __neg__(self) -> Expression:
        return apply("neg", self)

    def __pos__(self) -> Expression:
        return self

    def __abs__(self) -> Expression:
        return apply("abs", self)

    # Logic, of bits for ints.

    def __and__(self, other: Operand) -> Expression:
        return apply("and", self, other)

    def __rand__(self, other: Operand) -> Expression:
        return apply("and", other, self)

    def __or__(self, other: Operand) -> Expression:
        return apply("or", self, other)

    def __ror__(self, other: Operand) -> Expression:
        return apply("or", other, self)

    def __xor__(self, other: Operand) -> Expression:
        return apply("xor", self, other)

    def __rxor__(self, other: Operand) -> Expression:
        return apply("xor", other, self)

    def __invert__(self) -> Expression:
        return apply("not", self)

    def __lshift__(self, other: Operand) -> Expression:
        return apply("shift_left", self, other)

    def __rlshift__(self, other: Operand) -> Expression:
        return apply("shift_left", other, self)

    def __rshift__(self, other: Operand) -> Expression:
        return apply("shift_right", self, other)

    def __rrshift__(self, other: Operand) -> Expression:
        return apply("shift_right", other, self)


class Variable(Expression):
    """One of `VARIABLES`."""

    __slots__ = ("name",)
    __match_args__: ClassVar = ("name",)

    name: str

    def __new__(cls, name: str) -> Variable:
        if name not in VARIABLES:
            raise ExpressionError(f"unknown variable {name!r}; there are {', '.join(VARIABLES)}")
        return _node(cls, (cls, name), kind=VARIABLES[name], name=name)


class Constant(Expression):
    """A bool, an int that int32 holds, or a float."""

    __slots__ = ("value",)
    __match_args__: ClassVar = ("value",)

    value: bool | int | float

    def __new__(cls, value: bool | int | float) -> Constant:
        kind: Kind
        if isinstance(value, bool | np.bool_):
            kind, value = "bool", bool(value)
        elif isinstance(value, int | np.integer):
            kind, value = "int", int(value)
            if not INT32_MIN <= value <= INT32_MAX:
                raise ExpressionError(f"{value} is not in the range of int32, in which expressions compute")
        elif isinstance(value, float | np.floating):
            kind, value = "float", float(value)
        else:
            raise TypeError(f"a constant must be a bool, int or float, got {type(value).__name__}: {value!r}")
        # By text, because 1 == True == 1.0, 0.0 == -0.0 and nan != nan.
        return _node(cls, (cls, kind, repr(value)), kind=kind, value=value)


class Load(Expression):
    """An element of the capture in `slot`: `captures[slot][index]`.

    `index` has an int expression for each dimension of the capture. A negative index counts from the end; one
    that is still outside stands for the nearest element. `kind` is what the element becomes: bool for a bool
    array (`!= 0` of any other), int for integers (int32), float for floats (float32).
    """

    __slots__ = ("index", "slot")
    __match_args__: ClassVar = ("slot", "index", "kind")

    slot: int
    index: tuple[Expression, ...]

    def __new__(cls, slot: int, index: tuple[Operand, ...], kind: Kind) -> Load:
        if isinstance(slot, bool) or not isinstance(slot, int) or slot < 0:
            raise ExpressionError(f"a slot is the place of a capture in a list, an int from 0, got {slot!r}")
        if kind not in ("bool", "int", "float"):
            raise ExpressionError(f"a kind is bool, int or float, got {kind!r}")
        nodes = tuple(as_expression(i) for i in index)
        for i in nodes:
            if i.kind != "int":
                raise ExpressionError(f"an index must be an int expression, got the {i.kind} {i!r}")
        return _node(cls, (cls, slot, nodes, kind), kind=kind, slot=slot, index=nodes)

    @property
    def operands(self) -> tuple[Expression, ...]:
        return self.index


class Apply(Expression):
    """The operation `op` on `operands`, as it is: `apply` converts and simplifies."""

    __slots__ = ("_operands", "op")
    __match_args__: ClassVar = ("op", "operands")

    op: str
    _operands: tuple[Expression, ...]

    def __new__(cls, op: str, operands: tuple[Expression, ...]) -> Apply:
        kind = result_kind(op, tuple(operand.kind for operand in operands))
        return _node(cls, (cls, op, operands), kind=kind, op=op, _operands=operands)

    @property
    def operands(self) -> tuple[Expression, ...]:
        return self._operands


def _node(cls: type[N], key: tuple[Any, ...], **fields: Any) -> N:
    """The one node of this key."""
    with _nodes_lock:
        node = _nodes.get(key)
        if node is None:
            node = object.__new__(cls)
            for name, value in fields.items():
                object.__setattr__(node, name, value)
            _nodes[key] = node
    return cast(N, node)


# Building.


def as_expression(value: Operand) -> Expression:
    """`value` itself, or a number as a `Constant`. Raises `TypeError` for anything else."""
    return value if isinstance(value, Expression) else Constant(cast(Any, value))


def convert(value: Operand, kind: Kind) -> Expression:
    """`value` as another kind: to int towards zero, to bool by `!= 0`."""
    e = as_expression(value)
    if e.kind == kind:
        return e
    if isinstance(e, Constant):
        if kind == "bool":
            return Constant(e.value != 0)
        if kind == "float":
            return Constant(float(e.value))
        if math.isfinite(e.value) and INT32_MIN <= int(e.value) <= INT32_MAX:
            return Constant(int(e.value))
    return Apply(f"to_{kind}", (e,))


def apply(op: str, *operands: Operand) -> Expression:
    """The operation on operands of any kinds, converted as far as `op` needs it, and simplified.

    bool becomes int and int float where kinds differ, as in torch and numpy; arithmetic on bools is that of
    the ints 0 and 1. Constants are folded, and what changes nothing (`e & true`, `e + 0`) is left out.
    """
    nodes = _promote(op, [as_expression(operand) for operand in operands])
    simpler = _simplify(op, nodes)
    return Apply(op, nodes) if simpler is None else simpler


def select(condition: Operand, if_true: Operand, if_false: Operand) -> Expression:
    """`if_true` where `condition`, elsewhere `if_false`."""
    return apply("select", condition, if_true, if_false)


def minimum(a: Operand, b: Operand) -> Expression:
    """The smaller one; NaN if one is NaN."""
    return apply("min", a, b)


def maximum(a: Operand, b: Operand) -> Expression:
    """The larger one; NaN if one is NaN."""
    return apply("max", a, b)


def power(base: Operand, exponent: Operand) -> Expression:
    """`base ** exponent`: products for a small constant exponent, also of ints, else in floats."""
    base, exponent = as_expression(base), as_expression(exponent)
    if isinstance(exponent, Constant) and exponent.kind != "bool":
        n = exponent.value
        if n == int(n) if math.isfinite(n) else False:
            if 0 <= n <= 8 and (exponent.kind == "int" or base.kind == "float"):
                base = convert(base, "int") if base.kind == "bool" else base
                one: Expression = convert(1, base.kind)
                result = one
                for bit in bin(int(n))[2:]:
                    result = one if result is one else result * result
                    if bit == "1":
                        result = base if result is one else result * base
                return result
            if n == -1:
                return apply("div", 1.0, base)
        if n == 0.5:
            return apply("sqrt", base)
        if n == -0.5:
            return apply("rsqrt", base)
    return apply("pow", base, exponent)


_LOGIC = frozenset({"and", "or", "xor", "not"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_FLOAT_ONLY = frozenset(
    "div pow exp exp2 expm1 log log2 log1p sqrt rsqrt tanh sigmoid sin cos tan erf atan atan2".split()
)
_WIDTH: dict[Kind, int] = {"bool": 0, "int": 1, "float": 2}


def _promote(op: str, nodes: list[Expression]) -> tuple[Expression, ...]:
    """Operands of one kind, one that `op` takes."""
    if op == "select" and len(nodes) == 3:
        return (convert(nodes[0], "bool"), *_promote("", nodes[1:]))
    if op.startswith("to_") or not nodes:
        return tuple(nodes)
    kind: Kind = max(nodes, key=lambda node: _WIDTH[node.kind]).kind
    if op in _FLOAT_ONLY:
        kind = "float"
    elif kind == "bool" and op not in _LOGIC and op not in ("eq", "ne", ""):
        kind = "int"
    return tuple(convert(node, kind) for node in nodes)


def _simplify(op: str, nodes: tuple[Expression, ...]) -> Expression | None:
    """A simpler expression of the same value and kind, or None."""
    match op, nodes:
        case (("and" | "or"), (a, b)) if a.kind == "bool":
            absorbing = Constant(op == "or")
            if a is absorbing or b is absorbing:
                return absorbing
            if isinstance(a, Constant) or a is b:
                return b
            if isinstance(b, Constant):
                return a
        case "xor", (Constant(True), b) if b.kind == "bool":
            return apply("not", b)
        case "xor", (Constant(False), b) if b.kind == "bool":
            return b
        case "xor", (_, Constant()) if nodes[0].kind == "bool":
            return _simplify(op, (nodes[1], nodes[0]))
        case "not", (Apply("not", (a,)),):
            return a
        case "not", (Apply(comparison, (a, b)),) if comparison in _OPPOSITE and a.kind == "int":
            return Apply(_OPPOSITE[comparison], (a, b))
        case "select", (Constant(condition), a, b):
            return a if condition else b
        case "select", (_, a, b) if a is b:
            return a
        case (("add" | "sub"), (a, Constant(0))) if a.kind == "int":
            return a
        case "add", (Constant(0), b) if b.kind == "int":
            return b
        case (("mul" | "floor_div" | "div"), (a, Constant(1))) if (
            op == "mul" or a.kind != "float" or op == "div"
        ):
            return a
        case "mul", (Constant(1), b):
            return b
    if not all(isinstance(node, Constant) for node in nodes):
        return None
    values = [cast(Constant, node).value for node in nodes]
    if op in _FOLDED and nodes[0].kind != "float":
        value = _FOLDED[op](*values)
        return Constant(value) if INT32_MIN <= value <= INT32_MAX else None
    if op == "neg":
        return Constant(-values[0])
    return None


_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}

_FOLDED: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": abs,
    "min": min,
    "max": max,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: not a if isinstance(a, bool) else ~a,
}


# Looking at a graph.


def nodes_of(*expressions: Expression) -> Iterator[Expression]:
    """Every node once, operands before what uses them, in the order of the text."""
    seen: set[Expression] = set()
    for expression in expressions:
        stack = [(expression, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                yield node
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack.extend((operand, False) for operand in reversed(node.operands) if operand not in seen)


def variables(e: Expression) -> frozenset[str]:
    """The names of the variables that `e` depends on."""
    return frozenset(node.name for node in nodes_of(e) if isinstance(node, Variable))


def loads(e: Expression) -> tuple[Load, ...]:
    """The loads in `e`, each once, inner ones before the outer ones whose index they are part of."""
    return tuple(node for node in nodes_of(e) if isinstance(node, Load))


def check_slots(e: Expression, captures: int) -> None:
    """Raise `ExpressionError` if a load needs a capture beyond these."""
    for load in loads(e):
        if load.slot >= captures:
            raise ExpressionError(f"{load!r} needs capture {load.slot}, got {captures} captures")


def rebuild(e: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """`e` with every node put through `change`, after its operands were."""
    new: dict[Expression, Expression] = {}
    for node in nodes_of(e):
        operands = tuple(new[operand] for operand in node.operands)
        same: Expression = node
        if isinstance(node, Apply):
            same = Apply(node.op, operands)
        elif isinstance(node, Load):
            same = Load(node.slot, operands, node.kind)
        new[node] = change(same)
    return new[e]


def remap_slots(e: Expression, slots: Mapping[int, int]) -> Expression:
    """`e` with each load's slot replaced by what `slots` has for it."""

    def change(node: Expression) -> Expression:
        return Load(slots[node.slot], node.index, node.kind) if isinstance(node, Load) else node

    return rebuild(e, change)


def shift_slots(e: Expression, by: int) -> Expression:
    """`e` with `by` added to the slot of each load."""
    return remap_slots(e, {load.slot: load.slot + by for load in loads(e)}) if by else e


def substitute(e: Expression, values: Mapping[str, Operand]) -> Expression:
    """`e` with variables replaced by expressions or numbers of their kinds, and simplified."""

    def change(node: Expression) -> Expression:
        if isinstance(node, Variable) and node.name in values:
            return convert(values[node.name], node.kind)
        return apply(node.op, *node.operands) if isinstance(node, Apply) else node

    return rebuild(e, change)


def with_numbers(e: Expression, numbers: Mapping[int, int]) -> Expression:
    """`e` with the loads of some slots replaced by what they give, and simplified."""

    def change(node: Expression) -> Expression:
        if isinstance(node, Load) and node.slot in numbers:
            return convert(numbers[node.slot], node.kind)
        return apply(node.op, *node.operands) if isinstance(node, Apply) else node

    return rebuild(e, change)


# Text.


def text(e: Expression) -> str:
    """`e` in one line of ASCII without spaces: the same for equal expressions, different for others.

    `op(a,b)` is an operation, `int0[b,q]` the element [b, q] of capture 0 as an int, `true`, `3` and `0.5`
    are constants. A node with operands that is used several times is written once, in front, with a name:
    `%0=sub(q,kv);and(ge(%0,0),lt(%0,128))`.
    """
    uses: dict[Expression, int] = {}
    order = list(nodes_of(e))
    for node in order:
        for operand in node.operands:
            uses[operand] = uses.get(operand, 0) + 1
    written: dict[Expression, str] = {}
    definitions: list[str] = []
    for node in order:
        operands = ",".join(written[operand] for operand in node.operands)
        match node:
            case Variable(name):
                written[node] = name
            case Constant(value):
                written[node] = str(value).lower() if isinstance(value, bool) else repr(value)
            case Load(slot, _, kind):
                written[node] = f"{kind}{slot}[{operands}]"
            case Apply(op):
                written[node] = f"{op}({operands})"
        if node.operands and uses.get(node, 0) > 1:
            name = f"%{len(definitions)}"
            definitions.append(f"{name}={written[node]};")
            written[node] = name
    return "".join(definitions) + written[e]


_TOKEN = re.compile(
    r"\s*(?:(?P<name>%\d+)|(?P<number>-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf|nan)(?![\w.]))"
    r"|(?P<load>(?:bool|int|float)\d+)(?=\s*\[)|(?P<word>[a-z_]\w*)|(?P<mark>[][(),;=]))"
)


def parse(source: str) -> Expression:
    """The expression that `text` writes as `source`. Spaces are allowed.

    Raises:
        ExpressionError: `source` is no such text, with the place.
    """
    definitions: dict[str, Expression] = {}
    tokens = _tokens(source)
    position = 0
    # An open call or load: what it is, its closing mark, its operands so far.
    frames: list[tuple[str, str, list[Expression]]] = []
    defining: str | None = None

    def wrong(expected: str) -> ExpressionError:
        kind, token, at = tokens[position]
        got = "the end" if kind == "end" else repr(token)
        return ExpressionError(f"expected {expected}, got {got} at {at} of the expression {source!r}")

    def take(mark: str) -> bool:
        nonlocal position
        if tokens[position][:2] == ("mark", mark):
            position += 1
            return True
        return False

    while True:
        if not frames and defining is None and tokens[position][0] == "name":
            if tokens[position + 1][:2] == ("mark", "="):
                defining = tokens[position][1]
                position += 2
        kind, token, _ = tokens[position]
        value: Expression | None = None
        if kind == "number":
            value = Constant(float(token) if re.search(r"[.einf]", token) else int(token))
        elif kind == "name":
            if token not in definitions:
                raise wrong(f"a name defined before (there are {', '.join(definitions) or 'none'})")
            value = definitions[token]
        elif kind == "word" and tokens[position + 1][:2] == ("mark", "("):
            frames.append((token, ")", []))
        elif kind == "load":
            frames.append((token, "]", []))
        elif kind == "word" and token in VARIABLES:
            value = Variable(token)
        elif kind == "word" and token in ("true", "false"):
            value = Constant(token == "true")
        else:
            raise wrong("a variable, constant, operation or load")
        position += 1
        if value is None:
            position += 1  # the opening mark
            if not take(frames[-1][1]):
                continue
            value = _closed(*frames.pop())
        while frames:
            name, closing, operands = frames[-1]
            operands.append(value)
            if take(","):
                break
            if not take(closing):
                raise wrong(f"',' or '{closing}'")
            frames.pop()
            value = _closed(name, closing, operands)
        else:
            if defining is None:
                if tokens[position][0] != "end":
                    raise wrong("the end")
                return value
            if not take(";"):
                raise wrong("';'")
            definitions[defining] = value
            defining = None


def _closed(name: str, closing: str, operands: list[Expression]) -> Expression:
    if closing == ")":
        return Apply(name, tuple(operands))
    kind = name.rstrip("0123456789")
    return Load(int(name[len(kind) :]), tuple(operands), cast(Kind, kind))


def _tokens(source: str) -> list[tuple[str, str, int]]:
    """(group of `_TOKEN`, text, place) of each token, and two ends so that one may look ahead."""
    tokens: list[tuple[str, str, int]] = []
    position = 0
    stripped = source.rstrip()
    while position < len(stripped):
        match = _TOKEN.match(stripped, position)
        if match is None or match.lastgroup is None:
            raise ExpressionError(
                f"can't read {stripped[position : position + 20]!r} at {position} of {source!r}"
            )
        tokens.append((match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
        position = match.end()
    return [*tokens, ("end", "", len(source)), ("end", "", len(source))]

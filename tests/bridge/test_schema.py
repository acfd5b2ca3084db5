"""Signatures: every kind of argument an op can have, called every way an op can be called."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge import device as simulated
from bridge import jax_op
from bridge import program as programs
from bridge.op import JaxOp

simulated.register()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Every op has the same `__call__`, and torch compiles one function for a few cases only."""
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------- kinds of static arguments


class Text(enum.Enum):
    A = "a"
    B = "b"


class Whole(enum.IntEnum):
    ONE = 1
    TWO = 2


class Real(enum.Enum):
    HALF = 0.5
    MANY = math.inf


class Switch(enum.Enum):
    ON = True
    OFF = False


class Mixed(enum.Enum):
    """The value of A is the name of B: the name is what counts in torch's dispatcher."""

    A = "B"
    B = 1
    C = 2.5
    D = (1, 2)


class Bits(enum.Flag):
    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass(frozen=True)
class Tile:
    dtype: jnp.dtype = np.dtype("float32")
    text: Text = Text.A


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 3
    sizes: tuple[int, ...] = (1, 2)
    limit: float = math.inf
    tile: Tile = Tile()
    window: int | None = None
    mode: Literal["x", "y"] = "x"
    note: str = "q|]\"\n'é"
    total: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.sizes))


_NUMBERS = itertools.count()

SAW: list[Any] = []
"""What the JAX function got for `value`, written when it is traced."""


def _op(name: str, annotation: Any, *default: Any) -> JaxOp:
    def function(x, value):  # type: ignore[no-untyped-def]
        SAW.append(value)
        return x + 1

    function.__annotations__ = {"x": jax.Array, "value": annotation, "return": jax.Array}
    function.__defaults__ = default or None
    return jax_op(f"test_schema::{name}", function)


BFLOAT16 = np.dtype(jnp.bfloat16)
BRAIN = Tile(torch.bfloat16, Text.B)  # type: ignore[arg-type]
CASES: list[tuple[str, Any, Any, Any, Any]] = [
    # name, annotation, what is passed to the op, what is passed to torch.ops, what the function gets
    ("int", int, 3, 3, 3),
    ("int_widest", int, -(2**63), -(2**63), -(2**63)),
    ("int_of_bool", int, True, True, 1),
    ("int_of_numpy", int, np.int32(3), 3, 3),
    ("float", float, 0.1, 0.1, 0.1),
    ("float_of_int", float, 1, 1, 1.0),
    ("float_inf", float, -math.inf, -math.inf, -math.inf),
    ("float_nan", float, math.nan, math.nan, math.nan),
    ("float_minus_zero", float, -0.0, -0.0, -0.0),
    ("bool", bool, True, True, True),
    ("str", str, 'a "b"|]\n\\é', 'a "b"|]\n\\é', 'a "b"|]\n\\é'),
    ("str_empty", str, "", "", ""),
    ("dtype", np.dtype, torch.bfloat16, torch.bfloat16, BFLOAT16),
    ("dtype_torch", torch.dtype, torch.float8_e5m2, torch.float8_e5m2, np.dtype(jnp.float8_e5m2)),
    ("dtype_jax", jnp.dtype, jnp.bfloat16, torch.bfloat16, BFLOAT16),
    ("dtype_numpy", jnp.dtype, np.int8, torch.int8, np.dtype("int8")),
    ("device", torch.device, torch.device("cpu"), torch.device("cpu"), torch.device("cpu")),
    ("device_text", torch.device, "tpu:0", torch.device("tpu:0"), torch.device("tpu:0")),
    ("number_bool", torch.types.Number, True, True, True),
    ("number_int", int | float, 1, 1, 1),
    ("number_float", int | float | bool, 1.0, 1.0, 1.0),
    ("enum_str", Text, Text.B, "b", Text.B),
    ("enum_value", Text, "b", "b", Text.B),
    ("enum_name", Text, "B", "B", Text.B),
    ("enum_int", Whole, Whole.TWO, 2, Whole.TWO),
    ("enum_float", Real, Real.MANY, math.inf, Real.MANY),
    ("enum_bool", Switch, Switch.OFF, False, Switch.OFF),
    ("enum_mixed_a", Mixed, Mixed.A, "A", Mixed.A),
    ("enum_mixed_b", Mixed, Mixed.B, "B", Mixed.B),
    ("enum_mixed_c", Mixed, Mixed.C, "C", Mixed.C),
    ("enum_mixed_d", Mixed, Mixed.D, "D", Mixed.D),
    ("enum_flag", Bits, Bits.LEFT | Bits.RIGHT, 3, Bits.LEFT | Bits.RIGHT),
    ("literal_str", Literal["a", "b"], "b", "b", "b"),
    ("literal_int", Literal[1, 2], 2, 2, 2),
    ("literal_mixed_true", Literal[1, True, "1", 1.5], True, "bool: True", True),
    ("literal_mixed_int", Literal[1, True, "1", 1.5], 1, "int: 1", 1),
    ("literal_mixed_str", Literal[1, True, "1", 1.5], "1", "1", "1"),
    ("literal_none", Literal["a", None], None, None, None),
    ("literal_not_none", Literal["a", None], "a", "a", "a"),
    ("optional_int", Optional[int], 3, 3, 3),  # noqa: UP045
    ("optional_none", int | None, None, None, None),
    ("optional_enum", Text | None, Text.A, "a", Text.A),
    ("optional_dtype", torch.dtype | None, torch.int8, torch.int8, np.dtype("int8")),
    ("optional_list", Sequence[int] | None, [1], [1], (1,)),
    ("ints", Sequence[int], [1, 2], [1, 2], (1, 2)),
    ("ints_empty", Sequence[int], (), (), ()),
    ("floats", list[float], [1, math.inf], [1, math.inf], (1.0, math.inf)),
    ("bools", tuple[bool, bool], (True, False), (True, False), (True, False)),
    ("strings", tuple[str, ...], ["a", "b|"], ["a", "b|"], ("a", "b|")),
    ("numbers", Sequence[int | float], [1, 2.0], [1, 2.0], (1, 2.0)),
    ("annotated", Annotated[int, "rows"], 3, 3, 3),
    ("annotated_optional", Annotated[int | None, "rows"], 3, 3, 3),
    ("config", Config, Config(), None, Config()),
    ("config_other", Config, Config(5, (9,), 0.1, Tile(BFLOAT16, Text.B), 7, "y", ""), None,
     Config(5, (9,), 0.1, Tile(BFLOAT16, Text.B), 7, "y", "")),
    ("config_canonical", Config, Config(sizes=[4, 5], tile=BRAIN), None,  # type: ignore[arg-type]
     Config(sizes=(4, 5), tile=Tile(BFLOAT16, Text.B))),
    ("config_none", Config | None, None, None, None),
]  # fmt: skip


def _same(got: Any, expected: Any) -> bool:
    """Equal by type and value, NaN and -0.0 told apart."""
    if isinstance(expected, tuple):
        return isinstance(got, tuple) and len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(expected, float):
        return type(got) is float and got.hex() == expected.hex()
    return type(got) is type(expected) and got == expected


@pytest.mark.parametrize("name, annotation, given, plain, expected", CASES, ids=[c[0] for c in CASES])
def test_static_arguments(
    name: str, annotation: Any, given: Any, plain: Any, expected: Any, device: torch.device
) -> None:
    x = torch.zeros(2, device=device)

    def check(call: Callable[[], torch.Tensor], *, traces: bool = True) -> None:
        SAW.clear()
        assert call().tolist() == [1.0, 1.0]
        assert all(_same(got, expected) for got in SAW), SAW
        assert SAW or not traces

    for way in ("call", "ops", "compile"):
        op = _op(f"{name}_{way}_{device.type}", annotation)
        if way == "call":
            check(lambda op=op: op(x, given))
            check(lambda op=op: op(x=x, value=given), traces=False)
        elif way == "ops" and annotation is not Config:
            registered = getattr(torch.ops.test_schema, f"{name}_{way}_{device.type}")
            check(lambda f=registered: f(x, plain))
        elif way == "compile" and device.type == "cpu" and not isinstance(given, np.integer):
            compiled = torch.compile(lambda x, op=op: op(x, given), fullgraph=True, backend="eager")
            check(lambda f=compiled: f(x))


DEFAULTS: list[tuple[str, Any, Any, Any]] = [
    # name, annotation, default, what the function gets
    ("int", int, 3, 3),
    ("float", float, 1e-05, 1e-05),
    ("inf", float, -math.inf, -math.inf),
    ("nan", float, math.nan, math.nan),
    ("bool", bool, True, True),
    ("number", int | float, True, True),
    ("str", str, 'a "b"\\', 'a "b"\\'),
    ("str_control", str, "a\x01\n", "a\x01\n"),
    ("dtype", torch.dtype, torch.bfloat16, BFLOAT16),
    ("dtype_jax", jnp.dtype, jnp.float8_e8m0fnu, np.dtype(jnp.float8_e8m0fnu)),
    ("device", torch.device, torch.device("cpu"), torch.device("cpu")),
    ("device_text", torch.device, "tpu", torch.device("tpu")),
    ("enum", Text, Text.B, Text.B),
    ("enum_mixed", Mixed, Mixed.B, Mixed.B),
    ("literal", Literal["a", "b"], "b", "b"),
    ("literal_mixed", Literal[1, "1"], 1, 1),
    ("ints", Sequence[int], [1, 2], (1, 2)),
    ("ints_empty", Sequence[int], (), ()),
    ("floats", Sequence[float], [1.5, math.inf], (1.5, math.inf)),
    ("strings", Sequence[str], ["a"], ("a",)),
    ("optional", int | None, None, None),
    ("optional_int", int | None, 3, 3),
    ("config", Config, Config(sizes=(8,)), Config(sizes=(8,))),
    ("optional_config", Config | None, Config(sizes=(8,), note="plain"), Config(sizes=(8,), note="plain")),
]


@pytest.mark.parametrize("name, annotation, default, expected", DEFAULTS, ids=[d[0] for d in DEFAULTS])
def test_defaults(name: str, annotation: Any, default: Any, expected: Any) -> None:
    x = torch.zeros(2)
    for way in ("call", "ops", "compile"):
        op = _op(f"default_{name}_{way}", annotation, default)
        function = op if way == "call" else getattr(torch.ops.test_schema, f"default_{name}_{way}")
        if way == "compile":
            function = torch.compile(lambda x, op=op: op(x), fullgraph=True, backend="eager")
        SAW.clear()
        assert function(x).tolist() == [1.0, 1.0]
        assert SAW and all(_same(got, expected) for got in SAW), (way, SAW)


@pytest.mark.parametrize("default", [3, 0.5, "a", Text.A, torch.int8], ids=str)
def test_none_is_not_the_default_of_an_optional_argument(default: Any) -> None:
    op = _op(f"given_none_{type(default).__name__}", type(default) | None, default)
    for function in (op, torch.compile(op, fullgraph=True, backend="eager"), op._opoverload):
        SAW.clear()
        op._table._programs.clear()
        function(torch.zeros(2), None)
        assert SAW and set(SAW) == {None}


def test_an_optional_default_that_can_not_be_told_from_none_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"index 1 \(value\): the default inf of an Optional.*None the default"
    ):
        _op("optional_inf", float | None, math.inf)


# ---------------------------------------------------------------------------------- functions of all sorts


def _scaled(x: jax.Array, factor: float, *, shift: int = 0, twice: bool = False) -> jax.Array:
    return x * factor * (2 if twice else 1) + shift


def test_keyword_only_statics_go_by_name_only() -> None:
    op = jax_op("test_schema::keyword_only", _scaled)
    x = torch.arange(3.0)
    for call in (
        op,
        torch.ops.test_schema.keyword_only,
        torch.compile(op, fullgraph=True, backend="eager"),
    ):
        assert torch.equal(call(x, 3.0), 3 * x)
        assert torch.equal(call(x, 3.0, shift=2), 3 * x + 2)
        assert torch.equal(call(x, factor=3.0, twice=True), 6 * x)
    with pytest.raises(TypeError, match="keyword_only takes 2 positional arguments .x, factor., got 3"):
        op(x, 3.0, 2)


def test_partials_by_position_and_by_keyword() -> None:
    def three(a: jax.Array, b: int, c: float, d: jax.Array) -> jax.Array:
        return a * b + c * d

    x, y = torch.arange(3.0), torch.ones(3)
    by_keyword = jax_op("test_schema::partial_keyword", functools.partial(three, b=2, c=10.0))
    assert torch.equal(by_keyword(x, y), 2 * x + 10)
    assert torch.equal(by_keyword(x, d=y), 2 * x + 10)
    assert torch.equal(torch.ops.test_schema.partial_keyword(x, y), 2 * x + 10)
    with pytest.raises(TypeError, match="no argument 'b'; it has a, d"):
        by_keyword(x, y, b=3)

    def static_first(n: int, a: jax.Array, scale: float = 1.0) -> jax.Array:
        return a * n * scale

    by_position = jax_op("test_schema::partial_position", functools.partial(static_first, 4))
    assert torch.equal(by_position(x), 4 * x)
    inner = functools.partial(jax.jit(static_first, static_argnums=0), 4)
    both = jax_op("test_schema::partial_both", functools.partial(inner, scale=2.0))
    assert torch.equal(both(x), 8 * x)
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), 8 * x)


def test_jit_wrapped_functions() -> None:
    @functools.partial(jax.jit, static_argnames=("factor", "shift", "twice"))
    def jitted(x: jax.Array, factor: float, *, shift: int = 0, twice: bool = False) -> jax.Array:
        assert isinstance(factor, float)
        return x * factor + shift

    op = jax_op("test_schema::jitted", jitted)
    x = torch.arange(3.0, requires_grad=True)
    out = op(x, 3.0, shift=1)
    assert torch.equal(out, 3 * x + 1)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))  # type: ignore[arg-type]


def test_custom_vjp_functions_keep_their_rule() -> None:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def clipped(x: jax.Array, limit: float) -> jax.Array:
        return jnp.clip(x, -limit, limit)

    # A straight-through gradient, which the derivative of clip is not.
    clipped.defvjp(lambda x, limit: (clipped(x, limit), None), lambda limit, _, g: (g * 10,))
    op = jax_op("test_schema::custom_vjp", clipped)
    x = torch.tensor([-5.0, 0.5, 5.0], requires_grad=True)
    op(x, 1.0).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 10.0))  # type: ignore[arg-type]


def test_callable_objects_methods_and_wrappers() -> None:
    class Scale:
        factor = 3.0

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.factor

        def method(self, x: jax.Array) -> jax.Array:
            return x * self.factor + 1

    def wrapper(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) * 2

        return inner

    x = torch.arange(3.0)
    assert torch.equal(jax_op("test_schema::object", Scale())(x), 3 * x)
    assert torch.equal(jax_op("test_schema::method", Scale().method)(x), 3 * x + 1)
    wrapped: Any = jax_op("test_schema::wrapped", wrapper(_scaled))
    assert torch.equal(wrapped(x, 2.0, shift=1), 4 * x + 2)


def test_unused_operands_are_kept() -> None:
    def second(a: jax.Array, b: jax.Array) -> jax.Array:
        return b + 0

    op = jax_op("test_schema::unused", second)
    a, b = torch.ones(3, requires_grad=True), torch.arange(2.0, requires_grad=True)
    op(a, b).sum().backward()
    assert torch.equal(b.grad, torch.ones(2)) and torch.equal(a.grad, torch.zeros(3))  # type: ignore[arg-type]
    torch.library.opcheck(op, (a.detach(), b.detach()))


# ---------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("way", ["call", "ops", "compile"])
def test_optional_tensors(way: str, device: torch.device) -> None:
    def affine(
        x: jax.Array,
        weight: jax.Array | None = None,
        bias: Optional[jax.Array] = None,  # noqa: UP045
    ) -> jax.Array:
        assert isinstance(x, jax.Array)
        x = x if weight is None else x * weight
        return x + 0 if bias is None else x + bias

    name = f"optional_{way}_{device.type}"
    op: Any = jax_op(f"test_schema::{name}", affine)
    function = {"call": op, "ops": getattr(torch.ops.test_schema, name)}.get(way)
    function = function or torch.compile(op, fullgraph=True, backend="eager")
    x, w, b = (
        torch.arange(3.0, device=device),
        torch.full((3,), 2.0, device=device),
        torch.ones(3, device=device),
    )
    assert torch.equal(function(x), x)
    assert torch.equal(function(x, w), x * w)
    assert torch.equal(function(x, None, b), x + b)
    assert torch.equal(function(x, bias=b, weight=w), x * w + b)
    w.requires_grad_()
    function(x, w, None).sum().backward()
    assert w.grad is not None and torch.equal(w.grad, x)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("way", ["call", "ops", "compile"])
def test_lists_of_tensors(way: str, count: int, device: torch.device) -> None:
    def weighted(xs: Sequence[jax.Array], start: jax.Array, ys: list[jax.Array] | None = None) -> jax.Array:
        assert len(xs) == count
        return sum(((i + 1) * x for i, x in enumerate(xs)), start) + sum(ys or [])

    name = f"lists_{way}_{count}_{device.type}"
    op: Any = jax_op(f"test_schema::{name}", weighted)
    function = {"call": op, "ops": getattr(torch.ops.test_schema, name)}.get(way)
    function = function or torch.compile(op, fullgraph=True, backend="eager")
    xs = [torch.full((2,), float(10**i), device=device, requires_grad=True) for i in range(count)]
    start = torch.ones(2, device=device)
    expected = 1.0 + sum((i + 1) * 10.0**i for i in range(count))
    out = function(xs, start)
    assert out.tolist() == [expected] * 2
    assert function(tuple(xs), start, [start, start]).tolist() == [expected + 2] * 2
    if count:
        out.sum().backward()
        assert [x.grad.tolist() for x in xs] == [[i + 1.0] * 2 for i in range(count)]  # type: ignore[union-attr]
    torch.library.opcheck(op, ([x.detach() for x in xs], start))


def test_a_list_alone_may_be_empty() -> None:
    def count(xs: Sequence[jax.Array]) -> jax.Array:
        return jnp.full((2,), len(xs))

    op = jax_op("test_schema::list_alone", count)
    assert op([]).tolist() == [0, 0] == torch.ops.test_schema.list_alone([]).tolist()
    assert op([torch.ones(3)]).tolist() == [1, 1]


@pytest.mark.parametrize("way", ["call", "ops", "compile"])
def test_returns(way: str, device: torch.device) -> None:
    def one(x: jax.Array) -> jax.Array:
        return x + 1

    def single(x: jax.Array) -> tuple[jax.Array]:
        return (x + 1,)

    def pair(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x + 1, jnp.sum(x)

    def several(x: jax.Array) -> list[jax.Array]:
        return [x + i for i in range(x.shape[0])]

    def any_length(x: jax.Array) -> tuple[jax.Array, ...]:
        return (x, x + 1)

    def nothing(x: jax.Array) -> None:
        return None

    def annotated(x: jax.Array) -> Annotated[jax.Array, "rows"]:
        return x + 1

    x = torch.arange(2.0, device=device)
    expected = {
        one: x + 1, single: (x + 1,), pair: (x + 1, x.sum()), several: [x, x + 1], any_length: [x, x + 1],
        nothing: None, annotated: x + 1,
    }  # fmt: skip
    for function, wanted in expected.items():
        name = f"returns_{function.__name__}_{way}_{device.type}"
        op: Any = jax_op(f"test_schema::{name}", function)
        if way == "ops":
            op, wanted = getattr(torch.ops.test_schema, name), x + 1 if function is single else wanted
        if way == "compile":
            op = torch.compile(op, fullgraph=True, backend="eager")
        got = op(x)
        assert type(got) is type(wanted), function
        for a, b in zip(
            torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True
        ):
            assert a is b is None or torch.equal(a, b)


def test_ops_without_tensors() -> None:
    def table(n: int, device: torch.device = "cpu") -> jax.Array:  # type: ignore[assignment]
        return jnp.arange(n, dtype=jnp.float32)

    op = jax_op("test_schema::table", table)
    for where in ("cpu", "tpu"):
        for function in (op, torch.compile(op, fullgraph=True, backend="eager")):
            made = function(4, where)
            assert made.device.type == where and made.tolist() == [0, 1, 2, 3]
    assert op(2).device.type == "cpu"


# ---------------------------------------------------------------------------------- bad signatures


def _variadic(*xs: jax.Array) -> jax.Array: ...  # type: ignore[empty-body]
def _tensor_keyword(x: jax.Array, *, y: jax.Array) -> jax.Array: ...  # type: ignore[empty-body]
def _unannotated(x, y: jax.Array): ...  # type: ignore[no-untyped-def]  # noqa: E302
def _many(x: jax.Array, a: complex, b: dict[str, int], c: jax.Array = 3, *, d=1) -> dict: ...  # type: ignore
def _nested(x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]: ...  # type: ignore[empty-body]
def _optional_return(x: jax.Array) -> jax.Array | None: ...
def _bad_default(x: jax.Array, n: int = "3") -> jax.Array: ...  # type: ignore
def _lists_of_lists(x: jax.Array, n: list[list[int]]) -> jax.Array: ...  # type: ignore[empty-body]
def _union(x: jax.Array, n: int | str) -> jax.Array: ...  # type: ignore[empty-body]


@dataclasses.dataclass
class _Thawed:
    size: int = 3


@dataclasses.dataclass(frozen=True)
class _Opaque:
    thing: object = None


def _thawed(x: jax.Array, c: _Thawed) -> jax.Array: ...  # type: ignore[empty-body]
def _opaque(x: jax.Array, c: _Opaque) -> jax.Array: ...  # type: ignore[empty-body]
def _unknown(x: jax.Array, c: NoSuchName) -> jax.Array: ...  # type: ignore  # noqa: F821


@pytest.mark.parametrize(
    "function, says",
    [
        (_variadic, [r"index 0 \(\*xs\): an op has a fixed number"]),
        (_tensor_keyword, [r"index 1 \(y\): torch ops take tensors by position"]),
        (_unannotated, [r"index 0 \(x\): the type annotation is missing", "return annotation: .* missing"]),
        (
            _many,
            [r"index 1 \(a\)", r"index 2 \(b\)", r"index 3 \(c\).*default", r"index 4 \(d\)", "return annot"],
        ),
        (_nested, ["return annotation.*flat tuple"]),
        (_optional_return, ["return annotation"]),
        (_bad_default, [r"index 1 \(n\): the default '3' is not int"]),
        (_lists_of_lists, [r"index 1 \(n\)"]),
        (_union, [r"index 1 \(n\).*mixes types"]),
        (_thawed, [r"index 1 \(c\): _Thawed must be a frozen dataclass"]),
        (_opaque, [r"index 1 \(c\).*object"]),
        (_unknown, ["NoSuchName.*top of the module"]),
        (print, [r"index 0 \(\*args\)"]),
        (5, ["5 has no signature"]),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_bad_signatures_list_every_bad_argument(function: Any, says: list[str]) -> None:
    for text in says:
        with pytest.raises(ValueError, match=f"(?s)test_schema::bad.*{text}"):
            jax_op("test_schema::bad", function)
    assert not hasattr(torch.ops.test_schema, "bad")


@pytest.mark.parametrize("name", ["f", "a:b", "a::", "::b", "a::b::c", "a::1", "a.b::c", "a b::c", ""])
def test_bad_names(name: str) -> None:
    with pytest.raises(ValueError, match="namespace::op"):
        jax_op(name, _scaled)


@pytest.mark.parametrize("name", [None, 5, _scaled])
def test_names_are_text(name: Any) -> None:
    with pytest.raises(TypeError, match="the name must be a str"):
        jax_op(name, _scaled)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"donate_argnums": (1,)}, r"index 1, which is not a tensor argument; those are 0 \(x\)"),
        ({"donate_argnums": (7,)}, "index 7"),
        ({"mutates": ("nope",)}, "'nope', which is not a tensor"),
        ({"mutates": ("factor",)}, "'factor', which is not a tensor"),
        ({"vjp": _scaled}, "vjp must be a pair"),
        ({"mesh": 1}, "mesh"),
    ],
)
def test_bad_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
        jax_op("test_schema::bad_options", _scaled, **options)
    assert not hasattr(torch.ops.test_schema, "bad_options")


# ---------------------------------------------------------------------------------- bad calls


def _everything(
    x: jax.Array,
    n: int,
    scale: float = 1.0,
    *,
    ys: Sequence[int] = (),
    flag: bool = False,
    text: Text = Text.A,
) -> jax.Array:
    return x * n * scale


EVERYTHING = jax_op("test_schema::everything", _everything)
X = torch.ones(2)


@pytest.mark.parametrize(
    "args, kwargs, says",
    [
        ((), {}, r"argument 'x' \(index 0\) is missing"),
        ((X,), {}, r"argument 'n' \(index 1\) is missing"),
        ((X, 1, 2.0, 3), {}, r"takes 3 positional arguments \(x, n, scale\), got 4"),
        ((X, 1), {"x": X}, "argument 'x' was given by position and by name"),
        ((X, 1), {"z": X}, "no argument 'z'; it has x, n, scale, ys, flag, text"),
        ((1, 1), {}, r"argument 'x' \(index 0\): expected a torch.Tensor, got int 1"),
        (([X], 1), {}, r"argument 'x' \(index 0\): expected a torch.Tensor, got list"),
        ((None, 1), {}, r"argument 'x' \(index 0\): expected a torch.Tensor, got NoneType"),
        ((jnp.ones(2), 1), {}, r"argument 'x' \(index 0\).*got ArrayImpl.*to_torch"),
        ((np.ones(2), 1), {}, r"argument 'x' \(index 0\).*got ndarray"),
        ((X, 1.0), {}, r"argument 'n' \(index 1\): expected int, got float 1.0"),
        ((X, "1"), {}, r"argument 'n' \(index 1\): expected int, got str '1'"),
        ((X, None), {}, r"argument 'n' \(index 1\): expected int, got NoneType None"),
        ((X, 2**63), {}, r"argument 'n' \(index 1\).*64 bits"),
        ((X, torch.tensor(1)), {}, r"argument 'n' \(index 1\) is static.*n\.item\(\)"),
        ((X, 1, "2"), {}, r"argument 'scale' \(index 2\): expected float, got str '2'"),
        ((X, 1, 1j), {}, r"argument 'scale' \(index 2\): expected float, got complex"),
        ((X, 1), {"ys": 3}, r"argument 'ys' \(index 3\): expected a sequence of int, got int 3"),
        ((X, 1), {"ys": [1, "a"]}, r"argument 'ys' \(index 3\).*got list \(element 1 is 'a'\)"),
        ((X, 1), {"flag": 1}, r"argument 'flag' \(index 4\): expected bool, got int 1"),
        ((X, 1), {"text": "c"}, r"argument 'text' \(index 5\): expected a Text: 'a', 'b', got str 'c'"),
    ],
)
def test_bad_calls(args: Any, kwargs: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"test_schema::everything.*{says}"):
        EVERYTHING(*args, **kwargs)


@pytest.mark.parametrize(
    "annotation, given, says",
    [
        (np.dtype, "float32", "expected a torch, NumPy or JAX dtype, got str 'float32'"),
        (np.dtype, jnp.int4, "int4"),
        (np.dtype, torch.complex32, "complex32"),
        (torch.device, "nonsense", "expected a torch.device, got str 'nonsense'"),
        (torch.device, 3, "expected a torch.device, got int 3"),
        (Literal["a", 1], True, "expected one of 'a', 1, got bool True"),
        (tuple[int, int], (1, 2, 3), "expected a sequence of 2 int"),
        (Sequence[str], "ab", "expected a sequence of str, got str 'ab'"),
        (Config, Config(size="a"), "expected a Config.*field 'size': expected int, got 'a'"),  # type: ignore
        (Config, Config(tile=Tile(text="z")), "field 'tile'.*field 'text'|field 'tile'"),  # type: ignore[arg-type]
        (Config, Tile(), "expected a Config, got Tile"),
        (Config, "nonsense", "expected a Config, got str"),
        (Config, "[]", "expected a Config, got str"),
        (torch.types.Number, 1j, "expected int, float or bool, got complex"),
        (Sequence[jax.Array], torch.ones(2), "expected a list or tuple of tensors, got Tensor"),
        (Sequence[jax.Array], [torch.ones(2), 1], "expected a list or tuple of tensors, got int 1"),
        (jax.Array | None, 3, "expected a torch.Tensor or None, got int 3"),
    ],
    ids=str,
)
def test_wrong_values(annotation: Any, given: Any, says: str, request: pytest.FixtureRequest) -> None:
    op = _op(f"wrong_{next(_NUMBERS)}", annotation)
    with pytest.raises(
        (TypeError, ValueError), match=rf"{op._qualname}: argument 'value' \(index 1\).*({says})"
    ):
        op(X, given)


def test_a_function_that_breaks_its_return_annotation() -> None:
    def make(annotation: Any, result: Callable[[Any], Any]) -> JaxOp:
        def function(x):  # type: ignore[no-untyped-def]
            return result(x)

        function.__annotations__ = {"x": jax.Array, "return": annotation}
        return jax_op(f"test_schema::breaks_{next(_NUMBERS)}", function)

    for annotation, result, says in [
        (jax.Array, lambda x: (x, x), "annotated to return one array, but returned tuple"),
        (jax.Array, lambda x: None, "annotated to return one array, but returned NoneType"),
        (tuple[jax.Array, jax.Array], lambda x: x, "annotated to return a tuple of arrays"),
        (tuple[jax.Array, jax.Array], lambda x: (x,) * 3, "annotated to return 2 arrays, but returned 3"),
        (list[jax.Array], lambda x: [x, None], "an element is not an array"),
        (list[jax.Array], lambda x: [(x, x)], "an element is not an array"),
        (None, lambda x: x, "annotated to return None, but returned"),
    ]:
        op = make(annotation, result)
        with pytest.raises(TypeError, match=f"{op._qualname}.*{says}"):
            op(X)


# ---------------------------------------------------------------------------------- keys


def test_true_one_and_one_point_zero_are_three_values() -> None:
    def kind(x: jax.Array, n: int | float | bool) -> jax.Array:
        return x + {bool: 1, int: 2, float: 3}[type(n)]

    op = jax_op("test_schema::kind", kind)
    compiled = torch.compile(op, fullgraph=True, backend="eager")
    x = torch.zeros(1)
    for _ in range(2):  # the second time from the cache
        for function in (op, torch.ops.test_schema.kind, compiled):
            assert [function(x, n).item() for n in (True, 1, 1.0)] == [1, 2, 3]


def test_nan_and_the_zeros_are_values_like_others() -> None:
    traced: list[float] = []

    def spread(x: jax.Array, n: float) -> jax.Array:
        traced.append(n)
        return x + jnp.copysign(1.0, n) + (0 if n == n else 10)

    op = jax_op("test_schema::zeros", spread)
    x = torch.zeros(1)
    for _ in range(3):
        assert [op(x, n).item() for n in (0.0, -0.0, math.nan)] == [1, -1, 11]
        assert [torch.ops.test_schema.zeros(x, n).item() for n in (0.0, -0.0)] == [1, -1]
    assert len(traced) == 3  # NaN, which differs from itself, is not compiled again and again


def test_a_thousand_values_of_a_static_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 32)

    def times(x: jax.Array, n: float) -> jax.Array:
        return x * n

    op = jax_op("test_schema::thousand", times)
    table = op._table
    x = torch.ones(())
    for n in range(1000):
        if n % 20 == 0:
            assert op(x, float(n)).item() == n
        else:  # what a call does before it compiles, which takes most of the time
            op._program(op._signature.bind((x, float(n)), {}))
        assert len(table._programs) <= 32
    assert op(x, 1.0).item() == 1 and op(x, 20.0).item() == 20  # dropped long ago, and made again
    gc.collect()
    alive = [p for p in programs.programs_by_name.values() if p.definition.name == op._qualname]
    assert len(alive) <= 32


def test_the_least_recently_used_program_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 2)
    traced: list[int] = []

    def plus(x: jax.Array, n: int) -> jax.Array:
        traced.append(n)
        return x + n

    op = jax_op("test_schema::recent", plus)
    for n in (1, 2, 1, 3, 1, 2):
        assert op(torch.zeros(1), n).item() == n
    assert traced == [1, 2, 3, 2]

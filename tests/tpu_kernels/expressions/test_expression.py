"""Nodes and their text."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
import copy
import math
import pickle
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_kernels.expressions import Apply, Constant, Expression, ExpressionError, Load, Variable, parse, text
from tpu_kernels.expressions.expression import (
    apply,
    convert,
    loads,
    nodes_of,
    power,
    remap_slots,
    select,
    shift_slots,
    substitute,
    variables,
)

from .strategies import expressions

q, kv, h, score = (Variable(name) for name in ("q", "kv", "h", "score"))
CAPTURES = {0: ("bool", 0), 3: ("int", 2), 12: ("float", 4)}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(expressions(captures=CAPTURES))
def test_text_is_read_back(e: Expression) -> None:
    assert parse(text(e)) is e
    assert pickle.loads(pickle.dumps(e)) is e and copy.deepcopy(e) is e
    assert text(e).isascii() and not set(" \n") & set(text(e))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(expressions(), expressions())
def test_texts_are_equal_only_for_the_same(a: Expression, b: Expression) -> None:
    assert (text(a) == text(b)) == (a is b) == (a == b)


def test_text_of_each_form() -> None:
    d = q - kv
    assert text((d >= 0) & (d < 128)) == "%0=sub(q,kv);and(ge(%0,0),lt(%0,128))"
    assert text(Load(2, (h, d), "float") + score) == "add(float2[h,sub(q,kv)],score)"
    assert text(Load(0, (), "bool")) == "bool0[]"
    assert text(select(q >= kv, score, -math.inf)) == "select(ge(q,kv),score,-inf)"
    for value, written in ((True, "true"), (-3, "-3"), (0.0, "0.0"), (-0.0, "-0.0"), (1e-30, "1e-30")):
        assert text(Constant(value)) == written and parse(written) is Constant(value)
    assert parse("nan") is Constant(math.nan) and parse("1e+16") is Constant(1e16)


def test_text_with_spaces_and_without_sharing() -> None:
    assert parse(" add( sub(q , kv), sub(q,kv) ) ") is parse("%0=sub(q,kv);add(%0,%0)")
    assert parse("%0=sub(q,kv);%1=mul(%0,%0);add(%1,%1)").operands[0] is (q - kv) * (q - kv)


def test_equal_expressions_are_one_object() -> None:
    assert Constant(1) is not Constant(1.0) and Constant(1) is not Constant(True)
    assert Constant(0.0) is not Constant(-0.0) and Constant(math.nan) is Constant(float("nan"))
    assert (q >= kv) is Apply("ge", (Variable("q"), Variable("kv")))
    assert len({q >= kv, q >= kv, q > kv}) == 2


def test_from_many_threads_equal_expressions_are_one_object() -> None:
    found: list[list[Expression]] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        found.append([parse(f"add(mul(q,{i}),{i})") for i in range(200)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(a is b for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_what_is_shared_does_not_blow_up() -> None:
    # 2**200 paths; and deeper than Python's recursion limit.
    e = q
    for _ in range(200):
        e = e + e
    assert len(list(nodes_of(e))) == 201 and len(text(e)) < 5000 and parse(text(e)) is e
    for i in range(3000):
        e = select(kv > i, e, i)
    assert parse(text(e)) is e and variables(e) == {"q", "kv"}
    assert substitute(e, {"q": Variable("b")}) is not e


def test_operators() -> None:
    assert q + 1.5 is Apply("add", (Apply("to_float", (q,)), Constant(1.5)))
    assert (q / kv).kind == "float" and (q // kv).kind == "int" and 7 % q is Apply("mod", (Constant(7), q))
    assert 2 - q is Apply("sub", (Constant(2), q)) and -q is Apply("neg", (q,))
    assert (q < kv) is Apply("lt", (q, kv)) and (1 < q) is Apply("gt", (q, Constant(1)))
    assert q.eq(kv).kind == "bool" and q.ne(1) is Apply("ne", (q, Constant(1)))
    assert (q >> 1) is Apply("shift_right", (q, Constant(1))) and abs(q) is Apply("abs", (q,))
    assert (
        power(q, 3) is q * q * q and power(score, -1) is 1.0 / score and score**0.5 is Apply("sqrt", (score,))
    )
    assert (True + q) is Constant(1) + q


def test_simplified() -> None:
    seen = q >= kv
    assert seen & True is seen and (seen & False) is Constant(False) and (seen | True) is Constant(True)
    assert ~~seen is seen and ~seen is (q < kv) and (True ^ seen) is (q < kv) and (seen ^ False) is seen
    assert q + 0 is q and q * 1 is q and q // 1 is q and select(True, q, kv) is q
    assert Constant(2) * 3 + 1 is Constant(7) and (Constant(2) > 1) is Constant(True)
    # What would change a value is left: -0.0 + 0.0 is 0.0, not (x < y) is true for NaN, overflow wraps.
    assert score + 0.0 is not score and ~(score < 1) is Apply("not", (score < 1,))
    assert isinstance(Constant(2**31 - 1) + 1, Apply)


def test_loads_and_slots() -> None:
    e = Load(0, (Load(1, (q,), "int"),), "float") * Load(0, (kv,), "float")
    assert [load.slot for load in loads(e)] == [1, 0, 0]
    assert text(shift_slots(e, 2)) == "mul(float2[int3[q]],float2[kv])"
    assert text(remap_slots(e, {0: 5, 1: 0})) == "mul(float5[int0[q]],float5[kv])"
    assert variables(e) == {"q", "kv"}


def test_substitute() -> None:
    cap = 20.0 * apply("tanh", score / 20.0)
    assert substitute(cap, {"score": score * 2}) is 20.0 * apply("tanh", score * 2 / 20.0)
    assert substitute(q >= kv, {"q": 5, "kv": 3}) is Constant(True)


def test_convert() -> None:
    assert convert(3, "float") is Constant(3.0) and convert(-2.7, "int") is Constant(-2)
    assert convert(0.5, "bool") is Constant(True) and convert(q, "int") is q
    assert isinstance(convert(1e20, "int"), Apply)


@pytest.mark.parametrize(
    "source", ["", "q,", "ge(q", "ge(q,kv))", "%1", "%0=q", "%0=q;", "x", "3q", "ge(q;kv)", "[q]", "1.5.2"]
)
def test_what_is_no_text(source: str) -> None:
    with pytest.raises(ExpressionError):
        parse(source)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ExpressionError, match="unknown operation 'gelu'.*there are"):
        parse("gelu(score)")
    with pytest.raises(ExpressionError, match="one kind .int or float., got int, float.*to_float"):
        parse("add(q,score)")
    with pytest.raises(ExpressionError, match="takes 2 operands, got 1"):
        parse("add(q)")
    with pytest.raises(ExpressionError, match="range of int32"):
        Constant(2**31)
    with pytest.raises(ExpressionError, match="unknown variable 'i'"):
        Variable("i")
    with pytest.raises(ExpressionError, match="index must be an int"):
        Load(0, (score,), "float")
    with pytest.raises(TypeError, match="instead of `and`"):
        bool(q > kv)
    with pytest.raises(TypeError, match="must be a bool, int or float"):
        apply("add", q, "1")
    with pytest.raises(AttributeError, match="can't be changed"):
        q.name = "h"  # type: ignore[misc]


@given(st.floats(width=64))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_floats_are_kept_exactly(value: float) -> None:
    read = parse(text(Constant(value)))
    assert isinstance(read, Constant) and str(read.value) == str(value)

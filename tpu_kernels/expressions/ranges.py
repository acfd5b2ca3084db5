"""What values an operation can have, for operands in given ranges: a rule for each operation.

A range is sound if it holds every value; how tight it is matters for speed only. The rules work on arrays of
ranges at once, with numpy or jnp, in int32 and float32 alone: a TPU program has no wider types.

- Ints wrap around. Where a result may leave int32 its range becomes all of int32. Whether it may is decided
  by the same computation in float32, whose error near 2**31 stays below `INT_MARGIN`.
- Floats are rounded differently by every machine and compiler (fused multiply-add, flushed denormals,
  approximate exp). So computed ranges are made wider by more than such differences.
- A float may be NaN, which no bound can say; `Range.nan` does.

After the helpers, each public function is the `Rule` of the operation of its name: of the operands' ranges it
makes one that holds the operation's value for all operands in them. `operations.OPERATIONS` is the table.
Names differ where Python has the operation's own: `absolute` is abs, `minimum` min, `maximum` max, `rounding`
round, and `logical_and`, `logical_or`, `logical_xor` and `logical_not` are and, or, xor and not, of bits for
ints. `between_minus_one_and_one` is the rule of erf, sin and cos.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

INT_MIN, INT_MAX = np.int32(-(2**31)), np.int32(2**31 - 1)
INF = np.float32(np.inf)
LARGEST = np.float32(3.4e38)
"""A little less than the largest float32."""

INT_MARGIN = 512.0
"""Float32 computes sums and products of two int32, if below 2**31, to within three roundings by 2**7."""
INT_LIMIT = np.float32(2.0**31 - INT_MARGIN)

ROUNDING = np.float32(2.0**-20)
"""More than the relative error of an elementary operation in float32, with room for a fused neighbour."""
APPROXIMATION = np.float32(2.0**-12)
"""More than the error of a transcendental function on any chip, relative, and absolute near zero."""
DENORMAL = np.float32(2.0**-125)
"""Numbers below this may be flushed to zero."""


class Range(NamedTuple):
    """The values between `lo` and `hi`, both included.

    For a bool, `lo` is whether it is true everywhere and `hi` whether it is true anywhere. `nan` is whether a
    float may be NaN as well; it is None for the other kinds.
    """

    lo: Any
    hi: Any
    nan: Any = None


Rule = Callable[..., Range]
"""`rule(xp, kind, *operands)`, with `xp` numpy or jnp and `kind` that of the (last) operand."""


def everything(kind: str) -> Range:
    """All values of a kind."""
    if kind == "bool":
        return Range(np.bool_(False), np.bool_(True))
    if kind == "int":
        return Range(INT_MIN, INT_MAX)
    return Range(-INF, INF, np.bool_(True))


# Helpers.


def _ints(xp: Any, lo: Any, hi: Any, about_lo: Any, about_hi: Any) -> Range:
    """[lo, hi], if the float32 estimates of both say that nothing wrapped around, else everything."""
    fits = (about_lo > -INT_LIMIT) & (about_hi < INT_LIMIT)
    return Range(xp.where(fits, lo, INT_MIN), xp.where(fits, hi, INT_MAX))


def _f(xp: Any, x: Any) -> Any:
    return xp.asarray(x).astype(np.float32)


def _floats(xp: Any, lo: Any, hi: Any, nan: Any, error: np.float32 = ROUNDING) -> Range:
    """[lo, hi] made wider by `error`, or everything where a bound is NaN."""
    unknown = xp.isnan(lo) | xp.isnan(hi)
    absolute = DENORMAL if error == ROUNDING else error
    # A result that is infinite by overflow is finite on a machine that rounds the other way.
    lo = xp.where(lo == INF, LARGEST, lo)
    hi = xp.where(hi == -INF, -LARGEST, hi)
    lo = xp.where(unknown | (lo == -INF), -INF, lo - (xp.abs(lo) * error + absolute))
    hi = xp.where(unknown | (hi == INF), INF, hi + (xp.abs(hi) * error + absolute))
    return Range(lo, hi, nan | unknown)


def _corners(xp: Any, function: Callable[[Any, Any], Any], a: Range, b: Range) -> tuple[Any, Any]:
    """Least and greatest value of `function` at the four corners; NaN if it is NaN at one."""
    values = [function(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    lo = xp.minimum(xp.minimum(values[0], values[1]), xp.minimum(values[2], values[3]))
    hi = xp.maximum(xp.maximum(values[0], values[1]), xp.maximum(values[2], values[3]))
    return lo, hi


def _holds_zero(a: Range) -> Any:
    return (a.lo <= 0) & (a.hi >= 0)


def _infinite(a: Range) -> Any:
    return (a.lo == -INF) | (a.hi == INF)


def _or_everything(xp: Any, kind: str, unknown: Any, a: Range) -> Range:
    """Everything where `unknown`, else `a`."""
    full = everything(kind)
    nan = None if a.nan is None else a.nan | unknown
    return Range(xp.where(unknown, full.lo, a.lo), xp.where(unknown, full.hi, a.hi), nan)


def _nan(*operands: Range) -> Any:
    nan = operands[0].nan
    for operand in operands[1:]:
        nan = nan | operand.nan
    return nan


# Arithmetic.


def add(xp: Any, kind: str, a: Range, b: Range) -> Range:
    lo, hi = a.lo + b.lo, a.hi + b.hi
    if kind == "int":
        return _ints(xp, lo, hi, _f(xp, a.lo) + _f(xp, b.lo), _f(xp, a.hi) + _f(xp, b.hi))
    opposite = ((a.lo == -INF) & (b.hi == INF)) | ((a.hi == INF) & (b.lo == -INF))
    return _floats(xp, lo, hi, _nan(a, b) | opposite)


def neg(xp: Any, kind: str, a: Range) -> Range:
    if kind == "int":
        wraps = a.lo == INT_MIN
        return Range(xp.where(wraps, INT_MIN, -a.hi), xp.where(wraps, INT_MAX, -a.lo))
    return Range(-a.hi, -a.lo, a.nan)


def sub(xp: Any, kind: str, a: Range, b: Range) -> Range:
    if kind == "float":
        return add(xp, kind, a, neg(xp, kind, b))
    about_lo, about_hi = _f(xp, a.lo) - _f(xp, b.hi), _f(xp, a.hi) - _f(xp, b.lo)
    return _ints(xp, a.lo - b.hi, a.hi - b.lo, about_lo, about_hi)


def mul(xp: Any, kind: str, a: Range, b: Range) -> Range:
    lo, hi = _corners(xp, lambda x, y: x * y, a, b)
    if kind == "int":
        return _ints(xp, lo, hi, *_corners(xp, lambda x, y: _f(xp, x) * _f(xp, y), a, b))
    zero_times_infinity = (_holds_zero(a) & _infinite(b)) | (_holds_zero(b) & _infinite(a))
    return _or_everything(xp, kind, zero_times_infinity, _floats(xp, lo, hi, _nan(a, b)))


def absolute(xp: Any, kind: str, a: Range) -> Range:
    zero = np.int32(0) if kind == "int" else np.float32(0)
    hi = xp.maximum(-a.lo, a.hi)
    lo = xp.maximum(xp.maximum(a.lo, -a.hi), zero)
    if kind == "int":
        wraps = a.lo == INT_MIN
        return Range(xp.where(wraps, INT_MIN, lo), xp.where(wraps, INT_MAX, hi))
    return Range(lo, hi, a.nan)


def sign(xp: Any, kind: str, a: Range) -> Range:
    return Range(xp.sign(a.lo), xp.sign(a.hi), a.nan)


def minimum(xp: Any, kind: str, a: Range, b: Range) -> Range:
    return Range(xp.minimum(a.lo, b.lo), xp.minimum(a.hi, b.hi), None if kind == "int" else _nan(a, b))


def maximum(xp: Any, kind: str, a: Range, b: Range) -> Range:
    return Range(xp.maximum(a.lo, b.lo), xp.maximum(a.hi, b.hi), None if kind == "int" else _nan(a, b))


# Division. Without zero in the divisor, the real quotient is monotone in each operand, so it is extreme at
# corners, and so is what it is rounded to.


def div(xp: Any, kind: str, a: Range, b: Range) -> Range:
    zero = _holds_zero(b)
    divisor = Range(xp.where(zero, np.float32(1), b.lo), xp.where(zero, np.float32(1), b.hi))
    lo, hi = _corners(xp, lambda x, y: x / y, a, divisor)
    # Denormal divisors may count as zero.
    unknown = zero | (xp.minimum(xp.abs(b.lo), xp.abs(b.hi)) < DENORMAL) | (_infinite(a) & _infinite(b))
    return _or_everything(xp, kind, unknown, _floats(xp, lo, hi, _nan(a, b)))


def _int_quotient(xp: Any, divide: Callable[[Any, Any], Any], a: Range, b: Range) -> Range:
    zero = _holds_zero(b)
    divisor = Range(xp.where(zero, np.int32(1), b.lo), xp.where(zero, np.int32(1), b.hi))
    wraps = (a.lo == INT_MIN) & (b.lo <= -1) & (b.hi >= -1)
    # The quotient that wraps is the only one that overflows; numpy would warn about it.
    dividend = Range(xp.where(wraps, np.int32(0), a.lo), xp.where(wraps, np.int32(0), a.hi))
    return _or_everything(xp, "int", zero | wraps, Range(*_corners(xp, divide, dividend, divisor)))


def floor_div(xp: Any, kind: str, a: Range, b: Range) -> Range:
    if kind == "int":
        return _int_quotient(xp, xp.floor_divide, a, b)
    quotient = div(xp, kind, a, b)
    return Range(xp.floor(quotient.lo), xp.floor(quotient.hi), quotient.nan)


def trunc_div(xp: Any, kind: str, a: Range, b: Range) -> Range:
    if kind == "float":
        return trunc(xp, kind, div(xp, kind, a, b))

    def divide(x: Any, y: Any) -> Any:
        down = xp.floor_divide(x, y)
        return down + ((x - down * y != 0) & ((x < 0) != (y < 0))).astype(np.int32)

    return _int_quotient(xp, divide, a, b)


def mod(xp: Any, kind: str, a: Range, b: Range) -> Range:
    if kind == "float":
        return rem(xp, kind, a, b)
    positive = b.lo > 0
    # A divisor that is one number, and no multiple of it inside: the remainder grows with the dividend.
    divisor = xp.where(positive, b.lo, np.int32(1))
    whole = positive & (b.lo == b.hi) & (xp.floor_divide(a.lo, divisor) == xp.floor_divide(a.hi, divisor))
    small = positive & (a.lo >= 0) & (a.hi < b.lo)
    lo, hi = xp.minimum(b.lo + 1, np.int32(0)), xp.maximum(b.hi - 1, np.int32(0))
    hi = xp.where(positive & (a.lo >= 0), xp.minimum(hi, a.hi), hi)
    lo, hi = xp.where(positive, np.int32(0), lo), xp.where(b.hi < 0, np.int32(0), hi)
    lo, hi = xp.where(small, a.lo, lo), xp.where(small, a.hi, hi)
    lo = xp.where(whole, a.lo - xp.floor_divide(a.lo, divisor) * divisor, lo)
    hi = xp.where(whole, a.hi - xp.floor_divide(a.hi, divisor) * divisor, hi)
    return _or_everything(xp, kind, _holds_zero(b), Range(lo, hi))


def rem(xp: Any, kind: str, a: Range, b: Range) -> Range:
    if kind == "float":
        size = xp.maximum(xp.abs(b.lo), xp.abs(b.hi))
        return _floats(xp, -size, size, np.bool_(True))  # NaN of infinity, or by zero: not told apart
    # For a dividend of one sign this is the `mod` of it, with a positive divisor.
    lowest = b.lo == INT_MIN
    size = xp.where(
        lowest, INT_MAX, xp.maximum(xp.abs(xp.where(lowest, np.int32(0), b.lo)), xp.abs(b.hi)) - 1
    )
    size = xp.maximum(size, np.int32(0))
    general = Range(
        xp.maximum(-size, xp.minimum(a.lo, np.int32(0))), xp.minimum(size, xp.maximum(a.hi, np.int32(0)))
    )
    same_as_mod = (a.lo >= 0) & (b.lo > 0)
    tight = mod(xp, kind, a, b)
    bounds = Range(xp.where(same_as_mod, tight.lo, general.lo), xp.where(same_as_mod, tight.hi, general.hi))
    return _or_everything(xp, kind, _holds_zero(b), bounds)


# Monotone functions.


def _rising(name: str, *, exact: bool = False, domain: float | None = None) -> Rule:
    def rule(xp: Any, kind: str, a: Range) -> Range:
        function = getattr(xp, name)
        nan = a.nan
        lo, hi = a.lo, a.hi
        if domain is not None:
            least = np.float32(domain)
            nan = nan | (lo < least)
            lo, hi = xp.maximum(lo, least), xp.maximum(hi, least)
        if exact:
            return Range(function(lo), function(hi), nan)
        return _floats(xp, function(lo), function(hi), nan, APPROXIMATION)

    return rule


floor = _rising("floor", exact=True)
ceil = _rising("ceil", exact=True)
rounding = _rising("round", exact=True)
trunc = _rising("trunc", exact=True)
sqrt = _rising("sqrt", domain=0)
exp = _rising("exp")
exp2 = _rising("exp2")
expm1 = _rising("expm1")
log = _rising("log", domain=0)
log2 = _rising("log2", domain=0)
log1p = _rising("log1p", domain=-1)
tanh = _rising("tanh")


def rsqrt(xp: Any, kind: str, a: Range) -> Range:
    lo, hi = xp.maximum(a.lo, np.float32(0)), xp.maximum(a.hi, np.float32(0))
    # A denormal may count as zero, whose value is infinite.
    most = xp.where(lo < DENORMAL, INF, np.float32(1) / xp.sqrt(xp.maximum(lo, DENORMAL)))
    least = np.float32(1) / xp.sqrt(xp.maximum(hi, DENORMAL))
    return _floats(xp, least, most, a.nan | (a.lo < 0), APPROXIMATION)


def sigmoid(xp: Any, kind: str, a: Range) -> Range:
    # Through tanh, which can't overflow.
    half = tanh(xp, kind, Range(a.lo * np.float32(0.5), a.hi * np.float32(0.5), a.nan))
    one = np.float32(1)
    return _floats(xp, (half.lo + one) / 2, (half.hi + one) / 2, a.nan, APPROXIMATION)


def between_minus_one_and_one(xp: Any, kind: str, a: Range) -> Range:
    one = xp.ones_like(a.lo)
    return _floats(xp, -one, one, a.nan | _infinite(a), APPROXIMATION)


# Comparisons.


def _without_nan(always: Any, sometimes: Any, *operands: Range) -> Range:
    """The range of a comparison that is False for NaN."""
    for operand in operands:
        if operand.nan is not None:
            always = always & ~operand.nan
    return Range(always, sometimes)


def lt(xp: Any, kind: str, a: Range, b: Range) -> Range:
    return _without_nan(a.hi < b.lo, a.lo < b.hi, a, b)


def le(xp: Any, kind: str, a: Range, b: Range) -> Range:
    return _without_nan(a.hi <= b.lo, a.lo <= b.hi, a, b)


def gt(xp: Any, kind: str, a: Range, b: Range) -> Range:
    return lt(xp, kind, b, a)


def ge(xp: Any, kind: str, a: Range, b: Range) -> Range:
    return le(xp, kind, b, a)


def eq(xp: Any, kind: str, a: Range, b: Range) -> Range:
    if kind == "bool":
        return logical_not(xp, kind, logical_xor(xp, kind, a, b))
    return _without_nan((a.hi <= b.lo) & (a.lo >= b.hi), (a.lo <= b.hi) & (a.hi >= b.lo), a, b)


def ne(xp: Any, kind: str, a: Range, b: Range) -> Range:
    return logical_not(xp, "bool", eq(xp, kind, a, b))


def is_nan(xp: Any, kind: str, a: Range) -> Range:
    return Range(a.nan & False, a.nan)


# Logic.


def logical_and(xp: Any, kind: str, a: Range, b: Range) -> Range:
    if kind == "bool":
        return Range(a.lo & b.lo, a.hi & b.hi)
    # The bits of a number that is not negative bound the result.
    a_bounds, b_bounds = a.lo >= 0, b.lo >= 0
    known = a_bounds | b_bounds
    hi = xp.minimum(xp.where(a_bounds, a.hi, INT_MAX), xp.where(b_bounds, b.hi, INT_MAX))
    bounds = Range(xp.where(known, np.int32(0), INT_MIN), xp.where(known, hi, INT_MAX))
    return _exact_for_numbers(xp, a, b, a.lo & b.lo, bounds)


def logical_or(xp: Any, kind: str, a: Range, b: Range) -> Range:
    if kind == "bool":
        return Range(a.lo | b.lo, a.hi | b.hi)
    known = (a.lo >= 0) & (b.lo >= 0)
    bounds = Range(
        xp.where(known, xp.maximum(a.lo, b.lo), INT_MIN),
        xp.where(known, _all_bits_below(a.hi | b.hi), INT_MAX),
    )
    return _exact_for_numbers(xp, a, b, a.lo | b.lo, bounds)


def logical_xor(xp: Any, kind: str, a: Range, b: Range) -> Range:
    if kind == "bool":
        return Range((a.lo & ~b.hi) | (~a.hi & b.lo), (a.hi & ~b.lo) | (~a.lo & b.hi))
    known = (a.lo >= 0) & (b.lo >= 0)
    bounds = Range(
        xp.where(known, np.int32(0), INT_MIN), xp.where(known, _all_bits_below(a.hi | b.hi), INT_MAX)
    )
    return _exact_for_numbers(xp, a, b, a.lo ^ b.lo, bounds)


def logical_not(xp: Any, kind: str, a: Range) -> Range:
    return Range(~a.hi, ~a.lo)


def _exact_for_numbers(xp: Any, a: Range, b: Range, value: Any, bounds: Range) -> Range:
    numbers = (a.lo == a.hi) & (b.lo == b.hi)
    return Range(xp.where(numbers, value, bounds.lo), xp.where(numbers, value, bounds.hi))


def _all_bits_below(a: Any) -> Any:
    """The least 2**n - 1 that is not below `a`, for `a` from 0."""
    for shift in (1, 2, 4, 8, 16):
        a = a | (a >> np.int32(shift))
    return a


def _shift_unknown(b: Range) -> Any:
    return (b.lo < 0) | (b.hi > 31)


def _shift_amount(xp: Any, b: Range) -> Range:
    return Range(xp.clip(b.lo, np.int32(0), np.int32(31)), xp.clip(b.hi, np.int32(0), np.int32(31)))


def shift_left(xp: Any, kind: str, a: Range, b: Range) -> Range:
    amount = _shift_amount(xp, b)
    lo, hi = _corners(xp, lambda x, y: x << y, a, amount)
    about = _corners(xp, lambda x, y: _f(xp, x) * xp.exp2(_f(xp, y)), a, amount)
    return _or_everything(xp, kind, _shift_unknown(b), _ints(xp, lo, hi, *about))


def shift_right(xp: Any, kind: str, a: Range, b: Range) -> Range:
    bounds = Range(*_corners(xp, lambda x, y: x >> y, a, _shift_amount(xp, b)))
    return _or_everything(xp, kind, _shift_unknown(b), bounds)


def shift_right_logical(xp: Any, kind: str, a: Range, b: Range) -> Range:
    return _or_everything(xp, kind, a.lo < 0, shift_right(xp, kind, a, b))


# Choice and conversion.


def select(xp: Any, kind: str, condition: Range, a: Range, b: Range) -> Range:
    if kind == "bool":
        chosen = logical_and(xp, kind, condition, a)
        other = logical_and(xp, kind, logical_not(xp, kind, condition), b)
        both = a.lo & b.lo
        return Range(chosen.lo | other.lo | both, chosen.hi | other.hi)
    lo = xp.where(condition.lo, a.lo, xp.where(condition.hi, xp.minimum(a.lo, b.lo), b.lo))
    hi = xp.where(condition.lo, a.hi, xp.where(condition.hi, xp.maximum(a.hi, b.hi), b.hi))
    nan = None if kind == "int" else (condition.hi & a.nan) | (~condition.lo & b.nan)
    return Range(lo, hi, nan)


def to_bool(xp: Any, kind: str, a: Range) -> Range:
    zero = np.int32(0) if kind == "int" else np.float32(0)
    return ne(xp, kind, a, Range(zero, zero))


def to_int(xp: Any, kind: str, a: Range) -> Range:
    if kind == "bool":
        return Range(xp.asarray(a.lo).astype(np.int32), xp.asarray(a.hi).astype(np.int32))
    known = (a.lo > -INT_LIMIT) & (a.hi < INT_LIMIT) & ~a.nan
    zero = np.float32(0)
    lo = xp.trunc(xp.where(known, a.lo, zero)).astype(np.int32)
    hi = xp.trunc(xp.where(known, a.hi, zero)).astype(np.int32)
    return _or_everything(xp, "int", ~known, Range(lo, hi))


def to_float(xp: Any, kind: str, a: Range) -> Range:
    lo, hi = _f(xp, a.lo), _f(xp, a.hi)
    nan = xp.zeros_like(lo, dtype=bool)
    if kind == "bool":
        return Range(lo, hi, nan)
    # Up to 2**24 an int is a float exactly.
    exact = np.float32(2**24)
    lo = xp.where(xp.abs(lo) <= exact, lo, lo - xp.abs(lo) * ROUNDING)
    hi = xp.where(xp.abs(hi) <= exact, hi, hi + xp.abs(hi) * ROUNDING)
    return Range(lo, hi, nan)

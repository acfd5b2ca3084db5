"""Functions of a `flex_attention` call that need 64 bits.

Expressions compute in int32 and float32, where torch computes in the dtypes of what is captured, and with
positions in int64. Where that gives other numbers, and not only rounded ones, the call is left to torch.

What is not known is left as it is: ints in an array that can't be read, as while a graph is traced, and what
is computed of them or of the score, are taken to stay inside int32. Captured int64 numbers that do not stay
there raise when the kernel is run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpu_kernels.dropins.remembered import remembered
from tpu_kernels.expressions.expression import (
    INDICES,
    Apply,
    Constant,
    Expression,
    Load,
    Variable,
    loads,
    nodes_of,
    parse,
)
from tpu_kernels.expressions.operations import INT32_MAX, INT32_MIN, OPERATIONS, ExpressionError
from tpu_kernels.expressions.ranges import Range, everything

Span = tuple[int, int]
"""Least and greatest value."""

_INT32: Span = (INT32_MIN, INT32_MAX)
_ANY_LENGTH = 2**29
"""More than a dimension has positions, and the sum of a few is still in int32."""
_WIDE_INTS = (torch.int64, torch.uint64, torch.uint32)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_MODES = torch._C._TorchDispatchModeKey


def check(source: str, captures: Sequence[torch.Tensor], sizes: Sequence[Any], float64: bool) -> None:
    """Raise `ExpressionError` if the expression has other values than torch's computation.

    Args:
        source: the expression.
        captures: what it loads from.
        sizes: batch entries, heads, queries and keys; they may be symbolic.
        float64: whether floats are computed in float64.
    """
    for capture in captures:
        if capture.dtype == torch.float64 and not float64:
            _check_floats(capture)
        elif capture.dtype in _WIDE_INTS:
            _check_ints(capture)
    if _overflowing(source, ((0, _ANY_LENGTH),) * 4, None) is None:  # so most, and what is symbolic stays so
        return
    spans = tuple(map(_positions, sizes))
    known = tuple(map(_ints_of, captures))
    found = _overflowing(source, spans, known)
    if found is not None:
        raise ExpressionError(
            f"{found} may leave int32, in which expressions compute; torch computes positions in int64"
        )


# Captures ----------------------------------------------------------------------------------------------


def _check_floats(capture: torch.Tensor) -> None:
    readable = _readable(capture)
    if readable and _found(_floats_fit, capture):
        return
    if not readable and only_shapes():
        return
    why = (
        "has numbers that float32, in which expressions compute, can't hold"
        if readable
        else ("has numbers that are not known while a graph is made, and expressions compute in float32")
    )
    raise ExpressionError(
        f"a captured tensor, float64 {list(capture.shape)}, {why}; convert it with .float() if it may be "
        f"rounded"
    )


def _check_ints(capture: torch.Tensor) -> None:
    found = _ints_of(capture)
    if found is not None and not (found[0] >= INT32_MIN and found[1] <= INT32_MAX):
        raise ExpressionError(
            f"a captured tensor, {capture.dtype} {list(capture.shape)}, has numbers from {found[0]} to "
            f"{found[1]}; expressions compute in int32; number them anew, from 0"
        )


def _ints_of(capture: torch.Tensor) -> Span | None:
    """Least and greatest element of a tensor of ints; None for others, and if it can't be read."""
    if capture.is_floating_point() or capture.is_complex() or not _readable(capture):
        return None
    return _found(_span, capture)


def _span(capture: torch.Tensor) -> Span:
    if capture.numel() == 0:
        return (0, 0)
    if capture.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has no min for them
        values: Any = capture.cpu().numpy()
        return int(values.min()), int(values.max())
    lo, hi = torch.stack(capture.detach().to(torch.int64).aminmax()).tolist()
    return lo, hi


def _floats_fit(capture: torch.Tensor) -> bool:
    wide = capture.detach()
    return bool(((wide.float().double() == wide) | wide.isnan()).all())


def _found(function: Callable[[torch.Tensor], Any], capture: torch.Tensor) -> Any:
    """What `function` finds in the tensor."""
    with _disable_current_modes():
        return remembered([capture], function, lambda: function(capture))


def _readable(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.device.type != "meta"
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
    )


def only_shapes() -> bool:
    """Whether this call is to find out about dtypes and shapes alone, and another one comes."""
    return (
        all(torch._C._get_dispatch_mode(mode) is None for mode in (_MODES.PROXY, _MODES.FUNCTIONAL))
        and torch._C._get_dispatch_mode(_MODES.FAKE) is not None
    )


def _positions(size: Any) -> Span | None:
    """The positions along a dimension. A symbolic size is compared with a power of two, which is guarded."""
    if type(size) is int:
        return 0, max(size - 1, 0)
    hint = getattr(getattr(size, "node", None), "hint", None)
    if not isinstance(hint, int):
        return None
    limit = 1 << hint.bit_length()
    return (0, limit - 1) if size <= limit else None


# Ranges ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _overflowing(
    source: str, positions: tuple[Span | None, ...], captures: tuple[Span | None, ...] | None
) -> str | None:
    """The first operation whose true result may be outside of int32. Without captures, for any elements."""
    e = parse(source)
    named: dict[str, Span | None] = dict(zip(INDICES, positions, strict=True))
    arrays = {
        load: _INT32 if captures is None else captures[load.slot] for load in loads(e) if load.kind == "int"
    }
    return next((repr(node) for node in _too_wide(e, named, arrays, trusting=captures is not None)), None)


def _too_wide(
    e: Expression, positions: Mapping[str, Span | None], arrays: Mapping[Load, Span | None], trusting: bool
) -> Iterator[Expression]:
    """The operations of ints that may leave int32; `trusting` those of which nothing is known not to."""
    values: dict[Expression, Range] = {}
    unknown: set[Expression] = set()  # may leave int32 or not: nothing can be said
    with np.errstate(all="ignore"):
        for node in nodes_of(e):
            match node:
                case Variable(name):
                    span = positions.get(name)
                    values[node] = everything(node.kind) if span is None else _range(*span)
                    if span is None:
                        unknown.add(node)
                case Load():
                    span = arrays.get(node)
                    values[node] = everything(node.kind) if span is None else _range(*span)
                    if span is None:
                        unknown.add(node)
                case Constant(value):
                    values[node] = _constant(value)
                case Apply(op, operands):
                    given = [values[operand] for operand in operands]
                    rule = OPERATIONS[op].bounds
                    kind = operands[-1].kind
                    values[node] = everything(node.kind) if rule is None else rule(np, kind, *given)
                    if node.kind == "bool":
                        continue
                    if not unknown.isdisjoint(operands):
                        unknown.add(node)
                    elif node.kind == "int" and _leaves_int32(op, kind, given):
                        yield node
                    elif node.kind == "int" and trusting and _any_int(values[node]):
                        unknown.add(node)


def _any_int(a: Range) -> bool:
    return int(a.lo) == INT32_MIN and int(a.hi) == INT32_MAX


def _range(lo: int, hi: int) -> Range:
    return Range(np.int32(max(lo, INT32_MIN)), np.int32(min(hi, INT32_MAX)))


def _constant(value: bool | int | float) -> Range:
    if isinstance(value, bool):
        return Range(np.bool_(value), np.bool_(value))
    if isinstance(value, int):
        return _range(value, value)
    number = np.float32(value)
    return Range(number, number, np.isnan(number))


_EXACT: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": lambda a: abs(a),
    "shift_left": lambda a, b: a << min(max(b, 0), 64),
}
"""Operations that can leave int32, for Python's ints. Over a range they are extreme at its ends, but for the
least value of `abs`."""


def _leaves_int32(op: str, kind: str, operands: Sequence[Range]) -> bool:
    if op == "to_int" and kind == "float":
        lo, hi = float(operands[0].lo), float(operands[0].hi)
        return bool(np.isfinite([lo, hi]).all()) and not (INT32_MIN <= lo and hi <= INT32_MAX)
    if op == "shift_right":
        return int(operands[1].hi) > 31  # not specified in int32
    exact = _EXACT.get(op)
    if exact is None:
        return False
    ends = [(int(operand.lo), int(operand.hi)) for operand in operands]
    corners = [exact(*corner) for corner in _combinations(ends)]
    return min(corners) < INT32_MIN or max(corners) > INT32_MAX


def _combinations(ends: Sequence[Span]) -> Iterator[tuple[int, ...]]:
    if len(ends) == 1:
        yield from ((end,) for end in ends[0])
    else:
        yield from ((a, b) for a in ends[0] for b in ends[1])

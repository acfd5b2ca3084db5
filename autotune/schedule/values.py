"""Values of scalar registers while a schedule is executed: known integers and booleans, or unknown ones.

An unknown value remembers where it came from. It spreads through arithmetic, and matters only if a branch, a
copy or a wait comes to depend on it: then the reason is reported.
"""

from __future__ import annotations

from typing import Any


class Unknown:
    """A value that the dumps do not tell. Arithmetic with it is unknown for the same reason.

    Attributes:
        reason: where it came from.
        runtime: it is set by the runtime before the program starts, such as the address of a result.
    """

    __slots__ = ("reason", "runtime")

    def __init__(self, reason: str, runtime: bool = False) -> None:
        self.reason = reason
        self.runtime = runtime

    def __repr__(self) -> str:
        return f"Unknown({self.reason})"

    def _same(self, _other: Any = None) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __xor__ = __rxor__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _same
    __eq__ = __ne__ = _same  # pyright: ignore[reportAssignmentType]  neither equal nor unequal
    __hash__ = object.__hash__

    def __and__(self, other: Any) -> Any:
        return other if other.__class__ in (int, bool) and not other else self

    def __or__(self, other: Any) -> Any:
        return True if other is True else self

    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise TypeError(f"an unknown value has no truth: {self.reason}")


Value = int | bool | Unknown


def signed(value: Any) -> Any:
    """The 32-bit two's complement reading of an integer."""
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def select(predicate: Value, holds: Value, otherwise: Value) -> Value:
    """`holds` or `otherwise`, by `predicate`."""
    if predicate is True:
        return holds
    return otherwise if predicate is False else doubtful(predicate, otherwise)


def doubtful(predicate: Value, otherwise: Value) -> Value:
    """What is selected by a predicate that is neither true nor false.

    Conditions on what the runtime sets count as false: a program goes its usual way, and no program that ran
    before has fetched its operands already.
    """
    return otherwise if isinstance(predicate, Unknown) and predicate.runtime else predicate


def high_product(left: Any, right: Any) -> Any:
    """The upper 32 bits of the unsigned product."""
    return signed(((left & 0xFFFFFFFF) * (right & 0xFFFFFFFF)) >> 32)

"""Masks and score changes that callers name, as the two texts and the captures that the op takes.

Texts are made by functions of numbers and texts alone, whose results torch.compile takes as constants. So a
graph has the tensors as inputs, and is made again for another formula.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tpu_kernels._checks import is_number
from tpu_kernels._constant import constant
from tpu_kernels.expressions.expression import (
    INDICES,
    Expression,
    Load,
    Variable,
    apply,
    check_slots,
    loads,
    parse,
    shift_slots,
    substitute,
    text,
)
from tpu_kernels.expressions.operations import ExpressionError, Kind
from tpu_kernels.expressions.trace import from_torch

Axes = tuple[bool, bool, bool, bool]
"""Of an array of rank 4, aligned with the scores: the axes that vary; the others have size 1."""


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A score_mod that has been traced: quicker to call with, and what a compiled function can take.

    Attributes:
        text: a float expression of score, b, h, q, kv, q_len and kv_len, and of loads from `captures`.
        captures: the tensors it loads from, by slot.

    Raises:
        ExpressionError: `text` is no such expression; a `ValueError`.
    """

    text: str
    captures: tuple[torch.Tensor, ...] = ()

    def __post_init__(self) -> None:
        _check_score(self.text, len(self.captures))

    @classmethod
    def trace(cls, function: Callable[..., Any]) -> ScoreMod:
        """The torch function `(score, b, h, q, kv) -> score`, which is called once, as an expression.

        Raises `ExpressionError`, a `ValueError`, for what is not elementwise; the message has the line.
        """
        expression, captures = from_torch(function, ("score", "b", "h", "q", "kv"), "float")
        return cls(text(expression), captures)


class Part(NamedTuple):
    """An expression as text. Its captures are those in a list from `offset` on."""

    text: str
    offset: int = 0


@constant
def mask_text(parts: tuple[Part, ...]) -> str:
    """All of the masks at once; "" for none."""
    if not parts:
        return ""
    return text(functools.reduce(operator.and_, map(_expression, parts)))


@constant
def score_text(changes: tuple[Part, ...]) -> str:
    """One change of the scores after the other; "" for none."""
    if not changes:
        return ""
    score: Expression = Variable("score")
    for change in changes:
        score = substitute(_expression(change), {"score": score})
    return text(score)


@constant
def aligned(kind: Kind, axes: Axes) -> str:
    """The element of one capture of rank 4 at the present position."""
    return text(_aligned(kind, axes))


@constant
def added(axes: Axes) -> str:
    """A bias: one capture of rank 4 added to the scores."""
    return text(Variable("score") + _aligned("float", axes))


@constant
def same_segment(q_batched: bool, kv_batched: bool) -> str:
    """Whether two captures, `[B or 1, L]` and `[B or 1, S]`, have equal numbers at a query and a key."""
    b = Variable("b")
    q_id = Load(0, (b if q_batched else 0, Variable("q")), "int")
    kv_id = Load(1, (b if kv_batched else 0, Variable("kv")), "int")
    return text(q_id.eq(kv_id))


@constant
def in_range() -> str:
    """Whether a key is at or after the first capture's entry for the query, and before the second's."""
    q, kv = Variable("q"), Variable("kv")
    return text((kv >= Load(0, (q,), "int")) & (kv < Load(1, (q,), "int")))


@constant
def soft_cap(cap: float) -> str:
    """`cap * tanh(score / cap)`."""
    return text(cap * apply("tanh", Variable("score") / cap))


@constant
def alibi(batched: bool) -> str:
    """A penalty for distance, with slopes `[H]` or `[B, H]`; the last query stands at the last key."""
    q, kv, h = Variable("q"), Variable("kv"), Variable("h")
    slope = Load(0, (Variable("b"), h) if batched else (h,), "float")
    distance = abs(q + (Variable("kv_len") - Variable("q_len")) - kv)
    return text(Variable("score") - slope * distance)


@constant
def alibi_from(of_query: bool) -> str:
    """The same with slopes `[1, H, 1, 1]`, or `[1, H, L, 1]`, and a second capture that has where each query
    stands among the keys."""
    distance = abs(Load(1, (Variable("q"),), "int") - Variable("kv"))
    return text(Variable("score") - _aligned("float", (False, True, of_query, False)) * distance)


@constant
def dimensions(source: str) -> tuple[tuple[int, int], ...]:
    """(slot, number of indices) of each load: the capture must have that many dimensions."""
    return tuple((load.slot, len(load.index)) for load in (loads(parse(source)) if source else ()))


@constant
def direct_indices(source: str) -> tuple[tuple[int, int, str], ...]:
    """(slot, dimension, variable) wherever a dimension of a capture is indexed by a variable itself."""
    return tuple(
        (load.slot, dimension, index.name)
        for load in (loads(parse(source)) if source else ())
        for dimension, index in enumerate(load.index)
        if isinstance(index, Variable)
    )


@constant
def _check_score(source: str, captures: int) -> None:
    expression = parse(source)
    if expression.kind != "float":
        raise ExpressionError(
            f"a changed score is a float, got the {expression.kind} {expression!r}; to_float(...) makes one"
        )
    check_slots(expression, captures)


def check_cap(cap: float) -> float:
    """`cap` as a float. Raises `TypeError` or `ValueError` for what is no positive number."""
    if not is_number(cap):
        raise TypeError(f"splash_attention: soft_cap must be a float, got {cap!r}")
    if not (cap > 0 and math.isfinite(cap)):
        raise ValueError(f"splash_attention: soft_cap must be positive and finite, got {cap}; None is no cap")
    return float(cap)


def _expression(part: Part) -> Expression:
    return shift_slots(parse(part.text), part.offset)


def _aligned(kind: Kind, axes: Axes) -> Expression:
    return Load(
        0, tuple(Variable(name) if varies else 0 for name, varies in zip(INDICES, axes, strict=True)), kind
    )

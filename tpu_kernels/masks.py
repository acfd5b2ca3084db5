"""Masks for attention: which positions see which.

    from tpu_kernels import masks

    masks.causal() & masks.sliding_window(1023)
    masks.prefix_lm(256) & masks.segments(document_ids)

A mask is true where the query at position q sees the key at position kv. It is made of formulas and of small
tensors, not of a table of all pairs, so that a kernel can skip the blocks where nothing is seen. `&`, `|`,
`^` and `~` combine masks. Where the numbers of queries and keys differ, "top_left" gives the first query the
position of the first key, as torch's `is_causal`, and "bottom_right" the last that of the last, as when
earlier keys come from a cache.

Masks can be made and combined inside of a compiled function too, but for `function`, and for `~`, which
torch.compile does not know for objects: write `full() ^ mask`.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tpu_kernels._constant import constant
from tpu_kernels.expressions import trace
from tpu_kernels.expressions.expression import (
    INDICES,
    Constant,
    Expression,
    Load,
    Variable,
    apply,
    check_slots,
    parse,
    remap_slots,
    text,
    variables,
)
from tpu_kernels.expressions.operations import ExpressionError, Kind

Alignment = Literal["top_left", "bottom_right"]

B, H, Q, KV = (Variable(name) for name in INDICES)


class Sized(NamedTuple):
    """What the sizes of a capture must be. A larger one would be cut and nobody told.

    Attributes:
        slot: its place in `Mask.captures`.
        name: what it is, for messages.
        axes: the axis of each dimension, counted from the last; with a "?" it may have size 1 instead.
        fix: what to do about another size.
    """

    slot: int
    name: str
    axes: tuple[str, ...]
    fix: str = "cut it to that, or give one for each position"


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Which positions see which. The functions of this module make masks, and `Mask.of` any expression.

    Args:
        text: a bool expression of the indices b, h, q, kv, of q_len and kv_len, and of loads from `captures`,
            as `expressions.text` writes it.
        captures: torch tensors or JAX arrays; the slots of loads are places in this tuple.
        description: how `repr` shows the mask; None for its text.
        sized: the captures whose sizes must be those of the scores. What code indexes may be larger.

    Raises:
        ExpressionError: `text` is no such expression.
    """

    # Text, because torch.compile can compare it and make a constant of it.
    text: str
    captures: tuple[Any, ...] = ()
    description: str | None = None
    sized: tuple[Sized, ...] = ()

    def __post_init__(self) -> None:
        _check(self.text, len(self.captures))

    @classmethod
    def of(cls, expression: Expression, captures: tuple[Any, ...] = ()) -> Mask:
        """The mask of an expression."""
        return cls(text(expression), captures)

    @property
    def expression(self) -> Expression:
        """The expression that `text` stands for."""
        return parse(self.text)

    def __and__(self, other: Mask) -> Mask:
        return _combine("&", self, other)

    def __or__(self, other: Mask) -> Mask:
        return _combine("|", self, other)

    def __xor__(self, other: Mask) -> Mask:
        return _combine("^", self, other)

    def __invert__(self) -> Mask:
        return Mask(_inverted(self.text), self.captures, _shown_inverted(self.description), self.sized)

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is neither true nor false. Combine masks with `&`, `|` and `~`")

    def __repr__(self) -> str:
        return self.description or f"Mask({self.text!r})"


# Of positions alone.


def full() -> Mask:
    """Everything is seen."""
    return Mask("true", (), "full()")


def causal(alignment: Alignment = "top_left", *, offset: int = 0) -> Mask:
    """Nothing later is seen: `kv <= q + offset`, where q counts as `alignment` says."""
    offset = _int("causal", "offset", offset)
    return Mask(_causal(alignment, offset), (), _call("causal", alignment, (), offset))


def sliding_window(left: int | None, right: int | None = 0, *, alignment: Alignment = "top_left") -> Mask:
    """The `left` positions before, the own one and the `right` ones after: `q - left <= kv <= q + right`.

    None means all of that side. With `right=0`, the default, the window is causal.
    """
    left = None if left is None else _int("sliding_window", "left", left)
    right = None if right is None else _int("sliding_window", "right", right)
    shown = _call("sliding_window", alignment, (left,) if right == 0 else (left, right))
    return Mask(_window(alignment, left, right), (), shown)


def chunked(size: int, *, alignment: Alignment = "top_left") -> Mask:
    """The positions of the own chunk are seen: `kv // size == q // size`. Combine it with `causal()`."""
    size = _int("chunked", "size", size)
    if size < 1:
        raise ValueError(f"chunked: size must be at least 1, got {size}")
    return Mask(_chunked(alignment, size), (), _call("chunked", alignment, (size,)))


def prefix_lm(prefix: int | Any, *, alignment: Alignment = "top_left") -> Mask:
    """The first `prefix` keys are seen by all, the rest causally: `kv < prefix or kv <= q`.

    Args:
        prefix: a number, or an integer tensor [B] with one for each element of the batch, or [1].
        alignment: as in `causal`.
    """
    if isinstance(prefix, int):
        prefix = _int("prefix_lm", "prefix", prefix)
        return Mask(_prefix(alignment, prefix), (), _call("prefix_lm", alignment, (prefix,)))
    _check_array("prefix_lm", "prefix", prefix, "int", (1,))
    shown = _call("prefix_lm", alignment, ("prefix",))
    sized = (Sized(0, "prefix of masks.prefix_lm", ("b?",)),)
    return Mask(_prefix(alignment, _varying(prefix)), (prefix,), shown, sized)


# Of tensors.


def segments(q_ids: Any, kv_ids: Any = None) -> Mask:
    """Positions of the same segment see each other: `q_ids[b, q] == kv_ids[b, kv]`.

    For several sequences packed into one. Blocks of other segments are skipped if ids are sorted.

    Args:
        q_ids: integers [B, L], or [L] or [1, L] for all elements of the batch.
        kv_ids: integers [B, S], [S] or [1, S]; None for `q_ids`, if L is S.
    """
    _check_array("segments", "q_ids", q_ids, "int", (1, 2))
    of_queries = Sized(0, "q_ids of masks.segments", ("b?", "q"))
    if kv_ids is None:
        fix = "queries and keys are not equally many: give kv_ids, too"
        of_keys = Sized(0, "q_ids of masks.segments, which stand for the keys,", ("b?", "kv"), fix)
        return Mask(_segments(_varying(q_ids), None), (q_ids,), "segments(q_ids)", (of_queries, of_keys))
    _check_array("segments", "kv_ids", kv_ids, "int", (1, 2))
    of_keys = Sized(1, "kv_ids of masks.segments", ("b?", "kv"))
    return Mask(
        _segments(_varying(q_ids), _varying(kv_ids)),
        (q_ids, kv_ids),
        "segments(q_ids, kv_ids)",
        (of_queries, of_keys),
    )


def lengths(kv_lengths: Any) -> Mask:
    """The first `kv_lengths[b]` keys are seen, the rest is padding.

    Args:
        kv_lengths: integers [B], or [1] for all elements of the batch.
    """
    _check_array("lengths", "kv_lengths", kv_lengths, "int", (1,))
    sized = (Sized(0, "kv_lengths of masks.lengths", ("b?",)),)
    return Mask(_lengths(_varying(kv_lengths)), (kv_lengths,), "lengths(kv_lengths)", sized)


def key_padding(keep: Any) -> Mask:
    """The keys are seen for which `keep` is true.

    Args:
        keep: bool [B, S], [S] or [1, S]. Mind that torch's `MultiheadAttention` has True for those left out.
    """
    _check_array("key_padding", "keep", keep, "bool", (1, 2))
    sized = (Sized(0, "keep of masks.key_padding", ("b?", "kv")),)
    return Mask(_loaded("b kv", _varying(keep)), (keep,), "key_padding(keep)", sized)


def tensor(visible: Any) -> Mask:
    """A table of what is seen: `visible[b, h, q, kv]`.

    Args:
        visible: bool [L, S], [H, L, S] or [B, H, L, S]. A dimension of size 1 stands for all.
    """
    _check_array("tensor", "visible", visible, "bool", (2, 3, 4))
    sized = (Sized(0, "visible of masks.tensor", ("b?", "h?", "q?", "kv?")),)
    return Mask(_loaded("b h q kv", _varying(visible)), (visible,), "tensor(visible)", sized)


def function(mask_mod: Callable[..., Any], framework: Literal["torch", "jax"] = "torch") -> Mask:
    """What a function says: `mask_mod(b, h, q, kv)`, as in torch's FlexAttention.

        masks.function(lambda b, h, q, kv: (q >= kv) & (document[b, q] == document[b, kv]))

    It is called once, with stand-ins for 0-d tensors, and may use tensors by indexing them, which may be
    larger than the scores. See `expressions.trace`.

    Args:
        mask_mod: a function of torch tensors, or of JAX scalars if `framework` is "jax".
        framework: which of the two.

    Raises:
        ExpressionError: it does something else than elementwise operations and indexing.
    """
    traces: dict[str, Callable[..., tuple[Expression, tuple[Any, ...]]]] = {
        "torch": trace.from_torch,
        "jax": trace.from_jax,
    }
    if framework not in traces:
        raise ValueError(f"framework must be 'torch' or 'jax', got {framework!r}")
    expression, captures = traces[framework](mask_mod, INDICES, "bool")
    shown = f"function({getattr(mask_mod, '__qualname__', mask_mod)})"
    return Mask(text(expression), captures, shown)


# Texts. They depend on numbers and texts alone, and on which dimensions of tensors vary (have a size but 1).


@constant
def _check(source: str, captures: int) -> None:
    expression = parse(source)
    if expression.kind != "bool":
        raise ExpressionError(f"a mask is a bool, got the {expression.kind} {expression!r}")
    if "score" in variables(expression):
        raise ExpressionError(f"a mask can't depend on the score, got {expression!r}")
    check_slots(expression, captures)


@constant
def _causal(alignment: Alignment, offset: int) -> str:
    return text(_position(alignment) + offset >= KV)


@constant
def _window(alignment: Alignment, left: int | None, right: int | None) -> str:
    position = _position(alignment)
    seen: Expression = Constant(True)
    if left is not None:
        seen &= position - KV <= left
    if right is not None:
        seen &= KV - position <= right
    return text(seen)


@constant
def _chunked(alignment: Alignment, size: int) -> str:
    return text((_position(alignment) // size).eq(KV // size))


@constant
def _prefix(alignment: Alignment, prefix: int | tuple[bool, ...]) -> str:
    length = Constant(prefix) if isinstance(prefix, int) else _load(0, "b", prefix, "int")
    return text((KV < length) | (_position(alignment) >= KV))


@constant
def _segments(q: tuple[bool, ...], kv: tuple[bool, ...] | None) -> str:
    q_id = _load(0, "b q", q, "int")
    kv_id = _load(0, "b kv", q, "int") if kv is None else _load(1, "b kv", kv, "int")
    return text(q_id.eq(kv_id))


@constant
def _lengths(varying: tuple[bool, ...]) -> str:
    return text(_load(0, "b", varying, "int") > KV)


@constant
def _loaded(axes: str, varying: tuple[bool, ...]) -> str:
    return text(_load(0, axes, varying, "bool"))


@constant
def _inverted(source: str) -> str:
    return text(~parse(source))


@constant
def _combined(sign: str, a: str, b: str, slots: tuple[int, ...]) -> str:
    """Texts combined; slot i of `b` becomes `slots[i]`."""
    op = {"&": "and", "|": "or", "^": "xor"}[sign]
    return text(apply(op, parse(a), remap_slots(parse(b), dict(enumerate(slots)))))


def _position(alignment: Alignment) -> Expression:
    """The position of a query among the keys."""
    if alignment == "top_left":
        return Q
    if alignment == "bottom_right":
        return Q + (Variable("kv_len") - Variable("q_len"))
    raise ValueError(f"alignment must be 'top_left' or 'bottom_right', got {alignment!r}")


def _load(slot: int, axes: str, varying: tuple[bool, ...], kind: Kind) -> Load:
    """The element of a capture whose dimensions are the last of `axes`."""
    names = axes.split()[-len(varying) :]
    return Load(
        slot, tuple(Variable(n) if v else Constant(0) for n, v in zip(names, varying, strict=True)), kind
    )


def _combine(sign: str, a: Mask, b: Mask) -> Mask:
    """`a sign b`, where a tensor that both have is one capture."""
    if hasattr(b, "shape") or callable(b):
        wrap = "tensor" if hasattr(b, "shape") else "function"
        raise TypeError(
            f"masks combine with masks, got {type(b).__name__}; make a mask of it: masks.{wrap}(...)"
        )
    if not isinstance(b, Mask):
        return NotImplemented
    captures = list(a.captures)
    slots: list[int] = []
    for capture in b.captures:
        place = len(captures)
        for i, other in enumerate(captures):
            if other is capture:
                place = i
        if place == len(captures):
            captures.append(capture)
        slots.append(place)
    shown = _shown_combined(sign, a.description, b.description)
    sized = a.sized + tuple([Sized(slots[one.slot], one.name, one.axes) for one in b.sized])
    return Mask(_combined(sign, a.text, b.text, tuple(slots)), tuple(captures), shown, sized)


# Descriptions.


@constant
def _call(name: str, alignment: Alignment, arguments: tuple[int | str | None, ...], offset: int = 0) -> str:
    """A call as Python would write it, without what is the default."""
    shown = [str(argument) for argument in arguments]
    shown += [f"alignment={alignment!r}"] if alignment != "top_left" else []
    shown += [f"offset={offset}"] if offset else []
    return f"{name}({', '.join(shown)})"


@constant
def _shown_inverted(shown: str | None) -> str | None:
    return None if shown is None else f"~{_in_brackets(shown, '')}"


@constant
def _shown_combined(sign: str, a: str | None, b: str | None) -> str | None:
    return None if a is None or b is None else f"{_in_brackets(a, sign)} {sign} {_in_brackets(b, '')}"


def _in_brackets(shown: str, sign: str) -> str:
    """A description as an operand; one that is combined by the same sign needs no brackets on the left."""
    others = [other for other in "&|^" if other != sign]
    return f"({shown})" if any(f" {other} " in shown for other in others) else shown


# Checks.


def _int(function: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | torch.SymInt):
        raise TypeError(f"{function}: {name} must be an int, got {value!r}")
    # For torch.compile: of a symbolic int this makes the number, which texts need.
    return operator.index(value)


def _check_array(function: str, name: str, array: Any, kind: Kind, dimensions: tuple[int, ...]) -> None:
    wanted = "bool" if kind == "bool" else "integers"
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(
            f"{function}: {name} must be a tensor or array of {wanted}, got {type(array).__name__}"
        )
    if len(array.shape) not in dimensions:
        ranks = " or ".join(str(rank) for rank in dimensions)
        raise ValueError(f"{function}: {name} must have {ranks} dimensions, got shape {list(array.shape)}")
    if _kind(array) != kind:
        raise TypeError(f"{function}: {name} must be {wanted}, got {array.dtype}")


def _kind(array: Any) -> Kind:
    """The kind of the elements of a torch tensor, or of a JAX or numpy array."""
    if isinstance(array, torch.Tensor):
        if array.dtype == torch.bool:
            return "bool"
        return "float" if array.dtype.is_floating_point or array.dtype.is_complex else "int"
    return {"b": "bool", "i": "int", "u": "int"}.get(array.dtype.kind, "float")  # pyright: ignore


def _varying(array: Any) -> tuple[bool, ...]:
    # `if` makes bools of what is symbolic under torch.compile.
    return tuple([False if size == 1 else True for size in array.shape])

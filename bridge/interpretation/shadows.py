"""Which elements of a kernel's memory have been written: a shadow for each buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

WRITTEN, UNWRITTEN, PADDING = 0, 1, 2
"""An element was written; or was not; or lies beyond the end of its array, in a ragged block or tile."""


@dataclass(frozen=True)
class Given:
    """What a buffer holds when it is allocated.

    Attributes:
        shape: of its array; the buffer may be larger, with padding.
        written: whether the array has been written.
    """

    shape: tuple[int, ...]
    written: bool


def new_shadow(shape: Sequence[int], given: Given) -> np.ndarray:
    """The shadow of a new buffer."""
    shadow = np.full(shape, PADDING, np.uint8)
    shadow[tuple(map(slice, given.shape))] = WRITTEN if given.written else UNWRITTEN
    return shadow


def fill_with_numbers(value: np.ndarray, shadow: np.ndarray) -> None:
    """Replace what has not been written by small numbers."""
    where = shadow != WRITTEN
    numbers = np.arange(value.size).reshape(value.shape) % 5
    if np.issubdtype(value.dtype, np.integer):
        numbers = numbers % 2  # it may become an index
    value[where] = numbers.astype(value.dtype)[where]


def mark(shadow: np.ndarray, at: tuple[slice | int, ...], shape: Sequence[int], states: Any) -> None:
    """What a write leaves.

    Args:
        at: where, one entry for each dimension.
        shape: of the array; what is written beyond it is lost.
        states: of each element that is written, or one for all.
    """
    inside = clipped(at, shape)
    if inside is None:
        return
    if isinstance(states, np.ndarray) and states.ndim:
        states = states[tuple(map(slice, shadow[inside].shape))]
    shadow[inside] = states


def whole(at: Sequence[slice | int], shape: Sequence[int]) -> tuple[slice | int, ...]:
    """A range with an entry for each dimension."""
    return (*at, *(slice(0, size) for size in shape[len(at) :]))


def clipped(at: tuple[slice | int, ...], shape: Sequence[int]) -> tuple[slice | int, ...] | None:
    """The part of a range that lies within a shape; None if none does."""
    found: list[slice | int] = []
    for item, size in zip(at, shape, strict=True):
        if isinstance(item, int):
            if item >= size:
                return None
            found.append(item)
        else:
            if item.start >= size:
                return None
            found.append(slice(item.start, min(item.stop, size), item.step))
    return tuple(found)


def leaves(at: tuple[slice | int, ...], shape: Sequence[int]) -> Literal["before", "beyond", ""]:
    """Whether a range has elements outside of a shape: before its beginning, or beyond its end."""
    for item, size in zip(at, shape, strict=True):
        indices = (
            range(item, item + 1) if isinstance(item, int) else range(item.start, item.stop, item.step or 1)
        )
        if indices and indices[0] < 0:
            return "before"
        if indices and indices[-1] >= size:
            return "beyond"
    return ""


def in_words(at: Sequence[slice | int]) -> str:
    """A range as one writes it in Python."""

    def one(item: slice | int) -> str:
        if isinstance(item, int):
            return str(item)
        step = f":{item.step}" if item.step not in (None, 1) else ""
        return f"{item.start}:{item.stop}{step}"

    return ", ".join(map(one, at))

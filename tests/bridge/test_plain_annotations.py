"""Signatures in a module without `from __future__ import annotations`: annotations are objects, not text."""

# ruff: noqa: I002
import dataclasses
import enum
from collections.abc import Sequence
from typing import Literal, Optional

import jax
import torch

from bridge import jax_op


class Side(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


@dataclasses.dataclass(frozen=True)
class Shift:
    by: int = 1
    side: Side = Side.LEFT


@jax_op("test_plain_annotations::shifted")
def shifted(
    x: jax.Array,
    others: Sequence[jax.Array],
    bias: Optional[jax.Array] = None,  # noqa: UP045
    shift: Shift = Shift(),  # noqa: B008
    mode: Literal["add", "sub"] = "add",
) -> tuple[jax.Array, jax.Array]:
    """Adds a shift."""
    by = shift.by if shift.side is Side.LEFT else -shift.by
    total = sum(others, x) + (by if mode == "add" else -by)
    return (total if bias is None else total + bias), x * 2


def test_annotations_that_are_objects() -> None:
    x = torch.arange(3.0)
    for op in (shifted, torch.compile(shifted, fullgraph=True, backend="eager")):
        first, second = op(x, [x])
        assert torch.equal(first, 2 * x + 1) and torch.equal(second, 2 * x)
        first, _ = op(x, [], x, shift=Shift(5, Side.RIGHT), mode="sub")
        assert torch.equal(first, 2 * x + 5)
    assert shifted.__doc__ == "Adds a shift." and "test_plain_annotations::shifted" in repr(shifted)

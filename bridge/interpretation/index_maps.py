"""The blocks a kernel visits: its index maps evaluated in NumPy over all grid steps at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax._src import core
from jax._src.pallas import core as pallas_core

_MAX_STEPS = 1 << 18  # beyond this many grid steps the index maps count as unknown


@dataclass(frozen=True)
class Visits:
    """The blocks of one operand, in the order in which the grid visits them.

    Attributes:
        starts: first element of the block at each grid step, shape (steps, rank).
        sizes: block shape, one per dimension.
        comes_back: some block is visited again after another one.
        overlaps: two different blocks share elements.
        out_of_bounds: the first step whose block starts outside of the array, as text; None if there is none.
    """

    starts: np.ndarray
    sizes: tuple[int, ...]
    comes_back: bool
    overlaps: bool
    out_of_bounds: str | None

    @property
    def once(self) -> bool:
        """Whether the visits of each element are consecutive grid steps, with one block."""
        return not (self.comes_back or self.overlaps)

    def same_blocks(self, other: Visits) -> bool:
        """Whether both operands visit the same elements at every grid step."""
        return self.sizes == other.sizes and np.array_equal(self.starts, other.starts)


class _Unknown(Exception):
    """The index map depends on something not known before the kernel runs."""


def block_visits(mapping: pallas_core.BlockMapping, grid: Sequence[Any]) -> Visits | None:
    """The blocks of one operand; None if they depend on values known only when the kernel runs."""
    steps = math.prod(grid) if all(isinstance(size, int) for size in grid) else None
    if steps is None or steps > _MAX_STEPS:
        return None
    points = np.indices(tuple(grid), dtype=np.int64).reshape(len(grid), steps)
    jaxpr = mapping.index_map_jaxpr
    arguments = [*points, *([None] * (len(jaxpr.jaxpr.invars) - len(grid)))]
    try:
        indices = _evaluate(jaxpr.jaxpr, jaxpr.consts, arguments)
    except _Unknown:
        return None
    columns, sizes, limits = [], [], []
    for index, dim, extent in zip(indices, mapping.block_shape, mapping.array_aval.shape, strict=True):
        size = pallas_core._get_block_dim_size(dim)
        blocked = isinstance(dim, pallas_core.Blocked)
        columns.append(np.broadcast_to(index, (steps,)) * (size if blocked else 1))
        sizes.append(size)
        padding = sum(dim.padding) if isinstance(dim, pallas_core.Element) else 0
        limits.append(-(-(extent + padding) // size) * size if size else 0)
    starts = np.stack(columns, axis=1) if columns else np.zeros((steps, 0), np.int64)
    runs = _without_repeats(starts)
    distinct = _distinct(runs)
    return Visits(
        starts=starts,
        sizes=tuple(sizes),
        comes_back=len(distinct) != len(runs),
        overlaps=_share_elements(distinct, sizes),
        out_of_bounds=_out_of_bounds(starts, sizes, limits, grid),
    )


def _without_repeats(starts: np.ndarray) -> np.ndarray:
    """The visits, with consecutive visits of the same block taken as one."""
    moved = np.any(starts[1:] != starts[:-1], axis=1)
    return starts[np.concatenate([[True], moved])] if len(starts) else starts


def _distinct(blocks: np.ndarray) -> np.ndarray:
    """Each block once. Rows are numbered first: sorting integers is much quicker than sorting rows."""
    if blocks.size == 0:
        return blocks[:1]
    low = blocks.min(axis=0)
    spans = (blocks.max(axis=0) - low + 1).astype(object)  # Python integers: the product may be large
    if math.prod(spans) >= 1 << 63:
        return np.unique(blocks, axis=0)
    weights = np.array([math.prod(spans[dim + 1 :]) for dim in range(len(spans))], np.int64)
    return blocks[np.unique((blocks - low) @ weights, return_index=True)[1]]


def _share_elements(blocks: np.ndarray, sizes: Sequence[int]) -> bool:
    """Whether distinct blocks may overlap (certain for blocks that differ in one dimension only)."""
    for column, size in zip(blocks.T, sizes, strict=True):
        ordered = np.unique(column)
        if bool(np.any(ordered[1:] - ordered[:-1] < size)):
            return True
    return False


def _out_of_bounds(
    starts: np.ndarray, sizes: Sequence[int], limits: Sequence[int], grid: Sequence[int]
) -> str | None:
    bad = np.any((starts < 0) | (starts + np.array(sizes, np.int64) > np.array(limits, np.int64)), axis=1)
    if not bad.any():
        return None
    step = int(np.argmax(bad))
    point = tuple(int(i) for i in np.unravel_index(step, tuple(grid))) if grid else ()
    start = tuple(int(i) for i in starts[step])
    return f"at grid step {point} the block of shape {tuple(sizes)} starts at element {start}"


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """A scalar integer program, evaluated for all grid steps at once. None marks an unknown argument."""
    values: dict[core.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: core.Atom) -> Any:
        value = atom.val if isinstance(atom, core.Literal) else values[atom]
        if value is None:
            raise _Unknown
        return value

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in ("jit", "closed_call", "custom_jvp_call"):
            inner = eqn.params["jaxpr" if eqn.primitive.name == "jit" else "call_jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, operands)
        elif eqn.primitive.name == "convert_element_type":
            results = [np.asarray(operands[0]).astype(eqn.params["new_dtype"])]
        elif eqn.primitive.name in _SCALAR_PRIMITIVES:
            results = [_SCALAR_PRIMITIVES[eqn.primitive.name](*operands)]
        else:
            raise _Unknown
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _divide(a: Any, b: Any) -> Any:
    """Integer division that rounds towards zero, as XLA's."""
    if np.any(np.asarray(b) == 0):
        raise _Unknown
    quotient = np.abs(a) // np.abs(b)
    return np.where((np.asarray(a) < 0) != (np.asarray(b) < 0), -quotient, quotient)


def _remainder(a: Any, b: Any) -> Any:
    return a - _divide(a, b) * b


def _select(which: Any, *cases: Any) -> Any:
    return np.choose(np.asarray(which).astype(np.int64), np.broadcast_arrays(*cases))


_SCALAR_PRIMITIVES: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": _remainder,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sign": np.sign,
    "abs": np.abs,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": _select,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}

"""Loads that a kernel can do: gathers are done before it, what is left in it are blocks of aligned arrays.

A TPU kernel gets blocks of arrays and can't look up single elements. So `hoist` splits an expression in two:
parts that are computed before the kernel, each into an array with an axis for each index variable it depends
on, and the rest, whose only loads are *aligned*: their index is a tuple of different variables in the order
b, h, q, kv. The rank stays as low as it can: of `document[b, q] == document[b, kv]` the two vectors are
arrays, not the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import (
    INDICES,
    Apply,
    Constant,
    Expression,
    Load,
    Variable,
    nodes_of,
)
from tpu_kernels.expressions.operations import ExpressionError, Kind


@dataclass(frozen=True)
class Hoisted:
    """An array that is made before the kernel; the loads of slot i in the kernel's expression are of the ith.

    Args:
        expression: what it holds, of the captures that the caller gave.
        axes: the variable of each of its dimensions, in the order b, h, q, kv.
    """

    expression: Expression
    axes: tuple[str, ...]

    @property
    def kind(self) -> Kind:
        """The kind of its elements; for an aligned capture only what they become when loaded."""
        return self.expression.kind


def hoist(e: Expression, hoisted: Sequence[Hoisted] = ()) -> tuple[Expression, tuple[Hoisted, ...]]:
    """`e` with aligned loads alone, and the arrays they load from.

    Args:
        e: any expression.
        hoisted: arrays to start with, of another expression over the same captures: what both need is there
            once.

    Returns:
        The expression for the kernel, and all arrays: slot i of its loads is the ith. `materialise` makes
        them.

    Raises:
        ExpressionError: an index depends on the score, so its load can't be done before the kernel.
    """
    arrays = list(hoisted)
    slots = {array.expression: slot for slot, array in enumerate(arrays)}
    new: dict[Expression, Expression] = {}
    for node, facts in _inside(e):
        if facts.hoist:
            if node not in slots:
                slots[node] = len(arrays)
                arrays.append(Hoisted(node, facts.axes))
            new[node] = Load(slots[node], tuple(Variable(name) for name in facts.axes), node.kind)
        elif isinstance(node, Apply):
            new[node] = Apply(node.op, tuple(new[operand] for operand in node.operands))
        else:
            new[node] = node
    return new[e], tuple(arrays)


def hoist_all(
    expressions: Sequence[Expression | None],
) -> tuple[list[Expression | None], tuple[Hoisted, ...]]:
    """`hoist` of several expressions over the same captures; None stays None."""
    hoisted: tuple[Hoisted, ...] = ()
    found: list[Expression | None] = []
    for expression in expressions:
        if expression is not None:
            expression, hoisted = hoist(expression, hoisted)
        found.append(expression)
    return found, hoisted


def materialise(
    hoisted: Sequence[Hoisted], captures: Sequence[Any], sizes: Mapping[str, int]
) -> list[jax.Array]:
    """The arrays that the kernel's expression loads from.

    Differentiable in float captures.

    Args:
        hoisted: what `hoist` gave.
        captures: the arrays that the expressions before `hoist` load from.
        sizes: the number of values of "b", "h", "q" and "kv".

    Returns:
        For each of `hoisted` an array whose dimensions are its axes, of their full sizes. Aligned captures
        keep their dtype; all else is bool, int32 or float32 (float64 if a capture is).

    Raises:
        ExpressionError: an expression loads from a capture that is not there, or is too small.
    """
    shape = {name: int(sizes[name]) for name in INDICES}
    return [_materialise(array, captures, shape) for array in hoisted]


def load_from(captures: Sequence[Any], env: Mapping[str, Any]) -> Callable[[Load], Any]:
    """A `load` for `evaluate` that looks elements up in whole captures, for positions given by `env`."""

    def load(node: Load) -> Any:
        array = _capture(node, captures)
        if array.dtype in (jnp.bfloat16, jnp.float16):
            array = array.astype(jnp.float32)  # the gradient of a look-up is a sum, in this dtype
        index = []
        for i, size in zip(node.index, array.shape, strict=True):
            place = evaluate(i, env, load)
            index.append(jnp.clip(jnp.where(place < 0, place + size, place), 0, max(size - 1, 0)))
        if not array.size:
            return jnp.zeros(jnp.broadcast_shapes(*(i.shape for i in index)), array.dtype)
        return array[tuple(index)]

    return load


@dataclass(frozen=True)
class _Facts:
    """What decides whether a node is computed before the kernel."""

    variables: frozenset[str]
    gathers: frozenset[frozenset[str]]  # the variables of each load in it that is not aligned
    loads: bool
    hoist: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name in INDICES if name in self.variables)


_COMBINES_BOOLS = frozenset({"and", "or", "xor", "not", "select"})


def _facts(node: Expression, operands: Sequence[_Facts]) -> _Facts:
    names = frozenset({node.name}) if isinstance(node, Variable) else frozenset()
    names = names.union(*(f.variables for f in operands))
    gathers: frozenset[frozenset[str]] = frozenset().union(*(f.gathers for f in operands))
    if isinstance(node, Load):
        if "score" in names:
            raise ExpressionError(
                f"{node!r} is looked up by the score, which is known in the kernel only, where nothing can "
                f"be looked up. An index may depend on b, h, q, kv and captured arrays"
            )
        if not _aligned(node):
            gathers |= {names.intersection(INDICES)}
        return _Facts(names, gathers, loads=True, hoist=True)
    loads = any(f.loads for f in operands)
    if isinstance(node, Variable | Constant) or "score" in names:
        return _Facts(names, gathers, loads)
    if names.isdisjoint(("q", "kv")):
        # One number for a whole block: a load is there anyhow, and TPUs have few float operations on scalars.
        hoist = bool(names) and (loads or node.kind == "float") or loads
    elif node.kind == "bool" and isinstance(node, Apply) and node.op in _COMBINES_BOOLS:
        # A mask keeps its parts that depend on indices alone: they tell about blocks without any array.
        hoist = all(f.hoist and names.intersection(INDICES) in f.gathers for f in operands)
    else:
        hoist = names.intersection(INDICES) in gathers
    return _Facts(names, gathers, loads, hoist)


def _inside(e: Expression) -> list[tuple[Expression, _Facts]]:
    """The nodes of `e`, operands first, down to the topmost ones that are hoisted."""
    facts: dict[Expression, _Facts] = {}
    for node in nodes_of(e):
        facts[node] = _facts(node, [facts[operand] for operand in node.operands])
    needed = {e}
    for node in reversed(facts):
        if node in needed and not facts[node].hoist:
            needed.update(node.operands)
    return [(node, f) for node, f in facts.items() if node in needed]


def _direct(load: Load) -> tuple[str, ...] | None:
    """The variables in the index of a load that is a slice of its capture, in that order, else None."""
    names = tuple(i.name for i in load.index if isinstance(i, Variable) and i.name in INDICES)
    constants = sum(isinstance(i, Constant) for i in load.index)
    return names if len(set(names)) == len(names) == len(load.index) - constants else None


def _aligned(load: Load) -> bool:
    return _direct(load) is not None


def _capture(load: Load, captures: Sequence[Any]) -> Any:
    if load.slot >= len(captures):
        raise ExpressionError(f"{load!r} needs capture {load.slot}, got {len(captures)} captures")
    array = jnp.asarray(captures[load.slot])
    if array.ndim != len(load.index):
        raise ExpressionError(
            f"{load!r} has an index of {len(load.index)} dimensions, but capture {load.slot} has the shape "
            f"{list(array.shape)}"
        )
    return array


def _materialise(hoisted: Hoisted, captures: Sequence[Any], sizes: Mapping[str, int]) -> jax.Array:
    e = hoisted.expression
    shape = tuple(sizes[name] for name in hoisted.axes)
    if isinstance(e, Load) and (names := _direct(e)) is not None:
        return _slice(e, names, captures, sizes)
    env: dict[str, Any] = {"q_len": sizes["q"], "kv_len": sizes["kv"]}
    for axis, name in enumerate(hoisted.axes):
        env[name] = jax.lax.broadcasted_iota(
            jnp.int32, tuple(shape[axis] if i == axis else 1 for i in range(len(shape))), axis
        )
    return jnp.broadcast_to(evaluate(e, env, load_from(captures, env)), shape)


def _slice(
    load: Load, names: tuple[str, ...], captures: Sequence[Any], sizes: Mapping[str, int]
) -> jax.Array:
    array = _capture(load, captures)
    index: list[Any] = []
    for dimension, (i, size) in enumerate(zip(load.index, array.shape, strict=True)):
        if isinstance(i, Constant):
            # Outside stands for the nearest element.
            place = int(i.value) + size if i.value < 0 else int(i.value)
            index.append(min(max(place, 0), max(size - 1, 0)))
        elif isinstance(i, Variable):
            if size < sizes[i.name]:
                raise ExpressionError(
                    f"{load!r}: capture {load.slot} of shape {list(array.shape)} has {size} elements in "
                    f"dimension {dimension}, but {i.name} goes up to {sizes[i.name] - 1}"
                )
            index.append(slice(0, sizes[i.name]))
    return jnp.transpose(
        array[tuple(index)], [names.index(name) for name in sorted(names, key=INDICES.index)]
    )

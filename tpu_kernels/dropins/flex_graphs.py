"""The functions of a `flex_attention` call, as its op gets them, as expressions.

torch.compile has made graphs of them: a `score_mod` or `mask_mod` is a module whose inputs are positions
first and then buffers, the tensors it captured. Whatever in it depends on buffers alone (`table * 2` before
`[q, kv]`) is computed by torch, before the kernel; what depends on a position is the expression, and it is
traced once per graph, on stand-ins that have no elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from tpu_kernels.expressions.expression import text
from tpu_kernels.expressions.operations import INT32_MAX, INT32_MIN, ExpressionError, Kind
from tpu_kernels.expressions.trace import from_torch

SCORE = ("score", "b", "h", "q", "kv")
MASK = ("b", "h", "q", "kv")
_SYMBOLIC = 2**15
"""Stands for a size that is not known when a graph is traced: larger than any constant index."""


class Traced(NamedTuple):
    """An expression as text, and the tensors it loads from, by slot."""

    text: str
    captures: tuple[torch.Tensor, ...]


def trace(
    function: Callable[..., Any], buffers: Sequence[Any], names: Sequence[str], result: Kind, float64: bool
) -> Traced:
    """`function(*positions, *buffers)` as an expression of the variables `names`.

    Args:
        float64: whether floats are computed in float64.

    Raises:
        ExpressionError: it does something that is not elementwise, or in float64 where that is not computed.
    """
    if not isinstance(function, GraphModule):
        expression, captures = from_torch(
            lambda *positions: function(*positions, *buffers), names, result, narrow=float64
        )
        return Traced(text(expression), captures)
    program = _programs.get(function)
    if program is None:
        program = _programs[function] = _Program(function, len(names))
    return program.traced(buffers, names, result, float64)


class _Program:
    """A graph in two parts: what positions enter, and what buffers alone do. Constants belong to both."""

    def __init__(self, module: GraphModule, positions: int) -> None:
        self.module = module
        nodes = list(module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self.positions, self.buffers = inputs[:positions], inputs[positions:]
        positional, given = set(self.positions), set(self.buffers)
        for node in nodes:
            operands = set(node.all_input_nodes)
            if node.op == "output" or operands & positional:
                positional.add(node)
            elif node.op == "get_attr" or operands & given:
                given.add(node)
        self.inner = _needed(nodes, positional - set(self.positions), stop=positional | given)
        self.outer = _needed(nodes, given - set(self.buffers), stop=given)
        borders = {operand for node in self.inner for operand in node.all_input_nodes if operand in given}
        self.borders = [node for node in nodes if node in borders]
        self.known: dict[tuple[Any, ...], tuple[str, tuple[int | torch.Tensor, ...]]] = {}

    def traced(self, buffers: Sequence[Any], names: Sequence[str], result: Kind, float64: bool) -> Traced:
        values: dict[Node, Any] = dict(zip(self.buffers, buffers, strict=True))
        for node in self.outer:
            values[node] = _run(self.module, node, values)
        outside = [_as_tensor(values[node], buffers) for node in self.borders]
        key = (
            float64,
            *(
                (value.dtype, *map(_size, value.shape))
                if isinstance(value, torch.Tensor)
                else (type(value), value)
                for value in outside
            ),
        )
        if key not in self.known:
            self.known[key] = self._trace(outside, names, result, float64)
        source, places = self.known[key]
        return Traced(source, tuple(outside[p] if isinstance(p, int) else p for p in places))

    def _trace(
        self, outside: Sequence[Any], names: Sequence[str], result: Kind, float64: bool
    ) -> tuple[str, tuple[int | torch.Tensor, ...]]:
        """The text, and for each slot the place in `outside` of what it loads from, or a constant table."""

        def function(*positions: torch.Tensor) -> Any:
            values: dict[Node, Any] = {
                **dict(zip(self.borders, stand_ins, strict=True)),
                **dict(zip(self.positions, positions, strict=True)),
            }
            for node in self.inner:
                values[node] = _run(self.module, node, values)
            returned = values[self.inner[-1]]
            return returned[0] if isinstance(returned, tuple | list) and len(returned) == 1 else returned

        with _disable_current_modes():
            stand_ins = [
                torch.empty([_size(n) for n in value.shape], dtype=value.dtype, device="meta")
                if isinstance(value, torch.Tensor)
                else value
                for value in outside
            ]
            expression, captures = from_torch(function, names, result, narrow=float64)
        slots = {id(stand_in): place for place, stand_in in enumerate(stand_ins)}
        return text(expression), tuple(slots.get(id(capture), capture) for capture in captures)


_programs: WeakKeyDictionary[GraphModule, _Program] = WeakKeyDictionary()


def _needed(nodes: Sequence[Node], wanted: set[Node], stop: set[Node]) -> list[Node]:
    """`wanted` and the nodes that they are made of, as far as these are not in `stop`, in order."""
    found = set(wanted)
    for node in reversed(nodes):
        if node in found:
            found.update(operand for operand in node.all_input_nodes if operand not in stop)
    return [node for node in nodes if node in found]


def _run(module: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    args = map_arg(node.args, values.__getitem__)
    kwargs = map_arg(node.kwargs, values.__getitem__)
    match node.op:
        case "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        case "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        case "call_module":
            return module.get_submodule(str(node.target))(*args, **kwargs)
        case "get_attr":
            return operator.attrgetter(str(node.target))(module)
        case _:  # the output
            return args[0]


def _as_tensor(value: Any, buffers: Sequence[Any]) -> Any:
    """A symbolic number as a 0-d tensor, on the device of the buffers; others as they are.

    Raises:
        ExpressionError: it is no int32.
    """
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return value
    if isinstance(value, torch.SymInt) and value.node.has_hint() and not INT32_MIN <= value <= INT32_MAX:
        raise ExpressionError(f"{value} is not in the range of int32, in which expressions compute")
    device = next((t.device for t in buffers if isinstance(t, torch.Tensor)), None)
    dtype = torch.int32 if isinstance(value, torch.SymInt) else torch.float32
    number: Any = value  # torch.full takes symbolic numbers, its types do not
    return torch.full((), number, dtype=dtype, device=device)


def _size(size: Any) -> int:
    return size if type(size) is int else _SYMBOLIC

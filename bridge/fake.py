"""Shapes and dtypes of a program's results without running it, for concrete and symbolic sizes.

Concrete sizes: `jax.eval_shape`, remembered. Symbolic sizes (`torch.compile(dynamic=True)`,
`torch.export`), in this order:

1. JAX's own symbolic shapes: each torch symbol becomes a JAX dimension variable, and the sizes of
   the results come back as formulas.
2. Where the function needs concrete sizes (a Python comparison of shapes, a whole-array block):
   it is evaluated at several sizes and the results must be explained exactly, at every one of
   them, by a formula: a constant, a linear one, or one rounded up to a multiple.
3. Otherwise the sizes are made static, and torch compiles again for each new size.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import sympy
import torch
from jax import export
from torch.fx.experimental.symbolic_shapes import free_symbols, optimization_hint
from torch.utils._sympy.functions import FloorDiv, Mod

from bridge.arrays import PLAIN
from bridge.dtypes import FLOAT4_PACKED, torch_dtype
from bridge.program import Avals, Program, array_shape


def outputs(program: Program, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Empty results (contiguous, as the real ones) on the device of the inputs."""
    device = _device(program, tensors)
    if not _symbols(tensors):
        shapes = [(o.shape, o.dtype) for o in program.out_avals(program.avals(tensors))]
    else:
        shapes = _symbolic_outputs(program, tensors)
    found = []
    for shape, dtype in shapes:
        torch_type = torch_dtype(dtype)
        if torch_type is FLOAT4_PACKED:
            shape = (*shape[:-1], shape[-1] // 2)
        found.append(torch.empty(tuple(shape), dtype=torch_type, device=device))
    return found


def of_tensors(
    program: Program,
    kind: str,
    tensors: Sequence[torch.Tensor],
    evaluate: Callable[[Avals], Any],
    *key: Any,
) -> Any:
    """`evaluate(avals)` for what must be known at compile time besides shapes, such as how many
    residuals there are; it must not depend on symbolic sizes."""
    if all(type(t) in PLAIN for t in tensors):  # no fake ones, so sizes are numbers
        cheap = (kind, *key, tuple((t.shape, t.dtype) for t in tensors))
        return program.remember(cheap, lambda: evaluate(program.avals(tensors)))
    if not _symbols(tensors):
        return evaluate(program.avals(tensors))
    try:
        return evaluate(_Symbolic(tensors).avals(program, tensors))
    except Exception:
        return evaluate(_at(program, tensors, _hints(tensors)))


def _device(program: Program, tensors: Sequence[torch.Tensor]) -> torch.device:
    devices = {t.device for t in tensors if t.dim() or t.device.type not in ("cpu",)}
    if not devices:
        return tensors[0].device if tensors else program.chosen_device()
    if len(devices) > 1:
        raise RuntimeError(
            f"{program.definition.name}: expected all tensors on one device, got "
            f"{' and '.join(sorted(map(str, devices)))}; move them with .to(device)"
        )
    return devices.pop()


# ---------------------------------------------------------------------------------- symbolic sizes


def _symbols(tensors: Sequence[torch.Tensor]) -> set[sympy.Symbol]:
    return {s for t in tensors for n in t.shape if isinstance(n, torch.SymInt) for s in free_symbols(n)}


def _symbolic_outputs(program: Program, tensors: Sequence[torch.Tensor]) -> list[tuple[Any, Any]]:
    try:
        symbolic = _Symbolic(tensors)
        outs = program._out_avals(symbolic.avals(program, tensors))
        return [(symbolic.torch_shape(o.shape), o.dtype) for o in outs]
    except Exception:
        found = _explained(program, tensors)
        if found is not None:
            return found
    static = Avals(
        tuple(tuple(int(n) for n in array_shape(t)) for t in tensors),
        program.dtypes(tensors),
        program.is_wide(tensors),
    )
    return [(o.shape, o.dtype) for o in program.out_avals(static)]


class _Symbolic:
    """torch's symbols as JAX dimension variables, and JAX's formulas as torch sizes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._scope = export.SymbolicScope()
        self._variables: dict[sympy.Expr, Any] = {}
        self._values: dict[str, Any] = {
            "floordiv": operator.floordiv,
            "mod": operator.mod,
            "max": lambda a, b: torch.sym_max(a, b),
            "min": lambda a, b: torch.sym_min(a, b),
        }
        # Symbols that are themselves sizes first: their SymInt then stands for them in formulas.
        sizes = [n for t in tensors for n in t.shape if isinstance(n, torch.SymInt)]
        for size in sizes:
            if isinstance(size.node.expr, sympy.Symbol):
                self._variable(size)

    def avals(self, program: Program, tensors: Sequence[torch.Tensor]) -> Avals:
        shapes = tuple(tuple(self._dimension(n) for n in array_shape(t)) for t in tensors)
        return Avals(shapes, program.dtypes(tensors), program.is_wide(tensors))

    def _variable(self, size: torch.SymInt) -> Any:
        expression = size.node.expr
        if expression not in self._variables:
            name = f"n{len(self._variables)}"
            (self._variables[expression],) = export.symbolic_shape(name, scope=self._scope)
            self._values[name] = size
        return self._variables[expression]

    def _dimension(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return int(size)
        try:
            return self._translate(size.node.expr)
        except (KeyError, NotImplementedError):
            return self._variable(size)

    def _translate(self, expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression in self._variables:
            return self._variables[expression]
        parts = [self._translate(a) for a in expression.args]
        if expression.is_Add:
            return sum(parts[1:], parts[0])
        if expression.is_Mul:
            product = parts[0]
            for part in parts[1:]:
                product = product * part
            return product
        if isinstance(expression, FloorDiv):
            return parts[0] // parts[1]
        if isinstance(expression, Mod):
            return parts[0] % parts[1]
        raise NotImplementedError(str(expression))

    def torch_shape(self, shape: Iterable[Any]) -> tuple[Any, ...]:
        """JAX prints a dimension as a formula of its variables; evaluate that with torch's sizes."""
        return tuple(
            n if isinstance(n, int) else eval(str(n).replace("^", "**"), {"__builtins__": {}}, self._values)
            for n in shape
        )


# ---------------------------------------------------------------------------------- probing

_SHIFTS = (0, 1, 2, 3, 5, 8, 13, 64, 129)
_MULTIPLES = (8, 16, 32, 64, 128, 256, 512)


def _explained(program: Program, tensors: Sequence[torch.Tensor]) -> list[tuple[Any, Any]] | None:
    """Result shapes as formulas that hold at every probed size, or None."""
    symbols = sorted(_symbols(tensors), key=str)
    sizes = _plain_sizes(tensors, symbols)
    if sizes is None:
        return None
    base = _hints(tensors)
    points = [base]
    for symbol, shift in itertools.product(symbols, _SHIFTS[1:]):
        points.append({**base, symbol: base[symbol] + shift})
    points += [
        {s: base[s] + _SHIFTS[(i * 3 + k) % len(_SHIFTS)] for i, s in enumerate(symbols)} for k in range(4)
    ]
    try:
        results = [program.out_avals(_at(program, tensors, p)) for p in points]
    except Exception:
        return None
    first = results[0]
    if any(
        len(r) != len(first) or any(a.ndim != b.ndim for a, b in zip(r, first, strict=True)) for r in results
    ):
        return None
    shapes = []
    for index, out in enumerate(first):
        shape = []
        for axis in range(out.ndim):
            seen = [r[index].shape[axis] for r in results]
            formula = _formula(seen, points, symbols, sizes)
            if formula is None:
                return None
            shape.append(formula)
        shapes.append((tuple(shape), out.dtype))
    return shapes


def _formula(
    seen: list[int], points: list[dict[Any, int]], symbols: list[Any], sizes: dict[Any, Any]
) -> Any | None:
    base = points[0]
    slopes = {}
    for symbol in symbols:
        shifted = next(i for i, p in enumerate(points) if p[symbol] == base[symbol] + 1 and i)
        slopes[symbol] = seen[shifted] - seen[0]
    constant = seen[0] - sum(slopes[s] * base[s] for s in symbols)
    if all(constant + sum(slopes[s] * p[s] for s in symbols) == n for n, p in zip(seen, points, strict=True)):
        value = constant
        for s in symbols:
            if slopes[s]:
                value = value + slopes[s] * sizes[s]
        return value
    for symbol, multiple in itertools.product(symbols, _MULTIPLES):
        if all(-(-p[symbol] // multiple) * multiple == n for n, p in zip(seen, points, strict=True)):
            return (sizes[symbol] + multiple - 1) // multiple * multiple
    return None


def _plain_sizes(tensors: Sequence[torch.Tensor], symbols: list[Any]) -> dict[Any, Any] | None:
    """For each symbol, a size that is just that symbol."""
    sizes = {n.node.expr: n for t in tensors for n in t.shape if isinstance(n, torch.SymInt)}
    return {s: sizes[s] for s in symbols} if all(s in sizes for s in symbols) else None


def _hints(tensors: Sequence[torch.Tensor]) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for t in tensors:
        for n in t.shape:
            if isinstance(n, torch.SymInt) and isinstance(n.node.expr, sympy.Symbol):
                found[n.node.expr] = max(cast(int, optimization_hint(n, fallback=16)), 2)
    for symbol in _symbols(tensors):
        found.setdefault(symbol, 16)
    return found


def _at(program: Program, tensors: Sequence[torch.Tensor], values: dict[Any, int]) -> Avals:
    """The inputs with numbers in place of symbols."""

    def number(size: Any) -> int:
        return int(size.node.expr.subs(values)) if isinstance(size, torch.SymInt) else int(size)

    shapes = tuple(tuple(number(n) for n in array_shape(t)) for t in tensors)
    return Avals(shapes, program.dtypes(tensors), program.is_wide(tensors))

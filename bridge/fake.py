"""Shapes and dtypes of a program's results without running it, for concrete and symbolic sizes.

Concrete sizes: `jax.eval_shape`, remembered. Symbolic sizes (`torch.compile(dynamic=True)`,
`torch.export`), in this order:

1. JAX's own symbolic shapes: each torch symbol becomes a JAX dimension variable, and the sizes of
   the results come back as formulas.
2. Where the function needs concrete sizes (a Python comparison of shapes, a whole-array block):
   it is evaluated at several sizes and the results must be explained exactly, at every one of
   them, by a formula in the sizes of the inputs: a constant, a linear one, or one rounded up.
3. Otherwise the sizes are made static, and torch compiles again for each new size.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import sympy
import torch
from jax import export
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._sympy.functions import FloorDiv, Mod

from bridge.arrays import PLAIN
from bridge.avals import Avals
from bridge.dtypes import FLOAT4_PACKED, torch_dtype
from bridge.interpretation.ref_usage import subjaxprs
from bridge.program import Program, array_shape


def outputs(program: Program, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Empty results (contiguous, as the real ones) on the device of the inputs."""
    device = _device(program, tensors)
    if not _symbols(tensors):
        shapes = [(o.shape, o.dtype) for o in program.results(_static(program, tensors))]
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
        return evaluate(_static(program, tensors))
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
        outs = program.new_results(symbolic.avals(program, tensors))
        return [(symbolic.torch_shape(o.shape), o.dtype) for o in outs]
    except Exception:
        found = _explained(program, tensors)
        if found is not None:
            return found
    return [(o.shape, o.dtype) for o in program.results(_static(program, tensors))]


def _static(program: Program, tensors: Sequence[torch.Tensor]) -> Avals:
    """The inputs with their sizes as numbers; torch compiles again for others where they were symbolic."""
    shapes = tuple(tuple(int(n) for n in array_shape(t)) for t in tensors)
    return program.avals_of(shapes, program.dtypes(tensors), program.is_wide(tensors))


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
        return program.avals_of(shapes, program.dtypes(tensors), program.is_wide(tensors))

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
_LARGE, _ENDLESS = 4096, 2**30


def _explained(program: Program, tensors: Sequence[torch.Tensor]) -> list[tuple[Any, Any]] | None:
    """Result shapes as formulas that hold at every probed size, or None.

    The sizes probed reach from 2 to an upper end, and torch is made to compile again for sizes
    outside of that: a function may change its mind at some size, and both ends tell.
    """
    base = _hints(tensors)
    for low, high in _ranges(program, tensors, base):
        points = _points(base, low, high)
        try:
            results = [program.results(_at(program, tensors, p)) for p in points]
        except Exception:
            continue
        sizes = _sizes(tensors, points)
        shapes = _formulas(results, sizes)
        if shapes is not None:
            for size, values in sizes:
                # Asking a symbolic size is what makes torch guard on the answer.
                if size < min(values) or (max(values) < _ENDLESS and size > max(values)):
                    return None
            return shapes
    return None


def _ranges(
    program: Program, tensors: Sequence[torch.Tensor], base: dict[Any, int]
) -> Iterable[tuple[dict[Any, int], dict[Any, int]]]:
    """Lower and upper ends to try, the widest first."""
    two = {s: min(2, n) for s, n in base.items()}
    large = {s: max(_LARGE, 4 * n) for s, n in base.items()}
    # A program that has as many operations at large sizes as here has no Python loop over a size, so
    # that it can be traced at any.
    if _count(program, _at(program, tensors, large)) == _count(program, _at(program, tensors, base)):
        yield two, dict.fromkeys(base, _ENDLESS)
    yield two, large
    yield base, {s: n + _SHIFTS[-1] for s, n in base.items()}


def _count(program: Program, avals: Avals) -> int | None:
    """How many operations the program has at these sizes; None if it can't be traced."""

    def operations(jaxpr: Any) -> int:
        return sum(1 + sum(map(operations, subjaxprs(eqn.params))) for eqn in jaxpr.eqns)

    try:
        return program.abstract(lambda fn, structs: operations(jax.make_jaxpr(fn)(*structs).jaxpr), avals)
    except Exception:
        return None


def _points(base: dict[Any, int], low: dict[Any, int], high: dict[Any, int]) -> list[dict[Any, int]]:
    """Sizes to probe: the ones at hand, each symbol moved alone, all moved at once, and the ends."""
    points = [base, low, high]
    for symbol, shift in itertools.product(base, _SHIFTS[1:]):
        points.append({**base, symbol: base[symbol] + shift})
    for symbol in base:
        points += [{**base, symbol: low[symbol]}, {**base, symbol: high[symbol]}]
    for k in range(4):
        points.append({s: n + _SHIFTS[(i * 3 + k) % len(_SHIFTS)] for i, (s, n) in enumerate(base.items())})
    return points


def _formulas(results: Sequence[Any], sizes: Any) -> list[tuple[Any, Any]] | None:
    first = results[0]
    if any(
        len(r) != len(first) or any(a.ndim != b.ndim for a, b in zip(r, first, strict=True)) for r in results
    ):
        return None
    shapes = []
    for index, out in enumerate(first):
        shape = [_formula([r[index].shape[axis] for r in results], sizes) for axis in range(out.ndim)]
        if any(n is None for n in shape):
            return None
        shapes.append((tuple(shape), out.dtype))
    return shapes


def _sizes(
    tensors: Sequence[torch.Tensor], points: Sequence[dict[Any, int]]
) -> list[tuple[torch.SymInt, list[int]]]:
    """The symbolic sizes and element counts of the inputs, each with its values at the probed points."""
    found = {
        n.node.expr: n
        for t in tensors
        for n in (*array_shape(t), t.numel())
        if isinstance(n, torch.SymInt) and free_symbols(n)
    }
    return [(n, [_value(expression, p) for p in points]) for expression, n in found.items()]


def _formula(seen: Sequence[int], sizes: Sequence[tuple[torch.SymInt, list[int]]]) -> Any | None:
    """The formula in the sizes that gives `seen` at every probed point: the first that does, or None."""
    if len(set(seen)) == 1:
        return seen[0]
    for size, values in (entry for entry in sizes if len(set(entry[1])) > 1):
        slope, constant = _line(values, seen)
        if all(slope * v + constant == n for n, v in zip(seen, values, strict=True)):
            return int(slope) * size + int(constant)
    for (size, values), multiple in itertools.product(sizes, _MULTIPLES):
        if all(-(-v // multiple) * multiple == n for n, v in zip(seen, values, strict=True)):
            return (size + (multiple - 1)) // multiple * multiple  # pyright: ignore[reportOperatorIssue]
    return _sum_of_sizes(seen, sizes)


def _line(values: Sequence[int], seen: Sequence[int]) -> tuple[Fraction, Fraction]:
    """Slope and constant through the first two points that differ, exactly."""
    first = values[0]
    other = next(i for i, v in enumerate(values) if v != first)
    slope = Fraction(seen[other] - seen[0], values[other] - first)
    return (slope, seen[0] - slope * first) if slope.denominator == 1 else (Fraction(0), Fraction(0))


def _sum_of_sizes(seen: Sequence[int], sizes: Sequence[tuple[torch.SymInt, list[int]]]) -> Any | None:
    """A sum of sizes with whole coefficients, found by least squares and checked exactly, or None."""
    columns = np.array([values for _, values in sizes] + [[1] * len(seen)], dtype=float).T
    found = np.linalg.lstsq(columns, np.array(seen, dtype=float), rcond=None)[0]
    *slopes, constant = (int(n) for n in found.round())
    for i, n in enumerate(seen):
        if sum(k * values[i] for k, (_, values) in zip(slopes, sizes, strict=True)) + constant != n:
            return None
    return sum((k * size for k, (size, _) in zip(slopes, sizes, strict=True) if k), constant)


def _hints(tensors: Sequence[torch.Tensor]) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for t in tensors:
        for n in t.shape:
            for symbol in free_symbols(n) if isinstance(n, torch.SymInt) else ():
                hint = n.node.shape_env.optimization_hint(symbol, fallback=16)  # pyright: ignore[reportAttributeAccessIssue]
                found[symbol] = max(int(hint), 2)
    return found


def _at(program: Program, tensors: Sequence[torch.Tensor], values: dict[Any, int]) -> Avals:
    """The inputs with numbers in place of symbols."""

    def number(size: Any) -> int:
        return _value(size.node.expr, values) if isinstance(size, torch.SymInt) else int(size)

    shapes = tuple(tuple(number(n) for n in array_shape(t)) for t in tensors)
    return program.avals_of(shapes, program.dtypes(tensors), program.is_wide(tensors))


def _value(expression: Any, values: dict[Any, int]) -> int:
    """An expression of sizes with numbers for its symbols. Most are one symbol, and sympy takes its time."""
    found = values.get(expression)
    return int(expression.subs(values)) if found is None else found

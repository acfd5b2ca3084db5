"""The values that decide what a kernel does: its scalar-prefetch operands and dynamic grid sizes.

They are computed by running the part of the JAX function that leads to them, with the values that are known:
constants, and arguments whose values are given. So the block tables of a sparse kernel, or the group offsets
that a wrapper derives from group sizes, reach the schedule as they would on the chip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.schedule.hlo import HloInstruction, kernel_names
from autotune.schedule.layout import words

MAX_ELEMENTS = 1 << 22
"""Arrays larger than this are not computed: scalar operands must fit in SMEM, which holds 2^18 words."""


@dataclass(frozen=True)
class KernelCall:
    """One `pallas_call` of a traced function.

    Attributes:
        name: name of the kernel.
        operands: value of each operand; None if it is not known.
        shapes: shape of each operand.
        grid: sizes of the grid; None for a dynamic one whose value is not known.
    """

    name: str
    operands: tuple[np.ndarray | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    grid: tuple[int | None, ...]

    @property
    def grid_steps(self) -> int | None:
        """Steps of the grid; None if a size is not known."""
        sizes = [size for size in self.grid if size is not None]
        return math.prod(sizes) if len(sizes) == len(self.grid) else None


def kernel_calls(
    closed_jaxpr: Any, known: Mapping[int, np.ndarray], ranks: int = 1
) -> tuple[tuple[KernelCall, ...], ...]:
    """For each device, the kernels of a traced function in order, with what is known of their operands.

    What leads to the operands is compiled for the CPU and run once for each device.

    Args:
        closed_jaxpr: what `jax.make_jaxpr` returns.
        known: values of arguments, by their position among the flat arguments.
        ranks: number of devices of the mesh.
    """
    import jax

    jaxpr = closed_jaxpr.jaxpr
    found: list[Any] = []

    def operands(given: Mapping[int, Any], rank: Any) -> list[list[Any]]:
        inside = _Inside([], rank)
        arguments = [given.get(index) for index in range(len(jaxpr.invars))]
        _evaluate(jaxpr, closed_jaxpr.consts, arguments, inside)
        found[:] = [equation for equation, _ in inside.calls]
        return [inputs for _, inputs in inside.calls]

    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(operands)
        by_rank = [compiled(dict(known), np.int32(rank)) for rank in range(ranks)]
    return tuple(
        tuple(
            _kernel_call(equation, [None if value is None else np.asarray(value) for value in inputs])
            for equation, inputs in zip(found, values, strict=True)
        )
        for values in by_rank
    )


def operand_words(
    calls: Sequence[KernelCall], module: Mapping[str, HloInstruction]
) -> tuple[dict[str, tuple[np.ndarray | None, ...]], dict[str, KernelCall], list[str]]:
    """Operands of each kernel of a compiled module as they lie in memory.

    Returns words by the name of the HLO instruction, the call each instruction stems from, and the names of
    instructions that could not be matched with a call.
    """
    remaining = list(calls)
    laid_out: dict[str, tuple[np.ndarray | None, ...]] = {}
    matched: dict[str, KernelCall] = {}
    unmatched: list[str] = []
    for name in kernel_names(module):
        types = [module[operand].results for operand in module[name].operands if operand in module]
        shapes = tuple(result[0].shape if len(result) == 1 else None for result in types)
        # A derivative has words around the name; a kernel without one is called after its function.
        alike = [call for call in remaining if call.shapes == shapes]
        named = [call for call in alike if call.name and _hlo_name(call.name) in name]
        call = next(iter(named or [call for call in alike if not call.name]), None)
        if call is None:
            unmatched.append(name)
            continue
        remaining = [other for other in remaining if other is not call]
        matched[name] = call
        laid_out[name] = tuple(
            words(value, result[0]) if value is not None and value.dtype.kind in "iub" else None
            for value, result in zip(call.operands, types, strict=True)
        )
    return laid_out, matched, unmatched


def _hlo_name(name: str) -> str:
    """A kernel's name as HLO spells it."""
    return "".join(c if c.isalnum() or c in "_.-" else "_" for c in name)


# Evaluation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inside:
    """Where an evaluation is.

    Attributes:
        calls: kernels found until now, with their operands.
        rank: number of the device; may be a traced value.
        axes: size of each axis of the mesh, inside a `shard_map`.
    """

    calls: list[tuple[Any, list[Any]]]
    rank: Any
    axes: Mapping[str, int] | None = None

    def place(self, names: Any) -> Any:
        """The place of the device along one axis of the mesh, or several in order."""
        assert self.axes is not None
        place = 0
        for name in (names,) if isinstance(names, str) else names:
            inner = math.prod(size for after, size in _after(self.axes, name))
            place = place * self.axes[name] + self.rank // inner % self.axes[name]
        return place


def _after(axes: Mapping[str, int], name: str) -> list[tuple[str, int]]:
    items = list(axes.items())
    return items[list(axes).index(name) + 1 :]


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], inside: _Inside) -> list[Any]:
    """Values of a jaxpr's results, None where not known; collects its kernels with their operands."""
    values: dict[Any, Any] = {var: _small(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return _small(atom.val) if hasattr(atom, "val") else values.get(atom)

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        results = _results(equation, inputs, inside)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: Any, inputs: list[Any], inside: _Inside) -> Sequence[Any]:
    unknown = [None] * len(equation.outvars)
    name = equation.primitive.name
    if name == "pallas_call":
        inside.calls.append((equation, inputs))
        return unknown
    if name == "shard_map":
        _evaluate_shard(equation, inputs, inside)
        return unknown
    if inside.axes is not None and (across := _across_devices(equation, inputs, inside)) is not None:
        return across
    kernels = _inner_kernels(equation)
    inner = _called(equation) if kernels or any(value is None for value in inputs) else None
    if inner is None and inside.axes is not None:  # there may be something of the mesh in it
        inner = _called(equation)
    if inner is not None:
        jaxpr, consts = inner
        return _evaluate(jaxpr, consts, inputs[len(inputs) - len(jaxpr.invars) :], inside)
    inside.calls.extend((kernel, [None] * len(kernel.invars)) for kernel in kernels)
    if kernels or any(value is None for value in inputs):
        return unknown
    if any(math.prod(getattr(atom.aval, "shape", ())) > MAX_ELEMENTS for atom in equation.outvars):
        return unknown
    results = equation.primitive.bind(*inputs, **equation.params)
    return list(results) if equation.primitive.multiple_results else [results]


def _evaluate_shard(equation: Any, inputs: Sequence[Any], inside: _Inside) -> None:
    """The kernels inside a `shard_map`, each device with its own part of the operands."""
    mesh, jaxpr = equation.params["mesh"], equation.params["jaxpr"]
    here = replace(inside, axes=dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))
    parts = [
        None if value is None else _part(value, spec, here)
        for value, spec in zip(inputs, equation.params["in_specs"], strict=True)
    ]
    _evaluate(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), parts, here)


def _part(value: Any, spec: Any, inside: _Inside) -> Any:
    """The part of an array that one device has."""
    import jax

    assert inside.axes is not None
    for dimension, names in enumerate(spec):
        if names:
            count = math.prod(inside.axes[n] for n in ((names,) if isinstance(names, str) else names))
            size = value.shape[dimension] // count
            value = jax.lax.dynamic_slice_in_dim(value, inside.place(names) * size, size, dimension)
    return value


def _across_devices(equation: Any, inputs: Sequence[Any], inside: _Inside) -> Sequence[Any] | None:
    """Results of what has to do with the mesh; None for everything else."""
    name, params = equation.primitive.name, equation.params
    if name == "axis_index":
        return [np.int32(0) + inside.place(params["axis_name"])]
    if name in ("pvary", "pcast"):  # says only that devices differ
        return inputs
    if any(key in params for key in ("axes", "axis_name")) and _names_an_axis(params, inside):
        return [None] * len(equation.outvars)
    if any(_uses_mesh(jaxpr) for jaxpr in _jaxprs(params)) and _called(equation) is None:
        kernels = _inner_kernels(equation)
        inside.calls.extend((kernel, [None] * len(kernel.invars)) for kernel in kernels)
        return [None] * len(equation.outvars)
    return None


def _names_an_axis(params: Mapping[str, Any], inside: _Inside) -> bool:
    """Whether an axis of the mesh is meant; `axes` of a reduction are numbers."""
    named = params.get("axis_name", params.get("axes"))
    names = named if isinstance(named, (tuple, list)) else (named,)
    return any(name in (inside.axes or {}) for name in names)


def _uses_mesh(jaxpr: Any) -> bool:
    """Whether something in a jaxpr asks for the place in the mesh, or for other devices."""
    return any(
        "axis_name" in equation.params or any(_uses_mesh(inner) for inner in _jaxprs(equation.params))
        for equation in jaxpr.eqns
    )


def _called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr an equation runs exactly once on its own operands, with its constants."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        jaxpr = equation.params.get(key)
        if jaxpr is not None and equation.primitive.name not in ("scan", "while", "cond", "shard_map"):
            return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "jaxpr") else (jaxpr, [])
    return None


def _inner_kernels(equation: Any) -> list[Any]:
    """Kernels inside loops and branches: they run, but not with values that are the same every time."""
    found: list[Any] = []
    pending = list(_jaxprs(equation.params))
    while pending:
        for inner in pending.pop().eqns:
            if inner.primitive.name == "pallas_call":
                found.append(inner)
            else:
                pending += _jaxprs(inner.params)
    return found


def _jaxprs(params: Mapping[str, Any]) -> list[Any]:
    values = [
        v for value in params.values() for v in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    closed = [value.jaxpr for value in values if hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns")]
    return closed + [value for value in values if hasattr(value, "eqns") and not hasattr(value, "jaxpr")]


def _kernel_call(equation: Any, inputs: list[np.ndarray | None]) -> KernelCall:
    mapping = equation.params["grid_mapping"]
    dynamic = iter(inputs[: mapping.num_dynamic_grid_bounds])
    grid: list[int | None] = []
    for size in mapping.grid:
        if isinstance(size, int):
            grid.append(size)
        else:
            value = next(dynamic, None)
            grid.append(None if value is None else int(value.reshape(-1)[0]))
    return KernelCall(
        equation.params["name"] or "",
        tuple(inputs),
        tuple(tuple(atom.aval.shape) for atom in equation.invars),
        tuple(grid),
    )


def _small(value: Any) -> Any:
    """A value, unless it is larger than a scalar operand can be, or no array of numbers."""
    dtype = getattr(value, "dtype", None)
    if getattr(value, "size", 1) > MAX_ELEMENTS or (dtype is not None and dtype.kind not in "iubfV"):
        return None
    return value

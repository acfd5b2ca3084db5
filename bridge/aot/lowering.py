"""From a function and abstract arguments to the MLIR module that the TPU compiler takes.

This happens in the calling process, on JAX's CPU backend, and asks for no TPU: the function is traced under
an abstract mesh whose device is the chip, so code that asks JAX about the TPU is answered for the chip.
"""

from __future__ import annotations

import functools
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from bridge.aot.avals import describe, is_aval, to_aval
from bridge.aot.explain import explain_lowering, known_refusal
from bridge.chips import Chip
from bridge.interpretation import backend_started, compiling_for, leave_libtpu_alone


@dataclass(frozen=True)
class Lowered:
    """A module, and what the compiler must know besides.

    Attributes:
        module: MLIR bytecode.
        shardy: whether it was lowered for the Shardy partitioner.
        jaxpr: the traced function, a `ClosedJaxpr`.
    """

    module: bytes
    shardy: bool
    jaxpr: Any

    def kernels(self) -> list[tuple[str, str]]:
        """Name and "file:line" of each `pallas_call` in it."""
        return [(_name(kernel), line) for line, kernel in _kernels(self.jaxpr.jaxpr)]


def lower(
    fn: Any,
    avals: Sequence[Any],
    chip: Chip,
    mesh: AbstractMesh,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Lowered:
    """Trace and lower `fn(*avals)` for the devices of `mesh`, which has the chip as its abstract device.

    Raises:
        KernelRefused: JAX refuses to lower it for a TPU.
        RuntimeError: this process was forked from one in which JAX ran.
        Exception: what the function itself raises while it is traced.
    """
    if _orphaned:
        raise RuntimeError(
            "this process was forked after JAX had started, and JAX's threads do not survive a fork; start "
            'it with multiprocessing.get_context("spawn")'
        )
    leave_libtpu_alone()
    call = _Call(fn, avals, mesh, in_specs, out_specs)
    with jax.enable_x64(call.wide), compiling_for(chip.name), jax.sharding.use_abstract_mesh(mesh):
        try:
            traced = call.trace()
        except Exception as error:
            if known_refusal(error):
                raise explain_lowering(error, chip) from error
            error.add_note(f"(while tracing {call.name} for {chip.name} with {call.describe()})")
            raise
        try:
            lowered = traced.lower(lowering_platforms=("tpu",))
        except Exception as error:
            where, kernel = _place(traced.jaxpr.jaxpr, str(error))
            raise explain_lowering(error, chip, where=where, kernel=kernel) from error
        module = io.BytesIO()
        lowered.compiler_ir("stablehlo").operation.write_bytecode(module)  # pyright: ignore[reportOptionalMemberAccess]
    return Lowered(module.getvalue(), _uses_shardy(), traced.jaxpr)


_orphaned = False  # whether this process was forked from one in which JAX ran


def _after_fork() -> None:
    global _orphaned
    _orphaned = backend_started()


os.register_at_fork(after_in_child=_after_fork)


def _uses_shardy() -> bool:
    return bool(jax.config.jax_use_shardy_partitioner)  # pyright: ignore[reportAttributeAccessIssue]


class _Call:
    """A function with its arguments: the arrays are traced, everything else is passed as it is."""

    def __init__(
        self, fn: Any, avals: Sequence[Any], mesh: AbstractMesh, in_specs: Any, out_specs: Any
    ) -> None:
        if isinstance(avals, str) or not isinstance(avals, Sequence):
            raise TypeError(f"avals must be a sequence, one entry for each argument, got {avals!r}")
        op = _jax_op(fn)
        self._fn = fn if op is None and not hasattr(fn, "fn") else fn.fn
        if not callable(self._fn):
            raise TypeError(
                f"expected a JAX function, a jax_op or a kernel of a catalog, got {type(fn).__name__}"
            )
        self.name = getattr(fn, "__name__", None) or getattr(fn, "name", None) or type(fn).__name__
        self._leaves, self._tree = jax.tree_util.tree_flatten(list(avals), is_leaf=lambda x: x is None)
        self._places = [place for place, leaf in enumerate(self._leaves) if is_aval(leaf)]
        self._arrays = [to_aval(self._leaves[place]) for place in self._places]
        forced = None if op is None else op._definition.x64
        self.wide = _keeps_64_bits(self._arrays) if forced is None else forced
        self._donated = _donated(op, avals)
        self._shard(mesh, in_specs, out_specs)

    def trace(self) -> Any:
        """The traced function: one that is jitted already keeps its own options, such as donation."""
        if isinstance(self._fn, jax.stages.Wrapped) and self._out_shardings is None:
            return self._fn.trace(*self._arguments(self._arrays))
        options = {} if self._out_shardings is None else {"out_shardings": self._out_shardings}
        return jax.jit(self._flat(), donate_argnums=self._donated, **options).trace(*self._arrays)

    def describe(self) -> str:
        return ", ".join(map(describe, self._arrays)) or "no arrays"

    def _flat(self) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            return self._fn(*self._arguments(arrays))

        call.__name__ = call.__qualname__ = self.name
        return call

    def _arguments(self, arrays: Sequence[Any]) -> list[Any]:
        leaves = list(self._leaves)
        for place, array in zip(self._places, arrays, strict=True):
            leaves[place] = array
        return jax.tree_util.tree_unflatten(self._tree, leaves)

    def _shard(self, mesh: AbstractMesh, in_specs: Any, out_specs: Any) -> None:
        self._out_shardings = None if out_specs is None else _shardings(mesh, out_specs)
        if in_specs is None:
            return
        specs = [in_specs] if _is_spec(in_specs) else list(in_specs)
        if len(specs) != len(self._arrays):
            raise ValueError(
                f"in_specs must have one PartitionSpec for each array argument, {len(self._arrays)}, "
                f"got {len(specs)}"
            )
        self._arrays = [
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=_shardings(mesh, spec))
            for array, spec in zip(self._arrays, specs, strict=True)
        ]


def _keeps_64_bits(arrays: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Whether JAX must keep 64 bits: it does already, or an array has them."""
    wide = {np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")}
    ambient = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    return bool(ambient) or any(array.dtype in wide for array in arrays)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _shardings(mesh: AbstractMesh, specs: Any) -> Any:
    named = functools.partial(NamedSharding, mesh)
    return jax.tree_util.tree_map(named, specs, is_leaf=_is_spec)


def _jax_op(fn: Any) -> Any:
    """`fn` if it is an op of the bridge, else None. Torch is not imported to find out."""
    module = sys.modules.get("bridge.op")
    return fn if module is not None and isinstance(fn, module.JaxOp) else None


def _donated(op: Any, avals: Sequence[Any]) -> tuple[int, ...]:
    """Which arrays, counted over all arguments, an op uses up."""
    if op is None or not op._donated:
        return ()
    owners = [
        argument
        for argument, value in enumerate(avals)
        for leaf in jax.tree_util.tree_leaves(value)
        if is_aval(leaf)
    ]
    return tuple(place for place, argument in enumerate(owners) if argument in op._donated)


# Places -------------------------------------------------------------------------------------------


def _place(jaxpr: Any, message: str) -> tuple[str, str]:
    """Where the kernel that can't be lowered stands, and its name; empty if that is not clear.

    For a primitive that is missing, its own line; else the line of the kernel, if there is only one.
    """
    kernels = list(_kernels(jaxpr))
    named = message.rsplit("Pallas TPU lowering for", 1)
    if len(named) == 2:
        primitive = named[1].partition(":")[2].split(".")[0].strip()
        for outer, kernel in kernels:
            for line, equation in _with_lines(kernel.params["jaxpr"], outer):
                if equation.primitive.name == primitive:
                    return line, _name(kernel)
    return (kernels[0][0], _name(kernels[0][1])) if len(kernels) == 1 else ("", "")


def _name(kernel: Any) -> str:
    return kernel.params.get("name") or kernel.params["jaxpr"].debug_info.func_name


def _kernels(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    return (found for found in _with_lines(jaxpr, "") if found[1].primitive.name == "pallas_call")


def _with_lines(jaxpr: Any, outer: str) -> Iterator[tuple[str, Any]]:
    """All equations, with the user's line that each comes from: its own, or that of what contains it."""
    for equation in jaxpr.eqns:
        found = re.match(r"(.+):(\d+):\d+ \(", source_info_util.summarize(equation.source_info))
        line = f"{found[1]}:{found[2]}" if found else outer
        yield line, equation
        for inner in jax.tree_util.tree_leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _with_lines(inner, line)

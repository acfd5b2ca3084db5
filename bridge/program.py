"""Programs: the JAX functions behind an op, each with a name it can be built again from.

An op has one base program per structure and static values. Gradients, `vmap` and their
compositions are programs derived from it: functions over a flat list of arrays, with names like

    ns::op[[-1],[{"float":"0x1.0p+0"}]]|vmap(0,-)|fwd(0)

A name travels through `torch.compile` graphs as a string, and `resolve` builds the program from it
in a process that has never seen it (the op must be registered there).

A program knows several *roots*, functions that may stand at its base: the kernel; the kernel with
the gradient of the op's reference; the reference alone. `trace` takes the first one that works.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.core import eval_jaxpr

from bridge.avals import Avals
from bridge.counters import KernelUse, count_compile, counters
from bridge.dtypes import WIDE, jax_dtype
from bridge.interpretation import (
    Interpreted,
    current_mode,
    interpret_kernels,
    interpreter_lock,
    needs_lock,
    tracing_chip,
)
from bridge.interpretation.precision import in_passes
from bridge.precision import current_passes
from bridge.ranks import specs
from bridge.ranks.specs import Sharding
from bridge.roots import (
    Flat,
    Rule,
    WrongReference,
    checked_reference,
    flat_root,
    with_reference_gradient,
    with_vjp,
)
from bridge.schema import ONE, OpSignature, Structure
from bridge.shapes import shapes_only
from bridge.statics import key_of

MAX_SHAPES = 512
"""Compiled shapes kept per program; past it, all are dropped and compiled again when needed."""
MAX_PROGRAMS = 256
"""Base programs (structures times static values) kept per op, least recently used dropped first."""


_X64, _REFERENCE = "@x64", "@reference"


class Definition(NamedTuple):
    """What an op is on the JAX side."""

    name: str
    signature: OpSignature
    fn: Callable[..., Any]
    reference: Callable[..., Any] | None
    vjp: Rule | None
    x64: bool | None
    sharding: Sharding | None = None
    """How arrays lie on a mesh of ranks, for an op that runs on several; its function sees whole arrays."""


class NotDifferentiable(NotImplementedError):
    """The op has no gradient: JAX can't derive one, and none was given."""


class Program:
    """A flat JAX function derived from an op, with its compiled forms.

    Attributes:
        definition: the op at the base.
        name: stable text; `resolve(name)` gives an equal program.
        flat: maps a root (the base function of flat arrays) to this program's function.
        variant: settings of the calling thread that change what is computed: "@x64" if it had JAX keep 64
            bits, "@reference" if the op's reference stands in for its function. It is part of the name:
            forward and backward of one call agree on it, in whatever thread each is run.
        differentiates: whether the function takes derivatives of the root.
    """

    def __init__(
        self,
        definition: Definition,
        name: str,
        flat: Callable[[Flat], Flat],
        *,
        structure: Structure,
        statics: tuple[Any, ...],
        variant: str = "",
        differentiates: bool = False,
        derived_from: tuple[Program, str] | None = None,
    ) -> None:
        self.definition = definition
        self.name = name
        self.flat = flat
        self.structure = structure
        self.statics = statics
        self.variant = variant
        self.differentiates = differentiates
        self.derived_from = derived_from
        """The program that this one is derived from, and how, as in the name; None for an op's own."""
        self.wide: bool | None = definition.x64
        """Whether JAX must keep 64 bits; None if that depends on the tensors."""
        if self.wide is None and (_X64 in variant or any(map(_is_wide, statics))):
            self.wide = True
        self._derived: dict[str, Program] = {}
        self._compiled: dict[tuple[str, int], _Compiled] = {}
        self.memo: dict[Any, Any] = {}
        """Results of abstract evaluation, by kind and avals; bounded by `remember`."""
        programs_by_name[name] = self

    def __repr__(self) -> str:
        return f"Program({self.name})"

    def derive(self, suffix: str, flat: Callable[[Flat], Flat], *, differentiates: bool = False) -> Program:
        """The program `name|suffix` whose function is `flat(function of this program)`."""
        found = self._derived.get(suffix)
        if found is None:
            inner = self.flat
            found = self._derived[suffix] = Program(
                self.definition,
                f"{self.name}|{suffix}",
                lambda root: flat(inner(root)),
                structure=self.structure,
                statics=self.statics,
                variant=self.variant,
                differentiates=self.differentiates or differentiates,
                derived_from=(self, suffix),
            )
        return found

    def place(self, index: int) -> str:
        """Input `index` in words, for an error message: the op, and the argument where it is one."""
        names = [
            p.name
            for p, count in zip(self.definition.signature.tensor_parameters, self.structure, strict=True)
            for _ in range(0 if count is None else 1 if count == ONE else count)
        ]
        return f"{self.definition.name}: argument {names[index]!r}" if index < len(names) else self.name

    def chosen_device(self) -> torch.device:
        """Where the results of an op without tensor arguments go: its torch.device argument, else cpu."""
        return next((s for s in self.statics if isinstance(s, torch.device)), torch.device("cpu"))

    # ------------------------------------------------------------------ abstract evaluation

    def avals(self, tensors: Sequence[torch.Tensor]) -> Avals:
        """What JAX will see of these tensors (shapes may hold symbolic sizes)."""
        return self.avals_of(tuple(map(array_shape, tensors)), self.dtypes(tensors), self.is_wide(tensors))

    def avals_of(
        self, shapes: tuple[tuple[Any, ...], ...], dtypes: tuple[np.dtype, ...], wide: bool
    ) -> Avals:
        """What JAX will see of tensors of these shapes: of several ranks' together if the op has a mesh."""
        sharding = self.definition.sharding
        if sharding is None:
            return Avals(shapes, dtypes, wide)
        found = specs.of_inputs(self, shapes, dtypes, wide)
        whole = tuple(
            specs.global_shape(shape, spec, sharding.mesh, self.place(index))
            for index, (shape, spec) in enumerate(zip(shapes, found, strict=True))
        )
        return Avals(whole, dtypes, wide, tuple(found))

    def results(self, avals: Avals) -> Sequence[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the results, on one rank if the op has a mesh. Raises what tracing raises."""
        return self._on_a_rank(self.out_avals(avals), avals)

    def new_results(self, avals: Avals) -> Sequence[jax.ShapeDtypeStruct]:
        """The same, not remembered: for symbolic sizes."""
        return self._on_a_rank(self._out_avals(avals), avals)

    def _on_a_rank(
        self, outs: Sequence[jax.ShapeDtypeStruct], avals: Avals
    ) -> Sequence[jax.ShapeDtypeStruct]:
        sharding = self.definition.sharding
        if sharding is None:
            return outs
        found = specs.of_outputs(self, avals)
        name = self.definition.name
        shapes = [
            specs.local_shape(out.shape, spec, sharding.mesh, f"{name}: result {i}")
            for i, (out, spec) in enumerate(zip(outs, found, strict=True))
        ]
        return [jax.ShapeDtypeStruct(s, out.dtype) for s, out in zip(shapes, outs, strict=True)]

    def dtypes(self, tensors: Sequence[torch.Tensor]) -> tuple[np.dtype, ...]:
        """The dtypes JAX will see."""
        dtypes = tuple(jax_dtype(t.dtype) for t in tensors)
        return tuple(_NARROW.get(d, d) for d in dtypes) if self.definition.x64 is False else dtypes

    def is_wide(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether JAX must keep 64 bits in this call."""
        return any(t.dtype in WIDE for t in tensors) if self.wide is None else self.wide

    def out_avals(self, avals: Avals) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the results. Raises what tracing the function raises."""
        return self.remember(("out", avals), lambda: self._out_avals(avals))

    def _out_avals(self, avals: Avals) -> tuple[jax.ShapeDtypeStruct, ...]:
        def shapes(fn: Flat, structs: list[Any]) -> Any:
            with shapes_only():
                return jax.eval_shape(fn, *structs)

        return tuple(self.abstract(shapes, avals))

    def remember(self, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, kept under `key` (a bounded memory; symbolic sizes are not kept)."""
        try:
            return self.memo[key]
        except KeyError:
            pass
        value = compute()
        if len(self.memo) >= 4 * MAX_SHAPES:
            self.memo.clear()
        self.memo[key] = value
        return value

    def abstract(
        self, evaluate: Callable[[Flat, list[Any]], Any], avals: Avals, *, differentiates: bool | None = None
    ) -> Any:
        """`evaluate(function, abstract inputs)` with the first root that it works with.

        The roots after the first are for evaluations that take derivatives (by default, as this
        program does): the function itself may have none (a bare pallas_call), its reference does.
        """
        if differentiates is None:
            differentiates = self.differentiates
        errors: list[Exception] = []
        for root in self._roots(differentiates):
            try:
                with jax.enable_x64(avals.wide), self._context():
                    return evaluate(self.flat(root), self._structs(avals))
            except Exception as error:
                if not differentiates or isinstance(error, WrongReference):
                    error.add_note(f"(while tracing {self.definition.name} with {_describe(avals)})")
                    raise
                errors.append(error)
        raise NotDifferentiable(
            f"{self.definition.name} has no gradient: {_one_line(errors[0])}. " + self._gradient_advice()
        ) from errors[0]

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        sharding = self.definition.sharding
        if sharding is None:
            return tracing_chip()
        return jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh)

    def _structs(self, avals: Avals) -> list[jax.ShapeDtypeStruct]:
        sharding = self.definition.sharding
        if sharding is None or not sharding.explicit:
            return avals.structs()
        return [
            jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named(spec))
            for shape, dtype, spec in zip(avals.shapes, avals.dtypes, avals.specs, strict=True)
        ]

    def working(self, arrays: Sequence[Any]) -> Flat:
        """This program's function on the first root that works with these arrays (or tracers)."""
        wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
        avals = Avals(tuple(a.shape for a in arrays), tuple(a.dtype for a in arrays), wide)
        return self.abstract(lambda fn, structs: (fn, jax.eval_shape(fn, *structs))[0], avals)

    def _gradient_advice(self) -> str:
        if self.definition.vjp is not None:
            return "The gradient is the one given with vjp=(fwd, bwd)"
        if self.definition.reference is not None:
            return "Its reference has no gradient either; give jax_op a vjp=(fwd, bwd)."
        return (
            "JAX can't differentiate a bare pallas_call in reverse mode: give jax_op reference= (a plain jnp "
            "function of the same signature) or vjp=(fwd, bwd), use jax.custom_vjp in the function, or "
            "call register_autograd on the op"
        )

    def _roots(self, differentiates: bool) -> tuple[Flat, ...]:
        """The functions that may stand at the base, in order of preference."""
        definition = self.definition
        kernel = self._root(definition.fn)
        reference = None
        if definition.reference is not None:
            reference = checked_reference(kernel, self._root(definition.reference), definition.name)
            if _REFERENCE in self.variant:
                return (reference,)
        if definition.vjp is not None:
            return (with_vjp(kernel, definition.vjp, definition.signature, self.structure, self.statics),)
        if reference is not None and differentiates:
            return (kernel, with_reference_gradient(kernel, reference))
        return (kernel,)

    def _root(self, fn: Callable[..., Any]) -> Flat:
        return flat_root(fn, self.definition.signature, self.structure, self.statics)

    # ------------------------------------------------------------------ execution

    def call(self, arrays: Sequence[Any], wide: bool) -> Sequence[jax.Array]:
        """Run the compiled function, compiling it for new shapes.

        How this thread wants kernels interpreted and matrix products computed is asked here, at the call: it
        changes no shape and nothing that a gradient keeps, so it is not part of the program.
        """
        setting = current_mode(), current_passes()
        compiled = self._compiled.get(setting)
        if compiled is None:
            compiled = self._compiled.setdefault(setting, _Compiled(self, *setting))
        return compiled(arrays, wide)


class _Compiled:
    """A program jitted in one interpretation mode, with matrix products in so many passes (0: exact)."""

    def __init__(self, program: Program, mode: str, passes: int) -> None:
        self._program = weakref.ref(program)  # the jitted function must not keep its program alive
        self._mode = mode
        self._passes = passes
        self._kernel_mode = mode
        self._locked = False
        self._shapes = 0
        self._thread = threading.local()
        # Two, so that what must hold the lock is never found compiled by a call that does not.
        self._jitted = jax.jit(self._trace)
        self._jitted_locked = jax.jit(self._trace_locked)

    def __call__(self, arrays: Sequence[Any], wide: bool) -> Sequence[jax.Array]:
        counters.calls += 1
        if self._locked or wide != jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            return self._guarded(arrays, wide)
        self._thread.traced = None
        try:
            return self._jitted(*arrays)
        except Exception as error:
            failure = error
        return self._again(arrays, wide, failure)  # outside of the handler, so that errors do not chain

    def _guarded(self, arrays: Sequence[Any], wide: bool) -> Sequence[jax.Array]:
        self._thread.traced = None
        with jax.enable_x64(wide):
            try:
                if not self._locked:
                    return self._jitted(*arrays)
                with interpreter_lock():
                    return jax.block_until_ready(self._jitted_locked(*arrays))
            except Exception as error:
                failure = error
        return self._again(arrays, wide, failure)

    def _again(self, arrays: Sequence[Any], wide: bool, error: Exception) -> Sequence[jax.Array]:
        """After a failed call: take the TPU interpreter where plain interpretation can't lower a kernel."""
        if isinstance(error, _NeedsLock):
            self._locked = True
            return self._guarded(arrays, wide)
        program = self._program()
        if program is not None and program.differentiates and "forward-mode autodiff (jvp)" in str(error):
            raise NotDifferentiable(
                f"{program.definition.name} has no forward-mode derivative (jvp): its gradient is a "
                f"jax.custom_vjp, which works in reverse mode alone; use grad, vjp or jacrev"
            ) from error
        if self._thread.traced in (None, "tpu") or not self._thread.kernels:
            if program is not None:
                error.add_note(f"(in the op {program.definition.name})")
            raise error
        self._kernel_mode, self._locked = "tpu", True
        try:
            return self._guarded(arrays, wide)
        except Exception:
            raise error from None

    def _trace(self, *arrays: Any) -> tuple[Any, ...]:
        return self._traced(arrays, locked=False)

    def _trace_locked(self, *arrays: Any) -> tuple[Any, ...]:
        return self._traced(arrays, locked=True)

    def _traced(self, arrays: Sequence[Any], *, locked: bool) -> tuple[Any, ...]:
        """Runs once per new shapes, under jit: trace, choose interpreters, count."""
        program, kernel_mode = self._program(), self._kernel_mode
        assert program is not None
        wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
        avals = Avals(tuple(a.shape for a in arrays), tuple(a.dtype for a in arrays), wide)
        jaxpr = program.abstract(lambda fn, structs: jax.make_jaxpr(fn)(*structs), avals)
        if self._passes:
            jaxpr = in_passes(jaxpr, self._passes)
        interpreted = interpret_kernels(jaxpr, kernel_mode)
        if needs_lock(interpreted) and not locked:
            raise _NeedsLock
        self._thread.traced, self._thread.kernels = kernel_mode, interpreted.kernels
        count_compile(program.definition.name, self._uses(program, interpreted))
        self._shapes += 1
        if self._shapes > MAX_SHAPES:
            self._shapes = 1
            self._jitted.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
            self._jitted_locked.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
        return tuple(eval_jaxpr(interpreted.jaxpr.jaxpr, interpreted.jaxpr.consts, *arrays))

    def _uses(self, program: Program, interpreted: Interpreted) -> tuple[KernelUse, ...]:
        """The kernels for the counters; a reason is given where it is not simply the mode asked for."""
        op, asked = program.definition.name, "tpu" if self._mode == "tpu" else "fast"
        return tuple(
            KernelUse(op, k.name, k.how, "" if k.how == asked else k.reason) for k in interpreted.kernels
        )


class _NeedsLock(Exception):
    """Raised while tracing: a kernel runs in the TPU interpreter, which one program at a time may use."""


# ---------------------------------------------------------------------------------- names

programs_by_name: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
"""Programs that are alive, by name."""
tables: dict[str, ProgramTable] = {}
"""The table of each registered op, by the op's name."""


class ProgramTable:
    """An op's base programs by structure and static values, least recently used dropped first."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._lock = threading.Lock()
        tables[definition.name] = self

    def get(
        self, key: Any, structure: Structure, statics: tuple[Any, ...], variant: str | None = None
    ) -> Program:
        """The base program of a bound call, in the variant that this thread's settings ask for."""
        if variant is None:
            variant = self._variant()
        if variant:
            key = (variant, key)
        program = self._programs.get(key)
        if program is not None:
            if len(self._programs) > 1:
                with self._lock:
                    if key in self._programs:
                        self._programs.move_to_end(key)
            return program
        with self._lock:
            if key in self._programs:  # another thread was quicker
                return self._programs[key]
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.popitem(last=False)
            text = self.definition.signature.dump(structure, statics)
            program = Program(
                self.definition,
                f"{self.definition.name}{variant}{text}",
                lambda root: root,
                structure=structure,
                statics=statics,
                variant=variant,
            )
            self._programs[key] = program
            return program

    def _variant(self) -> str:
        definition = self.definition
        ambient = definition.x64 is None and jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        variant = _X64 if ambient else ""
        if definition.reference is not None and current_mode() == "reference":
            variant += _REFERENCE
        return variant

    def from_text(self, text: str) -> tuple[Program, str]:
        """The base program described at the start of `text`, and the rest of the text."""
        start = text.index("[")
        variant, text = text[:start], text[start:]
        _, end = json.JSONDecoder().raw_decode(text)
        structure, statics = self.definition.signature.load(text[:end])
        key = (structure, tuple(map(key_of, statics)))
        return self.get(key, structure, statics, variant), text[end:]


# ---------------------------------------------------------------------------------- helpers

_NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
}


def array_shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape of a tensor as an array: packed float4 holds two values per byte."""
    if tensor.dtype is torch.float4_e2m1fn_x2:
        return (*tensor.shape[:-1], tensor.shape[-1] * 2)
    return tuple(tensor.shape)


def _is_wide(static: Any) -> bool:
    if isinstance(static, np.dtype):
        return static.itemsize == 8 and static.kind in "iuf" or static.itemsize == 16
    if isinstance(static, tuple):
        return any(map(_is_wide, static))
    if hasattr(static, "__dataclass_fields__"):
        return any(_is_wide(getattr(static, name)) for name in static.__dataclass_fields__)
    return False


def _describe(avals: Avals) -> str:
    return (
        ", ".join(f"{d}[{','.join(map(str, s))}]" for s, d in zip(avals.shapes, avals.dtypes, strict=True))
        or "no arrays"
    )


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"

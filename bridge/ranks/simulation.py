"""Runs a program of a distributed op for all ranks together, on devices that stand for theirs.

The program is one computation over a mesh; kernels in it find the other ranks' memory and semaphores through
JAX's TPU interpreter. One rank runs it, with the parts of all of them: see `meeting`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax._src import core
from jax.core import eval_jaxpr
from jax.sharding import Mesh, NamedSharding

from bridge.arrays import to_jax, to_torch
from bridge.avals import Avals
from bridge.counters import KernelUse, count_compile, counters
from bridge.interpretation import (
    KernelNotInterpretable,
    analysis,
    current_mode,
    interpret_kernels,
    interpreter_lock,
)
from bridge.interpretation.precision import in_passes
from bridge.interpretation.walk import Walk
from bridge.precision import current_passes
from bridge.program import Program
from bridge.ranks import specs
from bridge.ranks.devices import simulated_devices
from bridge.ranks.mesh import ranks_of
from bridge.sanitizer.report import NotCheckable, current_report

Parts = Sequence[Sequence[torch.Tensor]]
"""Tensors for each position of a mesh."""


def simulate(program: Program, inputs: Parts, wide: bool) -> list[list[torch.Tensor]]:
    """The results at each position of the mesh, on the CPU.

    Args:
        inputs: for each position, the program's inputs there: CPU tensors that are JAX's to read as they are.
        wide: whether JAX must keep 64 bits.

    Raises:
        ValueError: cotangents of what ranks have in common differ.
    """
    counters.calls += 1
    first = inputs[0]
    avals = program.avals_of(tuple(tuple(t.shape) for t in first), program.dtypes(first), wide)
    _check_cotangents(program, avals, inputs)
    setting = current_mode(), current_passes()
    with jax.enable_x64(wide):
        if current_report() is not None:
            with contextlib.suppress(NotCheckable):
                return _run(program, avals, inputs, _CHECKED, setting[1])
        try:
            return _run(program, avals, inputs, *setting)
        except _Uninterpretable as error:
            failure = error.__cause__
        try:  # plain interpretation can't lower a kernel of it
            return _run(program, avals, inputs, "tpu", setting[1])
        except Exception:
            assert failure is not None
            raise failure from None


def _check_cotangents(program: Program, avals: Avals, inputs: Parts) -> None:
    """A result that ranks have in common is one array, and has one cotangent."""
    sharding = program.definition.sharding
    assert sharding is not None
    for index in range(len(avals.specs))[specs.cotangents(program)]:
        for first, *others in specs.replicas(avals.specs[index], sharding.mesh):
            one = inputs[first][index].reshape(-1).view(torch.uint8)
            for other in others:
                if not torch.equal(one, inputs[other][index].reshape(-1).view(torch.uint8)):
                    raise ValueError(
                        f"{program.definition.name}: positions {first} and {other} of the mesh have a result "
                        f"in common, {avals.specs[index]} on {dict(sharding.mesh.shape)}, and different "
                        f"cotangents of it; each must compute the same loss of it, or take a part of its own"
                    )


def _run(program: Program, avals: Avals, inputs: Parts, mode: str, passes: int) -> list[list[torch.Tensor]]:
    compiled: _Compiled = program.remember(
        ("simulated", avals, mode, passes), lambda: _Compiled(program, avals, mode, passes)
    )
    arrays = []
    for i, (shape, dtype, sharding) in enumerate(
        zip(avals.shapes, avals.dtypes, compiled.in_shardings, strict=True)
    ):
        if 0 in shape:  # JAX on the CPU does not divide it
            arrays.append(jax.device_put(np.zeros(shape, dtype), sharding))
            continue
        parts = [
            jax.device_put(to_jax(part[i]), device)
            for part, device in zip(inputs, compiled.devices, strict=True)
        ]
        arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    results: list[list[torch.Tensor]] = [[] for _ in inputs]
    for array, local in zip(compiled(*arrays), program.results(avals), strict=True):
        on = {shard.device: shard.data for shard in array.addressable_shards}
        for position, device in enumerate(compiled.devices):
            out = to_torch(on[device], copy=True)
            results[position].append(out if out.numel() else out.new_empty(local.shape))
    return results


_CHECKED = "checked"
"""The mode of a program whose kernels are checked: "tpu", and more."""

_PATIENT = {
    "xla_cpu_collective_call_warn_stuck_seconds": 3600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 24 * 3600,
    "xla_cpu_collective_timeout_seconds": 24 * 3600,
}
"""XLA ends the process when a device has waited 40 s for another: one may still be in a kernel."""


class _Uninterpretable(Exception):
    """The program failed, and has a kernel that was interpreted plainly; the cause says how."""


class _Compiled:
    """A program for all ranks, at some shapes, in one mode of interpretation."""

    def __init__(self, program: Program, avals: Avals, mode: str, passes: int) -> None:
        sharding = program.definition.sharding
        assert sharding is not None
        shape = sharding.mesh.devices.shape
        self.devices = simulated_devices(sharding.mesh.size)
        self.mesh = Mesh(
            np.array(self.devices).reshape(shape), sharding.mesh.axis_names, sharding.mesh.axis_types
        )
        program.results(avals)  # raises where results can't lie as they should
        jaxpr = program.abstract(lambda fn, structs: jax.make_jaxpr(fn)(*structs), avals)
        if passes:
            jaxpr = in_passes(jaxpr, passes)
        interpreted = interpret_kernels(jaxpr, "tpu" if mode == _CHECKED else mode)
        self.plain = mode != _CHECKED and any(kernel.how == "fast" for kernel in interpreted.kernels)
        self.name = program.definition.name
        asked = "tpu" if mode in ("tpu", _CHECKED) else "fast"
        uses = (
            KernelUse(self.name, k.name, k.how, "" if k.how == asked else k.reason)
            for k in interpreted.kernels
        )
        count_compile(self.name, tuple(uses))
        jaxpr, self.checked = interpreted.jaxpr, None
        if mode == _CHECKED and interpreted.kernels:
            from bridge.sanitizer import calls  # only who checks kernels needs it

            self.checked = calls.Checked.of(interpreted)
            jaxpr = self.checked.jaxpr
        self.ranks = ranks_of(sharding.mesh)
        placed = _OnMesh(self.mesh).value(jaxpr)
        self.in_shardings = tuple(NamedSharding(self.mesh, spec) for spec in avals.specs)
        self.run: Callable[..., Any] = jax.jit(
            lambda *arrays: tuple(eval_jaxpr(placed.jaxpr, placed.consts, *arrays)),
            in_shardings=self.in_shardings,
            out_shardings=tuple(NamedSharding(self.mesh, s) for s in specs.of_outputs(program, avals)),
            compiler_options=_PATIENT,
        )

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        report = current_report()
        try:
            if report is not None and self.checked is not None:
                from bridge.sanitizer import calls

                return calls.check(report, self.name, self.checked, lambda: self.run(*arrays), self.ranks)
            with interpreter_lock(len(self.devices)):
                return jax.block_until_ready(self.run(*arrays))
        except Exception as error:
            error.add_note(f"(in the op {self.name}, which ran for {len(self.devices)} ranks)")
            if self.plain:
                raise _Uninterpretable from error
            raise


class _OnMesh(Walk):
    """A program traced for a mesh of ranks, for one of devices that are here.

    What JAX keeps with a shard_map is the mesh without its devices: the devices are then those of the arrays.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh

    def eqn(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        if analysis.is_kernel(eqn):
            if (
                self._mesh.size > 1
                and analysis.has_64_bit_elements(eqn)
                and eqn.params["interpret"] is not True
            ):
                # JAX's settings are a thread's own: the interpreter's threads would narrow them.
                raise KernelNotInterpretable(
                    f"the Pallas kernel {analysis.kernel_name(eqn)!r} has elements of 64 bits, which no TPU "
                    f"has, nor JAX's TPU interpreter for several devices; move them as pairs of 32 bits"
                )
            return eqn
        new = self.nested(eqn)
        mesh = new.params.get("mesh")
        if isinstance(mesh, Mesh):
            new = new.replace(params={**new.params, "mesh": mesh.abstract_mesh})
        sharding = new.params.get("sharding")
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            placed = NamedSharding(self._mesh, sharding.spec)
            new = new.replace(params={**new.params, "sharding": placed})
        return new

"""Where a program runs: here on the CPU backend, or on a real TPU through the `torch_tpu` package.

With `torch_tpu` and a TPU, the `tpu` device is theirs, and every program (also derived gradients and
vmap) is handed to their compiler as one JAX function. Everything else in the bridge is the same.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from bridge import device
from bridge.aot.topologies import abstract_device
from bridge.chips import chip, chips
from bridge.interpretation import compiling_for, target_chip, use_present_chip
from bridge.program import Program
from bridge.ranks import specs

_callables: weakref.WeakKeyDictionary[Program, Callable[..., Any]] = weakref.WeakKeyDictionary()

_CALLED_OTHERWISE = {"TPU v7": "tpu7x"}
"""Names that torch_tpu gives to chips, where they are not "TPU " and ours."""


def present_chip() -> str | None:
    """The chip of the real TPU whose device "tpu" is; None without one, or if we have no figures for it."""
    return None if device.is_simulated() else _real_chip()


@functools.cache
def _real_chip() -> str | None:
    get_device_name = getattr(getattr(torch, "tpu", None), "get_device_name", None)
    if get_device_name is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_tpu 0.2 warns that this function is experimental
        name = str(get_device_name())
    known = {f"TPU {c}": c for c in chips()} | {c.device_kind: n for n, c in chips().items()}
    return (known | _CALLED_OTHERWISE).get(name)


use_present_chip(present_chip)


def run_on_tpu(program: Program, tensors: Sequence[torch.Tensor], wide: bool) -> list[torch.Tensor]:
    """Run a program on tensors of a real TPU.

    Args:
        wide: whether JAX must keep 64 bits while it traces.

    Raises:
        ImportError: `torch_tpu` is of another version than the bridge knows.
    """
    found = _callables.get(program)
    if found is None:
        found = _callables[program] = _compile_with_torch_tpu(program, tensors)
    # JAX itself is on the CPU here: kernels are lowered for the chip it is told about.
    name, sharding = target_chip(), program.definition.sharding
    mesh = _mesh_of(name) if sharding is None else sharding.mesh.abstract_mesh
    with jax.enable_x64(wide), compiling_for(name), jax.sharding.use_abstract_mesh(mesh):
        results = found(*tensors)
    return list(results)


@functools.cache
def _mesh_of(name: str) -> Any:
    return jax.sharding.AbstractMesh((), (), abstract_device=abstract_device(chip(name)))


def _compile_with_torch_tpu(program: Program, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    try:
        # Private in torch_tpu 0.2.0: the object behind its own jax_op; the only way to hand over a
        # function that is derived and has no signature of its own.
        from torch_tpu._internal.pallas.pallas import JaxCallable  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "tensors are on a real TPU, but this version of torch_tpu has no "
            "torch_tpu._internal.pallas.pallas.JaxCallable; the bridge knows torch_tpu 0.2"
        ) from error

    known = weakref.ref(program)  # the callable must not keep its program alive

    def function(*arrays: Any) -> tuple[Any, ...]:
        program = known()
        assert program is not None  # it is being called
        return tuple(program.working(arrays)(*arrays))

    # keep_unused: torch_tpu hands every tensor to the compiled function, also those it does not read.
    jitted = jax.jit(function, keep_unused=True)
    named = {"name": program.name, "jit_fn": jitted, "trace_key": program.name}
    sharding = program.definition.sharding
    if sharding is None:
        return JaxCallable(**named)
    avals = program.avals(tensors)
    return JaxCallable(
        **named,
        mesh=sharding.mesh,
        input_partition_specs=avals.specs,
        output_partition_specs=specs.of_outputs(program, avals),
    )

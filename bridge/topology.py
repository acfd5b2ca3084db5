"""Compile for a TPU on a machine without one: `compile_for(fn, avals, "v6e")`.

The compiler is the real one, the package libtpu, which runs on any Linux machine. What it gives is what a
TPU would run: the same refusals, use of memory and schedule. Nothing runs, and nothing is measured.

    from bridge.topology import compile_for

    with compile_for(kernel, ["bf16[1024,1024]", "bf16[1024,1024]"], "v5e") as compiled:
        print(compiled.memory, compiled.kernels)

Everything that needs libtpu happens in other processes (`bridge.aot`); JAX in this one is not disturbed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.aot.compiled import Compiled as Compiled
from bridge.aot.compiled import Kernel as Kernel
from bridge.aot.compiled import Memory as Memory
from bridge.aot.compiled import delete_folder, kernels_in, without_bodies
from bridge.aot.errors import CompileError as CompileError
from bridge.aot.errors import CompilerCrashed as CompilerCrashed
from bridge.aot.errors import CompilerMissing as CompilerMissing
from bridge.aot.errors import CompileTimeout as CompileTimeout
from bridge.aot.errors import KernelRefused as KernelRefused
from bridge.aot.errors import MemoryExceeded as MemoryExceeded
from bridge.aot.errors import VmemExceeded as VmemExceeded
from bridge.aot.topologies import Topology as Topology
from bridge.aot.topologies import abstract_device, as_chip, smallest
from bridge.aot.topologies import mesh as mesh
from bridge.aot.topologies import topology as topology
from bridge.chips import Chip

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh

    from bridge.aot.lowering import Lowered
    from bridge.aot.pool import Job

TIMEOUT = 300.0
"""Seconds a compilation may take unless the caller says otherwise. Large unrolled kernels take minutes."""

INSTALL = "pip install libtpu"


def compile_for(
    fn: Any,
    avals: Sequence[Any],
    chip: str | Chip,
    *,
    mesh: AbstractMesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    topology: Topology | None = None,
    dumps: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
) -> Compiled:
    """Compile `fn(*avals)` for a TPU chip with the TPU compiler. Any thread may call this.

    Args:
        fn: a JAX function (jitted or not), an op made by `jax_op`, or a kernel of a catalog. It is traced
            here and may be a closure. For a gradient, pass the function that computes it.
        avals: one entry for each argument. Arrays are `jax.ShapeDtypeStruct`, arrays, torch tensors (of any
            device, `meta` included) or text such as `"f32[128,4096]"`; lists and dicts of them are fine.
            Everything else is passed to `fn` as it is, so it is static.
        chip: `v4`, `v5e`, `v5p`, `v6e` or `tpu7x`.
        mesh: for programs over several devices, a mesh made by `bridge.topology.mesh`. `fn` may use it
            in `jax.shard_map`.
        in_specs: a `PartitionSpec` for each array argument: how it lies on the mesh. None leaves it to XLA.
        out_specs: a `PartitionSpec`, or a tree of them, for the results.
        topology: where the mesh lies; the smallest that holds it if None.
        dumps: whether to keep the schedules (`Compiled.dumps`).
        compiler_options: options of XLA, such as `{"xla_tpu_scoped_vmem_limit_kib": 32768}`.
        timeout: seconds the compiler may take; then its process is ended. The wait for a free process does
            not count.

    Returns:
        The compiled program. It can't be run.

    Raises:
        VmemExceeded, MemoryExceeded: it needs more of a memory than there is.
        KernelRefused: Pallas or the compiler can't do what it asks for; the message says what, where, and
            what to do.
        CompilerMissing: libtpu is not installed, or can't be used.
        CompileTimeout, CompilerCrashed: the compiler took too long, or ended.
        ValueError: an argument of this function that makes no sense.
        Exception: whatever `fn` raises while it is traced.
    """
    from bridge.aot import pool

    target = as_chip(chip)
    placed = _mesh_of(target, mesh)
    if mesh is None and (in_specs is not None or out_specs is not None):
        raise ValueError("in_specs and out_specs say how arrays lie on a mesh: pass mesh=")
    where = _topology_of(target, max(math.prod(placed.axis_sizes), 1), topology)
    _check_installed()

    from bridge.aot.lowering import lower

    lowered = lower(fn, avals, target, placed, in_specs, out_specs)
    job = pool.Job(
        module=lowered.module,
        topology=where.name,
        chip_config=target.chip_config,
        mesh=tuple(placed.axis_sizes),
        options=dict(compiler_options or {}),
        shardy=lowered.shardy,
        dumps=None,
    )
    answer, folder = _run(job, lowered, target, timeout, dumps)
    return Compiled(
        chip=target,
        topology=where,
        memory=Memory(**answer["memory"]),
        kernels=kernels_in(answer["hlo"]),
        hlo=without_bodies(answer["hlo"]),
        devices=tuple(answer["devices"]),
        versions=answer["versions"],
        dumps=folder,
        jaxpr=lowered.jaxpr,
    )


def _run(
    job: Job, lowered: Lowered, target: Chip, timeout: float, dumps: bool
) -> tuple[Mapping[str, Any], Path | None]:
    """The compiler's answer, and the folder with the dumps if they are asked for."""
    from bridge.aot import pool

    compilers = pool.shared()
    if not dumps:
        answer = compilers.run(job, timeout)
        _raise_refusal(answer, target, lowered.kernels())
        if answer["hlo"] is not None:
            return answer, None
    folder = compilers.folder()
    try:
        answer = compilers.run(replace(job, dumps=folder), timeout)
        _raise_refusal(answer, target, lowered.kernels())
    except BaseException:
        delete_folder(folder, os.getpid())
        raise
    if dumps:
        return answer, folder
    delete_folder(folder, os.getpid())  # it was only for the HLO
    return answer, None


def compiler_versions() -> dict[str, str]:
    """Versions of jax, jaxlib and libtpu, and under `platform` what the compiler says about itself.

    Raises `CompilerMissing` or `CompilerCrashed` if the compiler can't be used.
    """
    from bridge.aot import pool

    _check_installed()
    return pool.shared().versions()


def _mesh_of(target: Chip, mesh: AbstractMesh | None) -> AbstractMesh:
    from jax.sharding import AbstractMesh

    device = abstract_device(target)
    if mesh is None:
        return AbstractMesh((), (), abstract_device=device)
    if not isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"mesh must be made by bridge.topology.mesh(chip, axis_names, shape), got a {type(mesh).__name__}"
        )
    if mesh.abstract_device not in (None, device):
        raise ValueError(
            f"the mesh is of {mesh.abstract_device.device_kind} devices, and {target.name} is compiled for"
        )
    return mesh.update(abstract_device=device)


def _topology_of(target: Chip, devices: int, given: Topology | None) -> Topology:
    if given is None:
        return smallest(target, devices)
    if given.chip.name != target.name:
        raise ValueError(f"topology= is of {given.chip.name}, and {target.name} is compiled for")
    if given.devices < devices:
        raise ValueError(f"{given.name} has {given.devices} devices, the mesh has {devices}")
    return given


def _check_installed() -> None:
    from importlib.util import find_spec

    if os.environ.get("TPU_LIBRARY_PATH") or find_spec("libtpu") or find_spec("libtpu_nightly"):
        return
    raise CompilerMissing(
        "the TPU compiler is not installed",
        advice=f"Install it with `{INSTALL}` (on Linux; some hundred MB; no TPU needed)",
    )


def _raise_refusal(answer: Mapping[str, Any], target: Chip, kernels: Sequence[tuple[str, str]]) -> None:
    if "error" not in answer:
        return
    if answer["type"] not in ("JaxRuntimeError", "XlaRuntimeError"):
        raise CompilerMissing(
            f"this version of JAX can't be used to compile for a TPU: {answer['type']}",
            advice="The bridge knows jax 0.10.2 and later; `tpu-autotune doctor` says which is installed",
            details=answer["error"],
        )
    from bridge.aot.explain import explain_compiler

    raise explain_compiler(answer["error"], target, kernels)

"""How a Pallas kernel written for TPU runs here, where no TPU is.

A JAX function that contains `pl.pallas_call` is traced once, under `tracing_chip()`, to a jaxpr.
`interpret_kernels(jaxpr, mode)` returns the same program with every kernel set to be interpreted:

- mode "fast": JAX's plain interpretation (a compiled loop over the grid), kernel by kernel, wherever it
  gives what a TPU gives. A kernel it would get wrong, or can't run, runs in JAX's TPU interpreter
  instead, and `KernelRun.reason` says why.
- mode "tpu": every kernel in JAX's TPU interpreter (DMAs, semaphores, memory spaces; slow).
- mode "reference": the op's plain reference is used where there is one (the caller does that); a
  kernel still found in the program runs as in "fast".

This module imports no JAX by itself, so that a mode can be chosen, and the process prepared, before JAX.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bridge import chips

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    from bridge.interpretation.observer import Observer

MODES = ("fast", "tpu", "reference")
"""The valid interpretation modes."""

CHIPS = {"v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "tpu7x": "TPU7x"}
"""Chips that can be simulated, and the device kind JAX knows each by."""

DEFAULT_CHIP = "v6e"

_mode: contextvars.ContextVar[str | None] = contextvars.ContextVar("bridge_mode", default=None)


# The mode ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def interpret(mode: str) -> Iterator[None]:
    """Within this context, kernels of this thread (or asyncio task) are interpreted in `mode`.

    Contexts nest; other threads are not affected. Outside of any context the mode is `default_mode()`.

    Raises:
        ValueError: `mode` is none of "fast", "tpu", "reference".
    """
    token = _mode.set(_check_mode(mode, "the mode given to interpret()"))
    try:
        yield
    finally:
        _mode.reset(token)


def current_mode() -> str:
    """The mode kernels of this thread are interpreted in now: "fast", "tpu" or "reference"."""
    return _mode.get() or (_asked_for is not None and _asked_for()) or default_mode()


_asked_for: Callable[[], str | None] | None = None


def use_default_mode(asked_for: Callable[[], str | None]) -> None:
    """Let a function name the mode outside of any `interpret` context: for `torch.tpu.eager_mode`.

    It is called for each program that runs; None means that it asks for nothing, so `default_mode()` holds.
    """
    global _asked_for
    _asked_for = asked_for


@functools.cache
def default_mode() -> str:
    """The mode of the process: the environment variable BRIDGE_INTERPRET, else "fast".

    Read once: the environment is slow to ask at every call, and must not change the mode half-way.
    """
    return _check_mode(
        os.environ.get("BRIDGE_INTERPRET") or "fast", "the environment variable BRIDGE_INTERPRET"
    )


def _check_mode(mode: str, source: str) -> str:
    if mode not in MODES:
        hint = (
            " Kernels are checked within `with bridge.sanitize() as report:`." if mode == "sanitize" else ""
        )
        known = ", ".join(map(repr, MODES))
        raise ValueError(f"{source} is {mode!r}; the interpretation modes are {known}.{hint}")
    return mode


# The chip ---------------------------------------------------------------------------------------


def simulated_chip() -> str:
    """The chip the simulated device stands for: "v5e", "v5p", "v6e" or "tpu7x" (BRIDGE_CHIP; default v6e).

    Raises:
        ValueError: BRIDGE_CHIP names another chip.
    """
    chip = os.environ.get("BRIDGE_CHIP") or DEFAULT_CHIP
    if chip not in CHIPS:
        known = ", ".join(CHIPS)
        raise ValueError(f"the environment variable BRIDGE_CHIP is {chip!r}; it must be one of {known}.")
    return chip


def target_chip() -> str:
    """The chip whose tiles to choose: that of `compiling_for`, else the TPU here, else `simulated_chip()`."""
    return _compiled_for.get() or (_present is not None and _present()) or simulated_chip()


_present: Callable[[], str | None] | None = None


def use_present_chip(present: Callable[[], str | None]) -> None:
    """Let a function name the chip of the real TPU here; None means that there is none, or an unknown one."""
    global _present
    _present = present


_compiled_for: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "bridge_compiled_for", default=None
)


@contextlib.contextmanager
def compiling_for(chip: str) -> Iterator[None]:
    """Within this context, code that asks for the chip (to choose tiles) gets the one that is compiled for.

    Kernels are not interpreted here but lowered, and the caller has told JAX about the chip.
    """
    token = _compiled_for.set(chip)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def tracing_chip() -> contextlib.AbstractContextManager[Any]:
    """A context in which code that asks JAX about the TPU is answered for `target_chip()`.

    `pltpu.get_tpu_info()`, `pltpu.emit_pipeline` and `pltpu.create_tensorcore_mesh` work in it. It holds
    for the current thread only, costs a few microseconds, and changes where nothing runs: what was traced
    in it still runs on the CPU backend.
    """
    import jax

    if _compiled_for.get() is not None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(_chip_mesh(target_chip()))


@functools.cache
def _chip_mesh(chip: str) -> Any:
    import jax

    try:
        from jax._src.mesh import AbstractDevice  # private: JAX has no public name for it yet
    except ImportError as error:
        raise ImportError(
            "this version of JAX has no jax._src.mesh.AbstractDevice, which the bridge needs to trace TPU "
            "kernels without a TPU; use jax >= 0.10.2."
        ) from error
    kind = CHIPS.get(chip) or chips.chip(chip).device_kind
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return jax.sharding.AbstractMesh((), (), abstract_device=device)


# The process ------------------------------------------------------------------------------------


def prepare_process(devices: int = 1) -> bool:
    """Sets what JAX's CPU backend must have before it starts. Returns whether it is in force.

    - `jax_cpu_enable_async_dispatch=False`. With asynchronous dispatch a program is still reading the
      caller's memory after the call has returned: an in-place write to a shared tensor changes its result.
    - `PJRT_NPROC`, the number of the backend's threads, to at least 2 * devices + 2 (kept if it is set). The
      TPU interpreter waits in callbacks that hold a thread for each logical device, while copying a
      callback's operand of 100 KiB or more needs another: with fewer threads (this machine may have two
      cores) kernels over several devices never end.

    Call it before the first use of JAX. Later calls change nothing and are cheap.

    Args:
        devices: logical CPU devices that will run kernels together.
    """
    import jax

    if backend_started():
        return not jax.config.read("jax_cpu_enable_async_dispatch")
    leave_libtpu_alone()
    os.environ.setdefault("PJRT_NPROC", str(max(2 * devices + 2, os.cpu_count() or 1)))
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return True


def leave_libtpu_alone() -> None:
    """Where no accelerator is, keeps JAX from loading libtpu, which complains at length that there is no TPU.

    libtpu may be installed to compile for TPUs. With a TPU, JAX has set `jax_platforms` by itself; other
    accelerators come as plugins, and then nothing is changed.
    """
    import jax

    undecided = jax.config.jax_platforms is None  # pyright: ignore[reportAttributeAccessIssue]
    if undecided and not backend_started() and not _other_accelerators():
        jax.config.update("jax_platforms", "cpu")


def _other_accelerators() -> bool:
    """Whether a plugin of JAX for another accelerator is installed, in either of the ways JAX finds them."""
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    return bool(entry_points(group="jax_plugins")) or find_spec("jax_plugins") is not None


def backend_started() -> bool:
    """Whether a JAX backend runs in this process."""
    from jax._src import xla_bridge  # private: the only way to ask without starting one

    return xla_bridge.backends_are_initialized()


# Interpretation ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelRun:
    """How one kernel of a program runs.

    Attributes:
        name: the kernel's name: `pallas_call(name=...)`, else its function's name.
        how: "fast" (plain interpretation) or "tpu" (JAX's TPU interpreter).
        reason: why, as a sentence.
    """

    name: str
    how: Literal["fast", "tpu"]
    reason: str


@dataclass(frozen=True)
class Interpreted:
    """A program whose kernels are set to be interpreted.

    Attributes:
        jaxpr: the program; it runs under `jax.jit` on the CPU backend. The very jaxpr that was given,
            if it holds no kernel.
        kernels: one entry for each kernel in the program text, in order (a kernel in a loop counts once).
    """

    jaxpr: ClosedJaxpr
    kernels: tuple[KernelRun, ...]


class KernelNotInterpretable(NotImplementedError):
    """A kernel uses something that no interpreter here can run. The message names the kernel and it."""


class InvalidKernel(ValueError):
    """A kernel that no TPU runs as it is meant. The message names the kernel, the fault and the fix."""


def interpret_kernels(jaxpr: ClosedJaxpr, mode: str) -> Interpreted:
    """`jaxpr` with every Pallas kernel in it set to be interpreted.

    Kernels are found in nested jaxprs too (jit, scan, while, cond, remat, shard_map, ...). Calls of
    `custom_vjp` and `custom_jvp` functions that hold a kernel are resolved to what they compute, so
    differentiate before, not after. Where `jax.lax.platform_dependent` chooses between a kernel and something
    else, the branch for TPUs is taken.

    Args:
        jaxpr: a closed jaxpr, traced under `tracing_chip()`.
        mode: "fast", "tpu" or "reference".

    Raises:
        ValueError: an unknown mode.
        InvalidKernel: a kernel leaves an array, or returns to an output block it has left.
        KernelNotInterpretable: neither interpreter can run a kernel.
    """
    _check_mode(mode, "the mode given to interpret_kernels()")
    from bridge.interpretation import rewriting

    return rewriting.rewrite(jaxpr, mode)


def needs_lock(interpreted: Interpreted) -> bool:
    """Whether running the program needs `interpreter_lock()`: it has a kernel in the TPU interpreter."""
    return any(run.how == "tpu" for run in interpreted.kernels)


_interpreter_lock = threading.RLock()


@contextlib.contextmanager
def interpreter_lock(devices: int = 1, observer: Observer | None = None) -> Iterator[None]:
    """Holds JAX's TPU interpreter for this thread, and puts it in order after an error.

    The interpreter keeps the simulated memory in process-wide state, so one program at a time may use
    it. Wait for the results inside the context (`jax.block_until_ready`).

    Args:
        devices: how many run a program together.
        observer: what is told of each step, for a program whose kernels are checked.

    Raises:
        KernelDeadlock: a kernel waited for ever.
    """
    from bridge.interpretation.interpreter_watch import watched

    with _interpreter_lock:
        try:
            with watched(devices, observer):
                yield
        except BaseException:
            reset_interpreter()
            raise


def reset_interpreter() -> None:
    """Makes JAX's TPU interpreter usable again after an exception was raised inside a kernel.

    Drops the simulated memory, and the tokens by which JAX orders callbacks: the failed program left a
    token behind that would fail every later one.
    """
    from bridge.interpretation import tpu_interpreter

    tpu_interpreter.reset()

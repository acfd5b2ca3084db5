"""How eager ops are dispatched: `torch.tpu.eager_mode`, under the names of `torch_tpu`.

On a TPU these modes decide when an op is compiled and launched. Here an op runs when it is called and has
finished when it returns, so:

    DEFER_NEVER                      what happens here. The mode at the start.
    DEFER_AND_FUSE                   accepted, and the same.
    DEFER_NEVER_AND_LAUNCH_BLOCKING  for debugging: the same for torch's ops, and Pallas kernels run in JAX's
                                     TPU interpreter (`bridge.interpret("tpu")`), which checks bounds

A `bridge.interpret` context is more particular than the mode, and wins over it.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import logging
from collections.abc import Iterator

from bridge import interpretation

_log = logging.getLogger("bridge.device")


class EagerMode(enum.Enum):
    """When eager ops run, as in `torch_tpu`; see this module's text for what each means here."""

    DEFER_AND_FUSE = enum.auto()
    DEFER_NEVER = enum.auto()
    DEFER_NEVER_AND_LAUNCH_BLOCKING = enum.auto()


_process = EagerMode.DEFER_NEVER
_scoped: contextvars.ContextVar[EagerMode | None] = contextvars.ContextVar("bridge_eager_mode", default=None)


def get_eager_mode() -> EagerMode:
    """The mode in force in this thread."""
    return _scoped.get() or _process


def change_eager_mode(mode: EagerMode) -> None:
    """Change the mode: of the `set_eager_mode` context this thread is in, else of the process.

    Raises:
        TypeError: not an `EagerMode`.
    """
    global _process
    _check(mode)
    if _scoped.get() is None:
        _process = mode
    else:
        _scoped.set(mode)


@contextlib.contextmanager
def set_eager_mode(mode: EagerMode) -> Iterator[None]:
    """Context manager for a mode, in this thread.

    Raises:
        TypeError: not an `EagerMode`.
    """
    _check(mode)
    token = _scoped.set(mode)
    try:
        yield
    finally:
        _scoped.reset(token)


def _check(mode: EagerMode) -> None:
    if not isinstance(mode, EagerMode):
        names = ", ".join(f"torch.tpu.EagerMode.{m.name}" for m in EagerMode)
        raise TypeError(f"eager_mode: expected one of {names}, got {mode!r}")
    if mode is EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING:
        interpretation.use_default_mode(_kernel_mode)
    elif mode is EagerMode.DEFER_AND_FUSE:
        say_once("torch.tpu.EagerMode.DEFER_AND_FUSE")


def _kernel_mode() -> str | None:
    """The interpretation mode that the eager mode asks for, if it asks for one."""
    return "tpu" if get_eager_mode() is EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING else None


_said: set[str] = set()


def say_once(setting: str) -> None:
    """Log, once, that a setting of `torch_tpu` is accepted and does nothing here."""
    if setting not in _said:
        _said.add(setting)
        _log.info("%s does nothing on the simulated device: ops run as they are called", setting)

"""Threads and forked children: what torch does by default does not suit a device whose ops run on the CPU.

- Backward. torch keeps a thread for each accelerator and runs backward there. It would not see the contexts
  of the caller (`bridge.interpret`, precision), every call would change threads twice, and no backward,
  not even of CPU tensors, would run in a forked child. So backward runs in the thread that asked for it, as
  for CPU tensors, and there is no such thread.
- Fork. The threads among which torch's CPU kernels share their work do not survive a fork: the first large op
  in the child would wait for them for ever. So a child that inherits a device in use computes in one thread.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from bridge.device import extension, fallback


def before_registration() -> None:
    """Let autograd count the devices before there is one of ours: it keeps a thread for each that it counted.

    It counts at its first backward. Where torch has an accelerator of its own, that is left to it.
    """
    if torch.accelerator.current_accelerator() is None:
        with torch.enable_grad():
            torch.zeros((), device="cpu", requires_grad=True).backward()


def install() -> None:
    """Set both up. Call once per process.

    Raises:
        ImportError: torch has no longer the private function by which Python starts a backward.
    """
    start = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if start is None or not hasattr(torch.autograd, "_engine_run_backward"):
        raise ImportError(
            f"torch {torch.__version__} has no torch.autograd.graph._engine_run_backward, by which the "
            "simulated device runs backward in the caller's thread; versions known to work are 2.11 to 2.13"
        )
    here = _in_this_thread(start)
    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = here  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_after_fork)


def _in_this_thread(start: Any) -> Any:
    """`start`, with torch's flag for engine threads off. Each Python thread has a flag, on at first."""

    @functools.wraps(start)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_multithreading_enabled():
            torch.autograd.set_multithreading_enabled(False)
        return start(*args, **kwargs)

    return run


def _after_fork() -> None:
    if _device_was_used():
        torch.set_num_threads(1)


def _device_was_used() -> bool:
    native = extension.loaded()
    if native is None:
        return fallback.kernel_for.cache_info().currsize > 0
    return any(native.memory_stats(index)["peak"] > 0 for index in range(native.device_count()))

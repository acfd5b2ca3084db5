"""Public counters: what the bridge compiled, reused and copied, and where kernels ran.

`bridge.stats()` returns a snapshot. The counters are process-wide and cheap: the call path adds
to plain integers; everything else is counted where it is already slow (a trace, a copy).
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelUse:
    """How one Pallas kernel is run here: by which interpreter, and why if not the default one."""

    op: str
    kernel: str
    how: str
    reason: str = ""


@dataclass(frozen=True)
class Stats:
    """A snapshot of the counters.

    Attributes:
        calls: bridged calls executed (forward, backward and derived ones).
        compiles: programs traced and compiled, by op. An op that compiles again and again has a
            shape or a static argument that changes.
        cache_hits: calls served by an already compiled program.
        copies: tensors copied on their way to JAX, by reason ("stride", "unaligned", ...).
        kernels: the Pallas kernels compiled so far and the interpreter each one runs in.
    """

    calls: int
    compiles: dict[str, int]
    cache_hits: int
    copies: dict[str, int]
    kernels: tuple[KernelUse, ...]

    def __str__(self) -> str:
        lines = [
            f"calls {self.calls}, cache hits {self.cache_hits}, compiles {sum(self.compiles.values())}",
            "copies " + (", ".join(f"{n} ({why})" for why, n in self.copies.items()) or "none"),
        ]
        for use in self.kernels:
            why = f" ({use.reason})" if use.reason else ""
            lines.append(f"{use.op}: kernel {use.kernel} ran in {use.how} mode{why}")
        return "\n".join(lines)


@dataclass
class _Counters:
    calls: int = 0
    compiles: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    kernels: dict[KernelUse, None] = field(default_factory=dict)


_lock = threading.Lock()
counters = _Counters()
"""The live counters; `counters.calls += 1` is the only write outside this module."""


def count_copy(reason: str) -> None:
    """One tensor was copied for `reason`."""
    with _lock:
        counters.copies[reason] += 1


def count_compile(op: str, kernels: tuple[KernelUse, ...]) -> None:
    """One program of `op` was traced, with these kernels inside."""
    with _lock:
        counters.compiles[op] += 1
        counters.kernels.update(dict.fromkeys(kernels))


def stats() -> Stats:
    """The counters as they stand; see `Stats`."""
    with _lock:
        compiles = dict(counters.compiles)
        return Stats(
            calls=counters.calls,
            compiles=compiles,
            cache_hits=max(counters.calls - sum(compiles.values()), 0),
            copies=dict(counters.copies),
            kernels=tuple(counters.kernels),
        )


def reset_stats() -> None:
    """Set every counter to zero. Compiled programs stay."""
    with _lock:
        counters.calls = 0
        counters.compiles.clear()
        counters.copies.clear()
        counters.kernels.clear()

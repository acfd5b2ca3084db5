"""What a checked run of a kernel tells: data that flows from JAX's TPU interpreter to `bridge.sanitizer`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "race",
    "out_of_bounds_read",
    "out_of_bounds_write",
    "uninitialised_read",
    "semaphore_left",
    "dma_not_waited",
    "missing_barrier",
    "deadlock",
    "order_dependent_result",
    "error",
]
"""What can be wrong with a kernel."""

CopyMode = Literal["on_wait", "eager"]
"""When copies (DMAs) are made: as late, or as early as they may."""


DEVICE = "\0"
"""Stands for a device in a sentence: who reads it may know devices by other names."""


@dataclass(frozen=True)
class Run:
    """One of several runs of a program on the same inputs.

    Attributes:
        copies: when copies are made.
        seed: 0 takes everything in its usual order. Others shuffle the copies that are under way, the grid's
            parallel dimensions, and how fast ranks come along.
        fill: what memory holds that nobody has written: NaN (integers: the largest value), or small numbers.
    """

    copies: CopyMode
    seed: int = 0
    fill: Literal["nan", "numbers"] = "nan"


@dataclass(frozen=True)
class Kernel:
    """What is known of a kernel before it runs.

    Attributes:
        name: its own.
        line: where it is launched, as "file:line".
        semaphores: names of its semaphores, in the order in which the interpreter numbers them.
        buffers: names of its buffers, likewise.
        makes_own_barrier: whether it must wait for other ranks itself. Otherwise XLA has all meet before it.
        collective_id: the number of its barrier semaphore.
    """

    name: str
    line: str
    semaphores: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    makes_own_barrier: bool = False
    collective_id: int | None = None


@dataclass(frozen=True)
class Sign:
    """Something that is wrong.

    Attributes:
        kernel: in which kernel.
        devices: whose doing it is, in the order in which the text has them.
        line: of the kernel's source, as "file:line".
        other: the second line that takes part, if any.
        text: a sentence, with `DEVICE` where the name of each device belongs, in turn.
    """

    kind: Kind
    kernel: Kernel
    devices: tuple[int, ...]
    line: str
    text: str
    other: str = ""


@dataclass(frozen=True)
class Load:
    """A load of memory that nobody has written. It may be right: what it gives may be masked out.

    Attributes:
        padding: whether all of it lies beyond the end of an array.
    """

    kernel: Kernel
    device: int
    line: str
    what: str
    padding: bool


@dataclass
class Observed:
    """All that was seen in one run."""

    signs: dict[Sign, None] = field(default_factory=dict)
    loads: dict[Load, None] = field(default_factory=dict)
    launches: Counter[str] = field(default_factory=Counter)

"""What is known of a core before it runs, and what is kept of what it did."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

READ, WRITE, LOCAL, REMOTE, RECEIVED = range(5)
"""Kinds of copies: from HBM, to HBM, between VMEM and SMEM, to another device, and from another device. Those
between devices are of kind `READ` or `WRITE` besides, for their part on HBM."""

STALLS = ("read", "write", "local", "remote")
"""What a core can wait for: copies of the first three kinds, and anything from another device."""


@dataclass(frozen=True)
class Rates:
    """What one core gets of the chip, in cycles.

    Attributes:
        bytes_per_cycle: HBM bandwidth that copies reach, of this core's share.
        latency_cycles: from the end of a copy's transfer to the moment a wait sees it.
        granule_bytes: unit in which copies give their size.
    """

    bytes_per_cycle: float
    latency_cycles: float
    granule_bytes: int


@dataclass(frozen=True)
class Identity:
    """What a core can ask about itself.

    Attributes:
        rank: place of its device in the mesh.
        chip: number of its chip.
        core: its number on the chip.
        core_in_device: its number in its device.
    """

    rank: int = 0
    chip: int = 0
    core: int = 0
    core_in_device: int = 0


ONLY_CORE = Identity()


@dataclass(frozen=True)
class Span:
    """One call of a function: name, begin and end in cycles, cycles stalled, and those on other devices."""

    name: str
    begin: float
    end: float
    stalled: float
    stalled_on_others: float


@dataclass
class Copies:
    """Every copy in order of issue: channel time in cycles, bytes, kind, and number of the function."""

    begin: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    nbytes: array[int] = field(default_factory=lambda: array("q"))
    kind: array[int] = field(default_factory=lambda: array("b"))
    owner: array[int] = field(default_factory=lambda: array("l"))

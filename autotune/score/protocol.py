"""What a score is, and what gives scores: the one thing that a search asks for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

SOURCES = ("measured", "schedule", "roofline")
"""Where a time comes from: a chip, the compiler's schedule, or the roofline. Never compare two of them."""

CONFIDENCES = ("high", "medium", "low")
"""High: the method was checked against times published for this chip. Medium: it was not, but nothing is
unknown. Low: something is unknown or implausible; `Score.reasons` says what."""


@dataclass(frozen=True)
class KernelScore:
    """The part that one kernel, or one operation of XLA, has in a score.

    Attributes:
        name: name of the HLO instruction.
        is_kernel: whether it is a Pallas kernel; else an operation of XLA.
        calls: how often it runs.
        time_s: seconds of all calls, stalls included.
        stalled_s: seconds of them spent waiting for copies.
        estimated: its time is a roofline, because its schedule could not be executed.
        bound: what limits it, as in `Score.bound`.
        units: share of its time in which each unit is busy.
        dma_bytes_read: bytes that its copies bring from HBM.
        dma_bytes_written: bytes that its copies bring to HBM.
        vmem_bytes: VMEM it takes; 0 if the compiler does not say.
        spills: vector registers that it writes to VMEM and reads back, for want of registers.
        grid_steps: steps of its grid, all calls together; None if it has none or it is not known.
        mxu_visits: executions of the code that feeds the matrix units most often: block visits.
        ici_bytes_sent: bytes that it sends to other devices; of a collective operation, the least it must.
        ici_bytes_received: bytes that it gets from other devices.
    """

    name: str
    is_kernel: bool
    calls: int
    time_s: float
    stalled_s: float
    estimated: bool
    bound: str
    units: Mapping[str, float]
    dma_bytes_read: int
    dma_bytes_written: int
    vmem_bytes: int
    spills: int
    grid_steps: int | None
    mxu_visits: int
    ici_bytes_sent: int = 0
    ici_bytes_received: int = 0


@dataclass(frozen=True)
class Score:
    """How long a program takes on a chip, and why.

    Of a program over several devices, it is that of the device that takes longest.

    Attributes:
        time_s: seconds.
        source: `measured`, `schedule` or `roofline`.
        bound: what limits it: `hbm` (bandwidth), `ici` (a link between chips, or waiting for other devices),
            `dma_latency` (waiting for copies that do not fill the bandwidth), a unit (`mxu`, `vpu`, `eup`,
            `xlu`, `load`, `store`, `scalar`), or `latency` (no unit is busy: results are waited for).
        units: share of the time in which each unit, and `hbm`, is busy; with several devices, `ici` is the
            link between them that is busiest.
        breakdown: seconds by activity: `compute`, `stalled_on_read`, `stalled_on_write`, `stalled_on_local`,
            and `stalled_on_remote` with several devices.
        dma_bytes_read: bytes that copies bring from HBM; of a roofline, the bytes that must be read.
        dma_bytes_written: bytes that copies bring to HBM.
        vmem_bytes: VMEM of the kernel that takes most; 0 if not known.
        spills: vector registers written to VMEM and read back, for want of registers.
        grid_steps: steps of the grids of all kernels; None if one is not known.
        confidence: `high`, `medium` or `low`.
        reasons: why confidence is not high, one sentence each.
        unknowns: what was not known although the result depends on it; empty unless confidence is low.
        chip: name of the chip.
        versions: versions of what produced the score, such as libtpu's.
        kernels: what the time is made of.
        ici_bytes_sent: bytes sent to other devices.
        ici_bytes_received: bytes that come from other devices.
        devices: devices that run the program.
    """

    time_s: float
    source: str
    bound: str
    units: Mapping[str, float]
    breakdown: Mapping[str, float]
    dma_bytes_read: int
    dma_bytes_written: int
    vmem_bytes: int
    spills: int
    grid_steps: int | None
    confidence: str
    reasons: tuple[str, ...]
    unknowns: tuple[str, ...]
    chip: str
    versions: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[KernelScore, ...] = ()
    ici_bytes_sent: int = 0
    ici_bytes_received: int = 0
    devices: int = 1

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {self.source!r}")
        if self.confidence not in CONFIDENCES:
            raise ValueError(f"confidence must be one of {', '.join(CONFIDENCES)}, got {self.confidence!r}")

    def to_json(self) -> str:
        """The score as one JSON object, which `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Score:
        """The score that `to_json` wrote. Raises `ValueError` for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            for name in ("reasons", "unknowns"):
                fields[name] = tuple(fields[name])
            fields["kernels"] = tuple(KernelScore(**kernel) for kernel in fields["kernels"])
            return cls(**fields)
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"not a score: {error}") from error


@dataclass(frozen=True)
class Workload:
    """What is scored: a function, its arguments, and what is known of the work.

    Attributes:
        name: how reports call it.
        fn: a JAX function, a `jax_op` or a kernel of a catalog.
        avals: its arguments: `jax.ShapeDtypeStruct`, tensors, arrays, or text such as `f32[128,4096]`. Other
            values are passed as they are.
        values: values of arguments by position, where what the kernel does depends on them: group sizes,
            lengths, page tables.
        matmul_flops: useful operations of the matrix units; None if not known.
        flops: useful operations in all; None if not known.
        bytes_read: bytes that must be read; None if not known.
        bytes_written: bytes that must be written; None if not known.
        mesh: for a program over several devices, a mesh made by `bridge.topology.mesh`.
        in_specs: how each array lies on it; see `bridge.topology.compile_for`.
        out_specs: how the results lie on it.
    """

    name: str
    fn: Callable[..., Any]
    avals: tuple[Any, ...]
    values: Mapping[int, np.ndarray] = field(default_factory=dict)
    matmul_flops: int | None = None
    flops: int | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None
    mesh: Any = None
    in_specs: Any = None
    out_specs: Any = None


class Scorer(Protocol):
    """Gives scores. All scores of one scorer have the same source and may be ranked."""

    @property
    def source(self) -> str:
        """The source of its scores."""
        ...

    def score(self, workload: Workload) -> Score:
        """The score of a workload. Raises if it does not compile or cannot be scored."""
        ...


def best(scores: Sequence[Score], *, allow_low_confidence: bool = False) -> int:
    """The place of the fastest score. See `rank`."""
    return rank(scores, allow_low_confidence=allow_low_confidence)[0]


def rank(scores: Sequence[Score], *, allow_low_confidence: bool = False) -> list[int]:
    """Places of `scores`, fastest first.

    Raises:
        ValueError: there are none; they differ in source or chip; or one has low confidence, unless
            `allow_low_confidence`.
    """
    if not scores:
        raise ValueError("expected at least one score, got none")
    for what in ("source", "chip"):
        different = sorted({getattr(score, what) for score in scores})
        if len(different) > 1:
            raise ValueError(f"scores of one ranking must have one {what}, got {' and '.join(different)}")
    for place, score in enumerate(scores):
        if score.confidence == "low" and not allow_low_confidence:
            raise ValueError(
                f"score {place} has low confidence ({'; '.join(score.reasons)}); leave it out, or pass "
                "allow_low_confidence=True"
            )
    return sorted(range(len(scores)), key=lambda place: scores[place].time_s)

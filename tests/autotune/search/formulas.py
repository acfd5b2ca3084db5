"""Spaces without kernels: the time of a tiling is a formula, so everything is known and nothing compiles."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.score import Score, Workload
from autotune.search import Subject
from autotune.search.subject import tiling_text
from autotune.spec import Candidate
from bridge.chips import chip

SIZES = (128, 256, 512, 1024)


@dataclass(frozen=True)
class Tiles:
    """The tiling of the kernels that are not there."""

    tile_m: int
    tile_n: int
    turned: bool = False


def score(seconds: float, *, vmem_bytes: int = 0, confidence: str = "high", on: str = "v6e") -> Score:
    """A score with a time, and little else."""
    return Score(
        time_s=seconds,
        source="schedule",
        bound="hbm",
        units={},
        breakdown={},
        dma_bytes_read=0,
        dma_bytes_written=0,
        vmem_bytes=vmem_bytes,
        spills=0,
        grid_steps=None,
        confidence=confidence,
        reasons=() if confidence == "high" else ("a branch was not known",),
        unknowns=(),
        chip=on,
    )


@dataclass
class FormulaScorer:
    """Scores by a function of the tiling, and counts."""

    seconds: Callable[[Tiles], float | Score]
    source: str = "schedule"
    asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def score(self, workload: Workload) -> Score:
        with self.lock:
            self.asked.append(workload.name)
        (tiling,) = workload.avals
        found = self.seconds(tiling)
        return found if isinstance(found, Score) else dataclasses.replace(score(found), source=self.source)


def bowl(tiling: Tiles) -> float:
    """Fastest at 512 x 256, and slower with every step away from it."""
    steps = abs(SIZES.index(tiling.tile_m) - 2) + 1.5 * abs(SIZES.index(tiling.tile_n) - 1)
    return 1e-3 * (1 + 0.3 * steps + 0.2 * tiling.turned)


def make_subject(**changes: object) -> Subject:
    """32 legal tilings, the default far from the best; VMEM is that of a block of float32."""
    tilings = [Tiles(m, n, turned) for m, n, turned in itertools.product(SIZES, SIZES, (False, True))]
    subject = Subject(
        name="bowl",
        chip=chip("v6e"),
        candidates=tuple(Candidate(t, 4 * t.tile_m * t.tile_n) for t in tilings),
        workloads=lambda tiling: (Workload(f"bowl {tiling_text(tiling)}", print, (tiling,)),),
        default=Tiles(128, 128),
    )
    return dataclasses.replace(subject, **changes)  # pyright: ignore[reportArgumentType]

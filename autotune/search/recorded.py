"""A space whose candidates were all scored: searches are tested on it without compiling."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.score.protocol import Workload
from autotune.score.replay import Recording, ReplayScorer
from autotune.search.subject import Subject, named_sizes, tiling_text
from autotune.spec import Candidate
from bridge.chips import chip


@dataclass(frozen=True)
class RecordedSpace:
    """Tilings with what was recorded of each.

    It knows the kernel by name only, and goes on meaning the same when the kernel changes.

    Attributes:
        name: what was tuned; the names of workloads are this, the phase and the tiling.
        chip: name of the chip.
        phases: what was scored.
        default: sizes of the default tiling; None if there is none.
        candidates: (sizes, VMEM bytes) of each legal tiling, in the order of the space.
        recording: the results.
    """

    name: str
    chip: str
    phases: tuple[str, ...]
    default: Mapping[str, Any] | None
    candidates: tuple[tuple[Mapping[str, Any], int], ...]
    recording: Recording = field(default_factory=Recording, compare=False)

    @classmethod
    def of(cls, subject: Subject, phases: tuple[str, ...]) -> RecordedSpace:
        """The legal candidates of a kernel, with nothing recorded yet."""
        return cls(
            subject.name,
            subject.chip.name,
            phases,
            None if subject.default is None else dataclasses.asdict(subject.default),
            tuple((dataclasses.asdict(c.tiling), c.vmem_bytes) for c in subject.candidates if c.legal),
        )

    @property
    def missing(self) -> int:
        """How many workloads are not recorded yet."""
        return len(self.candidates) * len(self.phases) - len(self.recording)

    def scorer(self) -> ReplayScorer:
        """Gives what is recorded."""
        return ReplayScorer(self.recording)

    def subject(self) -> Subject:
        """What `tune` takes. Its workloads have names only: nothing can be compiled."""

        def workloads(tiling: Any) -> tuple[Workload, ...]:
            names = (f"{self.name} {phase} {tiling_text(tiling)}" for phase in self.phases)
            return tuple(Workload(name, _cannot_run, ()) for name in names)

        first, _ = self.candidates[0]
        sizes = named_sizes(tuple(first))
        return Subject(
            name=self.name,
            chip=chip(self.chip),
            candidates=tuple(Candidate(sizes(**tiling), vmem) for tiling, vmem in self.candidates),
            workloads=workloads,
            default=None if self.default is None else sizes(**self.default),
        )

    # Files ----------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write it all. Whoever reads meanwhile finds the file before or after, and no part of it."""
        names = list(self.candidates[0][0])
        record = {
            "name": self.name,
            "chip": self.chip,
            "phases": self.phases,
            "default": self.default,
            "sizes": names,
            "candidates": [[*(tiling[name] for name in names), vmem] for tiling, vmem in self.candidates],
            "recording": self.recording.to_record(),
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> RecordedSpace:
        """The space that `save` wrote. Raises `ValueError` for anything else."""
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                record["name"],
                record["chip"],
                tuple(record["phases"]),
                record["default"],
                tuple(
                    (dict(zip(record["sizes"], values, strict=True)), vmem)
                    for *values, vmem in record["candidates"]
                ),
                Recording.from_record(record["recording"]),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a recorded space: {type(error).__name__}: {error}") from error


def _cannot_run(*arrays: Any) -> Any:
    raise NotImplementedError("a recorded space has scores, and no functions")

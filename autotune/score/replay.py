"""Scores from a file: what another scorer gave once, and what it refused. Nothing is compiled.

A workload is known by its name, so names must tell workloads apart; those of `autotune.search` have the
problem, the phase and the tiling.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.score.protocol import Score, Scorer, Workload
from bridge.aot.errors import CompilerMissing

FORMAT = 1
"""Of the records that `Recording.to_record` makes."""


class NotRecordedError(LookupError):
    """A recording says nothing about a workload."""


class RecordedError(RuntimeError):
    """What a scorer raised when the recording was made.

    Attributes:
        kind: name of the type of what was raised.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Failure:
    """That a workload has no score: the type of what was raised, and its text."""

    kind: str
    message: str


class Recording:
    """Results by the name of the workload. All scores have one source and one chip. Any thread may use it."""

    def __init__(self, results: Mapping[str, Score | Failure] | None = None) -> None:
        """A recording of `results`. Raises `ValueError` if they differ in source or chip."""
        self._results: dict[str, Score | Failure] = {}
        self._lock = threading.Lock()
        for name, result in (results or {}).items():
            self.add(name, result)

    def add(self, name: str, result: Score | Failure) -> None:
        """Keep `result`, without what each kernel has in it.

        Raises:
            ValueError: a score has another source or chip than those before it.
        """
        if isinstance(result, Score):
            result = dataclasses.replace(result, kernels=())
        with self._lock:
            first = self._first()
            if first is not None and isinstance(result, Score):
                for what in ("source", "chip"):
                    had, got = getattr(first, what), getattr(result, what)
                    if had != got:
                        raise ValueError(f"a recording has one {what}: it has {had}, and {name} is of {got}")
            self._results[name] = result

    def get(self, name: str) -> Score | Failure | None:
        """What is known of a workload; None if nothing is."""
        return self._results.get(name)

    @property
    def source(self) -> str:
        """The source of its scores. Raises `ValueError` if it has none."""
        first = self._first()
        if first is None:
            raise ValueError("the recording has no scores, so no source")
        return first.source

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._results))

    def _first(self) -> Score | None:
        return next((result for result in self._results.values() if isinstance(result, Score)), None)

    # Records --------------------------------------------------------------------------------------

    def to_record(self) -> dict[str, Any]:
        """The recording as JSON takes it: what all scores and all names have in common is there once."""
        with self._lock:
            results = dict(self._results)
        scores = [json.loads(r.to_json()) for r in results.values() if isinstance(r, Score)]
        common = {
            field: value
            for field, value in (scores[0] if scores else {}).items()
            if all(score[field] == value for score in scores)
        }
        prefix = os.path.commonprefix(list(results)) if len(results) > 1 else ""
        entries: dict[str, Any] = {}
        for name, result in results.items():
            if isinstance(result, Failure):
                entries[name[len(prefix) :]] = {"failed": [result.kind, result.message]}
            else:
                fields = json.loads(result.to_json())
                entries[name[len(prefix) :]] = {k: v for k, v in fields.items() if k not in common}
        return {"format": FORMAT, "prefix": prefix, "common": common, "results": entries}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Recording:
        """The recording that `to_record` wrote. Raises `ValueError` for anything else."""
        try:
            if record["format"] != FORMAT:
                raise ValueError(f"a recording of format {FORMAT} was expected, got {record['format']!r}")
            found: dict[str, Score | Failure] = {}
            for name, entry in record["results"].items():
                if "failed" in entry:
                    kind, message = entry["failed"]
                    found[record["prefix"] + name] = Failure(kind, message)
                else:
                    found[record["prefix"] + name] = Score.from_json(json.dumps(record["common"] | entry))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a recording: {type(error).__name__}: {error}") from error
        return cls(found)


# Scorers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayScorer:
    """Gives the scores of a recording, with the source that they have there.

    Attributes:
        recording: what was recorded.
    """

    recording: Recording

    @property
    def source(self) -> str:
        """The source of the recorded scores."""
        return self.recording.source

    def score(self, workload: Workload) -> Score:
        """The recorded score of the workload called `workload.name`.

        Raises:
            RecordedError: the scorer raised when the recording was made.
            NotRecordedError: the recording has nothing of that name.
        """
        result = self.recording.get(workload.name)
        if result is None:
            raise NotRecordedError(f"{workload.name} was not recorded")
        if isinstance(result, Failure):
            raise RecordedError(result.kind, result.message)
        return result


@dataclass(frozen=True)
class Recorder:
    """A scorer that asks another one, and keeps what it gives. What is recorded already is not asked again.

    Attributes:
        scorer: who is asked.
        recording: where results are kept.
        changed: called after each new result, by the thread that asked for it: to save the recording.
    """

    scorer: Scorer
    recording: Recording
    changed: Callable[[], None] | None = None

    @property
    def source(self) -> str:
        """The source of the other scorer."""
        return self.scorer.source

    def score(self, workload: Workload) -> Score:
        """The score of `workload`. Raises what the other scorer raises, and again what it raised once."""
        if self.recording.get(workload.name) is not None:
            return ReplayScorer(self.recording).score(workload)
        try:
            score = self.scorer.score(workload)
        except CompilerMissing:
            raise  # which says something of this machine, and nothing of the workload
        except Exception as error:
            self._keep(workload, Failure(type(error).__name__, str(error)))
            raise
        self._keep(workload, score)
        return score

    def _keep(self, workload: Workload, result: Score | Failure) -> None:
        self.recording.add(workload.name, result)
        if self.changed is not None:
            self.changed()

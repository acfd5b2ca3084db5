"""One result of tuning, and how two of the same thing are merged."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.problem import Problem
from autotune.score.protocol import SOURCES
from bridge.chips import chip as chip_called

Value = bool | int | float | str | None
"""What params of problems and fields of tilings are."""

Identity = tuple[str, str, str, str]
"""The key: problem, chip, source and conditions, as text."""


@dataclass(frozen=True)
class Failure:
    """A tiling that is not to be tried again, and why.

    Attributes:
        tiling: its fields.
        reason: one line.
    """

    tiling: Mapping[str, Value]
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiling", _tiling("tiling of a failure", self.tiling))
        _text("reason", self.reason)


@dataclass(frozen=True)
class Provenance:
    """Where an entry comes from. It is told, and decides nothing but ties.

    Attributes:
        made: when, as in `2026-01-31T12:00:00Z`.
        tool: version of the package that tuned.
        tried: how many tilings got a score.
        versions: versions that are no condition.
    """

    made: str = ""
    tool: str = ""
    tried: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _text("made", self.made)
        _text("tool", self.tool)
        if type(self.tried) is not int or self.tried < 0:
            raise ValueError(f"tried must be a count, got {self.tried!r}")
        object.__setattr__(self, "versions", _texts("versions", self.versions))


@dataclass(frozen=True)
class Entry:
    """The best tiling found for a problem on a chip, and those that failed.

    Raises `ValueError` or `TypeError` for an unknown chip or source, a time that is no positive number, a
    tiling without a time, a winner that failed, and values that JSON does not hold.

    Attributes:
        problem: what was tuned.
        chip: name of the chip it was tuned for.
        source: where times come from: `measured`, `schedule` or `roofline`.
        tiling: fields of the fastest tiling; None if every one failed.
        time_s: its time; None if there is none.
        failures: tilings that do not compile, give wrong numbers or take too long.
        conditions: what must be the same for the entry to hold, see `autotune.cache.conditions`. What it does
            not name is not asked for.
        provenance: where it comes from.
    """

    problem: Problem
    chip: str
    source: str
    tiling: Mapping[str, Value] | None
    time_s: float | None
    failures: tuple[Failure, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        chip_called(self.chip)  # a CPU is none: its times have no place here
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {self.source!r}")
        for name, value in self.problem.params:
            _value(f"param {name}", value)
        for named in (self.problem.arrays, self.problem.params):
            if len(dict(named)) < len(named):
                raise ValueError(f"{self.problem}: a name is there twice")
        object.__setattr__(self, "conditions", _texts("conditions", self.conditions))
        by_tiling = {tiling_text(failure.tiling): failure for failure in self.failures}
        object.__setattr__(self, "failures", tuple(by_tiling[text] for text in sorted(by_tiling)))
        if self.tiling is None:
            if self.time_s is not None or not self.failures:
                raise ValueError(f"{self.problem}: an entry without a tiling has failures, and no time")
            return
        object.__setattr__(self, "tiling", _tiling("tiling", self.tiling))
        time_s = self.time_s
        if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not 0 < time_s < math.inf:
            raise ValueError(f"{self.problem}: time_s must be a positive number, got {time_s!r}")
        object.__setattr__(self, "time_s", float(time_s))  # JSON has no numbers of numpy
        if tiling_text(self.tiling) in by_tiling:
            raise ValueError(f"{self.problem}: {dict(self.tiling)} is the best tiling, and failed")

    @property
    def status(self) -> str:
        """`ok`, or `failed` if every tiling did."""
        return "failed" if self.tiling is None else "ok"

    @property
    def identity(self) -> Identity:
        """What it is a result of: entries with the same one are merged."""
        conditions = json.dumps(sorted(self.conditions.items()))
        return str(self.problem), self.chip, self.source, conditions

    def without_conditions(self, *names: str) -> Entry:
        """The same entry, holding whatever these conditions are; what they were stays in its provenance.

        For tilings that are shipped, and should outlive a release of the compiler.
        """
        kept = {name: value for name, value in self.conditions.items() if name not in names}
        freed = {name: value for name, value in self.conditions.items() if name in names}
        versions = {**self.provenance.versions, **freed}
        provenance = dataclasses.replace(self.provenance, versions=versions)
        return dataclasses.replace(self, conditions=kept, provenance=provenance)


def tiling_fields(tiling: Any) -> dict[str, Value]:
    """The fields of a tiling. Raises `TypeError` for one with other values than JSON's simple ones."""
    values = {f.name: getattr(tiling, f.name) for f in dataclasses.fields(tiling)}
    return _tiling(type(tiling).__name__, values)


def tiling_text(fields: Mapping[str, Value]) -> str:
    """The fields of a tiling as a key."""
    return json.dumps(fields, sort_keys=True)


# Merging ------------------------------------------------------------------------------------------


def merged(
    old: Mapping[Identity, Entry], new: Iterable[Entry], *, replace: bool = False
) -> dict[Identity, Entry]:
    """`old` with `new` entries; those with the same identity are merged, or replaced."""
    result = dict(old)
    for entry in new:
        present = result.get(entry.identity)
        result[entry.identity] = entry if present is None or replace else merge(present, entry)
    return result


def merge(a: Entry, b: Entry) -> Entry:
    """What is known after both: the fastest tiling that failed in neither, and all failures.

    The order does not matter. Of equal times the later one wins. Raises `ValueError` if their identities
    differ.
    """
    if a.identity != b.identity:
        raise ValueError(f"entries of different things are not merged: {a.identity} and {b.identity}")
    failures: dict[str, Failure] = {}
    for failure in sorted((*a.failures, *b.failures), key=lambda f: f.reason):
        failures.setdefault(tiling_text(failure.tiling), failure)
    latest_first = sorted(sorted((a, b), key=_order), key=lambda entry: entry.provenance.made, reverse=True)
    good = [entry for entry in latest_first if _tiling_text(entry) not in (None, *failures)]
    # Of equal ones, min() takes the first.
    best = min(good, key=lambda entry: entry.time_s or math.inf, default=None)
    if best is None:
        best = dataclasses.replace(
            latest_first[0], tiling=None, time_s=None, failures=tuple(failures.values())
        )
    return dataclasses.replace(best, failures=tuple(failures.values()))


def _tiling_text(entry: Entry) -> str | None:
    return None if entry.tiling is None else tiling_text(entry.tiling)


def _order(entry: Entry) -> str:
    """Anything that depends on all of an entry that may be kept."""
    tiling = None if entry.tiling is None else dict(entry.tiling)
    return json.dumps([tiling, dataclasses.asdict(entry.provenance)])


# Checks -------------------------------------------------------------------------------------------


def _value(what: str, value: object) -> None:
    if value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"{what} must be a bool, a number, a string or None, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} must be finite, got {value!r}")


def _tiling(what: str, fields: Mapping[str, Value]) -> dict[str, Value]:
    if not isinstance(fields, Mapping):
        raise TypeError(f"{what} must map names to values, got {fields!r}")
    for name, value in fields.items():
        _text("a field's name", name)
        _value(f"{what}: {name}", value)
    return dict(fields)


def _texts(what: str, values: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} must map names to texts, got {values!r}")
    for name, value in values.items():
        _text(f"{what}: a name", name)
        _text(f"{what}: {name}", value)
    return dict(sorted(values.items()))


def _text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, got {value!r}")

"""Recorded scores come back as they were, failures too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autotune.score import KernelScore, Score, Workload
from autotune.score.replay import (
    Failure,
    NotRecordedError,
    RecordedError,
    Recorder,
    Recording,
    ReplayScorer,
)
from autotune.search.recorded import RecordedSpace
from bridge.aot.errors import CompilerMissing

from .formulas import FormulaScorer, Tiles, bowl, make_subject, score


def workload(tiling: Tiles) -> Workload:
    return make_subject().workloads(tiling)[0]


def refuses_large(tiling: Tiles) -> float:
    if tiling.tile_m == 1024:
        raise MemoryError("too large\nin many words")
    return bowl(tiling)


def through_json(recording: Recording) -> Recording:
    return Recording.from_record(json.loads(json.dumps(recording.to_record())))


def test_a_replay_says_what_the_scorer_said() -> None:
    real = FormulaScorer(refuses_large)
    recorder = Recorder(real, Recording())
    for candidate in make_subject().candidates:
        try:
            recorder.score(workload(candidate.tiling))
        except MemoryError:
            pass
    replay = ReplayScorer(through_json(recorder.recording))
    assert replay.source == "schedule"
    for candidate in make_subject().candidates:
        if candidate.tiling.tile_m == 1024:
            with pytest.raises(RecordedError, match=r"too large\nin many words") as raised:
                replay.score(workload(candidate.tiling))
            assert raised.value.kind == "MemoryError"
        else:
            assert replay.score(workload(candidate.tiling)) == score(bowl(candidate.tiling))


def test_all_fields_of_a_score_are_kept_but_its_kernels() -> None:
    kernel = KernelScore("k", True, 1, 1.0, 0.0, False, "mxu", {}, 1, 1, 1, 0, None, 0)
    full = dataclasses.replace(
        score(0.1 + 0.2), units={"mxu": 1 / 3}, versions={"libtpu": "1"}, reasons=("a",), kernels=(kernel,)
    )
    other = dataclasses.replace(full, time_s=2.0, units={"mxu": 0.5}, kernels=())
    kept = through_json(Recording({"one": full, "other": other}))
    assert kept.get("one") == dataclasses.replace(full, kernels=())
    assert kept.get("other") == other
    record = Recording({"one": full, "other": other}).to_record()
    assert "versions" in record["common"] and "time_s" not in record["common"]


def test_names_of_which_one_begins_another() -> None:
    results = {"a b": score(1.0), "a b c": score(2.0), "a": Failure("E", "")}
    kept = through_json(Recording(results))
    assert {name: kept.get(name) for name in kept} == results


def test_what_is_recorded_is_not_asked_again() -> None:
    real, saved = FormulaScorer(refuses_large), []
    recorder = Recorder(real, Recording(), lambda: saved.append(1))
    assert recorder.score(workload(Tiles(128, 128))) == recorder.score(workload(Tiles(128, 128)))
    for error in (MemoryError, RecordedError):
        with pytest.raises(error, match="too large"):
            recorder.score(workload(Tiles(1024, 128)))
    assert len(real.asked) == len(saved) == 2


def test_a_missing_compiler_is_not_recorded() -> None:
    def missing(tiling: Tiles) -> float:
        raise CompilerMissing("install it")

    recorder = Recorder(FormulaScorer(missing), Recording())
    with pytest.raises(CompilerMissing):
        recorder.score(workload(Tiles(128, 128)))
    assert len(recorder.recording) == 0


def test_what_was_not_recorded_is_an_error() -> None:
    with pytest.raises(NotRecordedError, match=r"bowl \[tile_m=128"):
        ReplayScorer(Recording({"else": score(1.0)})).score(workload(Tiles(128, 128)))
    with pytest.raises(ValueError, match="no scores"):
        _ = ReplayScorer(Recording()).source


@pytest.mark.parametrize(
    ("change", "message"),
    [({"source": "measured"}, "one source: it has schedule"), ({"chip": "v5e"}, "one chip: it has v6e")],
)
def test_a_recording_has_one_source_and_chip(change: dict[str, str], message: str) -> None:
    other: Score = dataclasses.replace(score(1.0), **change)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=message):
        Recording({"one": score(1.0), "other": other})


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 0}', '{"format": 1, "results": [1], "prefix": ""}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="recording"):
        Recording.from_record(json.loads(text))


def test_spaces_go_through_files(tmp_path: Path) -> None:
    subject = make_subject()
    space = RecordedSpace.of(subject, ("forward",))
    assert space.missing == 32
    path = tmp_path / "space.json"
    space.recording.add("bowl forward [tile_m=128, tile_n=128, turned=False]", score(1.0))
    space.save(path)
    loaded = RecordedSpace.load(path)
    assert loaded == space and loaded.missing == 31
    again = loaded.subject()
    assert again.chip == subject.chip
    assert [c.vmem_bytes for c in again.candidates] == [c.vmem_bytes for c in subject.candidates]
    (first,) = again.workloads(again.default)
    assert loaded.scorer().score(first).time_s == 1.0
    path.write_text('{"name": 1}')
    with pytest.raises(ValueError, match="not a recorded space"):
        RecordedSpace.load(path)

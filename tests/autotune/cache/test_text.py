"""The format: everything comes back, the same entries give the same text, and nothing else is read."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.cache import BadFile, Entry, Failure, Provenance, from_text, to_text
from autotune.cache.entry import tiling_text
from autotune.problem import ArraySpec, Problem

EXAMPLE = Entry(
    Problem.of(
        "rms_norm",
        {"x": ArraySpec((8192, 4096), "bfloat16"), "weight": ArraySpec((4096,), "bfloat16"), "bias": None},
        {"eps": 1e-6},
    ),
    "v5e",
    "schedule",
    {"tile_rows": 256},
    2.5e-4,
    (Failure({"tile_rows": 4096}, "needs 80 MiB of VMEM"),),
    {"jax": "0.10.2", "kernel": "0123456789abcdef"},
    Provenance("2026-01-31T12:00:00Z", "0.1.0", 12, {}),
)

TEXT = """\
{
  "schema": 1,
  "chip": "v5e",
  "entries": [
    {
      "problem": "rms_norm(x=bfloat16[8192,4096], weight=bfloat16[4096], bias=none, eps=1e-06)",
      "kernel": "rms_norm",
      "arrays": {"x": "bfloat16[8192,4096]", "weight": "bfloat16[4096]", "bias": null},
      "params": {"eps": 1e-06},
      "source": "schedule",
      "status": "ok",
      "tiling": {"tile_rows": 256},
      "time_s": 0.00025,
      "conditions": {"jax": "0.10.2", "kernel": "0123456789abcdef"},
      "provenance": {"made": "2026-01-31T12:00:00Z", "tool": "0.1.0", "tried": 12, "versions": {}},
      "failures": [
        {"tiling": {"tile_rows": 4096}, "reason": "needs 80 MiB of VMEM"}
      ]
    }
  ]
}
"""


def test_the_text_is_for_people() -> None:
    assert to_text("v5e", [EXAMPLE]) == TEXT
    assert from_text(TEXT.encode(), "v5e") == ("v5e", [EXAMPLE])
    assert from_text(to_text("v6e", []).encode()) == ("v6e", [])


def test_the_example_in_the_documentation_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tilings.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert to_text(*from_text(example.encode())) == example


def test_marks_and_line_ends_of_other_editors_are_read() -> None:
    assert from_text(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode()) == ("v5e", [EXAMPLE])


CHARACTERS = "ab01 =[](){},.:'\"\\\n\0\x7f\u00e9\u2028\ud800\U0001f600"
"""Those that a format may trip over, half a surrogate pair included."""

names = st.text(CHARACTERS, min_size=1, max_size=6)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names
tilings = st.dictionaries(names, values, max_size=4)
arrays = st.none() | st.builds(
    ArraySpec,
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    st.sampled_from(["bfloat16", "float32", "int8", "float8_e4m3fn", "bool", "<f4"]),
)
problems = st.builds(
    Problem.of, names, st.dictionaries(names, arrays, max_size=3), st.dictionaries(names, values, max_size=3)
)
texts = st.dictionaries(names, names, max_size=3)
provenances = st.builds(Provenance, names, names, st.integers(0, 10**6), texts)
times = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    failures = draw(st.lists(st.builds(Failure, tilings, names), min_size=1, max_size=3))
    tiling = draw(st.none() | tilings)
    if tiling is not None:
        failures = [f for f in failures if tiling_text(f.tiling) != tiling_text(tiling)]
    return Entry(
        problem=draw(problems),
        chip="v6e",
        source=draw(st.sampled_from(["measured", "schedule", "roofline"])),
        tiling=tiling,
        time_s=None if tiling is None else draw(times),
        failures=tuple(failures),
        conditions=draw(texts),
        provenance=draw(provenances),
    )


# Machines may be slow; how slow is no matter of this test.
patient = settings(
    deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@patient
@given(st.lists(entries(), max_size=3, unique_by=lambda entry: entry.identity), st.randoms())
def test_everything_comes_back(some: list[Entry], chance: random.Random) -> None:
    text = to_text("v6e", some)
    chip, found = from_text(text.encode(), "v6e")
    assert chip == "v6e"
    assert {entry.identity: entry for entry in found} == {entry.identity: entry for entry in some}
    # Types as well, which == between numbers does not see.
    assert sorted(map(repr, found)) == sorted(map(repr, some))
    chance.shuffle(some)
    assert to_text("v6e", some) == text == to_text("v6e", found)


def changed(**changes: Any) -> bytes:
    content = json.loads(TEXT)
    content["entries"][0].update(changes)
    return json.dumps(content).encode()


BAD_FILES: dict[str, bytes] = {
    "empty": b"",
    "zeros": b"\0" * 512,
    "not text": b"\xff\xfe\x00{",
    "cut off": TEXT[:-40].encode(),
    "conflict of a merge": TEXT.replace('"time_s"', '<<<<<<< HEAD\n"time_s"').encode(),
    "a list": b"[]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "later version": TEXT.replace('"schema": 1', '"schema": 2').encode(),
    "version of another type": TEXT.replace('"schema": 1', '"schema": true').encode(),
    "no version": TEXT.replace('"schema": 1,', "").encode(),
    "further name": TEXT.replace('"chip": "v5e"', '"chip": "v5e", "date": 1').encode(),
    "another chip": TEXT.replace('"chip": "v5e"', '"chip": "v6e"').encode(),
    "chip of another type": TEXT.replace('"chip": "v5e"', '"chip": ["v5e"]').encode(),
    "entries of another type": b'{"schema": 1, "chip": "v5e", "entries": {}}',
    "entry of another type": b'{"schema": 1, "chip": "v5e", "entries": [1]}',
    "name twice": TEXT.replace('"time_s"', '"status": "ok", "time_s"').encode(),
    "entry twice": json.dumps({**json.loads(TEXT), "entries": json.loads(TEXT)["entries"] * 2}).encode(),
    "NaN": TEXT.replace("0.00025", "NaN").encode(),
    "too large a number": TEXT.replace("0.00025", "1e999").encode(),
    "huge integer": TEXT.replace("0.00025", "9" * 5000).encode(),
    "negative time": changed(time_s=-1),
    "time of another type": changed(time_s="1"),
    "no time": changed(time_s=None),
    "unknown source": changed(source="guess"),
    "wrong status": changed(status="failed"),
    "kernel of another type": changed(kernel=1),
    "text of another problem": changed(problem="rms_norm()"),
    "another shape than the text": changed(arrays={"x": "bfloat16[1,1]"}),
    "no array": changed(arrays={"x": "bfloat16"}),
    "unknown dtype": changed(arrays={"x": "bfloat17[1]"}),
    "negative size": changed(arrays={"x": "bfloat16[-1]"}),
    "array of another type": changed(arrays={"x": 1}),
    "arrays of another type": changed(arrays=[]),
    "param of another type": changed(params={"eps": [1]}),
    "tiling of another type": changed(tiling=256),
    "tiling with a list": changed(tiling={"tile_rows": [256]}),
    "conditions of another type": changed(conditions={"jax": 10}),
    "failures of another type": changed(failures={}),
    "failure without a reason": changed(failures=[{"tiling": {}}]),
    "winner that failed": changed(failures=[{"tiling": {"tile_rows": 256}, "reason": "wrong"}]),
    "provenance of another type": changed(provenance=[]),
    "count of another type": changed(provenance={"made": "", "tool": "", "tried": 1.5, "versions": {}}),
}


@pytest.mark.parametrize("data", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files_are_refused(data: bytes) -> None:
    with pytest.raises(BadFile):
        from_text(data, "v5e")


@patient
@given(st.binary(max_size=64), st.integers(0, len(TEXT)), st.integers(0, 40))
def test_damaged_files_are_read_or_refused(data: bytes, place: int, removed: int) -> None:
    damaged = TEXT.encode()[:place] + data + TEXT.encode()[place + removed :]
    try:
        from_text(damaged, "v5e")
    except BadFile:
        pass

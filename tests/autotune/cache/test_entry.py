"""Entries: what they refuse, and how two are merged."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cache import Entry, Failure, Provenance, merge, tiling_fields
from autotune.cache.entry import merged
from autotune.problem import ArraySpec, Problem

PROBLEM = Problem.of("op", {"x": ArraySpec((8, 128), "float32")})


def entry(
    rows: int | None, time_s: float | None, failed: dict[int, str] | None = None, made: str = ""
) -> Entry:
    failures = tuple(Failure({"rows": rows}, reason) for rows, reason in (failed or {}).items())
    tiling = None if rows is None else {"rows": rows}
    return Entry(PROBLEM, "v5e", "schedule", tiling, time_s, failures, {"jax": "1"}, Provenance(made=made))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chip": "cpu"}, "unknown chip 'cpu'"),
        ({"chip": "interpret"}, "unknown chip"),
        ({"source": "guess"}, "source must be one of"),
        ({"time_s": math.nan}, "positive number, got nan"),
        ({"time_s": math.inf}, "positive number"),
        ({"time_s": 0.0}, "positive number"),
        ({"time_s": -1.0}, "positive number"),
        ({"time_s": None}, "positive number"),
        ({"time_s": True}, "positive number"),
        ({"tiling": None}, "without a tiling has failures, and no time"),
        ({"tiling": None, "time_s": None}, "without a tiling has failures"),
        ({"failures": (Failure({"rows": 8}, "wrong"),)}, "is the best tiling, and failed"),
        ({"tiling": {"rows": math.inf}}, "must be finite"),
        ({"problem": dataclasses.replace(PROBLEM, params=(("scale", math.nan),))}, "must be finite"),
        ({"problem": dataclasses.replace(PROBLEM, arrays=PROBLEM.arrays * 2)}, "a name is there twice"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(entry(8, 1.0), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiling": {"rows": (8, 8)}}, "rows must be a bool, a number"),
        ({"tiling": [8]}, "must map names to values"),
        ({"conditions": {"jax": 1}}, "jax must be a string"),
        ({"problem": dataclasses.replace(PROBLEM, params=(("scale", [1]),))}, "param scale must be"),
    ],
)
def test_bad_types_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(entry(8, 1.0), **changes)


def test_times_of_numpy_become_plain_ones() -> None:
    assert type(entry(8, np.float64(2.0)).time_s) is float


def test_status() -> None:
    assert entry(8, 1.0).status == "ok"
    assert entry(None, None, {8: "wrong"}).status == "failed"


def test_the_faster_one_wins_and_failures_are_kept() -> None:
    found = merge(entry(8, 2.0, {16: "spills"}), entry(32, 1.0, {64: "too large"}))
    assert (found.tiling, found.time_s) == ({"rows": 32}, 1.0)
    assert [failure.tiling["rows"] for failure in found.failures] == [16, 64]


def test_of_equal_times_the_later_one_wins() -> None:
    assert merge(entry(8, 1.0, made="2026-01-01"), entry(16, 1.0, made="2026-01-02")).tiling == {"rows": 16}
    assert merge(entry(8, 1.0), entry(16, 2.0, made="2026-01-02")).tiling == {"rows": 8}


def test_what_failed_once_never_wins() -> None:
    fast, slow = entry(8, 1.0), entry(16, 2.0, {8: "wrong numbers"})
    assert merge(fast, slow).tiling == {"rows": 16}
    nothing = merge(fast, entry(None, None, {8: "wrong numbers"}))
    assert (nothing.status, nothing.tiling, nothing.time_s) == ("failed", None, None)


def test_only_entries_of_the_same_thing_are_merged() -> None:
    for changes in (
        {"chip": "v6e"},
        {"source": "measured"},
        {"conditions": {"jax": "2"}},
        {"conditions": {}},
        {"problem": dataclasses.replace(PROBLEM, params=(("causal", True),))},
    ):
        other = dataclasses.replace(entry(8, 0.1), **changes)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="different things"):
            merge(entry(8, 1.0), other)
        both = merged({}, [entry(16, 1.0), other])
        assert [e.tiling for e in both.values()] == [{"rows": 16}, {"rows": 8}]


def test_replaced_entries_take_their_failures_along() -> None:
    old = merged({}, [entry(8, 1.0, {16: "timed out"})])
    (found,) = merged(old, [entry(16, 2.0)], replace=True).values()
    assert found == entry(16, 2.0)


some_entries = st.builds(
    lambda rows, time_s, failed, made: entry(
        rows, time_s, {other: reason for other, reason in failed.items() if other != rows}, made
    ),
    rows=st.sampled_from([8, 16, 24]),
    time_s=st.sampled_from([1.0, 2.0, 3.0]),
    failed=st.dictionaries(st.sampled_from([8, 16, 24, 32]), st.sampled_from(["a", "b"]), max_size=2),
    made=st.sampled_from(["", "2026-01-01", "2026-01-02"]),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(some_entries, some_entries)
def test_the_order_of_two_does_not_matter(a: Entry, b: Entry) -> None:
    assert merge(a, b) == merge(b, a)
    assert merge(a, a) == a
    assert merge(merge(a, b), b) == merge(a, b)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(some_entries, min_size=1, max_size=4))
def test_the_order_of_many_does_not_matter_to_failures(entries: list[Entry]) -> None:
    results = [merged({}, order) for order in itertools.permutations(entries)]
    failures = [next(iter(result.values())).failures for result in results]
    assert all(found == failures[0] for found in failures)


@dataclasses.dataclass(frozen=True)
class Nested:
    inner: Failure


def test_tilings_have_simple_fields() -> None:
    with pytest.raises(TypeError, match="Nested: inner must be a bool"):
        tiling_fields(Nested(Failure({}, "")))


def test_shipped_entries_can_hold_for_every_compiler() -> None:
    found = entry(8, 1.0).without_conditions("jax", "libtpu")
    assert found.conditions == {}
    assert found.provenance.versions == {"jax": "1"}

"""The parts of the sanitizer by themselves."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

import bridge
from bridge.interpretation import checks, shadows
from bridge.interpretation.happens_before import Access, Actor, Arrivals, Races, covers, overlap
from bridge.interpretation.shadows import Given

from . import planted


@pytest.mark.parametrize(
    ("one", "other", "common", "held"),
    [
        ((slice(0, 8), slice(0, 4)), (slice(4, 6),), True, False),
        ((slice(0, 8),), (slice(4, 6), slice(0, 4)), True, True),
        ((slice(0, 8),), (slice(8, 9),), False, False),
        ((slice(0, 8),), (7,), True, True),
        ((7,), (slice(0, 8),), True, False),
        ((), (3, 4), True, True),
        ((slice(0, 9, 2),), (slice(1, 9, 2),), False, False),
        ((slice(0, 9, 2),), (slice(1, 9, 3),), True, False),
        ((slice(0, 9),), (slice(1, 9, 3),), True, True),
        ((slice(3, 3),), (slice(0, 9),), False, False),
    ],
)
def test_ranges(one: Any, other: Any, common: bool, held: bool) -> None:
    assert overlap(one, other) == overlap(other, one) == common
    assert covers(one, other) == held


def races(alone: bool = False) -> tuple[Races, list[tuple[Access, Access]]]:
    """A detector for cores 0 to 2, and what it tells."""
    found: list[tuple[Access, Access]] = []
    detector = Races(
        lambda new, old, _: found.append((new, old)),
        lambda device, _: Actor(device, device, False),
        str,
        lambda: alone,
    )
    return detector, found


def test_what_is_in_order_is_no_race() -> None:
    detector, found = races()
    detector.check_write(0, 0, [1, 0, 0], "a", (slice(0, 8),), source_info="first")
    detector.check_read(1, 0, [1, 1, 0], "a", (slice(0, 8),), source_info="second")
    detector.check_write(2, 0, [0, 0, 1], "b", (slice(0, 8),), source_info="elsewhere")
    detector.check_write(2, 0, [0, 0, 2], "a", (slice(8, 9),), source_info="beside it")
    assert not found
    detector.check_read(2, 0, [0, 0, 3], "a", (4,), source_info="third")
    ((new, old),) = found
    assert (new.line, old.line) == ("third", "first")
    assert detector.races_found


def test_reads_do_not_race_with_reads_but_with_a_write() -> None:
    detector, found = races()
    detector.check_read(0, 0, [1, 0, 0], "a", (), source_info="r0")
    detector.check_read(1, 0, [0, 1, 0], "a", (), source_info="r1")
    assert not found
    detector.check_write(2, 0, [1, 0, 1], "a", (), source_info="w2")
    ((new, old),) = found
    assert (new.line, old.line) == ("w2", "r1")


def test_covered_accesses_are_forgotten() -> None:
    detector, found = races()
    for step in range(1, 1000):
        detector.check_write(0, 0, [step, 0, 0], "a", (slice(0, 8),), source_info="w")
        detector.check_read(0, 0, [step, 0, 0], "a", (slice(0, 4),), source_info="r")
    assert len(detector._writes["a"]) == 1
    assert len(detector._reads["a"]) == 1
    detector.check_write(1, 0, [998, 1, 0], "a", (slice(0, 1),), source_info="late")
    assert {old.line for _, old in found} == {"w", "r"}


def test_nothing_is_kept_of_the_only_one() -> None:
    detector, _ = races(alone=True)
    detector.check_write(0, 0, [1, 0, 0], "a", (), source_info="w")
    assert not detector._writes


def test_a_wait_learns_from_the_signals_that_it_uses_up() -> None:
    arrivals = Arrivals()
    arrivals.come(2, [1, 0, 0], "a")
    arrivals.come(1, [0, 5, 0], "b")
    arrivals.come(1, [0, 0, 7], "c")
    assert arrivals.use(1).tolist() == [1, 0, 0]
    assert arrivals.use(2).tolist() == [1, 5, 0]
    assert [(arrival.left, arrival.origin) for arrival in arrivals] == [(1, "c")]
    assert arrivals.use(0) is None


def test_shadows() -> None:
    shadow = shadows.new_shadow((4, 4), Given((3, 2), written=False))
    assert shadow.tolist() == [[1, 1, 2, 2]] * 3 + [[2] * 4]
    shadows.mark(shadow, (slice(1, 9), slice(0, 1)), (3, 2), shadows.WRITTEN)
    assert shadow[:, 0].tolist() == [1, 0, 0, 2]
    states = np.array([[1, 0, 2]], np.uint8)
    shadows.mark(shadow, (slice(2, 3), slice(0, 3)), (3, 2), states)
    assert shadow[2].tolist() == [1, 0, 2, 2]
    assert shadows.new_shadow((), Given((), written=True)).tolist() == 0
    value = np.full((4, 4), 2**31 - 1, np.int32)
    shadows.fill_with_numbers(value, shadow)
    assert set(value[shadow != 0]) <= {0, 1} and (value[shadow == 0] == 2**31 - 1).all()


def test_another_jax_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(interpret_pallas_call, "_validate")
    spec = importlib.util.spec_from_file_location("other_checks", checks.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"not the one it knows \(.*_validate.*use jax 0.10.2"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_interpreter_is_put_back() -> None:
    """What a checked run replaces is there again afterwards."""
    names = ("DMA", "interpret_utils", "_get_randomized_grid_coordinates", "source_info_util")
    before = [getattr(interpret_pallas_call, name) for name in names]
    for call in (planted.copied_in("before"), planted.copied_in("never")):
        with bridge.sanitize(seeds=1):
            call(torch.ones(8, 128))
    assert [getattr(interpret_pallas_call, name) for name in names] == before

"""Masks given as tensors: some forms are recognised, and no other mask is ever taken for one of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_kernels.dropins import recognition
from tpu_kernels.dropins.recognition import Pattern, recognise

INF = float("inf")


def table(pattern: Pattern, rows: int, columns: int) -> torch.Tensor:
    """What a form stands for, [B or 1, 1, L, S]."""
    result = torch.ones(1, 1, rows, columns, dtype=torch.bool)
    if pattern.offset is not None:
        result = result & (torch.arange(columns) <= torch.arange(rows)[:, None] + pattern.offset)
    return result if pattern.keep is None else result & pattern.keep.cpu()[:, None, None, :]


def agrees(pattern: Pattern, mask: torch.Tensor) -> bool:
    visible = (mask if mask.dtype == torch.bool else mask == 0).cpu()
    return torch.equal(table(pattern, *mask.shape[-2:]).expand_as(visible), visible)


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("offset", [-2, 0, 1, 5, 20])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_causal_and_padding(
    device: torch.device, rows: int, columns: int, offset: int, padded: bool, kind: str
) -> None:
    mask = torch.ones(3, 1, rows, columns, dtype=torch.bool).tril(offset)
    if padded:
        mask[1, ..., : columns // 2] = False
        mask[2, ..., columns // 2 :] = False
    given = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -INF)
    pattern = recognise(given.to(device), (3, 2, rows, columns))
    # Some have no such form: where nothing that is kept is ever hidden by being later.
    assert pattern is not None and agrees(pattern, mask)
    if not padded and rows > 1 and 0 <= offset < columns - 1:
        assert pattern == (offset, None)


def test_every_mask_of_a_small_size() -> None:
    """All 2**9 masks of 3 x 3, and all 2**8 of two entries 2 x 2: a form that is found is the mask's."""
    found = 0
    for bits in itertools.product([False, True], repeat=9):
        mask = torch.tensor(bits).view(1, 1, 3, 3)
        pattern = recognise(mask, (2, 2, 3, 3))
        assert pattern is None or agrees(pattern, mask)
        wanted = any(
            torch.equal(table(Pattern(offset, torch.tensor([keep])), 3, 3), mask)
            for offset in (-3, -2, -1, 0, 1, 2)
            for keep in itertools.product([False, True], repeat=3)
        )
        assert wanted == (pattern is not None)
        found += pattern is not None
    assert found > 20
    for bits in itertools.product([False, True], repeat=8):
        mask = torch.tensor(bits).view(2, 1, 2, 2)
        pattern = recognise(mask, (2, 2, 2, 2))
        assert pattern is None or agrees(pattern, mask)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_element_is_enough_to_be_another_mask(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(2, 40)), data.draw(st.integers(2, 40))
    mask = torch.ones(2, 1, rows, columns, dtype=torch.bool).tril(data.draw(st.integers(0, 3)))
    place = [data.draw(st.integers(0, n - 1)) for n in (2, 1, rows, columns)]
    mask[tuple(place)] ^= True
    pattern = recognise(mask, (2, 3, rows, columns))
    assert pattern is None or agrees(pattern, mask)


def test_shapes_that_broadcast() -> None:
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for mask in (causal, causal[None], causal[None, None], causal.expand(2, 3, 5, 5)):
        assert recognise(mask, (2, 3, 5, 5)) == (0, None)
    assert recognise(causal, (7, 2, 3, 5, 5)) == (0, None)
    assert recognise(torch.ones(1, 1, dtype=torch.bool), (2, 3, 5, 5)) == (None, None)
    keep = torch.tensor([[True, True, False], [True, False, False]])
    for mask in (keep[:, None, None, :], keep[:, None, None, :].expand(2, 4, 5, 3)):
        pattern = recognise(mask, (2, 4, 5, 3))
        assert (
            pattern is not None
            and pattern.offset is None
            and pattern.keep is not None
            and torch.equal(pattern.keep, keep)
        )
    # A column is no padding; what differs by head, or by more dimensions of batch, has none of the forms.
    assert recognise(torch.tensor([[True], [False]]), (2, 4, 2, 3)) is None
    assert recognise(torch.rand(4, 5, 5) > 2, (2, 4, 5, 5)) is None
    assert recognise(keep[:, None, None, :], (6, 2, 4, 5, 3)) is None


def test_a_finite_number_is_no_mask() -> None:
    """Even the lowest: with all keys of a row at it, the row is the mean of the values and not zero."""
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for value in (torch.finfo(torch.float32).min, -1e9, 1.0, INF, torch.nan):
        assert recognise(torch.zeros(5, 5).masked_fill(~causal, value), (1, 1, 5, 5)) is None
    assert recognise(torch.zeros(5, 5).masked_fill(~causal, -INF), (1, 1, 5, 5)) == (0, None)
    assert recognise(torch.zeros(5, 5).masked_fill(~causal, -INF) + causal, (1, 1, 5, 5)) is None


def test_a_mask_with_a_gradient_stays_a_tensor() -> None:
    mask = torch.zeros(5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -INF).requires_grad_()
    assert recognise(mask, (1, 1, 5, 5)) is None


def test_each_element_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tpu mask once for all layers of a model, in parts that are small; a cpu mask once for each call."""
    monkeypatch.setattr(recognition, "_CHUNK", 64)
    compared = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: (compared.append(a.numel()), equal(a, b))[1])
    for device, reads in (("tpu", 1), ("cpu", 4)):
        mask = torch.ones(1, 1, 40, 16, dtype=torch.bool, device=device).tril()
        for _ in range(4):
            assert recognise(mask, (1, 2, 40, 16)) == (0, None)
        parts = [n for n in compared if n > 16]  # others compare one row
        assert sum(parts) == 640 * reads and max(parts) <= 64
        compared.clear()


def test_writes_are_noticed(device: torch.device) -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool, device=device).tril()
    assert recognise(mask, (1, 1, 5, 5)) == (0, None)
    mask[0, 0, 2, 1] = False
    assert recognise(mask, (1, 1, 5, 5)) is None
    mask[0, 0, 2, 1] = True
    assert recognise(mask, (1, 1, 5, 5)) == (0, None)
    mask.view(-1)[1] = True  # through a view
    assert recognise(mask, (1, 1, 5, 5)) is None
    other: Any = torch.ones(1, 1, 5, 5, dtype=torch.bool, device=device)
    mask.set_(other)
    assert recognise(mask, (1, 1, 5, 5)) == (None, None)
    assert recognise(mask.mT, (1, 1, 5, 5)) == (None, None)


def test_memory_that_others_write_to_is_read_again() -> None:
    array = np.tril(np.ones((5, 5), dtype=bool))
    mask = torch.from_numpy(array)
    assert recognise(mask, (1, 1, 5, 5)) == (0, None)
    array[3, 1] = False
    assert recognise(mask, (1, 1, 5, 5)) is None


def test_inference_tensors_have_no_version_and_are_read_again(device: torch.device) -> None:
    with torch.inference_mode():
        mask = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
        assert recognise(mask, (1, 1, 5, 5)) == (0, None)
        mask[3, 1] = False
        assert recognise(mask, (1, 1, 5, 5)) is None

"""Ring attention gives what attention gives: any layout, mask, length, ring; forward and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_kernels import SplashTiling, masks
from tpu_kernels.ring_attention import vjp
from tpu_kernels.ring_attention.layouts import LAYOUTS, Layout
from tpu_kernels.splash_attention import space

from ..splash_attention.oracle import check
from .rings import attended, case

CAUSAL = masks.causal()
IDS = torch.tensor([[0] * 30 + [1] * 25 + [2] * 45, [0] * 64 + [1] * 36])

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": CAUSAL},
    "window": {"mask": CAUSAL & masks.sliding_window(20)},
    "chunked": {"mask": masks.chunked(48)},
    "prefix": {"mask": masks.prefix_lm(37)},
    "segments": {"mask": CAUSAL, "batch": 2, "segment_ids": IDS},
    "segments that all see": {"batch": 2, "segment_ids": IDS},
    "documents as a mask": {"mask": CAUSAL & masks.segments(IDS[:1].int())},
    "groups of heads": {"mask": CAUSAL, "heads": 4, "kv_heads": 2, "value_dim": 48},
    "soft cap": {"mask": CAUSAL, "soft_cap": 3.0},
    "nothing seen": {"mask": masks.function(lambda b, h, q, kv: q < kv - 70)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_masks_and_layouts(name: str, layout: Layout) -> None:
    one = case(ranks=2, length=100, **CASES[name])
    check(one, attended(one, 2, layout=layout), "pallas")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["fast", "tpu"])
def test_rings(ranks: int, layout: Layout, mode: str) -> None:
    """With lengths that no ring divides: the last parts are padding."""
    for mask in (CAUSAL, None) if mode == "fast" else (CAUSAL,):
        one = case(ranks=ranks, length=101, mask=mask)
        check(one, attended(one, ranks, layout=layout, mode=mode), "pallas")


@pytest.mark.parametrize("mode", ["fast", "tpu"])
def test_keys_go_both_ways(mode: str) -> None:
    """The two halves of a rank's keys are from different ranks: 384 keys, of which 256 go to the right."""
    one = case(ranks=3, length=3 * 384, mask=CAUSAL & masks.sliding_window(700), heads=1)
    check(one, attended(one, 3, layout="zigzag", mode=mode, bidirectional=True), "pallas")


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        ((2, 2), "fast"),
        ((2, 2), "tpu"),
        *[pytest.param(s, "tpu", marks=pytest.mark.slow) for s in ((2, 3), (3, 2), (2, 4))],
    ],
)
def test_rings_of_two_axes(shape: tuple[int, int], mode: str) -> None:
    ranks = shape[0] * shape[1]
    one = case(ranks=ranks, length=25 * ranks - 3, mask=CAUSAL)
    for layout in LAYOUTS[: 1 if mode == "tpu" else 2]:
        got = attended(one, ranks, layout=layout, mode=mode, axes={"a": shape[0], "b": shape[1]})
        check(one, got, "pallas")


@pytest.mark.parametrize("mode", ["fast", pytest.param("tpu", marks=pytest.mark.slow)])
def test_long_rings_are_a_loop(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vjp, "UNROLLED", 1)
    one = case(ranks=5, length=5 * 20, mask=CAUSAL, heads=1, scale=0.3)
    check(one, attended(one, 5, mode=mode), "pallas")


def test_more_keys_than_queries() -> None:
    one = case(ranks=2, length=60, kv_length=90)
    check(one, attended(one, 2), "pallas")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_dtypes_that_no_kernel_has(dtype: torch.dtype) -> None:
    one = case(ranks=2, length=37, dtype=dtype, mask=CAUSAL)
    check(one, attended(one, 2, layout="zigzag"), "reference")


@settings(max_examples=3, deadline=None)
@given(st.data())
def test_any_shape(data: Any) -> None:
    ranks = data.draw(st.integers(2, 3))
    kv_heads = data.draw(st.integers(1, 2))
    mask = data.draw(st.sampled_from([None, CAUSAL, masks.sliding_window(9, 4)]))
    one = case(
        ranks=ranks,
        length=data.draw(st.integers(1, 40)),
        batch=data.draw(st.integers(1, 2)),
        heads=kv_heads * data.draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([1, 16, 40])),
        mask=mask,
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    check(one, attended(one, ranks, layout=data.draw(st.sampled_from(LAYOUTS))), "pallas")


@pytest.mark.parametrize("mode", ["fast", pytest.param("tpu", marks=pytest.mark.slow)])
def test_keys_in_ranges(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of keys that do not fit in VMEM together: two calls of the kernel in each hop."""
    monkeypatch.setattr(space, "resident_bytes", lambda chip: 128 * 2 * 128 * 4)
    one = case(ranks=2, length=2 * 256, mask=CAUSAL, heads=1, scale=0.2)
    tiling = SplashTiling(128, 128, 128, 128, 128, 128, 128, 128)
    check(one, attended(one, 2, layout="zigzag", mode=mode, tiling=tiling), "pallas")

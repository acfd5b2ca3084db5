"""The kernels of a ring under the sanitizer: clean as they are, and found when something is taken out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jax.experimental import pallas as pl

import bridge
from bridge import get_pallas_mesh
from bridge.ranks import run
from tpu_kernels import masks, ring_attention
from tpu_kernels.collectives.links import Peers
from tpu_kernels.collectives.shipment import Travel
from tpu_kernels.ring_attention import ring


def attend(axes: dict[str, int], **options: Any) -> None:
    """Forward and backward by ranks that are threads."""
    ranks = 1
    for size in axes.values():
        ranks *= size

    def program() -> None:
        mesh = get_pallas_mesh(tuple(axes), tuple(axes.values()))
        generator = torch.Generator().manual_seed(dist.get_rank())
        q, k, v = (torch.randn(1, 1, 16, 8, generator=generator).requires_grad_() for _ in range(3))
        options_here = {"mask": masks.causal(), "layout": "zigzag", **options}
        ring_attention(q, k, v, mesh, tuple(axes), **options_here).sum().backward()

    run(program, ranks)


@pytest.mark.parametrize(
    ("axes", "seeds"),
    [
        ({"x": 2}, 1),
        *[pytest.param(axes, 5, marks=pytest.mark.slow) for axes in ({"x": 2}, {"x": 4}, {"a": 2, "b": 2})],
    ],
)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_clean(
    axes: dict[str, int], seeds: int, bidirectional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "ALIGNMENT", 8)  # so that few keys have two halves
    with bridge.sanitize(seeds=seeds) as report:
        attend(axes, bidirectional=bidirectional)
    assert report.ok, str(report)
    checked = {kernel.name for kernel in report.kernels if not kernel.unchecked}
    assert {"splash_attention_forward", "splash_attention_backward", "collectives_ship"} <= checked


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["full", "window", "segments"])
def test_clean_with_other_masks(mask: str) -> None:
    options: dict[str, Any] = {
        "full": {"mask": None, "layout": "contiguous"},
        "window": {"mask": masks.sliding_window(5)},
        "segments": {"q_segment_ids": torch.arange(16) // 5},
    }[mask]
    with bridge.sanitize(seeds=5) as report:
        attend({"x": 4}, **options)
    assert report.ok, str(report)


def without_barrier(travel: Travel) -> None:
    for copy in travel._copies():
        copy.start()


def without_waits(travel: Travel) -> None:
    travel.route.line.leave(travel.done_sem, Peers.RING)


def without_wait_for_what_arrives(travel: Travel) -> None:
    for copy in travel._copies():
        copy.wait_send()
    travel.route.line.leave(travel.done_sem, Peers.RING)


def signalled_once_more(travel: Travel) -> None:
    for copy in travel._copies():
        copy.wait()
    travel.route.line.leave(travel.done_sem, Peers.RING)
    pl.semaphore_signal(travel.done_sem, 1)


MUTATIONS: list[tuple[str, Callable[[Travel], None], set[str]]] = [
    ("depart", without_barrier, {"missing_barrier"}),
    ("arrive", without_waits, {"dma_not_waited"}),
    ("arrive", without_wait_for_what_arrives, {"dma_not_waited", "race"}),
    ("arrive", signalled_once_more, {"semaphore_left"}),
]


@pytest.mark.parametrize(("name", "mutated", "kinds"), MUTATIONS, ids=[m[1].__name__ for m in MUTATIONS])
def test_what_is_taken_out_is_found(
    name: str, mutated: Callable[[Travel], None], kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Travel, name, mutated)
    options = {"soft_cap": float(len(mutated.__name__))}  # programs that no other test has compiled
    with bridge.sanitize(seeds=1) as report:
        attend({"x": 3}, **options)
    assert kinds & {finding.kind for finding in report.findings}, str(report)
    assert all(finding.line for finding in report.findings)

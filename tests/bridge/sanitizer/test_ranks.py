"""Faults of kernels on several ranks: each is found, with its line and ranks; and nothing is without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch.distributed as dist
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import bridge
from bridge import SanitizerReport, get_pallas_mesh, ranks
from bridge.ranks import RankError
from tpu_kernels.collectives import ring_sum
from tpu_kernels.collectives.links import Line

from . import planted
from .reports import kinds, the_only


def checked(
    program: Callable[..., Any], size: int, *arguments: Any, seeds: int = 2
) -> tuple[Any, SanitizerReport]:
    """What each rank gives, or what the run raises, and the report."""
    with bridge.sanitize(seeds=seeds) as report:
        try:
            result = ranks.run(program, size, *arguments)
        except RankError as error:
            result = error
    assert report.kernels
    return result, report


def at(text: str, function: Callable[..., Any] = planted.send_right) -> str:
    return planted.line_of(function, text)


@pytest.mark.parametrize("size", [2, 4])
def test_nothing_is_found_without_a_fault(size: int) -> None:
    result, report = checked(planted.sent_right, size)
    assert report.ok, report
    assert [float(part[0, 0]) for part in result] == [1.0 + (rank - 1) % size for rank in range(size)]


@pytest.mark.parametrize("fault", ["no barrier", "wrong way"])
def test_a_missing_barrier(fault: str) -> None:
    result, report = checked(planted.sent_right, 4, fault)
    assert isinstance(result, list)
    found = the_only(report, "missing_barrier")
    assert kinds(report) == {"missing_barrier"}
    assert found.line.endswith(at("copy.start()"))
    assert found.ranks == (0, 1, 2, 3)
    assert found.times == report.runs  # in each order, and both modes of copies
    assert "get_barrier_semaphore" in found.fix


def test_a_signal_may_come_too_early_as_well() -> None:
    _, report = checked(planted.gathered_in_one_slot, 3, "no entry")
    found = the_only(report, "missing_barrier")
    assert found.line.endswith(at("pl.semaphore_signal(go_sem", planted.gather_in_one_slot))
    assert kinds(report) == {"missing_barrier"}


@pytest.mark.parametrize(("skips", "found"), [(False, set()), (True, {"missing_barrier"})])
def test_xlas_own_barrier(skips: bool, found: set[str]) -> None:
    """XLA lets ranks meet before a kernel that has no barrier semaphore, unless it is told not to."""
    _, report = checked(xla_barrier, 2, skips)
    assert kinds(report) == found


def xla_barrier(skips: bool) -> torch.Tensor:
    return planted.on_ranks(
        functools.partial(planted.send_right, fault="no barrier"),
        f"xla_barrier_{skips}",
        in_specs=[planted.IN_HBM],
        out_specs=planted.IN_HBM,
        scratch_shapes=[planted.DMA, planted.DMA],
        compiler_params=pltpu.CompilerParams(has_side_effects=True, skip_device_barrier=skips),
    )


def test_no_wait_for_the_sending() -> None:
    _, report = checked(planted.sent_right, 4, "no send wait")
    found = the_only(report, "dma_not_waited")
    assert kinds(report) == {"dma_not_waited"}
    assert found.line.endswith(at("copy.start()"))
    assert "its send semaphore is send_sem" in found.message


def test_no_wait_for_what_comes(capfd: pytest.CaptureFixture[str]) -> None:
    _, report = checked(planted.sent_right, 4, "no receive wait")
    assert kinds(report) == {"dma_not_waited", "race"}
    found = the_only(report, "dma_not_waited")
    assert "its receive semaphore is recv_sem" in found.message
    race = the_only(report, "race")
    assert race.line.endswith(at("copy.start()")) and race.copies == "eager"
    assert "o_hbm_ref of rank" in race.message
    assert not capfd.readouterr().out


def test_a_barrier_signal_that_is_left() -> None:
    _, report = checked(planted.sent_right, 4, "signal left over")
    found = the_only(report, "semaphore_left")
    assert kinds(report) == {"semaphore_left"}
    assert found.line.endswith(at("# once more"))
    assert "the barrier semaphore (collective_id 0) of rank" in found.message


def test_ranks_that_wait_for_ever() -> None:
    result, report = checked(planted.waited_for_the_right, 3)
    assert "waits for ever" in str(result)
    found = the_only(report, "deadlock")
    assert kinds(report) == {"deadlock"}
    assert found.ranks == (2,)
    assert found.line.endswith(at("pl.semaphore_wait(turn_sem", planted.wait_for_the_right))
    assert "rank 2 waits at" in found.message and "of turn_sem, which has 0" in found.message


def test_two_ranks_write_to_one_slot() -> None:
    _, report = checked(planted.gathered_in_one_slot, 3)
    assert report.ok, report
    _, report = checked(planted.gathered_in_one_slot, 3, "no credit")
    assert kinds(report) == {"race"}
    starts = at("send.start()", planted.gather_in_one_slot)
    assert any(found.line.endswith(starts) and found.other_line.endswith(starts) for found in report.findings)
    assert all("slot_ref of rank 0" in found.message for found in report.findings)


def summed(size: int, name: str) -> torch.Tensor:
    mesh = get_pallas_mesh("x")

    def fn(x: jax.Array) -> jax.Array:
        def local(x: jax.Array) -> jax.Array:
            return ring_sum.ring_sum(x[0], Line("x", size))[None]

        return jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)

    op = planted.op_of(name, fn, mesh=mesh, input_partition_specs=[P("x")])
    return op(torch.full((1, size, 8, 128), 1.0 + dist.get_rank()))


class _WithoutCredits:
    """`pl`, without the semaphores of the body that uses it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pl, name)

    def semaphore_signal(self, *_: Any, **__: Any) -> None:
        pass

    def semaphore_wait(self, *_: Any, **__: Any) -> None:
        pass


def test_a_ring_without_credits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven are enough for a slot to be used again."""
    result, report = checked(summed, 7, 7, "ring", seeds=1)
    assert report.ok, report
    assert all((part == 28).all() for part in result)
    monkeypatch.setattr(ring_sum, "pl", _WithoutCredits())
    _, report = checked(summed, 7, 7, "ring_without_credits", seeds=1)
    assert kinds(report) == {"race"}
    assert any("recv_hbm_ref of rank" in found.message for found in report.findings)


def test_an_index_out_of_bounds_on_one_rank() -> None:
    result, report = checked(one_is_out_of_bounds, 2)
    assert "Out-of-bounds" in str(result)
    found = the_only(report, "out_of_bounds_read")
    assert found.ranks == (1,)
    assert kinds(report) == {"out_of_bounds_read"}
    _, report = checked(planted.sent_right, 2)  # all is in order afterwards
    assert report.ok


def one_is_out_of_bounds() -> torch.Tensor:
    def body(x_ref, o_ref):
        o_ref[0:1] = x_ref[pl.ds(7 + jax.lax.axis_index("x"), 1)]
        o_ref[1:8] = x_ref[1:8]

    return planted.on_ranks(body, "one_is_out_of_bounds")


def test_ranks_of_a_mesh_have_their_own_numbers() -> None:
    _, report = checked(on_the_last_two, 3)
    found = the_only(report, "missing_barrier")
    assert found.ranks == (1, 2)


def on_the_last_two() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank():
        planted.sent_right("no barrier", group)

"""Faults of kernels on one device: each is found, by its kind and its line; and nothing is without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge import jax_op
from bridge.interpretation import checked_memory

from . import planted
from .reports import checked, kinds, the_only

X = torch.arange(32 * 128, dtype=torch.float32).reshape(32, 128)
ALIKE = functools.partial(planted.launch, out=(8, 128))
ONE_SEMAPHORE = [pltpu.SemaphoreType.REGULAR]


# Copies and semaphores ------------------------------------------------------------------------------


def test_a_copy_that_is_waited_for() -> None:
    result, report = checked(lambda: planted.copied_in("before")(X[:8]))
    assert report.ok, report
    assert torch.equal(result, X[:8] * 2)


def test_memory_is_used_before_the_copy_has_come() -> None:
    _, report = checked(lambda: planted.copied_in("after")(X[:8]))
    assert kinds(report) == {"race"}
    race = the_only(report, "race")
    assert race.line.endswith(planted.line_of(planted.copy_in, "copy.start()"))
    assert race.other_line.endswith(planted.line_of(planted.copy_in, "o_ref[...] ="))
    assert "buffer_ref" in race.message
    assert (race.kernel, race.op, race.ranks) == ("copy_in", "planted::copied_in_after", ())


def test_a_copy_that_nobody_waits_for() -> None:
    _, report = checked(lambda: planted.copied_in("never")(X[:8]))
    assert kinds(report) == {"race", "dma_not_waited"}
    found = the_only(report, "dma_not_waited")
    assert found.line.endswith(planted.line_of(planted.copy_in, "copy.start()"))
    assert found.times == report.runs  # in both modes of copies
    assert "its semaphore is sem" in found.message
    assert "copy.wait()" in found.fix


def test_a_signal_that_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    op = planted.op_of("leave_a_signal", ALIKE(planted.leave_a_signal, scratch_shapes=ONE_SEMAPHORE))
    result, report = checked(lambda: op(X[:8]))
    assert torch.equal(result, X[:8])
    found = the_only(report, "semaphore_left")
    assert found.line.endswith(planted.line_of(planted.leave_a_signal, "semaphore_signal"))
    assert "sem of the kernel has 1 left" in found.message
    assert kinds(report) == {"semaphore_left"}
    assert not capfd.readouterr().out  # JAX prints it; here it is a finding


def test_a_wait_for_ever() -> None:
    op = planted.op_of("wait_for_nothing", ALIKE(planted.wait_for_nothing, scratch_shapes=ONE_SEMAPHORE))
    error, report = checked(lambda: op(X[:8]))
    assert "waits for ever" in str(error)
    found = the_only(report, "deadlock")
    assert found.line.endswith(planted.line_of(planted.wait_for_nothing, "semaphore_wait"))
    assert "for 1 of done_sem, which has 0" in found.message
    assert kinds(report) == {"deadlock"}
    result, report = checked(lambda: planted.copied_in("before")(X[:8]))  # all is in order afterwards
    assert report.ok and torch.equal(result, X[:8] * 2)


def array_of_semaphores(x_ref, o_ref, sems):
    pl.semaphore_signal(sems.at[1, 0], 3)
    o_ref[...] = x_ref[...]


def test_semaphores_in_an_array_have_names() -> None:
    op = planted.op_of(
        "array_of_semaphores",
        ALIKE(array_of_semaphores, scratch_shapes=[pltpu.SemaphoreType.REGULAR((2, 2))]),
    )
    _, report = checked(lambda: op(X[:8]), seeds=1)
    assert "sems[1, 0] of the kernel has 3 left" in the_only(report, "semaphore_left").message


# Bounds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "text", "array"),
    [
        (planted.read_beyond, "out_of_bounds_read", "o_ref[...] =", "x_ref"),
        (planted.write_beyond, "out_of_bounds_write", "o_ref[pl.ds", "o_ref"),
        (planted.copy_beyond, "out_of_bounds_read", "copy.start()", "x_hbm_ref"),
    ],
)
def test_out_of_bounds(body: Callable[..., Any], kind: str, text: str, array: str) -> None:
    _, report = checked(lambda: planted.shifted_rows(body, 7)(X[:16]))
    assert not kinds(report) & {"out_of_bounds_read", "out_of_bounds_write", "error"}
    for row, range_ in ((8, "9:17"), (-1, "-1:7")):
        error, report = checked(lambda row=row: planted.shifted_rows(body, row)(X[:16]))
        assert f"{array}[{range_}, 0:128]" in str(error)
        found = the_only(report, kind)
        assert found.line.endswith(planted.line_of(body, text))
        assert f"{array}[{range_}, 0:128], whose shape is (16, 128)" in found.message
        assert kinds(report) == {kind}


def with_a_prefetched_row(row_ref, x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(row_ref[0], 8)]


def test_the_array_is_named_beside_prefetched_ones() -> None:
    @jax_op("planted::prefetched")
    def prefetched(row: jax.Array, x: jax.Array) -> jax.Array:
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec((16, 128), lambda i, row: (0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, row: (0, 0)),
        )
        shape = jax.ShapeDtypeStruct((8, 128), x.dtype)
        return pl.pallas_call(with_a_prefetched_row, out_shape=shape, grid_spec=spec)(row, x)

    result, report = checked(lambda: prefetched(torch.tensor([8], dtype=torch.int32), X[:16]))
    assert report.ok and torch.equal(result, X[8:16])
    _, report = checked(lambda: prefetched(torch.tensor([9], dtype=torch.int32), X[:16]))
    assert "x_ref[9:17" in the_only(report, "out_of_bounds_read").message


# Memory that nobody has written -----------------------------------------------------------------------


def test_scratch_is_read_before_it_is_written() -> None:
    clean = planted.accumulated(functools.partial(planted.accumulate, clears=True), "cleared")
    result, report = checked(lambda: clean(X[:16]))
    assert report.ok and torch.equal(result, X[:8] + X[8:16])
    fault = planted.accumulated(functools.partial(planted.accumulate, clears=False), "not_cleared")
    _, report = checked(lambda: fault(X[:16]))
    found = the_only(report, "uninitialised_read")
    assert found.line.endswith(planted.line_of(planted.accumulate, "sum_ref[...] = sum_ref"))
    assert "sum_ref[0:8, 0:128], some of which nobody has written" in found.message
    assert kinds(report) == {"uninitialised_read"}


def test_what_is_masked_out_is_no_finding() -> None:
    result, report = checked(lambda: planted.accumulated(planted.accumulate_masked, "masked")(X[:16]))
    assert report.ok and torch.equal(result, X[:8] + X[8:16])


def test_the_padding_of_a_ragged_block() -> None:
    result, report = checked(lambda: planted.summed(13)(X[:13]))
    assert report.ok, report
    assert torch.equal(result, X[:13].sum(0, keepdim=True))
    _, report = checked(lambda: planted.summed(None)(X[:13]))
    found = the_only(report, "uninitialised_read")
    assert found.line.endswith(planted.line_of(planted.sum_rows, "x = x_ref[...]"))
    assert "beyond the end of the array" in found.message


def add_what_nobody_wrote(x_ref, o_ref, other_ref):
    row = jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 0) + pl.program_id(0) * 8
    x = jnp.where(row < 13, x_ref[...], 0)
    o_ref[...] = x + other_ref[...]


def test_padding_that_is_masked_is_not_blamed_for_other_memory() -> None:
    blocks = {"grid": (2,), "in_specs": [planted.ROWS], "out_specs": planted.ROWS}
    fn = planted.launch(add_what_nobody_wrote, (13, 128), scratch_shapes=[planted.TILE], **blocks)
    _, report = checked(lambda: planted.op_of("added", fn)(X[:13]))
    (found,) = report.findings
    assert found.line.endswith("test_one_device.py" + line_after(add_what_nobody_wrote, "o_ref[...] ="))


def line_after(function: Callable[..., Any], text: str) -> str:
    return planted.line_of(function, text).removeprefix("planted.py")


def test_a_result_that_is_written_in_part() -> None:
    _, report = checked(lambda: planted.op_of("half", ALIKE(planted.write_half))(X[:8]))
    found = the_only(report, "uninitialised_read")
    assert "Part of the result" in found.message
    assert found.line.endswith(planted.line_of(planted.launch, "pl.pallas_call"))


def test_inputs_full_of_what_marks_unwritten_memory() -> None:
    """NaN and the largest integer are values like others."""

    @jax_op("planted::doubled")
    def doubled(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 1

        return pl.pallas_call(body, out_shape=shape)(x)

    for x in (torch.full((8, 128), float("nan")), torch.full((8, 128), 2**31 - 1, dtype=torch.int32)):
        result, report = checked(lambda x=x: doubled(x))
        assert report.ok and torch.equal(result.view(torch.int32), x.view(torch.int32))


def move_what_nobody_wrote(x_ref, o_ref, from_ref, to_ref, sem):
    copy = pltpu.make_async_copy(from_ref, to_ref, sem)
    copy.start()
    copy.wait()
    o_ref[...] = x_ref[...] + to_ref[...]


def test_a_copy_carries_what_nobody_wrote() -> None:
    scratch = [planted.TILE, planted.TILE, planted.DMA]
    op = planted.op_of("moved", ALIKE(move_what_nobody_wrote, scratch_shapes=scratch))
    _, report = checked(lambda: op(X[:8]))
    assert "loads to_ref[" in the_only(report, "uninitialised_read").message


# The order ------------------------------------------------------------------------------------------


def test_parallel_steps_that_depend_on_each_other() -> None:
    _, report = checked(lambda: planted.carried("arbitrary")(X))
    assert report.ok, report
    _, report = checked(lambda: planted.carried("parallel")(X))
    found = the_only(report, "order_dependent_result")
    assert kinds(report) == {"order_dependent_result"}
    assert (found.kernel, found.seed) == ("carry_over", 1)
    assert '"arbitrary"' in found.fix


def four_copies(x_hbm_ref, o_hbm_ref, sem):
    copies = [pltpu.make_async_copy(x_hbm_ref.at[i], o_hbm_ref.at[i], sem) for i in range(4)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def test_copies_under_way_are_made_in_several_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    write = checked_memory.CheckedCopy.execute_write

    def noted(copy: Any) -> None:
        write(copy)
        made.append(copy.src_transforms[0].indices[0])

    monkeypatch.setattr(checked_memory.CheckedCopy, "execute_write", noted)
    blocks = {"in_specs": [planted.IN_HBM], "out_specs": planted.IN_HBM, "scratch_shapes": [planted.DMA]}
    op = planted.op_of("four_copies", planted.launch(four_copies, (4, 8, 128), **blocks))
    result, report = checked(lambda: op(X.reshape(4, 8, 128)), seeds=6)
    assert report.ok and torch.equal(result, X.reshape(4, 8, 128))
    orders = [tuple(made[i : i + 4]) for i in range(0, len(made), 4)]
    late, early = orders[::2], orders[1::2]
    assert set(early) == {(0, 1, 2, 3)}
    assert late[0] == (3, 2, 1, 0) and len(set(late)) > 2

"""Kernels with a fault each, and the same kernels without."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from bridge import get_pallas_mesh, jax_op

IN_HBM = pl.BlockSpec(memory_space=pl.ANY)
DMA = pltpu.SemaphoreType.DMA


def line_of(function: Callable[..., Any], text: str) -> str:
    """Where a text stands in a function's source, as "planted.py:line"."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return f"planted.py:{first + offset}"


# On one device --------------------------------------------------------------------------------------


def copy_in(x_hbm_ref, o_ref, buffer_ref, sem, *, waits):
    copy = pltpu.make_async_copy(x_hbm_ref, buffer_ref, sem)
    copy.start()
    if waits == "before":
        copy.wait()
    o_ref[...] = buffer_ref[...] * 2
    if waits == "after":
        copy.wait()


def leave_a_signal(x_ref, o_ref, sem):
    pl.semaphore_signal(sem, 2)
    pl.semaphore_wait(sem, 1)
    o_ref[...] = x_ref[...]


def wait_for_nothing(x_ref, o_ref, done_sem):
    pl.semaphore_wait(done_sem, 1)
    o_ref[...] = x_ref[...]


def read_beyond(x_ref, o_ref, *, row):
    o_ref[...] = x_ref[pl.ds(row + pl.program_id(0), 8)]


def write_beyond(x_ref, o_ref, *, row):
    o_ref[pl.ds(row + pl.program_id(0), 8)] = x_ref[pl.ds(0, 8)]


def copy_beyond(x_hbm_ref, o_hbm_ref, sem, *, row):
    copy = pltpu.make_async_copy(x_hbm_ref.at[pl.ds(row + pl.program_id(0), 8)], o_hbm_ref, sem)
    copy.start()
    copy.wait()


def accumulate(x_ref, o_ref, sum_ref, *, clears):
    if clears:

        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] = sum_ref[...] + x_ref[...]
    o_ref[...] = sum_ref[...]


def accumulate_masked(x_ref, o_ref, sum_ref):
    before = jnp.where(pl.program_id(0) == 0, 0, sum_ref[...])
    sum_ref[...] = before + x_ref[...]
    o_ref[...] = sum_ref[...]


def write_half(x_ref, o_ref):
    o_ref[0:4] = x_ref[0:4]


def sum_rows(x_ref, o_ref, *, rows):
    x = x_ref[...]
    if rows is not None:
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) + pl.program_id(0) * x.shape[0]
        x = jnp.where(row < rows, x, 0)

    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.sum(x, axis=0, keepdims=True)


def carry_over(x_ref, o_ref, sum_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] = sum_ref[...] * 2 + x_ref[...]
    o_ref[...] = sum_ref[...]


def launch(
    body: Callable[..., Any], out: tuple[int, ...], **options: Any
) -> Callable[[jax.Array], jax.Array]:
    """A function that launches a kernel of one float32 array."""

    def run(x: jax.Array) -> jax.Array:
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(out, x.dtype), **options)(x)

    return run


ROWS = pl.BlockSpec((8, 128), lambda i: (i, 0))
WHOLE = pl.BlockSpec((8, 128), lambda i: (0, 0))
TILE = pltpu.VMEM((8, 128), jnp.float32)


def op_of(name: str, fn: Callable[[jax.Array], jax.Array], **options: Any) -> Any:
    """An op with its own name."""
    return jax_op(f"planted::{name}", fn, **options)


@functools.cache
def copied_in(waits: str) -> Any:
    body = functools.partial(copy_in, waits=waits)
    return op_of(f"copied_in_{waits}", launch(body, (8, 128), in_specs=[IN_HBM], scratch_shapes=[TILE, DMA]))


@functools.cache
def shifted_rows(body: Callable[..., Any], row: int) -> Any:
    blocks = [pl.BlockSpec((16, 128), lambda i: (0, 0))]
    fn = launch(
        functools.partial(body, row=row), (16 if body is write_beyond else 8, 128), grid=(2,), in_specs=blocks
    )
    if body is copy_beyond:
        fn = launch(
            functools.partial(body, row=row),
            (8, 128),
            in_specs=[IN_HBM],
            out_specs=IN_HBM,
            scratch_shapes=[DMA],
            grid=(2,),
        )
    return op_of(f"{body.__name__}_{row}".replace("-", "minus_"), fn)


def accumulated(body: Callable[..., Any], name: str, **options: Any) -> Any:
    return op_of(
        name,
        launch(body, (8, 128), grid=(2,), in_specs=[ROWS], out_specs=WHOLE, scratch_shapes=[TILE], **options),
    )


@functools.cache
def summed(rows: int | None) -> Any:
    body = functools.partial(sum_rows, rows=rows)
    blocks = pl.BlockSpec((1, 128), lambda i: (0, 0))
    return op_of(f"summed_{rows}", launch(body, (1, 128), grid=(2,), in_specs=[ROWS], out_specs=blocks))


@functools.cache
def carried(semantics: Literal["parallel", "arbitrary"]) -> Any:
    return op_of(
        f"carried_{semantics}",
        launch(
            carry_over,
            (32, 128),
            grid=(4,),
            in_specs=[ROWS],
            out_specs=ROWS,
            scratch_shapes=[TILE],
            compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
        ),
    )


# On several ranks -----------------------------------------------------------------------------------


def send_right(x_hbm_ref, o_hbm_ref, send_sem, recv_sem, *, fault):
    size = jax.lax.axis_size("x")
    me = jax.lax.axis_index("x")
    left, right = (me - 1) % size, (me + 1) % size
    barrier = pltpu.get_barrier_semaphore()
    if fault != "no barrier":
        pl.semaphore_signal(barrier, 1, device_id=right if fault == "wrong way" else left)
        pl.semaphore_wait(barrier, 1)
    copy = pltpu.make_async_remote_copy(x_hbm_ref, o_hbm_ref, send_sem, recv_sem, device_id=right)
    copy.start()
    if fault != "no send wait":
        copy.wait_send()
    if fault != "no receive wait":
        copy.wait_recv()
    if fault == "signal left over":
        pl.semaphore_signal(barrier, 1, device_id=left)  # once more


def wait_for_the_right(x_ref, o_ref, turn_sem):
    @pl.when(jax.lax.axis_index("x") > 0)
    def _():
        pl.semaphore_signal(turn_sem, 1, device_id=jax.lax.axis_index("x") - 1)

    pl.semaphore_wait(turn_sem, 1)  # the last one is signalled by nobody
    o_ref[...] = x_ref[...]


def gather_in_one_slot(x_hbm_ref, o_hbm_ref, slot_ref, send_sem, recv_sem, go_sem, copy_sem, *, fault):
    """Ranks 1 and 2 send to one slot of rank 0, one after the other."""
    me = jax.lax.axis_index("x")
    barrier = pltpu.get_barrier_semaphore()

    @pl.when(me == 0)
    def _():
        for sender in (1, 2):
            pl.semaphore_signal(barrier, 1, device_id=sender)
        if fault != "no entry":
            pl.semaphore_wait(barrier, 2)

    @pl.when(me != 0)
    def _():
        if fault != "no entry":
            pl.semaphore_signal(barrier, 1, device_id=0)
        pl.semaphore_wait(barrier, 1)
        if fault != "no credit":

            @pl.when(me == 2)
            def _():
                pl.semaphore_wait(go_sem, 1)

        send = pltpu.make_async_remote_copy(x_hbm_ref, slot_ref, send_sem, recv_sem, device_id=0)
        send.start()
        send.wait_send()

    @pl.when(me == 0)
    def _():
        for sender in (1, 2):
            pltpu.make_async_copy(slot_ref, slot_ref, recv_sem).wait()
            keep = pltpu.make_async_copy(slot_ref, o_hbm_ref.at[sender - 1], copy_sem)
            keep.start()
            keep.wait()
            if fault != "no credit" and sender == 1:
                pl.semaphore_signal(go_sem, 1, device_id=2)

    @pl.when(me != 0)
    def _():
        for sender in (1, 2):
            keep = pltpu.make_async_copy(x_hbm_ref, o_hbm_ref.at[sender - 1], copy_sem)
            keep.start()
            keep.wait()


def on_ranks(body: Callable[..., Any], name: str, **options: Any) -> torch.Tensor:
    """Called by each rank: what an op over all of them gives."""
    mesh = get_pallas_mesh("x", process_group=options.pop("group", None))
    out = options.pop("out", (8, 128))

    def mapped(x: jax.Array) -> jax.Array:
        return jax.shard_map(
            launch(body, out, **options), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
        )(x)

    op = op_of(name, mapped, mesh=mesh, input_partition_specs=[P("x")])
    return op(torch.full((8, 128), 1.0 + dist.get_rank()))


def sent_right(fault: str = "none", group: Any = None) -> torch.Tensor:
    return on_ranks(
        functools.partial(send_right, fault=fault),
        f"sent_right_{fault.replace(' ', '_')}_{dist.get_world_size(group)}",
        group=group,
        in_specs=[IN_HBM],
        out_specs=IN_HBM,
        scratch_shapes=[DMA, DMA],
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
    )


def waited_for_the_right() -> torch.Tensor:
    return on_ranks(wait_for_the_right, "waited_for_the_right", scratch_shapes=[pltpu.SemaphoreType.REGULAR])


def gathered_in_one_slot(fault: str | None = None) -> torch.Tensor:
    return on_ranks(
        functools.partial(gather_in_one_slot, fault=fault),
        f"gathered_in_one_slot_{fault}".replace(" ", "_"),
        out=(2, 8, 128),
        in_specs=[IN_HBM],
        out_specs=IN_HBM,
        scratch_shapes=[TILE, DMA, DMA, pltpu.SemaphoreType.REGULAR, DMA],
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
    )

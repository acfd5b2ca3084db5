"""What ranks of a mesh check together; run by processes and by threads (`test_meeting.py`).

Each function `check_...` runs on every rank, for tensors of a device. What one process would compute alone is
the oracle.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bridge
from bridge import JaxOp, get_pallas_mesh, jax_op
from bridge.ranks import RankFailed, RankMissing, RanksDisagree


def of_rank(rank: int, device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that no other rank has."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) + 1000 * rank).reshape(shape).to(dtype).to(device)


def gradient(tensor: torch.Tensor) -> Any:
    """What backward has left; there must be one."""
    assert tensor.grad is not None
    return tensor.grad


# A kernel that talks to its neighbour ----------------------------------------------------------------


def shifted(x: jax.Array, mesh: Mesh, axis: str, ids: str) -> jax.Array:
    """Each position's part of `x` from its left neighbour along an axis, by remote DMA."""
    size = mesh.shape[axis]

    def neighbour(step: int) -> Any:
        place = {name: jax.lax.axis_index(name) for name in mesh.axis_names}
        place[axis] = (place[axis] + step) % size
        if ids == "mesh":
            return tuple(place[name] for name in mesh.axis_names)
        number: Any = 0
        for name in mesh.axis_names:
            number = number * mesh.shape[name] + place[name]
        return number

    kind = pl.DeviceIdType.MESH if ids == "mesh" else pl.DeviceIdType.LOGICAL

    def body(x_hbm_ref, o_hbm_ref, send_sem, recv_sem):
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, 1, device_id=neighbour(-1), device_id_type=kind)
        pl.semaphore_wait(barrier, 1)
        copy = pltpu.make_async_remote_copy(
            x_hbm_ref, o_hbm_ref, send_sem, recv_sem, device_id=neighbour(1), device_id_type=kind
        )
        copy.start()
        copy.wait()

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
        name="shift",
    )(x)


def shift_op(name: str, mesh: Mesh, spec: P, axis: str = "x", ids: str = "logical", **options: Any) -> JaxOp:
    """The kernel as an op; its gradient comes from `ppermute`."""

    def mapped(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    def shift(x: jax.Array) -> jax.Array:
        return mapped(functools.partial(shifted, mesh=mesh, axis=axis, ids=ids), x)

    def reference(x: jax.Array) -> jax.Array:
        size = mesh.shape[axis]
        ring = [(i, (i + 1) % size) for i in range(size)]
        return mapped(lambda part: jax.lax.ppermute(part, axis, ring), x)

    return jax_op(name, shift, mesh=mesh, input_partition_specs=[spec], reference=reference, **options)


def check_a_shift(rank: int, size: int, device: str) -> None:
    mesh = get_pallas_mesh("x")
    for ids in ("logical", "mesh"):
        shift = shift_op(f"ranks_{device}::shift_{ids}", mesh, P("x"), ids=ids)
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
            got = shift(of_rank(rank, device, 3, 40, dtype=dtype))
            assert got.device.type == device
            assert torch.equal(got, of_rank((rank - 1) % size, device, 3, 40, dtype=dtype))


def check_values_of_64_bits(rank: int, size: int, device: str) -> None:
    mesh = get_pallas_mesh("x")
    shift = shift_op(f"ranks_{device}::shift_wide", mesh, P("x"))
    with pytest.raises((NotImplementedError, RankFailed), match="elements of 64 bits"):
        shift(torch.tensor([2**40 + rank], device=device))

    @jax_op(f"ranks_{device}::total", mesh=mesh, input_partition_specs=P("x"))
    def total(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)

    for dtype in (torch.int64, torch.float64):
        got = total(torch.tensor([2**40 + rank], dtype=dtype, device=device))
        assert (got.dtype, got.tolist()) == (dtype, [size * 2**40 + size * (size - 1) // 2])


def check_parts_without_elements(rank: int, size: int, device: str) -> None:
    mesh = get_pallas_mesh("x")

    @jax_op(f"ranks_{device}::double", mesh=mesh, input_partition_specs=P("x"), output_partition_specs=P("x"))
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    for shape in ((2, 0), (0, 3)):
        x = torch.ones(shape, device=device).requires_grad_()
        y = double(x)
        assert y.shape == shape
        y.sum().backward()
        assert gradient(x).shape == shape


def check_ranks_in_another_order(rank: int, size: int, device: str) -> None:
    """Logical ids follow the mesh, not the ranks."""
    order = [*range(0, size, 2), *range(1, size, 2)]
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("x",))
    from bridge.ranks.mesh import mesh_of_device_mesh

    shift = shift_op(f"ranks_{device}::shift_permuted", mesh_of_device_mesh(mesh), P("x"))
    left = order[order.index(rank) - 1]
    assert torch.equal(shift(of_rank(rank, device, 8)), of_rank(left, device, 8))


def check_both_axes_of_a_mesh(rank: int, size: int, device: str) -> None:
    mesh = get_pallas_mesh(("a", "b"), (2, size // 2))
    row, column = divmod(rank, size // 2)
    for ids in ("logical", "mesh"):
        along_a = shift_op(f"ranks_{device}::shift_a_{ids}", mesh, P(("a", "b")), "a", ids)
        along_b = shift_op(f"ranks_{device}::shift_b_{ids}", mesh, P(None, "a", "b"), "b", ids)
        above = (1 - row) * (size // 2) + column
        left = row * (size // 2) + (column - 1) % (size // 2)
        assert torch.equal(along_a(of_rank(rank, device, 4)), of_rank(above, device, 4))
        assert torch.equal(along_b(of_rank(rank, device, 2, 3, 4)), of_rank(left, device, 2, 3, 4))


def check_a_part_of_the_ranks(rank: int, size: int, device: str) -> None:
    some = [r for r in range(size) if r != 1]
    group: Any = dist.new_group(some)
    if rank == 1:
        with pytest.raises(ValueError, match="not in the process group"):
            get_pallas_mesh("x", process_group=group)
        return
    shift = shift_op(f"ranks_{device}::shift_some", get_pallas_mesh("x", process_group=group), P("x"))
    left = some[some.index(rank) - 1]
    assert torch.equal(shift(of_rank(rank, device, 8)), of_rank(left, device, 8))


# Gradients ---------------------------------------------------------------------------------------------


def check_gradients(rank: int, size: int, device: str) -> None:
    shift = shift_op(f"ranks_{device}::shift_back", get_pallas_mesh("x"), P("x"))
    x = of_rank(rank, device, 5).requires_grad_()
    (shift(x) * (rank + 1)).sum().backward()
    assert torch.equal(gradient(x), torch.full((5,), (rank + 1) % size + 1.0, device=device))


def check_second_gradients(rank: int, size: int, device: str) -> None:
    mesh = get_pallas_mesh("x")
    ring = [(i, (i + 1) % size) for i in range(size)]

    @jax_op(f"ranks_{device}::cube", mesh=mesh, input_partition_specs=P("x"))
    def cube(x: jax.Array) -> jax.Array:
        def local(x: jax.Array) -> jax.Array:
            return jax.lax.ppermute(x, "x", ring) ** 3

        return jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)

    x = (of_rank(rank, device, 4, dtype=torch.float64) / 100).requires_grad_()
    (first,) = torch.autograd.grad(cube(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first.detach(), 3 * x.detach() ** 2)
    torch.testing.assert_close(second, 6 * x.detach())


def check_arrays_that_all_ranks_have(rank: int, size: int, device: str) -> None:
    """A matrix is the same on all ranks, and its gradient is the sum over them; so is a sum of results."""
    mesh = get_pallas_mesh("x")

    @jax_op(f"ranks_{device}::apply", mesh=mesh, input_partition_specs=[P("x"), None])
    def apply(rows: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        def local(rows: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
            product = rows @ matrix
            return product, jax.lax.psum(product.sum(0), "x")

        specs = (P("x"), P())
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs)(rows, matrix)

    torch.manual_seed(0)
    everything = torch.randn(size, 3, 4, dtype=torch.float64)
    whole = torch.randn(4, 2, dtype=torch.float64)
    rows = everything[rank].to(device).requires_grad_()
    matrix = whole.to(device).requires_grad_()
    product, total = apply(rows, matrix)
    torch.testing.assert_close(product.detach().cpu(), everything[rank] @ whole)
    torch.testing.assert_close(total.detach().cpu(), (everything @ whole).sum((0, 1)))
    (product.square().sum() + total.sum()).backward()

    reference = whole.requires_grad_()
    parts = everything.requires_grad_()
    found = parts @ reference
    (found.square().sum() + found.sum()).backward()
    torch.testing.assert_close(gradient(rows).cpu(), gradient(parts)[rank])
    torch.testing.assert_close(gradient(matrix).cpu(), gradient(reference))


def check_cotangents_of_what_ranks_have_in_common(rank: int, size: int, device: str) -> None:
    """One array has one cotangent: another loss on each rank would give the gradient of neither."""
    mesh = get_pallas_mesh("x")

    @jax_op(f"ranks_{device}::sum_of_all", mesh=mesh, input_partition_specs=P("x"))
    def sum_of_all(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)

    x = of_rank(rank, device, 3).requires_grad_()
    with pytest.raises(
        (ValueError, RankFailed), match="positions 0 and 1 of the mesh have a result in common"
    ):
        (sum_of_all(x) * (rank + 1)).sum().backward()
    (sum_of_all(x) * 5).sum().backward()
    assert torch.equal(gradient(x), torch.full((3,), 5.0, device=device))


# Signatures, compile -----------------------------------------------------------------------------------


def check_lists_and_static_arguments(rank: int, size: int, device: str) -> None:
    mesh = get_pallas_mesh("x")

    @jax_op(
        f"ranks_{device}::weighted",
        mesh=mesh,
        input_partition_specs=[P("x"), P(None, "x")],
        output_partition_specs=P(None, "x"),
    )
    def weighted(parts: Sequence[jax.Array], other: jax.Array | None, factor: float = 2.0) -> jax.Array:
        total = sum(parts[1:], parts[0]) * factor
        total = total if other is None else total + other.T
        return total.T

    a, b = of_rank(rank, device, 2, 3), of_rank(rank + 1, device, 2, 3)
    assert torch.equal(weighted([a, b], None), (a + b).T * 2)
    assert torch.equal(weighted([a, b], a.T, factor=3.0), (a + b).T * 3 + a.T)


def check_compiled(rank: int, size: int, device: str) -> None:
    shift = shift_op(f"ranks_{device}::shift_compiled", get_pallas_mesh("x"), P("x"))

    def step(x: torch.Tensor) -> torch.Tensor:
        return (shift(x * 2) + 1).sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 4, 7):
        x = of_rank(rank, device, rows, 2).requires_grad_()
        y = x.detach().clone().requires_grad_()
        (out, expected) = compiled(x), step(y)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(gradient(x), gradient(y))


def check_dtensors(rank: int, size: int, device: str) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    from bridge.ranks.mesh import mesh_of_device_mesh

    spec = P(None, "x")
    shift = shift_op(f"ranks_{device}::shift_dtensor", mesh_of_device_mesh(mesh), spec)
    torch.manual_seed(0)
    whole = torch.randn(3, 2 * size)
    for placement in (Shard(1), Shard(0), Replicate()):
        given = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        got = shift(given)
        assert isinstance(got, DTensor)
        assert got.placements == (Shard(1),)
        assert torch.equal(got.full_tensor(), whole.roll(2, 1))
        weights = torch.arange(2.0 * size).expand(3, -1)
        (got * distribute_tensor(weights, mesh, [Shard(1)])).sum().backward()
        assert torch.equal(gradient(given).full_tensor(), weights.roll(-2, 1))


# Many calls; errors ----------------------------------------------------------------------------------


def check_many_calls_of_two_rings_with_a_slow_rank(rank: int, size: int, device: str) -> None:
    mesh = get_pallas_mesh("x")
    one = shift_op(f"ranks_{device}::ring_one", mesh, P("x"))
    other = shift_op(f"ranks_{device}::ring_other", mesh, P(None, "x"), ids="mesh")
    x, y = of_rank(rank, device, 8), of_rank(rank, device, 1, 8)
    for step in range(50):
        if step % 10 == rank:
            time.sleep(0.05)
        x, y = one(x), other(y)
    assert torch.equal(x, of_rank((rank - 50) % size, device, 8))
    assert torch.equal(y, of_rank((rank - 50) % size, device, 1, 8))


def check_different_calls(rank: int, size: int, device: str) -> None:
    shift = shift_op(f"ranks_{device}::shift_different", get_pallas_mesh("x"), P("x"))
    with pytest.raises(RanksDisagree, match=r"rank 0 called .*float32\[4\].*rank 1 called .*float32\[5\]"):
        shift(of_rank(rank, device, 4 + (rank == 1)))
    assert torch.equal(shift(of_rank(rank, device, 4)), of_rank((rank - 1) % size, device, 4))


def check_an_op_that_fails(rank: int, size: int, device: str) -> None:
    """On one rank only, and another rank waits for it in a collective."""
    mesh = get_pallas_mesh("x")

    def body(x_hbm_ref, o_hbm_ref, sem):
        begin = jnp.where(jax.lax.axis_index("x") == size - 1, 64, 0)
        copy = pltpu.make_async_copy(x_hbm_ref.at[pl.ds(begin, 8)], o_hbm_ref, sem)
        copy.start()
        copy.wait()

    @jax_op(f"ranks_{device}::outside", mesh=mesh, input_partition_specs=P("x"))
    def outside(x: jax.Array) -> jax.Array:
        def local(x: jax.Array) -> jax.Array:
            copied = pl.pallas_call(
                body,
                out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
                out_specs=pl.BlockSpec(memory_space=pl.ANY),
                scratch_shapes=[pltpu.SemaphoreType.DMA],
            )(x)
            return copied + jax.lax.psum(copied, "x")

        return jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)

    with bridge.interpret("tpu"), pytest.raises((IndexError, RankFailed), match="Out-of-bounds") as caught:
        outside(of_rank(rank, device, 8, 128))
    assert (caught.type is RankFailed) == (rank != 0)
    shift = shift_op(f"ranks_{device}::shift_after", mesh, P("x"))
    assert torch.equal(shift(of_rank(rank, device, 4)), of_rank((rank - 1) % size, device, 4))


def check_a_kernel_that_waits_for_ever(rank: int, size: int, device: str) -> None:
    mesh = get_pallas_mesh("x")

    def body(x_ref, o_ref, sem):
        @pl.when(jax.lax.axis_index("x") > 0)
        def _() -> None:
            pl.semaphore_signal(sem, 1, device_id=jax.lax.axis_index("x") - 1)

        pl.semaphore_wait(sem, 1)  # the last one is signalled by nobody
        o_ref[...] = x_ref[...]

    @jax_op(f"ranks_{device}::waits", mesh=mesh, input_partition_specs=P("x"))
    def waits(x: jax.Array) -> jax.Array:
        def local(x: jax.Array) -> jax.Array:
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return pl.pallas_call(body, out_shape=shape, scratch_shapes=[pltpu.SemaphoreType.REGULAR])(x)

        return jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)

    with bridge.interpret("tpu"), pytest.raises(RuntimeError, match=f"device {size - 1} waits for 1 of sem"):
        waits(of_rank(rank, device, 8, 128))


def check_how_results_lie_must_be_known(rank: int, size: int, device: str) -> None:
    mesh = get_pallas_mesh("x")

    @jax_op(f"ranks_{device}::unknown", mesh=mesh, input_partition_specs=P("x"))
    def unknown(x: jax.Array) -> jax.Array:
        return jnp.sin(x).reshape(-1)

    with pytest.raises((ValueError, RankFailed), match="pass output_partition_specs="):
        unknown(of_rank(rank, device, 4))

    @jax_op(f"ranks_{device}::uneven", mesh=mesh, input_partition_specs=P(), output_partition_specs=P("x"))
    def uneven(x: jax.Array) -> jax.Array:
        return x

    with pytest.raises((ValueError, RankFailed), match="can't be divided into equal parts"):
        uneven(of_rank(0, device, size + 1))
    assert torch.equal(uneven(of_rank(0, device, size)), of_rank(0, device, size)[rank : rank + 1])


CHECKS = [name for name in globals() if name.startswith("check_")]


def check_a_rank_that_does_not_come(rank: int, size: int, device: str) -> None:
    """The last one: nothing of the group works afterwards. Threads know at once, and raise otherwise."""
    shift = shift_op(f"ranks_{device}::shift_alone", get_pallas_mesh("x"), P("x"))
    x = of_rank(rank, device, 4)
    shift(x)
    if rank == 1:
        time.sleep(6)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIDGE_RANKS_TIMEOUT", "2")
        with pytest.raises(RankMissing, match="rank 1 did not come to the call within 2 s"):
            shift(x)

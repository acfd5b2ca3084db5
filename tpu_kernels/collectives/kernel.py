"""Collectives along one axis of a mesh in Pallas for TPU: remote copies between the ranks' HBM.

    all_gather       each part travels around the ring, half of the way to the right and half to the left
    reduce_scatter   sums travel instead, the other way around: see `ring_sum`
    all_to_all       each rank writes each of its parts where it belongs
    ppermute         each rank writes all it has to one other
    exchange         each rank writes something to its right and something to its left

For use inside `jax.shard_map(..., check_vma=False)`. All ranks along the axis make the same calls in the
same order. Kernels move parts that lie along a leading dimension, which is never tiled: so any shape will do,
and another `dim` costs a transposition by XLA. Arrays stay where they are, in HBM (XLA may keep small ones in
VMEM). These functions have no gradient; those in `vjp` do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.collectives.links import Line, Peers, each_hop, reach
from tpu_kernels.collectives.ring_sum import ring_sum

DTYPES = ("float32", "bfloat16", "int32")
"""Of arrays that can be moved and summed."""


def all_gather(
    x: jax.Array, axis_name: str, size: int, dim: int = 0, *, collective_id: int | None = None
) -> jax.Array:
    """The parts of all ranks along an axis, one behind the other.

    Args:
        x: [..., n, ...], n along `dim`.
        axis_name: of the mesh.
        size: ranks along it.
        dim: which dimension to put them behind each other in; not negative.
        collective_id: another barrier semaphore than `links` has for the axis; one that no other kernel uses.

    Returns:
        [..., size * n, ...].

    Raises:
        TypeError: another dtype than `DTYPES`.
    """
    check("all_gather", x)
    if size == 1:
        return x
    if not x.size:
        return jnp.concatenate([x] * size, dim)
    line = Line(axis_name, size)
    part = _two_dimensional(x)  # [rows..., cols]
    found = _launch(
        _all_gather_body,
        part,
        (size, *part.shape),
        line,
        Peers.RING,
        collective_id,
        # For each direction; of arrivals, those of this hop and of the next one apart.
        [
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2, reach(size)[0])),
        ],
    )
    return joined(found.reshape(size, *x.shape), dim)


def reduce_scatter(
    x: jax.Array, axis_name: str, size: int, dim: int = 0, *, collective_id: int | None = None
) -> jax.Array:
    """The sum over the ranks along an axis, of which each keeps the part at its position.

    Args:
        x: [..., size * n, ...], size * n along `dim`; the others as for `all_gather`.

    Returns:
        [..., n, ...]. Floating numbers are added in float32, and rounded once to the dtype of `x`.
    """
    check("reduce_scatter", x, size, dim)
    if size == 1:
        return x
    parts = split(x, size, dim)
    if not x.size:
        return parts[0]
    shape = parts.shape[1:]
    found = ring_sum(_as_matrices(parts), Line(axis_name, size), collective_id)
    return found.reshape(shape)


def all_to_all(
    x: jax.Array,
    axis_name: str,
    size: int,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    collective_id: int | None = None,
) -> jax.Array:
    """Part `j` of rank `i` becomes part `i` of rank `j`.

    Args:
        x: [..., size * n, ..., m, ...]: the parts lie behind each other along `split_dim`.
        concat_dim: where they lie in the result. The others as for `all_gather`.

    Returns:
        [..., n, ..., size * m, ...]; [..., size * n, ...] if both dimensions are the same.
    """
    check("all_to_all", x, size, split_dim)
    if size == 1:
        return x
    parts = split(x, size, split_dim)
    if not x.size:
        return joined(parts, concat_dim)
    line = Line(axis_name, size)
    shape = parts.shape
    parts = jax.vmap(_two_dimensional)(parts)
    semaphores = [pltpu.SemaphoreType.DMA] * 3
    found = _launch(_all_to_all_body, parts, parts.shape, line, Peers.ALL, collective_id, semaphores)
    return joined(found.reshape(shape), concat_dim)


def ppermute(
    x: jax.Array, axis_name: str, size: int, shift: int = 1, *, collective_id: int | None = None
) -> jax.Array:
    """What the rank `shift` before this one has, around the ring.

    Args:
        x: any shape.
        shift: any number; a multiple of `size` is the identity. The others as for `all_gather`.
    """
    check("ppermute", x)
    shift %= size
    if shift == 0 or not x.size:
        return x
    peers = Peers.RING if shift in (1, size - 1) else Peers.ALL
    part = _two_dimensional(x)
    semaphores = [pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR]
    body = functools.partial(_ppermute_body, shift=shift, peers=peers)
    found = _launch(body, part, part.shape, Line(axis_name, size), peers, collective_id, semaphores)
    return found.reshape(x.shape)


def exchange(
    to_right: jax.Array, to_left: jax.Array, axis_name: str, size: int, *, collective_id: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """What the left neighbour sends to its right, and what the right one sends to its left, around the ring.

    Args:
        to_right, to_left: any shapes. The others as for `all_gather`.

    Returns:
        Arrays of the shapes of `to_right` and `to_left`.
    """
    check("exchange", to_right)
    check("exchange", to_left)
    if not to_left.size:
        return ppermute(to_right, axis_name, size, 1, collective_id=collective_id), to_left
    if not to_right.size:
        return to_right, ppermute(to_left, axis_name, size, -1, collective_id=collective_id)
    if size == 1:
        return to_right, to_left
    line = Line(axis_name, size)
    given = _two_dimensional(to_right), _two_dimensional(to_left)
    in_hbm = (pl.BlockSpec(memory_space=pl.ANY),) * 2
    right, left = pl.pallas_call(
        functools.partial(_exchange_body, line=line),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given),
        in_specs=in_hbm,
        out_specs=in_hbm,
        scratch_shapes=[pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))],
        compiler_params=_parameters(line, Peers.RING, collective_id),
        name="collectives_exchange",
    )(*given)
    return right.reshape(to_right.shape), left.reshape(to_left.shape)


# Bodies -------------------------------------------------------------------------------------------


def _all_gather_body(
    x_hbm_ref,  # [...]
    o_hbm_ref,  # [size, ...]
    own_sem,
    send_sem,  # [directions]
    recv_sem,  # [directions, hops]
    *,
    line: Line,
) -> None:
    """In hop `h`, the part that came `h` places passes on, and that of `h + 1` places away comes in."""
    right, left = reach(line.size)
    own = pltpu.make_async_copy(x_hbm_ref, o_hbm_ref.at[line.place()], own_sem)
    own.start()
    line.enter(Peers.RING)

    def hop(h: Any, directions: tuple[int, ...]) -> None:
        copies = []
        for way in directions:
            chunk_hbm_ref = o_hbm_ref.at[line.place(-h if way > 0 else h)]
            source_hbm_ref = x_hbm_ref if isinstance(h, int) and h == 0 else chunk_hbm_ref
            row = (1 - way) // 2
            sems = send_sem.at[row], recv_sem.at[row, h]
            copies.append(line.send(source_hbm_ref, chunk_hbm_ref, sems, way))
        for copy in copies:
            copy.wait()

    each_hop(hop, right, left)
    own.wait()


def _all_to_all_body(
    x_hbm_ref,  # [size, ...]
    o_hbm_ref,  # [size, ...]
    own_sem,
    send_sem,
    recv_sem,
    *,
    line: Line,
) -> None:
    """Every place of the result is written once, so all copies may be under way together."""
    me = line.place()
    own = pltpu.make_async_copy(x_hbm_ref.at[me], o_hbm_ref.at[me], own_sem)
    own.start()
    line.enter(Peers.ALL)
    # They are of one size, and all are waited for: it does not matter whose bytes a semaphore counts first.
    sems = send_sem, recv_sem
    copies = [
        line.send(x_hbm_ref.at[line.place(step)], o_hbm_ref.at[me], sems, step)
        for step in range(1, line.size)
    ]
    for copy in copies:
        copy.wait()
    own.wait()


def _ppermute_body(
    x_hbm_ref,  # [...]
    o_hbm_ref,  # [...]
    send_sem,
    recv_sem,
    done_sem,
    *,
    line: Line,
    shift: int,
    peers: Peers,
) -> None:
    line.enter(peers)
    line.send(x_hbm_ref, o_hbm_ref, (send_sem, recv_sem), shift).wait()
    line.leave(done_sem, peers)  # only one of the peers has sent something


def _exchange_body(
    to_right_hbm_ref,  # [...]
    to_left_hbm_ref,  # [...]
    from_left_hbm_ref,  # as to_right
    from_right_hbm_ref,  # as to_left
    send_sem,  # [directions]
    recv_sem,  # [directions]
    *,
    line: Line,
) -> None:
    line.enter(Peers.RING)
    copies = [
        line.send(to_right_hbm_ref, from_left_hbm_ref, (send_sem.at[0], recv_sem.at[0]), 1),
        line.send(to_left_hbm_ref, from_right_hbm_ref, (send_sem.at[1], recv_sem.at[1]), -1),
    ]
    for copy in copies:
        copy.wait()


# Launch, shapes --------------------------------------------------------------------------------------


def _launch(
    body: Callable[..., None],
    x: jax.Array,
    shape: tuple[int, ...],
    line: Line,
    peers: Peers,
    collective_id: int | None,
    semaphores: list[Any],
) -> jax.Array:
    name = getattr(body, "func", body).__name__.removeprefix("_").removesuffix("_body")
    return pl.pallas_call(
        functools.partial(body, line=line),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=semaphores,
        compiler_params=_parameters(line, peers, collective_id),
        name=f"collectives_{name}",
    )(x)


def _parameters(line: Line, peers: Peers, collective_id: int | None) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        collective_id=line.collective_id(peers) if collective_id is None else collective_id,
        has_side_effects=True,
    )


def check(op: str, x: jax.Array, size: int = 1, dim: int = 0) -> None:
    """Raise for another dtype than `DTYPES`, or a size along `dim` that `size` ranks can't divide."""
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{op}: x must be {', '.join(DTYPES)}, got {x.dtype.name}; convert it first")
    if size > 1 and x.shape[dim] % size:
        raise ValueError(
            f"{op}: the size of x along dimension {dim} must be a multiple of {size}, the ranks along the "
            f"axis, got shape {x.shape}; pad it with jnp.pad"
        )


def _two_dimensional(x: jax.Array) -> jax.Array:
    """With two dimensions at least, the ones that are tiled: so a leading one can be sliced."""
    return x.reshape((1,) * (2 - x.ndim) + x.shape)


def split(x: jax.Array, size: int, dim: int) -> jax.Array:
    """[..., size * n, ...] as [size, ..., n, ...]."""
    n = x.shape[dim] // size
    return jnp.moveaxis(x.reshape(*x.shape[:dim], size, n, *x.shape[dim + 1 :]), dim, 0)


def joined(parts: jax.Array, dim: int) -> jax.Array:
    """[size, ..., n, ...] as [..., size * n, ...]."""
    size, *shape = parts.shape
    shape[dim] *= size
    return jnp.moveaxis(parts, 0, dim).reshape(shape)


def _as_matrices(parts: jax.Array) -> jax.Array:
    """[size, ...] as [size, rows, cols], where that moves nothing."""
    size, *shape = parts.shape
    total = math.prod(shape)
    if len(shape) > 1:
        cols = shape[-1]
    else:  # a vector has the same order in memory as rows of 128
        cols = 128 if total % 128 == 0 else total
    return parts.reshape(size, total // cols, cols)

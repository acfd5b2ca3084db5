"""Sequences that lie on several ranks: a rank's part of a whole tensor, the whole of all parts, and
positions.

    x = shard_sequence(tokens, mesh, "x", 1, "zigzag")             # [B, L] -> [B, n]
    positions = sequence_positions(L, mesh, "x", "zigzag")         # [n], for rotary embeddings
    y = ring_attention(..., layout="zigzag", length=L)
    whole = unshard_sequence(y, mesh, "x", 2, L, "zigzag")         # [B, H, n, D] -> [B, H, L, D]

n is `layouts.part_length(L, ranks, layout)`: what is missing at the end of a sequence is padding, which has
the positions from L on.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from bridge.ranks.meeting import agreeing_on
from tpu_kernels.collectives import any_dtype
from tpu_kernels.collectives.ops import AnyAxis, AnyMesh
from tpu_kernels.collectives.places import RanksAlong, line_of
from tpu_kernels.ring_attention.layouts import LAYOUTS, Layout, part_length, pieces


def shard_sequence(
    x: torch.Tensor,
    mesh: AnyMesh,
    axis: AnyAxis,
    dim: int,
    layout: Layout,
    *,
    fill: float = 0,
) -> torch.Tensor:
    """This rank's part of a tensor that every rank has. Nothing is communicated.

    With r ranks and p pieces for each (1 for contiguous, 2 for zigzag), the sequence of length L becomes r *
    p pieces of ceil(L / (r * p)) positions. Rank i holds piece i, and under zigzag also piece 2r - 1 - i.

    The gradient of `x` is zero outside of this rank's part. The sum over ranks is that of the whole.

    Args:
        x: [..., L, ...], L along `dim`; any dtype.
        mesh: from `bridge.get_pallas_mesh`, or a DeviceMesh with names.
        axis: which of the mesh's axes; or (outer, inner), two whose ranks are one line, row by row.
        dim: the dimension of the sequence.
        layout: how the sequence is cut, "contiguous" or "zigzag".
        fill: what padding holds; labels need a number that the loss ignores.

    Returns:
        [..., n, ...], contiguous, and never memory of `x`.

    Raises:
        TypeError, ValueError: another layout, mesh or axis, a dimension that `x` has not, or a DTensor.
        RuntimeError: this rank is not in the mesh.
    """
    line = line_of("shard_sequence", mesh, axis)
    _check("shard_sequence", x, layout)
    dim = _dimension("shard_sequence", x, dim)
    count = pieces(layout)
    size = part_length(x.shape[dim], line.ranks, layout) // count
    own = [line.place] if count == 1 else [line.place, 2 * line.ranks - 1 - line.place]
    return torch.cat([_piece(x, dim, piece * size, size, fill) for piece in own], dim).contiguous()


def unshard_sequence(
    x: torch.Tensor,
    mesh: AnyMesh,
    axis: AnyAxis,
    dim: int,
    length: int,
    layout: Layout,
) -> torch.Tensor:
    """The whole tensor, of all ranks' parts, on each rank.

    It is an `all_gather`, with the gradient that has: the sum of the ranks' cotangents, of which each rank
    gets its part. That is the gradient of the sum of all ranks' losses. So where every rank computes the
    same loss of the whole tensor, divide it by the number of ranks, or let one rank alone have a loss that
    is not zero.

    Args:
        x: [..., n, ...], as `shard_sequence` gives it; any real dtype. All ranks of the mesh make the call.
        mesh, axis, dim, layout: as there.
        length: of the whole sequence, without padding.

    Returns:
        [..., length, ...], contiguous.

    Raises:
        TypeError, ValueError: as `shard_sequence`; or n is not a part of that length.
        RanksDisagree: ranks give other lengths or layouts.
        RuntimeError: this rank is not in the mesh.
    """
    line = line_of("unshard_sequence", mesh, axis)
    _check("unshard_sequence", x, layout)
    dim = _dimension("unshard_sequence", x, dim)
    check_length("unshard_sequence", length)
    expected = part_length(length, line.ranks, layout)
    if x.shape[dim] != expected:
        raise ValueError(
            f"unshard_sequence: of a sequence of length {length}, each of {line.ranks} ranks has {expected} "
            f"positions ({layout}), got shape {list(x.shape)} with {x.shape[dim]} along dim={dim}"
        )
    with alike(f"unshard_sequence(length={length}, layout={layout!r})"):
        gathered = gather(x, mesh, line, dim)
    whole = in_order(gathered, dim, line.ranks, layout)
    return whole.narrow(dim, 0, length).contiguous()


def sequence_positions(
    length: int,
    mesh: AnyMesh,
    axis: AnyAxis,
    layout: Layout,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The positions in the whole sequence of what this rank holds; for rotary embeddings and masks.

    Args:
        length: of the whole sequence. Padding has the positions from `length` on.
        mesh, axis, layout: as for `shard_sequence`.
        device: where to; None for torch's default device.

    Returns:
        [n], int64.

    Raises:
        TypeError, ValueError, RuntimeError: as `shard_sequence`.
    """
    line = line_of("sequence_positions", mesh, axis)
    check_layout("sequence_positions", layout)
    check_length("sequence_positions", length)
    count = part_length(length, line.ranks, layout)
    if layout == "contiguous":
        return torch.arange(line.place * count, (line.place + 1) * count, device=device)
    half = count // 2
    starts = (line.place * half, (2 * line.ranks - 1 - line.place) * half)
    return torch.cat([torch.arange(start, start + half, device=device) for start in starts])


# What attention uses, too ------------------------------------------------------------------------------


def gather(x: torch.Tensor, mesh: AnyMesh, line: RanksAlong, dim: int) -> torch.Tensor:
    """The parts of all ranks of a line behind each other, as they are."""
    for axis, size in reversed(tuple(zip(line.axes, line.sizes, strict=True))):  # the inner one first
        if size > 1:
            x = any_dtype.all_gather(x, mesh, axis, dim)
    return x


def alike(note: str) -> contextlib.AbstractContextManager[Any]:
    """A context for collectives, in which ranks with other arguments of the same function raise.

    Compiled graphs don't have it: what is compiled is compiled with its arguments.
    """
    return contextlib.nullcontext() if torch.compiler.is_compiling() else agreeing_on(note)


def in_order(x: torch.Tensor, dim: int, ranks: int, layout: Layout) -> torch.Tensor:
    """The sequence, of the ranks' parts behind each other. The parts have one size."""
    if layout == "contiguous" or ranks == 1:
        return x
    found = x.chunk(2 * ranks, dim) if x.shape[dim] else (x,)
    return torch.cat([*found[::2], *reversed(found[1::2])], dim)


def by_ranks(x: torch.Tensor, dim: int, ranks: int, layout: Layout) -> torch.Tensor:
    """The ranks' parts behind each other, of a sequence that can be divided: undoes `in_order`."""
    if layout == "contiguous" or ranks == 1:
        return x
    found = x.chunk(2 * ranks, dim) if x.shape[dim] else (x,)
    pairs = zip(found[:ranks], reversed(found[ranks:]), strict=False)
    return torch.cat([piece for pair in pairs for piece in pair], dim) if len(found) > 1 else x


def check_layout(function: str, layout: Layout) -> None:
    """Raise `ValueError` for what is no layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"{function}: layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")


def check_length(function: str, length: int) -> None:
    """Raise for what is no length."""
    if isinstance(length, bool) or not isinstance(length, int | torch.SymInt):
        raise TypeError(f"{function}: length must be an int, got {length!r}")
    if length < 0:
        raise ValueError(f"{function}: length must be 0 or more, got {length}")


def _piece(x: torch.Tensor, dim: int, start: int, size: int, fill: float) -> torch.Tensor:
    """The positions from `start` on; behind the end of `x` there is padding."""
    there = max(min(x.shape[dim] - start, size), 0)
    part = x.narrow(dim, start if there else 0, there)
    if there == size:
        return part
    shape = list(x.shape)
    shape[dim] = size - there
    return torch.cat([part, x.new_full(shape, fill)], dim)


def _check(function: str, x: torch.Tensor, layout: Layout) -> None:
    check_layout(function, layout)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{function}: x must be a torch.Tensor, got {type(x).__name__}")
    if hasattr(x, "device_mesh"):
        raise TypeError(f"{function}: x must be a rank's own tensor, got a DTensor; pass x.to_local()")


def _dimension(function: str, x: torch.Tensor, dim: int) -> int:
    """Counted from the first one."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{function}: dim must be an int, got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{function}: dim must be a dimension of x, which has shape {list(x.shape)}, got {dim}"
        )
    return dim % x.dim()

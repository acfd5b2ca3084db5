"""Tensors of a program that hold a rank's part of a sequence for a while, and then what they held before."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import torch
from torch.autograd.graph import increment_version

from tpu_kernels.collectives.ops import AnyAxis, AnyMesh
from tpu_kernels.ring_attention.layouts import Layout
from tpu_kernels.ring_attention.sequence import shard_sequence

_OP = "context_parallel"
_lock = threading.Lock()
_cut: set[int] = set()
"""The ids of all tensors that are cut now, by any thread."""


class Buffers:
    """Tensors to cut along a sequence, checked.

    A tensor gets other memory while it is cut, and its own back, so nothing is written to what it shares
    memory with, and its contents, strides and aliases are afterwards what they were.

    Attributes:
        length: of the sequence; None without tensors.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        dims: Sequence[int],
        fills: Sequence[float] | None,
        kept_cut: Collection[torch.Tensor],
    ) -> None:
        """Raises `TypeError` or `ValueError` for what can't be cut. Nothing has been done then."""
        self._fills = [0.0] * len(tensors) if fills is None else list(fills)
        if not len(tensors) == len(dims) == len(self._fills):
            raise ValueError(
                f"{_OP}: each buffer needs a dimension in buffer_seq_dims, and a number in buffer_fills if "
                f"they are given; got {len(tensors)} buffers, {len(dims)} dimensions, {len(self._fills)} "
                f"numbers"
            )
        self._tensors = list(tensors)
        self._dims = [_checked(i, x, dim) for i, (x, dim) in enumerate(zip(tensors, dims, strict=True))]
        if len({id(x) for x in tensors}) != len(tensors):
            raise ValueError(f"{_OP}: a buffer is there twice")
        if any(all(x is not kept for x in tensors) for kept in kept_cut):
            raise ValueError(f"{_OP}: no_restore_buffers must be some of the buffers")
        self._kept_cut = {id(x) for x in kept_cut}
        lengths = [x.shape[dim] for x, dim in zip(tensors, self._dims, strict=True)]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"{_OP}: all buffers must have the same length along buffer_seq_dims, got {lengths}, of "
                f"shapes {[list(x.shape) for x in tensors]}"
            )
        self.length = lengths[0] if lengths else None
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._noted = False

    def cut(self, mesh: AnyMesh, axis: AnyAxis, layout: Layout) -> None:
        """Let each tensor be this rank's part.

        Raises `ValueError` for a tensor that is cut already, here or on another rank that is a thread.
        """
        with _lock:
            for i, x in enumerate(self._tensors):
                if id(x) in _cut:
                    raise ValueError(
                        f"{_OP}: buffer {i}, {list(x.shape)}, is cut already, by a region around this one or "
                        f"on another rank of this process; ranks that are threads need tensors of their own: "
                        f"clone it on each"
                    )
            _cut.update(map(id, self._tensors))
            self._noted = True
        with torch.no_grad():
            for x, dim, fill in zip(self._tensors, self._dims, self._fills, strict=True):
                part = shard_sequence(x, mesh, axis, dim, layout, fill=fill)
                self._before.append((x, x.detach()))
                _become(x, part)

    def restore(self) -> None:
        """Undo `cut`, also one that ended with an error."""
        for x, before in self._before:
            if id(x) not in self._kept_cut:
                _become(x, before)
        self._before.clear()
        if self._noted:
            with _lock:
                _cut.difference_update(map(id, self._tensors))


def _become(x: torch.Tensor, other: torch.Tensor) -> None:
    """Let `x` have the memory of another tensor."""
    counted = not (x.is_inference() or other.is_inference())  # of these, autograd saves nothing
    x.data = other
    if counted:
        # Autograd is told that what it saved of `x` is not there any more: it raises, where it would compute
        # gradients of something else.
        increment_version(x)


def _checked(place: int, x: torch.Tensor, dim: int) -> int:
    """The dimension, counted from the first."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{_OP}: buffers must be tensors, got {type(x).__name__} as buffer {place}")
    if hasattr(x, "device_mesh"):
        raise TypeError(f"{_OP}: buffer {place} must be a rank's own tensor, got a DTensor")
    if x.requires_grad:
        raise ValueError(
            f"{_OP}: buffer {place} requires a gradient, which would have another shape; use "
            f"tpu_kernels.shard_sequence, which has a gradient"
        )
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{_OP}: buffer_seq_dims must be ints, got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{_OP}: buffer {place} of shape {list(x.shape)} has no dimension {dim}")
    return dim % x.dim()

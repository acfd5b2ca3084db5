"""`all_gather` and `all_to_all` for tensors of any real dtype.

The kernels move float32, bfloat16 and int32. Other elements travel as these, and no bit is lost:

    float16                            as float32
    bool, int8, uint8, int16, uint16   as int32
    float64, int64, uint64, uint32     their bits, as int32

float64 has gradients, too. Sums of cotangents are made in float64 then, in float32 otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_kernels.collectives import api
from tpu_kernels.collectives.api import AnyMesh

_WIDER = {
    torch.float16: torch.float32,
    torch.bool: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
}
_AS_BITS = (torch.float64, torch.int64, torch.uint64, torch.uint32)


def all_gather(x: torch.Tensor, mesh: AnyMesh, axis: str, dim: int) -> torch.Tensor:
    """`tpu_kernels.all_gather`; `dim` is counted from the first."""
    if x.dtype == torch.float64:
        return _Gathered.apply(x, mesh, axis, dim)
    if x.dtype in _AS_BITS:
        return _gathered_bits(x, mesh, axis, dim)
    if x.dtype in _WIDER:
        return api.all_gather(x.to(_WIDER[x.dtype]), mesh, axis, dim).to(x.dtype)
    return api.all_gather(x, mesh, axis, dim)


def all_to_all(x: torch.Tensor, mesh: AnyMesh, axis: str, split_dim: int, concat_dim: int) -> torch.Tensor:
    """`tpu_kernels.all_to_all`; dimensions are counted from the first."""
    if x.dtype == torch.float64:
        return _Exchanged.apply(x, mesh, axis, split_dim, concat_dim)
    if x.dtype in _AS_BITS:
        return _exchanged_bits(x, mesh, axis, split_dim, concat_dim)
    if x.dtype in _WIDER:
        return api.all_to_all(x.to(_WIDER[x.dtype]), mesh, axis, split_dim, concat_dim).to(x.dtype)
    return api.all_to_all(x, mesh, axis, split_dim, concat_dim)


# Bits --------------------------------------------------------------------------------------------------


def _bits(x: torch.Tensor) -> torch.Tensor:
    """[...] as int32 [..., 1 or 2]: no dimension of `x` is concerned."""
    return x.contiguous().unsqueeze(-1).view(torch.int32)


def _of_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.view(dtype).squeeze(-1)


def _gathered_bits(x: torch.Tensor, mesh: AnyMesh, axis: str, dim: int) -> torch.Tensor:
    return _of_bits(api.all_gather(_bits(x), mesh, axis, dim), x.dtype)


def _exchanged_bits(
    x: torch.Tensor, mesh: AnyMesh, axis: str, split_dim: int, concat_dim: int
) -> torch.Tensor:
    return _of_bits(api.all_to_all(_bits(x), mesh, axis, split_dim, concat_dim), x.dtype)


class _Gathered(torch.autograd.Function):
    """float64, whose sum of cotangents float32 could not hold."""

    @staticmethod
    def forward(x: torch.Tensor, mesh: AnyMesh, axis: str, dim: int) -> torch.Tensor:
        return _gathered_bits(x, mesh, axis, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.mesh, ctx.axis, ctx.dim = inputs
        ctx.parts = output.shape[ctx.dim] // max(x.shape[ctx.dim], 1), x.shape[ctx.dim]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (g,) = cotangents
        # To each rank its part of all ranks' cotangents, behind each other.
        parts = _Exchanged.apply(g, ctx.mesh, ctx.axis, ctx.dim, ctx.dim)
        shape = (*g.shape[: ctx.dim], *ctx.parts, *g.shape[ctx.dim + 1 :])
        return parts.reshape(shape).sum(ctx.dim), None, None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, mesh: AnyMesh, axis: str, split_dim: int, concat_dim: int) -> torch.Tensor:
        return _exchanged_bits(x, mesh, axis, split_dim, concat_dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.mesh, ctx.axis, ctx.split_dim, ctx.concat_dim = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (g,) = cotangents
        back = _Exchanged.apply(g, ctx.mesh, ctx.axis, ctx.concat_dim, ctx.split_dim)
        return back, None, None, None, None

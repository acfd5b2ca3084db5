"""Integer tensors as arguments: lengths, ids, sizes. JAX computes with int32; torch mostly has int64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from bridge import jax_op


def check_integers(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise `TypeError` for what is no tensor of integers."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{op}: {name} must be integers, got {tensor.dtype}")


def int32(tensor: torch.Tensor) -> torch.Tensor:
    """Integers as int32. Wider ones are checked: what does not fit raises `OverflowError` when it is run."""
    if tensor.dtype in (torch.int32, torch.bool):
        return tensor
    if tensor.dtype not in (torch.int64, torch.uint64, torch.uint32):
        return tensor.to(torch.int32)
    wide = tensor.to(torch.int64)
    if tensor.dtype == torch.uint64:  # the upper half has become negative, where some would fit
        wide = wide.masked_fill(wide < 0, 2**63 - 1)
    return _as_int32(wide)


@jax_op("tpu_kernels::as_int32", x64=False)
def _as_int32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32)

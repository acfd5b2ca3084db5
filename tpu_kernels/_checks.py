"""Checks of arguments that several public functions share: torch's rules, in words that name the fix."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise `TypeError` for a tensor that is no tensor or not of a real floating dtype; None passes."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in FLOATING:
            raise TypeError(
                f"{op}: {name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}; "
                f"convert it first"
            )


def check_normalized_shape(
    op: str, input: torch.Tensor, normalized_shape: int | Sequence[int], **vectors: torch.Tensor | None
) -> tuple[int, ...]:
    """`normalized_shape` as a tuple.

    It must be the end of `input`'s shape, and each of `vectors` must have that shape. Raises `TypeError` or
    `RuntimeError` otherwise, the types torch raises.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if any(isinstance(size, bool) or not isinstance(size, int | torch.SymInt) for size in shape):
        raise TypeError(
            f"{op}: normalized_shape must be an int or a sequence of ints, got {normalized_shape!r}"
        )
    if not shape:
        raise RuntimeError(
            f"{op}: normalized_shape must name at least one dimension, got {normalized_shape!r}"
        )
    if len(shape) > input.dim() or tuple(input.shape[-len(shape) :]) != shape:
        raise RuntimeError(
            f"{op}: normalized_shape {list(shape)} must be the last {len(shape)} dimensions of input, "
            f"got input of shape {list(input.shape)}"
        )
    for name, vector in vectors.items():
        if vector is not None and tuple(vector.shape) != shape:
            raise RuntimeError(
                f"{op}: {name} must have the shape of normalized_shape, {list(shape)}, "
                f"got {list(vector.shape)}"
            )
    return shape


def is_number(value: object) -> bool:
    """Whether it is a real number, such as Python's and NumPy's scalars are; a bool is none."""
    real = isinstance(value, int | float | torch.SymInt | torch.SymFloat | numbers.Real)
    return real and not isinstance(value, bool)


def check_eps(op: str, eps: float) -> float:
    """`eps` as a float. Raises `TypeError` for what is no number."""
    if not is_number(eps):
        raise TypeError(f"{op}: eps must be a float, got {eps!r}")
    return float(eps)

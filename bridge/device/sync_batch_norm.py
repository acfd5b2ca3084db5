"""The ops under `torch.nn.SyncBatchNorm`, which torch has for accelerators only.

Each rank computes statistics of its part of the batch, all ranks exchange them, and each normalises its part
with those of the whole. Channels are dimension 1; N is the number of values per channel over all ranks.
Statistics of 16-bit inputs are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Optional = torch.Tensor | None
_libraries: list[torch.library.Library] = []  # a registration lasts as long as its Library object


def register() -> None:
    """Register the ops for the device. Call once per process."""
    aten = torch.library.Library("aten", "IMPL")
    _libraries.append(aten)
    for name, kernel in _KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")


def _stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1 / sqrt(variance + eps) per channel."""
    variance, mean = torch.var_mean(_wide(input), _but_channels(input), correction=0)
    return mean, (variance + eps).rsqrt()


def _gather_stats_with_counts(
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: _Optional,
    running_var: _Optional,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics of the whole from those of R ranks: mean and invstd (R, C), counts (R,) values per channel.

    variance = sum_r counts_r * (variance_r + (mean_r - mean)^2) / N. The running statistics are updated, the
    variance with N - 1 for N.
    """
    counts = counts.to(mean.dtype).unsqueeze(1)
    total = counts.sum()
    common = (mean * counts).sum(0) / total
    squares = ((invstd.pow(-2) - eps + (mean - common).square()) * counts).sum(0)
    if running_mean is not None:
        running_mean.lerp_(common.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
    return common, (squares / total + eps).rsqrt()


def _gather_stats(
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: _Optional,
    running_var: _Optional,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.full((len(mean),), count, device=mean.device)
    return _gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts)


def _elemt(
    input: torch.Tensor,
    weight: _Optional,
    bias: _Optional,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """(input - mean) * invstd * weight + bias."""
    result = (_wide(input) - _along(mean, input)) * _along(invstd, input)
    if weight is not None:
        result = result * _along(weight, input)
    if bias is not None:
        result = result + _along(bias, input)
    return result.to(input.dtype)


def _elemt_out(
    input: torch.Tensor,
    weight: _Optional,
    bias: _Optional,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    return out.copy_(_elemt(input, weight, bias, mean, invstd, eps))


def _backward_reduce(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: _Optional,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[_Optional, ...]:
    """sum(dy), sum(dy * (x - mean)), and the gradients of weight and bias, of this rank's part."""
    dy = _wide(grad_out)
    others = _but_channels(input)
    sum_dy = dy.sum(others)
    sum_dy_xmu = (dy * (_wide(input) - _along(mean, input))).sum(others)
    dtype = mean.dtype if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(dtype) if weight_g else None,
        sum_dy.to(dtype) if bias_g else None,
    )


def _backward_elemt(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: _Optional,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """(dy - sum(dy) / N - (x - mean) * invstd^2 * sum(dy * (x - mean)) / N) * invstd * weight."""
    total = count.sum()
    centred = _wide(input) - _along(mean, input)
    result = _wide(grad_out) - _along(sum_dy / total, input)
    result = result - centred * _along(invstd.square() * sum_dy_xmu / total, input)
    scale = invstd if weight is None else invstd * weight
    return (result * _along(scale, input)).to(input.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _but_channels(tensor: torch.Tensor) -> list[int]:
    return [d for d in range(tensor.dim()) if d != 1]


def _along(per_channel: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C,) -> (1, C, 1, ...), to be combined with a tensor of this many dimensions."""
    return per_channel.view([1, -1] + [1] * (like.dim() - 2))


_KERNELS: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats": _gather_stats,
    "batch_norm_gather_stats_with_counts": _gather_stats_with_counts,
    "batch_norm_elemt": _elemt,
    "batch_norm_elemt.out": _elemt_out,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}

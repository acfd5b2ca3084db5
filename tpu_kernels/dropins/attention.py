"""`scaled_dot_product_attention` by torch's rules, computed by splash attention.

The rules are torch's own, so whatever is not plainly right by them is handed to torch: it computes or raises,
with its own numbers and errors. The exceptions are two calls on which torch fails: see `_refuse`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tpu_kernels import masks
from tpu_kernels.dropins import recognition
from tpu_kernels.splash_attention.api import splash_attention
from tpu_kernels.splash_attention.arguments import broadcast

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DEVICES = ("cpu", "tpu")
CAUSAL = masks.causal()
LOWER_RIGHT = masks.causal("bottom_right")
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


class Call(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Call:
        """Arguments as the function takes them: `scale` and `enable_gqa` by name."""
        return cls(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def compute(call: Call, otherwise: Callable[..., torch.Tensor], *, lower_right: bool = False) -> torch.Tensor:
    """The result of a call.

    Args:
        call: the arguments, to which autocast has been applied.
        otherwise: torch's own function, which gets the arguments of a call that is not ours.
        lower_right: whether the mask is causal with the last query at the last key; then `attn_mask` is None
            and `is_causal` False.
    """
    if _only_math_allowed() or not _are_tensors(call):
        return _torchs(call, otherwise)
    _refuse(call)
    if not _fits(call):
        return _torchs(_with_one_mask(call), otherwise)
    if call.query.dtype == torch.float64 or _forward_derivatives():
        return _math(call, lower_right)
    mask, bias, scores = call.attn_mask, None, _scores(call)
    visible = LOWER_RIGHT if lower_right else None
    if mask is not None and scores is not None:
        if call.is_causal:
            mask = _and_causal(mask, call)
        pattern = recognition.recognise(mask, scores)
        if pattern is not None:
            visible, mask = pattern.mask(), None
        elif mask.dtype != torch.bool:
            mask, bias = None, mask
    elif call.is_causal:
        visible = CAUSAL
    output = splash_attention(
        call.query,
        call.key,
        call.value,
        mask=mask if visible is None else visible,
        bias=bias,
        scale=call.scale,
        dropout_p=float(call.dropout_p),
    )
    return _laid_out_as(call.query, output)


def _torchs(call: Call, otherwise: Callable[..., torch.Tensor]) -> torch.Tensor:
    return otherwise(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )


def _math(call: Call, lower_right: bool) -> torch.Tensor:
    """The call in torch's own operations, for what kernels don't have: float64, forward-mode derivatives."""
    if lower_right:
        rows, columns = call.query.shape[-2], call.key.shape[-2]
        table = torch.ones(rows, columns, dtype=torch.bool, device=call.query.device).tril(columns - rows)
        call = call._replace(attn_mask=table)
    call = _with_one_mask(call)
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool:  # this op would add ones and zeros
        scores = torch.zeros(mask.shape, dtype=call.query.dtype, device=mask.device)
        call = call._replace(attn_mask=scores.masked_fill(~mask, float("-inf")))
    return torch.ops.aten._scaled_dot_product_attention_math(
        *call[:6], scale=call.scale, enable_gqa=call.enable_gqa
    )[0]


# What torch leaves to its implementations --------------------------------------------------------------


def _only_math_allowed() -> bool:
    """Whether `torch.nn.attention.sdpa_kernel` excludes all fused kernels. Ours counts as any of them."""
    return not (
        torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
        or torch._C._get_overrideable_sdp_enabled()
    )


def _refuse(call: Call) -> None:
    """Raise for two calls that are wrong and on which torch fails.

    With lengths of key and value that differ, its CPU kernel computes something. Without heads in key or
    value and `enable_gqa`, it divides by zero and the process dies.
    """
    shapes = [tuple(t.shape) for t in (call.query, call.key, call.value)]
    if min(map(len, shapes)) < 2:
        return
    if shapes[1][-2] != shapes[2][-2]:
        raise RuntimeError(
            f"scaled_dot_product_attention: key and value must have the same length (dimension -2), got "
            f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]}"
        )
    if call.enable_gqa and min(map(len, shapes)) > 2 and 0 in (shapes[1][-3], shapes[2][-3]):
        raise RuntimeError(
            f"scaled_dot_product_attention: with enable_gqa, key and value must have at least one head "
            f"(dimension -3), got query {shapes[0]}, key {shapes[1]}, value {shapes[2]}"
        )


def _with_one_mask(call: Call) -> Call:
    """The call with `is_causal` in the mask: torch's kernels for the CPU take both, its math does not."""
    mask = call.attn_mask
    if not call.is_causal or mask is None or not _mask_fits(call, mask):
        return call
    return call._replace(attn_mask=_and_causal(mask, call), is_causal=False)


def _and_causal(mask: torch.Tensor, call: Call) -> torch.Tensor:
    shape = (call.query.shape[-2], call.key.shape[-2])
    causal = torch.ones(shape, dtype=torch.bool, device=mask.device).tril()
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))


# What is plainly right by torch's rules, and ours ------------------------------------------------------


def _are_tensors(call: Call) -> bool:
    """Whether query, key and value are dense tensors that an op can take."""
    for t in (call.query, call.key, call.value):
        if not isinstance(t, torch.Tensor) or t.is_nested or t.layout != torch.strided:
            return False
        if is_traceable_wrapper_subclass(t):  # DTensor, which knows how to shard torch's ops, and not ours
            return False
    return True


def _fits(call: Call) -> bool:
    """Whether the call is right by torch's rules, has something to compute, and is for our kernel."""
    query, key, value = call.query, call.key, call.value
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return False
    if query.device.type not in _DEVICES or key.device != query.device or value.device != query.device:
        return False
    if type(call.is_causal) is not bool or type(call.enable_gqa) is not bool:
        return False
    if isinstance(call.dropout_p, bool) or isinstance(call.scale, bool):
        return False  # torch takes them for numbers
    if not isinstance(call.dropout_p, _NUMBERS) or not 0 <= call.dropout_p < 1:
        return False  # with 1 there is nothing to compute
    if call.scale is not None and not isinstance(call.scale, _NUMBERS):
        return False
    if min(query.dim(), key.dim(), value.dim()) < 2 or query.shape[-1] != key.shape[-1]:
        return False
    if not query.numel() or not key.numel() or not value.numel():
        return False
    if not _heads_fit(call) or _batch(call, query, key, value) is None:
        return False
    return call.attn_mask is None or _mask_fits(call, call.attn_mask)


def _heads_fit(call: Call) -> bool:
    """Whether the heads divide (with `enable_gqa`). Without it, they broadcast as other dimensions do."""
    if not call.enable_gqa:
        return True
    if min(call.query.dim(), call.key.dim(), call.value.dim()) < 3:
        return False
    heads = call.query.shape[-3]
    return heads % call.key.shape[-3] == 0 and heads % call.value.shape[-3] == 0


def _scores(call: Call) -> list[int] | None:
    """The shape of the scores, `[..., L, S]`, or None if query and key do not broadcast."""
    if min(call.query.dim(), call.key.dim()) < 2:
        return None
    batch = _batch(call, call.query, call.key)
    return None if batch is None else [*batch, call.query.shape[-2], call.key.shape[-2]]


def _batch(call: Call, *tensors: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions before the last two that tensors broadcast to, or None if they don't.

    With `enable_gqa` all have the query's heads.
    """
    return broadcast(
        [
            (*t.shape[:-3], call.query.shape[-3]) if call.enable_gqa and t.dim() > 2 else tuple(t.shape[:-2])
            for t in tensors
        ]
    )


def _mask_fits(call: Call, mask: Any) -> bool:
    """Whether the mask has a dtype that goes with the query, and broadcasts to the scores.

    Those of fewer than two dimensions are an error to torch's kernels and none to its math: that is torch's
    affair.
    """
    if not isinstance(mask, torch.Tensor) or is_traceable_wrapper_subclass(mask):
        return False
    if mask.dtype not in (torch.bool, torch.float32, call.query.dtype) or mask.device != call.query.device:
        return False
    if mask.layout != torch.strided or mask.is_nested or mask.dim() < 2:
        return False
    scores = _scores(call)
    if scores is None or mask.dim() > len(scores):
        return False
    return all(
        size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(scores), strict=False)
    )


def _forward_derivatives() -> bool:
    """Whether forward-mode derivatives are being taken, which kernels don't have."""
    return torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def _laid_out_as(query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The output in memory as the query is: `[B, L, H, E]` seen as `[B, H, L, E]`, or contiguous.

    Torch's fused kernels do so, and programs that put the heads side by side again with a view rely on it.
    """
    if query.dim() == output.dim() == 4 and query.stride(1) < query.stride(2):
        return output.transpose(1, 2).contiguous().transpose(1, 2)
    return output


def under_autocast(call: Call) -> Call:
    """The call with what `torch.autocast` makes of it: floating tensors in its dtype, float64 left alone."""
    if not _are_tensors(call):
        return call
    device = call.query.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return call
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != device:
            return tensor
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return call._replace(
        query=cast(call.query), key=cast(call.key), value=cast(call.value), attn_mask=cast(call.attn_mask)
    )

"""The fused ops under `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` in inference, on `tpu`.

Torch's modules call them where no gradient is needed and no mask is in the way; they compute attention
themselves. Here they are made of the parts, with attention by `scaled_dot_product_attention`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from bridge.compiler import run_as_is
from tpu_kernels.dropins.dropin import Add, DropIn

_KEY = "PrivateUse1"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
_PADDING = 1  # torch's number for a mask [B, L] of keys, in place of one that broadcasts to the scores
_Optional = torch.Tensor | None

_enabled = False
_libraries: list[torch.library.Library] = []
_originals: dict[str, Callable[..., Any]] = {}


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: _Optional = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, _Optional]:
    """`aten::_native_multi_head_attention`: projections of `[B, L, E]`, attention, the projection back."""
    inputs = (query, key, value)
    if not _enabled or need_weights or any(x.dim() != 3 for x in inputs):
        return _originals["_native_multi_head_attention"](
            query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias,
            mask, need_weights, average_attn_weights, mask_type,
        )  # fmt: skip
    parts = zip(inputs, qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    heads = [F.linear(x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2) for x, w, b in parts]
    if mask is not None:
        mask = mask[:, None, None, :] if mask_type == _PADDING else mask
        mask = ~mask if mask.dtype == torch.bool else mask.to(query.dtype)  # here, True is what to leave out
    output = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask)
    return F.linear(output.transpose(1, 2).flatten(2), proj_weight, proj_bias), None


def _encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: _Optional = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """`aten::_transformer_encoder_layer_fwd`: attention and a feed-forward, each with norm and residual."""
    attention = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    norms = ((norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2))
    hidden, back = (ffn_weight_1, ffn_bias_1), (ffn_weight_2, ffn_bias_2)
    if not _enabled:
        return _originals["_transformer_encoder_layer_fwd"](
            src, embed_dim, num_heads, *attention, use_gelu, norm_first, eps, *norms[0], *norms[1], *hidden,
            *back, mask, mask_type,
        )  # fmt: skip

    def attend(x: torch.Tensor) -> torch.Tensor:
        return _attention(x, x, x, embed_dim, num_heads, *attention, mask, False, True, mask_type)[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        inner = F.linear(x, *hidden)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), *back)

    x = src
    for block, norm in zip((attend, feed_forward), norms, strict=True):
        if norm_first:
            x = x + block(F.layer_norm(x, (embed_dim,), *norm, eps))
        else:
            x = F.layer_norm(x + block(x), (embed_dim,), *norm, eps)
    return x


_KERNELS: dict[str, Callable[..., Any]] = {
    "_native_multi_head_attention": _attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}


def _enable() -> None:
    """Registered once and for good: who registers kernels for these ops later may hold ours, and call it."""
    global _enabled
    if not _libraries:
        library = torch.library.Library("aten", "IMPL")
        for name, kernel in _KERNELS.items():
            before = torch.library.get_kernel(f"aten::{name}", _KEY)
            _originals[name] = _calling(before)
            library.impl(name, kernel, _KEY)
        _libraries.append(library)
    _enabled = True


def _calling(kernel: Any) -> Callable[..., Any]:
    return lambda *args: kernel.call_boxed(_KEYS, *args)


def _disable() -> None:
    global _enabled
    _enabled = False


def _overridden(add: Add) -> None:
    """Nothing: where a `TorchFunctionMode` is on, the modules don't call these ops."""


run_as_is(sys.modules[__name__])
DROP_IN = DropIn("the fused layers of torch.nn", _enable, _disable, _overridden)

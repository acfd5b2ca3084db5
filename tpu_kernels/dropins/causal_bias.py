"""`torch.nn.attention.bias`: `causal_upper_left` and `causal_lower_right`, without a table of L * S."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from bridge.device.imports import after_import
from tpu_kernels.dropins import attention
from tpu_kernels.dropins.attention import Call
from tpu_kernels.dropins.dropin import Add, DropIn

_MODULE = "torch.nn.attention.bias"  # imports torch's compiler, so it is not imported here

_classes: list[type] = []
"""`CausalBias`, once its module has been imported."""
_enabled = False


def is_bias(mask: Any) -> bool:
    """Whether a mask is one of `torch.nn.attention.bias`."""
    return type(mask) in _classes


def compute(call: Call, otherwise: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The result of a call whose mask is a `CausalBias`; `otherwise` is torch's function for it."""
    bias: Any = call.attn_mask
    plain = call._replace(attn_mask=None)

    def torchs(
        query: Any, key: Any, value: Any, mask: Any, dropout_p: Any, is_causal: Any, **rest: Any
    ) -> Any:
        return otherwise(query, key, value, bias, dropout_p, call.is_causal, **rest)

    if call.is_causal:
        return otherwise(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)  # which raises
    lengths = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant == type(bias.variant).UPPER_LEFT or lengths[0] == lengths[1]:
        return attention.compute(plain._replace(is_causal=True), torchs)
    if lengths != (call.query.shape[-2], call.key.shape[-2]):
        return otherwise(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
    return attention.compute(plain, torchs, lower_right=True)


# On tpu: what the class makes of a call to F.scaled_dot_product_attention -------------------------------


def _dispatch_for(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def dispatch(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if isinstance(query, torch.Tensor) and query.device.type == "tpu":
            return compute(attention.under_autocast(call), original)
        return original(*call[:6], scale=scale, enable_gqa=enable_gqa)

    return dispatch


_originals: dict[type, Any] = {}


def _enable() -> None:
    global _enabled
    _enabled = True
    _patch()


def _disable() -> None:
    global _enabled
    _enabled = False
    for bias, original in _originals.items():
        bias._dispatch = original  # type: ignore[attr-defined]
    _originals.clear()


def _patch() -> None:
    if not _enabled:
        return
    for bias in _classes:
        if bias not in _originals:
            _originals[bias] = vars(bias)["_dispatch"]
            ours = staticmethod(_dispatch_for(_originals[bias].__func__))
            bias._dispatch = ours  # type: ignore[attr-defined]


def _imported(module: ModuleType) -> None:
    _classes.append(module.CausalBias)
    _patch()


def _overridden(add: Add) -> None:
    """Nothing: the mode sees `F.scaled_dot_product_attention` before the class does."""


after_import(_MODULE, _imported)
DROP_IN = DropIn(_MODULE, _enable, _disable, _overridden)

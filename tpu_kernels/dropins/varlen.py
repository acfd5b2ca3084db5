"""`torch.nn.attention.varlen.varlen_attn`: sequences of different lengths in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from bridge.device.imports import after_import
from tpu_kernels import masks
from tpu_kernels.dropins.dropin import Add, DropIn
from tpu_kernels.splash_attention.api import splash_attention
from tpu_kernels.splash_attention.terms import in_range
from tpu_kernels.splash_attention.varlen import places_of, visible_keys

_MODULE = "torch.nn.attention.varlen"  # imports torch's compiler, so it is not imported here
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _attention(
    otherwise: Callable[..., Results],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Results:
    """`torch_attn::_varlen_attn`, under `varlen_attn`: output `[T, H, D]`, lse `[H, T]`, an unused seed."""
    ours = (
        cu_seq_k is not None
        and block_table is None
        and query.device.type in ("cpu", "tpu")
        and query.dtype in _DTYPES
        and not torch.autograd.forward_ad._current_level >= 0
    )
    if not ours or cu_seq_k is None:
        return otherwise(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, enable_gqa,
            seqused_k, block_table, num_splits,
        )  # fmt: skip
    left, right = window_size or (-1, -1)
    places = places_of(cu_seq_q, cu_seq_k, query.shape[0], used_k=seqused_k)
    seen = visible_keys(places, (left, 0 if is_causal else right))
    output, lse = splash_attention(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        mask=masks.Mask(in_range(), seen),
        scale=scale,
        return_lse=True,
    )
    output = output.transpose(0, 1).contiguous()
    return output, lse, torch.zeros(2, dtype=torch.uint64, device=query.device)


# On tpu ------------------------------------------------------------------------------------------------

_enabled = False
_imported: list[ModuleType] = []
_libraries: list[torch.library.Library] = []


def _enable() -> None:
    global _enabled
    _enabled = True
    _register()


def _disable() -> None:
    global _enabled
    _enabled = False
    while _libraries:
        _libraries.pop()._destroy()


def _register() -> None:
    if not _enabled or not _imported or _libraries:
        return
    op = torch.ops.torch_attn._varlen_attn.default
    library = torch.library.Library("torch_attn", "IMPL")
    _libraries.append(library)
    for name in ("AutogradPrivateUse1", "PrivateUse1"):
        below = torch.library.get_kernel(op, name)

        def kernel(keys: torch._C.DispatchKeySet, *args: Any, below: Any = below, **kwargs: Any) -> Results:
            return _attention(lambda *given: below.call_boxed(keys, *given), *args, **kwargs)

        library.impl("_varlen_attn", kernel, name, with_keyset=True)


# Under overrides() -------------------------------------------------------------------------------------


def _overridden(add: Add) -> None:
    def imported(module: ModuleType) -> None:
        _imported.append(module)
        packet = torch.ops.torch_attn._varlen_attn
        for op in (packet, packet.default):
            add(op, lambda *args, **kwargs: _attention(packet, *args, **kwargs))
        _register()

    after_import(_MODULE, imported)


DROP_IN = DropIn(_MODULE, _enable, _disable, _overridden)

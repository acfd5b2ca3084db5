"""`torch.nn.functional.scaled_dot_product_attention`: where its calls are taken.

On `tpu`, torch's dispatcher is given a kernel for `aten::scaled_dot_product_attention`. Without one the op
takes itself apart into matrix products and a softmax. So every caller is reached, C++ and compiled graphs
included. Under `overrides()`, calls are taken where a `TorchFunctionMode` sees them, on any device.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional as F

from bridge.compiler import run_as_is
from tpu_kernels.dropins import attention, causal_bias
from tpu_kernels.dropins.attention import Call
from tpu_kernels.dropins.copies import with_names
from tpu_kernels.dropins.dropin import Add, DropIn

_OP = torch.ops.aten.scaled_dot_product_attention.default
_NAME = "scaled_dot_product_attention"
_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"

# As it is now: by the time of a call, the name may be someone else's.
_torchs = F.scaled_dot_product_attention


# On tpu ------------------------------------------------------------------------------------------------


def _kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
    """For the dispatcher: autocast has been applied, derivatives and tracing come below."""
    return attention.compute(Call.of(*args, **kwargs), _OP.decompose)


def _kernel_under_transforms(
    keys: torch._C.DispatchKeySet, query: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Under `torch.vmap` and `torch.func`: before these, and before autocast. Else what torch has there."""
    if query.device.type == "tpu":
        return attention.compute(attention.under_autocast(Call.of(query, *args, **kwargs)), _OP.decompose)
    return _before_transforms.call_boxed(keys, query, *args, **kwargs)


_before_transforms = torch.library.get_kernel(_OP, _TRANSFORMS)
_libraries: list[torch.library.Library] = []


def _enable() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl(_NAME, _kernel, key)
    library.impl(_NAME, _kernel_under_transforms, _TRANSFORMS, with_keyset=True)
    _OP._dispatch_cache.clear()  # what tracing remembers of kernels


def _disable() -> None:
    while _libraries:
        _libraries.pop()._destroy()
    _OP._dispatch_cache.clear()


run_as_is(sys.modules[__name__])


# Under overrides() -------------------------------------------------------------------------------------


def _replacement(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = attention.under_autocast(Call.of(*args, **kwargs))
    if causal_bias.is_bias(call.attn_mask):
        return causal_bias.compute(call, _torchs)
    return attention.compute(call, _torchs)


def _overridden(add: Add) -> None:
    for function in (_torchs, _OP, torch.ops.aten.scaled_dot_product_attention):
        add(function, _replacement)
    layer = F.multi_head_attention_forward
    add(layer, with_names(layer, scaled_dot_product_attention=_replacement))


DROP_IN = DropIn("torch.nn.functional.scaled_dot_product_attention", _enable, _disable, _overridden)

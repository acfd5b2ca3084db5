"""Drop-in modules: the same parameters, state_dict and arguments as torch's, computed by our kernels."""

from __future__ import annotations

import torch

from tpu_kernels.layer_norm.api import layer_norm
from tpu_kernels.rms_norm.api import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` computed by `tpu_kernels.rms_norm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` over its last dimensions `normalized_shape`."""
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` computed by `tpu_kernels.layer_norm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input` over its last dimensions `normalized_shape`."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


_OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.LayerNorm: LayerNorm,
}


def replace_modules(model: torch.nn.Module) -> int:
    """Let each `torch.nn.LayerNorm` and `torch.nn.RMSNorm` in `model` compute with our kernels, in place.

    Each module stays the same object and only its class changes: parameters, hooks, names and whatever
    else refers to it stay as they are. Modules of classes derived from torch's are left alone,
    because they may compute something else.

    Returns:
        How many modules were changed.
    """
    found = [module for module in model.modules() if type(module) in _OURS]
    for module in found:
        module.__class__ = _OURS[type(module)]
    return len(found)

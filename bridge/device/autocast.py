"""`torch.autocast("tpu")`: which ops compute in the lower precision and which in float32.

The lists are torch's policy for accelerators. A kernel at the autocast key of the device casts the
floating tpu tensors among the arguments and calls the op again below that key; ops without a policy
fall through. float64 tensors are left alone, as torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bridge.device.storage import DEVICE_TYPE

_KEY = "AutocastPrivateUse1"
_KEYS = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

_LOWER_PRECISION = """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm
    mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention
""".split()

_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList norm.Scalar
    norm.ScalarOpt_dim
""".split()

_WIDEST = """
    addcdiv addcmul atan2 bilinear cat cross dot vdot grid_sampler index_put scatter_add stack tensordot
""".split()

_libraries: list[torch.library.Library] = []


def register_autocast() -> None:
    """Register the autocast kernels of the device. Call once per process."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    aten = torch.library.Library("aten", "IMPL")
    _libraries.extend([everything, aten])
    for names, choose in ((_LOWER_PRECISION, _lower), (_FLOAT32, _float32), (_WIDEST, _widest)):
        for name in names:
            aten.impl(name, functools.partial(_cast_and_call, name, choose), _KEY)
    # Per thread in torch: threads started later have torch's own default, float16.
    torch.set_autocast_dtype(DEVICE_TYPE, torch.bfloat16)
    aten.impl("binary_cross_entropy", _refuse_binary_cross_entropy, _KEY)


def _cast_and_call(
    name: str, choose: Callable[[list[torch.Tensor]], torch.dtype], *args: Any, **kwargs: Any
) -> Any:
    """Run the op with its floating tpu tensors in the dtype the policy chooses."""
    dtype = choose([t for t in _tensors((args, tuple(kwargs.values()))) if _eligible(t)])
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return _op(name)(*_cast(args, dtype), **{k: _cast(v, dtype) for k, v in kwargs.items()})


@functools.cache
def _op(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _lower(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(DEVICE_TYPE)


def _float32(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    """float32 if any tensor has it, else the autocast dtype."""
    if any(t.dtype is torch.float32 for t in tensors):
        return torch.float32
    return torch.get_autocast_dtype(DEVICE_TYPE)


def _eligible(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_floating_point() and tensor.dtype is not torch.float64 and tensor.device.type == DEVICE_TYPE
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if _eligible(value) else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(v, dtype) for v in value)
    return value


def _refuse_binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
        "binary_cross_entropy_with_logits or BCEWithLogitsLoss, or leave autocast for this call."
    )

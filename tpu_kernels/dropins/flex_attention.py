"""`torch.nn.attention.flex_attention`: its `score_mod` and `mask_mod` become part of our kernel.

torch's function checks its arguments, has torch.compile make graphs of the two functions, and calls an op
that takes graphs, the higher-order op `flex_attention`. The op is where calls are taken, so that checks and
errors are torch's, and every caller is reached, compiled or not, whenever it imported the function. Once
torch's module has been imported, the op's kernels for `cpu` and `tpu` are ones that ask who is to compute:
ours on `tpu` while `install()` holds, ours for a call that `overrides()` has marked where its mode saw it,
and else torch's own.

torch's function refuses tensors on `tpu`, and on `cpu` those that require a gradient, before it comes to the
op. It is kept from doing so where ours computes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._C import DispatchKey

from bridge.device.imports import after_import
from tpu_kernels.dropins import flex_blocks, flex_devices, flex_graphs
from tpu_kernels.dropins.dropin import Add, DropIn
from tpu_kernels.dropins.flex_blocks import Lists, Sizes
from tpu_kernels.dropins.flex_scores import highest_scores
from tpu_kernels.expressions.operations import ExpressionError
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention.api import splash_attention
from tpu_kernels.splash_attention.terms import ScoreMod

_MODULE = "torch.nn.attention.flex_attention"  # imports torch's compiler, so it is not imported here
_MARK = "TPU_KERNELS"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_modules: list[ModuleType] = []
"""torch's module, once it has been imported."""
_adds: list[Add] = []


# What is computed --------------------------------------------------------------------------------------


def compute(
    otherwise: Callable[..., Results],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> Results:
    """The results of the op: output, lse and highest score of each row, both in units of log 2.

    Args:
        otherwise: torch's own kernel, for functions that can't be expressions.
        score_mod: graph of `(score, b, h, q, kv, *score_buffers)`.
        block_mask: `BlockMask.as_tuple()`; the last is the graph of `(b, h, q, kv, *mask_buffers)`.
        the others: as torch's function has prepared them.
    """
    _check(query, key, value, block_mask, score_buffers, mask_buffers)
    try:
        score = flex_graphs.trace(score_mod, score_buffers, flex_graphs.SCORE, "float")
        mask = flex_graphs.trace(block_mask[-1], mask_buffers, flex_graphs.MASK, "bool")
    except ExpressionError as error:
        warnings.warn(
            f"flex_attention is computed by torch, with all scores in memory: {error}",
            UserWarning,
            stacklevel=2,
        )
        return otherwise(
            query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers
        )
    batch = query.shape[0]
    sizes = Sizes(batch, query.shape[1], query.shape[2], key.shape[2])
    visible = flex_blocks.visible(_mask_on(mask, query.device), _lists(block_mask), sizes)
    changed = None if score.text == "score" else ScoreMod(score.text, _on(score.captures, query.device))
    dtype = torch.promote_types(query.dtype, key.dtype)
    given = [t.to(dtype).expand(batch, *t.shape[1:]) for t in (query, key, value.to(query.dtype))]
    output, lse = splash_attention(
        given[0], given[1], given[2], mask=visible, score_mod=changed, scale=scale, return_lse=True
    )
    highest = torch.zeros_like(lse, requires_grad=False)
    if kernel_options.get("OUTPUT_MAX", False):
        highest = highest_scores(given[0], given[1], visible, changed, scale)
    if kernel_options.get("BACKEND") != "FLASH":  # what comes back is multiplied by log 2
        lse, highest = lse / math.log(2), highest / math.log(2)
    return _laid_out_as(query, output.to(query.dtype)), lse, highest


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: tuple[Any, ...],
    score_buffers: tuple[Any, ...],
    mask_buffers: tuple[Any, ...],
) -> None:
    """What torch's own kernels demand."""
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in mask_buffers):
        raise AssertionError("Captured buffers from mask mod that require grad are not supported.")
    buffers = [t for t in score_buffers if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *buffers)):
        if block_mask[7] is None:
            raise RuntimeError(
                "BlockMask q_indices is None. Backward pass requires q_indices to be computed. "
                "Please create the BlockMask with compute_q_blocks=True"
            )
    if query.shape[0] != key.shape[0] and key.shape[0] != 1:
        raise RuntimeError(f"Bq and Bkv must broadcast. Got Bq={query.shape[0]} and Bkv={key.shape[0]}")
    if query.dtype not in _FLOATS or key.dtype not in _FLOATS or value.dtype not in _FLOATS:
        raise NotImplementedError(
            f"flex_attention on {query.device.type}: query, key and value must be float16, bfloat16, "
            f"float32 or float64, got {query.dtype}, {key.dtype} and {value.dtype}"
        )


def _lists(block_mask: tuple[Any, ...]) -> Lists:
    partial_count, partial_blocks, full_count, full_blocks = block_mask[2:6]
    q_block, kv_block = block_mask[-3:-1]
    return Lists(int(q_block), int(kv_block), partial_count, partial_blocks, full_count, full_blocks)


def _mask_on(mask: flex_graphs.Traced, device: torch.device) -> Mask:
    return Mask(mask.text, _on(mask.captures, device))


def _on(captures: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tables that a function has made of numbers come on the CPU; as in torch, so may single numbers."""
    return tuple(t if t.device == device else t.to(device) for t in captures)


def _laid_out_as(query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The output with its dimensions in memory in the order of the query's, the last innermost."""
    order = sorted(range(3), key=lambda dimension: query.stride(dimension), reverse=True)
    if order == [0, 1, 2]:
        return output
    back = sorted(range(3), key=order.__getitem__)
    return output.permute(*order, 3).contiguous().permute(*back, 3)


# Where calls are taken ---------------------------------------------------------------------------------


def _kernel_for(torchs: Callable[..., Results]) -> Callable[..., Results]:
    """A kernel of the op: ours for the calls that it is to compute, else torch's."""

    def kernel(*args: Any) -> Results:
        installed = flex_devices.installed and args[0].device.type == "tpu"
        return compute(torchs, *args) if installed or _MARK in args[6] else torchs(*args)

    return kernel


def _under_autocast(query: Any, key: Any, value: Any, *args: Any) -> Results:
    """What torch does on its own devices: the op again, with tensors of the dtype of `torch.autocast`."""
    dtype = torch.get_autocast_dtype("tpu")
    cast = [t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value)]
    with torch.autocast("tpu", enabled=False):
        return _modules[0].flex_attention_hop(*cast, *args)


def _marked(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, options: Any, *buffers: Any
) -> Any:
    """What `overrides()` makes of a call of the op. torch.compile traces it: graphs have the mark."""
    from torch._higher_order_ops.flex_attention import flex_attention as hop

    return hop(query, key, value, score_mod, block_mask, scale, {**options, _MARK: True}, *buffers)


def _imported(module: ModuleType) -> None:
    _modules.append(module)
    names: Any = module
    hop = names.flex_attention_hop
    autograd = hop.py_kernels[DispatchKey.Autograd]
    below = hop.py_kernels[DispatchKey.CompositeExplicitAutograd]
    hop.py_impl(DispatchKey.AutogradCPU)(_kernel_for(autograd))
    hop.py_impl(DispatchKey.AutogradPrivateUse1)(_kernel_for(autograd))
    hop.py_impl(DispatchKey.CPU)(_kernel_for(below))
    hop.py_impl(DispatchKey.PrivateUse1)(_kernel_for(below))
    hop.py_impl(DispatchKey.AutocastPrivateUse1)(_under_autocast)  # pyright: ignore[reportAttributeAccessIssue]
    hop._dispatch_cache.clear()
    names._validate_device = flex_devices.checked(names._validate_device)
    names._warn_once = flex_devices.warned(names._warn_once)
    for add in _adds:
        add(hop, _marked)


def _enable() -> None:
    flex_devices.installed = True


def _disable() -> None:
    flex_devices.installed = False


def _overridden(add: Add) -> None:
    _adds.append(add)
    for module in _modules:
        add(module.flex_attention_hop, _marked)


after_import(_MODULE, _imported)
DROP_IN = DropIn(_MODULE, _enable, _disable, _overridden)

"""`torch.nn.attention.flex_attention`: its `score_mod` and `mask_mod` become part of our kernel.

torch's function checks its arguments, has torch.compile make graphs of the two functions, and calls an op
that takes graphs, the higher-order op `flex_attention`. The op is where calls are taken, so that checks and
errors are torch's, and every caller is reached, compiled or not, whenever it imported the function. The op's
kernels for `cpu` and `tpu` become ones that ask who is to compute: ours on `tpu` while `install()` holds,
ours for a call that `overrides()` has marked where its mode saw it, and else torch's own.

torch's function refuses tensors on `tpu`, and on `cpu` those that require a gradient, before it comes to the
op. It is kept from doing so where ours computes, by two names in torch's module.

Importing this changes nothing of torch. The changes are made by `install()`, which `uninstall()` undoes, and
by the first `overrides()`, which leaves them: from then on every call asks whether it is inside of one.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._C import DispatchKey

from bridge.device.imports import after_import
from tpu_kernels.dropins import flex_blocks, flex_devices, flex_exact, flex_graphs
from tpu_kernels.dropins.dropin import Add, DropIn, before_overriding
from tpu_kernels.dropins.flex_blocks import Lists, Sizes
from tpu_kernels.dropins.flex_scores import highest_scores
from tpu_kernels.expressions.operations import ExpressionError
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention.api import splash_attention
from tpu_kernels.splash_attention.terms import ScoreMod

_MODULE = "torch.nn.attention.flex_attention"  # imports torch's compiler, so it is not imported here
_MARK = "TPU_KERNELS"
"""The kernel option that says of a call whether our kernel is to compute it."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_modules: list[ModuleType] = []
"""torch's module, once it has been imported."""
_adds: list[Add] = []
_KERNELS = {
    DispatchKey.AutogradCPU: DispatchKey.Autograd,
    DispatchKey.AutogradPrivateUse1: DispatchKey.Autograd,
    DispatchKey.CPU: DispatchKey.CompositeExplicitAutograd,
    DispatchKey.PrivateUse1: DispatchKey.CompositeExplicitAutograd,
}
"""Which of its kernels torch uses for our devices."""


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
        otherwise: torch's own kernel, for functions that can't be expressions, or would have other values.
        score_mod: graph of `(score, b, h, q, kv, *score_buffers)`.
        block_mask: `BlockMask.as_tuple()`; the last is the graph of `(b, h, q, kv, *mask_buffers)`.
        the others: as torch's function has prepared them.
    """
    _check(query, key, value, block_mask, score_buffers, mask_buffers)
    batch = query.shape[0]
    sizes = Sizes(batch, query.shape[1], query.shape[2], key.shape[2])
    dtype = torch.promote_types(query.dtype, key.dtype)
    float64 = dtype == torch.float64
    lengths = (sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)
    try:
        score = flex_graphs.trace(score_mod, score_buffers, flex_graphs.SCORE, "float", float64)
        mask = flex_graphs.trace(block_mask[-1], mask_buffers, flex_graphs.MASK, "bool", float64)
        for part in (score, mask):
            flex_exact.check(part.text, part.captures, lengths, float64)
    except ExpressionError as error:
        warnings.warn(
            f"flex_attention is computed by torch, with all scores in memory: {error}",
            UserWarning,
            stacklevel=2,
        )
        # torch's kernel calls the op again, below derivatives; that is not decided, nor warned of, again.
        left = {**kernel_options, _MARK: False}
        return otherwise(query, key, value, score_mod, block_mask, scale, left, score_buffers, mask_buffers)
    visible = flex_blocks.visible(_mask_on(mask, query.device), _lists(block_mask), sizes)
    changed = None if score.text == "score" else ScoreMod(score.text, _on(score.captures, query.device))
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
    """Tables that a function has made of numbers come on the CPU; as in torch, so may single numbers.

    While a graph is made such tables are real, beside tensors that are not, and become constants of it.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        real = [type(t) is torch.Tensor and not t.requires_grad for t in captures]
        lift = torch.ops.aten.lift_fresh_copy
        captures = tuple(lift(t) if is_real else t for t, is_real in zip(captures, real, strict=True))
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
        return compute(torchs, *args) if args[6].get(_MARK, installed) else torchs(*args)

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


class _TakenOver:
    """What has been changed in torch's module, to put it back."""

    def __init__(self, module: ModuleType) -> None:
        names: Any = module
        hop = names.flex_attention_hop
        self.module, self.hop = names, hop
        self.names = {name: getattr(module, name) for name in ("_validate_device", "_warn_once")}
        self.kernels, self.keys = dict(hop.py_kernels), hop.non_fallthrough_keys
        for key, below in _KERNELS.items():
            hop.py_kernels.pop(key, None)
            hop.py_impl(key)(_kernel_for(self.kernels[below]))
        hop.py_impl(DispatchKey.AutocastPrivateUse1)(_under_autocast)  # pyright: ignore[reportAttributeAccessIssue]
        hop._dispatch_cache.clear()
        names._validate_device = flex_devices.checked(names._validate_device)
        names._warn_once = flex_devices.warned(names._warn_once)

    def give_back(self) -> None:
        self.hop.py_kernels.clear()
        self.hop.py_kernels.update(self.kernels)
        self.hop.non_fallthrough_keys = self.keys
        self.hop._dispatch_cache.clear()
        for name, value in self.names.items():
            setattr(self.module, name, value)


_lock = threading.RLock()
_overriding = False
"""Whether there has been an `overrides()`."""
_taken_over: list[_TakenOver] = []


def _settle() -> None:
    """Change torch's module, or put it back, as is needed now."""
    with _lock:
        needed = flex_devices.installed or _overriding
        if needed and not _taken_over:
            _taken_over.extend(map(_TakenOver, _modules))
        while _taken_over and not needed:
            _taken_over.pop().give_back()


def _imported(module: ModuleType) -> None:
    _modules.append(module)
    _settle()
    for add in _adds:
        add(module.flex_attention_hop, _marked)


def _enable() -> None:
    flex_devices.installed = True
    _settle()


def _disable() -> None:
    flex_devices.installed = False
    _settle()


def _begin_overriding() -> None:
    global _overriding
    _overriding = True
    _settle()


def _overridden(add: Add) -> None:
    _adds.append(add)
    before_overriding(_begin_overriding)
    for module in _modules:
        add(module.flex_attention_hop, _marked)


after_import(_MODULE, _imported)
DROP_IN = DropIn(_MODULE, _enable, _disable, _overridden)

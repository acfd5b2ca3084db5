"""Hugging Face transformers with our kernels: `attn_implementation="tpu_splash"`, and the experts of
mixtures of experts with `experts_implementation="tpu_grouped_matmul"` (see `huggingface_experts`).

    import tpu_kernels
    from transformers import AutoModelForCausalLM

    tpu_kernels.huggingface.register()     # tpu_kernels.install() does it too, for tpu and cpu alike
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tpu_splash")

transformers describes masks (causal, windows, padding, packed sequences) by functions of positions. They
become part of the kernel: no table of L times S elements is made, unless torch.compile traces the model
with its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch

from bridge.device.imports import after_import
from tpu_kernels import masks
from tpu_kernels.context_parallel.active import refuse
from tpu_kernels.dropins import flex_blocks, huggingface_experts
from tpu_kernels.dropins.dropin import Add, DropIn
from tpu_kernels.dropins.mask_tensor import MaskTensor
from tpu_kernels.expressions.expression import variables
from tpu_kernels.expressions.operations import ExpressionError
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention.api import splash_attention

NAME = "tpu_splash"


_asked_for = False
"""Whether `register` was called; then `tpu_kernels.uninstall()` leaves the name known."""


def register() -> None:
    """Make `attn_implementation="tpu_splash"` known to transformers: the attention, and the masks it takes.

    And `experts_implementation="tpu_grouped_matmul"`, if this transformers has an interface for experts. A
    second call does nothing more.

    Raises:
        ImportError: there is no transformers, or one older than 5.0.
    """
    global _asked_for
    import transformers.modeling_utils

    if not can_register_in(transformers.modeling_utils):
        raise ImportError(
            f"tpu_kernels.huggingface needs transformers 5.0 or newer, got {transformers.__version__}"
        )
    register_in(transformers.modeling_utils)
    _asked_for = True


def can_register_in(modeling_utils: ModuleType) -> bool:
    """Whether this module `transformers.modeling_utils` has what to register with: older ones have not."""
    return (
        hasattr(modeling_utils, "AttentionInterface") and find_spec("transformers.masking_utils") is not None
    )


def register_in(modeling_utils: ModuleType) -> None:
    """What `register` does, for the module `transformers.modeling_utils`."""
    masking_utils = import_module("transformers.masking_utils")
    modeling_utils.AttentionInterface.register(NAME, attention)
    masking_utils.AttentionMaskInterface.register(NAME, attention_mask)
    huggingface_experts.register()


def unregister_in(modeling_utils: ModuleType) -> None:
    """Undo `register_in`."""
    if can_register_in(modeling_utils):
        masking_utils = import_module("transformers.masking_utils")
        modeling_utils.AttentionInterface._global_mapping.pop(NAME, None)
        masking_utils.AttentionMaskInterface._global_mapping.pop(NAME, None)
        huggingface_experts.unregister()


# Attention ---------------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' models call it. A query that sees no key (padding) has output 0.

    Args:
        module: the layer; `is_causal` of it counts if no mask is given.
        query: [B, Hq, L, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        attention_mask: what `attention_mask` below made; or 4-D, bool for what is seen or floating to be
            added to the scores; or a `BlockMask`; or None: with more than one query, those of a causal
            layer see what is not later.
        scaling: factor of the products; None for `1 / sqrt(D)`.
        dropout: probability that an element of the softmax is dropped; models give 0 in `eval`.
        softcap: limit of the scores, as in Gemma 2.
        s_aux: sinks [Hq], as in GPT-OSS.
        position_bias: added to the scores, as in T5.
        is_causal: in place of that of `module`.
        kwargs: what other implementations need, and masks say already: windows, positions.

    Raises:
        RuntimeError: in a block of `context_parallel`, whose ranks have parts of a sequence.

    Returns:
        The output [B, L, Hq, Dv], and None in place of attention weights, which are nowhere in memory.
    """
    if not torch.compiler.is_compiling():
        refuse('attn_implementation="tpu_splash"', 'use attn_implementation="sdpa"')
    queries, keys = query.shape[2], key.shape[2]
    mask: Any = None
    bias = position_bias
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = masks.causal() if causal and queries > 1 else None
    elif type(attention_mask) is MaskTensor and attention_mask.shape[-1] == keys:
        mask = attention_mask.mask
    elif not isinstance(attention_mask, torch.Tensor):
        mask = _as_mask(attention_mask, query, keys)
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask[..., :keys]
    else:
        added = attention_mask[..., :keys]
        bias = added if bias is None else bias + added
    output = splash_attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        soft_cap=softcap,
        sinks=s_aux,
        scale=scaling,
        dropout_p=dropout,
    )
    return output.transpose(1, 2).contiguous(), None


def _as_mask(block_mask: Any, query: torch.Tensor, keys: int) -> Mask | None:
    """A `BlockMask` as a mask of ours."""
    batch, heads, queries = query.shape[:3]
    if tuple(block_mask.seq_lengths) != (queries, keys):
        raise ValueError(
            f"attn_implementation={NAME!r}: the block mask is for {block_mask.seq_lengths[0]} queries and "
            f"{block_mask.seq_lengths[1]} keys, got {queries} and {keys}"
        )
    q_block, kv_block = block_mask.BLOCK_SIZE
    lists = flex_blocks.Lists(
        q_block,
        kv_block,
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    sizes = flex_blocks.Sizes(batch, heads, queries, keys)
    return flex_blocks.visible(masks.function(block_mask.mask_mod), lists, sizes)


# Masks -------------------------------------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Any:
    """The mask of a model's layers, for `attention` above: transformers calls it once for each kind of layer.

    Args:
        q_offset: position of the first query, by which `mask_function` counts. A static cache gives a tensor.
        kv_offset: that of the first key.
        mask_function: `(b, h, q, kv) -> bool`, on 0-d tensors; None for causal.
        attention_mask: bool [B, positions]: True where there is a token, and no padding.
        kwargs: what masks of other implementations need.

    Returns:
        A bool tensor [B, 1, L, S] that is made only if somebody but `attention` uses it. Inside of
        torch.compile, and for functions that can't be expressions, a table of all elements.
    """
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function

    def table() -> torch.Tensor | None:
        return masking_utils.sdpa_mask(
            **kwargs
            | {
                "batch_size": batch_size,
                "q_length": q_length,
                "kv_length": kv_length,
                "q_offset": q_offset,
                "kv_offset": kv_offset,
                "mask_function": mask_function,
                "attention_mask": attention_mask,
                "device": device,
                # Never None: `is_causal` of a layer does not say whether this mask is causal.
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        )

    if torch.compiler.is_compiling():
        return table()
    seen = mask_function
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        seen = masking_utils.and_masks(seen, masking_utils.padding_mask_function(padding))
    seen = masking_utils.add_offsets_to_mask_function(seen, cast(int, q_offset), kv_offset)
    try:
        mask = masks.function(seen)
    except ExpressionError:
        return table()
    if "h" in variables(mask.expression):
        return table()
    # transformers asks for a table of now. A static cache counts its tokens in place before layers attend,
    # and the offset of the queries is that count.
    mask = masks.Mask(mask.text, tuple(capture.clone() for capture in mask.captures))
    return MaskTensor(mask, (batch_size, q_length, kv_length), device)


# Under install(), if a program imports transformers ------------------------------------------------------

_MODULE = "transformers.modeling_utils"

_modules: list[ModuleType] = []
"""transformers' module, once it has been imported."""
_enabled = False


def _enable() -> None:
    global _enabled
    _enabled = True
    _register()


def _disable() -> None:
    global _enabled
    _enabled = False
    if not _asked_for:
        for module in _modules:
            unregister_in(module)


def _imported(module: ModuleType) -> None:
    _modules.append(module)
    _register()


def _register() -> None:
    if _enabled:
        for module in _modules:
            if can_register_in(module):
                register_in(module)


def _overridden(add: Add) -> None:
    # Attention is not concerned: a model says by its configuration whose it is.
    huggingface_experts.overridden(add)


after_import(_MODULE, _imported)
DROP_IN = DropIn("attention and experts of Hugging Face transformers", _enable, _disable, _overridden)

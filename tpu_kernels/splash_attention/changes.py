"""Masks and score changes of a call, as texts and the tensors that these load from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge import to_torch
from tpu_kernels._integers import int32
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention import arguments, terms
from tpu_kernels.splash_attention.arguments import Sizes
from tpu_kernels.splash_attention.terms import Part, ScoreMod


def score_of(
    captures: list[torch.Tensor],
    sizes: Sizes,
    query: torch.Tensor,
    soft_cap: float | None,
    score_mod: Callable[..., Any] | ScoreMod | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> str:
    """The text of all score changes; their tensors are added to `captures`."""
    changes: list[Part] = []
    if soft_cap is not None:
        changes.append(Part(terms.soft_cap(terms.check_cap(soft_cap))))
    if score_mod is not None:
        if not isinstance(score_mod, ScoreMod):
            if not callable(score_mod):
                raise TypeError(
                    f"splash_attention: score_mod must be a function (score, b, h, q, kv) -> score or a "
                    f"tpu_kernels.ScoreMod, got {type(score_mod).__name__}"
                )
            if torch.compiler.is_compiling():
                raise ValueError(
                    "splash_attention: a score_mod can't be traced while torch.compile traces; give "
                    "tpu_kernels.ScoreMod.trace(score_mod), made before, in its place"
                )
            score_mod = ScoreMod.trace(score_mod)
        changes.append(captured(captures, query, score_mod.text, score_mod.captures))
    if alibi_slopes is not None:
        leading = alibi_slopes.shape[:-1]
        if (
            alibi_slopes.shape[-1:] != (sizes.q_heads,)
            or len(leading) > len(sizes.batch)
            or any(a not in (1, b) for a, b in zip(reversed(leading), reversed(sizes.batch), strict=False))
        ):
            raise RuntimeError(
                f"splash_attention: alibi_slopes must be [{sizes.q_heads}], one for each query head, or "
                f"{[*sizes.batch, sizes.q_heads]}, or have 1 for a size before the last, "
                f"got {list(alibi_slopes.shape)}"
            )
        batched = alibi_slopes.dim() > 1
        if batched:
            alibi_slopes = alibi_slopes.expand(*sizes.batch, sizes.q_heads).reshape(-1, sizes.q_heads)
        changes.append(captured(captures, query, terms.alibi(batched), [alibi_slopes]))
    if bias is not None:
        tensor, axes = arguments.aligned("bias", bias, sizes)
        changes.append(captured(captures, query, terms.added(axes), [tensor]))
    return terms.score_text(tuple(changes))


def mask_of(
    captures: list[torch.Tensor],
    sizes: Sizes,
    query: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    q_segment_ids: torch.Tensor | None,
    kv_segment_ids: torch.Tensor | None,
) -> str:
    """The text of all masks; their tensors are added to `captures`."""
    parts: list[Part] = []
    if isinstance(mask, Mask):
        parts.append(captured(captures, query, mask.text, mask.captures))
        for one in mask.sized:
            arguments.check_sized(one, mask.captures[one.slot], sizes)
    elif isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"splash_attention: a mask tensor must be bool, got {mask.dtype}; what is added to the "
                f"scores is bias="
            )
        tensor, axes = arguments.aligned("mask", mask, sizes)
        parts.append(captured(captures, query, terms.aligned("bool", axes), [tensor]))
    elif mask is not None:
        raise TypeError(
            f"splash_attention: mask must be a mask from tpu_kernels.masks or a bool tensor, got "
            f"{type(mask).__name__}"
        )
    if q_segment_ids is not None:
        if kv_segment_ids is None:
            if sizes.q_len != sizes.kv_len:
                raise RuntimeError(
                    f"splash_attention: query has length {sizes.q_len} and key {sizes.kv_len}, so the "
                    f"segments of both must be given: kv_segment_ids is None"
                )
            kv_segment_ids = q_segment_ids
        q_ids, q_batched = arguments.per_position("q_segment_ids", q_segment_ids, sizes.q_len, sizes)
        kv_ids, kv_batched = arguments.per_position("kv_segment_ids", kv_segment_ids, sizes.kv_len, sizes)
        parts.append(captured(captures, query, terms.same_segment(q_batched, kv_batched), [q_ids, kv_ids]))
    elif kv_segment_ids is not None:
        raise RuntimeError("splash_attention: kv_segment_ids is given without q_segment_ids")
    return terms.mask_text(tuple(parts))


def captured(
    captures: list[torch.Tensor], query: torch.Tensor, text: str, tensors: Sequence[torch.Tensor]
) -> Part:
    """The part with its tensors added to `captures`."""
    offset = len(captures)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):  # of a JAX function, or given as an array
            tensor = _as_tensor(tensor).to(query.device)
        if not tensor.is_floating_point():
            tensor = int32(tensor)
        elif tensor.dtype == torch.float64 and query.dtype != torch.float64:
            tensor = tensor.float()  # what it is added to has no more digits
        captures.append(tensor)
    return Part(text, offset)


def _as_tensor(array: Any) -> torch.Tensor:
    if isinstance(array, jax.Array):
        return to_torch(array)
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    raise TypeError(
        f"splash_attention: masks must hold torch tensors or JAX or NumPy arrays, got {type(array).__name__}"
    )


def check_captures(
    captures: list[torch.Tensor], sizes: Sizes, query: torch.Tensor, score: str, mask: str
) -> None:
    """What masks and score_mod load must be there: an index past the end would read a neighbour."""
    lengths = {"b": sizes.flat_batch, "h": sizes.q_heads, "q": sizes.q_len, "kv": sizes.kv_len}
    for source in (score, mask):
        for slot, dimensions in terms.dimensions(source):
            if captures[slot].dim() != dimensions:
                raise RuntimeError(
                    f"splash_attention: a tensor of shape {list(captures[slot].shape)} is indexed in "
                    f"{dimensions} dimensions (of a mask or score_mod); give each of its dimensions an index"
                )
        for slot, dimension, variable in terms.direct_indices(source):
            size = captures[slot].shape[dimension]
            if size < lengths[variable]:
                raise RuntimeError(
                    f"splash_attention: a tensor of shape {list(captures[slot].shape)} is indexed by "
                    f"{variable} in dimension {dimension} (of a mask or score_mod), so it needs at least "
                    f"{lengths[variable]} elements there"
                )
    for tensor in captures:
        arguments.check_same_device(query.device, {"a tensor of a mask or of score_mod": tensor})

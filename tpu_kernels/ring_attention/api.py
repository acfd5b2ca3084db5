"""Ring attention for torch: the public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from bridge.device import tracing
from tpu_kernels._select import Implementation
from tpu_kernels.collectives.ops import AnyAxis, AnyMesh, axes_of, mesh_of
from tpu_kernels.masks import Mask
from tpu_kernels.ring_attention import ops
from tpu_kernels.ring_attention.layouts import LAYOUTS, Layout, part_length, pieces
from tpu_kernels.ring_attention.ring import cut_of
from tpu_kernels.splash_attention import arguments, changes
from tpu_kernels.splash_attention.api import splash_attention
from tpu_kernels.splash_attention.arguments import Sizes
from tpu_kernels.splash_attention.terms import ScoreMod
from tpu_kernels.splash_attention.tiling import SplashTiling


class _Options(TypedDict, total=False):
    """The keyword arguments of `ring_attention` but `return_lse`."""

    mask: Mask | None
    layout: Layout
    length: int | None
    score_mod: Callable[..., Any] | ScoreMod | None
    soft_cap: float | None
    scale: float | None
    q_segment_ids: torch.Tensor | None
    kv_segment_ids: torch.Tensor | None
    bidirectional: bool | None
    impl: Implementation
    tiling: SplashTiling | None


@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mesh: AnyMesh,
    axis: AnyAxis,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mesh: AnyMesh,
    axis: AnyAxis,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mesh: AnyMesh,
    axis: AnyAxis,
    *,
    mask: Mask | None = None,
    layout: Layout = "contiguous",
    length: int | None = None,
    score_mod: Callable[..., Any] | ScoreMod | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    return_lse: bool = False,
    bidirectional: bool | None = None,
    impl: Implementation = "auto",
    tiling: SplashTiling | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over a sequence that is spread over r ranks: each gives its part, and gets its part.

    The result is that of `splash_attention` over the whole sequence. Keys and values go around the ring of
    ranks by remote copies inside of the kernels, from chip to chip, while each rank computes with those that
    it has (Ring Attention, arXiv 2310.01889). No rank holds more than two parts of keys at a time. Sums of
    the softmax stay in float32 from the first hop to the last, so the error does not grow with the ring.

    Differentiable in query, key and value, through both results, and twice. All ranks of the mesh make the
    call, with equal shapes and equal arguments but the tensors.

    Args:
        query: [..., Hq, L / r, D], this rank's part, on `tpu` or `cpu`. Dtypes, heads and batch dimensions as
            for `splash_attention`.
        key: [..., Hkv, S / r, D].
        value: [..., Hkv, S / r, Dv].
        mesh: from `bridge.get_pallas_mesh`, or a DeviceMesh with names.
        axis: which of the mesh's axes the sequence is spread over; or two, the outer one first: keys go
            around the inner ring before they take a step on the outer one, as suits a slice of several hosts.
        mask: from `tpu_kernels.masks`, of positions in the whole sequence. Tensors that it holds are whole,
            and the same on all ranks.
        layout: which positions a rank has. `contiguous`: rank i has the i-th of r equal parts. `zigzag`: the
            i-th and the (2 r - 1 - i)-th of 2 r, so that a causal mask gives all ranks as much to do.
        length: of the whole sequence, if it is shorter than r parts: what is behind it is padding. It counts
            as zeros, no query sees it, and rows of the result for it are zeros, which pass no gradient on.
        score_mod: as for `splash_attention`, of positions in the whole sequence.
        soft_cap: the scores stay between `-soft_cap` and `soft_cap`.
        scale: None for `1 / sqrt(D)`.
        q_segment_ids: integers that fit int32, [..., L / r], this rank's part: a query sees keys of the same
            number only.
        kv_segment_ids: [..., S / r]; None for those of the queries.
        return_lse: return lse, the logarithm of the sum of the exponentials of a row's scores, as well.
        bidirectional: whether one half of the keys goes to the right and the other to the left, in half of
            the time. None: where there are more than two ranks, and more than 128 keys on each.
        impl: `pallas` are the TPU kernels; `reference` gathers all keys on all ranks and is plain JAX; `auto`
            takes the kernels wherever they can compute this.
        tiling: tile sizes of the kernels, a `tpu_kernels.SplashTiling`; None chooses for the shape.

    Returns:
        The output [..., Hq, L / r, Dv] in the dtype of query; with `return_lse` also lse [..., Hq, L / r],
        float32, or float64 for float64.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
        ValueError: an axis that the mesh has not, values out of range, or `impl` or `tiling` cannot compute
            this; the message says why.
    """
    query, key, value = arguments.under_autocast(query, key, value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if hasattr(tensor, "device_mesh"):
            raise TypeError(
                f"ring_attention: {name} must be a rank's own tensor, got a DTensor; pass {name}.to_local()"
            )
    sizes = arguments.sizes_of(query, key, value, "ring_attention")
    if tiling is not None and not isinstance(tiling, SplashTiling):
        raise TypeError(f"ring_attention: tiling must be a SplashTiling or None, got {tiling!r}")
    names = _ops(mesh, tuple(axis) if isinstance(axis, list) else axis)
    whole = _whole(sizes, names.ranks, layout, length)
    if not query.numel() or not sizes.kv_len:  # here nothing is to be had of the others
        return splash_attention(query, key, value, scale=scale, return_lse=return_lse)
    if bidirectional:
        cut_of(sizes.kv_len, names.ranks, bidirectional)  # refuses what can't be halved
    captures: list[torch.Tensor] = []
    score = changes.score_of(captures, whole, query, soft_cap, score_mod, None, None)
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"ring_attention: mask must be a mask from tpu_kernels.masks, got {type(mask).__name__}; "
            f"masks.tensor(visible) makes one of a bool tensor"
        )
    visible = changes.mask_of(captures, whole, query, mask, None, None)
    changes.check_captures(captures, whole, query, score, visible)
    for tensor in captures:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "ring_attention: tensors of a score_mod or a mask get no gradient, and one of them requires "
                "grad; detach it"
            )
    call = ops.call_text(
        visible,
        score,
        layout,
        length,
        arguments.check_scale(scale),
        bidirectional,
        None,
        None if tiling is None else tiling.sizes,
        impl,
        tuple(i for i, tensor in enumerate(captures) if not tensor.dim()),
    )
    o, rows = ops.op(names.forward)(
        arguments.as_rank_4(query, sizes.q_heads, sizes),
        arguments.as_rank_4(key, sizes.kv_heads, sizes),
        arguments.as_rank_4(value, sizes.kv_heads, sizes),
        [tensor.reshape(1) if not tensor.dim() else tensor.contiguous() for tensor in captures],
        *_segments(sizes, q_segment_ids, kv_segment_ids),
        call,
    )
    o = arguments.from_rank_4(o, sizes)
    return (o, arguments.from_rank_4(rows[:, :, 0], sizes)) if return_lse else o


# Checks -------------------------------------------------------------------------------------------


@tracing.constant
def _ops(mesh: AnyMesh, axis: AnyAxis) -> ops.Ops:
    """The ring's ops. To torch.compile, a mesh is a constant of the graph."""
    mesh = mesh_of("ring_attention", mesh)
    return ops.ops_for(mesh, axes_of("ring_attention", mesh, axis))


def _whole(sizes: Sizes, ranks: int, layout: Layout, length: int | None) -> Sizes:
    """The sizes of the whole sequence's scores, without padding."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"ring_attention: layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}"
        )
    for name, count in (("query", sizes.q_len), ("key", sizes.kv_len)):
        if count % pieces(layout):
            raise RuntimeError(
                f"ring_attention: in layout 'zigzag' a rank has two pieces of equal length, got {count} "
                f"positions of {name}; tpu_kernels.shard_sequence cuts and pads a sequence"
            )
    whole = sizes._replace(q_len=sizes.q_len * ranks, kv_len=sizes.kv_len * ranks)
    if length is None:
        return whole
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"ring_attention: length must be an int or None, got {length!r}")
    if part_length(length, ranks, layout) != sizes.kv_len or length < 1:
        raise ValueError(
            f"ring_attention: a sequence of length {length} has {part_length(max(length, 0), ranks, layout)} "
            f"positions on each of {ranks} ranks in layout {layout!r}, got {sizes.kv_len} keys; "
            f"tpu_kernels.shard_sequence cuts and pads a sequence"
        )
    if sizes.q_len == sizes.kv_len:
        whole = whole._replace(q_len=length)
    return whole._replace(kv_len=length)


def _segments(
    sizes: Sizes, q_ids: torch.Tensor | None, kv_ids: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """int32 [B, L / r] and [B, S / r]."""
    if q_ids is None:
        if kv_ids is not None:
            raise RuntimeError("ring_attention: kv_segment_ids is given without q_segment_ids")
        return None, None
    if kv_ids is None:
        if sizes.q_len != sizes.kv_len:
            raise RuntimeError(
                f"ring_attention: query has length {sizes.q_len} and key {sizes.kv_len}, so the segments of "
                f"both must be given: kv_segment_ids is None"
            )
        kv_ids = q_ids
    found = []
    for name, ids, count in (("q_segment_ids", q_ids, sizes.q_len), ("kv_segment_ids", kv_ids, sizes.kv_len)):
        one, batched = arguments.per_position(name, ids, count, sizes, "ring_attention")
        found.append(one if batched else one.expand(sizes.flat_batch, count).contiguous())
    return found[0], found[1]

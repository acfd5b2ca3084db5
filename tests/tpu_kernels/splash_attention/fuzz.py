"""Random calls of attention: `make_case(seed)` is the same call every time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tpu_kernels import masks
from tpu_kernels.masks import Mask

from ..draws import Draws
from .oracle import Case


@dataclass(frozen=True)
class Limits:
    """How large cases may get, and which dtypes they may have."""

    length: int
    scores: int
    dtypes: tuple[torch.dtype, ...]


SMALL = Limits(150, 60_000, (torch.float32, torch.bfloat16))
LARGE = Limits(700, 2_000_000, (torch.float32, torch.bfloat16))
REFERENCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

HEAD_DIMS = (1, 2, 8, 16, 31, 64, 72, 80, 96, 127, 128, 129, 192, 256)
LENGTHS = (1, 7, 8, 127, 128, 129, 200, 255, 256, 257, 384, 512, 640)


class Draw(Draws):
    """The draws that cases need."""

    def length(self, limit: int) -> int:
        if self.chance(0.4):
            return self.choice([n for n in LENGTHS if n <= limit])
        return round(math.exp(self.uniform(0, math.log(limit))))  # as many small ones as large ones

    def bools(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.torch) < self.choice([0.1, 0.5, 0.9])

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        dtype = self.choice([torch.int32, torch.int64])
        return torch.randint(0, high, shape, generator=self.torch).to(dtype)


def make_case(seed: int, limits: Limits, *, score_mods: bool = True) -> Case:
    """The case of this seed."""
    draw = Draw(seed)
    dtype = draw.choice(limits.dtypes)
    q_len, kv_len = draw.length(limits.length), draw.length(limits.length)
    if draw.chance(0.4):
        kv_len = q_len
    kv_heads, group, batch = draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2, 3, 4]), draw.choice([1, 2, 3])
    while batch * kv_heads * group * q_len * kv_len > limits.scores and batch * kv_heads * group > 1:
        batch, kv_heads, group = max(batch - 1, 1), max(kv_heads - 1, 1), max(group - 1, 1)
    heads = kv_heads * group
    head_dim = draw.choice(HEAD_DIMS) if draw.chance(0.7) else draw.randint(1, 256)
    value_dim = head_dim if draw.chance(0.6) else draw.choice(HEAD_DIMS)
    sizes = (batch, heads, q_len, kv_len)

    # Scores of a spread of about 1, 4 or 12: from even rows to rows of one key.
    spread = draw.choice([1.0, 1.0, 4.0, 12.0]) ** 0.5
    tensors = {
        "query": _laid_out(draw, draw.normal(batch, heads, q_len, head_dim, scale=spread).to(dtype)),
        "key": _laid_out(draw, draw.normal(batch, kv_heads, kv_len, head_dim, scale=spread).to(dtype)),
        "value": _laid_out(draw, draw.normal(batch, kv_heads, kv_len, value_dim).to(dtype)),
    }
    options: dict[str, Any] = {}
    if draw.chance(0.3):
        options["scale"] = draw.uniform(0.05, 0.5) / head_dim**0.5 * draw.choice([1, 1, -1])
    if draw.chance(0.2):
        options["soft_cap"] = draw.choice([1.0, 5.0, 30.0])
    if score_mods and draw.chance(0.15):
        tensors["table"] = draw.normal(2 * draw.choice([1, 5, 40]) + 1).to(_other(draw, dtype))
    if score_mods and draw.chance(0.15):
        tensors["weights"] = draw.normal(heads).to(_other(draw, dtype))
    if draw.chance(0.2):
        shape = (heads,) if draw.chance(0.5) else (batch, heads)
        tensors["alibi_slopes"] = draw.normal(*shape, scale=0.1).abs().to(_other(draw, dtype))
    if draw.chance(0.3):
        shape = tuple(size if draw.chance(0.6) else 1 for size in sizes)
        bias = draw.normal(*shape)
        if draw.chance(0.3):
            bias = bias.masked_fill(draw.bools(*shape), -torch.inf)
        tensors["bias"] = bias[draw.choice([0, 0, 1]) :] if shape[0] == 1 else bias
        if tensors["bias"].dim() == 4 and not tensors["bias"].shape[0]:
            tensors["bias"] = bias[0]
        tensors["bias"] = tensors["bias"].to(_other(draw, dtype))
    if draw.chance(0.25):
        tensors["sinks"] = draw.normal(heads).to(_other(draw, dtype))
    if draw.chance(0.2):
        options["dropout_p"] = draw.choice([0.1, 0.5, 0.9, 1.0])
        options["seed"] = torch.tensor([draw.randrange(-(2**31), 2**31) for _ in range(2)], dtype=torch.int32)

    mask, visible = make_mask(draw, sizes) if draw.chance(0.7) else (None, None)
    if draw.chance(0.2):
        ids, same = _segment_ids(draw, sizes)
        options |= ids
        visible = same if visible is None else visible & same
    return Case(
        tensors=tensors,
        g=_laid_out(draw, draw.normal(batch, heads, q_len, value_dim).to(dtype)),
        g_lse=draw.normal(batch, heads, q_len).float() if draw.chance(0.5) else None,
        visible=visible,
        mask=mask,
        options=options,
        note=f"seed {seed}",
    )


# Masks --------------------------------------------------------------------------------------------

Sized = tuple[int, int, int, int]
Dense = torch.Tensor


def make_mask(draw: Draw, sizes: Sized) -> tuple[Mask | torch.Tensor, Dense]:
    """One to three masks, combined; and the same as bools that broadcast to the scores."""
    if draw.chance(0.15):
        return _bool_tensor(draw, sizes)
    mask, dense = draw.choice(_KINDS)(draw, sizes)
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        other, other_dense = draw.choice(_KINDS)(draw, sizes)
        if draw.chance(0.15):
            other, other_dense = ~other, ~other_dense
        sign = draw.choice("&&&||^")
        if sign == "&":
            mask, dense = mask & other, dense & other_dense
        elif sign == "|":
            mask, dense = mask | other, dense | other_dense
        else:
            mask, dense = mask ^ other, dense ^ other_dense
    return mask, dense


def _bool_tensor(draw: Draw, sizes: Sized) -> tuple[torch.Tensor, Dense]:
    """As torch's attn_mask: it broadcasts, and may be expanded."""
    shape = tuple(size if draw.chance(0.6) else 1 for size in sizes)
    visible = draw.bools(*shape)
    given = visible
    if draw.chance(0.3):
        given = visible.expand(sizes)
    elif shape[0] == 1:
        given = visible[0]
    return given, visible


def _position(draw: Draw, sizes: Sized) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """An alignment, and the positions of queries and keys that it means."""
    alignment = draw.choice(["top_left", "bottom_right"])
    shift = sizes[3] - sizes[2] if alignment == "bottom_right" else 0
    return alignment, torch.arange(sizes[2])[:, None] + shift, torch.arange(sizes[3])


def _causal(draw: Draw, sizes: Sized) -> tuple[Mask, Dense]:
    alignment, q, kv = _position(draw, sizes)
    offset = draw.choice([0, 0, 0, -1, 1, 20, -20])
    return masks.causal(alignment, offset=offset), q + offset >= kv


def _window(draw: Draw, sizes: Sized) -> tuple[Mask, Dense]:
    alignment, q, kv = _position(draw, sizes)
    left, right = draw.choice([None, 0, 5, 64]), draw.choice([None, 0, 0, 5, 64])
    dense = torch.ones(sizes[2], sizes[3], dtype=torch.bool)
    if left is not None:
        dense &= kv >= q - left
    if right is not None:
        dense &= kv <= q + right
    return masks.sliding_window(left, right, alignment=alignment), dense


def _chunked(draw: Draw, sizes: Sized) -> tuple[Mask, Dense]:
    alignment, q, kv = _position(draw, sizes)
    size = draw.choice([1, 3, 32, 100])
    same = torch.div(q, size, rounding_mode="floor") == torch.div(kv, size, rounding_mode="floor")
    return masks.chunked(size, alignment=alignment), same


def _prefix(draw: Draw, sizes: Sized) -> tuple[Mask, Dense]:
    alignment, q, kv = _position(draw, sizes)
    if draw.chance(0.5):
        prefix = draw.integers(sizes[3] + 1, sizes[0])
        return masks.prefix_lm(prefix, alignment=alignment), (kv < prefix[:, None, None, None]) | (kv <= q)
    length = draw.randrange(sizes[3] + 1)
    return masks.prefix_lm(length, alignment=alignment), (kv < length) | (kv <= q)


def _lengths(draw: Draw, sizes: Sized) -> tuple[Mask, Dense]:
    lengths = draw.integers(sizes[3] + 1, sizes[0])
    return masks.lengths(lengths), torch.arange(sizes[3]) < lengths[:, None, None, None]


def _key_padding(draw: Draw, sizes: Sized) -> tuple[Mask, Dense]:
    keep = draw.bools(sizes[0], sizes[3])
    return masks.key_padding(keep), keep[:, None, None]


def _segments(draw: Draw, sizes: Sized) -> tuple[Mask, Dense]:
    ids, same = _segment_ids(draw, sizes)
    return masks.segments(ids["q_segment_ids"], ids.get("kv_segment_ids")), same


def _table(draw: Draw, sizes: Sized) -> tuple[Mask, Dense]:
    shape = tuple(size if draw.chance(0.7) else 1 for size in sizes)
    visible = draw.bools(*shape)
    return masks.tensor(visible), visible


def _segment_ids(draw: Draw, sizes: Sized) -> tuple[dict[str, torch.Tensor], Dense]:
    """Ids of queries and keys: packed in order, or in no order."""

    def ids(length: int) -> torch.Tensor:
        rows = draw.integers(draw.choice([1, 3, 8]), draw.choice([1, sizes[0]]), length)
        return rows.sort(-1).values if draw.chance(0.7) else rows

    q = ids(sizes[2])
    if sizes[2] == sizes[3] and draw.chance(0.5):
        return {"q_segment_ids": q}, q[:, None, :, None] == q[:, None, None, :]
    kv = ids(sizes[3])
    return {"q_segment_ids": q, "kv_segment_ids": kv}, q[:, None, :, None] == kv[:, None, None, :]


_KINDS: list[Callable[[Draw, Sized], tuple[Mask, Dense]]] = [
    _causal,
    _causal,
    _window,
    _chunked,
    _prefix,
    _lengths,
    _key_padding,
    _segments,
    _table,
]


# Tensors ------------------------------------------------------------------------------------------


def _other(draw: Draw, dtype: torch.dtype) -> torch.dtype:
    """A dtype for what goes along with tensors of `dtype`."""
    return draw.choice([dtype, torch.float32])


def _laid_out(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """The same values: contiguous, with heads after the length, as every other element, or unaligned."""
    layout = draw.choice(["plain", "plain", "transposed", "strided", "unaligned"])
    if layout == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"), dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "unaligned":
        flat = torch.full((tensor.numel() + 1,), float("nan"), dtype=tensor.dtype)
        flat[1:] = tensor.flatten()
        return flat[1:].view(tensor.shape)
    return tensor

"""The block lists of a `BlockMask`, as a mask.

A `BlockMask` lists, for each block of queries, the blocks of keys in which its `mask_mod` decides (partial)
and those that are seen whole (full); what is in neither list is not seen. Lists made by `create_block_mask`
say nothing that `mask_mod` does not say as well, and then the formula alone is the mask. Others are packed
into words of 32 blocks each, per block of queries: memory grows with L times S over the elements of a
block, not with L times S.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from tpu_kernels._constant import constant
from tpu_kernels.dropins.remembered import remembered
from tpu_kernels.expressions.expression import (
    Constant,
    Expression,
    Load,
    Variable,
    apply,
    loads,
    select,
    text,
)
from tpu_kernels.expressions.intervals import bounds
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention import arguments
from tpu_kernels.splash_attention.blocks import Sizes as Sizes

NO_LISTS = 1 << 30
"""The block size by which torch marks a mask without lists."""
_BITS = 32

B, H, Q, KV = (Variable(name) for name in ("b", "h", "q", "kv"))


class Lists(NamedTuple):
    """The part of a `BlockMask` that matters here: for each of `[B or 1, H or 1, blocks of queries]`, how
    many blocks of keys there are, and which (`[..., n]`)."""

    q_block: int
    kv_block: int
    partial_count: torch.Tensor
    partial_blocks: torch.Tensor
    full_count: torch.Tensor | None
    full_blocks: torch.Tensor | None


def visible(mask: Mask, lists: Lists, sizes: Sizes) -> Mask | None:
    """What is seen: `full or (partial and mask)`; None for everything.

    Raises:
        ValueError: the lists are for another batch, number of heads or length.
    """
    everything = mask.text == "true"
    if lists.q_block == lists.kv_block == NO_LISTS:
        return None if everything else mask
    _check(lists, sizes)
    if _implied(mask, lists, sizes):
        return None if everything else mask
    partial = _in_lists(lists, lists.partial_count, lists.partial_blocks, sizes)
    if not everything:
        partial = partial & mask
    if lists.full_count is None or lists.full_blocks is None:
        return partial
    return partial | _in_lists(lists, lists.full_count, lists.full_blocks, sizes)


def _check(lists: Lists, sizes: Sizes) -> None:
    count = lists.partial_count
    rows = -(-sizes.q_len // lists.q_block)
    if (
        count.dim() != 3
        or any(n not in (1, size) for n, size in zip(count.shape, (sizes.batch, sizes.heads), strict=False))
        or count.shape[2] < rows
    ):
        raise ValueError(
            f"flex_attention: the lists of the block mask must be [{sizes.batch} or 1, {sizes.heads} or 1, "
            f"{rows}]: one for each batch entry, query head and block of {lists.q_block} queries, got "
            f"kv_num_blocks {list(count.shape)}"
        )


# Lists as bits -----------------------------------------------------------------------------------------


def _in_lists(lists: Lists, count: torch.Tensor, blocks: torch.Tensor, sizes: Sizes) -> Mask:
    """True in the listed blocks."""
    columns = -(-sizes.kv_len // lists.kv_block)
    listed = torch.arange(blocks.shape[-1], device=blocks.device) < count.unsqueeze(-1)
    # What is not listed, or beyond the end, goes to a column that is dropped.
    place = torch.where(listed, blocks, columns).clamp(0, columns).long()
    words = -(-columns // _BITS)
    table = torch.zeros((*place.shape[:-1], words * _BITS + 1), dtype=torch.int32, device=blocks.device)
    table = table.scatter(-1, torch.where(place < columns, place, words * _BITS), 1)[..., :-1]
    weights = torch.tensor([1 << bit for bit in range(_BITS - 1)] + [-(1 << _BITS - 1)], dtype=torch.int32)
    packed = (table.unflatten(-1, (words, _BITS)) * weights.to(table.device)).sum(-1).to(torch.int32)
    # Redundant, but a kernel can tell from it which of its own blocks it need not visit.
    first = torch.where(listed, blocks, columns).amin(-1) if blocks.shape[-1] else count
    last = torch.where(listed, blocks, -1).amax(-1) if blocks.shape[-1] else count - 1
    batch, heads = (arguments.varies(size) for size in count.shape[:2])
    source = _bits(batch, heads, lists.q_block, lists.kv_block, words)
    return Mask(source, (packed, first.to(torch.int32), last.to(torch.int32)), "block lists")


@constant
def _bits(batch: bool, heads: bool, q_block: int, kv_block: int, words: int) -> str:
    """Captures: words `[B, H, blocks of queries, words]`, first and last listed block `[B, H, blocks of
    queries]`."""
    row: tuple[Any, ...] = (B if batch else Constant(0), H if heads else Constant(0), Q // q_block)
    block = KV // kv_block
    word: Expression = Load(0, (*row, Constant(0)), "int")
    for place in range(1, words):
        word = select(block >= place * _BITS, Load(0, (*row, Constant(place)), "int"), word)
    bit = apply("shift_right", word, block % _BITS) & 1
    inside = (block >= Load(1, row, "int")) & (block <= Load(2, row, "int"))
    return text(inside & bit.ne(0))


# Lists that say nothing new ----------------------------------------------------------------------------


def _implied(mask: Mask, lists: Lists, sizes: Sizes) -> bool:
    """Whether `mask` alone says what is seen: known for formulas, if the lists can be read."""
    tensors = [t for t in lists if isinstance(t, torch.Tensor)]
    if loads(mask.expression) or not all(map(_readable, tensors)):
        return False
    key = ("implied", mask.text, sizes, lists.q_block, lists.kv_block)
    return remembered(tensors, key, lambda: _says_the_same(mask.expression, lists, sizes))


def _readable(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_inference()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
    )


def _says_the_same(e: Expression, lists: Lists, sizes: Sizes) -> bool:
    """Whether all that `e` lets see is listed, and what is listed as full is so. No only means not known."""
    partial = _table(lists.partial_count, lists.partial_blocks, lists, sizes)
    full = np.zeros_like(partial)
    if lists.full_count is not None and lists.full_blocks is not None:
        full = _table(lists.full_count, lists.full_blocks, lists, sizes)

    def ranges(length: int, block: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
        first = np.arange(0, length, block, dtype=np.int32)
        shape = [1, 1, 1, 1]
        shape[axis] = len(first)
        return first.reshape(shape), np.minimum(first + block - 1, length - 1).reshape(shape)

    numbers: dict[str, Any] = {
        "b": ranges(sizes.batch, 1, 0),
        "h": ranges(sizes.heads, 1, 1),
        "q": ranges(sizes.q_len, lists.q_block, 2),
        "kv": ranges(sizes.kv_len, lists.kv_block, 3),
        "q_len": (sizes.q_len, sizes.q_len),
        "kv_len": (sizes.kv_len, sizes.kv_len),
    }
    everywhere, anywhere = bounds(e, numbers, _no_load)
    return bool((~anywhere | partial | full).all() and (everywhere | ~full).all())


def _no_load(load: Load) -> Any:
    raise AssertionError(f"a formula has no {load}")


def _table(count: torch.Tensor, blocks: torch.Tensor, lists: Lists, sizes: Sizes) -> np.ndarray:
    """Which blocks are listed: bool [B or 1, H or 1, blocks of queries, blocks of keys]."""
    rows, columns = -(-sizes.q_len // lists.q_block), -(-sizes.kv_len // lists.kv_block)
    counts, places = count.cpu().numpy()[:, :, :rows, None], blocks.cpu().numpy()[:, :, :rows]
    listed = (np.arange(places.shape[-1]) < counts) & (places >= 0) & (places < columns)
    table = np.zeros((*places.shape[:-1], columns + 1), np.bool_)
    np.put_along_axis(table, np.where(listed, places, columns), True, axis=-1)
    return table[..., :-1]

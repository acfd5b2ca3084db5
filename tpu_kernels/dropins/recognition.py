"""Masks given as tensors that have a simple form: causal, key padding, both, or nothing masked.

    mask[b, q, kv] = keep[b, kv] and kv <= q + offset

The form is guessed from the first row, the last row and one column, and then every element is compared with
it, in one pass that ends at the first that differs. A kernel then needs no table of L times S elements, and
skips what is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tpu_kernels import masks
from tpu_kernels.dropins.remembered import remembered

PLAIN = (torch.Tensor, torch.nn.Parameter)
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_CHUNK = 2**22
"""Elements of a mask that are compared at a time: what is built for it stays small."""


class Pattern(NamedTuple):
    """`mask[b, q, kv] = keep[b, kv] and kv <= q + offset`; None for what is not limited.

    Attributes:
        offset: of the causal limit.
        keep: bool `[B or 1, S]`.
    """

    offset: int | None
    keep: torch.Tensor | None

    def mask(self) -> masks.Mask | None:
        """As a mask for `splash_attention`; None if nothing is masked."""
        causal = None if self.offset is None else masks.causal(offset=self.offset)
        if self.keep is None:
            return causal
        padding = masks.key_padding(self.keep)
        return padding if causal is None else causal & padding


def recognise(mask: torch.Tensor, scores: Sequence[int]) -> Pattern | None:
    """The form of a mask for `scaled_dot_product_attention`; None if it has another or can't be read.

    A floating mask has it if it is exactly 0 where the mask above is true and -inf elsewhere.

    Verdicts are `remembered` while the mask stays as it is.

    Args:
        mask: bool or floating, with at least two dimensions; broadcasts to `scores`.
        scores: the shape of the scores, `[..., L, S]`.
    """
    if not _readable(mask):
        return None
    return remembered([mask], ("pattern", tuple(scores)), lambda: _read(mask, scores))


def _readable(mask: torch.Tensor) -> bool:
    """Whether there are elements, and nothing that records or transforms the program sees them read."""
    if torch.compiler.is_compiling() or type(mask) not in PLAIN or mask.requires_grad:
        return False
    if mask.dtype not in (torch.bool, torch.float32, torch.bfloat16, torch.float16) or not mask.numel():
        return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or _functorch.peek_interpreter_stack() is not None
    )


@torch.no_grad()
def _read(mask: torch.Tensor, scores: Sequence[int]) -> Pattern | None:
    for place, stride in enumerate(mask.stride()[:-1]):
        if stride == 0:
            mask = mask.narrow(place, 0, 1)
    batch = [size for size in mask.shape[:-2] if size != 1]
    if batch and not (len(scores) == mask.dim() == 4 and mask.shape[1] == 1):
        return None  # differs by head, or has more than one dimension of batch
    return _pattern(mask.expand(*mask.shape[:-1], scores[-1]).reshape(-1, mask.shape[-2], scores[-1]))


def _pattern(mask: torch.Tensor) -> Pattern | None:
    """The form of a mask `[B or 1, L, S]`."""
    rows, columns = mask.shape[1:]
    first, last = _visible(mask[:, 0]), _visible(mask[:, -1])
    if (first & ~last).any():
        return None
    later = first != last
    offset = None
    if later.any():
        b, column = (int(i) for i in later.nonzero()[0])
        offset = column - int(_visible(mask[b, :, column]).int().argmax())
    if not _agrees(mask, last, offset):
        return None
    limit = columns if offset is None else rows + offset
    kept = torch.arange(columns, device=mask.device) < limit
    return Pattern(offset, None if torch.equal(last, kept.expand_as(last)) else last.clone())


def _visible(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _agrees(mask: torch.Tensor, keep: torch.Tensor, offset: int | None) -> bool:
    """Whether each element is what the form says. Each is read once."""
    batch, rows, columns = mask.shape
    step = max(1, _CHUNK // (batch * columns))
    kv = torch.arange(columns, device=mask.device)
    for start in range(0, rows, step):
        chunk = mask[:, start : start + step]
        expected = keep[:, None, :]
        if offset is not None:
            q = torch.arange(start, start + chunk.shape[1], device=mask.device)
            expected = expected & (kv <= q[:, None] + offset)
        expected = expected.expand_as(chunk)
        if mask.dtype != torch.bool:
            expected = torch.where(expected, 0.0, float("-inf")).to(mask.dtype)
        if not torch.equal(chunk, expected):
            return False
    return True

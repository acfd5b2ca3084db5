"""The bytes of an array as a TPU holds it: tiled, padded, packed into 32-bit words."""

from __future__ import annotations

import numpy as np

from autotune.schedule.hlo import ArrayType


def words(array: np.ndarray, layout: ArrayType) -> np.ndarray:
    """The 32-bit words of `array` in the order they lie in memory; padding is zero.

    A tiling `(a, b)` splits the last two dimensions (the fastest varying ones) into tiles of a by b, which
    are laid out one after the other; a second tiling splits each tile again.

    Raises:
        ValueError: the shapes differ, or an item is smaller than a byte.
    """
    if array.shape != layout.shape:
        raise ValueError(f"expected an array of shape {layout.shape}, got {array.shape}")
    if array.dtype.kind not in "iubf" or layout.dtype in ("s4", "u4", "s2", "u2"):
        raise ValueError(f"items of {layout.dtype} cannot be laid out")
    laid_out = array.transpose(tuple(reversed(layout.minor_to_major)))
    for tile in layout.tiles:
        missing = len(tile) - laid_out.ndim
        laid_out = _split(laid_out.reshape((1,) * missing + laid_out.shape), tile)
    raw = np.ascontiguousarray(laid_out).tobytes()
    return np.frombuffer(raw + b"\0" * (-len(raw) % 4), dtype="<i4")


def _split(array: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    """`array` with its last dimensions split into (number of tiles..., tile...)."""
    count = len(tile)
    lead, last = array.shape[: array.ndim - count], array.shape[array.ndim - count :]
    padding = [(0, 0)] * len(lead) + [(0, -size % part) for size, part in zip(last, tile, strict=True)]
    padded = np.pad(array, padding)
    split: list[int] = list(lead)
    for size, part in zip(padded.shape[len(lead) :], tile, strict=True):
        split += [size // part, part]
    first = len(lead)
    order = [*range(first), *range(first, first + 2 * count, 2), *range(first + 1, first + 2 * count, 2)]
    return padded.reshape(split).transpose(order)

"""Which positions of a sequence each rank holds.

A sequence is cut into equal parts along the ranks of a ring, r of them:

    contiguous   rank i holds part i of r
    zigzag       rank i holds parts i and 2r - 1 - i of 2r

With a causal mask later queries see more keys, so under `contiguous` the last rank works on r blocks and the
first one on a single one; under `zigzag` all ranks have as much to do.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np

Layout: TypeAlias = Literal["contiguous", "zigzag"]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def part_length(length: int, ranks: int, layout: Layout) -> int:
    """How many positions each rank holds of a sequence, which is padded at its end if it can't be divided."""
    parts = ranks * pieces(layout)
    return -(-length // parts) * pieces(layout)


def positions(place: Any, ranks: int, count: int, layout: Layout) -> Any:
    """The positions that the rank at a place holds, in their order there.

    Args:
        place: of the rank along the ring, an int or a traced integer.
        ranks: in the ring.
        count: positions on each rank; even for `zigzag`.
        layout: how the sequence is cut.

    Returns:
        [count], int32.
    """
    local = np.arange(count, dtype=np.int32)
    if layout == "contiguous":
        return place * count + local
    half = count // 2
    # Behind its first piece, `place`, a rank holds the piece `2 * ranks - 1 - place`.
    later = (2 * ranks - 1 - 2 * place) * half - half
    return place * half + local + later * (local >= half)


def pieces(layout: Layout) -> int:
    """How many pieces of the sequence a rank holds."""
    return 2 if layout == "zigzag" else 1

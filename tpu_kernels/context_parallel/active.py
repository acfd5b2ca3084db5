"""Whether this thread is in a block of `context_parallel`, for what would see a part of a sequence only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Depth(threading.local):
    blocks = 0


_depth = _Depth()


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """This thread is in one more block."""
    _depth.blocks += 1
    try:
        yield
    finally:
        _depth.blocks -= 1


def refuse(what: str, fix: str) -> None:
    """Raise `RuntimeError` in a block.

    Args:
        what: would see a part of the sequence only.
        fix: what to do.
    """
    if _depth.blocks:
        raise RuntimeError(
            f"{what}, inside of context_parallel, would compute attention of this rank's part of the "
            f"sequence alone; {fix}"
        )

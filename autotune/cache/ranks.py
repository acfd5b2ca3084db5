"""Ranks that agree: the first one of a group decides, the others follow.

This module imports no torch. Where `torch.distributed` was not imported there are no ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from autotune.cache import contexts, user
from autotune.cache.entry import Entry
from autotune.cache.layer import Layer
from bridge.chips import chips

T = TypeVar("T")


class FirstRankFailed(RuntimeError):
    """The rank that decides for a group raised an error; the message has it."""


def agreed(choose: Callable[[], T], process_group: Any = None) -> T:
    """What `choose()` returns on the first rank of a group, on all of its ranks.

    All ranks of the group must call this, whatever they know already: one that finds its choice in a cache
    of its own and does not come would let the others wait. Only the first rank calls `choose`. If that
    raises, all ranks raise. The others wait for it no longer than the group's timeout. Without
    `torch.distributed`, or on one rank, `choose` is called and that is all.

    Args:
        choose: makes the choice, which must be picklable.
        process_group: the group; None is all ranks.

    Raises:
        FirstRankFailed: on the other ranks, if the first one raised an error, or its choice is not picklable.
        ValueError: this rank is not in the group.
    """
    dist = _distributed()
    if dist is None:
        return choose()
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError("agreed: this rank is not in the process group")
    if dist.get_world_size(process_group) == 1:
        return choose()
    first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    if rank == 0:
        return _decide(choose, lambda told: dist.broadcast_object_list([told], first, process_group))
    heard: list[Any] = [None]
    dist.broadcast_object_list(heard, first, process_group)
    error, data = heard[0]
    if error is not None:
        raise FirstRankFailed(f"rank {first}, which decides for the others, failed: {error}")
    return pickle.loads(data)


@contextlib.contextmanager
def following(process_group: Any = None) -> Iterator[None]:
    """Within this context, lookups of all ranks of a group give what they give on its first rank.

    The contexts and the user's tilings of that rank, as they are when this is entered, take the place of
    those of the others. Shipped tilings are each rank's own: those of the same package. All ranks of the
    group must enter, as with `agreed`, which also says what is raised.
    """
    told, below = agreed(_own_layers, process_group)
    with contexts.entered(contexts.Stack(tuple(Layer(*arguments) for arguments in told), below)):
        yield


def _own_layers() -> tuple[list[tuple[str, str | None, tuple[Entry, ...]]], tuple[str, ...]]:
    """What makes all layers that hold here and that another process may lack; and the layers below them."""
    here = contexts.stack.get()
    own = [user.layer(chip) for chip in chips()] if "user" in here.below else []
    told = [(layer.kind, layer.path, layer.entries) for layer in (*here.layers, *own) if layer.entries]
    return told, tuple(kind for kind in here.below if kind == "shipped")


def _decide(choose: Callable[[], T], tell: Callable[[tuple[str | None, bytes]], None]) -> T:
    """The choice, after the others were told of it, or of why there is none."""
    try:
        choice = choose()
        data = pickle.dumps(choice)
    except (Exception, SystemExit) as error:  # not an interrupt, for then the others may never come
        tell((f"{type(error).__name__}: {error}", b""))
        raise
    tell((None, data))
    return choice


def _distributed() -> Any:
    """`torch.distributed` if ranks were started."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist

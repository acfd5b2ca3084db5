"""What ranks that are threads see of c10d's state, and of the environment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from bridge.ranks.thread_rank import current

_C10D: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]


class _RankWorld(c10d._World):
    """`c10d._world` for the time of a run: in a rank's thread it has the rank's state, elsewhere its own."""

    def _own(self, name: str) -> Any:
        rank = current()
        return getattr(super(), name) if rank is None else rank.globals[name]

    @property
    def pg_map(self) -> Any:
        return self._own("pg_map")

    @property
    def pg_names(self) -> Any:
        return self._own("pg_names")

    @property
    def pg_group_ranks(self) -> Any:
        return self._own("pg_group_ranks")

    @property
    def pg_backend_config(self) -> Any:
        return self._own("pg_backend_config")

    @property
    def tags_to_pg(self) -> Any:
        return self._own("tags_to_pg")

    @property
    def pg_to_tag(self) -> Any:
        return self._own("pg_to_tag")

    @property
    def group_count(self) -> int:
        return self._own("group_count")

    @group_count.setter
    def group_count(self, value: int) -> None:
        rank = current()
        if rank is None:
            c10d._group_count = value
        else:
            rank.globals["group_count"] = value

    @property
    def default_pg(self) -> ProcessGroup | None:
        rank = current()
        return (self if rank is None else rank.world)._default_pg

    @default_pg.setter
    def default_pg(self, value: ProcessGroup | None) -> None:
        rank = current()
        (self if rank is None else rank.world)._default_pg = value

    @property
    def pg_coalesce_state(self) -> Any:
        rank = current()
        return (self if rank is None else rank.world)._pg_coalesce_state

    @property
    def comms(self) -> list[Any]:
        rank = current()
        return (self if rank is None else rank.world)._comms


@contextlib.contextmanager
def worlds() -> Iterator[None]:
    """Give each rank's thread a c10d of its own. The object stays: other modules may hold it."""
    world: Any = c10d._world
    if type(world) is not c10d._World:
        raise RuntimeError(
            f"expected torch.distributed's own state, got a {type(world).__name__}: something else has taken "
            "its place, as torch's threaded process groups for tests do. Undo that before run()."
        )
    saved = sys.excepthook, c10d._default_pg_init_method, _C10D.get_debug_level()
    world.__class__ = _RankWorld
    _C10D._set_thread_isolation_mode(True)
    if saved[2] == _C10D.DebugLevel.DETAIL:  # it checks calls by waiting in C++; here they are checked anyway
        _C10D.set_debug_level(_C10D.DebugLevel.INFO)
    try:
        yield
    finally:
        _C10D.set_debug_level(saved[2])
        _C10D._set_thread_isolation_mode(False)
        world.__class__ = c10d._World
        sys.excepthook, c10d._default_pg_init_method = saved[:2]


@contextlib.contextmanager
def environment(size: int) -> Iterator[None]:
    """The variables that torchrun sets. RANK and LOCAL_RANK change hands with the baton."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    saved = {name: os.environ.get(name) for name in names}
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

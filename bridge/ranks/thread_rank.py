"""Ranks that are threads: what each has of its own, and which of them has called what."""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d

from bridge.ranks.baton import Baton

_MANY = 64  # works that nobody has waited for; above it, those that are done are forgotten
_here = threading.local()

WORLD_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
"""c10d's state of the process, of which each rank has its own."""

# Before a run puts others in their place.
work_wait: Any = Work.wait
work_done: Any = Work.is_completed


# -- a rank --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Group:
    """A process group as one rank sees it."""

    name: str
    device: str  # one group may have a backend for each device type
    members: tuple[int, ...]
    backend: Any

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return self.name, self.device, self.members

    def __str__(self) -> str:
        return f"group {self.name!r} of ranks {list(self.members)}"


class Rank:
    """What one rank has of its own in torch.distributed. `current()` is that of the calling thread."""

    def __init__(self, index: int, size: int, baton: Baton, board: Board) -> None:
        self.index, self.size, self.baton, self.board = index, size, baton, board
        self.world = c10d._World()  # its fields; `_RankWorld` reads the ones below in the globals' place
        self.globals: dict[str, Any] = {name: {} for name in WORLD_TABLES} | {"group_count": 0}
        self.pending: dict[Work, Post] = {}
        self.groups: dict[Any, Group | None] = {}  # by backend
        self._counts: dict[Any, int] = {}
        self._compiled: dict[int, int] = {}

    def start(self, store: c10d.Store) -> None:
        """In the rank's thread, holding the baton: make the default group."""
        _here.rank = self
        torch.autograd.set_multithreading_enabled(False)  # of this thread: its backward runs in it
        dist.init_process_group("gloo", store=store, rank=self.index, world_size=self.size)

    def stop(self) -> None:
        """In the rank's thread, after all have ended: close the groups."""
        try:
            self.close_connections()
            self.pending.clear()
            self.groups.clear()
            if dist.is_initialized():
                dist.destroy_process_group()
        finally:
            _here.rank = None

    def close_connections(self) -> None:
        """End gloo's collectives that nobody else comes to, and the waits for them. From any thread.

        gloo has no call for that; but a receive that times out closes the connections of its group.
        """
        for group in {self.groups.get(post.backend) for post in [*self.pending.values()]}:
            if group is None or len(group.members) == 1:
                continue
            peer = (group.members.index(self.index) + 1) % len(group.members)
            with contextlib.suppress(RuntimeError):
                work = group.backend.recv([torch.empty(1, device="cpu")], peer, 0x7FFF_FFF0)
                work_wait(work, datetime.timedelta(milliseconds=1))

    def group_of(self, boxed: Any, device: torch.device) -> Group | None:
        """This group, by its backend for the device; none if it is not in the rank's world."""
        backend = ProcessGroup.unbox(boxed)._get_backend(device)
        if backend not in self.groups:
            self.groups[backend] = self.find_group(backend)
        return self.groups[backend]

    def find_group(self, backend: Any) -> Group | None:
        for group, name in self.globals["pg_names"].items():
            for device in group._device_types:
                if group._get_backend(device) is backend:
                    return Group(name, device.type, tuple(self.globals["pg_group_ranks"][group]), backend)
        return None

    def next_number(self, group: Group) -> int:
        """Which collective of its group the rank comes to, from 1."""
        self._counts[group.key] = self._counts.get(group.key, 0) + 1
        return self._counts[group.key]

    def remember(self, work: Work, post: Post) -> None:
        if len(self.pending) >= _MANY:
            self.pending = {w: p for w, p in self.pending.items() if not (p.ready() and work_done(w))}
        self.pending[work] = post

    def compiled_in(self, region: int) -> int:
        """The rank's own number for one of torch.compile's regions (sets of compiled code)."""
        if region in self._compiled.values():
            return region
        if region not in self._compiled:
            self._compiled[region] = next(sys.modules["torch._dynamo.eval_frame"]._next_isolate_recompiles_id)
        return self._compiled[region]


def current() -> Rank | None:
    """The calling thread's rank."""
    return getattr(_here, "rank", None)


# -- who has called what -------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What a rank calls, as far as the others must agree: gloo ends the process if they don't."""

    op: str
    same: tuple[Any, ...] = ()  # sizes and more that are the same on all ranks
    sent: tuple[int, ...] = ()  # how many numbers to each rank, where that differs
    received: tuple[int, ...] = ()

    def agrees(self, mine: int, other: Call, theirs: int) -> bool:
        """Whether two ranks, of these places in the group, may meet with their calls."""
        if (self.op, self.same, len(self.sent)) != (other.op, other.same, len(other.sent)):
            return False
        return not self.sent or (
            self.sent[theirs] == other.received[mine] and self.received[theirs] == other.sent[mine]
        )

    def __str__(self) -> str:
        splits = [f"sends {[*self.sent]}, receives {[*self.received]}"] if self.sent else []
        return f"{self.op}({', '.join([*map(str, self.same), *splits])})"


def call_of(name: str, args: Sequence[Any], members: int) -> Call:
    """The call of a c10d op, from its arguments."""
    op, root = name.strip("_"), _ROOT_AT.get(name)
    roots = () if root is None else (f"root {args[root]}",)
    if name == "alltoall_":
        dtypes = {str(t.dtype)[6:]: None for t in args[1]}
        return Call(op, tuple(dtypes), _counts(args[1]), _counts(args[0]))
    if name == "alltoall_base_":
        sent, received = _split(args[1], args[4], members), _split(args[0], args[3], members)
        return Call(op, (str(args[1].dtype)[6:],), sent, received)
    if name not in _ALIKE_AT:
        return Call(op)
    tensors: Any = args[_ALIKE_AT[name]]
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    elif tensors and not isinstance(tensors[0], torch.Tensor):
        tensors = [t for several in tensors for t in several]
    return Call(op, (*(f"{t.numel()} x {str(t.dtype)[6:]}" for t in tensors), *roots))


# Where the tensors are that have the same sizes on all ranks, and the rank that is the root.
_ALIKE_AT = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "broadcast_": 0,
    "reduce_": 0,
    "allgather_": 1,
    "_allgather_base_": 1,
    "allgather_coalesced_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "gather_": 1,
    "scatter_": 0,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}
_ROOT_AT = {"broadcast_": 2, "reduce_": 3, "gather_": 3, "scatter_": 3}


def _counts(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(t.numel() for t in tensors)


def _split(tensor: torch.Tensor, sizes: Sequence[int], members: int) -> tuple[int, ...]:
    if not sizes:
        return (tensor.numel() // members,) * members
    row = tensor.numel() // max(tensor.shape[0], 1)
    return tuple(size * row for size in sizes)


@dataclass(eq=False)
class Meeting:
    """One collective of one group."""

    op: str
    number: int
    group: Group
    calls: dict[int, Call] = field(default_factory=dict)
    come: set[int] = field(default_factory=set)

    def ready(self) -> bool:
        return len(self.come) == len(self.group.members)

    def missing(self) -> list[int]:
        return [rank for rank in self.group.members if rank not in self.come]

    def __str__(self) -> str:
        return f"{self.op} (collective {self.number} of {self.group})"


@dataclass(eq=False)
class Post:
    """A call whose work can be waited for: a rank's part in a meeting, a send or a receive."""

    what: str
    ready: Callable[[], bool]
    missing: Callable[[], Sequence[int]]
    backend: Any
    unsure: Callable[[], bool] = lambda: False  # `ready` does not say for certain that gloo can do it


@dataclass
class _Channel:
    """Messages from one rank to another with one tag: gloo gives the n-th receive the n-th send."""

    sends: int = 0
    receives: int = 0
    sizes: dict[int, int] = field(default_factory=dict)  # bytes, of those that have one side only

    def check(self, number: int, size: int, *, sends: bool, what: str) -> None:
        """Raises: RuntimeError: the send is larger than the receive."""
        other = self.sizes.pop(number, None)
        if other is None:
            self.sizes[number] = size
        elif (sent := size if sends else other) > (room := other if sends else size):
            raise RuntimeError(f"{what}: expected room for the {sent} bytes that are sent, got {room} bytes")


class Board:
    """What all ranks have called. Only the rank with the baton writes here."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[Any, int], Meeting] = {}
        self._channels: dict[Any, _Channel] = {}
        self._from_any: dict[Any, int] = {}

    def meet(self, rank: Rank, group: Group, call: Call) -> Meeting:
        """The meeting a rank comes to next; it has not come until it is in `come`.

        Raises:
            RuntimeError: another rank has come to it with another collective or with other sizes.
        """
        number = rank.next_number(group)
        key = group.key, number
        meeting = self._meetings.setdefault(key, Meeting(call.op, number, group))
        place = group.members.index
        for index, other in meeting.calls.items():
            if not call.agrees(place(rank.index), other, place(index)):
                raise RuntimeError(
                    f"collective {number} of {group}: rank {index} called {other}, rank {rank.index} calls "
                    f"{call}. All ranks of a group must call the same collectives in the same order, with "
                    "tensors of the same size and dtype, or with splits that fit."
                )
        meeting.calls[rank.index] = call
        if len(meeting.calls) == len(group.members):
            del self._meetings[key]
        return meeting

    def send(self, rank: Rank, group: Group, to: int, tag: int, size: int) -> Post:
        source, target = rank.index, group.members[to]
        what = f"send to rank {target} (tag {tag}, {group})"
        key, channel = self._channel(group, source, target, tag)
        number, channel.sends = channel.sends, channel.sends + 1
        if key not in self._from_any:
            channel.check(number, size, sends=True, what=what)
        return Post(
            what,
            lambda: channel.receives > number or key in self._from_any,
            lambda: [target],
            group.backend,
            lambda: key in self._from_any,
        )

    def receive(self, rank: Rank, group: Group, source_at: int, tag: int, size: int) -> Post:
        source, target = group.members[source_at], rank.index
        what = f"recv from rank {source} (tag {tag}, {group})"
        key, channel = self._channel(group, source, target, tag)
        number, channel.receives = channel.receives, channel.receives + 1
        if key not in self._from_any:
            channel.check(number, size, sends=False, what=what)
        return Post(
            what,
            lambda: channel.sends > number,
            lambda: [source],
            group.backend,
            lambda: key in self._from_any,
        )

    def receive_from_any(self, rank: Rank, group: Group, tag: int) -> Post:
        key = group.key, rank.index, tag
        self._from_any[key] = number = self._from_any.get(key, 0) + 1
        others = [r for r in group.members if r != rank.index]
        channels = [self._channel(group, r, rank.index, tag)[1] for r in others]
        before = number - 1 + sum(channel.receives for channel in channels)
        return Post(
            f"recv from any rank (tag {tag}, {group})",
            lambda: sum(channel.sends for channel in channels) > before,
            lambda: others,
            group.backend,
            lambda: True,
        )

    def _channel(self, group: Group, source: int, target: int, tag: int) -> tuple[Any, _Channel]:
        channel = self._channels.setdefault((group.key, source, target, tag), _Channel())
        return (group.key, target, tag), channel

"""torch.distributed for ranks that are threads: a world for each, and waits at which the baton moves on.

The groups are torch's own, over gloo: one `ProcessGroupGloo` for each rank, with its own connections, so
results are those of processes. What changes, while a run lasts:

- c10d's state (`_world`, the names of groups) is the rank's own in the ranks' threads.
- What stands before c10d's kernels notes who has called what, and asks gloo to do it. A wait lets other ranks
  run until all have come, and only then waits for gloo, which then needs nobody's Python any more. So who
  waits for whom is always known, and a rank that waits for one that never comes can be ended.
- `Work.wait()` and `Future.wait()` let others run. Where C++ would wait (DDP, backward), the collective is
  waited for before it returns.
- Groups are made by all their ranks at the same time, as gloo connects them in C++.
- Code that torch.compile makes is kept for each rank by itself: the rank's number is a constant in it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d

from bridge.device.imports import after_import
from bridge.ranks.baton import Baton, Wait

_CPU = torch.device("cpu")
_C10D: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPS = os.path.join(_TORCH, "_ops.py")
_BRIDGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OURS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_MANY = 64  # works that nobody has waited for; above it, those that are done are forgotten
_here = threading.local()


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
        self.globals: dict[str, Any] = {name: {} for name in _WORLD_TABLES} | {"group_count": 0}
        self.pending: dict[Work, Post] = {}
        self.groups: dict[Any, Group | None] = {}  # by backend
        self._counts: dict[Any, int] = {}
        self._compiled: dict[int, int] = {}

    def start(self, store: RankStore) -> None:
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
                _work_wait(work, datetime.timedelta(milliseconds=1))

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
            self.pending = {w: p for w, p in self.pending.items() if not (p.ready() and _work_done(w))}
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


def _call(name: str, args: Sequence[Any], members: int) -> Call:
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


# -- waiting -------------------------------------------------------------------------------------

_Future: Any = torch._C.Future  # what works give; torch.futures.Future is made of it
_work_wait: Any = Work.wait
_work_done: Any = Work.is_completed
_future_wait: Any = _Future.wait
_future_done: Any = _Future.done


def _finish(rank: Rank, work: Work, post: Post, *timeout: datetime.timedelta) -> Any:
    """Wait for a work, letting others run until those it needs have come."""
    limit = timeout[0] if timeout and timeout[0] > datetime.timedelta(0) else None
    deadline = None if limit is None else time.monotonic() + limit.total_seconds()
    if not rank.baton.wait(rank.index, Wait(post.ready, post.what, post.missing, deadline)):
        timeout = (datetime.timedelta(milliseconds=1),)  # that time is over: gloo's own error
    try:
        if post.unsure():
            with rank.baton.outside(rank.index):
                return _work_wait(work, *timeout)
        return _work_wait(work, *timeout)
    except RuntimeError:
        rank.baton.raise_if_over(rank.index)  # gloo's error is then but the end of its connections
        raise
    finally:
        rank.pending.pop(work, None)


@functools.wraps(_work_wait)
def _wait_for_work(self: Work, *args: Any, **kwargs: Any) -> Any:
    rank = current()
    if rank is None or isinstance(self, _C10D.PythonCallbackWork):  # whose callback is `_finish`
        return _work_wait(self, *args, **kwargs)
    post = rank.pending.get(self)
    if post is not None:
        return _finish(rank, self, post, *args, *kwargs.values())
    if _work_done(self):
        return _work_wait(self, *args, **kwargs)
    with rank.baton.outside(rank.index):
        return _work_wait(self, *args, **kwargs)


@functools.wraps(_work_done)
def _is_work_done(self: Work) -> bool:
    rank = current()
    if rank is not None and not _work_done(self):
        rank.baton.give_way(rank.index)
    return _work_done(self)


@functools.wraps(_future_wait)
def _wait_for_future(self: Any) -> Any:
    rank = current()
    if rank is not None and not _future_done(self):
        self.add_done_callback(lambda _: rank.baton.poke())
        done = Wait(lambda: _future_done(self), "Future.wait()", ranks_only=False)
        rank.baton.wait(rank.index, done)
    return _future_wait(self)


@functools.wraps(_future_done)
def _is_future_done(self: Any) -> bool:
    rank = current()
    if rank is not None and not _future_done(self):
        rank.baton.give_way(rank.index)
    return _future_done(self)


@contextlib.contextmanager
def _waits() -> Iterator[None]:
    """Let Python's waits hand on the baton."""
    work: Any = Work
    work.wait, work.is_completed = _wait_for_work, _is_work_done
    _Future.wait, _Future.done = _wait_for_future, _is_future_done
    try:
        yield
    finally:
        work.wait, work.is_completed = _work_wait, _work_done
        _Future.wait, _Future.done = _future_wait, _future_done


# -- collectives ---------------------------------------------------------------------------------


_ranks: Sequence[Rank] = ()  # of the run; not in the kernels, which torch keeps beyond their time


def _kernel(name: str) -> Callable[..., Any]:
    """What stands before a c10d op's kernels for the time of a run."""
    op = getattr(torch.ops.c10d, name).default
    group_at = [a.name for a in op._schema.arguments].index("process_group")

    def kernel(keys: Any, *args: Any) -> Any:
        gloo = lambda args: op.redispatch(keys - _OURS, *args)
        rank = current()
        if keys.has(torch._C.DispatchKey.Meta):  # fake tensors: shapes are all that is asked for
            return gloo(args)
        device = _device(keys)
        if rank is None:
            _refuse_group_of_a_rank(args[group_at], device)
            return gloo(args)
        rank.baton.raise_if_over(rank.index)
        group = rank.group_of(args[group_at], device)
        if group is None:  # made by hand: nothing is known of it
            return _wait_outside(rank, gloo(args))
        if name == "monitored_barrier_":
            return _monitored_barrier(rank, group, args[3])
        if name == "send":
            post = rank.board.send(rank, group, args[2], args[3], args[0][0].nbytes)
        elif name == "recv_":
            post = rank.board.receive(rank, group, args[2], args[3], args[0][0].nbytes)
        elif name == "recv_any_source_":
            post = rank.board.receive_from_any(rank, group, args[2])
        else:
            meeting = rank.board.meet(rank, group, _call(name, args, len(group.members)))
            answer = gloo(args)
            meeting.come.add(rank.index)
            post = Post(str(meeting), meeting.ready, meeting.missing, group.backend)
            return _answer(rank, post, answer, _caller())
        return _answer(rank, post, gloo(args), "Python")

    return kernel


def _device(keys: Any) -> torch.device:
    return torch.device("tpu") if keys.has(torch._C.DispatchKey.PrivateUse1) else _CPU


def _answer(rank: Rank, post: Post, answer: Any, caller: str) -> Any:
    """What an op returns. Python gets gloo's own work; functional collectives one that calls Python when it
    is waited for; C++ and backward one that is done."""
    work = Work.unbox(_boxed_work(answer))
    rank.remember(work, post)
    if caller == "functional":
        waiting = _C10D.PythonCallbackWork(lambda _: _finish(rank, work, post)).boxed()
        return (*answer[:-1], waiting) if isinstance(answer, tuple) else waiting
    if caller != "Python":
        _finish(rank, work, post)
    return answer


def _boxed_work(answer: Any) -> Any:
    return answer[-1] if isinstance(answer, tuple) else answer


def _caller() -> str:
    """Who called the collective: "Python" if its work goes to Python code, "functional", or "C++"."""
    if torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
        return "C++"  # backward: DDP waits for futures there
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _OPS:
            namespace = getattr(frame.f_locals.get("self"), "namespace", "")
            if namespace.startswith("_c10d_functional"):
                return "functional"
        elif file == c10d.__file__:
            return "Python"
        elif not file.startswith(_BRIDGE):
            return "C++" if file.startswith(_TORCH) else "Python"
        frame = frame.f_back
    return "C++"


def _wait_outside(rank: Rank, answer: Any) -> Any:
    boxed = _boxed_work(answer)
    if boxed is not None:
        with rank.baton.outside(rank.index):
            _work_wait(Work.unbox(boxed))
    return answer


def _monitored_barrier(rank: Rank, group: Group, milliseconds: int) -> None:
    """gloo's runs in the calling thread, so a meeting takes its place."""
    meeting = rank.board.meet(rank, group, Call("monitored_barrier"))
    meeting.come.add(rank.index)
    deadline = time.monotonic() + milliseconds / 1000 if milliseconds > 0 else None
    if not rank.baton.wait(rank.index, Wait(meeting.ready, str(meeting), meeting.missing, deadline)):
        missing = ", ".join(map(str, meeting.missing()))
        raise RuntimeError(f"Rank {missing} failed to pass monitoredBarrier in {milliseconds} ms")


def _refuse_group_of_a_rank(boxed: Any, device: torch.device) -> None:
    backend = ProcessGroup.unbox(boxed)._get_backend(device)
    for rank in _ranks:
        if rank.find_group(backend) is not None:
            raise RuntimeError(
                f"expected a collective of rank {rank.index}'s group to be called in that rank's thread, got "
                f"it in thread {threading.current_thread().name!r}. Threads that a rank starts have no rank."
            )


@contextlib.contextmanager
def _kernels(ranks: Sequence[Rank]) -> Iterator[None]:
    """Put `_kernel` before c10d's own, at the key that comes before all devices and that all calls pass."""
    global _ranks
    library = torch.library.Library("c10d", "IMPL")
    _ranks = ranks
    try:
        for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):  # type: ignore[attr-defined]
            name = full_name.removeprefix("c10d::")
            if name == full_name:
                continue
            schema = getattr(torch.ops.c10d, name).default._schema
            if any(argument.name == "process_group" for argument in schema.arguments):
                library.impl(name, _kernel(name), "BackendSelect", with_keyset=True)
        yield
    finally:
        library._destroy()
        _ranks = ()


# -- making groups -------------------------------------------------------------------------------


@contextlib.contextmanager
def _creation() -> Iterator[None]:
    """Let ranks make a group at the same time, once all its ranks have come: gloo connects them in C++."""
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def make_together(
        size: int,
        group_rank: int,
        ranks: Sequence[int],
        backend: Any,
        store: Any,
        name: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rank = current()
        if rank is None:
            return make(size, group_rank, ranks, backend, store, name, *args, **kwargs)
        members = tuple(ranks) or tuple(range(rank.size))  # none stands for all
        tag = kwargs.get("pg_tag")
        if rank.index not in members or (tag and c10d._find_pg_by_ranks_and_tag(tag, [*ranks])):
            return make(size, group_rank, ranks, backend, store, name, *args, **kwargs)
        meeting = rank.board.meet(rank, Group(str(name), "new", members, None), Call("new group"))
        with rank.baton.together(rank.index, members, meeting.come, str(meeting)):
            return make(size, group_rank, ranks, backend, store, name, *args, **kwargs)

    c10d._new_process_group_helper = make_together
    try:
        yield
    finally:
        c10d._new_process_group_helper = make


# -- the store -----------------------------------------------------------------------------------


class RankStore(c10d.Store):
    """The store by which groups are made, in memory: waiting hands on the baton."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self._baton = baton
        self._data: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        with self._lock:
            self._data[key] = _as_bytes(value)
        self._baton.poke()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._data[key]

    def add(self, key: str, value: int) -> int:
        with self._lock:
            total = int(self._data.get(key, b"0")) + value
            self._data[key] = str(total).encode()
        self._baton.poke()
        return total

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = _as_bytes(expected_value), _as_bytes(desired_value)
        with self._lock:
            found = self._data.get(key, b"")
            if found == expected:
                self._data[key] = found = desired
            elif key not in self._data:
                found = expected
        self._baton.poke()
        return found

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._data.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        return all(key in self._data for key in keys)

    def num_keys(self) -> int:
        return len(self._data)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        rank = current()
        if rank is not None:
            wait = Wait(lambda: self.check(keys), f"a wait for the store's {keys}", deadline=deadline)
            found = rank.baton.wait(rank.index, wait)
        else:
            while not (found := self.check(keys)) and (deadline is None or time.monotonic() < deadline):
                time.sleep(0.001)
        if not found:
            raise dist.DistStoreError(f"wait timeout after {timeout}, keys: {keys}")

    # The names by which C++ calls them.
    compareSet, deleteKey, getNumKeys = compare_set, delete_key, num_keys


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# -- c10d's state --------------------------------------------------------------------------------

_WORLD_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


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
def _worlds() -> Iterator[None]:
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
def _environment(size: int) -> Iterator[None]:
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


# -- torch.compile -------------------------------------------------------------------------------

_DYNAMO = "torch._dynamo.eval_frame"
_SET_REGION = "set_eval_frame_isolate_recompiles_id"
_compile: Any = torch.compile
_live = False
_set_region: Any = None


@functools.cache
def _watch_dynamo() -> None:
    after_import(_DYNAMO, lambda _: _enter_regions() if _live else None)


def _enter_regions() -> None:
    global _set_region
    module = sys.modules.get(_DYNAMO)
    if module is None or _set_region is not None:
        return
    original = getattr(module, _SET_REGION, None)
    if original is None:  # torch.compile is refused
        return
    _set_region = original

    def set_region(region: int) -> int:
        rank = current()
        return original(region if rank is None else rank.compiled_in(region))

    setattr(module, _SET_REGION, set_region)


@functools.wraps(_compile)
def _compile_apart(*args: Any, **kwargs: Any) -> Any:
    if current() is not None and not hasattr(importlib.import_module(_DYNAMO), _SET_REGION):
        raise NotImplementedError(
            f"torch.compile on a rank that is a thread: torch {torch.__version__} cannot keep the code of "
            "several ranks apart; 2.13 can. Use processes (torchrun), or leave out torch.compile."
        )
    return _compile(*args, **kwargs)


@contextlib.contextmanager
def _compiled_code() -> Iterator[None]:
    """Keep what torch.compile makes apart by rank, by the ids that it has for that purpose."""
    global _live, _set_region
    _watch_dynamo()
    _live = True
    _enter_regions()
    torch.compile = _compile_apart
    try:
        yield
    finally:
        _live = False
        torch.compile = _compile
        if _set_region is not None:
            setattr(sys.modules[_DYNAMO], _SET_REGION, _set_region)
            _set_region = None


# -- all of it -----------------------------------------------------------------------------------


@contextlib.contextmanager
def installed(ranks: Sequence[Rank]) -> Iterator[None]:
    """Within, threads that called `Rank.start` are ranks. All is as before afterwards."""
    with _environment(len(ranks)), _worlds(), _waits(), _creation(), _compiled_code(), _kernels(ranks):
        yield

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
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d

from bridge.ranks.baton import Wait
from bridge.ranks.thread_compile import compiled_code
from bridge.ranks.thread_rank import Call, Group, Post, Rank, call_of, current, work_done, work_wait
from bridge.ranks.thread_world import environment, worlds

_CPU = torch.device("cpu")
_C10D: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPS = os.path.join(_TORCH, "_ops.py")
_BRIDGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OURS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)


# -- waiting -------------------------------------------------------------------------------------

_Future: Any = torch._C.Future  # what works give; torch.futures.Future is made of it
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
                return work_wait(work, *timeout)
        return work_wait(work, *timeout)
    except RuntimeError:
        rank.baton.raise_if_over(rank.index)  # gloo's error is then but the end of its connections
        raise
    finally:
        rank.pending.pop(work, None)


@functools.wraps(work_wait)
def _wait_for_work(self: Work, *args: Any, **kwargs: Any) -> Any:
    rank = current()
    if rank is None or isinstance(self, _C10D.PythonCallbackWork):  # whose callback is `_finish`
        return work_wait(self, *args, **kwargs)
    post = rank.pending.get(self)
    if post is not None:
        return _finish(rank, self, post, *args, *kwargs.values())
    if work_done(self):
        return work_wait(self, *args, **kwargs)
    with rank.baton.outside(rank.index):
        return work_wait(self, *args, **kwargs)


@functools.wraps(work_done)
def _is_work_done(self: Work) -> bool:
    rank = current()
    if rank is not None and not work_done(self):
        rank.baton.give_way(rank.index)
    return work_done(self)


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
        work.wait, work.is_completed = work_wait, work_done
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
            meeting = rank.board.meet(rank, group, call_of(name, args, len(group.members)))
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
            work_wait(Work.unbox(boxed))
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


# -- all of it -----------------------------------------------------------------------------------


@contextlib.contextmanager
def installed(ranks: Sequence[Rank]) -> Iterator[None]:
    """Within, threads that called `Rank.start` are ranks. All is as before afterwards."""
    with environment(len(ranks)), worlds(), _waits(), _creation(), compiled_code(), _kernels(ranks):
        yield

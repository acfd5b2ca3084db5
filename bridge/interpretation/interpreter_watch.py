"""Watches kernels in JAX's TPU interpreter: none waits for ever, and one that fails takes no process with it.

The interpreter runs each device of a kernel in a thread, as callbacks of XLA. Two things it can't do:

- End a kernel that waits for a signal which nobody will send. A thread here looks, some times a second,
  whether every device waits, and none for something that is still to come.
- Fail on one of several devices alone. XLA ends the whole process when a device fails and the others wait for
  it in a collective. So callbacks of several devices don't raise: after the first failure they give zeros,
  the program runs to its end, and the failure is raised then.

Like `tpu_interpreter`, this knows private names of the interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax._src import callback, source_info_util
from jax._src.pallas.mosaic.interpret import interpret_pallas_call, shared_memory

if TYPE_CHECKING:
    from bridge.interpretation.observer import Observer
    from bridge.interpretation.shadows import Given
    from bridge.interpretation.signs import Run

_SECONDS = 0.05
"""How often the watch looks."""

_SILENCE = 15.0
"""After how many seconds without any callback a core that is in none is taken to have ended, or to wait for
others in a collective of XLA: between callbacks there are only operations on what fits VMEM."""

_BARRIERS = ("_barrier", "_clean_up_shared_memory")


@dataclass(frozen=True)
class Waiting:
    """A device that waits for ever: for how much, of which semaphore, and how much that has."""

    device: int
    semaphore: int
    value: int
    count: int
    is_copy: bool
    line: Any


class KernelDeadlock(RuntimeError):
    """Every device of a kernel waits, for signals that no device will send. The message says where."""

    waits: tuple[Waiting, ...] = ()


@contextlib.contextmanager
def watched(devices: int, observer: Observer | None = None) -> Iterator[None]:
    """Watch the kernels that run in this context, on `devices` together, and let `observer` see each step.

    Raises:
        KernelDeadlock: one waited for ever.
        Exception: what a kernel raised, for several devices.
    """
    global _current
    _set_up()
    watch = _Watch(devices, observer)
    outer, _current = _current, watch
    watch.start()
    try:
        yield
    except Exception as error:
        if watch.failure is None:
            raise
        raise watch.failure from error
    else:
        if watch.failure is not None:
            raise watch.failure
    finally:
        watch.stop()
        _current = outer


_current: _Watch | None = None  # of the process, as the interpreter's state is


class _Watch:
    """What is known of the kernels that run."""

    def __init__(self, devices: int, observer: Observer | None) -> None:
        self.observer = observer
        self.failure: Exception | None = None
        self._defers = devices > 1
        self._waits: dict[int, _Wait] = {}
        self._at_barrier: set[int] = set()
        self._lines: dict[int, Any] = {}
        self._events = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bridge-interpreter-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    # -- called by the interpreter's threads ----------------------------------------------------------

    def run(
        self,
        work: Callable[..., Any],
        results: Any,
        line: Any,
        given: Given | None,
        args: tuple[Any, ...],
    ) -> Any:
        """A callback of the interpreter, for what is on a line of the kernel's source."""
        if self._defers and self.failure is not None:
            return _zeros(results)
        thread = threading.get_ident()
        at_barrier = getattr(work, "__name__", "") in _BARRIERS
        self._events += 1
        self._lines[thread] = line
        if at_barrier:
            self._at_barrier.add(thread)
        try:
            return work(*args) if self.observer is None else self.observer.do(work, line, given, args)
        except Exception as error:
            if not self._defers:
                raise
            self._record(error)
            return _zeros(results)
        finally:
            self._at_barrier.discard(thread)
            self._events += 1

    def wait(self, semaphore: Any, value: int, core: int, **options: Any) -> None:
        """A device waits for a semaphore."""
        line = self._lines.get(threading.get_ident())
        self._waits[core] = _Wait(semaphore, int(value), core, line, bool(options.get("has_tasks")))
        try:
            checked = getattr(semaphore, "wait_unwatched", None)
            if checked is None:
                _wait(semaphore, value, core, **options)
            else:
                checked(value, core, **options)
        finally:
            self._waits.pop(core, None)

    def _record(self, error: Exception) -> None:
        memory = interpret_pallas_call._shared_memory
        first = error if memory is None else memory._failure or error
        if self.failure is None or (_follows(self.failure) and not _follows(first)):
            self.failure = first
        if memory is not None:  # let go those that wait for this device
            memory.barrier.abort()
            memory.clean_up_barrier.abort()

    # -- the watching thread --------------------------------------------------------------------------

    def _look(self) -> None:
        seen, quiet = -1, 0.0
        while not self._done.wait(_SECONDS):
            memory = interpret_pallas_call._shared_memory
            if memory is None:
                continue
            failed = memory._failure
            if failed is not None:
                if self._defers:
                    self._record(failed)
                continue
            quiet = quiet + _SECONDS if self._events == seen else 0.0
            seen = self._events
            if quiet >= 2 * _SECONDS:
                self._end_deadlock(memory, quiet)

    def _end_deadlock(self, memory: Any, quiet: float) -> None:
        waits = sorted(self._waits.copy().values(), key=lambda wait: wait.core)
        elsewhere = memory.num_cores - len(waits)
        at_barrier = len(self._at_barrier) * memory.num_cores_per_device
        if not waits or any(wait.can_end() for wait in waits):
            return
        if elsewhere > at_barrier and quiet < _SILENCE:
            return
        places = "; ".join(wait.described() for wait in waits)
        ended = f"; {elsewhere} past the kernel's end" if elsewhere else ""
        self.failure = KernelDeadlock(
            f"a kernel waits for ever, for signals that no device will send: {places}{ended}. Each wait "
            f"needs as much signalled to its semaphore, by this device or another"
        )
        self.failure.waits = tuple(wait.told() for wait in waits)
        if self.observer is not None:
            self.observer.deadlocked(self.failure)
        memory.set_failed(self.failure, top_level=False)


class _Wait:
    """A device that waits for a semaphore."""

    def __init__(self, semaphore: Any, value: int, core: int, line: Any, is_copy: bool) -> None:
        self.core = core
        self._semaphore = semaphore
        self._value = value
        self._line = line
        self._is_copy = is_copy

    def can_end(self) -> bool:
        """Whether there is enough, or a copy is still to be made that signals it."""
        semaphore = self._semaphore
        with semaphore.cv:
            return semaphore.count_by_core[self.core] >= self._value or bool(semaphore.tasks[self.core])

    def told(self) -> Waiting:
        """As a value."""
        has = int(self._semaphore.count_by_core[self.core])
        device = self.core // self._semaphore.shared_memory.num_cores_per_device
        return Waiting(device, self._semaphore.id, self._value, has, self._is_copy, self._line)

    def described(self) -> str:
        """In words."""
        place = "" if self._line is None else f" at {source_info_util.summarize(self._line)}"
        unit = " bytes of a copy" if self._is_copy else ""
        has = int(self._semaphore.count_by_core[self.core])
        number = self._semaphore.id
        return f"device {self.core} waits for {self._value}{unit} of semaphore {number}{place}, has {has}"


def _follows(error: Exception) -> bool:
    """Whether a device raised it because another one had failed."""
    return isinstance(error, threading.BrokenBarrierError | AssertionError) or str(error).startswith(
        "Computation failed on device"
    )


def _zeros(results: Any) -> Any:
    return jax.tree.map(lambda result: np.zeros(result.shape, result.dtype), results)


# In the interpreter's place -------------------------------------------------------------------------

_wait = shared_memory.Semaphore.wait


@functools.cache
def _set_up() -> None:
    """Once per process: callbacks and waits of the interpreter go through the watch that is on."""

    def wait(self: Any, value: int, core: int, **options: Any) -> None:
        watch = _current
        if watch is None:
            _wait(self, value, core, **options)
        else:
            watch.wait(self, value, int(core), **options)

    shared_memory.Semaphore.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
    interpret_pallas_call.callback = _Callbacks()  # type: ignore[assignment]


def current_run() -> Run | None:
    """How the checked program that runs now is run; None if none is."""
    observer = None if _current is None else _current.observer
    return None if observer is None else observer.run


_marks: Callable[[tuple[Any, ...]], Given | None] | None = None


def use_marks(marks: Callable[[tuple[Any, ...]], Given | None] | None) -> None:
    """Let a function say what memory holds that is allocated by a callback with these (traced) arguments."""
    global _marks
    _marks = marks


class _Callbacks:
    """JAX's module `callback`, as the interpreter sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(callback, name)

    def io_callback(self, work: Callable[..., Any], results: Any, *args: Any, **options: Any) -> Any:
        line = source_info_util.current()  # that of the operation which is being interpreted
        given = None if _marks is None else _marks(args)

        def watched_work(*values: Any) -> Any:
            watch = _current
            return work(*values) if watch is None else watch.run(work, results, line, given, values)

        return callback.io_callback(watched_work, results, *args, **options)

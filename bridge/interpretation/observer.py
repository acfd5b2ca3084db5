"""Watches one checked run of a program in JAX's TPU interpreter, and notes what is wrong.

`interpreter_watch` hands it each callback of the interpreter; `checked_memory` tells what happens in memory.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from bridge.interpretation.checked_memory import (
    CheckedCopy,
    CheckedMemory,
    CheckedSemaphore,
    OutOfBounds,
    name_of_semaphore,
)
from bridge.interpretation.happens_before import Access
from bridge.interpretation.shadows import Given
from bridge.interpretation.signs import DEVICE, Kernel, Kind, Load, Observed, Run, Sign

if TYPE_CHECKING:
    from bridge.interpretation.interpreter_watch import KernelDeadlock

Role = Literal["start", "run", "load", "signal", "talk", "check", ""]

_ROLES: dict[str, Role] = {
    "_initialize_shared_memory": "start",
    "_update_clocks_for_device_barrier": "run",  # all is allocated, and the body comes next
    "_validate": "check",
    "semaphore_signal": "signal",
    "semaphore_wait": "talk",
    "dma_start": "talk",
    "dma_wait": "talk",
}
"""What the interpreter's callbacks are to the observer, by their names."""

_DAWDLES = 0.25
"""How often a rank lets others go first, where a seed asks for it."""
_SECONDS = 0.002


@dataclass
class _Call:
    """The callback that a thread is in."""

    role: Role = ""
    line: str = ""
    device: int = 0
    given: Given | None = None
    copy: CheckedCopy | None = None
    part: str = ""
    failed_at: str = ""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.call = _Call()


class Observer:
    """What is seen in one run.

    Attributes:
        run: how the program is run.
        observed: what was seen so far.
        kernel: the one that runs now.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.observed = Observed()
        self.kernel = Kernel("a kernel", "")
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._steps: Counter[int] = Counter()

    @property
    def call(self) -> _Call:
        """The callback that this thread is in."""
        return self._thread.call

    def line_of(self, source: Any = None) -> str:
        """A source line of the interpreter as "file:line"; without one, that of this thread's callback."""
        copy = self.call.copy
        return place(source) or (self.call.line if copy is None else copy.line)

    # -- callbacks ------------------------------------------------------------------------------------

    def do(self, work: Callable[..., Any], line: Any, given: Given | None, args: tuple[Any, ...]) -> Any:
        """A callback of the interpreter."""
        role = _role(work)
        if role == "start":
            return self._start(work, args)
        self._thread.call = call = _Call(role, place(line), _device(args), given)
        try:
            if role == "run":
                self._meet(call.device)
            elif role == "check":
                return args[0]  # it would print; see `look_at_the_end`
            elif role in ("signal", "talk"):
                self._dawdle(call)
                if role == "signal":
                    self._check_signal(call, args)
            return work(*args)
        except Exception as error:
            self._failed(error, call)
            raise
        finally:
            self._thread.call = _Call()

    def _start(self, work: Any, args: tuple[Any, ...]) -> Any:
        token = work(*args)
        with self._lock:
            memory: Any = interpret_pallas_call._shared_memory
            if memory is not None and type(memory) is not CheckedMemory:
                self.kernel = getattr(work.keywords["interpret_params"], "kernel", self.kernel)
                self._running = set()
                self.observed.launches[self.kernel.name] += 1
                memory.__class__ = CheckedMemory
                memory.adopt(self)
        return token

    def _meet(self, device: int) -> None:
        """Let no device begin before all have their memory: what relies on luck is found by clocks, and the
        program goes on."""
        memory = interpret_pallas_call._shared_memory
        assert memory is not None
        with self._lock:
            first = device not in self._running
            self._running.add(device)
        if first and memory.num_devices > 1 and self.kernel.makes_own_barrier:
            memory.barrier.wait()

    def _dawdle(self, call: _Call) -> None:
        memory = interpret_pallas_call._shared_memory
        if self.run.seed and memory is not None and memory.num_devices > 1:
            self._steps[call.device] += 1
            chance = random.Random(hash((self.run.seed, call.device, self._steps[call.device])))
            if chance.random() < _DAWDLES:
                time.sleep(_SECONDS * chance.random())

    def _check_signal(self, call: _Call, args: tuple[Any, ...]) -> None:
        _, device, core, semaphore, _, target, target_core, *_ = args
        memory = interpret_pallas_call._shared_memory
        assert isinstance(memory, CheckedMemory)
        if target is None or int(target) == int(device) or int(semaphore) in memory.fixed_id_sem:
            return
        own = memory.get_global_core_id(int(device), int(core))
        there = memory.get_global_core_id(int(target), 0 if target_core is None else int(target_core))
        memory.check_entered(memory.clocks[own], int(device), int(target), there, call.line)

    @contextlib.contextmanager
    def copying(self, copy: CheckedCopy, part: str) -> Iterator[None]:
        """While a copy reads or writes, in whichever thread that happens."""
        call = self.call
        before = call.copy, call.part
        call.copy, call.part = copy, part
        try:
            yield
        except Exception:
            call.failed_at = copy.line
            raise
        finally:
            call.copy, call.part = before

    # -- what is wrong --------------------------------------------------------------------------------

    def _failed(self, error: Exception, call: _Call) -> None:
        """A callback raised."""
        if isinstance(error, OutOfBounds):
            kind: Kind = "out_of_bounds_write" if error.writes else "out_of_bounds_read"
        elif isinstance(error, threading.BrokenBarrierError) or str(error).startswith(
            "Computation failed on device"
        ):
            return  # because another device failed
        else:
            kind = "error"
        text = str(error) if isinstance(error, OutOfBounds) else f"{type(error).__name__}: {error}"
        text = text.rstrip(" .")
        self._tell(kind, (call.device,), call.failed_at or call.line, f"{text}.")

    def deadlocked(self, error: KernelDeadlock) -> None:
        """The kernel was ended because all devices wait."""
        lines = [place(wait.line) for wait in error.waits]
        described = []
        for wait, line in zip(error.waits, lines, strict=True):
            name = name_of_semaphore(self.kernel, wait.semaphore)
            unit = " bytes of a copy" if wait.is_copy else ""
            described.append(
                f"{DEVICE} waits at {line} for {wait.value}{unit} of {name}, which has {wait.count}"
            )
        devices = tuple(wait.device for wait in error.waits)
        text = "Nobody will send the signals that are waited for: " + "; ".join(described) + "."
        self._tell("deadlock", devices, lines[0] if lines else "", text)

    def raced(self, new: Access, old: Access, buffer: str, device: int) -> None:
        """Two accesses to the same memory have no order."""
        new, old = sorted((new, old), key=lambda access: (not access.writes, access.line))
        text = f"Nothing orders {new.described()} and {old.described()}: both touch {buffer} of {DEVICE}."
        self._tell("race", (new.actor.device, old.actor.device, device), new.line, text, old.line)

    def missing_barrier(self, device: int, target: int, line: str) -> None:
        """A device reaches into another one that may not be in the kernel yet."""
        where = f"memory or a semaphore of {DEVICE}"
        text = f"{DEVICE} writes to {where}, and can't know that it has entered the kernel."
        self._tell("missing_barrier", (device, target), line, text)

    def loaded(self, device: int, what: str, padding: bool) -> None:
        """The kernel loaded what nobody wrote."""
        with self._lock:
            self.observed.loads[Load(self.kernel, device, self.call.line, what, padding)] = None

    def look_at_the_end(self, memory: CheckedMemory) -> None:
        """All devices are at the kernel's end: what is left?"""
        unwaited: dict[tuple[int, str], int] = {}
        left: dict[tuple[int, int], list[Any]] = {}
        copies = {copy.id: copy for copy in memory.copies}
        for number, semaphore in {**memory.sem, **memory.fixed_id_sem}.items():
            assert isinstance(semaphore, CheckedSemaphore)
            for core, arrivals in enumerate(semaphore.arrivals):
                for arrival in arrivals:
                    copy, part, line, device = arrival.origin
                    if copy is not None:
                        unwaited[copy.id, part] = core
                    else:
                        left.setdefault((number, core), []).append((line, device))
                for task in semaphore.tasks[core]:
                    copy = task.__self__  # type: ignore[attr-defined]  # a method of a copy
                    part = "send" if task.__name__ == "execute_read" else "receive"
                    if not (copy.was_sent if part == "send" else copy.has_come):
                        unwaited[copy.id, part] = core
        for (copy_id, part), core in unwaited.items():
            self._unwaited(memory, copies[copy_id], part, core // memory.num_cores_per_device)
        for (number, core), origins in left.items():
            count = int({**memory.sem, **memory.fixed_id_sem}[number].count_by_core[core])
            device = core // memory.num_cores_per_device
            line, sender = origins[-1]
            text = (
                f"At the end of the kernel {memory.name_of_semaphore(number)} of {DEVICE} has {count} left: "
                f"{DEVICE} signals it at {line}, and nobody waits for that."
            )
            self._tell("semaphore_left", (device, sender), line, text)

    def _unwaited(self, memory: CheckedMemory, copy: Any, part: str, device: int) -> None:
        line = copy.line
        local = copy.src_sem is None
        semaphore = copy.src_sem if part == "send" else copy.dst_sem
        name = memory.name_of_semaphore(semaphore.id)
        which = "" if local else f" {part}"
        what = f"the copy that {DEVICE} starts at {line}"
        text = f"{DEVICE} does not wait for {what}: its{which} semaphore is {name}."
        self._tell("dma_not_waited", (device, copy.src_device_id), line, text)

    def _tell(self, kind: Kind, devices: tuple[int, ...], line: str, text: str, other: str = "") -> None:
        with self._lock:
            sign = Sign(kind, self.kernel, devices, line or self.kernel.line, text, other)
            self.observed.signs[sign] = None


def _role(work: Any) -> Role:
    if isinstance(work, functools.partial):
        name = getattr(work.func, "__name__", "")
        if name == "get" and "source_info" in work.keywords:
            return "load"
    else:
        name = getattr(work, "__name__", "")
    return _ROLES.get(name, "")


def _device(args: tuple[Any, ...]) -> int:
    """The device that a callback is for: its second argument, after the token."""
    try:
        return int(args[1])
    except (IndexError, TypeError, ValueError):
        return 0


def place(source: Any) -> str:
    """A source line of JAX's as "file:line"; empty if it is not known."""
    return "" if source is None else _place(source.traceback)


@functools.lru_cache(maxsize=4096)
def _place(traceback: Any) -> str:
    frame = source_info_util.user_frame(traceback)
    return "" if frame is None else f"{frame.file_name}:{frame.start_line}"

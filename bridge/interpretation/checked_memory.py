"""The simulated memory of JAX's TPU interpreter, with checks.

`CheckedMemory`, `CheckedSemaphore` and `CheckedCopy` take the place of the interpreter's own classes while a
checked program runs. They tell an `Observer` what is wrong, and otherwise do what the interpreter does.

Like `interpreter_watch`, this knows private names of the interpreter.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call, shared_memory
from jax._src.pallas.mosaic.interpret import vector_clock as clocks

from bridge.interpretation import shadows
from bridge.interpretation.happens_before import Access, Actor, Arrivals, Races
from bridge.interpretation.shadows import PADDING, UNWRITTEN, WRITTEN

if TYPE_CHECKING:
    from bridge.interpretation.observer import Observer

COMPONENTS_OF_COPIES = 256
"""Places in clocks for copies. With more copies in a kernel some share one, and a race may go unseen."""

_FIRST_COPY = 1_000_000  # numbers of copies are not those of devices
_FIRST_BUFFER, _FIRST_SEMAPHORE = 100, 2000  # as the interpreter numbers them


class OutOfBounds(IndexError, ValueError):
    """A kernel read or wrote outside of an array. The interpreter by itself raises the one or the other."""

    def __init__(self, text: str, writes: bool) -> None:
        super().__init__(text)
        self.writes = writes


class CheckedMemory(shared_memory.SharedMemory):
    """The memory of all devices during one launch of a kernel."""

    observer: Observer

    def adopt(self, observer: Observer) -> None:
        """Start to check. The interpreter has made the memory, and nobody has used it yet."""
        self.observer = observer
        self.dma_execution_mode = observer.run.copies
        self.copies: list[CheckedCopy] = []
        self.copy_ids = threading.local()
        self.shuffle = random.Random(observer.run.seed) if observer.run.seed else None
        self.shadow_of: dict[Any, np.ndarray] = {}
        self.carried: dict[int, np.ndarray] = {}
        """By core: the shadow of a block that the interpreter moves, between its reading and writing."""
        self.clean_up_barrier = threading.Barrier(self.num_devices, action=self._end)
        interpret_pallas_call.races = Races(  # type: ignore[assignment]
            self._raced, self._actor, observer.line_of, lambda: self.num_cores == 1 and not self.copies
        )
        interpret_pallas_call.dma_id_counter = self  # type: ignore[assignment]  # it asks for `get_next`

    def _end(self) -> None:
        """All devices have come to the end."""
        if self._failure is None:
            self.observer.look_at_the_end(self)
        interpret_pallas_call._clear_shared_memory()

    # -- names --------------------------------------------------------------------------------------

    def name_of_buffer(self, key: tuple[str, int, int, int]) -> str:
        """The buffer's name in the kernel."""
        names, index = self.observer.kernel.buffers, key[1] - _FIRST_BUFFER
        if index < len(names):
            return names[index]
        return f"a buffer in {key[0]}{' of run_scoped' if names else ''}"

    def name_of_semaphore(self, number: int) -> str:
        """The semaphore's name in the kernel."""
        return name_of_semaphore(self.observer.kernel, number)

    # -- copies -------------------------------------------------------------------------------------

    def get_next(self) -> int:
        """The number of a new copy."""
        with self.lock:
            self.copy_ids.last = number = _FIRST_COPY + len(self.copies)
            self.copies.append(None)  # type: ignore[arg-type]  # its place, until it is made
        return number

    def get_random_virtual_device_id(self) -> int:
        """The place in clocks of the copy that this thread makes. In turns: at random, two soon share one."""
        return self._component(self.copy_ids.last)

    def _component(self, number: int) -> int:
        return self.num_cores + (number - _FIRST_COPY) % COMPONENTS_OF_COPIES

    def made(self, copy: CheckedCopy) -> None:
        """A copy starts."""
        self.copies[copy.id - _FIRST_COPY] = copy
        copy.line = self.observer.line_of(copy.source_info)
        here, there = copy.src_device_id, copy.dst_device_id
        if here != there and copy.clock is not None:
            core = self.get_global_core_id(there, copy.dst_local_core_id)
            self.check_entered(copy.clock, here, there, core, copy.line)

    def check_entered(self, clock: Any, device: int, target: int, target_core: int, line: str) -> None:
        """Whether a device may write to another one's memory: it must know that it has entered the kernel."""
        if self.observer.kernel.makes_own_barrier and not clock[target_core]:
            self.observer.missing_barrier(device, target, line)

    # -- races --------------------------------------------------------------------------------------

    def _actor(self, device: int, core: int) -> Actor:
        if device < _FIRST_COPY:
            return Actor(self.get_global_core_id(device, core), device, False)
        return Actor(self._component(device), self.copies[device - _FIRST_COPY].src_device_id, True)

    def _raced(self, new: Access, old: Access, key: Any) -> None:
        self.observer.raced(new, old, self.name_of_buffer(key), key[2])

    # -- what the interpreter calls -------------------------------------------------------------------

    def allocate_buffer(
        self,
        key: Any,
        ref_count: int,
        value: np.ndarray,
        logical_shape: tuple[int, ...] | None = None,
        logging_info: Any = None,
    ) -> None:
        """See `SharedMemory`."""
        shape = value.shape if logical_shape is None else logical_shape
        given = self.observer.call.given or shadows.Given(shape, written=True)
        shadow = shadows.new_shadow(value.shape, given)
        if self.observer.run.fill == "numbers" and shadow.any():
            value = value.copy()
            shadows.fill_with_numbers(value, shadow)
        with self.lock:
            self.shadow_of.setdefault(key, shadow)
        super().allocate_buffer(key, ref_count, value, logical_shape, logging_info)

    def get_buffer_content(self, key: Any, rnge: Any, global_core_id: int, *args: Any, **options: Any) -> Any:
        """See `SharedMemory`."""
        buffer: Any = self.mem[key]
        at = self._checked(key, rnge, buffer, writes=False)
        found = super().get_buffer_content(key, rnge, global_core_id, *args, **options)
        inside = shadows.clipped(at, buffer.shape)
        if inside is not None:
            states = self.shadow_of[key][inside].copy()
            call = self.observer.call
            if call.copy is not None:
                call.copy.states = states
            elif call.role == "load":
                self._loaded(key, at, states)
            else:
                self.carried[global_core_id] = states
        return found

    def store_buffer_content(
        self, key: Any, rnge: Any, value: np.ndarray, global_core_id: int, *args: Any, **options: Any
    ) -> Any:
        """See `SharedMemory`."""
        buffer: Any = self.mem[key]
        at = self._checked(key, rnge, buffer, writes=True)
        copy = self.observer.call.copy
        states = self.carried.pop(global_core_id, WRITTEN) if copy is None else copy.states
        found = super().store_buffer_content(key, rnge, value, global_core_id, *args, **options)
        shadows.mark(self.shadow_of[key], at, buffer.logical_shape, states)
        return found

    def swap_buffer_content(
        self,
        key: Any,
        rnge: Any,
        value: np.ndarray,
        mask: Any,
        global_core_id: int,
        *args: Any,
        **options: Any,
    ) -> Any:
        """See `SharedMemory`."""
        buffer: Any = self.mem[key]
        at = shadows.whole(rnge, buffer.logical_shape)
        if mask is None:
            self._checked(key, rnge, buffer, writes=True)
        found = super().swap_buffer_content(key, rnge, value, mask, global_core_id, *args, **options)
        if found[0] is not None:
            shadow = self.shadow_of[key]
            states: Any = WRITTEN
            inside = shadows.clipped(at, buffer.logical_shape)
            if mask is not None and inside is not None:
                before = shadow[inside]
                states = np.where(mask[tuple(map(slice, before.shape))], np.uint8(WRITTEN), before)
            shadows.mark(shadow, at, buffer.logical_shape, states)
        elif mask is not None:
            raise self._out_of_bounds(key, at, buffer, writes=True)
        return found

    def deallocate_buffer(self, key: Any, logging_info: Any = None) -> None:
        """See `SharedMemory`."""
        super().deallocate_buffer(key, logging_info)
        if key not in self.mem:
            self.shadow_of.pop(key, None)

    def allocate_semaphores(self, key: Any, num_semaphores: int) -> int:
        """See `SharedMemory`."""
        first = super().allocate_semaphores(key, num_semaphores)
        with self.lock:
            for number in range(first, first + num_semaphores):
                _check_semaphore(self.sem[number])
        return first

    def guarantee_semaphore_with_fixed_id(self, semaphore_id: int) -> None:
        """See `SharedMemory`."""
        super().guarantee_semaphore_with_fixed_id(semaphore_id)
        with self.lock:
            _check_semaphore(self.fixed_id_sem[semaphore_id])

    # -- helpers ------------------------------------------------------------------------------------

    def _checked(self, key: Any, rnge: Any, buffer: Any, writes: bool) -> tuple[slice | int, ...]:
        at = shadows.whole(rnge, buffer.logical_shape)
        if shadows.leaves(at, buffer.shape):
            raise self._out_of_bounds(key, at, buffer, writes)
        return at

    def _out_of_bounds(self, key: Any, at: Any, buffer: Any, writes: bool) -> OutOfBounds:
        shape = tuple(buffer.logical_shape)
        padded = f", with padding {tuple(buffer.shape)}" if tuple(buffer.shape) != shape else ""
        verb = "write to" if writes else "read of"
        what = f"{self.name_of_buffer(key)}[{shadows.in_words(at)}]"
        return OutOfBounds(f"Out-of-bounds {verb} {what}, whose shape is {shape}{padded}", writes)

    def _loaded(self, key: Any, at: Any, states: np.ndarray) -> None:
        what = f"{self.name_of_buffer(key)}[{shadows.in_words(at)}]"
        if (states == UNWRITTEN).any():
            self.observer.loaded(key[2], what, padding=False)
        elif (states == PADDING).any():
            self.observer.loaded(key[2], what, padding=True)


class CheckedSemaphore(shared_memory.Semaphore):
    """A semaphore that knows who signalled it."""

    shared_memory: CheckedMemory

    def adopt(self) -> None:
        """Start to check."""
        self.arrivals = [Arrivals() for _ in range(self.num_cores)]

    def enqueue_task(self, task: Any, global_core_id: int) -> None:
        """See `Semaphore`. The last of the tasks is done first."""
        shuffle = self.shared_memory.shuffle
        with self.cv:
            tasks = self.tasks[global_core_id]
            tasks.insert(len(tasks) if shuffle is None else shuffle.randint(0, len(tasks)), task)
            self.cv.notify_all()

    def signal(self, inc: Any, global_core_id: Any, clock: Any, logging_info: Any = None) -> None:
        """See `Semaphore`."""
        core = int(global_core_id)
        call = self.shared_memory.observer.call
        origin = (call.copy, call.part, call.line, call.device)
        with self.cv:
            self.arrivals[core].come(int(inc), clock, origin)
            self.count_by_core[core] += inc
            self.cv.notify_all()

    def wait_unwatched(self, value: Any, global_core_id: Any, **options: Any) -> None:
        """What `Semaphore.wait` does."""
        core, value = int(global_core_id), int(value)
        memory = self.shared_memory
        while True:
            memory.check_failed()
            task = None
            with self.cv:
                if self.count_by_core[core] >= value:
                    self.count_by_core[core] -= value
                    learned = self.arrivals[core].use(value)
                    break
                if self.tasks[core]:
                    task = self.tasks[core].pop()
                else:
                    self.cv.wait(timeout=0.1)  # and look whether something failed
            if task is not None:
                task()
        if learned is not None:
            with memory.lock:
                clocks.update_vector_clock(memory.clocks[core], learned)


def _check_semaphore(semaphore: Any) -> None:
    if type(semaphore) is shared_memory.Semaphore:
        checked: Any = semaphore
        checked.__class__ = CheckedSemaphore
        checked.adopt()


class CheckedCopy(interpret_pallas_call.DMA):
    """A copy from one buffer to another."""

    states: Any = WRITTEN
    line = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        memory = interpret_pallas_call._shared_memory
        if isinstance(memory, CheckedMemory):
            memory.made(self)

    def execute_read(self) -> None:
        """See `DMA`."""
        with self._told("send"):
            super().execute_read()

    def execute_write(self) -> None:
        """See `DMA`."""
        with self._told("receive"):
            super().execute_write()

    def _told(self, part: str) -> Any:
        memory = interpret_pallas_call._shared_memory
        assert isinstance(memory, CheckedMemory)
        return memory.observer.copying(self, part)

    @property
    def was_sent(self) -> bool:
        """Whether it has read its source."""
        return self.state is not interpret_pallas_call.DmaState.STARTED

    @property
    def has_come(self) -> bool:
        """Whether it has written its target."""
        return self.state is interpret_pallas_call.DmaState.COMPLETED


def name_of_semaphore(kernel: Any, number: int) -> str:
    """The name in the kernel of the semaphore that has a number in the interpreter."""
    if number == kernel.collective_id:
        return f"the barrier semaphore (collective_id {number})"
    names, index = kernel.semaphores, number - _FIRST_SEMAPHORE
    if index < len(names):
        return names[index]
    where = " of run_scoped" if kernel.buffers else ""
    return f"semaphore {index - len(names)}{where}"

"""Keeps time while a schedule runs: copies share the HBM channel, waits stall until they arrived.

The time of the schedule itself is issue cycles. A wait adds a stall, which delays everything after it; copies
go on meanwhile. A copy of n bytes occupies the channel for n / bandwidth and arrives a latency later. Copies
to other devices, and what those send, go through `ranks.Ranks`, where the machines of all devices meet.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from autotune.schedule.core import Core
from autotune.schedule.errors import DumpError, RunawayError
from autotune.schedule.network import Link
from autotune.schedule.ranks import FAR_COPY, Ranks
from autotune.schedule.records import (
    LOCAL,
    ONLY_CORE,
    READ,
    RECEIVED,
    REMOTE,
    STALLS,
    WRITE,
    Copies,
    Identity,
    Rates,
    Span,
)
from autotune.schedule.scalar import Function
from autotune.schedule.semaphores import Arrival, Semaphore
from autotune.schedule.statements import FRAME_BITS, SEMAPHORE_BITS
from autotune.schedule.values import Unknown, Value

RECEIVING = 0x3 << 13
"""Bits beside the number of the semaphore that a copy to another device signals there: core, and a mark."""

SENDING = 0x3 << 16
"""Marks beside the number of the semaphore that it signals here. The first one says that both semaphores
count copies, not granules."""

COUNTS_COPIES = 1 << 16

LOOP_TRIPS_LIMIT = 5_000_000
"""Backward branches after which a run is given up: a loop bound is wrong, or the grid too large."""


class Machine(Core):
    """One core running a program, and its time. `scalar.Function.execute` calls the public methods.

    Args:
        rates: speed of copies.
        functions, operands, operand_bases, identity, ranks: as of `Core`.
        estimates: cycles of functions that are not executed.
    """

    def __init__(
        self,
        rates: Rates,
        functions: Mapping[str, Function],
        operands: Mapping[str, Sequence[np.ndarray | None]],
        operand_bases: Mapping[str, Mapping[int, int]],
        identity: Identity = ONLY_CORE,
        estimates: Mapping[str, float] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(functions, operands, operand_bases, identity, ranks)
        self.rates = rates
        self.ready = 0.0
        self.blocked = ""
        self.blocked_at = 0.0
        self.released = False
        self.calls: Counter[str] = Counter()
        self.spans: list[Span] = []
        self.copies = Copies()
        self.stalls = (array("d"), array("d"))
        self.stalled_on = [0.0] * len(STALLS)
        self.link_cycles: defaultdict[str, defaultdict[Link, float]] = defaultdict(lambda: defaultdict(float))
        self._estimates = estimates or {}
        self._number = {name: number for number, name in enumerate(functions)}
        self._semaphores: defaultdict[str, defaultdict[int, Semaphore]] = defaultdict(
            lambda: defaultdict(Semaphore)
        )
        self._channel_free = 0.0
        self._stall = 0.0
        self._trips = 0

    # Running functions ----------------------------------------------------------------------------

    def run(self, program: str) -> float:
        """Run `program`, of one device, from the beginning; returns the cycles it took."""
        steps = self.steps(program)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def steps(self, program: str) -> Generator[None, None, float]:
        """The same, yielding where other cores of the program must go on first."""
        end = yield from self._execute(program, (), 0)
        return end + self._stall

    def call(
        self, name: str | None, time: int, start: int, arguments: tuple[Value, ...]
    ) -> Generator[None, None, int]:
        """Run a callee from `start` on; returns `time` of the caller, later by as much."""
        if name is None or name.startswith("<late-"):  # traces and the runtime's own work: not the program's
            return time
        if name in self._estimates:
            self.calls[name] += 1
            before, begin = self._stalled(), start + self._stall
            together = yield from self._meet(name, begin)
            end = start if together else start + round(self._estimates[name])
            self._span(name, begin, end, before)
            return time + end - start
        if name not in self._functions:
            self.note(f"calls {name}, of which there is no dump")
            return time
        end = yield from self._execute(name, arguments, start)
        return time + end - start

    def _meet(self, name: str, now: float) -> Generator[None, None, bool]:
        """Wait for the other devices, and then for the end of a collective operation; False if it is none.

        All of its time is time that other devices take.
        """
        meeting = self.ranks.join(name, self.calls[name], self, now) if self.ranks else None
        if meeting is None:
            return False
        while not meeting.complete and not self._given_up():
            self._block(f"for the other devices in {name}", now)
            yield
        begin = max(now, *meeting.arrivals.values())
        self._stall_until(now, begin + self._estimates[name], REMOTE)
        return True

    def _execute(self, name: str, arguments: tuple[Value, ...], start: int) -> Generator[None, None, int]:
        function = self._functions[name]
        before = self._stalled()
        sources, self._sources = self._sources, {}
        values = self._bind(function, arguments)
        self._stack.append(name)
        self.calls[name] += 1
        frame = abs(len(self._stack) - 2)  # of functions that the program calls: 0
        try:
            end = yield from function.execute(self, frame << FRAME_BITS, values, self.counts[name], start)
        except TypeError as error:
            raise DumpError(f"{name}: the code is not of the known form: {error}") from error
        self._stack.pop()
        self._sources = sources
        for address in [address for address in self.memory if address >> FRAME_BITS == frame]:
            del self.memory[address]
        for semaphore in self._semaphores[name].values():
            semaphore.forget_local()
        self._span(name, start + before[0], end, before)
        return end

    def _stalled(self) -> tuple[float, float]:
        """Cycles stalled until now, and those of them on other devices."""
        return self._stall, self.stalled_on[REMOTE]

    def _span(self, name: str, begin: float, end: int, before: tuple[float, float]) -> None:
        stalled, on_others = (now - then for now, then in zip(self._stalled(), before, strict=True))
        self.spans.append(Span(name, begin, end + self._stall, stalled, on_others))

    def count_loop_trip(self) -> None:
        """A backward branch was taken. Raises `RunawayError` when there were too many."""
        self._trips += 1
        if self._trips > LOOP_TRIPS_LIMIT:
            raise RunawayError

    # Copies and waits -----------------------------------------------------------------------------
    #
    # They answer True if other cores must go on first, and have done nothing then.

    def copy(
        self,
        time: int,
        source: str,
        destination: str,
        source_address: Value,
        destination_address: Value,
        granules: Value,
        semaphore: Value,
        predicate: Value,
        overrides: Value = 0,
        sent: Value = 0,
    ) -> bool:
        """Start a copy. Its size is in granules; it signals `semaphore` with as many.

        `overrides` says what is unusual about it, such as that it goes to another device. Then `sent` is the
        semaphore of this core that is signalled when all is sent.
        """
        now = time + self._stall
        if self.ranks is not None and self.ranks.too_early(self, now):
            return True
        doing = f"a copy from {source} to {destination}"
        size = self._known(granules, f"the size of {doing}")
        flag = self._known(semaphore, f"the semaphore of {doing}")
        if size is None or flag is None or not self._happens(predicate, f"the start of {doing}"):
            return False
        nbytes = size * self.rates.granule_bytes
        to = self._known(overrides, f"the device that gets {doing}")
        if to is None:
            return False
        if self.ranks and self.ranks.is_far(to):
            self._copy_far(now, source, destination, nbytes, size, flag, to, sent)
            return False
        if to & FAR_COPY:
            self.note(f"{doing} of another core or chip, and no mesh says where that is")
            return False
        if destination == "smem":
            self._fill_smem(source, source_address, destination_address, nbytes)
        self._copy_here(now, source, destination, nbytes, size, flag)
        return False

    def _copy_here(
        self, now: float, source: str, destination: str, nbytes: int, size: int, flag: int
    ) -> float:
        """A copy within the device; returns when the channel is done with it."""
        kind = READ if source == "hbm" else WRITE if destination == "hbm" else LOCAL
        if kind == LOCAL:
            begin, end = now, now + nbytes / self.rates.bytes_per_cycle
        else:
            begin, end = self.occupy_channel(now, nbytes)
        self.record(begin, end, nbytes, kind)
        self._semaphore(flag).arrive(Arrival(end + self.rates.latency_cycles, size, kind))
        return end

    def _copy_far(
        self,
        now: float,
        source: str,
        destination: str,
        nbytes: int,
        size: int,
        flag: int,
        to: int,
        sent: Value,
    ) -> None:
        """A copy to another device: HBM at either end and the links between are busy; both ends are told."""
        assert self.ranks
        own = self._known(sent, "the semaphore that says that a copy is sent")
        target = self.ranks.receiver(to, flag)
        if own is None or target is None:
            self.note("a copy to a device that is not in the mesh")
            return
        if own & COUNTS_COPIES:
            size = 1
        own &= ~SENDING
        if target is self:
            end = self._copy_here(now, source, destination, nbytes, size, flag & ~RECEIVING)
            self._semaphore(own).arrive(Arrival(end + self.rates.latency_cycles, size, LOCAL))
            return
        # HBM streams what the links take, so it delays them only if it is the slower one.
        name, read = self._stack[-1], (now, now)
        if source == "hbm":
            read = self.occupy_channel(now, nbytes)
            self.record(*read, nbytes, READ)
        begin, end = self.ranks.send(self, target, name, now, nbytes)
        self.record(begin, end, nbytes, REMOTE)
        sent_at = max(end, read[1])
        arrival = sent_at + self.ranks.latency(self, target)
        if destination == "hbm":
            written = target.occupy_channel(now, nbytes)
            target.record(*written, nbytes, WRITE, name)
            arrival = max(arrival, written[1])
        target.record(begin, end, nbytes, RECEIVED, name)
        self._semaphore(own).arrive(Arrival(sent_at + self.rates.latency_cycles, size, REMOTE))
        self.ranks.deliver(target, name, flag & ~RECEIVING, Arrival(arrival, size, REMOTE, remote=True))

    def occupy_channel(self, now: float, nbytes: int) -> tuple[float, float]:
        """Take the HBM channel for a copy as soon as it is free: (begin, end)."""
        begin = max(now, self._channel_free)
        self._channel_free = begin + nbytes / self.rates.bytes_per_cycle
        return begin, self._channel_free

    def record(self, begin: float, end: float, nbytes: int, kind: int, owner: str | None = None) -> None:
        """Note a copy of the function that runs, or of `owner`."""
        copies = self.copies
        copies.begin.append(begin)
        copies.end.append(end)
        copies.nbytes.append(nbytes)
        copies.kind.append(kind)
        copies.owner.append(self._number[owner or self._stack[-1]])

    def wait(self, time: int, semaphore: Value, amount: Value, predicate: Value) -> bool:
        """Stall until `semaphore` has received `amount`."""
        flag = self._known(semaphore, "the semaphore of a wait")
        needed = self._known(amount, "the amount of a wait")
        if flag is None or needed is None or not self._happens(predicate, "the condition of a wait"):
            return False
        now = time + self._stall
        cell = self._semaphore(flag)
        missing, ready, kind = cell.reached(needed, now, LOCAL)
        if self.ranks and (missing > 0 or ready > now):
            if missing > 0 and not self._given_up():
                self._block(f"for {self._semaphore_name(flag)}", now)
                return True
            if missing <= 0 and self.ranks.too_early(self, ready):
                return True
        if missing > 0 and not self.ranks:
            self.note(
                "waits for a signal that this core never sends: a copy or signal of another core or chip"
            )
        self._stall_until(now, ready, kind)
        if cell.owed:
            cell.settle(ready)
        return False

    def signal(self, time: int, semaphore: Value, amount: Value, predicate: Value) -> None:
        """Add `amount` to a semaphore; less than zero takes away what a wait has seen, or will."""
        if isinstance(semaphore, Unknown) or isinstance(amount, Unknown) or isinstance(predicate, Unknown):
            return  # the wait that belongs to it has said so
        now = time + self._stall
        if amount >= 0:
            self._semaphore(int(semaphore)).arrive(Arrival(now, int(amount), LOCAL))
        else:
            self._semaphore(int(semaphore)).take(-int(amount), now)

    def signal_far(self, time: int, semaphore: Value, amount: Value, predicate: Value) -> bool:
        """Add `amount` to a semaphore of another core; the address says which."""
        if self.ranks is None:
            return False  # to the other core of the device; the wait that belongs to it says if it matters
        now = time + self._stall
        if self.ranks.too_early(self, now):
            return True
        flag = self._known(semaphore, "the semaphore of a signal")
        count = self._known(amount, "the amount of a signal")
        if flag is None or count is None or not self._happens(predicate, "the condition of a signal"):
            return False
        target = self.ranks.signalled(flag)
        if target is None:
            self.note("a signal to a device that is not in the mesh")
            return False
        arrival = now + self.ranks.latency(self, target)
        signal = Arrival(arrival, count, REMOTE, remote=True)
        self.ranks.deliver(target, self._stack[-1], self.ranks.plain(flag), signal)
        return False

    def receive(self, function: str, flag: int, arrival: Arrival) -> bool:
        """Something another core sends to a semaphore of `function`; False if it is not known which one.

        Where the code knows a semaphore by its number, it must be the one that has no other use.
        """
        if not flag >> SEMAPHORE_BITS:
            fixed = self._functions[function].signalled
            if len(fixed) != 1:
                return False
            flag = fixed[0]
        self._semaphores[function][flag].arrive(arrival)
        return True

    # Time -----------------------------------------------------------------------------------------

    def _semaphore(self, flag: int) -> Semaphore:
        """A semaphore of the function that runs."""
        return self._semaphores[self._stack[-1]][flag]

    def _semaphore_name(self, flag: int) -> str:
        number, offset = divmod(flag, 1 << SEMAPHORE_BITS)
        names = self._functions[self._stack[-1]].semaphores
        name = names.get(flag - offset, f"the semaphore #allocation{number - 1}" if number else "a semaphore")
        return name + (f", number {offset}" if offset else "")

    def _stall_until(self, now: float, ready: float, kind: int) -> None:
        if ready > now:
            self._stall += ready - now
            self.stalled_on[kind] += ready - now
            self.stalls[0].append(now)
            self.stalls[1].append(ready)

    def _block(self, what: str, now: float) -> None:
        """Nothing that is known lets this core go on."""
        self.ready, self.blocked, self.blocked_at = math.inf, what, now

    def _given_up(self) -> bool:
        """Whether nobody can go on, and this core has to without what it waits for. It answers but once."""
        released, self.released = self.released, False
        if released:
            self.note(f"ranks wait for each other: rank {self.rank} waits {self.blocked}, which never comes")
        return released

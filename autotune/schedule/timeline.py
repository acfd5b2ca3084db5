"""Keeps time while a schedule runs: copies share the HBM channel, waits stall until they arrived.

The time of the schedule itself is issue cycles. A wait adds a stall, which delays everything after it; copies
go on meanwhile. A copy of n bytes occupies the channel for n / bandwidth and arrives a latency later.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.schedule.errors import DumpError, RunawayError
from autotune.schedule.scalar import Function
from autotune.schedule.statements import FRAME_BITS
from autotune.schedule.values import Unknown, Value, select, signed

LOOP_TRIPS_LIMIT = 5_000_000
"""Backward branches after which a run is given up: a loop bound is wrong, or the grid too large."""

READ, WRITE, LOCAL = 0, 1, 2
"""Kinds of copies: from HBM, to HBM, and between VMEM and SMEM."""

SMEM_WORD_BYTES = 4

REMOTE_COPY = 1 << 14
"""The bit in the overrides of a copy that those to other chips have, in dumps of v5e and tpu7x."""


@dataclass(frozen=True)
class Rates:
    """What one core gets of the chip, in cycles.

    Attributes:
        bytes_per_cycle: HBM bandwidth that copies reach, of this core's share.
        latency_cycles: from the end of a copy's transfer to the moment a wait sees it.
        granule_bytes: unit in which copies give their size.
    """

    bytes_per_cycle: float
    latency_cycles: float
    granule_bytes: int


@dataclass(frozen=True)
class Span:
    """One call of a function: its name, begin and end in cycles, and the cycles it stalled."""

    name: str
    begin: float
    end: float
    stalled: float


@dataclass
class Copies:
    """Every copy in order of issue: channel time in cycles, bytes, kind, and number of the function."""

    begin: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    nbytes: array[int] = field(default_factory=lambda: array("q"))
    kind: array[int] = field(default_factory=lambda: array("b"))
    owner: array[int] = field(default_factory=lambda: array("l"))


class Machine:
    """One core running a program. `scalar.Function.execute` calls the public methods.

    Args:
        rates: speed of copies.
        functions: what can be called, by name.
        operands: 32-bit words of the operands of a function, by its name; None for one whose values are not
            known. Left out for a function that needs none.
        operand_bases: addresses of the operands and results of each function, by its name.
        core: number of the core.
        estimates: cycles of functions that are not executed.
    """

    def __init__(
        self,
        rates: Rates,
        functions: Mapping[str, Function],
        operands: Mapping[str, Sequence[np.ndarray | None]],
        operand_bases: Mapping[str, Mapping[int, int]],
        core: int = 0,
        estimates: Mapping[str, float] | None = None,
    ) -> None:
        self.rates = rates
        self.core = core
        self.memory: dict[int, Value] = {}
        self.counts = {name: [0] * len(function.blocks) for name, function in functions.items()}
        self.calls: Counter[str] = Counter()
        self.spans: list[Span] = []
        self.copies = Copies()
        self.stalls = (array("d"), array("d"))
        self.stalled_on = [0.0, 0.0, 0.0]
        self.unknowns: dict[str, Counter[str]] = {}
        self._functions = functions
        self._number = {name: number for number, name in enumerate(functions)}
        self._operands = operands
        self._estimates = estimates or {}
        self._operand_bases = operand_bases
        self._sources: dict[tuple[str, int], tuple[int, np.ndarray | None]] = {}
        self._semaphores: dict[int, deque[list[float]]] = {}
        self._channel_free = 0.0
        self._stall = 0.0
        self._trips = 0
        self._stack: list[str] = []

    # Running functions ----------------------------------------------------------------------------

    def run(self, program: str) -> float:
        """Run `program` from the beginning; returns the cycles it took."""
        return self._execute(program, (), 0) + self._stall

    def call(self, name: str | None, time: int, start: int, arguments: tuple[Value, ...]) -> int:
        """Run a callee from `start` on; returns `time` of the caller, later by as much."""
        if name is None or name.startswith("<late-"):  # traces and the runtime's own work: not the program's
            return time
        if name in self._estimates:
            self.calls[name] += 1
            end = start + round(self._estimates[name])
            self.spans.append(Span(name, start + self._stall, end + self._stall, 0.0))
            return time + end - start
        if name not in self._functions:
            self.note(f"calls {name}, of which there is no dump")
            return time
        return time + self._execute(name, arguments, start) - start

    def _execute(self, name: str, arguments: tuple[Value, ...], start: int) -> int:
        function = self._functions[name]
        before = self._stall
        sources, self._sources = self._sources, {}
        values = self._bind(function, arguments)
        self._stack.append(name)
        self.calls[name] += 1
        frame = abs(len(self._stack) - 2)  # of functions that the program calls: 0
        try:
            end = function.execute(self, frame << FRAME_BITS, values, self.counts[name], start)
        except TypeError as error:
            raise DumpError(f"{name}: the code is not of the known form: {error}") from error
        self._stack.pop()
        self._sources = sources
        for cells in (self.memory, self._semaphores):
            for address in [address for address in cells if address >> FRAME_BITS == frame]:
                del cells[address]
        self.spans.append(Span(name, start + before, end + self._stall, self._stall - before))
        return end

    def _bind(self, function: Function, arguments: tuple[Value, ...]) -> list[Value]:
        """Values of the parameters: addresses that do not overlap, and scalars that are given or passed."""
        given = self._operands.get(function.name, ())
        bases = self._operand_bases.get(function.name, {})
        size = max((p.index for p in function.parameters), default=-1) + 1
        values: list[Value] = [Unknown(f"operand {index}") for index in range(size)]
        for parameter in function.parameters:
            index = parameter.index
            words = given[index] if index < len(given) else None
            if parameter.space in ("hbm", "vmem", "smem"):
                values[index] = bases[index]
                if parameter.space == "smem":
                    self._place_in_smem(index, bases[index], words)
                for address in (bases[index], signed(bases[index] << 4)):
                    self._sources[parameter.space, address] = index, words
            elif words is not None:
                values[index] = int(words.reshape(-1)[0])
            elif index < len(arguments) and not isinstance(arguments[index], Unknown):
                values[index] = arguments[index]
            else:
                values[index] = Unknown(f"the value of operand {index}, {parameter.shape}, not given")
        return values

    def _place_in_smem(self, index: int, base: int, words: np.ndarray | None) -> None:
        """An operand that is in SMEM already when the function begins."""
        if words is not None:
            self.memory.update(zip(range(base, base + len(words)), words.tolist(), strict=True))

    # What the code asks ---------------------------------------------------------------------------

    @property
    def empty(self) -> Unknown:
        """What an SMEM cell holds that the program did not write."""
        if len(self._stack) == 1:
            return Unknown("a value that the runtime sets", runtime=True)
        return Unknown("an SMEM cell that nothing wrote")

    def load(self, address: Value) -> Value:
        """The SMEM cell at `address`."""
        return address if isinstance(address, Unknown) else self.memory.get(address, self.empty)

    def store(self, address: Value, value: Value, predicate: Value) -> None:
        """Set the SMEM cell at `address` if `predicate` holds."""
        if isinstance(address, Unknown):
            if not address.runtime:
                self.note(f"stores to SMEM at an address that depends on {address.reason}")
            return
        self.memory[address] = select(predicate, value, self.load(address))

    def decide(self, condition: Unknown, address: int, backward: bool) -> bool:
        """Whether a branch is taken whose condition is unknown: it never is. See `values.doubtful`.

        A backward one closes a loop, and how often a loop runs is never the runtime's affair.
        """
        if backward or not condition.runtime:
            self.note(f"the branch at {address:#x} depends on {condition.reason}")
        return False

    def halt(self, address: int, predicate: Value) -> None:
        """A check that the compiler put in fails, such as the bounds of a copy."""
        if predicate is True:
            self.note(f"the check at {address:#x} fails: a copy out of bounds, so an address is wrong")

    def count_loop_trip(self) -> None:
        """A backward branch was taken. Raises `RunawayError` when there were too many."""
        self._trips += 1
        if self._trips > LOOP_TRIPS_LIMIT:
            raise RunawayError

    def note(self, what: str, address: int | None = None) -> None:
        """Something is not known: the result cannot be trusted."""
        where = "" if address is None else f" at {address:#x}"
        self.unknowns.setdefault(self._stack[-1], Counter())[what + where] += 1

    # Copies and waits -----------------------------------------------------------------------------

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
    ) -> None:
        """Start a copy. Its size is in granules; it signals `semaphore` with as many.

        `overrides` says what is unusual about it, such as that it goes to another chip.
        """
        doing = f"a copy from {source} to {destination}"
        size = self._known(granules, f"the size of {doing}")
        flag = self._known(semaphore, f"the semaphore of {doing}")
        if size is None or flag is None or not self._happens(predicate, f"the start of {doing}"):
            return
        if isinstance(overrides, Unknown) or overrides & REMOTE_COPY:
            self.note(f"{doing} of another core or chip, which is not modelled")
            return
        nbytes = size * self.rates.granule_bytes
        if destination == "smem":
            self._fill_smem(source, source_address, destination_address, nbytes)
        now = time + self._stall
        kind = READ if source == "hbm" else WRITE if destination == "hbm" else LOCAL
        begin = now if kind == LOCAL else max(now, self._channel_free)
        end = begin + nbytes / self.rates.bytes_per_cycle
        if kind != LOCAL:
            self._channel_free = end
        copies = self.copies
        copies.begin.append(begin)
        copies.end.append(end)
        copies.nbytes.append(nbytes)
        copies.kind.append(kind)
        copies.owner.append(self._number[self._stack[-1]])
        arrival = [end + self.rates.latency_cycles, size, kind]
        self._semaphores.setdefault(flag, deque()).append(arrival)

    def wait(self, time: int, semaphore: Value, amount: Value, predicate: Value) -> None:
        """Stall until `semaphore` has received `amount`."""
        flag = self._known(semaphore, "the semaphore of a wait")
        missing = self._known(amount, "the amount of a wait")
        if flag is None or missing is None or not self._happens(predicate, "the condition of a wait"):
            return
        now = ready = time + self._stall
        kind = LOCAL
        for arrival in self._semaphores.get(flag, ()):
            if missing <= 0:
                break
            missing -= arrival[1]
            if arrival[0] > ready:
                ready, kind = arrival[0], int(arrival[2])
        if missing > 0:
            self.note(
                "waits for a signal that this core never sends: a copy or signal of another core or chip"
            )
        if ready > now:
            self._stall += ready - now
            self.stalled_on[kind] += ready - now
            self.stalls[0].append(now)
            self.stalls[1].append(ready)

    def signal(self, time: int, semaphore: Value, amount: Value, predicate: Value) -> None:
        """Add `amount` to a semaphore; less than zero takes away what a wait has seen."""
        if isinstance(semaphore, Unknown) or isinstance(amount, Unknown) or isinstance(predicate, Unknown):
            return  # the wait that belongs to it has said so
        arrivals = self._semaphores.setdefault(int(semaphore), deque())
        if amount >= 0:
            arrivals.append([time + self._stall, int(amount), LOCAL])
            return
        taken = -int(amount)
        while arrivals and taken > 0:
            part = min(taken, arrivals[0][1])
            arrivals[0][1] -= part
            taken -= part
            if not arrivals[0][1]:
                arrivals.popleft()

    def _known(self, value: Value, what: str) -> int | None:
        """A value that must be known; None after noting that it is not."""
        if isinstance(value, Unknown):
            self.note(f"{what} depends on {value.reason}")
            return None
        return int(value)

    def _happens(self, predicate: Value, what: str) -> bool:
        """Whether something is done; only what the runtime sets may be unknown. See `values.doubtful`."""
        if isinstance(predicate, Unknown):
            if not predicate.runtime:
                self.note(f"{what} depends on {predicate.reason}")
            return False
        return bool(predicate)

    def _fill_smem(self, space: str, source: Value, destination: Value, nbytes: int) -> None:
        """What a copy brings to SMEM: the words of an operand, if they are given."""
        if isinstance(destination, Unknown):
            self.note(f"a copy to SMEM at an address that depends on {destination.reason}")
            return
        index, words = None, None
        if not isinstance(source, Unknown):
            index, words = self._sources.get((space, source), (None, None))
        count = nbytes // SMEM_WORD_BYTES
        if words is None:
            what = "an array in SMEM" if index is None else f"the values of operand {index}"
            unknown = Unknown(f"{what}, not given")
            self.memory.update((destination + offset, unknown) for offset in range(count))
            return
        self.memory.update(zip(range(destination, destination + count), words[:count].tolist(), strict=False))

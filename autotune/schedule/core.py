"""The scalar side of one core: cells of SMEM, operands, identity, and what could not be known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from autotune.schedule.ranks import Ranks
from autotune.schedule.records import Identity
from autotune.schedule.scalar import Function
from autotune.schedule.values import Unknown, Value, select, signed

SMEM_WORD_BYTES = 4


class Core:
    """What the code of one core asks while it runs, but for time.

    Args:
        functions: what can be called, by name.
        operands: 32-bit words of the operands of a function, by its name; None for one whose values are not
            known. Left out for a function that needs none.
        operand_bases: addresses of the operands and results of each function, by its name.
        identity: which core it is.
        ranks: the other cores of a program over several devices; None for a program of one device.
    """

    def __init__(
        self,
        functions: Mapping[str, Function],
        operands: Mapping[str, Sequence[np.ndarray | None]],
        operand_bases: Mapping[str, Mapping[int, int]],
        identity: Identity,
        ranks: Ranks | None,
    ) -> None:
        self.core = identity.core
        self.core_in_device = identity.core_in_device
        self.rank = identity.rank
        self.chip = identity.chip
        self.ranks = ranks
        self.memory: dict[int, Value] = {}
        self.counts = {name: [0] * len(function.blocks) for name, function in functions.items()}
        self.unknowns: dict[str, Counter[str]] = {}
        self._functions = functions
        self._operands = operands
        self._operand_bases = operand_bases
        self._sources: dict[tuple[str, int], tuple[int, np.ndarray | None]] = {}
        self._stack: list[str] = []

    # What the code asks ---------------------------------------------------------------------------

    @property
    def empty(self) -> Unknown:
        """What an SMEM cell holds that the program did not write."""
        if len(self._stack) == 1:
            return Unknown("a value that the runtime sets", runtime=True)
        return Unknown("an SMEM cell that nothing wrote")

    def identity(self, role: str, cell: Value) -> Value:
        """Which device this is, told by a cell that the runtime sets; the cell itself if there is but one."""
        if self.ranks is None:
            return cell
        return {"chip_id": self.chip, "partition_id": self.rank, "replica_id": 0}[role]

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

    def note(self, what: str, address: int | None = None) -> None:
        """Something is not known: the result cannot be trusted."""
        where = "" if address is None else f" at {address:#x}"
        self.note_in(self._stack[-1], what + where)

    def note_in(self, function: str, what: str) -> None:
        """The same, of a function that need not be running."""
        self.unknowns.setdefault(function, Counter())[what] += 1

    # Values ---------------------------------------------------------------------------------------

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
        elif self.ranks and self._functions[self._stack[-1]].group_barrier:
            words = self.ranks.members(nbytes // SMEM_WORD_BYTES)
        count = nbytes // SMEM_WORD_BYTES
        if words is None:
            what = "an array in SMEM" if index is None else f"the values of operand {index}"
            unknown = Unknown(f"{what}, not given")
            self.memory.update((destination + offset, unknown) for offset in range(count))
            return
        self.memory.update(zip(range(destination, destination + count), words[:count].tolist(), strict=False))

"""Runs the scalar side of one function: which code runs how often, and when copies start and are waited for.

A listing is translated to one Python function, block by block, and executed. Scalar instructions become
integer arithmetic; copies, waits and calls become calls of the machine (`timeline.Machine`), which keeps
time. Vector code is time that passes. Translating once makes a grid of 10^5 steps a matter of a second.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.schedule.bundles import Branch, Instruction, Listing, Parameter
from autotune.schedule.errors import DumpError
from autotune.schedule.roles import semaphore_names, with_identities, with_semaphores
from autotune.schedule.statements import (
    PHIS,
    choice,
    semaphore_address,
    signalled,
    statements,
    taken,
    value_of,
)
from autotune.schedule.values import Unknown, Value, doubtful, high_product, select, signed


@dataclass(frozen=True)
class Block:
    """A stretch of code that runs from its first cycle to its last.

    Attributes:
        start: address of the first cycle.
        end: address after the last; the delay slots of a closing branch are inside.
        branch: the branch that closes it; None if it runs into the next block.
    """

    start: int
    end: int
    branch: Branch | None

    @property
    def cycles(self) -> int:
        """Cycles of one execution without stalls."""
        return self.end - self.start


@dataclass(frozen=True)
class Function:
    """A function that can be executed.

    Attributes:
        name: name of the HLO instruction.
        parameters: its operands and results.
        blocks: its code.
        callees: functions it calls.
        grid_loop: number of the block where the loop over the grid begins; None if there is no such loop.
        execute: a generator `execute(machine, frame, arguments, counts, time)` that returns the time, with
            the values of the parameters and a list of counters, one per block. It yields where other cores of
            the program must go on first.
        far: it copies to other devices or signals them, or asks which device it runs on.
        group_barrier: it makes the devices of the program meet.
        signalled: its semaphores that nothing in it but a wait names, as addresses: other devices signal
            them, by a number that the code knows.
        semaphores: what to call its semaphores, by address.
    """

    name: str
    parameters: tuple[Parameter, ...]
    blocks: tuple[Block, ...]
    callees: tuple[str, ...]
    grid_loop: int | None
    execute: Callable[[Any, int, Sequence[Value], list[int], int], Generator[None, None, int]]
    far: bool = False
    group_barrier: bool = False
    signalled: tuple[int, ...] = ()
    semaphores: Mapping[int, str] = field(default_factory=dict)


def translate(listing: Listing, delay_slots: int, partitions: int = 1) -> Function:
    """An executable form of `listing`, of a program for `partitions` devices.

    `delay_slots` is the number of bundles after a branch that run whether it is taken or not. Where the
    listing has a loop, it shows the number as well, and must agree.

    Raises:
        DumpError: the code has a form that is not known.
    """
    try:
        known = with_identities(with_semaphores(listing.instructions), partitions)
        return _translate(replace(listing, instructions=known), delay_slots)
    except (IndexError, KeyError, SyntaxError, ValueError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"{listing.name}: the code is not of the known form: {error!r}") from error


def _translate(listing: Listing, delay_slots: int) -> Function:
    _check_delay_slots(listing, delay_slots)
    blocks = _blocks(listing, delay_slots)
    source = _source(listing, blocks)
    namespace: dict[str, Any] = {
        "Unknown": Unknown,
        "doubtful": doubtful,
        "high_product": high_product,
        "select": select,
        "signed": signed,
    }
    exec(compile(source, f"<schedule of {listing.name}>", "exec"), namespace)
    starts = [block.start for block in blocks]
    grid_loop = starts.index(listing.grid_loop) if listing.grid_loop in starts else None
    callees = tuple(i.callee for i in listing.instructions if i.callee)
    return Function(
        listing.name,
        listing.parameters,
        blocks,
        callees,
        grid_loop,
        namespace["execute"],
        far=any(_is_far(instruction) for instruction in listing.instructions),
        group_barrier=any(instruction.group_barrier for instruction in listing.instructions),
        signalled=signalled(listing.instructions),
        semaphores={
            semaphore_address(name): text for name, text in semaphore_names(listing.instructions).items()
        },
    )


def _is_far(instruction: Instruction) -> bool:
    """Whether it has to do with other devices, or may have."""
    overrides = dict(instruction.operands).get("overrides", "0").removeprefix("$")
    return (
        instruction.opcode == "vsyncadd.remote" or instruction.partition_id or overrides not in ("0", "0x0")
    )


# Blocks -------------------------------------------------------------------------------------------


def _check_delay_slots(listing: Listing, delay_slots: int) -> None:
    """The first code after the delay slots of the branch that closes a loop must lie outside the loop."""
    addresses = sorted(listing.depth)
    loops = {b.target for b in listing.branches.values() if b.target <= b.address}
    for branch in listing.branches.values():
        after = bisect.bisect_right(addresses, branch.address + delay_slots)
        inside = listing.depth.get(branch.target, 0)
        if branch.target <= branch.address and inside and after < len(addresses):
            # Another loop may follow at once.
            if listing.depth[addresses[after]] >= inside and addresses[after] not in loops:
                raise DumpError(
                    f"{listing.name}: the loop that ends at {branch.address:#x} goes on at "
                    f"{addresses[after]:#x}: this chip has more than {delay_slots} delay slots"
                )


def _blocks(listing: Listing, delay_slots: int) -> tuple[Block, ...]:
    """Code between branch targets and the ends of delay slots."""
    after_slots = {address: address + 1 + delay_slots for address in listing.branches}
    targets = {branch.target for branch in listing.branches.values()}
    cuts = sorted({0, listing.length} | targets | set(after_slots.values()))
    blocks: list[Block] = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        inside = [listing.branches[a] for a in listing.branches if start <= a < end]
        if len(inside) > 1 or (inside and after_slots[inside[0].address] != end):
            raise DumpError(f"{listing.name}: a branch near {inside[0].address:#x} lands in delay slots")
        blocks.append(Block(start, end, inside[0] if inside else None))
    if any(end > listing.length for end in after_slots.values()):
        raise DumpError(f"{listing.name}: the code ends inside the delay slots of a branch")
    return tuple(blocks)


# Source -------------------------------------------------------------------------------------------


def _source(listing: Listing, blocks: tuple[Block, ...]) -> str:
    """Python source of `execute`: a loop that looks up the block to run next."""
    number = {block.start: index for index, block in enumerate(blocks)}
    number[listing.length] = len(blocks)
    by_block: list[list[Instruction]] = [[] for _ in blocks]
    starts = [block.start for block in blocks]
    for instruction in listing.instructions:
        by_block[bisect.bisect_right(starts, instruction.address) - 1].append(instruction)
    merged = _merged_values(listing)
    bodies = [
        _block_source(block, index, instructions, number, merged)
        for index, (block, instructions) in enumerate(zip(blocks, by_block, strict=True))
    ]
    defined = dict.fromkeys(i.target for i in listing.instructions if i.target)
    known = {*defined, *(parameter.name for parameter in listing.parameters)}
    used = re.findall(r"\b[sp]\d+\b", "\n".join(line for body in bodies for line in body))
    if undefined := sorted(set(used) - known):
        raise DumpError(f"{listing.name}: nothing defines {', '.join(undefined[:5])}, which the code reads")
    lines = [
        "def execute(machine, frame, arguments, counts, t):",
        " if False: yield",  # it waits for other cores by yielding, also where it never has to
        " memory = machine.memory",
        " empty = machine.empty",
        " never = Unknown('a register that is never set')",
        *(f" {name} = never" for name in defined),
        *(f" last_{phi} = never" for phi in dict.fromkeys(phi for phis in merged.values() for phi in phis)),
        *(f" {parameter.name} = arguments[{parameter.index}]" for parameter in listing.parameters),
        " block = 0",
        f" while block < {len(blocks)}:",
        *_dispatch(bodies, 0, len(bodies), "  "),
        " return t",
    ]
    return "\n".join(lines) + "\n"


def _dispatch(bodies: list[list[str]], first: int, end: int, indent: str) -> list[str]:
    """Nested comparisons that find a block in logarithmic time."""
    if end - first == 1:
        return [indent + line for line in bodies[first]]
    middle = (first + end) // 2
    return [
        f"{indent}if block < {middle}:",
        *_dispatch(bodies, first, middle, indent + " "),
        f"{indent}else:",
        *_dispatch(bodies, middle, end, indent + " "),
    ]


def _block_source(
    block: Block,
    index: int,
    instructions: list[Instruction],
    number: Mapping[int, int],
    merged: Mapping[str, list[str]],
) -> list[str]:
    phis = [i for i in instructions if i.opcode in PHIS]
    lines = [f"counts[{index}] += 1"]
    lines += [f"{phi.target} = last_{phi.target}" for phi in phis]
    for phi in phis:
        lines += _remember(phi, merged)
    branched = False
    for instruction in instructions:
        if block.branch and instruction.address > block.branch.address and not branched:
            lines.append(taken(block.branch))
            branched = True
        lines += statements(instruction, block.start)
        if instruction.opcode not in PHIS:
            lines += _remember(instruction, merged)
    if block.branch and not branched:
        lines.append(taken(block.branch))
    lines.append(f"t += {block.cycles}")
    if not block.branch:
        return [*lines, f"block = {index + 1}"]
    if block.branch.target <= block.branch.address:
        lines.append("if taken: machine.count_loop_trip()")
    return [*lines, f"block = {number[block.branch.target]} if taken else {index + 1}"]


def _merged_values(listing: Listing) -> dict[str, list[str]]:
    """The phi instructions that each value flows into.

    All values that meet in a phi share a register (this is code after register allocation), so the phi is
    what was written there last. A variable `last_x` plays that register for phi x.
    """
    merged: dict[str, list[str]] = {}
    for phi in listing.instructions:
        if phi.opcode in PHIS:
            for _, value in phi.operands:
                if not re.fullmatch(r"[sp]\d+", value):
                    raise DumpError(
                        f"{listing.name}: a phi at {phi.address:#x} merges {value!r}, not a register"
                    )
                merged.setdefault(value, []).append(str(phi.target))
    return merged


def _remember(instruction: Instruction, merged: Mapping[str, list[str]]) -> list[str]:
    """Statements that keep the value just written for the phis it flows into."""
    phis = merged.get(instruction.target or "", ())
    if not phis:
        return []
    value = str(instruction.target)
    if instruction.predicate is None or instruction.otherwise is not None:
        return [f"last_{phi} = {value}" for phi in phis]
    return [f"last_{phi} = {choice(value_of(instruction.predicate), value, f'last_{phi}')}" for phi in phis]

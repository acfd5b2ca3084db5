"""What the cells and allocations of a listing are for, told by how the code uses them.

The dumps name no allocation. Which ones are semaphores shows in the instructions that wait for and signal
them; which cells hold the place of the device in the mesh shows in the sum that is made of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotune.schedule.bundles import Instruction

_CELL = re.compile(r"\[smem:\[?#allocation\d+\]*")
_ALLOCATION = re.compile(r"#allocation\d+")
_SEMAPHORE = re.compile(r"#semaphore\d+")

_SEMAPHORE_LABELS = ("dst_syncflagno", "src_syncflagno", "dst_syncflagno_1")
_SEMAPHORE_OPCODES = ("vsync", "vwait", "dma.done")

# Scalar instructions whose result is a semaphore because an operand is one.
_PASSES_ON = ("smov", "sor", "sadd", "scalar_lea.sflag", "scalar_select", "sphi")


def with_semaphores(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The instructions, allocations of semaphores renamed from `#allocation5` to `#semaphore5`.

    Their addresses carry more than a place: which chip and core a semaphore is on, in bits of their own.
    """
    found, sums = _semaphores(instructions)
    if not found:
        return tuple(instructions)

    def renamed(text: str) -> str:
        if text.startswith("[smem:"):
            return text
        return _ALLOCATION.sub(
            lambda name: name[0].replace("allocation", "semaphore") if name[0] in found else name[0], text
        )

    def known(i: Instruction) -> Instruction:
        if i.target in sums:  # of an address, which has more than 32 bits here
            i = replace(i, opcode="scalar_lea.sflag")
        if any(text.startswith("[#") for _, text in i.operands):
            i = replace(i, operands=tuple((label, renamed(text)) for label, text in i.operands))
        return i

    return tuple(known(instruction) for instruction in instructions)


def _semaphores(instructions: Sequence[Instruction]) -> tuple[set[str], set[str]]:
    """Allocations that instructions wait for or signal, be it through registers; sums of such addresses."""
    definitions = {i.target: i for i in instructions if i.target}
    pending = [text for i in instructions for text in _semaphore_operands(i)]
    followed: set[str] = set()
    found: set[str] = set()
    sums: set[str] = set()
    while pending:
        text = pending.pop()
        if text.startswith("[#"):
            found.update(_ALLOCATION.findall(text)[:1])
        elif text not in followed:
            followed.add(text)
            definition = definitions.get(text)
            if definition is not None and definition.opcode.startswith(_PASSES_ON):
                pending += [operand for _, operand in definition.operands]
                if definition.opcode.startswith("sadd"):
                    sums.add(text)
    return found, sums


def _semaphore_operands(instruction: Instruction) -> Iterator[str]:
    if instruction.opcode.startswith(_SEMAPHORE_OPCODES):
        yield from (text for _, text in instruction.operands[:1])
    elif instruction.opcode.startswith("dma."):
        yield from (text for label, text in instruction.operands if label in _SEMAPHORE_LABELS)


def with_identities(instructions: Sequence[Instruction], partitions: int) -> tuple[Instruction, ...]:
    """The instructions, loads of the place in the mesh and of the core's number marked as such.

    A program of n devices computes `replica * n + partition`, where both are cells that nothing writes.
    """
    loads = [i for i in instructions if i.opcode == "sld" and _CELL.fullmatch(_cell(i))]
    marks = {_cell(i): "core_id" for i in loads if i.core_id}
    if partitions > 1:
        marks |= _mesh_cells(instructions, loads, partitions)
    return tuple(
        replace(i, **{marks[_cell(i)]: True}) if i.opcode == "sld" and _cell(i) in marks else i
        for i in instructions
    )


def _mesh_cells(
    instructions: Sequence[Instruction], loads: Sequence[Instruction], partitions: int
) -> dict[str, str]:
    """The cells that hold the number of the partition and of the replica."""
    elsewhere = {
        name
        for i in instructions
        for _, text in i.operands
        if not (i.opcode == "sld" and _CELL.fullmatch(text))
        for name in _ALLOCATION.findall(text)
    }
    cells = {
        str(i.target): _cell(i)
        for i in loads
        if not (i.core_id or i.chip_id) and not elsewhere.intersection(_ALLOCATION.findall(_cell(i)))
    }
    scaled = {
        str(i.target): factor
        for i in instructions
        if (factor := _multiplied(i, partitions)) is not None and factor in cells
    }
    marks: dict[str, str] = {}
    for i in instructions:
        if i.opcode.startswith("sadd") and len(i.operands) == 2:
            (_, left), (_, right) = i.operands
            for product, partition in ((left, right), (right, left)):
                if product in scaled and partition in cells:
                    marks |= {cells[scaled[product]]: "replica_id", cells[partition]: "partition_id"}
    return marks


def _multiplied(instruction: Instruction, by: int) -> str | None:
    """The operand that an instruction multiplies by a number; None if it does something else."""
    if len(instruction.operands) != 2:
        return None
    (_, left), (_, right) = instruction.operands
    if instruction.opcode.startswith("smul."):
        return left if _is(right, by) else right if _is(left, by) else None
    shifts = instruction.opcode.startswith("sshll") and by == 1 << by.bit_length() - 1
    return left if shifts and _is(right, by.bit_length() - 1) else None


def _is(text: str, number: int) -> bool:
    return text.removeprefix("$") == str(number)


def _cell(instruction: Instruction) -> str:
    return instruction.operands[0][1] if instruction.operands else ""


def semaphore_names(instructions: Sequence[Instruction]) -> dict[str, str]:
    """What to call the semaphores of a kernel: arguments, which it checks at its end, and barriers."""
    names: dict[str, str] = {}
    read = ""
    for instruction in instructions:
        found = _SEMAPHORE.search(instruction.operands[0][1]) if instruction.operands else None
        if instruction.opcode == "vsyncmov":
            read = found[0] if found else ""
        elif instruction.checks and read:
            names[read] = f"the semaphore of {instruction.checks}"
        elif instruction.opcode.startswith("vwait.") and found:
            names.setdefault(found[0], "the barrier semaphore")
    return names

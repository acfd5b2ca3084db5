"""Reads what is needed of the scheduled HLO module: instructions with their types, and which are kernels."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.-]+) \(.*\{$", re.M)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(?P<name>[\w.-]+) = ", re.M)
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_TILE = re.compile(r"\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.-]+)")
_ITEM_BITS = re.compile(r"[a-z]+(\d+)")

KERNEL_TARGET = 'custom_call_target="tpu_custom_call"'
HBM_SPACE = 0


@dataclass(frozen=True)
class ArrayType:
    """Type of an array and where it lies.

    Attributes:
        dtype: as HLO names it: `bf16`, `s32`, `pred`.
        shape: sizes.
        minor_to_major: dimensions, the fastest varying first.
        tiles: tilings, the outermost first; each divides what the one before left.
        space: memory space; 0 is HBM, 1 VMEM.
    """

    dtype: str
    shape: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...]
    space: int


def array_bytes(array: ArrayType) -> int:
    """Bytes of an array without padding."""
    bits = _ITEM_BITS.match(array.dtype)
    return math.prod(array.shape) * (int(bits[1]) if bits else 8) // 8


@dataclass(frozen=True)
class HloInstruction:
    """One instruction of a scheduled module.

    Attributes:
        name: unique in the module.
        opcode: such as `fusion` or `custom-call`.
        results: type of the result; several for a tuple.
        operands: names of the operands.
        text: the instruction as printed.
        computation: the computation it belongs to.
    """

    name: str
    opcode: str
    results: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    text: str
    computation: str = ""

    @property
    def is_kernel(self) -> bool:
        """Whether it is a Pallas kernel."""
        return KERNEL_TARGET in self.text


def instructions(hlo: str) -> Mapping[str, HloInstruction]:
    """All instructions of a module by name, those of called computations included."""
    return {instruction.name: instruction for instruction in _instructions(hlo)}


def kernel_names(module: Mapping[str, HloInstruction]) -> tuple[str, ...]:
    """Names of the Pallas kernels, in the order they were traced in: that of their numbers."""
    names = [name for name, instruction in module.items() if instruction.is_kernel]
    return tuple(sorted(names, key=lambda name: (base_name(name), _number(name))))


def base_name(name: str) -> str:
    """`matmul.3` is the third instruction called `matmul`."""
    return re.sub(r"\.\d+$", "", name)


def twin(name: str, module: Mapping[str, HloInstruction], among: Iterator[str]) -> str | None:
    """An instruction of `among` that does the same as `name`: the compiler emits code for equal ones once."""
    wanted = module.get(name)
    if wanted is None:
        return None
    signature = _signature(wanted, module)
    return next(
        (other for other in among if other in module and _signature(module[other], module) == signature), None
    )


def _instructions(hlo: str) -> Iterator[HloInstruction]:
    matches = list(_INSTRUCTION.finditer(hlo))
    computations = list(_COMPUTATION.finditer(hlo))
    begins = [computation.start() for computation in computations]
    ends = [match.start() for match in matches[1:]] + [len(hlo)]
    for match, end in zip(matches, ends, strict=True):
        text = hlo[match.end() : end].split("\n}")[0]
        type_end = _type_end(text)
        call = re.match(r"\s*([\w-]+)\(", text[type_end:])
        if not call:
            continue
        begin = type_end + call.end()
        operands = text[begin : _closing(text, begin)]
        inside = bisect.bisect_right(begins, match.start()) - 1
        yield HloInstruction(
            match["name"],
            call[1],
            tuple(_array_type(array) for array in _ARRAY.finditer(text[:type_end])),
            tuple(_NAME.findall(operands)),
            text,
            computations[inside]["name"] if inside >= 0 else "",
        )


def _type_end(text: str) -> int:
    """End of the type a text begins with, which may be a tuple."""
    if text.startswith("("):
        return _closing(text, 1) + 1
    return len(text) - len(text.lstrip()) + len(text.split(maxsplit=1)[0])


def _closing(text: str, begin: int) -> int:
    """Position of the parenthesis that closes one opened before `begin`."""
    depth = 1
    for position in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _array_type(match: re.Match[str]) -> ArrayType:
    shape = _integers(match["sizes"])
    order, _, rest = (match["layout"] or "").partition(":")
    space = _SPACE.search(rest)
    tiling = rest[rest.find("T(") :].split("S(")[0] if "T(" in rest else ""
    return ArrayType(
        match["dtype"],
        shape,
        _integers(order) or tuple(reversed(range(len(shape)))),
        tuple(_integers(tile) for tile in _TILE.findall(tiling.split(")L(")[0])),
        int(space[1]) if space else HBM_SPACE,
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip().isdigit())


def _number(name: str) -> int:
    suffix = re.search(r"\.(\d+)$", name)
    return int(suffix[1]) if suffix else 0


def _signature(instruction: HloInstruction, module: Mapping[str, HloInstruction]) -> tuple[object, ...]:
    """What decides the code of an instruction: types, attributes, and the computation it calls."""
    operands = tuple(module[name].results for name in instruction.operands if name in module)
    attributes = re.sub(r",\s*metadata=\{[^}]*\}", "", instruction.text).strip()
    return instruction.opcode, instruction.results, operands, _NAME.sub("%", attributes)

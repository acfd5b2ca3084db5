"""Parses the schedule of one function: the bundles after register allocation.

One address is one cycle, empty bundles included, so the length of a stretch of code is its time without
stalls. Only what decides *which* code runs is kept: scalar instructions, copies, waits, branches and calls.
Vector instructions count by their place alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.schedule.errors import DumpError

_START = "control target key end"
_COMMENT = re.compile(r"/\*(.*?)\*/", re.S)
_HEADER = re.compile(r"^ *(0x[0-9a-f]+|0) +(LB|LH|LE|PB|PF|CT)? *:((?: *>)*) *\{", re.M)
_INSTRUCTION = re.compile(r"(?:%(\w+) = )?(\w[\w.-]*)\s*(.*)$", re.S)
_PREDICATE = re.compile(r"\((!?%p\w+)(?:,\s*([^()]*))?\),?")
_ATTRIBUTE = re.compile(r"\[(?:thread|resolvable):\$\w+\]")
_OPERAND = re.compile(
    r"(?:(?P<label>\w+)=)?(?P<value>"
    r"\[smem:\[?[^\]]*\]*"
    r"|\[#allocation[^\]]*\]"
    r"|!?%\w+"
    r"|\$?-?(?:0x[0-9a-f]+|\d+\.\d*(?:e[+-]?\d+)?|\d+|inf|nan))"
)
_CHECK = re.compile(r"\s*Semaphore \(([\w ]+)\) has a nonzero value")
_SPACES = re.compile(r"\s*(hbm|vmem|smem)-to-(hbm|vmem|smem)\s*")
_BRANCH = re.compile(r"target bundleno = (\d+)")
_PARAMETER = re.compile(r"\[shape: (?P<shape>.+), index: (?P<index>\d+), kind: (?P<kind>[\w/ ]+),")

SPACES = ("hbm", "vmem", "smem")

# Vector instructions that order memory or semaphores rather than compute.
_SYNCHRONIZING = ("vsync", "vwait")
_PARAMETER_OPCODE = "inlined_call_operand"

# What `/* ... */` says of an instruction, and the field of `Instruction` it sets.
_MEANINGS = {
    "core id": "core_id",
    "logical chip id": "chip_id",
    "barrier-megacore": "core_barrier",
    "sparse-core-wait": "sparse_core_wait",
    "cross-replica-barrier": "group_barrier",
}

# Before a program of several devices begins, the runtime's own code makes them meet. Trace marks enclose it.
# Where a device has two cores, they then tell each other.
_LAUNCH = re.compile(
    r"vtrace 2952790016\b.*?enhanced-barrier.*?vtrace 3221225472\b"
    r"(?:.*?SynchronizeProgramDescriptorStates)?",
    re.S,
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction that matters to control flow, copies or waits.

    Attributes:
        address: cycle at which it is issued.
        opcode: as printed, such as `sadd.s32` or `dma.hbm_to_vmem`; a `dma.general` by what it does.
        target: the value it defines (`s12`, `p3`); None if it defines none that is followed.
        predicate: it runs only if this holds (`p3`, `!p3`); None if it always runs.
        otherwise: what `target` is if the predicate does not hold; None if it keeps its value.
        operands: (label, text) in order; the label is empty for most opcodes.
        callee: the function that an `inlined_call` calls.
        core_id: it loads the number of the core it runs on.
        chip_id: it loads the number of the chip it runs on.
        partition_id: it loads the place of the device in the mesh.
        replica_id: it loads the number of the replica, of which there is one.
        core_barrier: it waits for the other core of the device.
        sparse_core_wait: it waits for a SparseCore.
        group_barrier: it waits for the other devices of the program.
        checks: the argument of the kernel whose semaphore it checks to be zero at the end.
    """

    address: int
    opcode: str
    target: str | None = None
    predicate: str | None = None
    otherwise: str | None = None
    operands: tuple[tuple[str, str], ...] = ()
    callee: str | None = None
    core_id: bool = False
    chip_id: bool = False
    partition_id: bool = False
    replica_id: bool = False
    core_barrier: bool = False
    sparse_core_wait: bool = False
    group_barrier: bool = False
    checks: str = ""


@dataclass(frozen=True, slots=True)
class Branch:
    """A jump to `target` if `predicate` holds (always, if it is None), after the delay slots."""

    address: int
    target: int
    predicate: str | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """An operand or result of a function: value `name` holds its address, or itself where `space` is empty.

    Attributes:
        name: the value, such as `s12`.
        index: position among operands, then results.
        space: `hbm`, `vmem`, `smem`, or empty for a scalar that is passed by value.
        shape: as printed, `bf16[1024,1024]`.
        output: it is a result.
    """

    name: str
    index: int
    space: str
    shape: str
    output: bool


@dataclass(frozen=True)
class Listing:
    """The schedule of one function.

    Attributes:
        name: the function.
        length: number of cycles of the straight code, from the first address to the last.
        instructions: in order of issue.
        branches: by address.
        parameters: operands and results.
        depth: loop depth by address, of the non-empty bundles.
        grid_loop: address where the loop over the grid begins; None if the compiler left no such loop.
    """

    name: str
    length: int
    instructions: tuple[Instruction, ...]
    branches: dict[int, Branch]
    parameters: tuple[Parameter, ...]
    depth: dict[int, int] = field(repr=False)
    grid_loop: int | None = None


def read_listing(name: str, path: Path) -> Listing:
    """The schedule in `path`. Raises `DumpError` where the text is not of the known form."""
    return parse_listing(name, path.read_text())


def parse_listing(name: str, text: str) -> Listing:
    """The schedule printed as `text`. Raises `DumpError` where the text is not of the known form."""
    start = text.find(_START)
    if start < 0:
        raise DumpError(f"{name}: the schedule must begin with a 'control target key', got {text[:60]!r}")
    grid_loop = _grid_loop(text)
    launch = _launch(name, text)
    text = _COMMENT.sub(_kept_comment, text[start + len(_START) :])
    instructions: list[Instruction] = []
    branches: dict[int, Branch] = {}
    parameters: list[Parameter] = []
    depth: dict[int, int] = {}
    last = -1
    for address, loops, body in _bundles(name, text):
        if address <= last:
            raise DumpError(f"{name}: addresses must increase, got {address:#x} after {last:#x}")
        last = address
        for printed in filter(None, (part.strip() for part in body.split(";;"))):
            depth[address] = loops
            _parse(name, address, printed, instructions, branches, parameters)
    if last < 0:
        raise DumpError(f"{name}: the schedule holds no bundles")
    if launch:
        instructions = [i for i in instructions if i.address not in launch or _only_computes(i)]
        branches = {address: branch for address, branch in branches.items() if address not in launch}
    return Listing(
        name, last + 1, _with_spaces(instructions, parameters), branches, tuple(parameters), depth, grid_loop
    )


def _bundles(name: str, text: str) -> Iterator[tuple[int, int, str]]:
    """(address, loop depth, text between the braces) of each bundle."""
    headers = list(_HEADER.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    for header, end in zip(headers, ends, strict=False):
        close = text.rfind("}", header.end(), end)
        if close < 0:
            raise DumpError(f"{name}: bundle {header[1]} has no closing brace")
        yield int(header[1], 16), header[3].count(">"), text[header.end() : close]


def _launch(name: str, text: str) -> range:
    """Addresses of the code that makes the devices of a program meet before it begins."""
    found = _LAUNCH.search(text)
    if not found:
        return range(0)
    addresses = [_HEADER.findall(text, 0, place)[-1:] for place in (found.start(), found.end())]
    if not all(addresses):
        raise DumpError(f"{name}: the code before the program begins is not of the known form")
    first, end = (int(address[0][0], 16) for address in addresses)
    return range(first, end)


def _only_computes(instruction: Instruction) -> bool:
    """Whether all that an instruction does is define a value."""
    return instruction.target is not None and instruction.callee is None


def _kept_comment(comment: re.Match[str]) -> str:
    """Comments that carry meaning: the name of an operand, of a called function, or of the core's number."""
    text = comment[1]
    if text.endswith("="):
        return text
    for meaning, tag in _MEANINGS.items():
        if meaning in text:
            return f" @{tag}"
    if check := _CHECK.match(text):
        return f" @checks={check[1]}"
    if spaces := _SPACES.fullmatch(text):
        return f" @spaces=dma.{spaces[1]}_to_{spaces[2]}"
    callee = re.match(r"\s*%?(<?[\w.-]+>?)\s*(?:=|$)", text)
    return f" @callee={callee[1]}" if callee else ""


def _with_spaces(instructions: list[Instruction], parameters: list[Parameter]) -> tuple[Instruction, ...]:
    """The instructions, copies of any kind (`dma.general`) named by the spaces their addresses belong to."""
    spaces = {parameter.name: parameter.space for parameter in parameters}
    for instruction in instructions:
        space = instruction.opcode.rpartition(".")[2]
        if instruction.target and space in SPACES:
            spaces[instruction.target] = space
    found = []
    for instruction in instructions:
        if instruction.opcode == "dma.general":
            places = dict(instruction.operands)
            source, destination = spaces.get(places.get("src", "")), spaces.get(places.get("dst", ""))
            if source and destination:
                instruction = replace(instruction, opcode=f"dma.{source}_to_{destination}")
        found.append(instruction)
    return tuple(found)


def _grid_loop(text: str) -> int | None:
    """The loop whose variables are, say the comments, iteration indices of a software pipeline."""
    for header in re.finditer(r"^ *(0x[0-9a-f]+|0) +L[BH] *:.*$", text, re.M):
        if "iteration index, stage = 0" in header[0]:
            return int(header[1], 16)
    return None


def _parse(
    name: str,
    address: int,
    printed: str,
    instructions: list[Instruction],
    branches: dict[int, Branch],
    parameters: list[Parameter],
) -> None:
    """Adds what is printed at `address` to the list it belongs to; vector instructions to none."""
    match = _INSTRUCTION.match(printed)
    if not match:
        raise DumpError(f"{name}: cannot read the instruction at {address:#x}: {printed[:80]!r}")
    defined, opcode, rest = match[1], match[2], match[3]
    if opcode.startswith(_PARAMETER_OPCODE):
        parameters.append(_parameter(name, defined, opcode, rest))
    elif opcode.startswith("sbr."):
        target = _BRANCH.search(rest)
        if not target:
            raise DumpError(f"{name}: the branch at {address:#x} has no target: {printed[:80]!r}")
        predicate = _PREDICATE.search(rest)
        branches[address] = Branch(address, int(target[1]), _value_name(predicate[1]) if predicate else None)
    elif not opcode.startswith("v") or opcode.startswith(_SYNCHRONIZING):
        instructions.append(_instruction(address, defined, opcode, rest))


def _instruction(address: int, defined: str | None, opcode: str, rest: str) -> Instruction:
    rest, *printed_tags = rest.split(" @")
    tags = {name: value for name, _, value in (tag.strip().partition("=") for tag in printed_tags)}
    predicate = otherwise = None
    if match := _PREDICATE.search(rest):
        predicate, otherwise = _value_name(match[1]), match[2]
        rest = rest[: match.start()] + rest[match.end() :]
    operands = _OPERAND.finditer(_ATTRIBUTE.sub("", rest))
    return Instruction(
        address,
        tags.get("spaces", opcode) if opcode == "dma.general" else opcode,
        target=defined.split("_")[0] if defined and defined[0] in "sp" else None,
        predicate=predicate,
        otherwise=_value_name(otherwise.strip()) if otherwise else None,
        operands=tuple((operand["label"] or "", _value_name(operand["value"])) for operand in operands),
        callee=tags.get("callee") if opcode == "inlined_call" else None,
        core_id=opcode == "sld" and "core_id" in tags,
        chip_id=opcode == "sld" and "chip_id" in tags,
        core_barrier="core_barrier" in tags,
        sparse_core_wait="sparse_core_wait" in tags,
        group_barrier="group_barrier" in tags,
        checks=tags.get("checks", ""),
    )


def _parameter(name: str, defined: str | None, opcode: str, rest: str) -> Parameter:
    match = _PARAMETER.search(rest)
    if not match or not defined:
        raise DumpError(f"{name}: cannot read the operand {rest[:80]!r}")
    space = opcode.removeprefix(_PARAMETER_OPCODE + ".")
    return Parameter(
        name=defined.split("_")[0],
        index=int(match["index"]),
        # `<no memory space>` loses its brackets' rest to the next word; the shape that follows is whole.
        space=space if space in SPACES else "",
        shape=match["shape"],
        output="output" in match["kind"],
    )


def _value_name(text: str) -> str:
    """`%s2258_s24` is value s2258, which lives in register s24; the register does not matter here."""
    return re.sub(r"%([a-z]+\d+)_[a-z]\w*", r"\1", text).replace("%", "")

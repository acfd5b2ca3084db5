"""Single instructions as Python: what each of them computes, and what it asks of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autotune.schedule.bundles import Branch, Instruction
from autotune.schedule.errors import DumpError
from autotune.schedule.values import signed

# Addresses of allocations, in whatever unit a space is addressed. Their distance is more than an allocation
# of any space can hold (SMEM has 2^18 words). What they are does not matter, only that they differ; those of
# kernels, which compare addresses, must fit in 31 bits.
ALLOCATION_BITS = 18
FRAME_BITS = 32

# Addresses of semaphores leave all the lower bits to what code adds: the place in an array of semaphores, and
# which chip and core is meant.
SEMAPHORE_BITS = 40

PHIS = ("sphi", "pphi")
"""Opcodes of values that meet where control flow meets."""

_ALLOCATION = re.compile(r"#allocation(\d+)(?:_spill)?")
_SEMAPHORE = re.compile(r"#semaphore(\d+)")
_DMA = re.compile(r"dma\.(hbm|vmem|smem)_to_(hbm|vmem|smem)")
_REGISTER = re.compile(r"\bs\d")
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

# Opcodes that define no value and say nothing about time: fences, delays that are bundles of their own, and
# divisions, whose results an `spop` brings (and which are not known then).
_WITHOUT_EFFECT = (
    "sdivrem",
    "sfence",
    "cfence",
    "compiler-scheduling-barrier",
    "vsyncpa",
    "vsyncset",
    "vsyncmov",
    "sdelay",
    "snop",
    "set.rngseed",
)

# Two's complement of 32 bits, spelled out: a call would cost more than the rest of an instruction.
_SIGNED = "((({}) + 0x80000000 & 0xffffffff) - 0x80000000)"

_ARITHMETIC: Mapping[str, str] = {
    "sadd": _SIGNED.format("{0} + {1}"),
    "ssub": _SIGNED.format("{0} - {1}"),
    "smul": _SIGNED.format("{0} * {1}"),
    "smulhi": "high_product({0}, {1})",
    "sshll": _SIGNED.format("{0} << {1}"),
    "sshra": "({0} >> {1})",
    "sshrl": _SIGNED.format("({0} & 0xffffffff) >> {1}"),
    "sand": "({0} & {1})",
    "sor": "({0} | {1})",
    "sxor": "({0} ^ {1})",
    "smin": "select({0} < {1}, {0}, {1})",
    "smax": "select({0} > {1}, {0}, {1})",
    "por": "({0} | {1})",
    "pand": "({0} & {1})",
    "pnand": "(({0} & {1}) ^ True)",
    "pnor": "(({0} | {1}) ^ True)",
    "pneg": "({0} ^ True)",
    "pxor": "({0} ^ {1})",
}
_UNSIGNED_OPERATIONS = ("smin", "smax")


def statements(instruction: Instruction, start: int) -> list[str]:
    """Python statements that do what `instruction` does, in a block that begins at address `start`."""
    opcode = instruction.opcode
    time = f"t + {instruction.address - start}"
    if opcode in PHIS or opcode.startswith(_WITHOUT_EFFECT):
        return []
    if opcode == "inlined_call":
        arguments = "".join(f"{value_of(text) or 'never'}, " for _, text in instruction.operands)
        return [f"t = yield from machine.call({instruction.callee!r}, t, {time}, ({arguments}))"]
    if instruction.core_barrier:
        return []  # cores that share the work evenly arrive together
    if instruction.sparse_core_wait:
        return [f"machine.note('waits for a SparseCore, whose time is not known,', {instruction.address})"]
    if opcode == "dma.done.wait" or opcode.startswith("vwait."):
        return _awaited(instruction, f"machine.wait({time}, {_arguments(instruction)}, {{predicate}})")
    if opcode == "vsyncadd.remote":
        return _awaited(instruction, f"machine.signal_far({time}, {_arguments(instruction)}, {{predicate}})")
    if opcode.startswith("vsyncadd"):
        return _guarded(instruction, f"machine.signal({time}, {_arguments(instruction)}, {{predicate}})")
    if opcode.startswith("dma."):
        return _copy(instruction, time)
    if opcode == "sst":
        return _store(instruction)
    if opcode == "shalt.err":
        return _guarded(instruction, f"machine.halt({instruction.address}, {{predicate}})")
    if instruction.target is None:
        return [f"machine.note({f'{opcode} is not known'!r}, {instruction.address})"]
    return _definition(instruction)


def taken(branch: Branch) -> str:
    """Statement that evaluates whether `branch` is taken."""
    if branch.predicate is None:
        return "taken = True"
    condition = value_of(branch.predicate)
    decide = f"machine.decide({condition}, {branch.address}, {branch.target <= branch.address})"
    return f"taken = {decide} if {condition}.__class__ is Unknown else {condition}"


def _arguments(instruction: Instruction) -> str:
    values = [value_of(text) or "never" for _, text in instruction.operands]
    if len(values) != 2:
        raise DumpError(
            f"{instruction.opcode} at {instruction.address:#x} must have 2 operands, got {len(values)}"
        )
    return ", ".join(values)


def _guarded(instruction: Instruction, call: str) -> list[str]:
    """`call`, unless the predicate is known to be false."""
    if instruction.predicate is None:
        return [call.format(predicate="True")]
    condition = value_of(instruction.predicate)
    return [f"if {condition} is not False: {call.format(predicate=condition)}"]


def _awaited(instruction: Instruction, call: str) -> list[str]:
    """`call`, again and again while it answers that other cores must go on first."""
    if instruction.predicate is None:
        return [f"while {call.format(predicate='True')}: yield"]
    condition = value_of(instruction.predicate)
    return [f"if {condition} is not False:", f" while {call.format(predicate=condition)}: yield"]


def _copy(instruction: Instruction, time: str) -> list[str]:
    spaces = _DMA.fullmatch(instruction.opcode)
    labelled = [(label, value_of(text) or "never") for label, text in instruction.operands]
    values = dict(labelled)
    known = spaces and {"size_in_granules", "dst_syncflagno"} <= values.keys()
    if not known:
        return _guarded(
            instruction,
            f"machine.note({f'{instruction.opcode} is a copy of a kind that is not known'!r}, "
            f"{instruction.address})",
        )
    assert spaces
    source, destination = spaces.groups()
    sources = [value for label, value in labelled if label in (source, "src")]
    destinations = [value for label, value in labelled if label in (destination, "dst")]
    far = ", ".join(values.get(label, "0") for label in ("overrides", "src_syncflagno"))
    return _awaited(
        instruction,
        f"machine.copy({time}, {source!r}, {destination!r}, {sources[0]}, {destinations[-1]}, "
        f"{values['size_in_granules']}, {values['dst_syncflagno']}, {{predicate}}, {far})",
    )


def _store(instruction: Instruction) -> list[str]:
    (_, cell), (_, stored) = instruction.operands
    address, value = _cell(cell), value_of(stored) or "never"
    if instruction.predicate is None and not _REGISTER.search(cell) and "never" not in address:
        return [f"memory[{address}] = {value}"]
    condition = value_of(instruction.predicate) if instruction.predicate else "True"
    return [f"if {condition} is not False: machine.store({address}, {value}, {condition})"]


def _definition(instruction: Instruction) -> list[str]:
    """An assignment. Without an alternative, a value whose predicate fails is never read: no need to ask."""
    value = _expression(instruction)
    if instruction.predicate and instruction.otherwise:
        value = choice(value_of(instruction.predicate), value, value_of(instruction.otherwise))
    return [f"{instruction.target} = {value}"]


def _expression(instruction: Instruction) -> str:
    """Python expression of what a scalar instruction computes."""
    base, *variant = instruction.opcode.split(".")
    texts = [text for _, text in instruction.operands]
    if base == "sld":
        if instruction.core_id:
            return "machine.core"
        address = _cell(texts[0])
        cell = f"machine.load({address})" if _REGISTER.search(texts[0]) else f"memory.get({address}, empty)"
        for role in ("chip_id", "partition_id", "replica_id"):
            if getattr(instruction, role):
                return f"machine.identity({role!r}, {cell})"
        return cell
    values = [value_of(text) for text in texts]
    if base == "spop" or variant[-1:] == ["f32"] or None in values:
        source = "vector code" if base == "spop" else f"{instruction.opcode}"
        return f"Unknown({f'the result of {source} at {instruction.address:#x}'!r})"
    known = [str(value) for value in values]
    if base in ("smov", "int_to_ptr", "reloc") and len(known) == 1:
        return known[0]
    if base == "pmov" and len(known) == 1:
        return known[0] if texts[0].lstrip("!").startswith("p") else str(known[0] != "0")
    if base == "scalar_parameter_address":
        return f"Unknown('the address of argument {known[0]}', runtime=True)"
    if base == "scalar_lea":
        return "(" + " + ".join(known[:2]) + ")"  # a third names the allocation the address lies in
    if base == "scalar_select" and len(known) == 3:
        return choice(*known)
    if base == "scmp" and len(known) == 2 and variant and variant[0] in _COMPARISONS:
        return _comparison(variant, known)
    template = _ARITHMETIC.get(base)
    if template is None or len(known) != (2 if "{1}" in template else 1):
        return f"Unknown({f'{instruction.opcode}, which is not known, at {instruction.address:#x}'!r})"
    if base in _UNSIGNED_OPERATIONS and variant[:1] == ["u32"]:
        known = [f"({value} & 0xffffffff)" for value in known]
    return template.format(*known)


def choice(predicate: str | None, holds: str, otherwise: str | None) -> str:
    """`select`, spelled out where the predicate is a plain name."""
    if predicate and predicate.isidentifier():
        unsure = f"doubtful({predicate}, {otherwise})"
        return f"({holds} if {predicate} is True else {otherwise} if {predicate} is False else {unsure})"
    return f"select({predicate}, {holds}, {otherwise})"


def _comparison(variant: list[str], values: list[str]) -> str:
    if variant[1].startswith("u"):
        values = [f"({value} & 0xffffffff)" for value in values]
    elif variant[1].startswith("f"):
        return "Unknown('a comparison of floats')"
    return f"({values[0]} {_COMPARISONS[variant[0]]} {values[1]})"


def _cell(text: str) -> str:
    """Address of an SMEM cell such as `[smem:[#allocation3 + s12]]`."""
    return _sum(text.removeprefix("[smem:").strip("[]"))


def value_of(text: str) -> str | None:
    """Python expression of an operand; None for floats and vector values."""
    if text.startswith("[smem:"):
        return _cell(text)
    if text.startswith("["):
        return _sum(text.strip("[]"))
    if re.fullmatch(r"[sp]\d+", text):
        return text
    if re.fullmatch(r"![sp]\d+", text):
        return f"({text[1:]} ^ True)"
    number = text.removeprefix("$")
    if re.fullmatch(r"-?\d+|0x[0-9a-f]+", number):
        return str(signed(int(number, 0)))
    return None


def _sum(text: str) -> str:
    """`#allocation3 + s12 + $0x1` as an expression."""
    terms = []
    for term in text.split("+"):
        term = term.strip()
        terms.append(_allocation(term) or value_of(term) or "never")
    return "(" + " + ".join(terms) + ")"


def _allocation(text: str) -> str | None:
    """Address of an allocation or a semaphore; None for anything else."""
    if allocation := _ALLOCATION.fullmatch(text):
        return f"frame + {int(allocation[1]) << ALLOCATION_BITS}"
    return str(semaphore_address(text)) if _SEMAPHORE.fullmatch(text) else None


def semaphore_address(name: str) -> int:
    """Address of a semaphore such as `#semaphore5`, without what is added to it."""
    return int(name.removeprefix("#semaphore")) + 1 << SEMAPHORE_BITS


def signalled(instructions: Sequence[Instruction]) -> tuple[int, ...]:
    """Semaphores that are waited for, and that no copy, local signal or check names.

    Only other devices signal them. Their numbers are the same everywhere, so the code of a signal may know
    the number alone.
    """
    waited: set[str] = set()
    known: set[str] = set()
    for instruction in instructions:
        texts = [text for _, text in instruction.operands if _SEMAPHORE.fullmatch(text.strip("[]"))]
        if instruction.opcode.startswith("vwait."):
            waited.update(texts)
        elif instruction.opcode.startswith(("vsync", "dma.")) and not _takes(instruction):
            known.update(texts)
    return tuple(semaphore_address(text.strip("[]")) for text in sorted(waited - known))


def _takes(instruction: Instruction) -> bool:
    """Whether it counts a semaphore down."""
    amount = value_of(instruction.operands[-1][1]) if instruction.opcode.startswith("vsyncadd") else None
    return amount is not None and amount.startswith("-")

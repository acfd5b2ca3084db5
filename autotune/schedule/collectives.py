"""Collective operations of XLA: who takes part, and the least time they can take.

Their code is not executed: it reads tables that the runtime provides. So they are a roofline: the bytes that
must pass the busiest link, over its bandwidth, and the way to the furthest member of the group. They are
counted as if spread over all links as evenly as can be; XLA may do worse.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.schedule.hlo import HloInstruction, array_bytes
from autotune.schedule.network import ON_CHIP, Link, Slice, bytes_per_cycle, latency_cycles

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_BRACES = re.compile(r"\{([\d,]*)\}")
_CALLED = re.compile(r"\bcalls=%?([\w.-]+)")


@dataclass(frozen=True)
class Collective:
    """A collective operation.

    Attributes:
        kind: one of `COLLECTIVES`.
        groups: ranks that take part, group by group.
        pairs: (source, destination) of a `collective-permute`.
        operand_bytes, result_bytes: its arrays on one device.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...]
    operand_bytes: int
    result_bytes: int


def collective(
    instruction: HloInstruction, module: Mapping[str, HloInstruction], ranks: int
) -> Collective | None:
    """What kind of collective operation an instruction is; None if it is none.

    A fusion counts as the first collective operation in it.
    """
    found = _collective_in(instruction, module)
    if found is None:
        return None
    operands = [module[name] for name in found.operands if name in module]
    results = [array_bytes(array) for array in found.results]
    if found.opcode.endswith("-start"):  # its result holds the operand, too
        results = [max(results)]
    return Collective(
        _kind(found.opcode) or "",
        _groups(found.text, ranks),
        tuple((a, b) for a, b in _lists(_PAIRS.search(found.text))),
        sum(array_bytes(array) for operand in operands for array in operand.results),
        sum(results),
    )


def link_bytes(operation: Collective, group: Sequence[int], around: Slice) -> dict[Link, float]:
    """Bytes that each link must pass at least for one group, none of which goes a detour."""
    count = len(group)
    if operation.kind == "collective-permute":
        share = {pair: float(operation.operand_bytes) for pair in operation.pairs if pair[0] in group}
        return _routed(share, around)
    if operation.kind in ("all-to-all", "ragged-all-to-all"):
        part = operation.operand_bytes / count
        return _routed({(a, b): part for a in group for b in group if a != b}, around)
    whole = {
        "all-gather": operation.result_bytes,
        "reduce-scatter": operation.operand_bytes,
        "all-reduce": 2 * operation.operand_bytes,
        "collective-broadcast": operation.operand_bytes,
    }[operation.kind]
    # Every chip gets (all-gather) or gives (reduce-scatter) all but what is its own, through the links it has
    # to other members of the group; the one with the fewest links takes longest. Its devices share that.
    load: dict[Link, float] = {}
    for members in _by_chip(group, around):
        routes = [_route(a, b, around) for a in members for b in group]
        outward = {route[0] for route in routes if route and route[0][1] != ON_CHIP}
        load |= {link: whole * (count - len(members)) / count / len(outward) for link in outward}
        inward = {route[0] for route in routes if route and route[0][1] == ON_CHIP}
        load |= dict.fromkeys(inward, whole / len(members))
    return load


def _by_chip(group: Sequence[int], around: Slice) -> list[list[int]]:
    chips: dict[tuple[int, ...], list[int]] = {}
    for rank in group:
        chips.setdefault(around.places[rank].coordinates, []).append(rank)
    return list(chips.values())


def least_cycles(operation: Collective, group: Sequence[int], around: Slice) -> float:
    """The least cycles one group can take: its busiest link, and the way between its furthest members."""
    chip = around.chip
    loads = link_bytes(operation, group, around)
    busiest = max((n / bytes_per_cycle(chip, [link]) for link, n in loads.items()), default=0.0)
    pairs = operation.pairs or [(a, b) for a in group for b in group]
    routes = [_route(a, b, around) for a, b in pairs if a in group]
    times = 2 if operation.kind == "all-reduce" else 1
    return busiest + times * max((latency_cycles(chip, route) for route in routes if route), default=0.0)


def moved_bytes(operation: Collective, group: Sequence[int], rank: int) -> tuple[int, int]:
    """Bytes that `rank`, a member of `group`, sends at least, and those that it gets."""
    if operation.kind == "collective-permute":
        # Not every rank need be a source, or a destination; what stays where it is does not move.
        moves = [pair for pair in operation.pairs if pair[0] != pair[1]]
        sends, gets = (sum(pair[end] == rank for pair in moves) for end in (0, 1))
        return sends * operation.operand_bytes, gets * operation.operand_bytes
    count = len(group)
    whole = operation.result_bytes if operation.kind == "all-gather" else operation.operand_bytes
    each = round((2 if operation.kind == "all-reduce" else 1) * whole * (count - 1) / count)
    return each, each


def _routed(share: Mapping[tuple[int, int], float], around: Slice) -> dict[Link, float]:
    load: Counter[Link] = Counter()
    for (source, destination), nbytes in share.items():
        for link in _route(source, destination, around):
            load[link] += nbytes  # pyright: ignore[reportArgumentType]  a Counter may count parts of bytes
    return dict(load)


def _route(source: int, destination: int, around: Slice) -> tuple[Link, ...]:
    return around.route(around.places[source], around.places[destination])


def _collective_in(
    instruction: HloInstruction, module: Mapping[str, HloInstruction]
) -> HloInstruction | None:
    if _kind(instruction.opcode):
        return instruction
    called = _CALLED.search(instruction.text)
    if called is None:
        return None
    inside = [each for each in module.values() if each.computation == called[1]]
    return next((each for each in inside if _kind(each.opcode)), None)


def _kind(opcode: str) -> str | None:
    return next((kind for kind in COLLECTIVES if opcode in (kind, f"{kind}-start")), None)


def _groups(text: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    everyone = (tuple(range(ranks)),)
    if iota := _IOTA.search(text):
        shape = [int(size) for size in iota[3].split(",")]
        table = np.arange(np.prod(shape)).reshape(shape)
        if iota[4]:
            table = table.transpose([int(axis) for axis in iota[4].split(",")])
        return tuple(tuple(row) for row in table.reshape(int(iota[1]), int(iota[2])).tolist())
    return tuple(_lists(_GROUPS.search(text))) or everyone


def _lists(found: re.Match[str] | None) -> list[tuple[int, ...]]:
    lists = _BRACES.findall(found[1]) if found else []
    return [tuple(int(number) for number in text.split(",")) for text in lists if text]

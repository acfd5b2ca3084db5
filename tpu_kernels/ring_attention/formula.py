"""What a mask and a score of positions in the whole sequence are on one rank, in one hop.

Expressions of the whole sequence have the positions q and kv. On a rank these are functions of the index in
its part and of few numbers: the places, in the ring, of the ranks that queries and keys are from. So masks
become expressions of local indices and of these numbers, which a kernel reads from SMEM.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_kernels.expressions.expression import (
    Expression,
    Load,
    Operand,
    Variable,
    loads,
    parse,
    select,
    substitute,
    text,
    with_numbers,
)
from tpu_kernels.ring_attention.layouts import Layout
from tpu_kernels.ring_attention.ring import Ring, Shifts
from tpu_kernels.splash_attention.blocks import Cases

MOST_CASES = 16
"""Ranks of a ring for which all lists of visits are made beforehand: as many for each hop."""

CAUSAL = text(Variable("q") >= Variable("kv"))
"""The text of a causal mask. Under any layout, a rank's own keys have it in local indices, too."""

_Q, _KV, _B = Variable("q"), Variable("kv"), Variable("b")


class Texts(NamedTuple):
    """The mask and the score of one hop, of local indices.

    Their loads are from the caller's captures, and behind these from `hop_captures`.
    """

    mask: str
    score: str


def local_texts(
    mask: str,
    score: str,
    ring: Ring,
    *,
    captures: int,
    lengths: tuple[int, int],
    segments: bool,
    own_keys: bool,
) -> Texts:
    """The expressions of a hop.

    Args:
        mask, score: of the whole sequence, "" for none.
        ring: which positions are where.
        captures: how many the caller gave; those of `hop_captures` follow.
        lengths: of the whole sequences of queries and keys.
        segments: whether there are segment ids.
        own_keys: whether the keys are the rank's own: their places are those of the queries.
    """
    q_place, right, left = (Load(captures + i, (), "int") for i in range(3))
    q = _position(_Q, ring.q_count, ring.size, ring.layout, q_place)
    kv = _position(_KV, ring.kv_count, ring.size, ring.layout, right)
    if ring.cut < ring.kv_count and not own_keys:
        other = _position(_KV, ring.kv_count, ring.size, ring.layout, left)
        kv = select(_KV < ring.cut, kv, other)
    whole: dict[str, Operand] = {"q": q, "kv": kv, "q_len": lengths[0], "kv_len": lengths[1]}
    in_order = mask == CAUSAL and ring.q_count == ring.kv_count
    conditions: list[Expression] = []
    if mask:
        local = own_keys and in_order
        conditions.append(parse(mask) if local else substitute(parse(mask), whole))
    if lengths[1] < ring.size * ring.kv_count and not in_order:
        conditions.append(kv < lengths[1])  # behind it there is padding, which no query sees
    if segments:
        q_id = Load(captures + 3, (_B, _Q), "int")
        kv_id = Load(captures + 4, (_B, _KV), "int")
        conditions.append(q_id.eq(kv_id))
    found: Expression | None = None
    for condition in conditions:
        found = condition if found is None else found & condition
    return Texts(
        "" if found is None else text(found),
        text(substitute(parse(score), whole)) if score else "",
    )


def hop_captures(
    ring: Ring, shifts: Shifts, q_ids: jax.Array | None, all_kv_ids: jax.Array | None
) -> list[jax.Array]:
    """The numbers that the expressions of a hop load besides the caller's captures.

    Args:
        shifts: how far the keys have come.
        q_ids: [B, L / ranks] int32, of this rank's queries; None without segments.
        all_kv_ids: [ranks, B, S / ranks] int32, of all ranks' keys.
    """
    right, left = ring.place(shifts), ring.place(shifts, -1)
    numbers = [jnp.asarray(place, jnp.int32) for place in (ring.place(), right, left)]
    if q_ids is None or all_kv_ids is None:
        return numbers
    kv_ids = jnp.concatenate([all_kv_ids[right][:, : ring.cut], all_kv_ids[left][:, ring.cut :]], axis=1)
    return [*numbers, q_ids, kv_ids]


def _position(index: Expression, count: int, ranks: int, layout: Layout, place: Expression) -> Expression:
    """The position in the whole sequence of an index on the rank at a place; see `layouts.positions`."""
    if layout == "contiguous":
        return place * count + index
    half = count // 2
    later = (2 * ranks - 2) * half - place * (2 * half)
    return place * half + index + select(index >= half, later, 0)


def hop_cases(mask: str, ring: Ring, shifts: Shifts, captures: int) -> Cases | None:
    """What the mask of a hop is on each rank; None where that depends on more than the rank's place.

    With it no list of visits is made on the chip, and a kernel knows the kinds of its tiles.

    Args:
        mask: text of the hop's mask, with the loads of `local_texts`.
        shifts: how far the keys have come.
        captures: how many the caller gave.
    """
    if not mask or ring.size > MOST_CASES or not all(isinstance(shift, int) for shift in shifts):
        return None
    masks = []
    for of in ring.ranks():
        places = [ring.place(of=of), ring.place(shifts, of=of), ring.place(shifts, -1, of)]
        known = {captures + i: place for i, place in enumerate(places)}
        masks.append(with_numbers(parse(mask), known))
    return None if any(loads(one) for one in masks) else Cases(tuple(masks), ring.place())

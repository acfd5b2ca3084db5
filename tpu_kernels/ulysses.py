"""Attention over sequences that lie on several ranks, by turns of heads and positions.

DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509): an all_to_all gives each rank the whole sequence of
some of the heads, attention is computed there as on one rank, and another all_to_all brings the results back
to where the queries are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch.nn import functional as F

from tpu_kernels._constant import constant
from tpu_kernels._integers import check_integers, int32
from tpu_kernels._select import Implementation
from tpu_kernels.collectives import any_dtype
from tpu_kernels.collectives.ops import AnyAxis, AnyMesh
from tpu_kernels.collectives.places import RanksAlong, line_of
from tpu_kernels.expressions.expression import (
    Expression,
    Load,
    Variable,
    loads,
    parse,
    rebuild,
    text,
)
from tpu_kernels.masks import Mask
from tpu_kernels.ring_attention.layouts import Layout
from tpu_kernels.ring_attention.sequence import alike, by_ranks, check_layout, check_length, gather, in_order
from tpu_kernels.splash_attention import arguments, terms
from tpu_kernels.splash_attention.api import splash_attention
from tpu_kernels.splash_attention.arguments import Sizes
from tpu_kernels.splash_attention.terms import ScoreMod
from tpu_kernels.splash_attention.tiling import SplashTiling

_OP = "ulysses_attention"
_H = Variable("h")


class _Options(TypedDict, total=False):
    """The keyword arguments of `ulysses_attention` but `return_lse`."""

    layout: Layout
    length: int | None
    mask: Mask | torch.Tensor | None
    bias: torch.Tensor | None
    score_mod: Callable[..., Any] | ScoreMod | None
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    scale: float | None
    dropout_p: float
    seed: torch.Tensor | int | None
    q_segment_ids: torch.Tensor | None
    kv_segment_ids: torch.Tensor | None
    impl: Implementation
    tiling: SplashTiling | None


@overload
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mesh: AnyMesh,
    axis: AnyAxis,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mesh: AnyMesh,
    axis: AnyAxis,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mesh: AnyMesh,
    axis: AnyAxis,
    *,
    layout: Layout = "contiguous",
    length: int | None = None,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | ScoreMod | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | int | None = None,
    return_lse: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`splash_attention` over the whole sequence, of which each rank has its positions of all heads.

    With N ranks, each computes Hq / N of the query heads. A key or value head that queries of several ranks
    read goes to each of them: of Hkv heads, lcm(Hkv, N) are sent.

    Masks, score changes and tensors for them speak of the whole: of positions in the whole sequence, and of
    all heads. Every rank gives them whole. The gradient of such a tensor is what this rank's heads give; the
    sum over ranks is the whole. Those of query, key and value are complete. All can be differentiated twice.

    Args:
        query: [..., Hq, L/N, D], float16, bfloat16, float32 or float64, on `tpu` or `cpu`: this rank's
            positions. Hq must be a multiple of N. Dimensions before the heads are batch.
        key: [..., Hkv, S/N, D]. Query head h reads head h // (Hq // Hkv).
        value: [..., Hkv, S/N, Dv].
        mesh: from `bridge.get_pallas_mesh`, or a DeviceMesh with names. All of its ranks make the call.
        axis: which of the mesh's axes; or (outer, inner), two whose ranks are one line, row by row.
        layout: which positions a rank has, as for `shard_sequence`. Both cost the same work here; "zigzag"
            costs a copy more.
        length: of the whole sequences without padding, of queries and keys alike; None if there is none.
            Keys from there on are not seen; such queries have output 0, and lse -inf.
        q_segment_ids: integers [..., L/N], of this rank's positions; they are gathered.
        kv_segment_ids: [..., S/N]; None for those of the queries.
        mask, bias, score_mod, alibi_slopes, sinks: as for `splash_attention` with all heads and the whole
            sequence of `length`.
        dropout_p: as there; but other elements are dropped than on one rank, with the same seed.
        seed: as there. Ranks may give one seed or their own: heads of different ranks have different numbers.
        return_lse: return lse as well.
        options: soft_cap, scale, impl and tiling, as for `splash_attention`.

    Returns:
        The output [..., Hq, L/N, Dv] in the dtype of query, contiguous; with `return_lse` also lse
        [..., Hq, L/N], float32, or float64 for float64.

    Raises:
        TypeError, RuntimeError, ValueError: as `splash_attention`; or Hq is not a multiple of N, or a length
            that these parts can't have.
    """
    line = line_of(_OP, mesh, axis)
    check_layout(_OP, layout)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if hasattr(tensor, "device_mesh"):
            raise TypeError(
                f"{_OP}: {name} must be a rank's own tensor, got a DTensor; pass {name}.to_local()"
            )
    query, key, value = arguments.under_autocast(query, key, value)
    sizes = arguments.sizes_of(query, key, value)
    given_too = {"bias": bias, "score_mod": score_mod, "alibi_slopes": alibi_slopes, "sinks": sinks}
    turn = _Turn(mesh, line, layout, _named(mask, given_too, layout, length, dropout_p, options))
    heads = _own_heads(query, sizes, line)
    q_length, kv_length = _lengths(query, key, line, length)
    given = _Given(heads, sizes._replace(q_len=q_length, kv_len=kv_length))
    if q_segment_ids is not None:
        if kv_segment_ids is None and query.shape[-2] == key.shape[-2]:
            kv_segment_ids = q_segment_ids
        q_segment_ids = turn.ids("q_segment_ids", q_segment_ids, query.shape[-2], q_length)
    if kv_segment_ids is not None:
        kv_segment_ids = turn.ids("kv_segment_ids", kv_segment_ids, key.shape[-2], kv_length)
    if query.shape[-3] != heads.all:
        query = query.expand(*query.shape[:-3], heads.all, *query.shape[-2:])
    output, lse = splash_attention(
        turn.to_heads(query, q_length),
        turn.to_heads(_repeated(key, line.ranks), kv_length),
        turn.to_heads(_repeated(value, line.ranks), kv_length),
        mask=given.mask(mask),
        bias=given.own("bias", bias, -3),
        score_mod=given.score_mod(score_mod),
        alibi_slopes=given.own("alibi_slopes", alibi_slopes, -1),
        sinks=given.own("sinks", sinks, -1),
        dropout_p=dropout_p,
        seed=_seed(seed, query.device, heads.first) if dropout_p else None,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        return_lse=True,
        **options,
    )
    padded = query.shape[-2] * line.ranks
    output = turn.to_positions(output, padded, 0.0)
    if not return_lse:
        return output
    return output, turn.to_positions(lse[..., None], padded, -math.inf)[..., 0]


# What each rank has ------------------------------------------------------------------------------------


def _named(mask: Mask | torch.Tensor | None, tensors: dict[str, Any], *others: Any) -> str:
    """What ranks must have alike besides tensors; "" in a compiled graph."""
    if torch.compiler.is_compiling():
        return ""
    present = [name for name, value in tensors.items() if value is not None]
    shown = mask.text if isinstance(mask, Mask) else type(mask).__name__
    return f"mask={shown}, {', '.join(present)}, {', '.join(map(repr, others))}"


class _Turn(NamedTuple):
    """From a rank's positions of all heads to its heads of all positions, and back."""

    mesh: AnyMesh
    line: RanksAlong
    layout: Layout
    arguments: str

    def to_heads(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """[..., H, n, D] as [..., H/N, length, D]."""
        heads, positions = x.dim() - 3, x.dim() - 2
        with alike(f"{_OP}({self.arguments})"):
            for axis, size in reversed(self._axes()):  # so that positions come in the order of the line
                if size > 1:
                    x = any_dtype.all_to_all(x, self.mesh, axis, heads, positions)
        return in_order(x, positions, self.line.ranks, self.layout).narrow(positions, 0, length)

    def to_positions(self, x: torch.Tensor, padded: int, fill: float) -> torch.Tensor:
        """[..., H/N, length, D] as [..., H, n, D], with `fill` in padding."""
        heads, positions = x.dim() - 3, x.dim() - 2
        x = F.pad(x, (0, 0, 0, padded - x.shape[-2]), value=fill)
        x = by_ranks(x, positions, self.line.ranks, self.layout)
        for axis, size in self._axes():
            if size > 1:
                x = any_dtype.all_to_all(x, self.mesh, axis, positions, heads)
        return x

    def ids(self, name: str, ids: torch.Tensor, own: int, length: int) -> torch.Tensor:
        """[..., n] as [..., length], int32."""
        check_integers(_OP, name, ids)
        if not ids.dim() or ids.shape[-1] != own:
            raise RuntimeError(
                f"{_OP}: {name} must have the length {own} of this rank's part, got {list(ids.shape)}"
            )
        dim = ids.dim() - 1
        whole = gather(int32(ids), self.mesh, self.line, dim)
        return in_order(whole, dim, self.line.ranks, self.layout).narrow(dim, 0, length)

    def _axes(self) -> list[tuple[str, int]]:
        return list(zip(self.line.axes, self.line.sizes, strict=True))


class _Heads(NamedTuple):
    """The query heads that this rank computes: `own` of `all`, from `first` on."""

    all: int
    first: int
    own: int


def _own_heads(query: torch.Tensor, sizes: Sizes, line: RanksAlong) -> _Heads:
    if query.dim() < 3:
        raise RuntimeError(
            f"{_OP}: query must be [..., heads, length, head dimension], got {list(query.shape)}"
        )
    if sizes.q_heads % line.ranks:
        raise ValueError(
            f"{_OP}: query must have a multiple of {line.ranks} heads, as there are so many ranks, got "
            f"{sizes.q_heads}; tpu_kernels.ring_attention takes any number"
        )
    # Heads are divided along the inner axis first, then each of these parts along the outer one.
    part = 0
    for size, place in zip(reversed(line.sizes), reversed(line.places), strict=True):
        part = part * size + place
    own = sizes.q_heads // line.ranks
    return _Heads(sizes.q_heads, part * own, own)


def _lengths(query: torch.Tensor, key: torch.Tensor, line: RanksAlong, length: int | None) -> tuple[int, int]:
    """Of the whole sequences of queries and of keys."""
    q_length, kv_length = query.shape[-2] * line.ranks, key.shape[-2] * line.ranks
    if length is None:
        return q_length, kv_length
    check_length(_OP, length)
    if q_length != kv_length:
        raise ValueError(
            f"{_OP}: length is that of queries and keys alike, and this rank has {query.shape[-2]} and "
            f"{key.shape[-2]} of them; leave it out, and mask padding with masks.lengths"
        )
    if length > q_length:
        raise ValueError(
            f"{_OP}: {line.ranks} ranks with {query.shape[-2]} positions each have {q_length}, got "
            f"length={length}"
        )
    return length, length


def _repeated(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Key or value heads so often that the ranks can divide them, each with those that its queries read."""
    if x.dim() == 2:
        x = x[None]
    copies = ranks // math.gcd(x.shape[-3], ranks)
    return x.repeat_interleave(copies, -3) if copies > 1 else x


def _seed(seed: torch.Tensor | int | None, device: torch.device, first: int) -> torch.Tensor:
    """Other numbers for each rank: dropout depends on the seed and the head, which counts from 0 on each."""
    words = arguments.seed_words(seed, device)
    step = (first * 0x9E3779B1 + 2**31) % 2**32 - 2**31  # wrapped to int32, as the sum is
    return torch.stack([words[0], words[1] + step])


# What is given for all heads ---------------------------------------------------------------------------


class _Given(NamedTuple):
    """Arguments that speak of all heads, for the heads of this rank.

    Attributes:
        heads: of this rank.
        sizes: of the whole sequence and all heads.
    """

    heads: _Heads
    sizes: Sizes

    def own(self, name: str, tensor: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        """The part of a tensor that has the query heads along `dim`, or what broadcasts to them."""
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < -dim:
            return tensor
        if tensor.shape[dim] == 1 and dim == -3:
            return tensor
        if tensor.shape[dim] != self.heads.all:
            raise RuntimeError(
                f"{_OP}: {name} must have all {self.heads.all} query heads along dimension {dim}, got "
                f"{list(tensor.shape)}"
            )
        return tensor.narrow(dim, self.heads.first, self.heads.own)

    def mask(self, mask: Mask | torch.Tensor | None) -> Mask | torch.Tensor | None:
        if not isinstance(mask, Mask):
            return self.own("mask", mask, -3)
        for one in mask.sized:
            arguments.check_sized(one, mask.captures[one.slot], self.sizes)
        # Without `sized`: it has been checked, for all heads.
        return Mask(*self._own_text(mask.text, mask.captures), mask.description)

    def score_mod(
        self, score_mod: Callable[..., Any] | ScoreMod | None
    ) -> Callable[..., Any] | ScoreMod | None:
        if score_mod is None:
            return None
        if not isinstance(score_mod, ScoreMod):
            if not callable(score_mod) or torch.compiler.is_compiling():
                return score_mod  # which is refused
            score_mod = ScoreMod.trace(score_mod)
        return ScoreMod(*self._own_text(score_mod.text, score_mod.captures))

    def _own_text(self, source: str, captures: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """The expression and its tensors for the heads of this rank."""
        for slot, dimension, variable in terms.direct_indices(source):
            # What is indexed by the head must have all of them: past the end, it would read a neighbour.
            if variable == "h" and captures[slot].shape[dimension] < self.heads.all:
                raise RuntimeError(
                    f"{_OP}: a tensor of shape {list(captures[slot].shape)} is indexed by h in dimension "
                    f"{dimension} (of a mask or score_mod), so it needs all {self.heads.all} heads there"
                )
        own = list(captures)
        for slot, dimension in _by_head(source):
            before = (slice(None),) * dimension
            own[slot] = own[slot][(*before, slice(self.heads.first, self.heads.first + self.heads.own))]
        return _of_heads(source, self.heads.first), tuple(own)


@constant
def _by_head(source: str) -> tuple[tuple[int, int], ...]:
    """(slot, dimension) of captures that are cut to this rank's heads: every load has h itself there."""
    found = loads(parse(source))
    return tuple(
        (slot, dimension)
        for slot in sorted({load.slot for load in found})
        for dimension in range(min(len(load.index) for load in found if load.slot == slot))
        if all(load.index[dimension] is _H for load in found if load.slot == slot)
    )


@constant
def _of_heads(source: str, first: int) -> str:
    """The expression for heads that count from `first` on, with the captures of `_by_head` cut."""
    cut = set(_by_head(source))

    def change(e: Expression) -> Expression:
        if e is _H:
            return _H + first
        if isinstance(e, Load):  # whose indices have been changed
            index = (_H if (e.slot, i) in cut else one for i, one in enumerate(e.index))
            return Load(e.slot, tuple(index), e.kind)
        return e

    return text(rebuild(parse(source), change))

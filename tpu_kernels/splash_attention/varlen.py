"""Attention over sequences of different lengths, one packed behind the other."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict, Unpack, overload

import torch

from tpu_kernels._integers import check_integers, int32
from tpu_kernels._select import Implementation
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention import arguments, terms
from tpu_kernels.splash_attention.api import splash_attention
from tpu_kernels.splash_attention.tiling import SplashTiling

_OP = "varlen_attention"


class _Options(TypedDict, total=False):
    """The keyword arguments of `varlen_attention` but `return_lse`."""

    window_size: tuple[int, int]
    alignment: Literal["bottom_right", "top_left"]
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    scale: float | None
    dropout_p: float
    seed: torch.Tensor | int | None
    impl: Implementation
    tiling: SplashTiling | None


@overload
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    window_size: tuple[int, int] = (-1, -1),
    alignment: Literal["bottom_right", "top_left"] = "bottom_right",
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | int | None = None,
    return_lse: bool = False,
    impl: Implementation = "auto",
    tiling: SplashTiling | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence to itself, as `torch.nn.attention.varlen.varlen_attn` and flash-attn.

    Sequence i has the queries from `cu_seqlens_q[i]` to before `cu_seqlens_q[i + 1]`, and the keys likewise.
    Tokens behind the last sequence are padding: they see nothing, and their output is 0. So is that of the
    queries of a sequence without keys. How long sequences are is data: nothing is compiled again for others.

    Args:
        query: [Tq, Hq, D], floating; other dtypes, heads and sizes as for `splash_attention`.
        key: [Tk, Hkv, D].
        value: [Tk, Hkv, Dv].
        cu_seqlens_q: [N + 1], int32 or int64: 0, then where each sequence ends, never decreasing.
        cu_seqlens_k: the same of the keys; None for that of the queries.
        window_size: how many keys before and after its own position a query sees; -1 for all of them.
            (-1, -1) is full attention, (-1, 0) causal, (w, 0) causal with a window.
        alignment: the position of a query among the keys of its sequence: `bottom_right` puts the last query
            at the last key, as torch and flash-attn do, `top_left` the first at the first.
        alibi_slopes: [Hq], or [N, Hq] with others for each sequence, floating. A score is lowered by the
            slope times the distance of the key from the position of the query.
        soft_cap, sinks, scale, dropout_p, seed, impl, tiling: as for `splash_attention`.
        return_lse: return lse as well.

    Returns:
        The output [Tq, Hq, Dv] in the dtype of query; with `return_lse` also lse [Tq, Hq], float32.

    Raises:
        TypeError, RuntimeError, ValueError: as `splash_attention`, and for other shapes than these.
    """
    for name, t in {"query": query, "key": key, "value": value}.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{_OP}: {name} must be a torch.Tensor, got {type(t).__name__}")
        if t.dim() != 3:
            raise RuntimeError(f"{_OP}: {name} must be [tokens, heads, head dimension], got {list(t.shape)}")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, cu in {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}.items():
        check_integers(_OP, name, cu)
        arguments.check_same_device(query.device, {name: cu})
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise RuntimeError(f"{_OP}: {name} must be [sequences + 1], got {list(cu.shape)}")
    sequences = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] - 1 != sequences:
        raise RuntimeError(
            f"{_OP}: cu_seqlens_q and cu_seqlens_k must tell of the same sequences, got "
            f"{sequences} and {cu_seqlens_k.shape[0] - 1}"
        )
    if alignment not in ("bottom_right", "top_left"):
        raise ValueError(f"{_OP}: alignment must be 'bottom_right' or 'top_left', got {alignment!r}")
    window = _window(window_size)
    places = places_of(cu_seqlens_q, cu_seqlens_k, query.shape[0], alignment)
    result = splash_attention(
        *(t.transpose(0, 1)[None] for t in (query, key, value)),
        mask=Mask(terms.in_range(), visible_keys(places, window)),
        soft_cap=soft_cap,
        score_mod=None if alibi_slopes is None else _alibi(alibi_slopes, query, sequences, places),
        sinks=sinks,
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        return_lse=True,
        impl=impl,
        tiling=tiling,
    )
    output, lse = (t[0].transpose(0, 1) for t in result)
    return (output.contiguous(), lse.contiguous()) if return_lse else output.contiguous()


def _window(window_size: tuple[int, int]) -> tuple[int, int]:
    """`window_size` if it is one."""
    if (
        not isinstance(window_size, tuple | list)
        or len(window_size) != 2
        or any(isinstance(n, bool) or not isinstance(n, int | torch.SymInt) for n in window_size)
    ):
        raise TypeError(
            f"{_OP}: window_size must be two ints, the keys that a query sees before and after its own "
            f"position, or -1 for all of them, got {window_size!r}"
        )
    before, after = window_size
    if before < -1 or after < -1:
        raise ValueError(f"{_OP}: window_size must be at least -1, which is for all, got {window_size!r}")
    return before, after


class Places(NamedTuple):
    """Where each query belongs, int32 [tokens] each.

    Attributes:
        sequence: the number of its sequence; that of all sequences for padding.
        first, end: the first key of the sequence, and the one behind the last.
        own: the position of the query among all keys.
    """

    sequence: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    own: torch.Tensor


def places_of(
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    tokens: int,
    alignment: str = "bottom_right",
    used_k: torch.Tensor | None = None,
) -> Places:
    """The places of `tokens` queries.

    Args:
        cu_q, cu_k, alignment: as in `varlen_attention`.
        used_k: int [N], how many keys of each sequence count, from its first on; None for all.
    """
    cu_q, cu_k = int32(cu_q), int32(cu_k)
    position = torch.arange(tokens, dtype=torch.int32, device=cu_q.device)
    # The number of ends at or before a token; padding counts all of them, and gets a sequence without keys.
    sequence = torch.searchsorted(cu_q[1:].contiguous(), position, right=True, out_int32=True)
    begins = torch.cat([cu_k, cu_k[-1:]])
    used_ends = cu_k[1:] if used_k is None else cu_k[:-1] + int32(used_k)
    ends = torch.cat([used_ends, cu_k[-1:], cu_k[-1:]])
    first, end = begins[sequence], ends[sequence]
    if alignment == "bottom_right":
        own = position + end - torch.cat([cu_q[1:], cu_q[-1:], cu_q[-1:]])[sequence]
    else:
        own = position + first - torch.cat([cu_q, cu_q[-1:]])[sequence]
    return Places(sequence, first, end, own)


def visible_keys(places: Places, window_size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query the first key that it sees and the one behind the last, int32 [tokens] each.

    The keys of a sequence are neighbours, and a window cuts at its ends: two numbers say it all. Any negative
    number in `window_size` is for all keys.
    """
    first, end = places.first, places.end
    before, after = [min(n, 2**30) for n in window_size]  # so that sums with positions stay in int32
    if before >= 0:
        first = torch.maximum(first, places.own - before)
    if after >= 0:
        end = torch.minimum(end, places.own + after + 1)
    return first, end


def _alibi(slopes: torch.Tensor, query: torch.Tensor, sequences: int, places: Places) -> terms.ScoreMod:
    """The change of the scores. Raises `TypeError` or `RuntimeError` for what are no slopes."""
    arguments.check_additional(query, alibi_slopes=slopes)
    heads = query.shape[1]
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise RuntimeError(
            f"{_OP}: alibi_slopes must be [{heads}], one for each query head, or [{sequences}, {heads}], "
            f"others for each sequence, got {list(slopes.shape)}"
        )
    of_sequence = slopes.dim() == 2
    if of_sequence:
        padded = torch.cat([slopes, slopes.new_zeros(1, heads)])  # padding belongs to none
        slopes = padded[places.sequence].T
    slopes = slopes.reshape(1, heads, -1, 1)
    return terms.ScoreMod(terms.alibi_from(of_sequence), (slopes, places.own))

"""What a caller gives in the form that the op takes: rank 4, equal batches, int32; or a clear refusal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tpu_kernels._checks import check_floating, is_number
from tpu_kernels._integers import check_integers, int32
from tpu_kernels.masks import Sized
from tpu_kernels.splash_attention.terms import Axes

_OP = "splash_attention"


class Sizes(NamedTuple):
    """Sizes of the scores: `[*batch, q_heads, q_len, kv_len]`. `rank` is that of the result."""

    batch: tuple[int, ...]
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    rank: int

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape of the scores."""
        return (*self.batch, self.q_heads, self.q_len, self.kv_len)

    @property
    def flat_batch(self) -> int:
        """Number of batch entries."""
        return math.prod(self.batch)


def under_autocast(query: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in the dtype of `torch.autocast`, if it is on for their device; float64 stays."""
    tensors = (query, *others)
    device = query.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def sizes_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, op: str = _OP) -> Sizes:
    """What the three tensors of a call of `op` have in common.

    Raises `TypeError` for dtypes that differ and `RuntimeError` for shapes that don't belong together.
    """
    given = {"query": query, "key": key, "value": value}
    check_same_dtype(op, **given)
    check_same_device(query.device, given, op)
    for name, t in given.items():
        if t.dim() < 2:
            raise RuntimeError(
                f"{op}: {name} must be [..., heads, length, head dimension], with at least the last two "
                f"dimensions, got {list(t.shape)}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(f"{op}: query and key must have the same last dimension, got {_shapes(given)}")
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"{op}: key and value must have the same length, their last dimension but one, "
            f"got {_shapes(given)}"
        )
    q_heads, k_heads, v_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in given.values())
    kv_heads = _common_heads(q_heads, k_heads, v_heads)
    if q_heads == 1:
        q_heads = kv_heads
    for name, heads in (("key", k_heads), ("value", v_heads)):
        if heads != 1 and (q_heads % heads if heads else q_heads):
            raise RuntimeError(
                f"{op}: query must have a multiple of the heads (dimension -3) that {name} has, "
                f"got {_shapes(given)}"
            )
    batch = broadcast([tuple(t.shape[:-3]) for t in given.values()])
    if batch is None:
        raise RuntimeError(
            f"{op}: the batch dimensions (all but the last three) must be equal or 1, got {_shapes(given)}"
        )
    return Sizes(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=query.shape[-2],
        kv_len=key.shape[-2],
        rank=max(t.dim() for t in given.values()),
    )


def as_rank_4(tensor: torch.Tensor, heads: int, sizes: Sizes) -> torch.Tensor:
    """`[..., some heads, length, dimension]` as `[flat batch, heads, length, dimension]`."""
    if tensor.dim() == 2:
        tensor = tensor[None]
    if tensor.shape[-3] != heads:
        tensor = tensor.repeat_interleave(heads // tensor.shape[-3], -3)
    if tuple(tensor.shape[:-3]) != sizes.batch:
        tensor = tensor.expand(*sizes.batch, *tensor.shape[-3:])
    if len(sizes.batch) == 1:
        return tensor
    return tensor.reshape(sizes.flat_batch, *tensor.shape[-3:])


def from_rank_4(result: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """`[flat batch, heads, length, ...]` with the dimensions in front that the arguments had."""
    if sizes.rank == 2:
        return result[0, 0]
    return result if len(sizes.batch) == 1 else result.reshape(*sizes.batch, *result.shape[1:])


def aligned(name: str, tensor: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, Axes]:
    """A tensor that broadcasts to the scores as rank 4, `[flat batch or 1, Hq or 1, L or 1, S or 1]`.

    Nothing is copied for an expanded dimension unless the tensor is asked for its gradient.
    Raises `RuntimeError` if it does not broadcast.
    """
    shape = (*(1 for _ in range(len(sizes.scores) - tensor.dim())), *tensor.shape)
    if len(shape) > len(sizes.scores) or any(
        a != 1 and a != b for a, b in zip(shape, sizes.scores, strict=True)
    ):
        raise RuntimeError(
            f"{_OP}: {name} must broadcast to the shape of the scores, {list(sizes.scores)} "
            f"([..., query heads, query length, key length]), got {list(tensor.shape)}"
        )
    if not tensor.requires_grad:
        tensor = _without_expansion(tensor)
        shape = (*(1 for _ in range(len(sizes.scores) - tensor.dim())), *tensor.shape)
    tensor = tensor.reshape(shape)
    batch = shape[:-3]
    if all(size == 1 for size in batch):
        tensor = tensor.reshape(1, *shape[-3:])
    elif len(batch) > 1:
        tensor = tensor.expand(*sizes.batch, *shape[-3:]).reshape(sizes.flat_batch, *shape[-3:])
    b, h, q, kv = (varies(size) for size in tensor.shape)
    return tensor, (b, h, q, kv)


def varies(size: int) -> bool:
    """Whether a dimension is not of size 1. A bool also of a symbolic size: `if` makes it a guard."""
    if size == 1:
        return False
    return True


def per_position(
    name: str, ids: torch.Tensor, length: int, sizes: Sizes, op: str = _OP
) -> tuple[torch.Tensor, bool]:
    """Integers `[..., length]` as int32 `[flat batch or 1, length]`, and whether they differ by batch entry.

    Raises `TypeError` if they are no integers and `RuntimeError` for another shape.
    """
    check_integers(op, name, ids)
    expected = (*sizes.batch, length)
    shape = (*(1 for _ in range(len(expected) - ids.dim())), *ids.shape)
    if (
        len(shape) > len(expected)
        or shape[-1] != length
        or any(a != 1 and a != b for a, b in zip(shape[:-1], sizes.batch, strict=True))
    ):
        raise RuntimeError(
            f"{op}: {name} must have the shape {list(expected)}, or one that broadcasts to it in all "
            f"dimensions but the last, got {list(ids.shape)}"
        )
    ids = int32(ids)
    if all(size == 1 for size in shape[:-1]):
        return ids.reshape(1, length), False
    return ids.reshape(shape).expand(expected).reshape(sizes.flat_batch, length), True


def seed_words(seed: torch.Tensor | int | None, device: torch.device) -> torch.Tensor:
    """Two int32 numbers that dropout starts from; None draws them from torch's generator of the device.

    Raises `TypeError` or `ValueError` for what is no seed.
    """
    if seed is None:
        return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)
    if isinstance(seed, torch.Tensor):
        check_integers(_OP, "seed", seed)
        check_same_device(device, {"seed": seed})
        if seed.dtype == torch.int32 and tuple(seed.shape) == (2,):
            return seed
        if seed.numel() != 1:
            raise ValueError(
                f"{_OP}: seed must be one integer or int32 of shape [2], got {seed.dtype} {list(seed.shape)}"
            )
        whole = seed.reshape(()).to(torch.int64)
        # Shifts keep the sign, so both halves are int32 numbers.
        return torch.stack([(whole << 32) >> 32, whole >> 32]).to(torch.int32)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{_OP}: seed must be an integer or a tensor of integers, got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"{_OP}: seed must have at most 64 bits, got {seed}")
    words = [(seed >> by & 0xFFFFFFFF) for by in (0, 32)]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32, device=device)


# Checks -------------------------------------------------------------------------------------------


def check_same_dtype(op: str, **tensors: torch.Tensor) -> None:
    """Raise `TypeError` unless all are of one real floating dtype."""
    check_floating(op, **tensors)
    if len({t.dtype for t in tensors.values()}) > 1:
        found = ", ".join(f"{name} {t.dtype}" for name, t in tensors.items())
        raise TypeError(f"{op}: {' and '.join(tensors)} must have the same dtype, got {found}")


def check_additional(query: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raise `TypeError` for a tensor that is not floating, or is float64 beside a query that is not."""
    check_floating(_OP, **tensors)
    check_same_device(query.device, tensors)
    for name, t in tensors.items():
        if t is not None and t.dtype == torch.float64 and query.dtype != torch.float64:
            raise TypeError(
                f"{_OP}: {name} is float64 and query {query.dtype}; convert {name}, or query, key and value"
            )


def check_same_device(
    device: torch.device, tensors: Mapping[str, torch.Tensor | None], op: str = _OP
) -> None:
    """Raise `RuntimeError` for a tensor that is not on `device`, the query's."""
    for name, t in tensors.items():
        if t is not None and t.device != device:
            raise RuntimeError(
                f"{op}: all tensors must be on one device, got query on {device} and {name} on {t.device}"
            )


def check_sized(sized: Sized, tensor: Any, sizes: Sizes) -> None:
    """Raise `ValueError` for a tensor or array of a mask that has other sizes than the scores."""
    lengths = {"b": sizes.flat_batch, "h": sizes.q_heads, "q": sizes.q_len, "kv": sizes.kv_len}
    axes = sized.axes[-len(tensor.shape) :]
    for axis, size in zip(axes, tensor.shape, strict=True):
        if size != lengths[axis.rstrip("?")] and not (axis.endswith("?") and size == 1):
            letters = {"b": "B", "h": "Hq", "q": "L", "kv": "S"}
            one = {axis: " or 1" if axis.endswith("?") else "" for axis in axes}
            counts = {axis: lengths[axis.rstrip("?")] for axis in axes}
            wanted = ", ".join(f"{counts[axis]}{one[axis] if counts[axis] != 1 else ''}" for axis in axes)
            meaning = ", ".join(f"{letters[axis.rstrip('?')]}{one[axis]}" for axis in axes)
            raise ValueError(
                f"{_OP}: {sized.name} must be [{wanted}] ([{meaning}]), got {list(tensor.shape)}; {sized.fix}"
            )


def check_probability(dropout_p: float) -> float:
    """`dropout_p` as a float. Raises `TypeError` or `ValueError` for what is no probability."""
    if not is_number(dropout_p):
        raise TypeError(f"{_OP}: dropout_p must be a float, got {dropout_p!r}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{_OP}: dropout_p must be between 0 and 1, got {dropout_p}")
    return float(dropout_p)


def check_scale(scale: float | None) -> float | None:
    """`scale` as a float. Raises `TypeError` for what is no number."""
    if scale is None:
        return None
    if not is_number(scale):
        raise TypeError(f"{_OP}: scale must be a float or None, got {scale!r}")
    return float(scale)


def _common_heads(q_heads: int, k_heads: int, v_heads: int) -> int:
    """How many heads key and value are given; fewer than the query's if they can share."""
    if k_heads == v_heads:
        return k_heads
    small, large = sorted((k_heads, v_heads))
    return large if small and large % small == 0 else q_heads


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """What all `shapes` broadcast to; None if they don't."""
    rank = max(map(len, shapes))
    result = [1] * rank
    for shape in shapes:
        for place, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[place] != 1 and size != result[place]:
                return None
            if size != 1:
                result[place] = size
    return tuple(result)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(t.shape)}" for name, t in tensors.items())


def _without_expansion(tensor: torch.Tensor) -> torch.Tensor:
    """The same with size 1 where a dimension only repeats itself."""
    for place, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(place, 0, 1)
    return tensor

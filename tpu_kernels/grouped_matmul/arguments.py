"""Checks of the arguments of `grouped_matmul`, and their form as the op takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bridge import device
from tpu_kernels._checks import check_floating
from tpu_kernels._integers import check_integers, int32
from tpu_kernels.grouped_matmul.epilogue import ACTIVATIONS

_QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)

Pair = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""One tensor, or two for a gated product: for the matrix that is activated, and for the one that gates."""


class Columns(NamedTuple):
    """What belongs to the columns of one matrix of each group.

    Attributes:
        rhs: [G, K, N] or [G, N, K].
        bias: [G, N].
        scale: [G, N] or [G, B, N].
    """

    rhs: Any
    bias: torch.Tensor | None
    scale: torch.Tensor | None


NO_COLUMNS = Columns(None, None, None)
"""In place of a second matrix."""


def pairs(op: str, rhs: Pair, bias: Pair | None, scale: Pair | None, gated: bool) -> tuple[Columns, ...]:
    """One or two `Columns`. Raises `TypeError` if some are one tensor and some two."""
    given = {"rhs": rhs, "bias": bias, "rhs_scale": scale}
    if isinstance(rhs, tuple | list):
        for name, value in given.items():
            if value is not None and (not isinstance(value, tuple | list) or len(value) != 2):
                raise TypeError(
                    f"{op}: rhs is a pair, so {name} must be a pair of tensors, got {_described(value)}"
                )
        if gated:
            raise TypeError(f"{op}: gated=True is for one rhs that has both matrices, got a pair")
        none = (None, None)
        return tuple(map(Columns, rhs, none if bias is None else bias, none if scale is None else scale))
    for name, value in given.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {_described(value)}")
    assert not isinstance(bias, tuple) and not isinstance(scale, tuple)
    return (Columns(rhs, bias, scale),)


def _described(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def check(
    op: str,
    lhs: torch.Tensor,
    columns: tuple[Columns, ...],
    group_sizes: torch.Tensor,
    *,
    transpose_rhs: bool,
    gated: bool,
    activation: str | None,
    out_dtype: torch.dtype | None,
    lhs_scale: torch.Tensor | None,
    existing_out: torch.Tensor | None,
) -> None:
    """Raise for dtypes, shapes and devices that don't belong together; sizes are checked elsewhere."""
    check_integers(op, "group_sizes", group_sizes)
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or not out_dtype.is_floating_point):
        raise TypeError(f"{op}: out_dtype must be a floating torch.dtype or None, got {out_dtype!r}")
    _check_dtypes(op, lhs, columns, lhs_scale, existing_out)
    rhs = columns[0].rhs
    axis_k, axis_n = (2, 1) if transpose_rhs else (1, 2)
    for each in columns:
        if lhs.dim() != 2 or each.rhs.dim() != 3 or each.rhs.shape[axis_k] != lhs.shape[1]:
            raise RuntimeError(
                f"{op}: lhs must be [M, K] and rhs {'[G, N, K]' if transpose_rhs else '[G, K, N]'}, got "
                f"{list(lhs.shape)} and {list(each.rhs.shape)}"
                + ("" if transpose_rhs else "; transpose_rhs=True takes [G, N, K]")
            )
        if each.rhs.shape != rhs.shape:
            raise RuntimeError(
                f"{op}: both matrices of a group must have the same shape, got {list(rhs.shape)} and "
                f"{list(each.rhs.shape)}"
            )
    if gated and rhs.shape[axis_n] % 2:
        raise RuntimeError(
            f"{op}: gated=True takes matrices of 2 N columns, got {list(rhs.shape)}, an odd number of them"
        )
    groups, wide = rhs.shape[0], rhs.shape[axis_n]
    for each in columns:
        if each.bias is not None and each.bias.shape != (groups, wide):
            raise RuntimeError(f"{op}: bias must be [{groups}, {wide}], got {list(each.bias.shape)}")
    if existing_out is not None:
        shape = (lhs.shape[0], wide // 2 if gated else wide)
        if existing_out.shape != shape:
            raise RuntimeError(f"{op}: existing_out must be {list(shape)}, got {list(existing_out.shape)}")
    _check_scales(op, lhs, lhs_scale, columns, groups, wide)
    others = {"group_sizes": group_sizes, "lhs_scale": lhs_scale, "existing_out": existing_out}
    for each in columns:
        others |= {"rhs": each.rhs, "bias": each.bias, "rhs_scale": each.scale}
        for name, tensor in others.items():
            if tensor is not None and tensor.device != lhs.device:
                raise RuntimeError(
                    f"{op}: all tensors must be on one device, got lhs on {lhs.device} and {name} on "
                    f"{tensor.device}"
                )


def _check_dtypes(
    op: str,
    lhs: torch.Tensor,
    columns: tuple[Columns, ...],
    lhs_scale: torch.Tensor | None,
    existing_out: torch.Tensor | None,
) -> None:
    for name, tensor, scale in (
        ("lhs", lhs, lhs_scale),
        *(("rhs", each.rhs, each.scale) for each in columns),
    ):
        check_floating(op, **{f"{name}_scale": scale})
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _QUANTIZED:
            check_floating(op, **{name: tensor})
            if scale is not None:
                raise TypeError(
                    f"{op}: {name}_scale is for {name} of int8, float8_e4m3fn or float8_e5m2, got "
                    f"{tensor.dtype}; multiply it in first"
                )
        elif tensor.requires_grad:
            raise TypeError(
                f"{op}: {name} of {tensor.dtype} gets no gradient, and requires one; give {name}.detach()"
            )
    for each in columns:
        check_floating(op, bias=each.bias)
        if each.rhs.dtype != columns[0].rhs.dtype:
            raise TypeError(
                f"{op}: both matrices of a group must have the same dtype, got {columns[0].rhs.dtype} and "
                f"{each.rhs.dtype}"
            )
    check_floating(op, existing_out=existing_out)
    rhs = columns[0].rhs
    if lhs.dtype != rhs.dtype and lhs.dtype not in _QUANTIZED and rhs.dtype not in _QUANTIZED:
        raise TypeError(f"{op}: lhs and rhs must have the same dtype, got {lhs.dtype} and {rhs.dtype}")


def _check_scales(
    op: str,
    lhs: torch.Tensor,
    lhs_scale: torch.Tensor | None,
    columns: tuple[Columns, ...],
    groups: int,
    wide: int,
) -> None:
    (rows, inner), blocks = lhs.shape, []
    given = [
        ("lhs_scale", lhs_scale, (rows,)),
        *(("rhs_scale", each.scale, (groups, wide)) for each in columns),
    ]
    for name, scale, whole in given:
        if scale is None or scale.shape == whole:
            continue
        if scale.dim() != len(whole) + 1 or (scale.shape[0], *scale.shape[2:]) != whole:
            form = f"[{rows}] or [{rows}, B]"  # only here: text makes a constant of a symbolic size
            if name == "rhs_scale":
                form = f"[{groups}, {wide}] or [{groups}, B, {wide}]"
            raise RuntimeError(f"{op}: {name} must be {form}, got {list(scale.shape)}")
        blocks.append(scale.shape[1])
        if not blocks[-1] or inner % blocks[-1]:
            raise RuntimeError(
                f"{op}: {name} {list(scale.shape)} has factors of {blocks[-1]} blocks of K, and K = {inner} "
                f"does not divide into those"
            )
    if len({number for number in blocks if number > 1}) > 1:
        raise RuntimeError(
            f"{op}: lhs_scale and rhs_scale must have equal blocks along K, got {blocks} of them"
        )


# Sizes and the offset -----------------------------------------------------------------------------------


def checked_offset(
    op: str, group_offset: torch.Tensor | int | None, groups: int, group_sizes: torch.Tensor
) -> torch.Tensor | None:
    """The offset as a tensor; checks how many sizes there must be."""
    if group_sizes.dim() != 1 or (group_offset is None and group_sizes.shape[0] != groups):
        raise RuntimeError(
            f"{op}: group_sizes must be [{groups}], a size for each matrix of rhs, got "
            f"{list(group_sizes.shape)}"
            + ("" if group_sizes.dim() != 1 else "; for a slice of them give group_offset")
        )
    if group_offset is None:
        return None
    if group_sizes.shape[0] < groups:
        raise RuntimeError(
            f"{op}: group_sizes must have the sizes of all groups, at least the {groups} that rhs has, got "
            f"{list(group_sizes.shape)}"
        )
    most = group_sizes.shape[0] - groups
    if isinstance(group_offset, torch.Tensor):
        check_integers(op, "group_offset", group_offset)
        if group_offset.numel() != 1:
            raise RuntimeError(f"{op}: group_offset must be one integer, got {list(group_offset.shape)}")
        return int32(group_offset.reshape(()).to(group_sizes.device).clamp(0, most))
    if isinstance(group_offset, bool) or not isinstance(group_offset, int | torch.SymInt):
        raise TypeError(f"{op}: group_offset must be an int, a tensor or None, got {group_offset!r}")
    if not 0 <= group_offset <= most:
        raise ValueError(
            f"{op}: rhs has {groups} of {group_sizes.shape[0]} groups, so group_offset must be between 0 "
            f"and {most}, got {group_offset}"
        )
    return torch.full((), group_offset, dtype=torch.int32, device=group_sizes.device)


def values_at_hand(tensor: torch.Tensor) -> bool:
    """Whether the values can be read at once, without waiting for a device."""
    return (
        type(tensor) is torch.Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and (tensor.device.type == "cpu" or (tensor.device.type == "tpu" and device.is_simulated()))
    )


def check_sizes(op: str, group_sizes: torch.Tensor, rows: int) -> None:
    """Raise `ValueError` for sizes that are no sizes of `rows` rows, where the values can be read."""
    if not values_at_hand(group_sizes):
        return
    sizes = group_sizes.tolist()
    if any(size < 0 for size in sizes):
        raise ValueError(f"{op}: group_sizes must not be negative, got {_shown(sizes)}")
    if sum(sizes) > rows:
        raise ValueError(
            f"{op}: group_sizes must sum to at most the {rows} rows of lhs, got {sum(sizes)}: "
            f"{_shown(sizes)}. Offsets are no sizes: offsets.diff() makes sizes of offsets that begin with 0"
        )


def _shown(sizes: list[int]) -> str:
    return str(sizes) if len(sizes) <= 16 else f"[{', '.join(map(str, sizes[:16]))}, ...]"

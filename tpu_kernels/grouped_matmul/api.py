"""Grouped matmul for torch: the public function and its op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from bridge import device, jax_op
from tpu_kernels._checks import check_floating
from tpu_kernels._integers import check_integers, int32
from tpu_kernels._select import Implementation
from tpu_kernels.grouped_matmul import vjp
from tpu_kernels.grouped_matmul.reference import grouped_matmul_reference
from tpu_kernels.grouped_matmul.tiling import GroupedTiling

_OP = "grouped_matmul"


def grouped_matmul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    group_offset: torch.Tensor | int | None = None,
    transpose_rhs: bool = False,
    out_dtype: torch.dtype | None = None,
    impl: Implementation = "auto",
    tiling: GroupedTiling | None = None,
) -> torch.Tensor:
    """`out[rows of group i] = lhs[rows of group i] @ rhs[i]`: each group of rows times a matrix of its own.

    The groups follow each other from row 0 on, `group_sizes[i]` rows each. Rows behind the last group are 0
    in the output, and pass no gradient on; the gradient of the matrix of a group without rows is 0. The
    sizes are data: other ones, with every step, compile nothing again, and nobody waits for them.

    Differentiable in `lhs` and `rhs`, any number of times. Gradients are computed from cotangents in the
    dtype of `lhs`.

    Args:
        lhs: [M, K], float16, bfloat16, float32 or float64, on `tpu` or `cpu`.
        rhs: [G, K, N], or [G, N, K] with `transpose_rhs`, of the same dtype.
        group_sizes: integers [G]: at least 0, and M together at most. On `cpu` and on the simulated device
            that is checked; elsewhere, and in compiled functions, a negative size counts as 0, and rows from
            M on do not exist.
        group_offset: for a slice of the groups, as of one rank of many: `rhs` has the matrices of G groups
            from this one on, and `group_sizes` those of all. Rows of other groups are 0. An int, or a tensor
            of one integer, which is data as well: out of range, it is the nearest in range.
        transpose_rhs: whether the matrices are transposed first, which costs nothing.
        out_dtype: of the output; None for that of `lhs`.
        impl: `pallas` is the TPU kernel: bfloat16 and float32. `reference` is plain JAX, and multiplies all
            rows by all matrices. `auto` is the kernel wherever it can compute this.
        tiling: tile sizes of the kernels, a `tpu_kernels.GroupedTiling`; None chooses for the shape.

    Returns:
        [M, N], contiguous, summed in float32, or in float64 for float64.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
        ValueError: sizes or an offset out of range; `impl` or `tiling` cannot compute this, and why.
    """
    _check(lhs, rhs, group_sizes, transpose_rhs, out_dtype)
    offset = _offset(group_offset, rhs.shape[0], group_sizes)
    if _values_at_hand(group_sizes):
        _check_sizes(group_sizes, lhs.shape[0])
    return op(lhs, rhs, int32(group_sizes), offset, transpose_rhs, out_dtype or lhs.dtype, tiling, impl)


def _check(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    transpose_rhs: bool,
    out_dtype: torch.dtype | None,
) -> None:
    check_floating(_OP, lhs=lhs, rhs=rhs)
    check_integers(_OP, "group_sizes", group_sizes)
    if lhs.dtype != rhs.dtype:
        raise TypeError(f"{_OP}: lhs and rhs must have the same dtype, got {lhs.dtype} and {rhs.dtype}")
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or not out_dtype.is_floating_point):
        raise TypeError(f"{_OP}: out_dtype must be a floating torch.dtype or None, got {out_dtype!r}")
    for name, tensor in {"rhs": rhs, "group_sizes": group_sizes}.items():
        if tensor.device != lhs.device:
            raise RuntimeError(
                f"{_OP}: all tensors must be on one device, got lhs on {lhs.device} and {name} on "
                f"{tensor.device}"
            )
    if lhs.dim() != 2 or rhs.dim() != 3 or rhs.shape[2 if transpose_rhs else 1] != lhs.shape[1]:
        raise RuntimeError(
            f"{_OP}: lhs must be [M, K] and rhs {'[G, N, K]' if transpose_rhs else '[G, K, N]'}, got "
            f"{list(lhs.shape)} and {list(rhs.shape)}"
            + ("" if transpose_rhs else "; transpose_rhs=True takes [G, N, K]")
        )


def _offset(
    group_offset: torch.Tensor | int | None, groups: int, group_sizes: torch.Tensor
) -> torch.Tensor | None:
    """The offset as a tensor; checks how many sizes there must be."""
    if group_sizes.dim() != 1 or (group_offset is None and group_sizes.shape[0] != groups):
        raise RuntimeError(
            f"{_OP}: group_sizes must be [{groups}], a size for each matrix of rhs, got "
            f"{list(group_sizes.shape)}"
            + ("" if group_sizes.dim() != 1 else "; for a slice of them give group_offset")
        )
    if group_offset is None:
        return None
    if group_sizes.shape[0] < groups:
        raise RuntimeError(
            f"{_OP}: group_sizes must have the sizes of all groups, at least the {groups} that rhs has, got "
            f"{list(group_sizes.shape)}"
        )
    most = group_sizes.shape[0] - groups
    if isinstance(group_offset, torch.Tensor):
        check_integers(_OP, "group_offset", group_offset)
        if group_offset.numel() != 1:
            raise RuntimeError(f"{_OP}: group_offset must be one integer, got {list(group_offset.shape)}")
        return int32(group_offset.reshape(()).to(group_sizes.device).clamp(0, most))
    if isinstance(group_offset, bool) or not isinstance(group_offset, int | torch.SymInt):
        raise TypeError(f"{_OP}: group_offset must be an int, a tensor or None, got {group_offset!r}")
    if not 0 <= group_offset <= most:
        raise ValueError(
            f"{_OP}: rhs has {groups} of {group_sizes.shape[0]} groups, so group_offset must be between 0 "
            f"and {most}, got {group_offset}"
        )
    return torch.full((), group_offset, dtype=torch.int32, device=group_sizes.device)


def _values_at_hand(tensor: torch.Tensor) -> bool:
    """Whether the values can be read at once, without waiting for a device."""
    return (
        type(tensor) is torch.Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and (tensor.device.type == "cpu" or (tensor.device.type == "tpu" and device.is_simulated()))
    )


def _check_sizes(group_sizes: torch.Tensor, rows: int) -> None:
    sizes = group_sizes.tolist()
    if any(size < 0 for size in sizes):
        raise ValueError(f"{_OP}: group_sizes must not be negative, got {_shown(sizes)}")
    if sum(sizes) > rows:
        raise ValueError(
            f"{_OP}: group_sizes must sum to at most the {rows} rows of lhs, got {sum(sizes)}: "
            f"{_shown(sizes)}. Offsets are no sizes: offsets.diff() makes sizes of offsets that begin with 0"
        )


def _shown(sizes: list[int]) -> str:
    return str(sizes) if len(sizes) <= 16 else f"[{', '.join(map(str, sizes[:16]))}, ...]"


# The op -------------------------------------------------------------------------------------------


def _reference(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    transpose_rhs: bool,
    out_dtype: jnp.dtype | None,
    tiling: GroupedTiling | None,
    impl: Implementation,
) -> jax.Array:
    del tiling, impl
    return grouped_matmul_reference(lhs, rhs, group_sizes, group_offset, transpose_rhs, out_dtype)


op = jax_op("tpu_kernels::grouped_matmul", vjp.grouped_matmul, reference=_reference)
"""The torch op behind `grouped_matmul`."""

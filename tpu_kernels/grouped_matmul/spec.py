"""Grouped matmul as tests, benchmarks, documentation and the tuner see it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

from autotune.problem import ArraySpec, Problem
from autotune.spec import Arrays, Example, KernelSpec
from tpu_kernels._select import Implementation
from tpu_kernels.grouped_matmul import api, space, vjp
from tpu_kernels.grouped_matmul.epilogue import Activation
from tpu_kernels.grouped_matmul.reference import grouped_matmul_reference
from tpu_kernels.grouped_matmul.tiling import GroupedTiling


def _fn(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    gated: bool,
    activation: Activation | None,
    out_dtype: str,
    tiling: GroupedTiling | None = None,
    impl: Implementation = "auto",
) -> jax.Array:
    return vjp.grouped_matmul(
        lhs,
        rhs,
        group_sizes,
        None,
        transpose_rhs,
        jnp.dtype(out_dtype),
        tiling,
        impl,
        gated=gated,
        activation=activation,
    )


def _reference(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    gated: bool,
    activation: Activation | None,
    out_dtype: str,
) -> jax.Array:
    return grouped_matmul_reference(
        lhs,
        rhs,
        group_sizes,
        None,
        transpose_rhs,
        jnp.dtype(out_dtype),
        gated=gated,
        activation=activation,
    )


def _torch_call(
    problem: Problem,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    tiling: GroupedTiling | None = None,
    impl: Implementation = "auto",
) -> torch.Tensor:
    return api.grouped_matmul(
        lhs,
        rhs,
        group_sizes,
        transpose_rhs=problem.param("transpose_rhs"),
        gated=problem.param("gated"),
        activation=problem.param("activation"),
        tiling=tiling,
        impl=impl,
    )


def _torch_equivalent(
    problem: Problem, lhs: torch.Tensor, rhs: torch.Tensor, group_sizes: torch.Tensor
) -> torch.Tensor:
    matrices = rhs.mT if problem.param("transpose_rhs") else rhs
    rest = lhs.shape[0] - int(group_sizes.sum())
    parts = lhs.split([*group_sizes.tolist(), rest])
    products = [rows @ matrix for rows, matrix in zip(parts, matrices, strict=False)]
    sums = torch.cat([*products, lhs.new_zeros(rest, matrices.shape[2])])
    first, *gate = sums.chunk(2, 1) if problem.param("gated") else (sums,)
    activation = problem.param("activation")
    if activation is not None:
        first = _IN_TORCH[activation](first)
    out = first * gate[0] if gate else first
    return torch.where(torch.arange(len(out), device=out.device)[:, None] < len(out) - rest, out, 0)


_IN_TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


def _values(problem: Problem) -> Mapping[str, np.ndarray]:
    m, _, _, groups = space.dimensions(problem)
    return {"group_sizes": space.example_sizes(m, groups)}


def _error_bounds(problem: Problem, arrays: Arrays, cotangent: np.ndarray) -> tuple[np.ndarray | None, ...]:
    """A sum of n products errs by at most n u times the sum of their magnitudes, in any order.

    u is the unit roundoff of float32, which sums are kept in. Raises `ValueError` for what comes after the
    product: an activation or a gate.
    """
    if problem.param("gated") or problem.param("activation") is not None:
        raise ValueError(f"{problem}: bounds are known for the product alone")
    lhs, rhs, sizes = arrays
    assert lhs is not None and rhs is not None and sizes is not None
    matrices = np.abs(rhs.swapaxes(1, 2) if problem.param("transpose_rhs") else rhs)
    lhs, cotangent = np.abs(lhs), np.abs(cotangent)
    out, dlhs, drhs = np.zeros(cotangent.shape), np.zeros(lhs.shape), np.zeros(matrices.shape)
    for group, rows in enumerate(_rows(sizes)):
        out[rows] = lhs[rows] @ matrices[group]
        dlhs[rows] = cotangent[rows] @ matrices[group].T
        drhs[group] = lhs[rows].T @ cotangent[rows]
    (m, k), n = lhs.shape, cotangent.shape[1]
    u = float(np.finfo(np.float32).eps) / 2
    drhs = drhs.swapaxes(1, 2) if problem.param("transpose_rhs") else drhs
    return (k + 1) * u * out, (n + 1) * u * dlhs, (m + 1) * u * drhs, None


def _rows(sizes: np.ndarray) -> Iterator[slice]:
    ends = np.cumsum(sizes.astype(np.int64))
    return (slice(end - size, end) for end, size in zip(ends, sizes.astype(np.int64), strict=True))


def _problem(
    lhs: tuple[int, int], rhs: tuple[int, int, int], dtype: str, *, transpose_rhs: bool = False, **gate: Any
) -> Problem:
    arrays = {
        "lhs": ArraySpec(lhs, dtype),
        "rhs": ArraySpec(rhs, dtype),
        "group_sizes": ArraySpec(rhs[:1], "int32"),
    }
    return space.problem_of(arrays, transpose_rhs=transpose_rhs, out_dtype=dtype, **gate)


def _swiglu(lhs: tuple[int, int], rhs: tuple[int, int, int], dtype: str) -> Problem:
    """Both matrices in one array, transposed, as Hugging Face has them."""
    return _problem(lhs, rhs, dtype, transpose_rhs=True, gated=True, activation="silu")


_SMALL: tuple[tuple[Problem, str], ...] = (
    (_problem((1, 1), (1, 1, 1), "float32"), "a single product"),
    (_problem((300, 70), (5, 70, 90), "float32"), "tiles of rows that groups share; ragged"),
    (_problem((20, 40), (3, 40, 24), "float32"), "fewer rows than a tile"),
    (_problem((140, 64), (4, 64, 72), "bfloat16"), "two bytes a number"),
    (_problem((60, 30), (3, 20, 30), "float32", transpose_rhs=True), "matrices that are transposed"),
    (_problem((0, 8), (2, 8, 8), "float32"), "no rows"),
    (_problem((20, 8), (2, 8, 8), "float16"), "a dtype the kernel does not compute with"),
)

_MODELS: tuple[tuple[Problem, str], ...] = (
    (_problem((16384, 4096), (8, 4096, 14336), "bfloat16"), "Mixtral 8x7B, 8192 tokens, up"),
    (_problem((16384, 14336), (8, 14336, 4096), "bfloat16"), "Mixtral 8x7B, 8192 tokens, down"),
    (_swiglu((16384, 4096), (8, 28672, 4096), "bfloat16"), "Mixtral 8x7B, 8192 tokens, SwiGLU"),
    (_problem((65536, 2048), (128, 2048, 768), "bfloat16"), "Qwen3 30B-A3B, 8192 tokens, up"),
    (_problem((65536, 7168), (256, 7168, 2048), "bfloat16"), "DeepSeek V3, 8192 tokens, up"),
)

SPEC = KernelSpec(
    name="grouped_matmul",
    summary="Multiply each group of rows by a matrix of its own.",
    formula="lhs[rows of group i] @ rhs[i]",
    arguments=("lhs", "rhs", "group_sizes"),
    implementations=("pallas", "reference"),
    fn=_fn,
    reference=_reference,
    torch_call=_torch_call,
    torch_equivalent=_torch_equivalent,
    tiling_type=GroupedTiling,
    make_problem=space.make_problem,
    unsupported_reasons=space.unsupported_reasons,
    space=space.space,
    default_tiling=space.default_tiling,
    costs=space.costs,
    error_bounds=_error_bounds,
    examples=(
        *(Example(problem, reason) for problem, reason in _SMALL),
        *(Example(problem, reason, benchmark=True) for problem, reason in _MODELS),
    ),
    values=_values,
)

"""Products of matrices in HBM inside a kernel, tile by tile through VMEM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.grouped_matmul.kernel import precision, within

_LANES = 128
_WHOLE = (
    (1024, 1024),
    (1024, 512),
    (1024, 256),
    (512, 256),
)  # rows and columns beside a whole inner dimension
_TILES = {2: 1024, 4: 512}  # rows and columns otherwise, by bytes of an element
_BUDGET = 26 * 2**20  # bytes of VMEM; the compiler's own temporaries come on top
_LEAST_LIMIT = 16 * 2**20  # what kernels may use on each chip without asking


@dataclass(frozen=True)
class MatmulTiling:
    """What of a product [m, k] @ [k, n] is in VMEM at a time; m counts the rows of one rank.

    All are positive multiples of 128; a size larger than the array stands for the whole of it. Raises
    `TypeError` or `ValueError` otherwise.
    """

    tile_m: int
    tile_k: int
    tile_n: int

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"MatmulTiling: {field.name} must be an int, got {size!r}")
            if size <= 0 or size % _LANES:
                raise ValueError(
                    f"MatmulTiling: {field.name} must be a positive multiple of {_LANES}, got {size}"
                )

    @classmethod
    def of(cls, m: int, k: int, n: int, itemsize: int) -> MatmulTiling:
        """The inner dimension whole, if VMEM then has room for enough rows; else large tiles of results."""
        # With it whole, rows are loaded once for all columns, and no sums of parts are loaded and stored.
        for rows, columns in _WHOLE:
            whole = cls(min(rows, _up(m)), _up(k), min(columns, _up(n)))
            if whole.vmem_bytes(m, k, n, itemsize) <= _BUDGET:
                return whole
        # A result is then summed over steps: the larger it is, the more work for each byte that is loaded.
        most = _TILES[itemsize]
        tile_k = 4096
        while True:
            tiling = cls(min(most, _up(m)), tile_k, min(most, _up(n)))
            if tile_k == _LANES or tiling.vmem_bytes(m, k, n, itemsize) <= _BUDGET:
                return tiling
            tile_k //= 2

    def clipped(self, m: int, k: int, n: int) -> tuple[int, int, int]:
        """The tiles' sizes, all of a dimension in place of a larger tile."""
        return min(self.tile_m, m), min(self.tile_k, k), min(self.tile_n, n)

    def vmem_bytes(self, m: int, k: int, n: int, itemsize: int) -> int:
        """What a product needs whose sums start from others: two buffers of each block, and the sums."""
        tile_m, tile_k, tile_n = map(_up, self.clipped(m, k, n))
        operands = 2 * (tile_m * tile_k + tile_k * tile_n) * itemsize
        return operands + (2 + 2 + 1) * tile_m * tile_n * 4

    def vmem_limit_bytes(self, m: int, k: int, n: int, itemsize: int) -> int:
        """What a kernel asks the compiler for."""
        return max(_LEAST_LIMIT, 2 * self.vmem_bytes(m, k, n, itemsize))


def _up(size: int) -> int:
    """The next multiple of 128."""
    return pl.cdiv(size, _LANES) * _LANES


def multiply(
    x_hbm_ref: Any,
    w_hbm_ref: Any,
    out_hbm_ref: Any,
    acc_ref: Any,
    *,
    tiling: MatmulTiling,
    transpose_w: bool = False,
    plus: Sequence[Any] = (),
) -> None:
    """Write `x @ w`, and what is added to it, to HBM.

    Args:
        x_hbm_ref: [m, k], float32 or bfloat16.
        w_hbm_ref: [k, n], or [n, k] with `transpose_w`, of the same dtype.
        out_hbm_ref: [m, n]. Products are summed in float32 and rounded to its dtype once.
        acc_ref: float32 in VMEM, a tile of the result; see `acc_shape`.
        tiling: what is multiplied at a time.
        transpose_w: whether `w` is transposed first, which is free.
        plus: float32 [m, n] each, added to the product.
    """
    (m, k), n = x_hbm_ref.shape, out_hbm_ref.shape[1]
    tile_m, tile_k, tile_n = tiling.clipped(m, k, n)
    steps_k = pl.cdiv(k, tile_k)

    def tile(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        *plus_refs, out_ref = refs
        step = pl.program_id(2)
        # Where the inner dimension ends within a block, there may be anything behind: even NaN times 0.
        product = _product(within(x_ref[...], 1, k, step), _inner(w_ref, transpose_w, k, step), transpose_w)

        @pl.when(step == 0)
        def _() -> None:
            acc_ref[...] = product

        @pl.when(step > 0)
        def _() -> None:
            acc_ref[...] += product

        @pl.when(step == steps_k - 1)
        def _() -> None:
            total = acc_ref[...]
            for plus_ref in plus_refs:
                total += plus_ref[...]
            out_ref[...] = total.astype(out_ref.dtype)

    w_block = (tile_n, tile_k) if transpose_w else (tile_k, tile_n)
    out_block = pl.BlockSpec((tile_m, tile_n), lambda i, j, step: (i, j))
    pltpu.emit_pipeline(
        tile,
        grid=(pl.cdiv(m, tile_m), pl.cdiv(n, tile_n), steps_k),
        in_specs=[
            pl.BlockSpec((tile_m, tile_k), lambda i, j, step: (i, step)),
            pl.BlockSpec(w_block, lambda i, j, step: (j, step) if transpose_w else (step, j)),
            *[out_block] * len(plus),
        ],
        out_specs=[out_block],
    )(x_hbm_ref, w_hbm_ref, *plus, out_hbm_ref)


def acc_shape(m: int, k: int, n: int, tiling: MatmulTiling) -> Any:
    """Scratch of a kernel that calls `multiply`."""
    tile_m, _, tile_n = tiling.clipped(m, k, n)
    return pltpu.VMEM((tile_m, tile_n), jnp.float32)


def _inner(w_ref: Any, transpose_w: bool, k: int, step: Any) -> Any:
    return within(w_ref[...], 1 if transpose_w else 0, k, step)


def _product(x: Any, w: Any, transpose_w: bool) -> Any:
    axis = 1 if transpose_w else 0
    if w.shape[1 - axis] == 1:  # JAX's product of one column needs operands of the dtype of the sum
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    return jax.lax.dot_general(
        x,
        w,
        (((1,), (axis,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=jnp.float32,
    )

"""RMS norm in Pallas for TPU: forward and backward over blocks of whole rows.

    y = x * rstd * weight        rstd = 1 / sqrt(mean(x², over the row) + eps)

Both kernels are bound by HBM traffic: a block is read once, normalised in float32 in VMEM, and written
once. The backward recomputes `rstd` instead of reading a saved one: it reads `x` anyhow, and an array of
one number per row is padded to 128 lanes in HBM, which is more traffic than the recomputation is worth.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bridge.shapes import pallas_call
from tpu_kernels._rows import RowTiling as RowTiling
from tpu_kernels._rows import mask_past_end, row_block, vector_block


def forward(x: jax.Array, weight: jax.Array | None, *, eps: float, tiling: RowTiling) -> jax.Array:
    """Normalise each row of `x`.

    Args:
        x: [rows, cols], float16, bfloat16 or float32; both sizes at least 1.
        weight: [cols], any of these dtypes, or None for ones.
        eps: added to the mean square.
        tiling: rows per block.

    Returns:
        [rows, cols] in the dtype of `x`; all arithmetic in between is float32.
    """
    rows, cols = x.shape
    tile_rows = tiling.block_rows(rows)
    return pallas_call(
        functools.partial(_forward_body, eps=eps),
        grid=(tiling.steps(rows),),
        in_specs=[row_block(tile_rows, cols), None if weight is None else vector_block(cols)],
        out_specs=row_block(tile_rows, cols),
        out_shape=jax.ShapeDtypeStruct((rows, cols), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="rms_norm_forward",
    )(x, None if weight is None else weight.reshape(1, cols))


def backward(
    x: jax.Array, weight: jax.Array | None, g: jax.Array, *, eps: float, tiling: RowTiling
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of `forward` for the cotangent `g` of its output.

    With `n = x * rstd` and `h = g * weight`:

        dx      = rstd * (h - n * mean(h * n, over the row))
        dweight = sum(g * n, over all rows)

    Args:
        x, weight, eps, tiling: as in `forward`.
        g: [rows, cols], any dtype `x` may have.

    Returns:
        dx [rows, cols] in the dtype of `x`, and dweight [cols] in the dtype of `weight` (None without
        weight). dweight is summed over all blocks in float32 and rounded once.
    """
    rows, cols = x.shape
    tile_rows = tiling.block_rows(rows)
    block = row_block(tile_rows, cols)
    vector = None if weight is None else vector_block(cols)
    dx, dweight = pallas_call(
        functools.partial(_backward_body, eps=eps, rows=rows),
        grid=(tiling.steps(rows),),
        in_specs=[block, vector, block],
        out_specs=(block, vector),
        out_shape=(
            jax.ShapeDtypeStruct((rows, cols), x.dtype),
            None if weight is None else jax.ShapeDtypeStruct((1, cols), jnp.float32),
        ),
        compiler_params=pltpu.CompilerParams(
            # Steps add to the same dweight block, so they run in order.
            dimension_semantics=("parallel" if weight is None else "arbitrary",)
        ),
        name="rms_norm_backward",
    )(x, None if weight is None else weight.reshape(1, cols), g)
    return dx, None if weight is None else dweight.reshape(cols).astype(weight.dtype)


def _forward_body(
    # Inputs
    x_ref,  # [tile_rows, cols]
    weight_ref,  # [1, cols] or None
    # Outputs
    y_ref,  # [tile_rows, cols]
    *,
    eps: float,
) -> None:
    normalised, _ = _normalise(x_ref[...], eps)
    if weight_ref is not None:
        normalised *= weight_ref[...].astype(jnp.float32)
    y_ref[...] = normalised.astype(y_ref.dtype)


def _backward_body(
    # Inputs
    x_ref,  # [tile_rows, cols]
    weight_ref,  # [1, cols] or None
    g_ref,  # [tile_rows, cols]
    # Outputs
    dx_ref,  # [tile_rows, cols]
    dweight_ref,  # [1, cols] float32, or None; the sum over the steps so far
    *,
    eps: float,
    rows: int,
) -> None:
    normalised, rstd = _normalise(x_ref[...], eps)
    g = g_ref[...].astype(jnp.float32)

    if dweight_ref is not None:

        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            dweight_ref[...] = jnp.zeros_like(dweight_ref)

        # dweight = sum over rows of g * n
        dweight_ref[...] += jnp.sum(mask_past_end(g * normalised, rows=rows), axis=0, keepdims=True)

    h = g if weight_ref is None else g * weight_ref[...].astype(jnp.float32)
    # dx = rstd * (h - n * mean(h * n))
    projection = jnp.mean(h * normalised, axis=-1, keepdims=True)
    dx_ref[...] = (rstd * (h - normalised * projection)).astype(dx_ref.dtype)


def _normalise(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """`x * rstd` [tile_rows, cols] and `rstd` [tile_rows, 1], in float32."""
    x = x.astype(jnp.float32)
    # rstd = 1 / sqrt(mean(x²) + eps)
    rstd = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * rstd, rstd

"""Layer norm in Pallas for TPU: forward and backward over blocks of whole rows.

    y = (x - mean) * rstd * weight + bias        rstd = 1 / sqrt(variance + eps)

Mean and variance are those of the row, the variance that of the centred values: a second pass over
a block in VMEM costs nothing beside the HBM traffic, and it does not cancel as `mean(x²) - mean²` does.
The backward recomputes mean and rstd instead of reading saved ones: it reads `x` anyhow, and an array of
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


def forward(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, *, eps: float, tiling: RowTiling
) -> jax.Array:
    """Normalise each row of `x`.

    Args:
        x: [rows, cols], float16, bfloat16 or float32; both sizes at least 1.
        weight: [cols], any of these dtypes, or None for ones.
        bias: [cols], any of these dtypes, or None for zeros.
        eps: added to the variance.
        tiling: rows per block.

    Returns:
        [rows, cols] in the dtype of `x`; all arithmetic in between is float32.
    """
    rows, cols = x.shape
    tile_rows = tiling.block_rows(rows)
    return pallas_call(
        functools.partial(_forward_body, eps=eps),
        grid=(tiling.steps(rows),),
        in_specs=[
            row_block(tile_rows, cols),
            None if weight is None else vector_block(cols),
            None if bias is None else vector_block(cols),
        ],
        out_specs=row_block(tile_rows, cols),
        out_shape=jax.ShapeDtypeStruct((rows, cols), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="layer_norm_forward",
    )(
        x,
        None if weight is None else weight.reshape(1, cols),
        None if bias is None else bias.reshape(1, cols),
    )


def backward(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    g: jax.Array,
    *,
    eps: float,
    tiling: RowTiling,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Gradients of `forward` for the cotangent `g` of its output.

    With `n = (x - mean) * rstd` and `h = g * weight`:

        dx      = rstd * (h - mean(h) - n * mean(h * n))        means over the row
        dweight = sum(g * n, over all rows)
        dbias   = sum(g, over all rows)

    Args:
        x, weight, bias, eps, tiling: as in `forward`; of `bias` only presence and dtype matter.
        g: [rows, cols], any dtype `x` may have.

    Returns:
        dx [rows, cols] in the dtype of `x`; dweight and dbias [cols] in the dtypes of `weight` and `bias`,
        None for an absent one. Both are summed over all blocks in float32 and rounded once.
    """
    rows, cols = x.shape
    tile_rows = tiling.block_rows(rows)
    block = row_block(tile_rows, cols)
    vector = vector_block(cols)
    vector_sum = jax.ShapeDtypeStruct((1, cols), jnp.float32)
    dx, dweight, dbias = pallas_call(
        functools.partial(_backward_body, eps=eps, rows=rows),
        grid=(tiling.steps(rows),),
        in_specs=[block, None if weight is None else vector, block],
        out_specs=(block, None if weight is None else vector, None if bias is None else vector),
        out_shape=(
            jax.ShapeDtypeStruct((rows, cols), x.dtype),
            None if weight is None else vector_sum,
            None if bias is None else vector_sum,
        ),
        compiler_params=pltpu.CompilerParams(
            # Steps add to the same dweight and dbias blocks, so they run in order.
            dimension_semantics=("parallel" if weight is None and bias is None else "arbitrary",)
        ),
        name="layer_norm_backward",
    )(x, None if weight is None else weight.reshape(1, cols), g)
    return (
        dx,
        None if weight is None else dweight.reshape(cols).astype(weight.dtype),
        None if bias is None else dbias.reshape(cols).astype(bias.dtype),
    )


def _forward_body(
    # Inputs
    x_ref,  # [tile_rows, cols]
    weight_ref,  # [1, cols] or None
    bias_ref,  # [1, cols] or None
    # Outputs
    y_ref,  # [tile_rows, cols]
    *,
    eps: float,
) -> None:
    y, _ = _normalise(x_ref[...], eps)
    if weight_ref is not None:
        y *= weight_ref[...].astype(jnp.float32)
    if bias_ref is not None:
        y += bias_ref[...].astype(jnp.float32)
    y_ref[...] = y.astype(y_ref.dtype)


def _backward_body(
    # Inputs
    x_ref,  # [tile_rows, cols]
    weight_ref,  # [1, cols] or None
    g_ref,  # [tile_rows, cols]
    # Outputs
    dx_ref,  # [tile_rows, cols]
    dweight_ref,  # [1, cols] float32, or None; the sum over the steps so far
    dbias_ref,  # [1, cols] float32, or None; the sum over the steps so far
    *,
    eps: float,
    rows: int,
) -> None:
    normalised, rstd = _normalise(x_ref[...], eps)
    g = g_ref[...].astype(jnp.float32)

    if dweight_ref is not None:
        # dweight = sum over rows of g * n
        _add_rows(dweight_ref, mask_past_end(g * normalised, rows=rows))
    if dbias_ref is not None:
        # dbias = sum over rows of g
        _add_rows(dbias_ref, mask_past_end(g, rows=rows))

    h = g if weight_ref is None else g * weight_ref[...].astype(jnp.float32)
    # dx = rstd * (h - mean(h) - n * mean(h * n))
    projection = jnp.mean(h * normalised, axis=-1, keepdims=True)
    centred = h - jnp.mean(h, axis=-1, keepdims=True)
    dx_ref[...] = (rstd * (centred - normalised * projection)).astype(dx_ref.dtype)


def _add_rows(
    sum_ref,  # [1, cols] float32
    terms: jax.Array,  # [tile_rows, cols]
) -> None:
    """Add the rows of `terms` to `sum_ref`, which starts from zero at the first step."""

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += jnp.sum(terms, axis=0, keepdims=True)


def _normalise(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """`(x - mean) * rstd` [tile_rows, cols] and `rstd` [tile_rows, 1], in float32."""
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    # rstd = 1 / sqrt(variance + eps)
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return centred * rstd, rstd

"""The values that decide what a kernel does, computed from a traced function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.schedule.hlo import instructions
from autotune.schedule.operands import kernel_calls, operand_words


def kernel(*refs) -> None:
    refs[-1][...] = refs[-2][...]


def copy_blocks(x, starts, steps: int | jax.Array, name: str | None = "copy_blocks"):
    """Copies `steps` blocks of 8 rows of `x`, found at `starts`."""
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2, steps),
            in_specs=[pl.BlockSpec((8, 128), lambda j, i, starts: (starts[i], 0))],
            out_specs=pl.BlockSpec((8, 128), lambda j, i, starts: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((64, 128), x.dtype),
        name=name,
    )(starts, x)


X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
SIZES = jax.ShapeDtypeStruct((8,), jnp.int32)


def test_operands_are_computed_from_given_values_and_constants() -> None:
    @jax.jit
    def wrapper(x, sizes):
        starts = jnp.cumsum(sizes) - sizes
        return copy_blocks(x, starts, jnp.sum(sizes > 0)) + copy_blocks(x, jnp.arange(8)[::-1], 8, "other")

    sizes = np.array([1, 2, 0, 0, 1, 0, 0, 0], np.int32)
    ((first, second),) = kernel_calls(jax.make_jaxpr(wrapper)(X, SIZES), {1: sizes})
    assert (first.name, second.name) == ("copy_blocks", "other")
    assert (first.grid, first.grid_steps) == ((2, 3), 6)
    grid, starts, x = first.operands
    assert grid is not None and grid == 3
    np.testing.assert_array_equal(starts, np.cumsum(sizes) - sizes)  # pyright: ignore[reportArgumentType]
    assert x is None
    assert second.grid_steps == 16
    np.testing.assert_array_equal(second.operands[0], np.arange(8)[::-1])  # pyright: ignore[reportArgumentType]


def test_what_is_not_given_is_not_known() -> None:
    def wrapper(x, sizes):
        return copy_blocks(x, sizes, sizes[0])

    ((call,),) = kernel_calls(jax.make_jaxpr(wrapper)(X, SIZES), {})
    assert call.operands == (None, None, None)
    assert call.grid_steps is None


def test_kernels_in_loops_are_found_without_values() -> None:
    def wrapper(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: copy_blocks(x, jnp.full(8, i), 8), x)

    ((call,),) = kernel_calls(jax.make_jaxpr(wrapper)(X), {})
    assert call.operands == (None, None)
    assert call.grid_steps == 16


def test_operands_find_their_kernel_by_name_and_shapes() -> None:
    def wrapper(x):
        one = copy_blocks(x, jnp.zeros(8, jnp.int32), 8)
        return one, copy_blocks(x, jnp.ones(8, jnp.int32), 8), copy_blocks(x, jnp.full(8, 2), 8, None)

    call_text = 'custom-call(%s, %x), custom_call_target="tpu_custom_call"'
    module = instructions(
        "HloModule m\n  %s = s32[8]{0:T(128)} constant({...})\n  %x = f32[64,128]{1,0} parameter(0)\n"
        + "".join(
            f"  %{name} = f32[64,128]{{1,0}} {call_text}\n" for name in ("copy_blocks.7", "copy_blocks.10")
        )
        + f"  %wrapper.3 = f32[64,128]{{1,0}} {call_text}\n"
        + '  %stranger.1 = f32[64,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"\n'
    )
    words, matched, unmatched = operand_words(kernel_calls(jax.make_jaxpr(wrapper)(X), {})[0], module)
    first = {name: operands[0][0] for name, operands in words.items() if operands[0] is not None}
    assert first == {"copy_blocks.7": 0, "copy_blocks.10": 1, "wrapper.3": 2}
    assert set(matched) == set(first)
    assert unmatched == ["stranger.1"]

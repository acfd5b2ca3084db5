"""Schedules of the pinned TPU compiler, executed: what is counted must be exactly what the kernel does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune.score import Score, Workload
from autotune.score.schedule import ScheduleScorer
from bridge.chips import chip

pytest.importorskip("libtpu", reason="needs the TPU compiler, libtpu")

BF16 = jnp.bfloat16


def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def score(fn: Callable[..., Any], *avals: Any, on: str = "v5e", **known: Any) -> Score:
    return ScheduleScorer(chip(on)).score(Workload("test", fn, avals, **known))


def only_kernel(scored: Score):
    (kernel,) = [kernel for kernel in scored.kernels if kernel.is_kernel]
    return kernel


def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, steps: int) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == steps - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(x, y, tile: int = 256):
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        functools.partial(matmul_kernel, steps=k // tile),
        grid=(m // tile, n // tile, k // tile),
        in_specs=[
            pl.BlockSpec((tile, tile), lambda i, j, k: (i, k)),
            pl.BlockSpec((tile, tile), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((tile, tile), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((tile, tile), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="matmul",
    )(x, y)


CUBE = (shape(1024, 1024), shape(1024, 1024))
CUBE_FLOPS = 2 * 1024**3
CUBE_BYTES = 2 * 1024 * 1024


@pytest.mark.parametrize("on", ["v4", "v5e", "v5p", "v6e"])
def test_matmul_moves_what_its_tiles_need(on: str) -> None:
    scored = score(matmul, *CUBE, on=on, matmul_flops=CUBE_FLOPS)
    # Each of the 4 x 4 output tiles reads 4 tiles of both operands and is written once.
    assert scored.dma_bytes_read == 4 * CUBE_BYTES + 4 * CUBE_BYTES
    assert scored.dma_bytes_written == CUBE_BYTES
    assert scored.dma_bytes_read + scored.dma_bytes_written == 18_874_368
    assert scored.grid_steps == 64
    assert scored.confidence == ("high" if on == "v5e" else "medium")
    cores = chip(on).cores_per_device
    kernel = only_kernel(scored)
    assert kernel.mxu_visits == 64 // cores
    assert kernel.vmem_bytes == 4 * 256 * 256 * 4
    cycles = kernel.time_s * chip(on).sustained_clock_hz * cores
    assert kernel.units["mxu"] * cycles * chip(on).mxu_flops_per_cycle == pytest.approx(CUBE_FLOPS)


def test_operands_that_xla_keeps_in_vmem_are_read_once() -> None:
    scored = score(matmul, *CUBE, on="tpu7x")
    assert scored.dma_bytes_read == 2 * CUBE_BYTES
    assert only_kernel(scored).dma_bytes_read == 0
    assert scored.grid_steps == 64


def test_claims_beyond_the_matrix_units_have_low_confidence() -> None:
    scored = score(matmul, *CUBE, matmul_flops=2 * CUBE_FLOPS, bytes_read=10**8, bytes_written=10**8)
    assert scored.confidence == "low"
    assert [reason.split(" are ")[0].split(" ", 1)[1] for reason in scored.reasons] == [
        "operations of the matrix units",
        "bytes",
        "bytes",
    ]


def test_several_kernels_and_xla_operations_in_one_program() -> None:
    def chain(x, y, z):
        return matmul(jax.nn.relu(matmul(x, y)), z)

    scored = score(chain, *CUBE, shape(1024, 1024))
    kernels = [kernel for kernel in scored.kernels if kernel.is_kernel]
    assert [(kernel.calls, kernel.grid_steps) for kernel in kernels] == [(1, 64), (1, 64)]
    others = [kernel for kernel in scored.kernels if not kernel.is_kernel]
    assert others and not any(kernel.estimated for kernel in others)
    total = sum(kernel.time_s for kernel in scored.kernels)
    assert 0.8 * scored.time_s < total <= scored.time_s
    assert scored.confidence == "high"


def test_kernels_that_are_equal_are_compiled_once_and_run_each() -> None:
    def power(x, y):
        return jax.lax.fori_loop(0, 5, lambda _, x: matmul(x, y), matmul(matmul(x, y), y))

    scored = score(power, *CUBE)
    kernels = [kernel for kernel in scored.kernels if kernel.is_kernel]
    assert sum(kernel.calls for kernel in kernels) == 7
    assert scored.grid_steps == 7 * 64
    assert scored.confidence == "high"


def splash(sequence: int, block: int, heads: int):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    sizes = kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((sequence, sequence))] * heads)
    return kernel.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


@pytest.mark.parametrize(
    ("on", "sequence", "block"),
    [("v5e", 1024, 128), ("v5e", 2048, 256), ("v6e", 2048, 512), ("tpu7x", 1024, 128)],
)
def test_causal_attention_visits_exactly_its_blocks(on: str, sequence: int, block: int) -> None:
    heads, blocks = 2, sequence // block
    attention = splash(sequence, block, heads)
    scored = score(lambda q, k, v: attention(q, k, v), *[shape(heads, sequence, 128)] * 3, on=on)
    kernel = only_kernel(scored)
    assert kernel.mxu_visits == heads * blocks * (blocks + 1) // 2
    assert kernel.grid_steps == heads * blocks**2
    assert not scored.unknowns


@pytest.mark.slow
def test_gradients_of_causal_attention_visit_exactly_its_blocks() -> None:
    attention = splash(2048, 512, 2)

    def loss(q, k, v):
        return attention(q, k, v).astype(jnp.float32).sum()

    scored = score(jax.grad(loss, argnums=(0, 1, 2)), *[shape(2, 2048, 128)] * 3)
    kernels = [kernel for kernel in scored.kernels if kernel.is_kernel]
    assert [kernel.mxu_visits for kernel in kernels] == [2 * 4 * 5 // 2] * 3
    assert scored.confidence == "high"


def row_blocks(counts, x):
    """Adds 1.5 times a block to the result, as often as `counts` says for that block."""

    def body(counts_ref, x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        def add(_, carry):
            o_ref[...] += x_ref[...] * 1.5
            return carry

        jax.lax.fori_loop(0, counts_ref[pl.program_id(0)], add, 0)

    spec = pl.BlockSpec((1024, 128), lambda i, counts: (i, 0))
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(8,), in_specs=[spec], out_specs=spec
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name="row_blocks",
    )(counts, x)


def test_loops_with_bounds_from_data_take_time_by_their_values() -> None:
    arguments = (shape(8, dtype=jnp.int32), shape(8192, 128, dtype=jnp.float32))
    idle, busy = (
        score(row_blocks, *arguments, values={0: np.full(8, count, np.int32)}) for count in (0, 1000)
    )
    unknown = score(row_blocks, *arguments)
    assert idle.confidence == busy.confidence == "high"
    # One trip loads, multiplies, adds and stores 1024 x 128 floats: 128 registers, one store a cycle.
    trips = 8 * 1000
    assert busy.time_s - idle.time_s > trips * 128 / chip("v5e").sustained_clock_hz * 0.99
    assert unknown.confidence == "low"
    assert any("operand 0" in reason for reason in unknown.unknowns)


def test_dynamic_grids_run_as_many_steps_as_given() -> None:
    def body(steps_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def first_blocks(steps, x):
        spec = pl.BlockSpec((128, 128), lambda i, steps: (i, 0))
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(steps[0],), in_specs=[spec], out_specs=spec
            ),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(steps, x)

    arguments = (shape(1, dtype=jnp.int32), shape(8192, 128, dtype=jnp.float32))
    scored = score(first_blocks, *arguments, values={0: np.array([16], np.int32)})
    assert scored.grid_steps == 16
    assert only_kernel(scored).dma_bytes_written == 16 * 128 * 128 * 4
    assert score(first_blocks, *arguments).confidence == "low"


@pytest.mark.parametrize("on", ["v5e", "v6e", "tpu7x"])
def test_emit_pipeline_moves_each_block_once(on: str) -> None:
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def body(x_hbm_ref, o_hbm_ref):
        spec = pl.BlockSpec((512, 512), lambda i: (i, 0))
        pltpu.emit_pipeline(double, grid=(16,), in_specs=[spec], out_specs=[spec])(x_hbm_ref, o_hbm_ref)

    def doubled(x):
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            body, in_specs=[anywhere], out_specs=anywhere, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
        )(x)

    scored = score(doubled, shape(8192, 512, dtype=jnp.float32), on=on)
    assert (scored.dma_bytes_read, scored.dma_bytes_written) == (8192 * 512 * 4,) * 2
    assert scored.bound == "hbm"
    assert not scored.unknowns


def test_a_loop_that_depends_on_computed_values_has_low_confidence() -> None:
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        def grow(total):
            o_ref[...] = o_ref[...] * 2
            return total + o_ref[0, 0]

        jax.lax.while_loop(lambda total: total < 100.0, grow, 0.0)

    def grown(x):
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="grown")(x)

    scored = score(grown, shape(256, 256, dtype=jnp.float32))
    assert scored.confidence == "low"
    assert any(reason.startswith("grown.1: the branch at") for reason in scored.reasons)


def test_grouped_matmul_gets_its_groups_from_the_given_sizes() -> None:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    def grouped(lhs, rhs, sizes):
        return gmm(lhs, rhs, sizes, preferred_element_type=BF16, tiling=(256, 512, 512))

    arguments = (shape(2048, 1024), shape(8, 1024, 1024), shape(8, dtype=jnp.int32))
    even, ragged = (
        score(grouped, *arguments, values={2: np.array(sizes, np.int32)})
        for sizes in ([256] * 8, [100, 412, 0, 0, 1000, 24, 256, 256])
    )
    # A tile of 256 rows that two groups share is done for each. There are 2 x 2 tiles of k and n.
    rows = np.cumsum([0, 100, 412, 0, 0, 1000, 24, 256, 256])
    visits = sum(-(-int(b) // 256) - int(a) // 256 for a, b in zip(rows, rows[1:], strict=False) if b > a)
    assert even.grid_steps == 8 * 4
    assert ragged.grid_steps == visits * 4
    assert even.confidence == ragged.confidence == "high"


def test_kernels_of_sparse_cores_are_named_and_refused() -> None:
    from jax.experimental.pallas import tpu_sc

    def copied(x):
        mesh = tpu_sc.ScalarSubcoreMesh(axis_name="core", num_cores=2)

        @pl.kernel(out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), mesh=mesh)
        def copy(x_ref, o_ref):
            pltpu.sync_copy(x_ref, o_ref)

        return copy(x)  # pyright: ignore[reportCallIssue]

    scored = score(copied, shape(1024, 128, dtype=jnp.float32), on="tpu7x")
    assert scored.confidence == "low"
    assert any("SparseCore" in reason for reason in scored.reasons)

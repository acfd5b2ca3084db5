"""How kernels written for TPU run here: the rewriting, the choice of interpreter, and what each is right for.

Every kernel below is written for TPU, without `interpret=`. Expected values are computed in NumPy.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from bridge import interpretation

interpretation.prepare_process()

import jax  # noqa: E402
import jax.extend.core  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from bridge.interpretation import InvalidKernel, KernelNotInterpretable  # noqa: E402
from bridge.interpretation.interpreter_watch import KernelDeadlock  # noqa: E402

F32 = jnp.float32
TILE = (8, 128)
ANY = pl.BlockSpec(memory_space=pl.ANY)


def prepare(function: Callable[..., Any], *args: Any, mode: str = "fast") -> interpretation.Interpreted:
    with interpretation.tracing_chip():
        jaxpr = jax.make_jaxpr(function)(*args)
    return interpretation.interpret_kernels(jaxpr, mode)


def execute(interpreted: interpretation.Interpreted, *args: Any) -> list[np.ndarray]:
    run = jax.jit(jax.extend.core.jaxpr_as_fun(interpreted.jaxpr))
    with interpretation.interpreter_lock():
        return [np.asarray(value) for value in jax.block_until_ready(run(*args))]


def outcome(function: Callable[..., Any], *args: Any, mode: str = "fast") -> tuple[np.ndarray, str]:
    """The first result, and how the first kernel ran."""
    interpreted = prepare(function, *args, mode=mode)
    return execute(interpreted, *args)[0], interpreted.kernels[0].how


def shape_of(x: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or x.shape, x.dtype)


def values(*shape: int, dtype: Any = F32) -> jax.Array:
    """Small integers, so that sums and doublings are exact in every dtype used here."""
    count = int(np.prod(shape))
    return (jnp.arange(count) % 7 - 3).reshape(shape).astype(dtype)


def rows(index: Any) -> pl.BlockSpec:
    return pl.BlockSpec(TILE, index)


def double_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + x_ref[...]


def ignore_kernel(_: Any, o_ref: Any) -> None:
    o_ref[...] = jnp.zeros_like(o_ref)


def double(x: jax.Array) -> jax.Array:
    return pl.pallas_call(double_kernel, out_shape=shape_of(x))(x)


# Modes, chip, process ---------------------------------------------------------------------------


def test_mode_defaults_nests_and_is_thread_local() -> None:
    seen: list[str] = []
    with interpretation.interpret("tpu"):
        with interpretation.interpret("reference"):
            assert interpretation.current_mode() == "reference"
        assert interpretation.current_mode() == "tpu"
        thread = threading.Thread(target=lambda: seen.append(interpretation.current_mode()))
        thread.start()
        thread.join()
    assert seen == ["fast"] and interpretation.current_mode() == "fast"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A patchable environment; what was read from it is forgotten before and after."""
    interpretation.default_mode.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    interpretation.default_mode.cache_clear()


def test_the_environment_sets_the_mode(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("BRIDGE_INTERPRET", "tpu")
    assert interpretation.current_mode() == "tpu"


def test_unknown_modes_and_chips_are_refused(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'fast', 'tpu', 'reference'"), interpretation.interpret("quick"):
        pass
    with pytest.raises(ValueError, match="interpret_kernels"):
        interpretation.interpret_kernels(jax.make_jaxpr(jnp.sin)(1.0), "quick")
    environment.setenv("BRIDGE_INTERPRET", "quick")
    with pytest.raises(ValueError, match="BRIDGE_INTERPRET"):
        interpretation.current_mode()
    environment.setenv("BRIDGE_CHIP", "v1")
    with pytest.raises(ValueError, match="BRIDGE_CHIP.*tpu7x"):
        interpretation.tracing_chip()


@pytest.mark.parametrize("chip", list(interpretation.CHIPS))
def test_tracing_chip_answers_for_the_chip_and_leaves_the_program_runnable(
    chip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDGE_CHIP", chip)
    with interpretation.tracing_chip():
        version = str(pltpu.get_tpu_info().chip_version)
        assert version.lower().endswith(chip.removeprefix("tpu"))
        traced = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + jnp.arange(3.0))(jnp.ones(3))
    result = jax.jit(jax.extend.core.jaxpr_as_fun(traced))(jnp.ones(3))[0]
    np.testing.assert_allclose(
        np.asarray(result), np.sin(1.0) + np.arange(3.0), rtol=8 * float(np.finfo(np.float32).eps)
    )


def test_preparing_starts_no_backend_and_the_mode_needs_no_jax() -> None:
    code = (
        "import sys; from bridge import interpretation; interpretation.current_mode(); "
        "assert 'jax' not in sys.modules; assert interpretation.prepare_process(); "
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized(); "
        "import os, jax; assert int(os.environ['PJRT_NPROC']) >= 4; jax.numpy.ones(1); "
        "assert interpretation.prepare_process()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# The walk over a program ------------------------------------------------------------------------


def test_a_program_without_kernels_comes_back_itself() -> None:
    jaxpr = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (jax.jit(jnp.tanh)(c), c), x, None, length=2))(1.0)
    interpreted = interpretation.interpret_kernels(jaxpr, "tpu")
    assert interpreted.jaxpr is jaxpr and interpreted.kernels == ()
    assert not interpretation.needs_lock(interpreted)


@jax.custom_vjp
def ruled_double(x: jax.Array) -> jax.Array:
    return double(x)


ruled_double.defvjp(lambda x: (double(x), None), lambda _, gradient: (double(gradient),))

NESTED: dict[str, tuple[Callable[[jax.Array], Any], float]] = {
    "jit": (jax.jit(double), 2),
    "scan": (lambda x: lax.scan(lambda c, _: (double(c), None), x, None, length=3)[0], 8),
    "while": (lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, double(s[1])), (0, x))[1], 8),
    "cond": (lambda x: lax.cond(x[0, 0] < 0, double, lambda x: x, x), 2),
    "remat": (jax.checkpoint(double), 2),
    "custom_vjp": (ruled_double, 2),
    "vjp": (lambda x: jax.vjp(ruled_double, x)[1](x)[0], 2),
    "vmap": (lambda x: jax.vmap(ruled_double)(jnp.stack([x, x]))[1], 2),
    "platform_dependent": (lambda x: lax.platform_dependent(x, tpu=double, default=lambda x: 3 * x), 2),
    "shard_map": (
        lambda x: jax.shard_map(
            double,
            mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",)),
            in_specs=jax.sharding.PartitionSpec("d"),
            out_specs=jax.sharding.PartitionSpec("d"),
            check_vma=False,
        )(x),
        2,
    ),
}


@pytest.mark.parametrize("mode", ["fast", "tpu"])
@pytest.mark.parametrize("name", list(NESTED))
def test_kernels_are_found_wherever_they_are(name: str, mode: str) -> None:
    function, factor = NESTED[name]
    x = values(*TILE)
    result, how = outcome(function, x, mode=mode)
    np.testing.assert_array_equal(result, np.asarray(x) * factor)
    assert how == mode


def test_kernels_are_reported_by_name_with_a_reason() -> None:
    def program(x: jax.Array) -> jax.Array:
        return pl.pallas_call(double_kernel, out_shape=shape_of(x), name="twice")(double(x))

    interpreted = prepare(program, values(*TILE), mode="tpu")
    assert [run.name for run in interpreted.kernels] == ["double_kernel", "twice"]
    assert all(run.reason.endswith(".") for run in interpreted.kernels)
    assert interpretation.needs_lock(interpreted)
    assert not interpretation.needs_lock(prepare(program, values(*TILE), mode="fast"))


# Aliased operands -------------------------------------------------------------------------------


def accumulate_through_alias(total: jax.Array, x: jax.Array, interpret: Any = False) -> jax.Array:
    """Adds block i of x to block i % 2 of the total, which the output shares its memory with."""

    def body(total_ref: Any, x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = total_ref[...] + x_ref[...]

    return pl.pallas_call(
        body,
        grid=(4,),
        in_specs=[rows(lambda i: (i % 2, 0)), rows(lambda i: (i, 0))],
        out_specs=rows(lambda i: (i % 2, 0)),
        out_shape=shape_of(total),
        input_output_aliases={0: 0},
        interpret=interpret,
    )(total, x)


def test_accumulation_through_an_alias_is_wrong_plainly_and_right_here() -> None:
    total, x = jnp.zeros((16, 128)), values(32, 128)
    blocks = np.asarray(x).reshape(4, *TILE)
    expected = np.concatenate([blocks[0] + blocks[2], blocks[1] + blocks[3]])
    plain = np.asarray(jax.jit(lambda t, x: accumulate_through_alias(t, x, interpret=True))(total, x))
    assert not np.array_equal(plain, expected), "JAX's plain interpretation shares aliased memory now: use it"
    result, how = outcome(accumulate_through_alias, total, x)
    np.testing.assert_array_equal(result, expected)
    assert how == "tpu"


def test_an_alias_that_is_updated_in_place_block_by_block_stays_fast() -> None:
    x = values(27, 128)  # the last block is ragged

    def update(x: jax.Array) -> jax.Array:
        specs = rows(lambda i: (i, 0))
        return pl.pallas_call(
            double_kernel,
            grid=(4,),
            in_specs=[specs],
            out_specs=specs,
            out_shape=shape_of(x),
            input_output_aliases={0: 0},
        )(x)

    result, how = outcome(update, x)
    np.testing.assert_array_equal(result, 2 * np.asarray(x))
    assert how == "fast"


def test_an_aliased_cache_written_in_part_keeps_the_rest() -> None:
    new, cache = values(*TILE), values(32, 128) + 10

    def write(new: jax.Array, cache: jax.Array) -> jax.Array:
        def body(new_ref: Any, _: Any, cache_ref: Any, sem: Any) -> None:
            copy = pltpu.make_async_copy(new_ref, cache_ref.at[pl.ds(8, 8)], sem)
            copy.start()
            copy.wait()

        return pl.pallas_call(
            body,
            in_specs=[ANY, ANY],
            out_specs=ANY,
            out_shape=shape_of(cache),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
            input_output_aliases={1: 0},
        )(new, cache)

    result, how = outcome(write, new, cache)
    expected = np.asarray(cache).copy()
    expected[8:16] = new
    np.testing.assert_array_equal(result, expected)
    assert how == "fast"


def test_reading_an_aliased_input_after_the_output_was_written() -> None:
    x = values(*TILE)

    def program(x: jax.Array) -> jax.Array:
        def body(x_hbm_ref: Any, o_hbm_ref: Any, x_ref: Any) -> None:
            x_ref[...] = jnp.full(TILE, 7.0)
            pltpu.sync_copy(x_ref, o_hbm_ref)
            pltpu.sync_copy(x_hbm_ref, x_ref)
            x_ref[...] *= 2
            pltpu.sync_copy(x_ref, o_hbm_ref)

        return pl.pallas_call(
            body,
            in_specs=[ANY],
            out_specs=ANY,
            out_shape=shape_of(x),
            scratch_shapes=[pltpu.VMEM(TILE, F32)],
            input_output_aliases={0: 0},
        )(x)

    result, how = outcome(program, x)
    np.testing.assert_array_equal(result, np.full(TILE, 14.0))
    assert how == "tpu"


# What a grid step leaves behind -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "tpu"])
def test_scratch_lasts_over_the_grid_and_a_block_may_be_revisited_in_a_row(mode: str) -> None:
    x = values(32, 128)

    def program(x: jax.Array) -> jax.Array:
        def body(x_ref: Any, o_ref: Any, total_ref: Any, steps_ref: Any) -> None:
            @pl.when(pl.program_id(0) == 0)
            def _() -> None:
                total_ref[...] = jnp.zeros_like(total_ref)
                steps_ref[0] = 0

            total_ref[...] += x_ref[...]
            steps_ref[0] += 1

            @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
            def _() -> None:
                o_ref[...] = total_ref[...] * steps_ref[0]

        return pl.pallas_call(
            body,
            grid=(4,),
            in_specs=[rows(lambda i: (i, 0))],
            out_specs=rows(lambda i: (0, 0)),
            out_shape=shape_of(x, *TILE),
            scratch_shapes=[pltpu.VMEM(TILE, F32), pltpu.SMEM((1,), jnp.int32)],
        )(x)

    result, how = outcome(program, x, mode=mode)
    np.testing.assert_array_equal(result, 4 * np.asarray(x).reshape(4, *TILE).sum(0))
    assert how == mode


def revisit(x: jax.Array, body: Callable[..., None]) -> jax.Array:
    return pl.pallas_call(
        body,
        grid=(4,),
        in_specs=[rows(lambda i: (i, 0))],
        out_specs=rows(lambda i: (i % 2, 0)),
        out_shape=shape_of(x, 16, 128),
        name="come_back",
    )(x)


def test_accumulating_in_a_block_that_was_left_is_refused() -> None:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] += x_ref[...]

    with pytest.raises(InvalidKernel, match="'come_back'.*output 0.*Reorder the grid"):
        prepare(lambda x: revisit(x, body), values(32, 128))


def test_overwriting_a_block_that_was_left_is_fine() -> None:
    x = values(32, 128)
    result, how = outcome(lambda x: revisit(x, double_kernel), x)
    np.testing.assert_array_equal(result, 2 * np.asarray(x)[16:])
    assert how == "fast"


def test_what_was_never_written_shows_as_nan() -> None:
    def body(x_ref: Any, o_ref: Any, scratch_ref: Any) -> None:
        o_ref[...] = x_ref[...] + scratch_ref[...]

    def program(x: jax.Array) -> jax.Array:
        return pl.pallas_call(body, out_shape=shape_of(x), scratch_shapes=[pltpu.VMEM(TILE, F32)])(x)

    for mode in ("fast", "tpu"):
        assert np.isnan(outcome(program, values(*TILE), mode=mode)[0]).all()


@pytest.mark.parametrize("written", ["scalar", "input"])
def test_written_scalars_and_refetched_inputs_are_not_left_to_plain_interpretation(written: str) -> None:
    x, start = values(16, 128), jnp.zeros(1, jnp.int32)

    def body(start_ref: Any, x_ref: Any, o_ref: Any) -> None:
        if written == "scalar":
            start_ref[0] += 1
            o_ref[...] = x_ref[...] + start_ref[0].astype(F32)
        else:
            x_ref[...] += 1
            o_ref[...] = x_ref[...]

    def program(start: jax.Array, x: jax.Array) -> jax.Array:
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4,),
            in_specs=[rows(lambda i, _: (i % 2, 0))],
            out_specs=rows(lambda i, _: (i, 0)),
        )
        return pl.pallas_call(body, grid_spec=grid_spec, out_shape=shape_of(x, 32, 128))(start, x)

    added = np.arange(1, 5) if written == "scalar" else np.ones(4)
    result, how = outcome(program, start, x)
    expected = np.concatenate([np.asarray(x)] * 2).reshape(4, *TILE) + added[:, None, None]
    np.testing.assert_array_equal(result, expected.reshape(32, 128))
    assert how == "tpu"


# Blocks and shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "tpu"])
@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8, jnp.bool_, jnp.int4])
def test_ragged_blocks_write_nothing_beyond_the_array(dtype: Any, mode: str) -> None:
    x = values(13, 200, dtype=dtype)

    def program(x: jax.Array) -> jax.Array:
        def body(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = x_ref[...]

        spec = rows(lambda i, j: (i, j))
        return pl.pallas_call(body, grid=(2, 2), in_specs=[spec], out_specs=spec, out_shape=shape_of(x))(x)

    result, _ = outcome(program, x, mode=mode)
    assert result.shape == (13, 200) and result.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(result, np.asarray(x))


def test_a_block_outside_of_the_array_is_refused() -> None:
    def program(x: jax.Array) -> jax.Array:
        spec = rows(lambda i: (i, 0))
        return pl.pallas_call(
            double_kernel, grid=(4,), in_specs=[spec], out_specs=spec, out_shape=shape_of(x, 32, 128)
        )(x)

    with pytest.raises(InvalidKernel, match=r"'double_kernel'.*input 0.*\(16, 128\).*grid step \(2,\)"):
        prepare(program, values(16, 128))


def test_squeezed_and_element_blocks() -> None:
    x = values(3, 24, 128)

    def program(x: jax.Array) -> jax.Array:
        return pl.pallas_call(
            lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[0:8] + x_ref[8:16]),
            grid=(3, 2),
            in_specs=[pl.BlockSpec((None, pl.Element(16), pl.Element(128)), lambda b, i: (b, i * 8, 0))],
            out_specs=pl.BlockSpec((pl.Squeezed(), *TILE), lambda b, i: (b, i, 0)),
            out_shape=shape_of(x, 3, 16, 128),
        )(x)

    result, how = outcome(program, x)
    np.testing.assert_array_equal(result, np.asarray(x)[:, :16] + np.asarray(x)[:, 8:])
    assert how == "fast"


def test_an_empty_grid_or_output_launches_nothing() -> None:
    assert outcome(double, values(0, 128))[0].shape == (0, 128)
    empty_grid = pl.pallas_call(double_kernel, grid=(0,), out_shape=jax.ShapeDtypeStruct(TILE, F32))
    assert np.isnan(outcome(empty_grid, values(*TILE))[0]).all()


@pytest.mark.parametrize(
    ("what", "program"),
    [
        ("empty", lambda x: pl.pallas_call(ignore_kernel, out_shape=shape_of(x))(x[:0])),
        ("complex", lambda x: double(x.astype(jnp.complex64))),
        (
            "BoundedSlice",
            lambda x: pl.pallas_call(
                double_kernel,
                grid=(1,),
                in_specs=[pl.BlockSpec((pl.BoundedSlice(8), 128), lambda i: (pl.ds(0, 8), 0))],
                out_shape=shape_of(x),
            )(x),
        ),
    ],
)
def test_what_no_interpreter_runs_is_refused_by_name(what: str, program: Callable[..., Any]) -> None:
    with pytest.raises(KernelNotInterpretable, match=f"'(double|ignore)_kernel'.*{what}"):
        prepare(program, values(*TILE))


# Copies, semaphores, pipelines, meshes, random numbers -------------------------------------------


def gather_blocks(index: jax.Array, x: jax.Array) -> jax.Array:
    def body(index_ref: Any, x_hbm_ref: Any, o_ref: Any, buffer_ref: Any, sems: Any) -> None:
        i = pl.program_id(0)
        slot = lax.rem(i, 2)
        source = x_hbm_ref.at[pl.ds(pl.multiple_of(index_ref[i] * 8, 8), 8)]
        copy = pltpu.make_async_copy(source, buffer_ref.at[slot], sems.at[slot])
        copy.start()
        copy.wait()
        o_ref[...] = buffer_ref[slot]

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4,),
        in_specs=[ANY],
        out_specs=rows(lambda i, index_ref: (index_ref[i], 0)),
        scratch_shapes=[pltpu.VMEM((2, *TILE), F32), pltpu.SemaphoreType.DMA((2,))],
    )
    return pl.pallas_call(body, grid_spec=grid_spec, out_shape=shape_of(x))(index, x)


@pytest.mark.parametrize("mode", ["fast", "tpu"])
def test_scalar_prefetch_and_copies(mode: str) -> None:
    x = values(32, 128)
    result, how = outcome(gather_blocks, jnp.array([3, 1, 0, 2], jnp.int32), x, mode=mode)
    np.testing.assert_array_equal(result, np.asarray(x))
    assert how == mode


@pytest.mark.parametrize(("height", "how"), [(32, "fast"), (28, "tpu")])
def test_pipelines_inside_a_kernel_even_ragged_ones(height: int, how: str) -> None:
    x = values(height, 256)

    def program(x: jax.Array) -> jax.Array:
        spec = pl.BlockSpec(TILE, lambda i, j: (i, j), pipeline_mode=pl.Buffered(2))
        pipeline = pltpu.emit_pipeline(double_kernel, grid=(4, 2), in_specs=[spec], out_specs=[spec])
        return pl.pallas_call(pipeline, in_specs=[ANY], out_specs=ANY, out_shape=shape_of(x), name="pipe")(x)

    result, ran = outcome(program, x)
    np.testing.assert_array_equal(result, 2 * np.asarray(x))
    assert ran == how


def test_barriers_and_scoped_memory() -> None:
    x = values(*TILE)

    def body(x_ref: Any, o_ref: Any, sem: Any) -> None:
        def scoped(scratch_ref: Any) -> None:
            scratch_ref[...] = x_ref[...]
            o_ref[...] = scratch_ref[...] * 2

        pl.semaphore_signal(sem, 2)
        pl.semaphore_wait(sem, 2)
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, 1)
        pl.semaphore_wait(barrier, 1)
        pl.run_scoped(scoped, pltpu.VMEM(TILE, F32))

    program = pl.pallas_call(
        body,
        out_shape=shape_of(x),
        scratch_shapes=[pltpu.SemaphoreType.REGULAR],
        compiler_params=pltpu.CompilerParams(collective_id=0),
    )
    result, how = outcome(program, x)
    np.testing.assert_array_equal(result, 2 * np.asarray(x))
    assert how == "tpu"


def test_a_kernel_that_waits_for_ever_is_ended() -> None:
    """With the line that waits; and the next kernel runs."""
    x = values(*TILE)

    def body(x_ref: Any, o_ref: Any, sem: Any) -> None:
        pl.semaphore_signal(sem, 1)
        pl.semaphore_wait(sem, 3)
        o_ref[...] = x_ref[...]

    program = pl.pallas_call(body, out_shape=shape_of(x), scratch_shapes=[pltpu.SemaphoreType.REGULAR])
    for _ in range(2):
        with pytest.raises(
            KernelDeadlock, match=r"device 0 waits for 3 of semaphore \d+ at .*test_interp.*, has 1"
        ):
            outcome(program, x, mode="tpu")
        np.testing.assert_array_equal(outcome(double, x, mode="tpu")[0], 2 * np.asarray(x))


def test_a_core_that_waits_for_one_that_computes_is_not_ended() -> None:
    """While a core is in no callback, nobody can tell whether it will signal."""
    x = values(16, 128)

    def slow(block: np.ndarray) -> np.ndarray:
        time.sleep(0.6)
        return block

    def program(x: jax.Array) -> Any:
        def body(x_hbm_ref: Any, o_hbm_ref: Any, x_ref: Any, sem: Any) -> None:
            core = lax.axis_index("core")
            here = pl.ds(core * 8, 8)
            pltpu.sync_copy(x_hbm_ref.at[here], x_ref)

            @pl.when(core == 0)
            def _() -> None:
                x_ref[...] = jax.pure_callback(slow, shape_of(x, *TILE), x_ref[...])
                pl.semaphore_signal(sem, 1, core_index=1)

            @pl.when(core == 1)
            def _() -> None:
                pl.semaphore_wait(sem, 1)

            pltpu.sync_copy(x_ref, o_hbm_ref.at[here])

        scratch = [pltpu.VMEM(TILE, F32), pltpu.SemaphoreType.REGULAR]
        mesh = pltpu.create_tensorcore_mesh("core", num_cores=2)
        return pl.kernel(body, out_type=shape_of(x), mesh=mesh, scratch_types=scratch)(x)

    result, _ = outcome(program, x)
    np.testing.assert_array_equal(result, np.asarray(x))


@pytest.mark.parametrize("cores", [1, 2])
def test_kernels_over_a_core_mesh(cores: int) -> None:
    x = values(16, 128)

    def program(x: jax.Array) -> Any:
        height = 16 // cores
        mesh = pltpu.create_tensorcore_mesh("core", num_cores=cores)

        def body(x_hbm_ref: Any, o_hbm_ref: Any, x_ref: Any) -> None:
            here = pl.ds(lax.axis_index("core") * height, height)
            pltpu.sync_copy(x_hbm_ref.at[here], x_ref)
            x_ref[...] *= 2
            pltpu.sync_copy(x_ref, o_hbm_ref.at[here])

        scratch = [pltpu.VMEM((height, 128), F32)]
        return pl.kernel(body, out_type=shape_of(x), mesh=mesh, scratch_types=scratch)(x)

    result, how = outcome(program, x)
    np.testing.assert_array_equal(result, 2 * np.asarray(x))
    assert how == "tpu"


def random_bits(seed: jax.Array) -> jax.Array:
    def body(seed_ref: Any, o_ref: Any) -> None:
        pltpu.prng_seed(seed_ref[0])
        o_ref[0] = pltpu.prng_random_bits(TILE)
        o_ref[1] = pltpu.prng_random_bits(TILE)

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    out = jax.ShapeDtypeStruct((2, *TILE), jnp.int32)
    return pl.pallas_call(body, in_specs=[smem], out_shape=out)(seed)


def test_random_bits_are_random_and_follow_the_seed() -> None:
    first, again, other = (outcome(random_bits, jnp.array([seed]))[0] for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other) and not np.array_equal(first[0], first[1])
    ones = np.unpackbits(first.view(np.uint8)).mean()  # 65536 fair bits: deviation 0.002
    assert abs(ones - 0.5) < 6 * 0.5 / np.sqrt(first.size * 32)


# Numbers, hints, robustness ---------------------------------------------------------------------


def test_matmul_with_all_the_hints() -> None:
    x = values(16, 128, dtype=jnp.bfloat16)

    def body(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        contract = (((1,), (1,)), ((), ()))
        o_ref[...] = lax.dot_general(x_ref[...], y_ref[...], contract, preferred_element_type=F32)

    program = pl.pallas_call(
        body,
        grid=(1, 2),
        in_specs=[rows(lambda _, i: (i, 0)), pl.BlockSpec((16, 128), lambda _, i: (0, 0))],
        out_specs=pl.BlockSpec((8, 16), lambda _, i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((16, 16), F32),
        name="gram",
        cost_estimate=pl.CostEstimate(flops=1, bytes_accessed=1, transcendentals=0),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "parallel"), vmem_limit_bytes=1 << 20
        ),
    )
    exact = np.asarray(x, np.float64) @ np.asarray(x, np.float64).T
    for mode in ("fast", "tpu"):
        np.testing.assert_array_equal(outcome(program, x, x, mode=mode)[0], exact)  # integers: exact in f32


@pytest.mark.parametrize("mode", ["fast", "tpu"])
def test_64_bit_operands(mode: str) -> None:
    with jax.enable_x64(True):
        for x in (values(*TILE, dtype=jnp.int64) + 2**40, values(*TILE, dtype=jnp.float64) / 3):
            result, _ = outcome(double, x, mode=mode)
            assert result.dtype == x.dtype
            np.testing.assert_array_equal(result, 2 * np.asarray(x))


def test_large_buffers_in_the_tpu_interpreter() -> None:
    x = jnp.ones((1024, 1024))
    spec = pl.BlockSpec((512, 1024), lambda i: (i, 0))
    program = pl.pallas_call(double_kernel, grid=(2,), in_specs=[spec], out_specs=spec, out_shape=shape_of(x))
    assert (outcome(program, x, mode="tpu")[0] == 2).all()


def test_the_interpreter_is_usable_after_an_error_inside_a_kernel() -> None:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) + 4, 8), :]

    x = values(*TILE)
    beyond = pl.pallas_call(body, grid=(1,), out_shape=shape_of(x))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds"):
            outcome(beyond, x, mode="tpu")
        np.testing.assert_array_equal(outcome(double, x, mode="tpu")[0], 2 * np.asarray(x))


def test_threads_share_the_interpreter() -> None:
    interpreted = prepare(double, values(*TILE), mode="tpu")
    run = jax.jit(jax.extend.core.jaxpr_as_fun(interpreted.jaxpr))
    right: list[bool] = []

    def work(offset: int) -> None:
        x = values(*TILE) + offset
        for _ in range(3):
            with interpretation.interpreter_lock():
                (result,) = jax.block_until_ready(run(x))
            right.append(np.array_equal(result, 2 * np.asarray(x)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 9

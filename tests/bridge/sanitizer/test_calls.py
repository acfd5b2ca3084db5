"""What a call gives while kernels are checked, which calls are checked, and what the report says."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import bridge
from bridge import SanitizerError, jax_op
from bridge.precision import precision
from bridge.sanitizer.report import CheckedKernel

from . import planted
from .reports import checked, kinds, the_only

X = torch.arange(32 * 128, dtype=torch.float32).reshape(32, 128)
ALIKE = functools.partial(planted.launch, out=(8, 128))
ONE_SEMAPHORE = [pltpu.SemaphoreType.REGULAR]


# The call -------------------------------------------------------------------------------------------


def add_one(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


def test_arguments_that_are_written_or_donated(device: torch.device) -> None:
    """Runs are repeated, and the argument is written once."""
    body = ALIKE(add_one)

    @jax_op(f"planted_{device}::add_one", mutates=("x",))
    def add_one_in_place(x: jax.Array) -> jax.Array:
        return body(x)

    @jax_op(f"planted_{device}::add_one_donated", donate_argnums=(0,))
    def add_one_donated(x: jax.Array) -> jax.Array:
        return body(x)

    x = torch.zeros(8, 128, device=device)
    _, report = checked(lambda: add_one_in_place(x), seeds=3)
    assert report.ok and report.runs == 6
    assert (x == 1).all()
    result, report = checked(lambda: add_one_donated(x))
    assert report.ok and (result == 2).all()
    with pytest.raises(RuntimeError, match="donated"):
        x.sum()


def test_the_value_and_the_count_of_runs() -> None:
    clean = planted.copied_in("before")
    for seeds in (1, 3):
        result, report = checked(lambda: clean(X[:8]), seeds=seeds)
        assert torch.equal(result, X[:8] * 2)
        assert report.runs == 2 * seeds
        assert report.kernels == (CheckedKernel("planted::copied_in_before", "copy_in", 2 * seeds),)
    with pytest.raises(ValueError, match="seeds must be at least 1"), bridge.sanitize(seeds=0):
        pass


def test_backward_is_checked() -> None:
    @jax.custom_vjp
    def doubled(x: jax.Array) -> jax.Array:
        return 2 * x

    body = functools.partial(planted.accumulate, clears=False)
    backward = planted.launch(body, (8, 128), scratch_shapes=[planted.TILE])
    doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (backward(jnp.concatenate([g])),))

    @jax_op("planted::doubled_with_a_bad_gradient")
    def op(x: jax.Array) -> jax.Array:
        return doubled(x)

    x = X[:8].clone().requires_grad_()
    with bridge.sanitize(seeds=1) as report:
        op(x).sum().backward()
    assert kinds(report) == {"uninitialised_read"}


def test_contexts_nest_and_end() -> None:
    fault = planted.copied_in("never")
    with_reference = planted.op_of("with_reference", ALIKE(add_one), reference=lambda x: x + 1)
    with bridge.sanitize(seeds=1) as outer:
        with bridge.sanitize(seeds=1) as inner:
            fault(X[:8])
        with bridge.interpret("reference"):
            assert torch.equal(with_reference(X[:8]), X[:8] + 1)
    fault(X[:8])
    assert not inner.ok and outer.ok
    assert not outer.kernels
    assert bridge.current_mode() == "fast"


def test_a_mode_of_that_name() -> None:
    with pytest.raises(ValueError, match="with bridge.sanitize"), bridge.interpret("sanitize"):
        pass


def test_ops_without_kernels_run_once() -> None:
    calls = []

    @jax_op("planted::no_kernel")
    def no_kernel(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return x + 1

    with bridge.sanitize() as report:
        no_kernel(X)
    assert not report.kernels and report.runs == 0
    assert len(calls) == 1


def flatten(x_ref, o_ref):
    o_ref[...] = x_ref.reshape(1024)[...]


def test_a_kernel_that_can_not_be_checked_is_named() -> None:
    op = planted.op_of("flatten", planted.launch(flatten, (1024,)))
    with bridge.sanitize() as report:
        op(X[:8])
    (kernel,) = report.kernels
    assert kernel.name == "flatten" and kernel.unchecked
    assert f"kernel flatten of planted::flatten was not checked: {kernel.unchecked}" in str(report)


def test_a_report_as_text_and_as_an_error() -> None:
    _, report = checked(lambda: planted.copied_in("never")(X[:8]), seeds=1)
    text = str(report)
    for finding in report.findings:
        assert str(finding) in text and finding.fix in text and finding.kind in text
    assert text.endswith(f"2 findings in 1 kernel, {report.runs} runs")
    with pytest.raises(SanitizerError, match="dma_not_waited"):
        report.raise_if_any()
    _, clean = checked(lambda: planted.copied_in("before")(X[:8]), seeds=1)
    clean.raise_if_any()
    assert str(clean) == "no findings in 1 kernel, 2 runs"


def draw(x_ref, o_ref):
    bits = pltpu.prng_random_bits(x_ref.shape)
    o_ref[...] = jnp.where(bits > 0, x_ref[...], 0)


def test_random_bits_are_the_same_in_each_run() -> None:
    """Also those of a kernel that sets no seed."""
    op = planted.op_of("draw", ALIKE(draw))
    result, report = checked(lambda: op(X[:8]), seeds=3)
    assert report.ok, report
    assert 0.3 < (result != 0).double().mean() < 0.7


def test_float64_and_emulated_precision() -> None:
    @jax_op("planted::product")
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        def body(a_ref, b_ref, o_ref):
            o_ref[...] = a_ref[...] @ b_ref[...]

        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 128), a.dtype))(a, b)

    a, b = torch.randn(8, 128), torch.randn(128, 128)
    for x, y in ((a, b), (a.double(), b.double())):
        with bridge.interpret("tpu"), precision("medium"):
            expected = product(x, y)
            result, report = checked(lambda x=x, y=y: product(x, y))
        assert report.ok and torch.equal(result, expected)


def on_cores(cores: int, apart: bool) -> Any:
    """An op that doubles rows; each core has its own ones, or all have the same."""

    def body(x_hbm_ref, o_hbm_ref, rows_ref):
        height = 16 // cores
        here = pl.ds(jax.lax.axis_index("core") * height if apart else 0, height)
        pltpu.sync_copy(x_hbm_ref.at[here], rows_ref)
        rows_ref[...] *= 2
        pltpu.sync_copy(rows_ref, o_hbm_ref.at[here])

    def doubled(x: jax.Array) -> jax.Array:
        mesh = pltpu.create_tensorcore_mesh("core", num_cores=cores)
        scratch = [pltpu.VMEM((16 // cores, 128), x.dtype)]
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        run: Any = pl.kernel(body, out_type=shape, mesh=mesh, scratch_types=scratch)
        return run(x)

    return planted.op_of(f"on_{cores}_cores_{apart}", doubled)


@pytest.mark.parametrize("cores", [1, 2])
def test_kernels_over_a_core_mesh(cores: int) -> None:
    result, report = checked(lambda: on_cores(cores, True)(X[:16]))
    assert report.ok, report
    assert torch.equal(result, 2 * X[:16])


def test_two_cores_write_the_same_rows() -> None:
    _, report = checked(lambda: on_cores(2, False)(X[:16]))
    race = the_only(report, "race")
    assert race.line.endswith(
        planted.line_of(on_cores, "o_hbm_ref.at[here])").replace("planted", "test_calls")
    )
    assert kinds(report) == {"race"}


def copy_whole(x_hbm_ref, o_hbm_ref):
    pltpu.sync_copy(x_hbm_ref, o_hbm_ref)


def test_a_call_that_can_not_be_checked_runs_as_usual() -> None:
    """JAX's TPU interpreter refuses a batch of arrays in HBM, and plain interpretation does not."""
    op = planted.op_of("copied", ALIKE(copy_whole, in_specs=[planted.IN_HBM], out_specs=planted.IN_HBM))
    x = X[:16].reshape(2, 8, 128)
    with bridge.sanitize() as report:
        result = torch.vmap(op)(x)
    assert torch.equal(result, x)
    (kernel,) = report.kernels
    assert "trivial BlockSpec" in kernel.unchecked and kernel.name == "copy_whole"


@pytest.mark.parametrize("backend", ["eager", pytest.param("tpu", marks=pytest.mark.slow)])
def test_compiled_graphs_are_checked(backend: str) -> None:
    op = planted.copied_in("never")
    compiled = torch.compile(lambda x: op(x) + 1, backend=backend, fullgraph=True)
    with bridge.sanitize(seeds=1) as report:
        compiled(X[:8])
    assert "dma_not_waited" in kinds(report)

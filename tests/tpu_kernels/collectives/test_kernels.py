"""The kernels themselves: races, semaphores, many in one program; and the TPU compiler's opinion."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.primitives import AsyncCopyDescriptor
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bridge import topology
from bridge.interpretation import tpu_interpreter
from bridge.ranks.devices import simulated_devices
from tpu_kernels.collectives import (
    kernel,
    matmul_gather,
    matmul_scatter,
    matmul_vjp,
    ragged,
    ragged_vjp,
    reference,
    vjp,
)
from tpu_kernels.collectives.links import Line
from tpu_kernels.collectives.products import MatmulTiling
from tpu_kernels.collectives.ring_sum import SumTile, ring_sum

# Chips and numbers of devices.
TARGETS = [("v5e", 4), ("v6e", 4), ("tpu7x", 4), pytest.param("v5e", 8, marks=pytest.mark.slow)]


def mapped(fn: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A function of each device's part of the rows, jitted."""
    spec = P(mesh.axis_names)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def chain(x: jax.Array, module: Any, suffix: str, axes: dict[str, int]) -> jax.Array:
    """All kernels, one after the other, along each axis in turns: ranks may be kernels apart."""

    def call(name: str, x: jax.Array, axis: str, *options: int) -> jax.Array:
        return getattr(module, name + suffix)(x, axis, axes[axis], *options)

    for _ in range(2):
        for axis in axes:
            y = call("all_gather", x, axis, 0)
            x = call("reduce_scatter", y, axis, 0) / axes[axis]
            x = call("ppermute", x, axis, 1)
            x = call("ppermute", x, axis, 2)
            x = call("all_to_all", x, axis, 1, 1)
            rows = x.shape[0]
            module_of_halos = vjp if module is kernel else reference
            halos = getattr(module_of_halos, "halo_exchange" + suffix)
            x = halos(x, axis, axes[axis], 1, 2, 0, True)[:rows]
            x = call("ppermute", x, axis, -1)
    return x


@pytest.mark.parametrize(
    "shape", [(2, 2), *[pytest.param(shape, marks=pytest.mark.slow) for shape in ((4,), (7,), (2, 3))]]
)
@pytest.mark.parametrize("copies", ["eager", "on_wait"])
def test_no_races_and_no_semaphore_left(shape: tuple[int, ...], copies: Literal["eager", "on_wait"]) -> None:
    """JAX's interpreter finds races, and semaphores that aren't zero at a kernel's end.

    Copies happen as soon or as late as they may. Seven in a ring are enough for slots to be used again:
    without the credits, races are found.
    """
    axes = dict(zip("xy", shape, strict=False))
    count = int(np.prod(shape))
    mesh = Mesh(np.array(simulated_devices(count)).reshape(shape), tuple(axes))
    x = np.random.default_rng(0).standard_normal((3 * count, 2 * count)).astype(np.float32)
    expected = mapped(functools.partial(chain, module=reference, suffix="_reference", axes=axes), mesh)(x)
    got, said = watched(
        lambda: mapped(functools.partial(chain, module=kernel, suffix="", axes=axes), mesh)(x), copies
    )
    # Each of the (at most) four sums of at most seven terms is of numbers that are equal.
    np.testing.assert_allclose(got, expected, rtol=float(4 * 7 * np.finfo(np.float32).eps))
    assert not said


Copies = Literal["eager", "on_wait"]


def watched(call: Callable[[], Any], copies: Copies) -> tuple[Any, str]:
    """What a call gives in JAX's interpreter, and what that prints: races, and semaphores that aren't zero.

    It keeps the races of the last kernel alone, but prints those of all.
    """
    tpu_interpreter.reset()
    tpu_interpreter._set_up()
    checks = pltpu.InterpretParams(
        detect_races=True,
        dma_execution_mode=copies,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
        buffer_bounds="padded",
    )
    said = io.StringIO()
    try:
        with pltpu.force_tpu_interpret_mode(checks), contextlib.redirect_stdout(said):
            got = jax.tree.map(np.asarray, call())
        return got, said.getvalue()
    finally:
        tpu_interpreter.reset()


def whole_numbers(*shape: int, low: int = -8) -> np.ndarray:
    """So small that all sums here are exact, in any order."""
    return np.random.default_rng(0).integers(low, 9, shape).astype(np.float32)


def products(x: jax.Array, w: jax.Array, size: int, of: str) -> Any:
    """Both collectives that multiply, and the one that keeps what it gathers."""
    if of == "reference":
        y = reference.all_gather_matmul_reference(x, w, "x", size)
        z = reference.matmul_reduce_scatter_reference(y, w, "x", size, transpose_w=True)
        return y, z, y, reference.all_gather_reference(x, "x", size)
    tiling = MatmulTiling(128, 128, 128)
    y = matmul_vjp.all_gather_matmul(x, w, "x", size, tiling=tiling)
    z = matmul_vjp.matmul_reduce_scatter(y, w, "x", size, transpose_w=True, tiling=tiling)
    both: Any = matmul_vjp.all_gather_and_matmul(x, w, "x", size, tiling=tiling)
    return y, z, *both


@pytest.mark.parametrize(
    ("size", "rows"),
    [(2, 3), (4, 3), *[pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 130), (3, 3), (7, 5))]],
)
@pytest.mark.parametrize("copies", ["eager", "on_wait"])
def test_products_have_no_races(size: int, rows: int, copies: Copies) -> None:
    mesh = Mesh(np.array(simulated_devices(size)), ("x",))
    x, w = whole_numbers(size * rows, rows), whole_numbers(size * rows, 2 * rows)
    got, said = watched(
        lambda: mapped(functools.partial(products, size=size, of="kernels"), mesh)(x, w), copies
    )
    expected = mapped(functools.partial(products, size=size, of="reference"), mesh)(x, w)
    jax.tree.map(np.testing.assert_array_equal, got, jax.tree.map(np.asarray, expected))
    assert not said


def moved_rows(x: jax.Array, counts: jax.Array, size: int, rows: int, of: str) -> Any:
    """Rows there and back, so that a rank may be a kernel ahead of others."""
    function = reference.ragged_all_to_all_reference if of == "reference" else ragged_vjp.ragged_all_to_all
    y, received = function(x, counts, "x", size, rows)
    return y, received, *function(y, received, "x", size, rows)


@pytest.mark.parametrize(
    ("size", "copies", "low"),
    [
        (2, "eager", -5),
        (2, "on_wait", 0),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, "eager", 0), (2, "on_wait", -5), (4, "eager", -5), (4, "on_wait", 0))
        ],
    ],
)
def test_moved_rows_have_no_races(size: int, copies: Copies, low: int) -> None:
    """Counts may be wrong: negative, more than there are rows, or more than there is room for."""
    mesh, rows = Mesh(np.array(simulated_devices(size)), ("x",)), 13
    counts = np.random.default_rng(1).integers(low, 6 if low == 0 else 20, size * size).astype(np.int32)
    counts[0] = 6 if low == 0 else 2**31 - 1
    x = whole_numbers(size * rows, 3)

    def call(of: str) -> Any:
        return mapped(functools.partial(moved_rows, size=size, rows=rows, of=of), mesh)(x, counts)

    got, said = watched(lambda: call("kernels"), copies)
    jax.tree.map(np.testing.assert_array_equal, got, jax.tree.map(np.asarray, call("reference")))
    assert not said


class _Without:
    """`jax.experimental.pallas` as one module sees it, but that it has no credits."""

    def __init__(self, pallas: Any) -> None:
        self._pallas = pallas

    def __getattr__(self, name: str) -> Any:
        if name in ("semaphore_signal", "semaphore_wait"):
            return lambda *args, **options: None
        return getattr(self._pallas, name)


@pytest.mark.parametrize(
    "module", [matmul_gather, pytest.param(matmul_scatter, marks=pytest.mark.slow)], ids=["gather", "scatter"]
)
def test_without_credits_races_are_found(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above would fail: seven in a ring use slots again, in both directions."""
    monkeypatch.setattr(module, "pl", _Without(module.pl))
    mesh = Mesh(np.array(simulated_devices(7)), ("x",))
    x, w = whole_numbers(7 * 7, 3), whole_numbers(7 * 3, 2)
    name = "all_gather_matmul" if module is matmul_gather else "matmul_reduce_scatter"
    _, said = watched(
        lambda: mapped(lambda x, w: getattr(matmul_vjp, name)(x, w, "x", 7), mesh)(x, w), "eager"
    )
    assert "RACE DETECTED" in said


@pytest.mark.parametrize(
    "module", [matmul_gather, matmul_scatter, ragged], ids=["gather", "scatter", "ragged"]
)
def test_without_waits_for_arrivals_that_is_said(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = AsyncCopyDescriptor.wait_recv

    def local_only(copy: Any) -> None:
        if not copy.is_remote:
            wait(copy)

    monkeypatch.setattr(AsyncCopyDescriptor, "wait_recv", local_only)
    mesh = Mesh(np.array(simulated_devices(2)), ("x",))
    x, w = whole_numbers(2 * 4, 3), whole_numbers(2 * 3, 2)
    counts = np.array([2, 2, 2, 2], np.int32)

    def call() -> Any:
        if module is ragged:
            return mapped(lambda x, c: ragged_vjp.ragged_all_to_all(x, c, "x", 2, 8), mesh)(x, counts)
        name = "all_gather_matmul" if module is matmul_gather else "matmul_reduce_scatter"
        return mapped(lambda x, w: getattr(matmul_vjp, name)(x, w, "x", 2), mesh)(x, w)

    _, said = watched(call, "eager")
    assert "non-zero count" in said
    assert module is ragged or "RACE DETECTED" in said  # its ranks wait for each other at the end


def test_dtypes_and_shapes_are_checked() -> None:
    mesh = Mesh(np.array(simulated_devices(2)), ("x",))
    with pytest.raises(TypeError, match="all_gather: x must be float32, bfloat16, int32, got float16"):
        mapped(lambda x: kernel.all_gather(x, "x", 2), mesh)(jnp.zeros((2, 2), jnp.float16))
    with pytest.raises(
        ValueError, match="reduce_scatter: the size of x along dimension 0 must be a multiple of 2"
    ):
        mapped(lambda x: kernel.reduce_scatter(x, "x", 2), mesh)(jnp.zeros((6, 2)))


@pytest.mark.parametrize(
    ("rows", "cols", "tile"),
    [
        (5, 37, SumTile(5, 37)),
        (10_000, 37, SumTile(1024, 37)),
        (1030, 2500, SumTile(64, 2048)),
        (1, 100_000, SumTile(1, 2048)),
        (100_000, 128, SumTile(1024, 128)),
    ],
)
def test_tiles_fit_vmem(rows: int, cols: int, tile: SumTile) -> None:
    assert SumTile.of(rows, cols) == tile


# Compiled for TPUs ------------------------------------------------------------------------------------


def compiles(fn: Callable[..., Any], shape: tuple[int, ...], dtype: Any, chip: str, devices: int) -> None:
    all_compile(fn, [(shape, dtype)], chip, devices, 1)


def all_compile(
    fn: Callable[..., Any], arrays: list[tuple[tuple[int, ...], Any]], chip: str, devices: int, kernels: int
) -> None:
    """For shapes of one device's parts, with so many kernels."""
    mesh = topology.mesh(chip, "x", devices)
    whole = [jax.ShapeDtypeStruct((devices * shape[0], *shape[1:]), dtype) for shape, dtype in arrays]
    specs = (P("x"),) * len(arrays)
    program = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    with topology.compile_for(program, whole, chip, mesh=mesh, in_specs=specs, out_specs=P("x")) as compiled:
        assert len(compiled.kernels) == kernels, compiled.kernels


@pytest.mark.parametrize(("chip", "devices"), TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("int32", marks=pytest.mark.slow)])
def test_kernels_compile(chip: str, devices: int, dtype: str) -> None:
    n = devices
    kind = jnp.dtype(dtype)
    for shape in ((n, 5, 200), (n * 301,)):
        compiles(lambda x: kernel.all_gather(x, "x", n), shape, kind, chip, n)
        compiles(lambda x: kernel.reduce_scatter(x, "x", n), shape, kind, chip, n)
        last = len(shape) - 1
        compiles(lambda x, last=last: kernel.all_to_all(x, "x", n, 0, last), shape, kind, chip, n)
        compiles(lambda x: kernel.ppermute(x, "x", n, 1), shape, kind, chip, n)
    compiles(lambda x: vjp.halo_exchange(x, "x", n, 2, 3), (7, 37), kind, chip, n)
    compiles(lambda x: kernel.ppermute(x, "x", n, 2), (7, 37), kind, chip, n)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "devices"), TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_sums_of_many_tiles_compile(chip: str, devices: int, dtype: str) -> None:
    """Tiles that are smaller at the end of rows and columns; single rows; as much as no VMEM holds."""
    for rows, cols in ((1030, 300), (1031, 3), (1, 5000), (20_000, 2048)):
        compiles(
            lambda x: ring_sum(x, Line("x", devices)), (devices, rows, cols), jnp.dtype(dtype), chip, devices
        )


@pytest.mark.parametrize("chip", ["v5e"])
def test_gradients_compile(chip: str) -> None:
    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: vjp.all_gather(x, "x", 4).sum())(x)

    compiles(gradient, (8, 128), jnp.float32, chip, 4)


def _products_compile(m: int, k: int, n: int, dtype: Any, chip: str, devices: int, transpose_w: bool) -> None:
    w = ((n, k) if transpose_w else (k, n), dtype)
    for function, rows in (
        (matmul_vjp.all_gather_matmul, m),
        (matmul_vjp.all_gather_and_matmul, m),
        (matmul_vjp.matmul_reduce_scatter, devices * m),
    ):
        all_compile(
            lambda x, w, function=function: function(x, w, "x", devices, 0, transpose_w),
            [((rows, k), dtype), w],
            chip,
            devices,
            1,
        )


@pytest.mark.parametrize(("chip", "devices"), TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_compile(chip: str, devices: int, dtype: str) -> None:
    _products_compile(1, 1, 1, jnp.dtype(dtype), chip, devices, False)
    _products_compile(5, 7, 3, jnp.dtype(dtype), chip, devices, False)
    _products_compile(3, 130, 1, jnp.dtype(dtype), chip, devices, True)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "devices"), TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("m", "k", "n", "transpose_w"),
    [
        (1030, 1100, 1500, False),
        (1030, 5000, 1500, True),
        (1, 9000, 3, True),
    ],
)
def test_products_of_many_tiles_compile(
    chip: str, devices: int, dtype: str, m: int, k: int, n: int, transpose_w: bool
) -> None:
    """With the tiles that are chosen for the shape: they fit VMEM. The last ones are smaller."""
    _products_compile(m, k, n, jnp.dtype(dtype), chip, devices, transpose_w)


@pytest.mark.parametrize(("chip", "devices"), TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("int32", marks=pytest.mark.slow)])
def test_moved_rows_compile(chip: str, devices: int, dtype: str) -> None:
    """One kernel for the counts, and one for rows of any shape, which begin anywhere."""
    for shape, output_rows in (((37, 200), 50), ((5,), 3), ((1000, 2, 256), 1500), ((33, 384), 40)):
        all_compile(
            lambda x, counts, rows=output_rows: ragged_vjp.ragged_all_to_all(x, counts, "x", devices, rows),
            [(shape, jnp.dtype(dtype)), ((devices,), jnp.int32)],
            chip,
            devices,
            2,
        )


@pytest.mark.parametrize("chip", ["v5e"])
def test_gradients_of_products_compile(chip: str) -> None:
    """Of all that a layer has, and no kernel besides."""

    def gradients(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            hidden = matmul_vjp.all_gather_matmul(x, w, "x", 4)
            y: Any = matmul_vjp.matmul_reduce_scatter(hidden, w, "x", 4, 0, True)
            return (y**2).sum()

        return jax.grad(loss, (0, 1))(x, w)

    # Forward: two. Backward: a gather with its product, a scatter with its product, and a gather for dw.
    all_compile(gradients, [((8, 128), jnp.float32), ((128, 256), jnp.float32)], chip, 4, 5)

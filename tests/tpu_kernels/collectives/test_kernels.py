"""The kernels themselves: races, semaphores, many in one program; and the TPU compiler's opinion."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bridge import topology
from bridge.interpretation import tpu_interpreter
from bridge.ranks.devices import simulated_devices
from tpu_kernels.collectives import kernel, reference, vjp
from tpu_kernels.collectives.links import Line
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
    """JAX's interpreter raises for a semaphore that isn't zero at a kernel's end, and finds races.

    Copies happen as soon or as late as they may. Seven in a ring are enough for slots to be used again:
    without the credits, races are found.
    """
    tpu_interpreter.reset()
    tpu_interpreter._set_up()
    axes = dict(zip("xy", shape, strict=False))
    count = int(np.prod(shape))
    mesh = Mesh(np.array(simulated_devices(count)).reshape(shape), tuple(axes))
    x = np.random.default_rng(0).standard_normal((3 * count, 2 * count)).astype(np.float32)
    expected = mapped(functools.partial(chain, module=reference, suffix="_reference", axes=axes), mesh)(x)
    checks = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=copies, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    with pltpu.force_tpu_interpret_mode(checks):
        got = mapped(functools.partial(chain, module=kernel, suffix="", axes=axes), mesh)(x)
    # Each of the (at most) four sums of at most seven terms is of numbers that are equal.
    np.testing.assert_allclose(got, expected, rtol=float(4 * 7 * np.finfo(np.float32).eps))
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    tpu_interpreter.reset()


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
    mesh = topology.mesh(chip, "x", devices)
    whole = jax.ShapeDtypeStruct((devices * shape[0], *shape[1:]), dtype)
    program = jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with topology.compile_for(
        program, [whole], chip, mesh=mesh, in_specs=P("x"), out_specs=P("x")
    ) as compiled:
        assert len(compiled.kernels) == 1, compiled.kernels


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

"""Traces for shapes alone: no kernel body is traced, the shapes are true, and nothing of them can run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bridge
from bridge.interpretation import tracing_chip
from bridge.shapes import pallas_call, shapes_only

traced: list[str] = []


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x / 2 in float32, and the sums of its rows."""

    def kernel(x_ref: Any, half_ref: Any, sum_ref: Any) -> None:
        traced.append("kernel")
        half_ref[...] = x_ref[...].astype(jnp.float32) / 2
        sum_ref[...] = x_ref[...].sum(1, keepdims=True)

    rows = x.shape[0]
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct((rows, 1), x.dtype)]
    return pallas_call(kernel, shapes, name="halves", interpret=True)(x)


def described(tree: Any) -> Any:
    return jax.tree.map(lambda a: (a.shape, a.dtype), tree)


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_shapes_are_those_of_the_kernel(axes: int) -> None:
    call = halves
    for _ in range(axes):
        call = jax.vmap(call)
    x = jax.ShapeDtypeStruct((4, 3, 8, 128)[2 - axes :], jnp.bfloat16)
    with tracing_chip(), shapes_only():
        alone = jax.eval_shape(call, x)
    assert described(alone) == described(jax.eval_shape(call, x))


def test_no_body_is_traced() -> None:
    traced.clear()
    with tracing_chip(), shapes_only():
        jax.eval_shape(halves, jax.ShapeDtypeStruct((8, 256), jnp.float32))
    assert not traced
    jax.eval_shape(halves, jax.ShapeDtypeStruct((8, 256), jnp.float32))
    assert traced


def test_what_was_traced_for_shapes_is_not_found_elsewhere() -> None:
    """Not by a `jit` that remembers the function, and not the other way round."""
    jitted, x = jax.jit(halves), jnp.arange(8 * 384, dtype=jnp.float32).reshape(8, 384)
    with tracing_chip(), shapes_only():
        shapes = jax.eval_shape(jitted, x)
    half, sums = jitted(x)
    np.testing.assert_array_equal(half, np.asarray(x) / 2)
    np.testing.assert_array_equal(sums[:, 0], np.asarray(x).sum(1))
    assert described(shapes) == described((half, sums))
    traced.clear()
    with tracing_chip(), shapes_only():
        jax.eval_shape(jax.jit(halves), jax.ShapeDtypeStruct((8, 384), jnp.float32))
    assert not traced


def test_running_it_is_refused() -> None:
    with tracing_chip(), shapes_only():
        traced_program = jax.make_jaxpr(halves)(jnp.ones((8, 128)))
    with pytest.raises(Exception, match="traced for its shapes alone"):
        jax.block_until_ready(jax.jit(jax.extend.core.jaxpr_as_fun(traced_program))(jnp.ones((8, 128))))


def test_derivatives_keep_as_many_arrays() -> None:
    """What a derivative keeps is found for shapes only, and must be there when it runs."""

    def phase(x: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = jax.lax.complex(jnp.cos(x), jnp.sin(x)) * z
        return w, jnp.abs(w) + jnp.real(w) * jnp.imag(w)

    def kept() -> list[tuple[int, ...]]:
        found = []

        def twice(x: jax.Array, z: jax.Array, g: jax.Array, h: jax.Array) -> jax.Array:
            _, pull = jax.vjp(lambda *a: jax.vjp(phase, *a[:2])[1](a[2:]), x, z, g, h)
            found.extend(leaf.shape for leaf in jax.tree.leaves(pull))
            return x

        real, complex_ = (jax.ShapeDtypeStruct((3,), d) for d in (jnp.float32, jnp.complex64))
        jax.eval_shape(twice, real, complex_, complex_, real)
        return found

    with tracing_chip():
        with shapes_only():
            alone = kept()
        assert alone == kept()


def test_a_mesh_with_axes_is_kept() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    with jax.sharding.use_abstract_mesh(mesh), shapes_only():
        assert jax.sharding.get_abstract_mesh() == mesh


def test_fake_tensors_do_not_trace_kernels(device: torch.device) -> None:
    @bridge.jax_op("tests::halves", overwrite=True)
    def op(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        half, sums = halves(x)
        return half, sums

    traced.clear()
    with FakeTensorMode():
        half, sums = op(torch.empty(16, 128, dtype=torch.bfloat16, device=device))
    assert (half.shape, half.dtype) == ((16, 128), torch.float32)
    assert (sums.shape, sums.dtype) == ((16, 1), torch.bfloat16)
    assert not traced
    x = torch.randn(16, 128).to(device)
    torch.testing.assert_close(op(x)[0], x / 2)

"""Mistakes and uses that people who tried the bridge came up with: each is right, or says what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

import bridge
from bridge import device, jax_op
from bridge.roots import WrongReference

device.register()


def doubled(x: jax.Array) -> jax.Array:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def _two_arguments(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y


REFERENCES: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (_two_arguments, "its reference raised TypeError.*'y'"),
    "shape": (lambda x: x.sum(), r"float32\[\] as result 0, the op float32\[3\]"),
    "dtype": (lambda x: x.astype(jnp.bfloat16), r"bfloat16\[3\] as result 0, the op float32\[3\]"),
    "torch": (torch.tanh, "its reference raised TypeError"),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_wrong_reference_is_named(kind: str) -> None:
    reference, message = REFERENCES[kind]
    op = jax_op(f"test_newcomer::reference_{kind}", doubled, reference=reference)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(WrongReference, match=message):
        op(x).sum().backward()
    with pytest.raises(WrongReference, match=message), bridge.interpret("reference"):
        op(x.detach())
    assert torch.equal(op(x.detach()), torch.full((3,), 2.0))  # the kernel itself is fine


@jax_op("test_newcomer::square")
def square(x: jax.Array) -> jax.Array:
    return x * x


@pytest.mark.filterwarnings("ignore:.*get_attr Node:UserWarning", "ignore::DeprecationWarning")
def test_linearize() -> None:
    x, tangent = torch.randn(3), torch.randn(3)
    value, pushforward = torch.func.linearize(lambda x: square(x), x)
    torch.testing.assert_close(value, x * x)
    torch.testing.assert_close(pushforward(tangent), 2 * x * tangent)


def test_an_op_inside_a_jax_function_names_the_way() -> None:
    with pytest.raises(TypeError, match="inside a JAX function.*test_newcomer::square's .fn"):
        jax.jit(lambda x: square(x))(1.0)
    assert jax.jit(square.fn)(3.0) == 9.0


@pytest.mark.parametrize("value, fix", [([1.0], "torch.tensor"), (2.0, "torch.tensor")])
def test_what_is_no_tensor_names_the_conversion(value: Any, fix: str) -> None:
    with pytest.raises(TypeError, match=fix):
        square(value)


def test_numpy_arrays_name_the_conversion() -> None:
    import numpy as np

    with pytest.raises(TypeError, match="torch.from_numpy"):
        square(np.ones(3))


def test_one_mutated_argument_may_be_named_without_a_tuple() -> None:
    @jax_op("test_newcomer::bump", mutates="cache")
    def bump(cache: jax.Array) -> jax.Array:
        return cache + 1

    cache = torch.zeros(3)
    assert bump(cache) is None and torch.equal(cache, torch.ones(3))


def test_a_mutating_op_must_return_the_new_value() -> None:
    def nothing(cache: jax.Array) -> None: ...

    with pytest.raises(ValueError, match="return their new values first.*has no arrays"):
        jax_op("test_newcomer::nothing", nothing, mutates="cache")


def test_signatures_are_shown_with_jaxs_public_names() -> None:
    def wrong(x: jax.Array, y: dict) -> jax.Array: ...  # pyright: ignore[reportMissingTypeArgument]

    with pytest.raises(ValueError, match=r"\(x: jax.Array, y: dict\) -> jax.Array") as caught:
        jax_op("test_newcomer::wrong", wrong)
    assert "jaxlib" not in str(caught.value)


def test_an_error_inside_a_kernel_names_the_op_and_hides_our_own_machinery() -> None:
    @jax_op("test_newcomer::reads_outside")
    def reads_outside(x: jax.Array) -> jax.Array:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = x_ref[pl.ds(pl.program_id(0) + 100, 8), :]

        return pl.pallas_call(kernel, grid=(1,), out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype))(x)

    with bridge.interpret("tpu"), pytest.raises(Exception, match="[Oo]ut-of-bounds") as caught:
        reads_outside(torch.ones(8, 128))
    assert any("test_newcomer::reads_outside" in note for note in caught.value.__notes__)
    assert "_NeedsLock" not in repr(caught.value.__context__)
    with bridge.interpret("tpu"):  # and the interpreter goes on working
        assert torch.equal(jax_op("test_newcomer::after", doubled)(torch.ones(3)), torch.full((3,), 2.0))


SCRIPT = """
import os, warnings
warnings.simplefilter("ignore")
import jax, torch, bridge

def plus(x: jax.Array) -> jax.Array:
    return x + 1

op = bridge.jax_op("test_newcomer::plus", plus)
op(torch.ones(3))
child = os.fork()
if child == 0:
    try:
        op(torch.ones(4))
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert op(torch.ones(5)).sum() == 10
"""


def test_a_forked_child_gets_an_error_and_does_not_hang() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "forked after JAX had started" in done.stdout and "spawn" in done.stdout


def pair(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + w


pair_op = jax_op("test_newcomer::pair", pair)


def test_refusals_name_the_argument() -> None:
    x = torch.ones(3)
    with pytest.raises(TypeError, match="test_newcomer::pair: argument 'w': .*sparse"):
        pair_op(x, x.to_sparse())
    with pytest.raises(TypeError, match="test_newcomer::pair: argument 'w': .*complex32"):
        pair_op(x, torch.zeros(3, dtype=torch.int32).view(torch.complex32))
    with pytest.raises(RuntimeError, match=r"one device, got cpu \('x'\) and tpu:0 \('w'\)"):
        pair_op(x, x.to("tpu"))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(TypeError, match="argument 'x': expected a dense tensor, got a nested one"):
        pair_op(nested, x)


@jax_op("test_newcomer::cut")
def cut(x: jax.Array) -> jax.Array:
    return x[:300] if x.shape[0] >= 300 else x


@pytest.mark.parametrize("where, backend", [("tpu", "tpu"), ("cpu", "aot_eager")])
def test_a_size_at_which_a_function_changes_its_mind(where: str, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: cut(x).sum() / cut(x).shape[0], backend=backend, fullgraph=True, dynamic=True
    )
    for n in (5, 7, 600, 299, 300, 5000, 100):
        assert compiled(torch.ones(n, device=where)).item() == 1.0

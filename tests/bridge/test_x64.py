"""64-bit numbers: exact, or a clear error; never narrowed in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge import jax_op

BIG = [2**33 + 5, -1, 2**62, -(2**63), 0]


@jax_op("t_x64::same")
def same(x: jax.Array) -> jax.Array:
    return x + 0


@jax_op("t_x64::plus")
def plus(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y


@jax_op("t_x64::narrow", x64=False)
def narrow(x: jax.Array) -> jax.Array:
    return x + 0


@jax_op("t_x64::wide", x64=True)
def wide(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return x + jnp.float64(1) / 3, jnp.cumsum(jnp.arange(3)) * 2**40, jnp.argmax(x)


@jax_op("t_x64::cast")
def cast(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    wanted: Any = dtype  # declared as torch's, seen here as NumPy's
    return x.astype(wanted) + np.asarray(2**-40, wanted)


@jax_op("t_x64::gather")
def gather(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.sin(x)[index]


@jax_op("t_x64::default_types")
def default_types(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(3), jnp.ones(2) * x.sum()


@pytest.fixture
def ambient_x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def test_int64_is_exact(device: torch.device) -> None:
    x = torch.tensor(BIG).to(device)
    out = same(x)
    assert out.dtype is torch.int64 and out.tolist() == BIG
    assert plus(x, torch.ones_like(x)).tolist() == [b + 1 for b in BIG]


def test_uint64_is_exact() -> None:
    x = torch.tensor([2**63 + 9, 2**64 - 1], dtype=torch.uint64)
    assert same(x).tolist() == [2**63 + 9, 2**64 - 1]


def test_float64_and_complex128_are_exact(device: torch.device) -> None:
    x = torch.tensor([1 + 2**-40, 1e300], dtype=torch.float64).to(device)
    assert same(x).dtype is torch.float64 and same(x).tolist() == [1 + 2**-40, 1e300]
    z = torch.tensor([complex(1 + 2**-40, 1e300)], dtype=torch.complex128)
    assert same(z).dtype is torch.complex128 and same(z).tolist() == z.tolist()


def test_float64_gradients_are_exact() -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 1, 1])
    assert torch.autograd.gradcheck(lambda x: gather(x, index), (x,))
    (got,) = torch.autograd.grad(gather(x, index).sum(), x)
    (want,) = torch.autograd.grad(x.sin()[index].sum(), x)
    torch.testing.assert_close(got, want, rtol=4 * torch.finfo(torch.float64).eps, atol=0)


def test_float32_with_an_int64_index_stays_float32() -> None:
    x = torch.randn(5, requires_grad=True)
    out = gather(x, torch.tensor([0, 2]))
    out.sum().backward()
    assert out.dtype is torch.float32 and x.grad is not None and x.grad.dtype is torch.float32


def test_32_bits_without_wide_operands() -> None:
    integers, floats = default_types(torch.ones(2))
    assert integers.dtype is torch.int32 and floats.dtype is torch.float32


def test_a_wide_static_dtype_asks_for_64_bits() -> None:
    x = torch.ones(2)
    assert cast(x, torch.float64).tolist() == [1 + 2**-40] * 2
    assert cast(x, torch.float32).dtype is torch.float32


def test_x64_true() -> None:
    third, sums, index = wide(torch.zeros(3))
    assert third.dtype is torch.float64 and third[0].item() == 1 / 3
    assert sums.tolist() == [0, 2**40, 3 * 2**40] and index.dtype is torch.int64
    x = torch.zeros(3, requires_grad=True)
    wide(x)[0].sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32 and x.grad.tolist() == [1.0] * 3
    got = torch.vmap(lambda v: wide(v)[0])(torch.zeros(2, 3))
    assert got.dtype is torch.float64 and got[1, 1].item() == 1 / 3


def test_x64_false_takes_integers_that_fit(device: torch.device) -> None:
    out = narrow(torch.tensor([2**31 - 1, -(2**31)]).to(device))
    assert out.dtype is torch.int32 and out.tolist() == [2**31 - 1, -(2**31)]
    assert narrow(torch.tensor([], dtype=torch.int64)).shape == (0,)
    top = torch.tensor([2**32 - 1], dtype=torch.uint64)
    assert narrow(top).tolist() == [2**32 - 1]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**62])
def test_x64_false_refuses_integers_that_do_not(value: int) -> None:
    with pytest.raises(OverflowError, match="t_x64::narrow.*x64=True"):
        narrow(torch.tensor([0, value]))


@pytest.mark.parametrize("value", [2**32, 2**63, 2**64 - 1])
def test_x64_false_refuses_unsigned_integers_that_do_not_fit(value: int) -> None:
    with pytest.raises(OverflowError, match="t_x64::narrow"):
        narrow(torch.tensor([0, value], dtype=torch.uint64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_x64_false_refuses_wide_floats(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="t_x64::narrow was declared x64=False and got"):
        narrow(torch.ones(2, dtype=dtype))
    with pytest.raises(TypeError, match="t_x64::narrow was declared x64=False and got"):
        narrow(torch.ones(2, dtype=dtype, requires_grad=True))


def test_the_fake_kernel_says_what_the_real_one_does() -> None:
    cases = [
        (same, (torch.tensor(BIG),)),
        (narrow, (torch.tensor([1, 2]),)),
        (wide, (torch.zeros(3),)),
        (cast, (torch.ones(2), torch.float64)),
        (default_types, (torch.ones(2),)),
        (default_types, (torch.ones(2, dtype=torch.float64),)),
    ]
    for op, args in cases:
        torch.library.opcheck(op, args, test_utils=["test_schema", "test_faketensor"])


def test_compiled_int64_is_exact() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: same(x) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(torch.tensor(BIG)).tolist() == (torch.tensor(BIG) + 1).tolist()


def test_ambient_x64(ambient_x64: None) -> None:
    integers, floats = default_types(torch.ones(2))
    assert integers.dtype is torch.int64 and floats.dtype is torch.float64
    assert same(torch.tensor(BIG)).tolist() == BIG
    assert narrow(torch.tensor([7])).dtype is torch.int32
    torch.library.opcheck(default_types, (torch.ones(2),), test_utils=["test_schema", "test_faketensor"])


def test_ambient_x64_between_forward_and_backward() -> None:
    x = torch.randn(4, requires_grad=True)
    out = gather(x, torch.tensor([0, 2]).int())
    with jax.enable_x64(True):
        out.sum().backward()
    want = torch.tensor([1.0, 0, 1, 0]) * x.detach().cos()
    torch.testing.assert_close(x.grad, want, rtol=1e-6, atol=0)
    with jax.enable_x64(True):
        out = gather(x, torch.tensor([0, 2]).int())
    x.grad = None
    out.sum().backward()
    torch.testing.assert_close(x.grad, want, rtol=1e-6, atol=0)


def test_a_call_leaves_jax_as_it_was() -> None:
    same(torch.tensor(BIG))
    wide(torch.zeros(3))
    assert jnp.arange(3).dtype == np.int32

"""Gradients of ops: derived ones, given ones, and what happens where there is none."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from bridge import NotDifferentiable, interpret, jax_op
from bridge.graph import resolve

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's forward AD uses torch.jit.script
    import torch._decomp.decompositions_for_jvp  # noqa: F401

F64 = torch.float64


def randn(*shape: int, dtype: torch.dtype = F64, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=requires_grad)


def assert_equal(got: torch.Tensor | None, want: torch.Tensor, *, rounding: int = 0) -> None:
    """Same shape, dtype and values, to `rounding` roundings of the dtype."""
    assert got is not None
    eps = torch.finfo(want.dtype).eps if want.is_floating_point() or want.is_complex() else 0.0
    torch.testing.assert_close(got, want, rtol=rounding * eps, atol=rounding * eps)


# ---------------------------------------------------------------------------------- the ops


@jax_op("t_autodiff::sin")
def sin(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@jax_op("t_autodiff::mixed")
def mixed(x: jax.Array, w: jax.Array, bias: jax.Array | None, power: float) -> tuple[jax.Array, jax.Array]:
    y = jnp.exp(jnp.tanh(x @ w))
    if bias is not None:
        y = y + bias * bias
    return y * power, (y**2).sum(axis=0)


@jax_op("t_autodiff::total")
def total(xs: Sequence[jax.Array], scale: jax.Array) -> jax.Array:
    return functools.reduce(lambda a, b: a * b, xs) * scale


@jax_op("t_autodiff::product")
def product(x: jax.Array, y: jax.Array) -> jax.Array:
    return x * y


@jax_op("t_autodiff::take")
def take(x: jax.Array, index: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    chosen = jnp.where(keep[:, None], x[index], 0)
    return chosen * chosen, index + 1, chosen > 0


@jax_op("t_autodiff::first_only")
def first_only(x: jax.Array, unused: jax.Array) -> jax.Array:
    return jnp.cos(x)


@jax_op("t_autodiff::three")
def three(x: jax.Array) -> list[jax.Array]:
    return [jnp.sin(x), jnp.exp(x), x * x]


def _double(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * x_ref[...]


def _square_kernel(x: jax.Array) -> jax.Array:
    return pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@jax_op("t_autodiff::bare")
def bare(x: jax.Array) -> jax.Array:
    return _square_kernel(x)


@jax_op("t_autodiff::referenced", reference=lambda x: x**2)
def referenced(x: jax.Array) -> jax.Array:
    return _square_kernel(x)


# ---------------------------------------------------------------------------------- derived gradients


@pytest.mark.parametrize("bias", [True, False])
def test_derived_gradients_are_right_twice(bias: bool) -> None:
    inputs: Any = (randn(3, 4), randn(4, 2), randn(2) if bias else None, 1.5)
    assert gradcheck(mixed, inputs)
    assert gradgradcheck(mixed, inputs)


def test_derived_gradients_equal_torch_s() -> None:
    x, w, b = randn(3, 4), randn(4, 2), randn(2)

    def same(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.exp(torch.tanh(x @ w)) + b * b
        return y * 1.5, (y**2).sum(0)

    ours, theirs = mixed(x, w, b, 1.5), same(x, w, b)
    for got, want in zip(ours, theirs, strict=True):
        assert_equal(got, want, rounding=32)
    weights = [torch.randn_like(o) for o in theirs]
    for got, want in zip(grad(ours, (x, w, b), weights), grad(theirs, (x, w, b), weights), strict=True):
        assert_equal(got, want, rounding=256)


def test_lists_of_tensors() -> None:
    a, b, c, scale = randn(3), randn(3), randn(3), randn()
    call = lambda a, b, c, s: total([a, b, c], s)
    assert gradcheck(call, (a, b, c, scale))
    assert gradgradcheck(call, (a, b, c, scale))
    b.requires_grad_(False)
    total([a, b, c], scale).sum().backward()
    assert b.grad is None
    assert_equal(a.grad, (b * c * scale).detach(), rounding=4)


def test_double_backward_sees_how_the_gradient_depends_on_the_inputs() -> None:
    x = randn(5)
    (first,) = grad(sin(x).sum(), x, create_graph=True)
    (second,) = grad(first.sum(), x, create_graph=True)
    (third,) = grad(second.sum(), x)
    assert_equal(first.detach(), x.detach().cos(), rounding=2)
    assert_equal(second.detach(), -x.detach().sin(), rounding=2)
    assert_equal(third, -x.detach().cos(), rounding=2)


def test_on_the_tpu_device(tpu: torch.device) -> None:
    x = torch.randn(4, 3)
    on_tpu = x.to(tpu).requires_grad_()
    out = sin(on_tpu)
    out.backward(torch.ones_like(out))
    assert on_tpu.grad is not None and on_tpu.grad.device.type == "tpu"
    assert_equal(on_tpu.grad.cpu(), x.cos(), rounding=2)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_follow_torch_s_convention(dtype: torch.dtype) -> None:
    @jax_op("t_autodiff::complex_product", overwrite=True)
    def complex_product(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y * (2 + 1j)

    x, y = randn(3, dtype=dtype), randn(3, dtype=dtype)
    weight = torch.randn(3, dtype=dtype)
    ours = grad(complex_product(x, y), (x, y), weight)
    theirs = grad(x * y * (2 + 1j), (x, y), weight)
    for got, want in zip(ours, theirs, strict=True):
        assert_equal(got, want, rounding=32)
    if dtype is torch.complex128:
        assert gradcheck(complex_product, (x, y))
        assert gradgradcheck(complex_product, (x, y))


def test_real_to_complex_and_back() -> None:
    @jax_op("t_autodiff::phase", overwrite=True)
    def phase(x: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = jax.lax.complex(jnp.cos(x), jnp.sin(x)) * z
        return w, jnp.abs(w) + jnp.real(w) * jnp.imag(w)

    x, z = randn(3), randn(3, dtype=torch.complex128)
    assert gradcheck(phase, (x, z))
    assert gradgradcheck(phase, (x, z))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_have_the_dtype_of_their_inputs(dtype: torch.dtype) -> None:
    x = torch.randn(16).to(dtype).requires_grad_()
    out = sin(x)
    out.sum().backward()
    assert out.dtype is dtype and x.grad is not None and x.grad.dtype is dtype
    want = x.detach().double().cos()
    assert_equal(x.grad, want.to(dtype), rounding=2)


def test_mixed_dtypes_keep_each_input_s_own() -> None:
    x = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    y = torch.randn(4, requires_grad=True)
    product(x, y).sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.bfloat16
    assert y.grad is not None and y.grad.dtype is torch.float32
    assert_equal(y.grad, x.detach().float())


# ---------------------------------------------------------------------------------- which inputs


def test_only_what_requires_grad_is_differentiated() -> None:
    @jax_op("t_autodiff::pair")
    def pair(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(x) * jnp.exp(y)

    x, y = randn(3), randn(3, requires_grad=False)
    pair(x, y).sum().backward()
    assert_equal(x.grad, x.detach().cos() * y.exp(), rounding=8)
    assert y.grad is None
    assert set(resolve("t_autodiff::pair[[-1,-1],[]]")._derived) == {"fwd(0)", "bwd(2,0)"}
    backward = resolve("t_autodiff::pair[[-1,-1],[]]|bwd(2,0)")
    assert len(backward.out_avals(backward.avals([x, y, x, y, x]))) == 1


def test_an_unused_input_gets_zeros() -> None:
    x, unused = randn(3), randn(2, 2)
    first_only(x, unused).sum().backward()
    assert_equal(unused.grad, torch.zeros(2, 2, dtype=F64))
    assert_equal(x.grad, -x.detach().sin(), rounding=2)


def test_integer_and_bool_inputs_and_results() -> None:
    x, index, keep = randn(4, 3), torch.tensor([2, 0, 2]), torch.tensor([True, False, True])
    squares, shifted, positive = take(x, index, keep)
    assert squares.requires_grad and not shifted.requires_grad and not positive.requires_grad
    assert shifted.dtype is torch.int64 and positive.dtype is torch.bool
    squares.sum().backward()
    want = torch.zeros(4, 3, dtype=F64)
    want[2] = 4 * x.detach()[2]
    assert_equal(x.grad, want, rounding=4)
    assert gradcheck(lambda x: take(x, index, keep)[0], (x,))
    assert gradgradcheck(lambda x: take(x, index, keep)[0], (x,))


def test_integer_inputs_alone_record_nothing() -> None:
    out = product(torch.tensor([2, 3]), torch.tensor([4, 5]))
    assert not out.requires_grad and out.tolist() == [8, 15]


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_results_that_the_loss_does_not_use(used: tuple[int, ...]) -> None:
    x = randn(4)
    want = [x.detach().cos(), x.detach().exp(), 2 * x.detach()]
    sum(three(x)[i].sum() for i in used).backward()  # type: ignore[union-attr]
    assert_equal(x.grad, sum(want[i] for i in used), rounding=8)  # type: ignore[arg-type]


def test_the_same_tensor_twice() -> None:
    x = randn(4)
    product(x, x).sum().backward()
    assert_equal(x.grad, 2 * x.detach())


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0, 3), ()])
def test_zero_size_and_zero_dimensional(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    sin(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert_equal(x.grad, x.detach().cos(), rounding=2)


# ---------------------------------------------------------------------------------- gradients passed by torch


def test_stride_0_gradients() -> None:
    x = randn(3, 5)
    sin(x).sum().backward()  # sum's gradient is one number, expanded
    assert_equal(x.grad, x.detach().cos(), rounding=2)
    (got,) = grad(sin(x), x, torch.ones((), dtype=F64).expand(3, 5))
    assert_equal(got, x.detach().cos(), rounding=2)


def test_gradients_of_any_stride() -> None:
    x = randn(4, 6)
    for weight in (
        torch.randn(6, 4, dtype=F64).t(),
        torch.randn(4, 12, dtype=F64)[:, ::2],
        torch.randn(5, 6)[1:].double(),
    ):
        (got,) = grad(sin(x), x, weight)
        assert_equal(got, x.detach().cos() * weight, rounding=4)


def test_inputs_of_any_stride() -> None:
    base = randn(6, 8)
    for view in (
        base.t(),
        base[:, ::2],
        base[1:, 3:],
        base[0].expand(4, 8),
        base.unflatten(1, (2, 4)).movedim(0, 2),
    ):
        (got,) = grad(sin(view).sum(), base)
        (want,) = grad(view.sin().sum(), base)
        assert_equal(got, want, rounding=8)


def test_conjugate_and_negative_views() -> None:
    z = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    y = torch.randn(3, dtype=torch.complex128)
    (got,) = grad(product(z.conj(), y.conj()).abs().sum(), z)
    (want,) = grad((z.conj() * y.conj()).abs().sum(), z)
    assert_equal(got, want, rounding=8)


# ---------------------------------------------------------------------------------- autograd's other ways


def test_backward_again_needs_retain_graph() -> None:
    x = randn(3)
    out = product(x, x).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert_equal(x.grad, 4 * x.detach())
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_gradients_accumulate_into_a_parameter() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    for _ in range(3):
        product(weight, torch.full((3,), 2.0)).sum().backward()
    assert_equal(weight.grad, torch.full((3,), 6.0))
    torch.optim.SGD([weight], lr=1.0).step()


def test_hooks_run() -> None:
    x = randn(3)
    seen: list[str] = []
    x.register_hook(lambda g: seen.append("tensor"))
    x.register_post_accumulate_grad_hook(lambda t: seen.append("accumulated"))
    out = sin(x)
    out.register_hook(lambda g: 2 * g)
    out.retain_grad()
    out.sum().backward()
    assert seen == ["tensor", "accumulated"]
    assert_equal(x.grad, 2 * x.detach().cos(), rounding=2)
    assert_equal(out.grad, torch.full((3,), 2.0, dtype=F64))


def test_an_input_written_after_the_call_is_found() -> None:
    leaf = randn(3)
    x = leaf * 1
    out = product(x, x).sum()
    with torch.no_grad():
        x.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_saved_tensor_hooks_see_what_is_kept() -> None:
    x = randn(3)
    packed: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = sin(x)
    out.sum().backward()
    assert packed
    assert_equal(x.grad, x.detach().cos(), rounding=2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    x, w = randn(3, 4), randn(4, 2)
    block = lambda x, w: sin(mixed(sin(x), w, None, 0.5)[0])
    want = grad(block(x, w).sum(), (x, w))
    out = checkpoint(block, x, w, use_reentrant=reentrant)
    out.sum().backward()
    assert_equal(x.grad, want[0])
    assert_equal(w.grad, want[1])


def test_no_grad_and_inference_mode() -> None:
    x = randn(3)
    with torch.no_grad():
        assert not sin(x).requires_grad
    with torch.inference_mode():
        out = sin(x)
        assert out.is_inference()
        inside = torch.ones(3, dtype=F64)
        assert_equal(sin(inside), inside.sin(), rounding=2)
    assert_equal(sin(inside), inside.sin(), rounding=2)
    with pytest.raises(RuntimeError, match="[Ii]nference tensor"):
        product(x, inside)  # the inputs are kept for backward, and torch keeps no inference tensors


def test_anomaly_mode() -> None:
    x = torch.tensor([1.0, -1.0], requires_grad=True)

    @jax_op("t_autodiff::root", overwrite=True)
    def root(x: jax.Array) -> jax.Array:
        return jnp.sqrt(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode prints where the forward was, as a warning
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan"):
            root(x).sum().backward()


def test_backward_in_another_thread() -> None:
    x = randn(8)
    out = sin(x)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            out.sum().backward()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures
    assert_equal(x.grad, x.detach().cos(), rounding=2)


def test_many_threads_forward_and_backward() -> None:
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for size in (3, 4, 5, 6):
                x = torch.randn(size, dtype=F64, generator=generator).requires_grad_()
                sin(x).sum().backward()
                assert_equal(x.grad, x.detach().cos(), rounding=2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_result_written_in_place() -> None:
    x = randn(3)
    out = sin(x)
    out.mul_(2)
    out.sum().backward()
    assert_equal(x.grad, 2 * x.detach().cos(), rounding=2)


def test_a_kept_result_written_in_place_is_found() -> None:
    @jax_op("t_autodiff::exp", overwrite=True)
    def exp(x: jax.Array) -> jax.Array:
        return jnp.exp(x)

    x = randn(3)
    out = exp(x)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---------------------------------------------------------------------------------- custom_vjp


@jax.custom_vjp
def _seven_sin(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_seven_sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (7 * ct * jnp.cos(x),))


@jax_op("t_autodiff::seven_sin")
def seven_sin(x: jax.Array) -> jax.Array:
    return _seven_sin(x)


def test_custom_vjp_is_respected() -> None:
    x = randn(4)
    (first,) = grad(seven_sin(x).sum(), x, create_graph=True)
    assert_equal(first.detach(), 7 * x.detach().cos(), rounding=4)
    (second,) = grad(first.sum(), x)
    assert_equal(second, -7 * x.detach().sin(), rounding=4)


def test_custom_vjp_over_a_kernel_with_a_static_argument() -> None:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def scaled(x: jax.Array, n: int) -> jax.Array:
        return _square_kernel(x) * n

    def fwd(x: jax.Array, n: int) -> tuple[jax.Array, Any]:
        y = _square_kernel(x) * n
        return y, (x, y, jnp.asarray(n, x.dtype))  # an input, a result and a constant

    def bwd(n: int, kept: Any, ct: jax.Array) -> tuple[jax.Array]:
        x, y, same_n = kept
        return (ct * 2 * x * same_n + 0 * y,)

    scaled.defvjp(fwd, bwd)

    @jax_op("t_autodiff::scaled", overwrite=True)
    def op(x: jax.Array, n: int) -> jax.Array:
        return scaled(x, n)

    x = randn(2)
    assert_equal(op(x, 3).detach(), 3 * x.detach() ** 2, rounding=2)
    (first,) = grad(op(x, 3).sum(), x, create_graph=True)
    assert_equal(first.detach(), 6 * x.detach(), rounding=2)
    # Its backward reads what a kernel without a gradient computed, in the bridge as in JAX.
    with pytest.raises(NotDifferentiable, match="t_autodiff::scaled"):
        first.sum().backward()


# ---------------------------------------------------------------------------------- none, or a given one


def test_a_bare_kernel_runs_forward_and_says_at_backward_that_it_has_no_gradient() -> None:
    x = randn(3, 4)
    out = bare(x)
    assert_equal(out.detach(), x.detach() ** 2)
    with pytest.raises(NotDifferentiable, match="t_autodiff::bare has no gradient.*reference="):
        out.sum().backward()
    assert x.grad is None
    assert not bare(x.detach()).requires_grad


def test_the_gradient_of_the_reference() -> None:
    x = randn(3)
    assert gradcheck(referenced, (x,))
    assert gradgradcheck(referenced, (x,))


def test_a_reference_without_gradient_says_so() -> None:
    @jax_op("t_autodiff::two_bare", reference=_square_kernel, overwrite=True)
    def two_bare(x: jax.Array) -> jax.Array:
        return _square_kernel(x)

    with pytest.raises(NotDifferentiable, match="vjp="):
        two_bare(randn(3)).sum().backward()


MODES = ("fast", "tpu", "reference")
QUICK_MODES = (("fast", "tpu"), ("tpu", "reference"), ("reference", "fast"))
"""Each mode for each of the two, and never the same: the other pairs are slow tests."""


@pytest.mark.parametrize(
    ("forward_mode", "backward_mode"),
    [
        pytest.param(*pair, marks=() if pair in QUICK_MODES else pytest.mark.slow)
        for pair in itertools.product(MODES, MODES)
    ],
)
def test_forward_and_backward_in_different_modes(forward_mode: str, backward_mode: str) -> None:
    @jax_op("t_autodiff::moded", overwrite=True, reference=lambda x: 2 * jnp.exp(jnp.sin(x)) * jnp.cos(x))
    def moded(x: jax.Array) -> jax.Array:
        def body(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = jnp.exp(jnp.sin(x_ref[...])) * jnp.cos(x_ref[...])  # without the 2: shows who ran

        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    x = torch.randn(2, 3, requires_grad=True)
    weight = torch.randn(2, 3)
    want = x.detach().sin().exp() * x.detach().cos()
    with interpret(forward_mode):
        out = moded(x)
    assert_equal(out.detach(), want * 2 if forward_mode == "reference" else want, rounding=16)
    with interpret(backward_mode):
        (got,) = grad(out, x, weight, create_graph=True)
        (second,) = grad(got.sum(), x)
    value = 2 * x.sin().exp() * x.cos()
    (want_grad,) = grad(value, x, weight, create_graph=True)
    assert_equal(got.detach(), want_grad.detach(), rounding=64)
    assert_equal(second, grad(want_grad.sum(), x)[0], rounding=128)


def _given_rule() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def fwd(
        x: jax.Array, bias: jax.Array | None, others: Sequence[jax.Array], index: jax.Array, n: int
    ) -> Any:
        return _square_kernel(x) * n + sum(others), (x, n)

    def bwd(kept: Any, ct: jax.Array) -> Any:
        x, n = kept
        return 10 * ct * x * n, None, [ct, None], None

    return fwd, bwd


@jax_op("t_autodiff::given", vjp=_given_rule())
def given(
    x: jax.Array, bias: jax.Array | None, others: Sequence[jax.Array], index: jax.Array, n: int
) -> jax.Array:
    return _square_kernel(x) * n + sum(others)


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_given_vjp(with_bias: bool) -> None:
    x, bias, a, b = randn(3), randn(3) if with_bias else None, randn(3), randn(3)
    out = given(x, bias, [a, b], torch.tensor([1]), 2)
    assert_equal(out.detach(), (2 * x**2 + a + b).detach(), rounding=4)
    out.sum().backward()
    assert_equal(x.grad, 20 * x.detach(), rounding=2)
    assert_equal(a.grad, torch.ones(3, dtype=F64))
    assert_equal(b.grad, torch.zeros(3, dtype=F64))
    if bias is not None:
        assert_equal(bias.grad, torch.zeros(3, dtype=F64))


def test_a_given_vjp_is_differentiated_for_double_backward() -> None:
    x = randn(3)
    (first,) = grad(
        given(x, None, [x.detach(), x.detach()], torch.tensor([1]), 2).sum(), x, create_graph=True
    )
    (second,) = grad(first.sum(), x)
    assert_equal(second, torch.full((3,), 20.0, dtype=F64))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda ct: (ct,), "one gradient per tensor argument \\(2\\), got 1"),
        (lambda ct: (ct, ct, ct), "one gradient per tensor argument \\(2\\), got 3"),
        (lambda ct: ct, "one gradient per tensor argument \\(2\\), got 1"),
        (lambda ct: (ct, ct[:1]), "shape"),
    ],
)
def test_a_given_vjp_with_wrong_gradients(returned: Callable[..., Any], message: str) -> None:
    @jax_op(
        "t_autodiff::wrong_rule",
        overwrite=True,
        vjp=(lambda x, y: (x * y, None), lambda kept, ct: returned(ct)),
    )
    def wrong_rule(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y

    with pytest.raises(Exception, match=message) as caught:
        wrong_rule(randn(3), randn(3)).sum().backward()
    assert "t_autodiff::wrong_rule" in str(caught.value)


def test_vjp_must_be_a_pair() -> None:
    with pytest.raises(TypeError, match="vjp must be a pair"):
        jax_op("t_autodiff::no_pair", _square_kernel, vjp=lambda x: x)  # type: ignore[arg-type]


def test_register_autograd_wins_over_the_derived_gradient() -> None:
    @jax_op("t_autodiff::registered", overwrite=True)
    def registered(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 100 * g * x.cos()

    x = randn(3)
    (derived,) = grad(registered(x).sum(), x)
    assert_equal(derived, x.detach().cos(), rounding=2)
    registered.register_autograd(backward, setup_context=setup)
    (got,) = grad(registered(x).sum(), x, create_graph=True)
    assert_equal(got.detach(), 100 * x.detach().cos(), rounding=2)
    (second,) = grad(got.sum(), x)
    assert_equal(second, -100 * x.detach().sin(), rounding=2)
    (through_torch,) = grad(torch.ops.t_autodiff.registered(x).sum(), x)
    assert_equal(through_torch, got.detach())


def test_an_op_without_a_reverse_rule_names_itself() -> None:
    @jax_op("t_autodiff::loop", overwrite=True)
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c + 1, x)

    x = torch.zeros(2, requires_grad=True)
    out = loop(x)
    assert out.tolist() == [5.0, 5.0]
    with pytest.raises(NotDifferentiable, match="t_autodiff::loop has no gradient"):
        out.sum().backward()


def test_gradients_through_torch_ops() -> None:
    x = randn(3)
    (got,) = grad(torch.ops.t_autodiff.sin(x).sum(), x, create_graph=True)
    (second,) = grad(got.sum(), x)
    assert_equal(got.detach(), x.detach().cos(), rounding=2)
    assert_equal(second, -x.detach().sin(), rounding=2)


# ---------------------------------------------------------------------------------- what is kept


def test_an_input_that_is_kept_is_not_copied() -> None:
    x, y = randn(3, requires_grad=True), randn(3, requires_grad=True)
    out = product(x, y)
    kept = out.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), y.data_ptr()}


def test_random_numbers_and_small_integers_inside() -> None:
    @jax_op("t_autodiff::dropped", overwrite=True)
    def dropped(x: jax.Array, seed: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x), 0)

    @jax_op("t_autodiff::dequantised", overwrite=True)
    def dequantised(x: jax.Array, w: jax.Array) -> jax.Array:
        return x * w.astype(jnp.int4).astype(x.dtype)

    x = torch.randn(64, requires_grad=True)
    out = dropped(x, torch.tensor(3, dtype=torch.int32))
    out.sum().backward()
    assert_equal(x.grad, torch.where(out.detach() != 0, x.detach().cos(), 0.0), rounding=4)

    x = torch.randn(4, requires_grad=True)
    w = torch.tensor([1, -2, 3, 7], dtype=torch.int8)
    dequantised(x, w).sum().backward()
    assert_equal(x.grad, w.float())

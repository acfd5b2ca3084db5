"""torch.vmap, torch.func and forward-mode AD over ops, called as `op(...)` and as `torch.ops.ns.op(...)`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from jax.experimental import pallas as pl
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from bridge import NotDifferentiable, jax_op

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's forward AD uses torch.jit.script
    import torch._decomp.decompositions_for_jvp  # noqa: F401

F64 = torch.float64


@jax_op("t_transforms::sin")
def sin(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@jax_op("t_transforms::affine")
def affine(x: jax.Array, w: jax.Array, bias: jax.Array | None, scale: float) -> tuple[jax.Array, jax.Array]:
    y = x @ w if bias is None else x @ w + bias
    return jnp.tanh(y) * scale, jnp.argmax(y, axis=-1).astype(jnp.int32)


@jax_op("t_transforms::stack")
def stack(xs: Sequence[jax.Array], scale: jax.Array) -> list[jax.Array]:
    return [sum(xs) * scale, xs[0] - xs[-1]]


def _kernel(x: jax.Array) -> jax.Array:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] ** 3

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@jax.custom_vjp
def _cube(x: jax.Array) -> jax.Array:
    return _kernel(x)


# 5, not 3: shows that the rule is used.
_cube.defvjp(lambda x: (_kernel(x), x), lambda x, ct: (5 * ct * x**2,))


@jax_op("t_transforms::cube")
def cube(x: jax.Array) -> jax.Array:
    return _cube(x)


def called_both_ways(name: str) -> Any:
    """Parametrises a test over `op` and the same op through `torch.ops`."""
    through_torch = getattr(torch.ops.t_transforms, name)
    return pytest.mark.parametrize(
        "op", [pytest.param(globals()[name], id="op"), pytest.param(through_torch, id="torch.ops")]
    )


def assert_close(got: Any, want: Any) -> None:
    # Sums of up to some tens of terms of size about 1, in float64.
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def torch_affine(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    y = x @ w if bias is None else x @ w + bias
    return torch.tanh(y) * scale


# ---------------------------------------------------------------------------------- vmap


@called_both_ways("sin")
@pytest.mark.parametrize("in_dim", [0, 1, -1])
@pytest.mark.parametrize("out_dim", [0, 1, -1])
def test_vmap_in_and_out_dims(op: Callable[..., Any], in_dim: int, out_dim: int) -> None:
    x = torch.randn(2, 3, 4, dtype=F64)
    assert_close(vmap(op, in_dim, out_dim)(x), vmap(torch.sin, in_dim, out_dim)(x))


@called_both_ways("affine")
@pytest.mark.parametrize("dims", [(0, None, None), (None, 2, None), (1, 0, 0), (0, None, 0), (None, None, 1)])
def test_vmap_over_some_of_the_operands(op: Callable[..., Any], dims: tuple[int | None, ...]) -> None:
    x = torch.randn((3, 4) if dims[0] is None else (5, 3, 4) if dims[0] == 0 else (3, 5, 4), dtype=F64)
    w = torch.randn((4, 2) if dims[1] is None else (5, 4, 2) if dims[1] == 0 else (4, 2, 5), dtype=F64)
    b = torch.randn((2,) if dims[2] is None else (5, 2) if dims[2] == 0 else (2, 5), dtype=F64)
    got, index = vmap(lambda x, w, b: op(x, w, b, 2.0), dims)(x, w, b)
    assert_close(got, vmap(lambda x, w, b: torch_affine(x, w, b, 2.0), dims)(x, w, b))
    assert index.dtype is torch.int32 and index.shape == (5, 3)


@called_both_ways("affine")
def test_vmap_without_the_optional_operand(op: Callable[..., Any]) -> None:
    x, w = torch.randn(5, 3, 4, dtype=F64), torch.randn(4, 2, dtype=F64)
    got, _ = vmap(lambda x: op(x, w, None, 0.5))(x)
    assert_close(got, torch_affine(x, w, None, 0.5))


@called_both_ways("stack")
def test_vmap_over_a_list(op: Callable[..., Any]) -> None:
    a, b, scale = torch.randn(3, 2), torch.randn(2, 3), torch.randn(2)
    total, difference = vmap(lambda a, b: tuple(op([a, scale, b], scale)), (0, 1))(a, b)
    torch.testing.assert_close(total, (a + scale + b.t()) * scale)
    torch.testing.assert_close(difference, a - b.t())


@called_both_ways("sin")
def test_nested_vmap(op: Callable[..., Any]) -> None:
    x = torch.randn(2, 3, 4, 5, dtype=F64)
    assert_close(vmap(vmap(vmap(op, 1), 0, 2), 2)(x), vmap(vmap(vmap(torch.sin, 1), 0, 2), 2)(x))


@called_both_ways("affine")
def test_nested_vmap_over_different_operands(op: Callable[..., Any]) -> None:
    xs, ws = torch.randn(5, 3, 4, dtype=F64), torch.randn(6, 4, 2, dtype=F64)
    each = lambda x, w: op(x, w, None, 1.0)[0]
    got = vmap(vmap(each, (None, 0)), (0, None))(xs, ws)
    assert_close(got, torch.tanh(torch.einsum("bij,cjk->bcik", xs, ws)))


@called_both_ways("sin")
def test_vmap_in_chunks(op: Callable[..., Any]) -> None:
    x = torch.randn(7, 3, dtype=F64)
    assert_close(vmap(op, chunk_size=2)(x), x.sin())


@called_both_ways("cube")
def test_vmap_over_a_kernel(op: Callable[..., Any]) -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(vmap(op)(x), x**3)
    torch.testing.assert_close(vmap(op, 1, 1)(x), x**3)


@called_both_ways("sin")
@pytest.mark.parametrize("randomness", ["error", "different", "same"])
def test_vmap_randomness_does_not_matter(op: Callable[..., Any], randomness: str) -> None:
    x = torch.randn(3, 2, dtype=F64)
    assert_close(vmap(op, randomness=randomness)(x), x.sin())


def test_vmap_on_the_tpu_device(tpu: torch.device) -> None:
    x = torch.randn(3, 4)
    got = vmap(sin)(x.to(tpu))
    assert got.device.type == "tpu"
    torch.testing.assert_close(got.cpu(), x.sin())


def test_vmap_under_autograd() -> None:
    x, w = (
        torch.randn(5, 3, 4, dtype=F64, requires_grad=True),
        torch.randn(4, 2, dtype=F64, requires_grad=True),
    )
    got, _ = vmap(lambda x: affine(x, w, None, 2.0))(x)
    want = torch_affine(x, w, None, 2.0)
    weight = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, (x, w), weight), torch.autograd.grad(want, (x, w), weight), strict=True
    ):
        assert_close(ours, theirs)
    assert torch.autograd.gradgradcheck(lambda x: vmap(sin)(x), (x[:2, 0, :2].detach().requires_grad_(),))


def test_a_given_vmap_rule_is_used() -> None:
    @jax_op("t_transforms::doubled", overwrite=True)
    def doubled(x: jax.Array, bias: jax.Array | None, factor: float) -> jax.Array:
        return x * factor + (0 if bias is None else bias)

    def rule(info: Any, in_dims: Any, x: torch.Tensor, bias: torch.Tensor | None, factor: float) -> Any:
        assert info.batch_size == 3 and in_dims == (0, None, None)
        return x * x * factor + 1000, 0

    x = torch.randn(3)
    call = lambda x: doubled(x, None, 2.0)
    torch.testing.assert_close(vmap(call)(x), 2 * x)
    doubled.register_vmap(rule)
    torch.testing.assert_close(vmap(call)(x), 2 * x * x + 1000)
    torch.testing.assert_close(
        vmap(lambda x: torch.ops.t_transforms.doubled(x, None, 2.0))(x), 2 * x * x + 1000
    )
    torch.testing.assert_close(grad(lambda x: vmap(call)(x).sum())(x), 4 * x)
    torch.testing.assert_close(vmap(grad(call))(x), torch.full((3,), 2.0))  # the op's own derivative, mapped
    torch.testing.assert_close(call(x), 2 * x)


def test_a_gradient_given_with_register_autograd_is_refused_in_forward_mode() -> None:
    @jax_op("t_transforms::registered", overwrite=True)
    def registered(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    registered.register_autograd(lambda ctx, g: 100 * g)
    x = torch.randn(3)
    with pytest.raises(NotDifferentiable, match="t_transforms::registered.*register_autograd"):
        jvp(registered, (x,), (x,))


# ---------------------------------------------------------------------------------- torch.func


@called_both_ways("sin")
def test_grad(op: Callable[..., Any]) -> None:
    x = torch.randn(4, dtype=F64)
    total = lambda x: op(x).sum()
    assert_close(grad(total)(x), x.cos())
    assert_close(grad(lambda x: grad(total)(x).sum())(x), -x.sin())
    assert_close(grad(lambda x: grad(lambda x: grad(total)(x).sum())(x).sum())(x), -x.cos())


@called_both_ways("sin")
def test_vmap_of_grad_and_grad_of_vmap(op: Callable[..., Any]) -> None:
    x = torch.randn(3, 4, dtype=F64)
    assert_close(vmap(grad(lambda v: op(v).sum()))(x), x.cos())
    assert_close(grad(lambda x: vmap(op, 1, 1)(x).sum())(x), x.cos())
    assert_close(vmap(vmap(grad(op)))(x), x.cos())
    assert_close(vmap(grad(lambda v: grad(lambda v: op(v).sum())(v).sum()))(x), -x.sin())


@called_both_ways("affine")
def test_per_sample_gradients(op: Callable[..., Any]) -> None:
    xs, w = torch.randn(5, 3, 4, dtype=F64), torch.randn(4, 2, dtype=F64)
    ours = vmap(grad(lambda w, x: op(x, w, None, 1.0)[0].sum()), (None, 0))(w, xs)
    theirs = vmap(grad(lambda w, x: torch.tanh(x @ w).sum()), (None, 0))(w, xs)
    assert_close(ours, theirs)


@called_both_ways("affine")
def test_vjp_and_jvp(op: Callable[..., Any]) -> None:
    x, w, b = torch.randn(3, 4, dtype=F64), torch.randn(4, 2, dtype=F64), torch.randn(2, dtype=F64)
    ours = lambda x, w: op(x, w, b, 2.0)[0]
    theirs = lambda x, w: torch_affine(x, w, b, 2.0)
    out, pull = vjp(ours, x, w)[:2]
    want, torch_pull = vjp(theirs, x, w)[:2]
    assert_close(out, want)
    ct = torch.randn_like(want)
    for got, expected in zip(pull(ct), torch_pull(ct), strict=True):
        assert_close(got, expected)
    tangents = (torch.randn_like(x), torch.randn_like(w))
    for got, expected in zip(jvp(ours, (x, w), tangents), jvp(theirs, (x, w), tangents), strict=True):
        assert_close(got, expected)


@called_both_ways("affine")
def test_jacobians_and_hessian(op: Callable[..., Any]) -> None:
    x, w = torch.randn(2, 3, dtype=F64), torch.randn(3, 2, dtype=F64)
    ours, theirs = lambda w: op(x, w, None, 1.0)[0], lambda w: torch.tanh(x @ w)
    assert_close(jacrev(ours)(w), jacrev(theirs)(w))
    assert_close(jacfwd(ours)(w), jacfwd(theirs)(w))
    scalar, torch_scalar = lambda w: ours(w).sum(), lambda w: theirs(w).sum()
    assert_close(hessian(scalar)(w), hessian(torch_scalar)(w))
    assert_close(jacrev(jacrev(scalar))(w), hessian(torch_scalar)(w))
    assert_close(jacfwd(jacfwd(scalar))(w), hessian(torch_scalar)(w))


@called_both_ways("affine")
def test_auxiliary_integer_results(op: Callable[..., Any]) -> None:
    x, w = torch.randn(3, 4, dtype=F64), torch.randn(4, 2, dtype=F64)

    def loss(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, index = op(x, w, None, 1.0)
        return value.sum(), index

    gradient, index = grad(loss, has_aux=True)(w)
    assert_close(gradient, grad(lambda w: torch.tanh(x @ w).sum())(w))
    assert torch.equal(index, (x @ w).argmax(-1).int())


@called_both_ways("stack")
def test_grad_over_a_list(op: Callable[..., Any]) -> None:
    a, b, scale = torch.randn(3, dtype=F64), torch.randn(3, dtype=F64), torch.randn((), dtype=F64)
    da, ds = grad(lambda a, s: op([a, b, a], s)[0].sum(), (0, 1))(a, scale)
    assert_close(da, (2 * scale).expand(3))
    assert_close(ds, (2 * a + b).sum())


def test_functional_call_of_a_module() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 2, dtype=F64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return affine(x, self.weight, None, 1.0)[0]

    layer, xs = Layer(), torch.randn(5, 3, 4, dtype=F64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    loss = lambda p, x: functional_call(layer, p, (x,)).sum()
    got = vmap(grad(loss), (None, 0))(parameters, xs)["weight"]
    want = vmap(grad(lambda w, x: torch.tanh(x @ w).sum()), (None, 0))(parameters["weight"], xs)
    assert_close(got, want)


@called_both_ways("cube")
def test_custom_vjp_in_reverse_transforms(op: Callable[..., Any]) -> None:
    x = torch.randn(3)
    torch.testing.assert_close(grad(lambda x: op(x).sum())(x), 5 * x**2)
    torch.testing.assert_close(vmap(grad(op))(x), 5 * x**2)
    torch.testing.assert_close(grad(lambda x: vmap(op)(x).sum())(x), 5 * x**2)
    torch.testing.assert_close(jacrev(op)(x), torch.diag(5 * x**2))
    torch.testing.assert_close(grad(lambda x: grad(lambda x: op(x).sum())(x).sum())(x), 10 * x)


@called_both_ways("cube")
def test_custom_vjp_has_no_forward_mode_and_says_so(op: Callable[..., Any]) -> None:
    x = torch.randn(3)
    with pytest.raises(NotDifferentiable, match="t_transforms::cube has no forward-mode derivative"):
        jvp(op, (x,), (torch.ones(3),))


@called_both_ways("sin")
def test_the_tensor_that_leaves_a_transform_is_an_ordinary_one(op: Callable[..., Any]) -> None:
    x = torch.randn(3, dtype=F64, requires_grad=True)
    got = grad(lambda v: op(v).sum())(x)
    (second,) = torch.autograd.grad(got.sum(), x)
    assert_close(second, -x.detach().sin())


# ---------------------------------------------------------------------------------- forward mode


@called_both_ways("sin")
def test_dual_numbers(op: Callable[..., Any]) -> None:
    x, t = torch.randn(3, dtype=F64), torch.randn(3, dtype=F64)
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(op(forward_ad.make_dual(x, t)))
        plain = forward_ad.unpack_dual(op(x))
    assert_close(primal, x.sin())
    assert_close(tangent, t * x.cos())
    assert plain.tangent is None


@called_both_ways("affine")
def test_dual_numbers_in_one_operand_of_several(op: Callable[..., Any]) -> None:
    x, w, t = torch.randn(3, 4, dtype=F64), torch.randn(4, 2, dtype=F64), torch.randn(4, 2, dtype=F64)
    with forward_ad.dual_level():
        value, index = op(x, forward_ad.make_dual(w, t), None, 2.0)
        got = forward_ad.unpack_dual(value).tangent
    assert_close(got, jvp(lambda w: torch_affine(x, w, None, 2.0), (w,), (t,))[1])
    assert index.dtype is torch.int32


@called_both_ways("sin")
def test_forward_over_reverse(op: Callable[..., Any]) -> None:
    x = torch.randn(3, dtype=F64, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3, dtype=F64))
        (gradient,) = torch.autograd.grad(op(dual).sum(), dual, create_graph=True)
        got = forward_ad.unpack_dual(gradient).tangent
    assert got is not None
    assert_close(got.detach(), -x.detach().sin())


@pytest.mark.parametrize("op", [sin, lambda x: affine(x, torch.ones(3, 2, dtype=F64), None, 1.0)[0]])
def test_gradcheck_in_forward_mode(op: Callable[..., Any]) -> None:
    x = torch.randn(2, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,), check_forward_ad=True, check_batched_grad=True)


def test_batches_of_gradients(device: torch.device) -> None:
    x = torch.randn(3, dtype=F64).to(device).requires_grad_()
    out = sin(x)
    (rows,) = torch.autograd.grad(out, x, torch.eye(3, dtype=F64).to(device), is_grads_batched=True)
    assert_close(rows.cpu(), torch.diag(x.detach().cpu().cos()))


def test_vectorized_jacobians() -> None:
    x = torch.randn(3, dtype=F64)
    for strategy in ("reverse-mode", "forward-mode"):
        matrix = torch.autograd.functional.jacobian(sin, x.detach(), vectorize=True, strategy=strategy)
        assert_close(matrix, torch.diag(x.detach().cos()))

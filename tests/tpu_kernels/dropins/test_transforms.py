"""Derivatives of every kind, torch.compile, torch.export, vmap: with ours inside, on both devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .conftest import Ours

torchs: Any = scaled_dot_product_attention
BOUND: Any = {"rtol": 0.0, "atol": 1024 * 2**-24}
"""Float32: 8 products, 7 terms, some tens of roundings of numbers below 8."""


def qkv(ours: Ours, *batch: int) -> Any:
    q, k, v = (torch.randn(*batch, n, 8).to(ours.device) for n in (5, 7, 7))
    return q, k, v


def wide(tensors: Any) -> Any:
    return [t.detach().cpu().double() for t in tensors]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.detach().cpu().double(), want.detach(), **BOUND)


def attend(*tensors: Any, **options: Any) -> torch.Tensor:
    return torchs(*tensors, is_causal=True, **options)


def test_second_derivatives(ours: Ours) -> None:
    def penalty(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.requires_grad_() for t in tensors]
        first = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))  # type: ignore[arg-type]

    tensors = qkv(ours, 1, 2)
    with ours.standing_in():
        got = penalty([t.detach() for t in tensors])
    assert ours.used() == 1
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels have no second derivative
        want = penalty(wide(tensors))
    for a, b in zip(got, want, strict=True):
        # Of the size of the result: it is a third power of the values.
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=float(b.abs().max()) * 1024 * 2**-24)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's forward mode uses it
def test_forward_mode_is_torchs(ours: Ours) -> None:
    """A kernel has no forward-mode derivative; torch's own attention has."""
    tensors, tangents = qkv(ours, 1, 2), qkv(ours, 1, 2)
    with ours.standing_in():
        got = torch.func.jvp(attend, tensors, tangents)[1]
    assert ours.used() == 0
    with sdpa_kernel(SDPBackend.MATH):
        close(got, torch.func.jvp(attend, tuple(wide(tensors)), tuple(wide(tangents)))[1])


def test_functional_transforms(ours: Ours) -> None:
    tensors = qkv(ours, 3, 2)
    double = wide(tensors)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v).sin().sum()

    with ours.standing_in():
        batched = torch.vmap(attend)(*tensors)
        other = torch.vmap(attend, in_dims=(1, None, 0), out_dims=1)(
            tensors[0].movedim(0, 1), tensors[1][0], tensors[2]
        )
        gradient = torch.func.grad(loss)(*tensors)
        each = torch.vmap(torch.func.grad(loss, argnums=1))(*tensors)
        jacobian = torch.func.jacrev(lambda q: attend(q, tensors[1][0, 0], tensors[2][0, 0]))(
            tensors[0][0, 0]
        )
    assert ours.used() >= 5
    close(batched, attend(*double))
    close(other.movedim(1, 0), attend(double[0], double[1][0], double[2]))
    close(gradient, torch.func.grad(loss)(*double))
    close(each, torch.vmap(torch.func.grad(loss, argnums=1))(*double))
    close(jacobian, torch.func.jacrev(lambda q: attend(q, double[1][0, 0], double[2][0, 0]))(double[0][0, 0]))


def test_vmap_of_dropout_asks_how_to_draw(ours: Ours) -> None:
    tensors = qkv(ours, 2, 2)
    with ours.standing_in():
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(lambda *t: attend(*t, dropout_p=0.5))(*tensors)
        one = tuple(t[:1].expand_as(t) for t in tensors)
        same = torch.vmap(lambda *t: attend(*t, dropout_p=0.5), randomness="same")(*one)
        different = torch.vmap(lambda *t: attend(*t, dropout_p=0.5), randomness="different")(*one)
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])


def test_autocast_under_transforms(ours: Ours) -> None:
    tensors = qkv(ours, 2, 2)
    with ours.standing_in(), torch.autocast(ours.device.type, torch.bfloat16):
        assert torch.vmap(attend)(*tensors).dtype == torch.bfloat16
        assert torch.func.grad(lambda q: attend(q, *tensors[1:]).sum())(tensors[0]).dtype == torch.float32


@pytest.mark.parametrize("mask", ["none", "bool", "bias"])
def test_compile_with_gradients(ours: Ours, mask: str) -> None:
    torch.compiler.reset()
    given: Any = {"none": None, "bool": torch.rand(5, 7) > 0.3, "bias": torch.randn(2, 1, 7)}[mask]

    def step(q: Any, k: Any, v: Any, m: Any) -> torch.Tensor:
        return torchs(q * 2, k, v, m, is_causal=m is None).sin()

    leaves: Any = [t.requires_grad_() for t in qkv(ours, 1, 2)]
    m = None if given is None else given.to(ours.device)
    with ours.standing_in():
        want = step(leaves[0], leaves[1], leaves[2], m)
        compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
        got = compiled(*leaves, m)
    torch.testing.assert_close(got, want, **BOUND)
    for a, b in zip(
        torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b, **BOUND)


def test_compile_for_any_length(ours: Ours) -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for n in (3, 6, 11):
        q, k, v = (torch.randn(1, 2, n, 8).to(ours.device) for _ in range(3))
        with ours.standing_in():
            got = compiled(q, k, v)
        close(got, attend(*wide((q, k, v))))
    assert len(graphs) == 1


def test_compiled_dropout_repeats_with_the_seed(ours: Ours) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: attend(*t, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    tensors = qkv(ours, 1, 2)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with ours.standing_in():
            results.append(compiled(*tensors))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_export_for_any_length(ours: Ours) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q, k, v)

    n = torch.export.Dim("n", min=2, max=64)
    square = tuple(torch.randn(1, 2, 6, 8).to(ours.device) for _ in range(3))
    with ours.standing_in():
        program = torch.export.export(Module(), square, dynamic_shapes=({2: n},) * 3).module()
        other = tuple(torch.randn(1, 2, 9, 8).to(ours.device) for _ in range(3))
        got = program(*other)
    close(got, attend(*wide(other)))


def test_checkpointed(ours: Ours) -> None:
    leaves = [t.requires_grad_() for t in qkv(ours, 1, 2)]
    with ours.standing_in():
        want = torch.autograd.grad(attend(*leaves).sin().sum(), leaves)
        result = torch.utils.checkpoint.checkpoint(lambda *t: attend(*t).sin(), *leaves, use_reentrant=False)
        got = torch.autograd.grad(result.sum(), leaves)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_fake_tensors_and_meta_tensors_have_the_same_shape(ours: Ours) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(2, 5, 24).to(ours.device).unflatten(-1, (3, 8)).transpose(1, 2)
    real = ours(x, x, x)
    with FakeTensorMode() as mode, ours.standing_in():
        fake = mode.from_tensor(x)
        result = torchs(fake, fake, fake, torch.ones(5, 5, dtype=torch.bool, device=ours.device))
    assert (result.shape, result.stride(), result.dtype) == (real.shape, real.stride(), real.dtype)
    with ours.standing_in():
        assert torchs(x.to("meta"), x.to("meta"), x.to("meta")).shape == real.shape

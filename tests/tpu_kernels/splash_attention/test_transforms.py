"""Splash attention under opcheck, torch.compile, export, vmap and torch.func, and its second derivatives."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpu_kernels import masks, splash_attention
from tpu_kernels.splash_attention.reference import splash_attention_reference


def make(*shape: int, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype).to(device) for _ in range(3)]


# Shapes with symbols are found by tracing the kernels at many sizes.
@pytest.mark.slow
@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_opcheck(device: torch.device, impl: str) -> None:
    q, k, v = (t.requires_grad_() for t in make(1, 2, 5, 8, device=device))
    bias = torch.randn(1, 2, 1, 5, device=device, requires_grad=True)
    visible = torch.ones(1, 1, 5, 5, dtype=torch.bool, device=device).tril()
    sinks = torch.randn(2, device=device, requires_grad=True)
    seed = torch.tensor([1, 2], dtype=torch.int32, device=device)
    score = "add(score,float0[0,h,0,kv])"
    mask = "bool1[0,0,q,kv]"
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device.type == "cpu":
        checks.append("test_autograd_registration")  # torch has not written this check for other devices
    arguments = (q, k, v, [bias, visible], sinks, seed, mask, score, None, 0.5, None, impl)
    torch.library.opcheck(torch.ops.tpu_kernels.splash_attention.default, arguments, test_utils=checks)


class Attention(torch.nn.Module):
    """What a model does: heads of a projection, causal, with a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 48)
        self.bias = torch.nn.Parameter(torch.randn(2, 1, 1))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = masks.causal() & masks.lengths(lengths)
        o = splash_attention(
            q, k, v, mask=mask, bias=self.bias, soft_cap=20.0, dropout_p=0.1, seed=lengths[0]
        )
        return o.transpose(1, 2).flatten(-2)


@pytest.mark.slow
def test_compile_with_dynamic_sizes(device: torch.device) -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch._dynamo.reset()
    model = Attention().to(device)
    compiled = torch.compile(model, fullgraph=True, backend=count, dynamic=True)
    for batch, length in ((2, 5), (3, 9), (4, 17)):
        x = torch.randn(batch, length, 16, device=device)
        lengths = torch.randint(1, length, (batch,), device=device)
        assert torch.equal(compiled(x, lengths), model(x, lengths))
    assert graphs <= 2


def test_compile_with_gradients(device: torch.device) -> None:
    torch._dynamo.reset()
    model = Attention().to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, lengths = torch.randn(2, 9, 16, device=device), torch.tensor([9, 4], device=device)
    gradients = []
    for module in (model, compiled):
        loss = module(x, lengths).square().sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for eager, graph in zip(*gradients, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.slow
def test_export() -> None:
    model = Attention()
    x, lengths = torch.randn(2, 9, 16), torch.tensor([9, 4])
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(model, (x, lengths), dynamic_shapes={"x": {1: length}, "lengths": None})
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    longer = torch.randn(2, 30, 16)
    torch.testing.assert_close(loaded(longer, lengths), model(longer, lengths))


@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_vmap_and_grad(impl: Any) -> None:
    q, k, v = make(3, 1, 2, 5, 8)
    lengths = torch.tensor([[5], [2], [4]])

    def loss(q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return splash_attention(q, k, v[0], mask=masks.lengths(lengths), impl=impl).square().sum()

    mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(q, k, lengths)
    looped = [torch.func.grad(loss, argnums=(0, 1))(*row) for row in zip(q, k, lengths, strict=True)]
    for place in (0, 1):
        torch.testing.assert_close(mapped[place], torch.stack([row[place] for row in looped]))


def test_gradcheck_twice() -> None:
    q, k, v = (t.requires_grad_() for t in make(1, 2, 3, 2, dtype=torch.float64))
    bias = torch.randn(2, 1, 3, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def attend(*tensors: torch.Tensor) -> Any:
        q, k, v, bias, sinks = tensors
        return splash_attention(
            q,
            k,
            v,
            bias=bias,
            sinks=sinks,
            mask=masks.causal(),
            soft_cap=3.0,
            dropout_p=0.3,
            seed=1,
            return_lse=True,
        )

    assert torch.autograd.gradcheck(attend, (q, k, v, bias, sinks))
    assert torch.autograd.gradgradcheck(attend, (q, k, v, bias, sinks))


def test_second_derivative_of_the_kernel() -> None:
    tensors = make(1, 1, 20, 8)

    def second(impl: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        o = splash_attention(*leaves, mask=masks.causal(), impl=impl)
        first = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return list(torch.autograd.grad(total, leaves))

    for got, want in zip(second("pallas", torch.float32), second("reference", torch.float64), strict=True):
        # Sums over 20 keys or 8 dimensions, five after one another, of values no larger than the largest.
        assert (got - want).abs().max() <= 5 * 28 * 2**-23 * want.abs().max()


def test_the_reference_against_torch_in_float64() -> None:
    """Once, so that the kernel may be compared with either."""
    import jax
    import numpy as np

    q, k, v = make(2, 3, 7, 4, dtype=torch.float64)
    with jax.enable_x64(True):
        o, lse = splash_attention_reference(q.numpy(), k.numpy(), v.numpy(), mask="ge(q,kv)")  # pyright: ignore
    np.testing.assert_allclose(
        o, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=1e-13, atol=1e-13
    )
    s = (q @ k.mT / 2).masked_fill(torch.ones(7, 7).triu(1) > 0, -torch.inf)
    np.testing.assert_allclose(lse, s.logsumexp(-1), rtol=1e-13)


def test_a_mask_tensor_of_changing_sizes_in_a_compiled_function(device: torch.device) -> None:
    """Sizes become symbolic, but which of a mask's dimensions vary is part of the formula."""

    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return splash_attention(x, x, x, mask=mask, impl="reference")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 5), (3, 7)):
        x = torch.randn(batch, 2, length, 8, device=device)
        mask = torch.rand(batch, 1, length, length, device=device) > 0.3
        torch.testing.assert_close(compiled(x, mask), attend(x, mask))

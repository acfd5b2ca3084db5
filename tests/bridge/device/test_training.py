"""Modules, autograd and optimisers on the tpu device do what they do on the CPU."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F


class Block(torch.nn.Module):
    """Embedding, attention, normalisation, convolution: the layers of small real models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 16)
        self.attention_in = torch.nn.Linear(16, 48)
        self.attention_out = torch.nn.Linear(16, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.convolution = torch.nn.Conv1d(16, 16, 3, padding=1)
        self.batch_norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(ids))
        batch, length, width = hidden.shape
        q, k, v = self.attention_in(hidden).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = self.batch_norm(self.convolution(hidden.transpose(1, 2))).transpose(1, 2)
        return self.head(F.gelu(hidden))


def _pair() -> tuple[Block, Block]:
    model = Block()
    return model, copy.deepcopy(model).to("tpu")


def _ids() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 11, (4, 6))
    return ids, ids.to("tpu")


def test_forward_and_gradients_are_those_of_the_cpu() -> None:
    (on_cpu, on_tpu), (ids, tpu_ids) = _pair(), _ids()
    expected, got = on_cpu(ids), on_tpu(tpu_ids)
    torch.testing.assert_close(got.cpu(), expected)
    F.cross_entropy(expected.flatten(0, 1), ids.flatten()).backward()
    F.cross_entropy(got.flatten(0, 1), tpu_ids.flatten()).backward()
    for (name, a), b in zip(on_cpu.named_parameters(), on_tpu.parameters(), strict=True):
        assert b.grad is not None and b.grad.device.type == "tpu"
        torch.testing.assert_close(b.grad.cpu(), a.grad, msg=lambda m, name=name: f"{name}: {m}")
    means = on_cpu.batch_norm.running_mean, on_tpu.batch_norm.running_mean
    assert means[0] is not None and means[1] is not None and means[0].abs().sum() > 0
    torch.testing.assert_close(means[1].cpu(), means[0])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, foreach=False),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_make_the_same_steps(name: str) -> None:
    results = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        x = torch.linspace(-1, 1, 40).reshape(10, 4).to(device)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        restored = OPTIMIZERS[name](model.parameters())
        restored.load_state_dict(optimizer.state_dict())
        results.append(losses)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert results[1][-1] < results[1][0]


def test_views_and_in_place_writes_under_autograd() -> None:
    leaf = torch.arange(4.0, device="tpu", requires_grad=True)
    value = leaf * 1
    value[:2].mul_(3)
    value[3] = leaf[0] * 5
    value.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [8, 3, 1, 0]


def test_writes_to_saved_tensors_are_noticed() -> None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    y = x.exp()
    y[0] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in torch.func.jvp
def test_gradcheck_and_function_transforms() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w) * x.sin()).sum(-1)

    x = torch.randn(3, 3, dtype=torch.float64, device="tpu", requires_grad=True)
    w = torch.randn(3, 3, dtype=torch.float64, device="tpu", requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))
    x, w = x.detach(), w.detach()
    jacobian = torch.func.jacrev(function, argnums=1)
    expected = torch.func.jacrev(function, argnums=1)(x.cpu(), w.cpu())
    torch.testing.assert_close(jacobian(x, w).cpu(), expected)
    mapped = torch.func.vmap(function, (0, None))(x.expand(2, 3, 3), w)
    torch.testing.assert_close(mapped[1], function(x, w))
    tangent = torch.func.jvp(lambda w: function(x, w), (w,), (torch.ones_like(w),))[1]
    torch.testing.assert_close(tangent, torch.einsum("imn->i", jacobian(x, w)))


def test_checkpointed_layers_draw_the_same_dropout() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).to("tpu")
    x = torch.randn(4, 8, device="tpu", requires_grad=True)
    grads = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(call(x).square().sum(), x)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers(kind: Any, bias: bool) -> None:
    layer = kind(3, 5, num_layers=2, bias=bias, bidirectional=True)
    x = torch.randn(4, 2, 3, requires_grad=True)
    on_tpu, tpu_x = copy.deepcopy(layer).to("tpu"), x.detach().to("tpu").requires_grad_()
    for module, value in ((layer, x), (on_tpu, tpu_x)):
        output, state = module(value)
        final = state[0] + state[1] if isinstance(state, tuple) else state
        (output.square().sum() + final.sum()).backward()
    torch.testing.assert_close(on_tpu(tpu_x)[0].cpu(), layer(x)[0])
    assert x.grad is not None and tpu_x.grad is not None
    torch.testing.assert_close(tpu_x.grad.cpu(), x.grad)
    for a, b in zip(layer.parameters(), on_tpu.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad.cpu(), a.grad)


def test_module_methods() -> None:
    model = torch.nn.Linear(2, 2)
    assert next(model.tpu().parameters()).is_tpu  # pyright: ignore[reportCallIssue]
    assert model.to("cpu").weight.device.type == "cpu"
    empty = torch.nn.Linear(2, 2, device="meta").to_empty(device="tpu")
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty.weight.cpu(), model.weight)
    assert torch.nn.Linear(2, 2, device="tpu", dtype=torch.bfloat16).weight.dtype is torch.bfloat16


def test_autograd_runs_user_code_on_the_right_values_in_any_thread() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * 2

    x = torch.ones(2, device="tpu", requires_grad=True)
    Double.apply(x).sum().backward()  # type: ignore[attr-defined]
    assert x.grad is not None and x.grad.tolist() == [2, 2]


def test_backward_runs_in_the_thread_that_asks_for_it() -> None:
    # In a thread of torch's own, the caller's thread-local settings would not hold.
    seen = []
    x = torch.ones(3, device="tpu", requires_grad=True)
    x.register_hook(lambda grad: seen.append(threading.get_ident()))
    (x * 2).sum().backward()
    assert seen == [threading.get_ident()]

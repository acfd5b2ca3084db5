"""What users port from cuda and an outsider's review found broken: each test is one such fault."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bridge.device import extension

needs_extension = pytest.mark.skipif(
    extension.loaded() is None, reason="needs the C++ part: python -m bridge.device.build"
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("there", ["tpu", "cpu"])
def test_tied_parameters_stay_tied_when_a_module_moves(there: str) -> None:
    model = Tied().to("cpu" if there == "tpu" else "tpu")
    before = model.head.weight
    model.to(there)
    assert model.head.weight is model.embedding.weight is before
    assert before.device.type == there


def test_an_optimizer_made_before_the_module_moves_trains_it() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = model.weight.detach() - 0.5
    model.to("tpu")
    model(torch.ones(1, 3, device="tpu")).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach().cpu(), expected, rtol=0, atol=0)


def test_gradients_move_with_their_module() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    model.to("tpu")
    model(torch.ones(1, 3, device="tpu")).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.device.type == "tpu"
    torch.testing.assert_close(model.weight.grad.cpu(), torch.full((2, 3), 2.0), rtol=0, atol=0)


def test_data_of_the_other_device_can_be_assigned_only_if_it_is_dense() -> None:
    x = torch.ones(3, device="tpu")
    x.data = torch.arange(2.0, device="cpu")
    assert x.device.type == "cpu" and x.tolist() == [0.0, 1.0]
    y = torch.ones(3, 3, device="tpu")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        y.data = torch.eye(3, device="cpu").to_sparse()
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        y.data = torch.ones(3, device="meta")


def test_a_transformer_encoder_takes_a_padding_mask_in_eval_mode() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    dense = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    dense.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, 16, device="cpu")
    padding = torch.tensor([[False, False, False, True], [False, False, True, True]], device="cpu")
    with torch.no_grad():
        expected = dense(x, src_key_padding_mask=padding)[~padding]
        result = model.to("tpu")(x.to("tpu"), src_key_padding_mask=padding.to("tpu"))
    torch.testing.assert_close(result.cpu()[~padding], expected)


def test_a_nested_tensor_from_a_mask_is_refused() -> None:
    x = torch.ones(2, 3, 4, device="tpu")
    with pytest.raises(NotImplementedError, match=r"dense \(strided\) tensors only, not nested"):
        torch._nested_tensor_from_mask(x, torch.ones(2, 3, dtype=torch.bool, device="tpu"))


@pytest.mark.parametrize("arguments", [{}, {"periodic": False}, {"periodic": False, "beta": 3.0}])
def test_kaiser_window(arguments: dict[str, Any]) -> None:
    result = torch.kaiser_window(5, **arguments, device="tpu")
    assert result.device.type == "tpu"
    expected = torch.kaiser_window(5, **arguments, device="cpu")
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0)


@needs_extension
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_a_generator_is_copied_with_its_state(copied: Callable[[torch.Generator], torch.Generator]) -> None:
    generator = torch.Generator("tpu").manual_seed(3)
    torch.rand(5, device="tpu", generator=generator)
    other = copied(generator)
    assert other.device == generator.device and other is not generator
    expected = torch.rand(5, device="tpu", generator=generator)
    torch.testing.assert_close(torch.rand(5, device="tpu", generator=other), expected, rtol=0, atol=0)


@needs_extension
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: x.cpu(),
        lambda x: x.fill_(1),
        lambda x: torch.empty(3, device="tpu").copy_(x),
        lambda x: torch.equal(x, x),
        lambda x: torch.add(torch.ones(3, device="tpu"), 1, out=x),
    ],
)
def test_a_tensor_whose_storage_was_freed_is_an_error(use: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(3, device="tpu")
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage was resized to 0 bytes"):
        use(x)
    x.untyped_storage().resize_(12)
    assert x.fill_(2).sum().item() == 6


@needs_extension
def test_a_tensor_whose_storage_was_freed_can_be_resized() -> None:
    x = torch.ones(3, device="tpu")
    x.untyped_storage().resize_(0)
    assert x.resize_(5).fill_(2).sum().item() == 10

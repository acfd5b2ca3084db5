"""The drop-in modules, and their installation in a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpu_kernels


class _Special(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def _model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Sequential(
            nn.RMSNorm(8), nn.LayerNorm([8], bias=False), nn.LayerNorm(8, elementwise_affine=False)
        ),
        _Special(8),
    )


def test_replacement_keeps_parameters_and_values() -> None:
    torch.manual_seed(0)
    model = _model()
    before, parameters, x = model.state_dict(), list(model.parameters()), torch.randn(5, 8)
    expected = model(x)
    assert tpu_kernels.replace_modules(model) == 4
    assert [type(m).__module__ for m in model.modules()].count("tpu_kernels.nn") == 4
    assert type(model[3]) is _Special
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)
    # Five layers of sums of 8 values of a few units.
    torch.testing.assert_close(model(x), expected, rtol=0, atol=5 * 8 * 8 * torch.finfo(torch.float32).eps)
    assert tpu_kernels.replace_modules(model) == 0


def test_replacement_of_the_model_itself_and_of_a_shared_module() -> None:
    norm = nn.LayerNorm(8)
    assert tpu_kernels.replace_modules(nn.Sequential(norm, norm)) == 1
    assert isinstance(norm, tpu_kernels.nn.LayerNorm)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_modules_are_torchs_in_all_but_the_computation(name: str) -> None:
    ours, torchs = getattr(tpu_kernels.nn, name)((3, 4)), getattr(nn, name)((3, 4))
    assert isinstance(ours, type(torchs))
    ours.load_state_dict(torchs.state_dict())
    assert repr(ours) == repr(torchs)


def test_training_on_tpu_follows_plain_torch() -> None:
    def losses(model: nn.Module, device: str) -> list[float]:
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 40).reshape(5, 8).to(device)
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))
    ours = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))
    ours.load_state_dict(plain.state_dict())
    assert tpu_kernels.replace_modules(ours) == 2
    expected, actual = losses(plain, "cpu"), losses(ours, "tpu")
    assert expected[-1] < expected[0]
    # Losses near 1, each step adding some tens of roundings of values near 1.
    assert actual == pytest.approx(expected, abs=5 * 100 * torch.finfo(torch.float32).eps)

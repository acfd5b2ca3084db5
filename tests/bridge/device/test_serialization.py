"""Saving, loading, copying and pickling tpu tensors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch


def _saved(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("source", ["cpu", "tpu"])
@pytest.mark.parametrize("target", [None, "cpu", "tpu", "tpu:0", torch.device("tpu")])
def test_load_maps_devices_and_keeps_sharing(source: str, target: str | None) -> None:
    base = torch.arange(12.0, device=source).reshape(3, 4)
    loaded = torch.load(_saved({"base": base, "part": base[1:, ::2]}), map_location=target)
    expected = torch.device(target or source).type
    assert loaded["base"].device.type == loaded["part"].device.type == expected
    assert loaded["part"].tolist() == [[4, 6], [8, 10]]
    loaded["base"][1, 0] = -1
    assert loaded["part"][0, 0].item() == -1


def test_deepcopy_keeps_sharing_and_gradients() -> None:
    base = torch.arange(6.0, device="tpu", requires_grad=True)
    (base * 2).sum().backward()
    data = base.detach()
    copied, part, other = copy.deepcopy((data, data[2:], base))
    assert copied.data_ptr() != data.data_ptr()
    copied[2] = 50
    assert part[0].item() == 50 and data[2].item() == 2
    assert other.requires_grad and other.grad is not None and other.grad.tolist() == [2] * 6


def test_pickle() -> None:
    tensor = torch.arange(4.0, device="tpu")
    again = pickle.loads(pickle.dumps(tensor))
    assert again.device == tensor.device and again.tolist() == tensor.tolist()


def test_state_dict_goes_to_and_comes_from_the_cpu() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to("tpu")
    state = torch.load(_saved(model.state_dict()), map_location="cpu")
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    fresh.load_state_dict(state)
    x = torch.randn(4, 3)
    torch.testing.assert_close(model(x.to("tpu")).cpu(), fresh(x))


def test_an_index_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RuntimeError, match="device_count\\(\\) is 1"):
        torch.load(_saved(torch.ones(2)), map_location="tpu:3")


class OnDevice(torch.utils.data.Dataset[torch.Tensor]):
    """Items that are on the device when they leave the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index), device="tpu")


# JAX warns of any fork once it runs, as it may in this process; these workers do not use it.
@pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning", "ignore:.*multi-threaded.*fork:DeprecationWarning"
)
@pytest.mark.parametrize("data", [torch.utils.data.TensorDataset(torch.arange(8.0)), OnDevice()])
def test_data_loader_workers_feed_the_device(data: torch.utils.data.Dataset[Any]) -> None:
    loader = torch.utils.data.DataLoader(data, 2, num_workers=1, timeout=60)
    batches = [batch[0] if isinstance(batch, list) else batch for batch in loader]
    expected = [
        batch[0] if isinstance(batch, list) else batch for batch in torch.utils.data.DataLoader(data, 2)
    ]
    assert len(batches) > 1
    for batch, want in zip(batches, expected, strict=True):
        assert batch.device == want.device and torch.equal(batch.to("tpu").cpu(), want.cpu())

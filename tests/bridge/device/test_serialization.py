"""Saving, loading, copying and pickling tpu tensors, and sending them to other processes."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.device import extension


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


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("source", ["cpu", "tpu"])
@pytest.mark.parametrize("target", [None, "cpu", "tpu"])
def test_load_from_a_file(
    tmp_path: Path, source: str, target: str | None, mmap: bool, weights_only: bool
) -> None:
    state = {
        "parameter": torch.nn.Parameter(torch.randn(3, 2, device=source)),
        "half": torch.randn(5, device=source).to(torch.bfloat16),
        "strided": torch.arange(12, device=source).view(3, 4).t(),
        "empty": torch.ones(0, 4, device=source),
    }
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", map_location=target, mmap=mmap, weights_only=weights_only)
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    for name, value in state.items():
        got = loaded[name]
        assert got.device.type == (target or source), name
        assert got.dtype is value.dtype and got.stride() == value.stride(), name
        assert torch.equal(got.cpu(), value.cpu()), name


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"tpu:0": "cpu"}, "cpu"),
        ({"cpu": "tpu"}, "tpu"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: storage.tpu(), "tpu"),
        ("meta", "meta"),
    ],
)
def test_load_with_the_other_kinds_of_map(target: Any, expected: str) -> None:
    loaded = torch.load(_saved({"a": torch.arange(3.0, device="tpu")}), map_location=target)["a"]
    assert loaded.device.type == expected
    assert expected == "meta" or loaded.tolist() == [0, 1, 2]


def test_files_of_the_old_format() -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(4.0, device="tpu")}, buffer, _use_new_zipfile_serialization=False)
    for target in (None, "cpu"):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=target)["a"]
        assert loaded.device.type == (target or "tpu") and loaded.tolist() == [0, 1, 2, 3]


def test_training_goes_on_from_a_file_as_if_it_had_not_stopped() -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, device="tpu")).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    model = torch.nn.Linear(3, 2, device="tpu")
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    step(model, optimizer)
    file = _saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    again = torch.nn.Linear(3, 2, device="tpu")
    resumed = torch.optim.AdamW(again.parameters(), 0.1)
    state = torch.load(file)
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert [step(model, optimizer) for _ in range(3)] == [step(again, resumed) for _ in range(3)]


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


# -- storages ------------------------------------------------------------------------------------


def test_storages_of_the_device() -> None:
    storage = torch.UntypedStorage(8, device="tpu")
    assert storage.device.type == "tpu" and storage.nbytes() == 8
    tensor = torch.tensor([1, 2], dtype=torch.uint8, device="tpu")
    assert tensor.untyped_storage().tolist() == [1, 2]
    assert tensor.untyped_storage().cpu().device.type == "cpu"
    moved: Any = torch.tensor([3, 4], dtype=torch.uint8).untyped_storage().tpu()  # type: ignore[attr-defined]
    assert moved.is_tpu and moved.tolist() == [3, 4]
    copied = tensor.untyped_storage().clone()
    copied[0] = 9
    assert copied.device.type == "tpu" and tensor.tolist() == [1, 2]


def test_a_storage_changes_its_size_where_the_extension_is() -> None:
    tensor = torch.arange(4, dtype=torch.uint8, device="tpu")
    storage = tensor.untyped_storage()
    if not extension.loaded():
        with pytest.raises(NotImplementedError, match="bridge.device.build"):
            storage.resize_(0)
        assert tensor.tolist() == [0, 1, 2, 3]
        return
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(4)
    tensor.fill_(7)
    assert storage.tolist() == [7, 7, 7, 7]


# -- between processes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0, device="tpu").view(2, 3).t(),
        lambda: torch.arange(6.0, device="tpu")[2:4],
        lambda: torch.nn.Parameter(torch.ones(2, device="tpu"), requires_grad=False),
        lambda: torch.ones(2, device="tpu", requires_grad=True),
        lambda: torch.ones(2, device="tpu").to(torch.float8_e4m3fn),
        lambda: torch.ones(2, 0, device="tpu"),
    ],
)
def test_pickles_for_other_processes(make: Callable[[], torch.Tensor]) -> None:
    sent = make()
    received = pickle.loads(ForkingPickler.dumps(sent))
    assert type(received) is type(sent) and received.device == sent.device
    assert received.requires_grad is sent.requires_grad and received.stride() == sent.stride()
    assert received.dtype is sent.dtype and torch.equal(received.float().cpu(), sent.float().cpu())


def test_a_history_of_gradients_is_not_sent() -> None:
    result = torch.ones(2, device="tpu", requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="detach"):
        ForkingPickler.dumps(result)


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


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning", "ignore:.*multi-threaded.*fork:DeprecationWarning"
)
def test_data_loader_with_pinned_memory(workers: int) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, 4, pin_memory=True, num_workers=workers, timeout=60 * workers)
    batches = [batch for (batch,) in loader]
    assert [b.is_pinned() for b in batches] == [extension.loaded() is not None] * 2
    moved = [b.to("tpu", non_blocking=True) for b in batches]
    assert [m.tolist() for m in moved] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert moved[0].to("cpu", non_blocking=True).tolist() == [0, 1, 2, 3]


# -- safetensors ---------------------------------------------------------------------------------


def test_safetensors_files(tmp_path: Path) -> None:
    import safetensors
    import safetensors.torch

    state = {
        "a": torch.arange(6.0, device="tpu").view(2, 3),
        "b": torch.ones(4, device="tpu").to(torch.bfloat16),
        "c": torch.ones(0, device="tpu"),
    }
    path = tmp_path / "state.safetensors"
    safetensors.torch.save_file(state, path, {"made": "here"})
    for device in ("tpu", "tpu:0", torch.device("tpu")):
        loaded = safetensors.torch.load_file(path, device=device)  # type: ignore[arg-type]
        for name, value in state.items():
            assert loaded[name].device == value.device and loaded[name].dtype is value.dtype
            assert torch.equal(loaded[name].cpu(), value.cpu())
    assert safetensors.torch.load_file(path)["a"].device.type == "cpu"
    with safetensors.safe_open(path, "pt", device="tpu") as file:
        assert set(file.keys()) == set(state) and file.metadata() == {"made": "here"}
        part = file.get_slice("a")
        assert part.get_shape() == [2, 3]
        assert part[:, 1:].device.type == "tpu" and part[:, 1:].tolist() == [[1, 2], [4, 5]]
        assert file.get_tensor("b").device.type == "tpu"
    with (
        pytest.raises(RuntimeError, match="tpu:99"),
        safetensors.safe_open(path, "pt", device="tpu:99") as file,
    ):
        file.get_tensor("a")


def test_safetensors_models(tmp_path: Path) -> None:
    import safetensors.torch

    model, other = torch.nn.Linear(3, 2, device="tpu"), torch.nn.Linear(3, 2, device="tpu")
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.torch.load_model(other, tmp_path / "model.safetensors", device="tpu")
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("order", ["import torch, safetensors.torch", "import safetensors.torch, torch"])
def test_safetensors_is_not_imported_for_this_and_may_come_in_any_order(order: str, tmp_path: Path) -> None:
    script = f"""
import sys
if "{order}".startswith("import torch"):
    import torch
    assert "safetensors" not in sys.modules
{order}
from bridge import device
device.register()
data = safetensors.torch.save({{"a": torch.ones(2)}})
open(sys.argv[1], "wb").write(data)
assert safetensors.torch.load_file(sys.argv[1], device="tpu")["a"].is_tpu
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "file")], check=True, timeout=120)

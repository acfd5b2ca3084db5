"""A tpu tensor and its CPU alias are the same bytes, whatever the layout."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from bridge.device.storage import cpu_alias, from_cpu

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.arange(12.0).reshape(3, 4),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "empty with storage": lambda: torch.arange(6.0)[3:3],
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "offset": lambda: torch.arange(12.0)[5:],
    "prefix of a storage": lambda: torch.arange(12.0)[:5],
    "strided": lambda: torch.arange(24.0).reshape(4, 6)[1::2, ::3],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "overlapping": lambda: torch.arange(9.0).as_strided((3, 4), (2, 1), 1),
    "channels_last": lambda: torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "complex conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative view": lambda: torch._neg_view(torch.arange(4.0)),
    "imaginary part of a conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_from_cpu_keeps_geometry_values_and_memory(name: str) -> None:
    source = LAYOUTS[name]()
    expected, address = source.clone(), source.data_ptr()
    result = from_cpu(source)
    assert result.device == torch.device("tpu:0")
    assert (result.size(), result.stride()) == (source.size(), source.stride())
    assert result.storage_offset() == source.storage_offset()
    assert result.untyped_storage().nbytes() == source.untyped_storage().nbytes()
    assert (result.is_conj(), result.is_neg()) == (source.is_conj(), source.is_neg())
    assert result.data_ptr() == address
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_alias_is_the_inverse_of_from_cpu(name: str) -> None:
    source = LAYOUTS[name]()
    alias = cpu_alias(from_cpu(source))
    assert alias.device.type == "cpu"
    assert (alias.size(), alias.stride()) == (source.size(), source.stride())
    assert alias.storage_offset() == source.storage_offset()
    assert alias.data_ptr() == source.data_ptr()
    torch.testing.assert_close(alias, source, rtol=0, atol=0)


def test_writes_through_either_are_seen_by_the_other() -> None:
    tensor = torch.zeros(2, 3, device="tpu")
    alias = cpu_alias(tensor[:, 1])
    alias.fill_(5.0)
    assert tensor.tolist() == [[0, 5, 0], [0, 5, 0]]
    tensor.add_(1.0)
    assert alias.tolist() == [6, 6]


DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4, torch.bits16}
    - {torch.complex32},  # making one warns that it is experimental
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bytes(dtype: torch.dtype) -> None:
    source = torch.arange(32, dtype=torch.uint8).view(dtype)
    tensor = from_cpu(source)
    assert tensor.dtype is dtype
    alias = cpu_alias(tensor)
    assert alias.dtype is dtype
    assert alias.view(torch.uint8).tolist() == list(range(32))


def test_memory_lives_as_long_as_either_tensor() -> None:
    source = torch.arange(1000.0)
    gone = weakref.ref(source.untyped_storage())
    tensor = from_cpu(source)
    alias = cpu_alias(tensor)
    del source, tensor
    gc.collect()
    assert alias.sum().item() == sum(range(1000))
    del alias
    gc.collect()
    assert gone() is None


def test_the_wrong_device_is_named() -> None:
    with pytest.raises(TypeError, match="strided tensor on 'tpu', got a strided tensor on 'cpu'"):
        cpu_alias(torch.zeros(2))
    with pytest.raises(TypeError, match="strided tensor on 'cpu', got a strided tensor on 'meta'"):
        from_cpu(torch.zeros(2, device="meta"))
    with pytest.raises(TypeError, match="got a sparse_coo tensor"):
        from_cpu(torch.eye(2).to_sparse())


def test_fake_tensors_are_refused_before_memory_is_read() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3, device="tpu")
    with pytest.raises(TypeError, match="fake"):
        cpu_alias(fake)


def test_untyped_storage_on_the_device() -> None:
    storage = torch.UntypedStorage(16, device="tpu")
    assert (storage.device.type, storage.nbytes()) == ("tpu", 16)
    filled = torch.UntypedStorage([1, 2, 3], device="tpu")
    assert filled.tolist() == [1, 2, 3]
    copied = filled.clone()
    assert copied.tolist() == [1, 2, 3] and copied.data_ptr() != filled.data_ptr()
    assert filled.cpu().tolist() == [1, 2, 3]
    assert torch.UntypedStorage(4).device.type == "cpu"
    assert torch.UntypedStorage([4, 5]).tolist() == [4, 5]

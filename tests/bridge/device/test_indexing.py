"""Reading and writing by index, in every form that torch takes: on tpu as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

Index = Callable[[str], Any]


def long(values: Any) -> Index:
    return lambda device: torch.tensor(values, device=device)


INDICES: dict[str, Index] = {
    "integer": lambda d: 2,
    "negative integer": lambda d: -1,
    "integers": lambda d: (1, -2, 0),
    "slice": lambda d: slice(1, None, 2),
    "slices": lambda d: (slice(None), slice(0, 3), slice(-2, None)),
    "empty slice": lambda d: slice(3, 1),
    "ellipsis": lambda d: (..., 1),
    "new axes": lambda d: (None, 1, ..., None),
    "true": lambda d: True,
    "false": lambda d: False,
    "list": lambda d: [3, 0, 0],
    "range": lambda d: range(1, 3),
    "two lists": lambda d: ([0, 1], [4, 2]),
    "list of booleans": lambda d: [True, False, True, True],
    "numpy array": lambda d: np.array([2, 1]),
    "numpy integer": lambda d: np.int64(3),
    "tensor": long([3, 0, 3]),
    "int32 tensor": lambda d: torch.tensor([3, 0], dtype=torch.int32, device=d),
    "negative tensor": long([-1, -4]),
    "scalar tensor": long(2),
    "scalar tensor of the CPU": lambda d: torch.tensor(2),
    "tensor of the CPU": lambda d: torch.tensor([1, 3]),
    "empty tensor": lambda d: torch.empty(0, dtype=torch.long, device=d),
    "two tensors": lambda d: (long([0, 3])(d), long([4, 1])(d)),
    "tensors that broadcast": lambda d: (long([[0], [3]])(d), long([4, 1, 2])(d)),
    "tensors apart": lambda d: (long([0, 3])(d), slice(None), long([1, 2])(d)),
    "tensor after an ellipsis": lambda d: (..., long([2, 0])(d)),
    "tensor and integer": lambda d: (long([0, 3])(d), 1),
    "tensor, slice and new axis": lambda d: (slice(1, 3), long([0, 3])(d), None),
    "three tensors": lambda d: (long([0, 3])(d), long([4, 1])(d), long([2, 2])(d)),
    "mask": lambda d: torch.arange(60, device=d).reshape(4, 5, 3) % 3 == 0,
    "mask of the CPU": lambda d: torch.arange(4) > 1,
    "mask of rows": lambda d: torch.arange(4, device=d) > 1,
    "mask of rows and columns": lambda d: torch.eye(4, 5, dtype=torch.bool, device=d),
    "mask after a slice": lambda d: (slice(None), torch.arange(5, device=d) % 2 == 0),
    "mask and tensor": lambda d: (torch.arange(4, device=d) > 1, long([4, 0])(d)),
    "mask of nothing": lambda d: torch.zeros(4, dtype=torch.bool, device=d),
}

WRONG_INDICES: dict[str, Index] = {
    "integer too large": lambda d: 4,
    "tensor too large": long([0, 4]),
    "tensor too small": long([-5]),
    "too many": lambda d: (0, 0, 0, 0),
    "mask of another shape": lambda d: torch.ones(3, dtype=torch.bool, device=d),
    "floating tensor": lambda d: torch.ones(2, device=d),
    "shapes that do not broadcast": lambda d: (long([0, 1])(d), long([0, 1, 2])(d)),
    "string": lambda d: "a",
}

VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "number": lambda part: 7,
    "scalar tensor": lambda part: torch.tensor(7.5, device=part.device),
    "scalar tensor of the CPU": lambda part: torch.tensor(7.5),
    "tensor": lambda part: torch.arange(float(part.numel()), device=part.device).reshape(part.shape),
    "tensor that broadcasts": lambda part: torch.ones(part.shape[-1:], device=part.device),
}


def numbers(device: str) -> torch.Tensor:
    return torch.arange(60.0, device=device).reshape(4, 5, 3)


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_reading(index: Index) -> None:
    tensor, reference = numbers("tpu"), numbers("cpu")
    got, expected = tensor[index("tpu")], reference[index("cpu")]
    assert got.device.type == "tpu"
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0)
    shared = expected.untyped_storage().data_ptr() == reference.untyped_storage().data_ptr()
    assert (got.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()) == shared


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_writing(index: Index, value: Callable[[torch.Tensor], Any]) -> None:
    tensor, reference = numbers("tpu"), numbers("cpu")
    view, reference_view = tensor[1:], reference[1:]
    # Repeated indices: which write is last is not defined, so every one of them writes the same.
    repeated = value is VALUES["tensor"] and index in (INDICES["list"], INDICES["tensor"])
    for target, device in ((tensor, "tpu"), (reference, "cpu")):
        part = target[index(device)]
        target[index(device)] = 1 if repeated else value(part)
    torch.testing.assert_close(tensor.cpu(), reference, rtol=0, atol=0)
    torch.testing.assert_close(view.cpu(), reference_view, rtol=0, atol=0)
    assert (tensor._version > 0) == (reference._version > 0)


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_gradients(index: Index) -> None:
    leaves = numbers("tpu").requires_grad_(), numbers("cpu").requires_grad_()
    for leaf, device in zip(leaves, ("tpu", "cpu"), strict=True):
        leaf[index(device)].square().sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    torch.testing.assert_close(leaves[0].grad.cpu(), leaves[1].grad)


@pytest.mark.parametrize("index", WRONG_INDICES.values(), ids=WRONG_INDICES)
def test_wrong_indices_raise_as_on_the_cpu(index: Index) -> None:
    def run(device: str, use: Callable[[torch.Tensor, Any], Any]) -> tuple[type[BaseException], Any]:
        tensor = numbers(device)
        with pytest.raises(Exception) as caught:
            use(tensor, index(device))
        return caught.type, tensor.tolist()

    def write(tensor: torch.Tensor, place: Any) -> None:
        tensor[place] = 1

    for use in (lambda tensor, place: tensor[place], write):
        assert run("tpu", use) == run("cpu", use)


def test_writing_another_dtype_raises_as_on_the_cpu() -> None:
    tensor, index = numbers("tpu"), torch.tensor([0, 1], device="tpu")
    with pytest.raises(RuntimeError, match="dtypes match, got Float for the destination and Long"):
        tensor[index] = torch.ones(2, 5, 3, dtype=torch.int64, device="tpu")
    tensor[0] = torch.ones(5, 3, dtype=torch.int64, device="tpu")  # a copy, which converts
    assert tensor[0].eq(1).all()


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_with_repeated_indices(accumulate: bool) -> None:
    def run(device: str) -> torch.Tensor:
        index = torch.tensor([1, 1, 3, 1], device=device)
        value = torch.full((4, 1, 1), 2.0, device=device)
        return numbers(device).index_put_((index,), value, accumulate=accumulate)

    torch.testing.assert_close(run("tpu").cpu(), run("cpu"), rtol=0, atol=0)

"""The public norm functions: torch's arguments, torch's meaning, and clear refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpu_kernels
from tpu_kernels import RowTiling

OURS_AND_TORCHS: list[tuple[Any, Any]] = [
    (tpu_kernels.rms_norm, F.rms_norm),
    (tpu_kernels.layer_norm, F.layer_norm),
]
both = pytest.mark.parametrize(("ours", "torchs"), OURS_AND_TORCHS, ids=["rms_norm", "layer_norm"])
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@both
def test_several_trailing_dimensions(ours: Any, torchs: Any) -> None:
    x, weight = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    y = ours(x, (4, 5), weight)
    torch.testing.assert_close(y, torchs(x, (4, 5), weight))
    assert y.is_contiguous()


@both
def test_an_int_names_the_last_dimension(ours: Any, torchs: Any) -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x, 8), torchs(x, (8,)))


@both
@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0), (0,)])
def test_empty_as_in_torch(ours: Any, torchs: Any, shape: tuple[int, ...]) -> None:
    x, weight = torch.zeros(shape, requires_grad=True), torch.ones(shape[-1:], requires_grad=True)
    y = ours(x, shape[-1:], weight)
    y.sum().backward()
    assert y.shape == torchs(x, shape[-1:], weight).shape
    assert x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros(shape[-1:]))


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_output_dtype_is_the_inputs(
    ours: Any, torchs: Any, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x, weight = torch.randn(4, 8).to(dtype), torch.randn(8).to(weight_dtype)
    y = ours(x, (8,), weight)
    assert y.dtype == dtype
    expected = torchs(x.double(), (8,), weight.double(), **_eps(ours, dtype))
    # Values of a few units, computed in float32 or better from rows of 8, and rounded once.
    tolerance = (torch.finfo(dtype).eps + 32 * torch.finfo(torch.float32).eps) * expected.abs().max()
    assert (y.double() - expected).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_eps_is_what_torch_computes_with(dtype: torch.dtype) -> None:
    """torch documents the epsilon of the input's dtype and uses that of float32 for smaller dtypes."""
    x = torch.full((1, 4), 2.0**-12).to(dtype)  # its square is near every candidate for eps but one
    expected = F.rms_norm(x, (4,))
    actual = tpu_kernels.rms_norm(x, (4,))
    assert (actual.double() - expected.double()).abs().max() <= 2 * torch.finfo(
        dtype
    ).eps * expected.abs().max()


def _eps(ours: Any, dtype: torch.dtype) -> dict[str, float]:
    if ours is tpu_kernels.layer_norm:
        return {}
    return {"eps": torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps}


X = torch.zeros(4, 8)


@both
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((X, ()), RuntimeError, ["at least one dimension"]),
        ((X, (4,)), RuntimeError, ["[4]", "[4, 8]"]),
        ((X, (2, 4, 8)), RuntimeError, ["last 3 dimensions", "[4, 8]"]),
        ((torch.zeros(()), (1,)), RuntimeError, ["[1]", "[]"]),
        ((X, (8,), torch.ones(4)), RuntimeError, ["weight", "[8]", "[4]"]),
        ((X, (8.0,)), TypeError, ["normalized_shape", "8.0"]),
        ((X.int(), (8,)), TypeError, ["input", "torch.int32"]),
        ((X.cfloat(), (8,)), TypeError, ["input", "torch.complex64"]),
        ((X, (8,), torch.ones(8, dtype=torch.bool)), TypeError, ["weight", "torch.bool"]),
        (([1.0], (1,)), TypeError, ["input", "list"]),
    ],
)
def test_refusals(
    ours: Any, torchs: Any, arguments: tuple[Any, ...], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        ours(*arguments)
    message = str(caught.value)
    assert message.startswith(ours.__name__)
    assert all(word in message for word in words), message


@both
@pytest.mark.parametrize(
    ("input", "options", "words"),
    [
        (X, {"impl": "cuda"}, ["impl", "'cuda'", "pallas"]),
        (X.double(), {"impl": "pallas"}, ["float64", "reference"]),
        (X.half(), {"impl": "pallas"}, ["float16", "reference"]),
        (torch.zeros(1, 200_000), {"impl": "pallas"}, ["VMEM", "32.0 MiB"]),
        (
            torch.zeros(9000, 4096),
            {"tiling": RowTiling(4096)},
            ["VMEM", "32.0 MiB", "Use RowTiling(tile_rows="],
        ),
        (X, {"impl": "reference", "tiling": RowTiling(8)}, ["tiles", "reference"]),
        (X.double(), {"tiling": RowTiling(8)}, ["tiles", "float64"]),
    ],
)
def test_implementations_say_why_not(
    ours: Any, torchs: Any, input: torch.Tensor, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        ours(input, input.shape[-1:], **options)
    message = str(caught.value)
    assert all(word in message for word in words), message


def test_eps_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="eps must be a float, got '1'"):
        tpu_kernels.rms_norm(X, (8,), eps="1")  # pyright: ignore[reportArgumentType]
    eps: Any = np.float32(0.5)
    assert torch.equal(tpu_kernels.rms_norm(X, (8,), eps=eps), tpu_kernels.rms_norm(X, (8,), eps=0.5))

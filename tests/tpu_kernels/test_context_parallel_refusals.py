"""What `tpu_kernels.context_parallel` refuses: calls that would see a part alone, and wrong regions."""

from __future__ import annotations

# Tests call with wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention.bias import causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tpu_kernels
from bridge import get_pallas_mesh
from bridge.ranks import run
from tpu_kernels import context_parallel

# What torch itself warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def _calls() -> list[tuple[Callable[[], Any], type[Exception], str]]:
    """Of attention, inside of a region of length 7 on one rank: parts of eight positions."""
    x, other = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 6, 4)
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    spread_tensor = DTensor.from_local(x, mesh, [Replicate()])
    visible = torch.ones(8, 8, dtype=torch.bool)
    attention = torch.ops.aten.scaled_dot_product_attention
    return [
        (lambda: sdpa(x, x, x, attn_mask=visible), ValueError, "attn_mask is not taken.*masks"),
        (lambda: sdpa(x, x, x, attn_mask=causal_upper_left(8, 8)), ValueError, "attn_mask is not taken"),
        (lambda: attention(x, x, x, visible), ValueError, "attn_mask is not taken"),
        (lambda: sdpa(x, x, x, dropout_p=0.1), ValueError, "got dropout_p=0.1; set it to 0"),
        (lambda: sdpa(x, other, other), ValueError, "8 on each rank of a sequence of 7; got query"),
        (lambda: sdpa(other, other, other), ValueError, "this rank's part of one sequence"),
        (lambda: sdpa(spread_tensor, spread_tensor, spread_tensor), TypeError, "own dense tensors.*DTensor"),
        (lambda: sdpa(x, x.double(), x), RuntimeError, "dtype"),
        (lambda: sdpa(x, x[:, :1].expand(1, 3, 8, 4), x), RuntimeError, "size"),
        (lambda: layer(x[0], x[0], x[0]), ValueError, "need_weights=False"),
        (
            lambda: layer(x[0], x[0], x[0], need_weights=False, key_padding_mask=visible[:2]),
            ValueError,
            "attn_mask is not taken",
        ),
    ]


def test_calls_that_are_refused() -> None:
    def check() -> None:
        with context_parallel(get_pallas_mesh("x"), "x", length=7):
            for call, error, text in _calls():
                with pytest.raises(error, match=text):
                    call()

    run(check, 1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def check() -> None:
        x = torch.zeros(1, 2, 8, 4)
        with context_parallel(get_pallas_mesh("x"), "x"):
            with pytest.raises(Exception, match="flex_attention would see this rank's part .*ring_attention"):
                flex_attention(x, x, x)

    run(check, 1)


def _regions(mesh: Any) -> list[tuple[dict[str, Any], type[Exception], str]]:
    x, grad = torch.zeros(4, 6), torch.zeros(4, requires_grad=True)
    other = torch.zeros(5)
    return [
        ({"buffers": [x]}, ValueError, "each buffer needs a dimension .* got 1 buffers, 0 dimensions"),
        ({"buffers": [x], "buffer_seq_dims": [0], "buffer_fills": []}, ValueError, "0 numbers"),
        ({"buffers": [grad], "buffer_seq_dims": [0]}, ValueError, "requires a gradient.*shard_sequence"),
        ({"buffers": [x, other], "buffer_seq_dims": [0, 0]}, ValueError, r"same length .* got \[4, 5\]"),
        ({"buffers": [x, x], "buffer_seq_dims": [0, 0]}, ValueError, "a buffer is there twice"),
        ({"buffers": [x], "buffer_seq_dims": [2]}, ValueError, r"shape \[4, 6\] has no dimension 2"),
        ({"buffers": [x], "buffer_seq_dims": [0.5]}, TypeError, "must be ints, got 0.5"),
        ({"buffers": [[1]], "buffer_seq_dims": [0]}, TypeError, "must be tensors, got list"),
        ({"no_restore_buffers": [x]}, ValueError, "no_restore_buffers must be some of the buffers"),
        ({"buffers": [x], "buffer_seq_dims": [0], "length": 5}, ValueError, "have length 4, got length=5"),
        ({"length": -1}, ValueError, "length must be 0 or more"),
        ({"layout": "striped"}, ValueError, "layout must be one of"),
        ({"rotate": "alltoall"}, ValueError, "rotate must be one of"),
        ({"axis": "z"}, ValueError, "axis must be one of the mesh's axes"),
    ]


def test_regions_that_are_refused() -> None:
    def check() -> None:
        mesh = get_pallas_mesh("x")
        for options, error, text in _regions(mesh):
            with pytest.raises(error, match=text):
                with context_parallel(mesh, **{"axis": "x", **options}):
                    raise AssertionError("entered")
        x = torch.zeros(4)
        region = {"buffers": [x], "buffer_seq_dims": [0]}
        with context_parallel(mesh, "x", **region), pytest.raises(ValueError, match="is cut already"):
            with context_parallel(mesh, "x", **region):
                raise AssertionError("entered")
        assert x.shape == (4,)

    run(check, 1)


def test_a_region_in_a_compiled_function_is_refused() -> None:
    def check() -> None:
        mesh = get_pallas_mesh("x")

        def step(x: torch.Tensor) -> torch.Tensor:
            with context_parallel(mesh, "x"):
                return sdpa(x, x, x)

        with pytest.raises(Exception, match="torch.compile can't trace the block"):
            torch.compile(step, fullgraph=True, backend="eager")(torch.zeros(1, 2, 4, 4))

    run(check, 1)


def test_what_would_see_a_part_only_is_refused() -> None:
    """An inner context would get the call before the block does; so would another function than torch's."""

    def check() -> None:
        x = torch.zeros(1, 1, 4, 8)
        with tpu_kernels.overrides(), context_parallel(get_pallas_mesh("x"), "x"):
            with pytest.raises(RuntimeError, match=r"overrides\(\), inside of context_parallel"):
                tpu_kernels.overrides().__enter__()
            with pytest.raises(RuntimeError, match='use attn_implementation="sdpa"'):
                tpu_kernels.huggingface.attention(torch.nn.Module(), x, x, x, None)
        with tpu_kernels.overrides():
            pass

    run(check, 2)

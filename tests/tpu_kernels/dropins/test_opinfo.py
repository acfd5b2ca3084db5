"""torch's own samples for attention (OpInfo), and random calls, on both devices."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

from .conftest import Ours
from .oracle import Attention, check

INFO = next(info for info in op_db if info.name == "nn.functional.scaled_dot_product_attention")


def samples(dtype: torch.dtype) -> list[SampleInput]:
    """Those that torch has for a dtype, each once."""
    found: dict[str, SampleInput] = {}
    for sample in INFO.sample_inputs("cpu", dtype, requires_grad=False):
        shapes = [tuple(t.shape) for t in (sample.input, *sample.args)]
        found.setdefault(f"{shapes} {sorted(sample.kwargs)} {list(map(str, sample.kwargs.values()))}", sample)
    return list(found.values())


SLOW = (torch.float16, torch.bfloat16)
DTYPES = [
    pytest.param(dtype, id=str(dtype), marks=[pytest.mark.slow] * (dtype in SLOW))
    for dtype in sorted(INFO.dtypes, key=str)
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples(ours: Ours, dtype: torch.dtype) -> None:
    count = 0
    for sample in samples(dtype):
        kwargs: dict[str, Any] = dict(sample.kwargs)
        dropout_p = kwargs.pop("dropout_p")
        key, value = sample.args
        call = Attention(sample.input, key, value, kwargs.pop("attn_mask", None), **kwargs)
        if not dropout_p:
            check(call, ours.device, ours)
            count += 1
            continue
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            args, options = call.arguments(call.query, call.key, call.value)
            results.append(ours(*args, **options, dropout_p=dropout_p))
        assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
        count += 1
    assert count == 13
    assert bool(ours.used()) == (dtype != torch.float64)


def random_call(seed: int) -> Attention:
    """Any lengths, heads, ranks, dtypes, masks and mixtures of them that torch takes."""
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    rows, columns = draw.choice([1, 2, 5, 17, 40]), draw.choice([1, 3, 8, 33])
    dims = draw.choice([1, 3, 8, 20]), draw.choice([1, 5, 8])
    heads = draw.choice([1, 2, 4, 6])
    gqa = draw.random() < 0.4
    kv_heads = [draw.choice([n for n in range(1, heads + 1) if heads % n == 0]) for _ in range(2)]
    if not gqa:
        kv_heads = [draw.choice([heads, 1]) for _ in range(2)]
    batch = draw.choice([(), (1,), (2,), (2, 3)])

    def tensor(some: int, length: int, dim: int) -> torch.Tensor:
        own = tuple(draw.choice([n, n, 1]) for n in batch)[draw.choice([0, 0, len(batch)]) :]
        x = torch.randn(*own, some, length, dim).to(dtype)
        return x if draw.random() < 0.7 else x.transpose(-3, -2).contiguous().transpose(-3, -2)

    torch.manual_seed(seed)
    q = torch.randn(*batch, heads, rows, dims[0]).to(dtype)
    k, v = (tensor(n, columns, dim) for n, dim in zip(kv_heads, dims, strict=True))
    mask = None
    if draw.random() < 0.7:
        shape = (
            *(draw.choice([n, 1]) for n in (*batch, heads)),
            draw.choice([rows, 1]),
            draw.choice([columns, 1]),
        )
        shape = shape[draw.randrange(len(shape) - 1) :]
        mask = torch.rand(shape) > draw.choice([0.0, 0.3, 0.9])
        if draw.random() < 0.5:
            mask = (
                torch.randn(shape)
                .masked_fill(~mask, draw.choice([0, -torch.inf]))
                .to(draw.choice([dtype, torch.float32]))
            )
    scale = draw.choice([None, None, 0.3, -1.0])
    return Attention(q, k, v, mask, draw.random() < 0.4, scale, gqa)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 4 else pytest.mark.slow) for seed in range(8)]
)
def test_random_calls(ours: Ours, seed: int) -> None:
    check(random_call(seed), ours.device, ours)
    assert ours.used() == 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_many_random_calls(ours: Ours, first: int) -> None:
    for seed in range(first, first + 50):
        try:
            check(random_call(seed), ours.device, ours)
        except AssertionError as error:
            raise AssertionError(f"random_call({seed})") from error
    assert ours.used() == 50

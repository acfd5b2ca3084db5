"""Lists of visits that are longer than SMEM is: fewer keys at a time in the backward, else a clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpu_kernels import masks, splash_attention
from tpu_kernels.splash_attention import blocks
from tpu_kernels.splash_attention.blocks import MAX_WORDS, TooManyVisits, check_fits
from tpu_kernels.splash_attention.tiling import SplashTiling, Tiles

SMALL = SplashTiling(128, 128, 128, 128, 128, 128, 128, 128)


def problem(length: int) -> tuple[list[torch.Tensor], masks.Mask]:
    """Windows of another size in each of two heads: two lists, which depend on an array."""
    generator = torch.Generator().manual_seed(length)
    tensors = [torch.randn(1, 2, length, 8, generator=generator) for _ in range(4)]
    windows = torch.tensor([100, 260], dtype=torch.int32)
    return tensors, masks.function(lambda b, h, q, kv: (q >= kv) & (q - kv < windows[h]))


# Lists of 10 visits: four q tiles with 1 to 4 tiles of keys; two keys' tiles at a time are 4 + 3 and 2 + 1.
@pytest.mark.parametrize(
    ("words", "length", "keys"),
    [
        pytest.param(20, 500, 500, marks=pytest.mark.slow),
        (14, 501, 256),
        pytest.param(8, 502, 128, marks=pytest.mark.slow),
    ],
)
def test_the_backward_takes_fewer_keys_at_a_time(
    words: int, length: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (q, k, v, d_o), mask = problem(length)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(splash_attention(*inputs, mask=mask, impl="reference"), inputs, d_o)
    o = splash_attention(*inputs, mask=mask, impl="pallas", tiling=SMALL)

    planned, plan = [], blocks.plan

    def limited(mask: Any, aligned: Any, sizes: Any, *rest: Any, q_end: bool, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            if q_end:  # the backward's
                patch.setattr(blocks, "MAX_WORDS", words)
            visits = plan(mask, aligned, sizes, *rest, q_end=q_end, **options)
        if q_end:
            planned.append(sizes.kv_len)
        return visits

    monkeypatch.setattr(blocks, "plan", limited)
    got = torch.autograd.grad(o, inputs, d_o)
    assert planned[0] == keys
    for ours, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=2e-5)


def test_what_fits_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v, _), mask = problem(390)
    monkeypatch.setattr(blocks, "MAX_WORDS", 11)
    with pytest.raises(TooManyVisits, match="2 lists, as the mask .* take larger tiles than 128"):
        splash_attention(q, k, v, mask=mask, impl="pallas", tiling=SMALL)


def test_the_limit() -> None:
    tiles = Tiles(128, 128, 128, 128)
    check_fits(2, MAX_WORDS // 2, tiles)
    with pytest.raises(TooManyVisits, match="1 list, of 131073 visits"):
        check_fits(1, MAX_WORDS + 1, tiles)

"""torch.nn's layers and the classes around attention, with ours inside."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

from tpu_kernels.dropins import fast_paths

from .conftest import Ours

torchs: Any = scaled_dot_product_attention


def rounding(terms: float) -> Any:
    """For float32: so many roundings, each of a number below 8."""
    return {"rtol": 0.0, "atol": terms * 8 * 2**-24}


def padding(device: Any) -> torch.Tensor:
    """[2, 6]: the second sentence has four tokens; True is padding."""
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    return mask.to(device)


@pytest.mark.parametrize("mask", ["none", "padding", "causal", "float", "both"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_multi_head_attention(ours: Ours, mask: str, training: bool) -> None:
    """With the gradient and without: torch then takes another, fused way through the layer."""
    layer = nn.MultiheadAttention(16, 2, batch_first=True).train(training)
    nn.init.normal_(layer.in_proj_bias)
    x = torch.randn(2, 6, 16)
    options: dict[str, Any] = {"need_weights": False}
    if mask in ("padding", "both"):
        options["key_padding_mask"] = padding("cpu")
    if mask in ("causal", "both"):
        options["attn_mask"] = ~torch.ones(6, 6, dtype=torch.bool).tril()
    if mask == "float":
        options["attn_mask"] = torch.randn(6, 6)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in options.items() if n != "need_weights"}
    want = layer.double().train()(x.double(), x.double(), x.double(), need_weights=False, **wide)[0]
    layer.float().train(training).to(ours.device)
    x = x.to(ours.device)
    options = {n: t.to(ours.device) if isinstance(t, torch.Tensor) else t for n, t in options.items()}
    with ours.standing_in(), torch.set_grad_enabled(training):
        result, weights = layer(x, x, x, **options)
    assert ours.used() == 1 and weights is None
    torch.testing.assert_close(result.detach().cpu().double(), want.detach(), **rounding(64))
    if training:
        result.sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


def test_weights_are_torchs_to_compute(ours: Ours) -> None:
    """`need_weights=True` asks for the softmax itself, which no kernel stores."""
    layer = nn.MultiheadAttention(16, 2, batch_first=True).eval().to(ours.device)
    x = torch.randn(2, 6, 16).to(ours.device)
    with ours.standing_in(), torch.no_grad():
        result, weights = layer(x, x, x, need_weights=True)
    with torch.no_grad():
        want, want_weights = layer.cpu()(x.cpu(), x.cpu(), x.cpu(), need_weights=True)
    assert ours.used() == 0
    torch.testing.assert_close(result.cpu(), want, **rounding(64))
    torch.testing.assert_close(weights.cpu(), want_weights, **rounding(64))


def encoded(
    ours: Ours,
    training: bool,
    *,
    while_running: AbstractContextManager[Any] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What two layers as MiniLM has them make of a padded batch, and what they must, in float64."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0, **options)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for p in encoder.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 6, 16)
    want = encoder.double().train()(x.double(), src_key_padding_mask=padding("cpu"))
    encoder.float().train(training).to(ours.device)
    with ours.standing_in(), torch.set_grad_enabled(training), while_running or nullcontext():
        result = encoder(x.to(ours.device), src_key_padding_mask=padding(ours.device))
    assert ours.used() == 2
    real = ~padding("cpu")
    return result.detach().cpu().double()[real], want.detach()[real]


SUMS = 2 * (16 + 8 + 6 + 16 + 16 + 16 + 32 + 16)
"""Of each layer: projections, scores, values, the projection back, a norm, the feed-forward's two, a norm.
What norms divide by, standard deviations, is of the size of the weights that they multiply with."""

ENCODER_ROUNDINGS = rounding(3 * (SUMS / 3) ** 0.5)
"""Three standard deviations: a rounding of up to u is u / sqrt(3) in the mean square, and knows no other."""


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("activation", "eps"), [("gelu", 1e-5), ("relu", 0.1)])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_transformer_encoder(
    ours: Ours, norm_first: bool, activation: str, eps: float, training: bool
) -> None:
    options = {"norm_first": norm_first, "activation": activation, "layer_norm_eps": eps}
    result, want = encoded(ours, training, **options)
    torch.testing.assert_close(result, want, **ENCODER_ROUNDINGS)


@pytest.mark.parametrize("device", [torch.device("tpu")])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_another_activation_would_be_found(ours: Ours, norm_first: bool, activation: str) -> None:
    """GELU by tanh, up to 0.0005 off. In inference on tpu the fused layer, which is ours, asks for it."""
    other = functools.partial(F.gelu, approximate="tanh")
    wrong = mock.patch.object(fast_paths.F, activation, other)
    result, want = encoded(ours, False, while_running=wrong, norm_first=norm_first, activation=activation)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(result, want, **ENCODER_ROUNDINGS)


def test_one_program_on_both_devices(ours: Ours) -> None:
    """Tensors of one device after those of the other, in one context: results are where the tensors are."""
    tensors = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    want = torchs(*tensors, is_causal=True)
    with ours.standing_in():
        for device in ("cpu", "tpu", "cpu", "tpu"):
            result = torchs(*(t.to(device) for t in tensors), is_causal=True)
            assert result.device.type == device
            torch.testing.assert_close(result.cpu(), want, **rounding(32))
    assert ours.used() == (4 if ours.device.type == "cpu" else 2)


# torch.nn.attention.bias -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize(("rows", "columns"), [(4, 7), (7, 4), (5, 5)], ids=str)
@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
def test_causal_biases(
    ours: Ours, rows: int, columns: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(2, 3, n, 8) for n in (rows, columns, columns))
    bias = make(rows, columns)
    want = torchs(q.double(), k.double(), v.double(), bias._materialize())

    def never(*args: Any) -> torch.Tensor:
        raise AssertionError("the table of rows times columns was made")

    monkeypatch.setattr(type(bias), "_materialize", never)
    moved = [t.to(ours.device) for t in (q, k, v)]
    with ours.standing_in():
        result = torchs(*moved, bias)
    assert ours.used() == 1 and not result.isnan().any()
    torch.testing.assert_close(result.cpu().double(), want, **rounding(64))


def test_a_causal_bias_and_is_causal_is_torchs_error(ours: Ours) -> None:
    q = torch.randn(1, 2, 5, 8).to(ours.device)
    with ours.standing_in(), pytest.raises(ValueError, match="causal=True"):
        torchs(q, q, q, causal_lower_right(5, 5), is_causal=True)


def test_a_causal_bias_under_compile(ours: Ours) -> None:
    q, k, v = (torch.randn(2, 3, n, 8).to(ours.device) for n in (4, 7, 7))
    torch.compiler.reset()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torchs(q, k, v, causal_lower_right(4, 7))

    with ours.standing_in():
        want = attend(q, k, v)
        assert torch.equal(torch.compile(attend, backend="aot_eager")(q, k, v), want)


# torch.nn.attention.varlen -----------------------------------------------------------------------------

LENGTHS = ([3, 0, 5, 1], [4, 2, 5, 0])  # of queries and of keys, by sequence


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("used", [False, True])
def test_varlen(ours: Ours, window: tuple[int, int], kv_heads: int, used: bool) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q = torch.randn(sum(LENGTHS[0]), 4, 8, requires_grad=True)
    k, v = (torch.randn(sum(LENGTHS[1]), kv_heads, 8, requires_grad=True) for _ in range(2))
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in LENGTHS]
    valid = [max(n - 1, 0) for n in LENGTHS[1]] if used else LENGTHS[1]
    leaves = [t.detach().to(ours.device).requires_grad_() for t in (q, k, v)]
    with ours.standing_in():
        result, lse = varlen.varlen_attn(
            *leaves,
            *(s.to(ours.device) for s in starts),
            max(LENGTHS[0]),
            max(LENGTHS[1]),
            return_aux=varlen.AuxRequest(lse=True),
            window_size=window,
            enable_gqa=kv_heads != 4,
            seqused_k=torch.tensor(valid).int().to(ours.device) if used else None,
        )
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want, want_lse = [], []
    for i, keys in enumerate(valid):
        rows = slice(int(starts[0][i]), int(starts[0][i + 1]))
        columns = slice(int(starts[1][i]), int(starts[1][i]) + keys)
        place = torch.arange(LENGTHS[0][i])[:, None] + keys - LENGTHS[0][i]
        kv = torch.arange(keys)
        visible = torch.ones(LENGTHS[0][i], keys, dtype=torch.bool)
        if window[0] >= 0:
            visible &= kv >= place - window[0]
        if window[1] >= 0:
            visible &= kv <= place + window[1]
        heads = [t.repeat_interleave(4 // kv_heads, 1) for t in (wide[1][columns], wide[2][columns])]
        a, b, c = (t.transpose(0, 1) for t in (wide[0][rows], *heads))
        scores = (a @ b.mT / 8**0.5).masked_fill(~visible, -torch.inf)
        want.append(torchs(a, b, c, visible).transpose(0, 1))
        want_lse.append(scores.logsumexp(-1))
    expected = torch.cat(want)
    torch.testing.assert_close(result.detach().cpu().double(), expected.detach(), **rounding(64))
    torch.testing.assert_close(lse.detach().cpu().double(), torch.cat(want_lse, 1).detach(), **rounding(64))
    g = torch.randn(result.shape)
    got = torch.autograd.grad(result, leaves, g.to(ours.device))
    for gradient, right in zip(got, torch.autograd.grad(expected, wide, g.double()), strict=True):
        torch.testing.assert_close(gradient.cpu().double(), right, **rounding(256))


def test_pages_are_not_ours(ours: Ours) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, pages = torch.randn(3, 2, 8).to(ours.device), torch.randn(4, 2, 2, 8).to(ours.device)
    starts = torch.tensor([0, 3], dtype=torch.int32, device=ours.device)
    table = torch.zeros(1, 2, dtype=torch.int32, device=ours.device)
    with ours.standing_in(), pytest.raises(NotImplementedError):
        varlen.varlen_attn(q, pages, pages, starts, None, 3, 4, seqused_k=starts[1:], block_table=table)

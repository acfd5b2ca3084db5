"""`attn_implementation="tpu_splash"`: tiny random models give what transformers' "eager" gives."""

from __future__ import annotations

# Tests call with unpacked tensors and wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportUnusedExpression=false
import inspect
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import bridge  # isort: skip
import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils

from tpu_kernels import huggingface
from tpu_kernels.dropins.mask_tensor import MaskTensor

VOCABULARY, LENGTH, WINDOW = 61, 19, 6
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
HALF_OF_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

GEMMA = {"query_pre_attn_scalar": 8}
EXPERTS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mistral with a window": ("Mistral", {"sliding_window": WINDOW}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3 with windows": ("Qwen3", {"use_sliding_window": True, **HALF_OF_LAYERS}),
    "Gemma2, soft cap": ("Gemma2", {**HALF_OF_LAYERS, **GEMMA, "attn_logit_softcapping": 2.0}),
    "Gemma3": ("Gemma3Text", {**HALF_OF_LAYERS, **GEMMA}),
    "GPT-OSS, sinks": ("GptOss", {**HALF_OF_LAYERS, **EXPERTS}),
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}


@pytest.fixture(autouse=True)
def _ours() -> Iterator[None]:
    huggingface.register()
    with bridge.interpret("reference"):
        yield


def make(name: str, **more: Any) -> Any:
    kind, own = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **own, **more})
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))._from_config(
        config, attn_implementation="eager"
    )
    if kind == "GptOss":
        model.set_experts_implementation("eager")  # "grouped_mm" counts by an op that has no kernel on tpu
    for parameter in model.parameters():  # some start as zeros: sinks
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tokens(batch: int = 2) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def batches() -> dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Arguments of a model, and which of its results count."""
    all_count = torch.ones(2, LENGTH, dtype=torch.bool)
    padded = all_count.clone()
    padded[1, :5] = False
    restart = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])[None]
    return {
        "plain": ({"input_ids": tokens()}, all_count),
        "left-padded": ({"input_ids": tokens(), "attention_mask": padded.long()}, padded),
        "right-padded": ({"input_ids": tokens(), "attention_mask": padded.flip(1).long()}, padded.flip(1)),
        "packed": ({"input_ids": tokens(1), "position_ids": restart}, all_count[:1]),
    }


def tolerance(model: Any) -> float:
    """How far two correct float32 runs may lie apart, relative to the largest logit.

    The roundings of the sums that follow each other: a sum of n products in another order differs by about
    sqrt(n) of them.
    """
    sums = 2.0 * math.sqrt(LENGTH) * model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.Linear):
            sums += math.sqrt(module.in_features)
    return torch.finfo(torch.float32).eps * sums


def logits(model: Any, implementation: str, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**{n: t.to(model.device) for n, t in arguments.items()}).logits.float().cpu()


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, device: torch.device) -> None:
    model = make(name)
    given = batches()
    wanted = {kind: logits(model, "eager", arguments) for kind, (arguments, _) in given.items()}
    model.to(device)
    for kind, (arguments, counts) in given.items():
        got, want = logits(model, "tpu_splash", arguments)[counts], wanted[kind][counts]
        worst = (got - want).abs().max() / want.abs().max()
        assert worst <= tolerance(model), (kind, float(worst), tolerance(model))


def test_logits_in_the_kernel(device: torch.device) -> None:
    model = make("Gemma2, soft cap")
    arguments, counts = batches()["left-padded"]
    want = logits(model, "eager", arguments)[counts]
    with bridge.interpret("fast"):
        got = logits(model.to(device), "tpu_splash", arguments)[counts]
    assert (got - want).abs().max() <= tolerance(model) * want.abs().max()


@pytest.mark.parametrize("name", ["Llama", "GPT-OSS, sinks"])
def test_the_future_does_not_matter(name: str, device: torch.device) -> None:
    model = make(name).to(device)
    ids = tokens()
    changed = ids.clone()
    changed[:, 11:] = 1 + changed[:, 11:] % (VOCABULARY - 1)
    before, after = (logits(model, "tpu_splash", {"input_ids": t}) for t in (ids, changed))
    assert torch.equal(before[:, :11], after[:, :11])
    assert not torch.equal(before[:, 11:], after[:, 11:])


GENERATING = ("Llama", "Mistral with a window", "Gemma3", "GPT-OSS, sinks")


@pytest.mark.parametrize(
    ("name", "cache", "device"),
    [
        *((name, "dynamic", device) for name in GENERATING for device in ("cpu", "tpu")),
        *((name, "static", "cpu") for name in GENERATING),
        # Transformers compiles what has a static cache, for tpu by the default backend.
        ("Llama", "static", "tpu"),
        *(pytest.param(name, "static", "tpu", marks=pytest.mark.slow) for name in GENERATING[1:]),
    ],
    indirect=["device"],
)
def test_generation(name: str, cache: str, device: torch.device) -> None:
    model = make(name)
    arguments, _ = batches()["left-padded"]
    found = []
    for implementation in ("eager", "tpu_splash"):
        model.set_attn_implementation(implementation)
        if implementation == "tpu_splash":
            model.to(device)
        moved = {n: t.to(device if implementation == "tpu_splash" else "cpu") for n, t in arguments.items()}
        result = model.generate(
            **moved, max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation=cache
        )
        found.append(result.cpu())
    assert found[0].shape == (2, LENGTH + 4)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("Llama", False),
        ("Gemma3", False),
        pytest.param("Llama", True, marks=pytest.mark.slow),
        pytest.param("Mistral with a window", True, marks=pytest.mark.slow),
    ],
)
def test_several_tokens_after_a_static_cache(name: str, padded: bool, device: torch.device) -> None:
    """Prefill, one token, three tokens. The cache counts its tokens in place, before the layers attend."""
    model, ids = make(name), tokens()
    attention_mask = batches()["left-padded"][0]["attention_mask"] if padded else None
    names = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in names else "past_key_values"  # its older name
    found = []
    for implementation, where in (("eager", torch.device("cpu")), ("tpu_splash", device)):
        model.set_attn_implementation(implementation)
        model.to(where)
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 3)
        steps = []
        for first, last in ((0, 9), (9, 10), (10, 13), (13, LENGTH)):
            seen = None if attention_mask is None else attention_mask[:, :last].to(where)
            with torch.no_grad():
                result = model(ids[:, first:last].to(where), attention_mask=seen, **{argument: cache})
            steps.append(result.logits.float().cpu())
        found.append(torch.cat(steps, 1)[:, 5:])  # what padding predicts does not count
    assert (found[1] - found[0]).abs().max() <= tolerance(model) * found[0].abs().max()


def test_a_mask_does_not_change_with_the_tensors_it_was_made_of(device: torch.device) -> None:
    offset = torch.tensor(4, device=device)
    padding = torch.ones(1, 8, dtype=torch.bool, device=device)
    mask = huggingface.attention_mask(1, 3, 8, q_offset=offset, attention_mask=padding, device=device)
    assert isinstance(mask, MaskTensor)
    offset.add_(1)
    padding[:, 2] = False
    seen = torch.arange(8) <= torch.arange(4, 7)[:, None]
    assert torch.equal(mask.cpu() | False, seen[None, None])


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("Gemma2, soft cap", "tpu"),
        ("GPT-OSS, sinks", "cpu"),
        pytest.param("Gemma2, soft cap", "cpu", marks=pytest.mark.slow),
        pytest.param("GPT-OSS, sinks", "tpu", marks=pytest.mark.slow),
    ],
    indirect=["device"],
)
def test_gradients(name: str, device: torch.device) -> None:
    arguments, counts = batches()["left-padded"]
    # What padding predicts does not count: eager lets it see everything, and we nothing.
    after_padding = torch.nn.functional.pad(~counts, (1, -1))
    labels = torch.where(counts & ~after_padding, arguments["input_ids"], -100)
    model = make(name)
    gradients = []
    for implementation in ("eager", "tpu_splash"):
        model.set_attn_implementation(implementation)
        if implementation == "tpu_splash":
            model.to(device)
        model.zero_grad()
        model(**{n: t.to(model.device) for n, t in {**arguments, "labels": labels}.items()}).loss.backward()
        gradients.append(
            # A copy: moving the model moves its gradients in place.
            {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert any("sinks" in n for n in gradients[0]) == ("sinks" in name)
    for parameter, want in gradients[0].items():
        got = gradients[1][parameter]
        # Backward has as many sums as forward, and starts from what forward gave.
        assert (got - want).abs().max() <= 4 * tolerance(model) * want.abs().max(), parameter


def test_dropout_in_training(device: torch.device) -> None:
    model = make("Llama", attention_dropout=0.5).to(device)
    arguments, _ = batches()["left-padded"]
    exact = logits(model, "tpu_splash", arguments)
    model.train()

    def trained(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return logits(model, "tpu_splash", arguments)

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))
    model.eval()
    assert torch.equal(logits(model, "tpu_splash", arguments), exact)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("Llama", "cpu"),
        ("Gemma2, soft cap", "tpu"),
        pytest.param("Llama", "tpu", marks=pytest.mark.slow),
        pytest.param("Gemma2, soft cap", "cpu", marks=pytest.mark.slow),
    ],
    indirect=["device"],
)
def test_compiled(name: str, device: torch.device) -> None:
    torch.compiler.reset()  # each model compiles the functions that all share, and the limit is 8
    model = make(name)
    arguments, counts = batches()["left-padded"]
    want = logits(model, "eager", arguments)[counts]
    model.to(device)
    model.set_attn_implementation("tpu_splash")
    backend = "aot_eager" if device.type == "cpu" else "tpu"  # inductor's work begins after ours is done
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        got = compiled(**{n: t.to(device) for n, t in arguments.items()}).logits.cpu()[counts]
    assert (got - want).abs().max() <= tolerance(model) * want.abs().max()


def test_encoder_and_decoder_with_position_bias(device: torch.device) -> None:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    arguments, _ = batches()["right-padded"]
    arguments = {**arguments, "decoder_input_ids": tokens()[:, :7]}
    want = logits(model, "eager", arguments)
    got = logits(model.to(device), "tpu_splash", arguments)
    assert (got - want).abs().max() <= 4 * tolerance(model) * want.abs().max()


# Masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(WINDOW),
        masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])),
        masking_utils.packed_sequence_mask_function(torch.arange(24).expand(2, 24) // 9),
        masking_utils.blockwise_overlay(torch.arange(24).expand(2, 24) // 5 - 1),
    ],
)
@pytest.mark.parametrize("offset", [0, 5, torch.tensor(5)], ids=["start", "later", "later, a tensor"])
def test_masks_are_functions_until_somebody_asks(function: Any, offset: Any) -> None:
    padding = torch.rand(2, 24) > 0.3
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "q_length": 7,
        "kv_length": 12,
        "q_offset": offset,
        "kv_offset": 0,
        "mask_function": function,
        "attention_mask": padding,
    }
    made = huggingface.attention_mask(**arguments)
    want = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert type(made) is MaskTensor and made.shape == want.shape and made.dtype == torch.bool
    assert torch.equal(made.table(), want)
    assert torch.equal(made[..., 1:] & True, want[..., 1:])


def test_a_function_that_is_no_expression_gives_a_table() -> None:
    table = torch.rand(7, 3), torch.rand(12, 3)

    def similar(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (table[0][q] * table[1][kv]).sum(-1) > 0.5

    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 7, "kv_length": 12, "mask_function": similar}
    made = huggingface.attention_mask(**arguments, use_vmap=True)
    assert type(made) is torch.Tensor
    assert torch.equal(made[0, 0], table[0] @ table[1].T > 0.5)


@pytest.mark.parametrize("kind", ["bool", "float", "block mask"])
def test_masks_made_by_the_user(kind: str, device: torch.device) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (torch.randn(2, 4, n, 8) for n in (7, 12, 12))
    visible = torch.rand(2, 1, 7, 12) > 0.4
    mask: Any = visible.to(device)
    if kind == "float":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    elif kind == "block mask":
        seen = visible.to(device)
        mask = create_block_mask(
            lambda b, h, q, kv: seen[b, 0, q, kv], 2, None, 7, 12, device=device, BLOCK_SIZE=4
        )
    layer = nn.Module()
    output, weights = huggingface.attention(layer, q.to(device), k.to(device), v.to(device), mask)
    want = nn.functional.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(output.cpu(), want, atol=1e-5, rtol=1e-5)


def test_without_a_mask_layers_say_what_is_causal() -> None:
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    layer = nn.Module()
    for is_causal in (True, False):
        layer.is_causal = is_causal  # type: ignore[assignment]
        output, _ = huggingface.attention(layer, q, k, v, None)
        want = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)
        torch.testing.assert_close(output, want, atol=1e-5, rtol=1e-5)
    # A decoding step: one query, at the end.
    output, _ = huggingface.attention(layer, q[:, :, :1], k, v, None, is_causal=True)
    torch.testing.assert_close(
        output,
        nn.functional.scaled_dot_product_attention(q[:, :, :1], k, v).transpose(1, 2),
        atol=1e-5,
        rtol=1e-5,
    )


# Registration ------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import bridge, torch, tpu_kernels
from tpu_kernels import huggingface
from tpu_kernels.dropins.install import install, uninstall

def known():
    from transformers import AttentionInterface, AttentionMaskInterface
    return ["tpu_splash" in i._global_mapping for i in (AttentionInterface, AttentionMaskInterface)]

install()
assert "transformers" not in sys.modules
import transformers.modeling_utils
assert known() == [True, True]
uninstall()
assert known() == [False, False]
huggingface.register()
install()
uninstall()
assert known() == [True, True]
"""


def test_install_registers_lazily() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr

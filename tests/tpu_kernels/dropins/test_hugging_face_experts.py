"""Experts of Hugging Face models by grouped matmul: tiny random models give what "eager" gives."""

from __future__ import annotations

import contextlib
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
from transformers.integrations import moe

from tpu_kernels import huggingface
from tpu_kernels.dropins import huggingface_experts
from tpu_kernels.dropins.install import install, overrides, uninstall

LAYERS, EXPERTS, CHOICES = 2, 4, 2
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_experts_per_tok": CHOICES,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
    "GptOss": {  # biases, transposed matrices, and a gate of its own
        "num_local_experts": EXPERTS,
        "layer_types": ["full_attention"] * LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
IMPLEMENTATIONS = ("tpu_grouped_matmul", "grouped_mm")
TOKENS = torch.randint(1, 61, (2, 19), generator=torch.Generator().manual_seed(1))
MULTIPLICATIONS = 2 * LAYERS


@pytest.fixture(autouse=True)
def _ours() -> Iterator[None]:
    install()
    with bridge.interpret("reference"):
        yield
    uninstall()


def standing_in(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return overrides() if device.type == "cpu" else contextlib.nullcontext()


def make(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    for parameter in model.parameters():  # some start as zeros
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tolerance(model: Any) -> float:
    """How far two correct float32 runs may lie apart, relative to the largest number.

    The roundings of the sums that follow each other: a sum of n products in another order differs by about
    sqrt(n) of them.
    """
    sums = 2.0 * math.sqrt(TOKENS.shape[1]) * LAYERS
    for module in model.modules():
        if isinstance(module, nn.Linear):
            sums += math.sqrt(module.in_features)
        elif hasattr(module, "down_proj") and isinstance(module.down_proj, nn.Parameter):
            sums += sum(map(math.sqrt, module.down_proj.shape[1:])) + math.sqrt(CHOICES)
    return torch.finfo(torch.float32).eps * sums


def run(model: Any, call: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of all parameters that get one."""
    model.zero_grad()
    ids = TOKENS.to(model.device)
    result = (model if call is None else call)(input_ids=ids, labels=ids)
    result.loss.backward()
    gradients = {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
    return result.logits.detach().cpu(), gradients


def check(model: Any, found: Any, wanted: Any) -> None:
    assert (found[0] - wanted[0]).abs().max() <= tolerance(model) * wanted[0].abs().max()
    assert found[1].keys() == wanted[1].keys()
    assert any("experts.down_proj" in name for name in found[1])
    for name, want in wanted[1].items():
        # Backward has as many sums as forward, and starts from what forward gave.
        assert (found[1][name] - want).abs().max() <= 4 * tolerance(model) * want.abs().max(), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str, implementation: str, device: torch.device) -> None:
    model = make(name)
    wanted = run(model)
    model.to(device).set_experts_implementation(implementation)
    with standing_in(device):
        check(model, run(model), wanted)
        before = bridge.stats().calls
        with torch.no_grad():
            model(input_ids=TOKENS.to(device))
    assert bridge.stats().calls - before == MULTIPLICATIONS


@pytest.mark.parametrize(
    ("name", "implementation", "device"),
    [
        ("Mixtral", "tpu_grouped_matmul", "tpu"),
        ("GptOss", "grouped_mm", "cpu"),
        *(
            pytest.param(name, implementation, device, marks=pytest.mark.slow)
            for name in MODELS
            for implementation in IMPLEMENTATIONS
            for device in ("cpu", "tpu")
        ),
    ],
    indirect=["device"],
)
def test_compiled(name: str, implementation: str, device: torch.device) -> None:
    """In float32, for which transformers has an op of its own in place of torch's, on cpu."""
    torch.compiler.reset()  # each model compiles the functions that all share, and the limit is 8
    model = make(name)
    wanted = run(model)
    model.to(device).set_experts_implementation(implementation)
    backend = "aot_eager" if device.type == "cpu" else "tpu"  # inductor's work begins after ours is done
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    before = bridge.stats().calls
    with standing_in(device):
        check(model, run(model, compiled), wanted)
    assert bridge.stats().calls - before == 2 * MULTIPLICATIONS  # one program has both gradients


@pytest.mark.parametrize("device", ["tpu", pytest.param("cpu", marks=pytest.mark.slow)], indirect=True)
def test_in_the_kernel(device: torch.device) -> None:
    model = make("GptOss")
    wanted = run(model)
    model.to(device).set_experts_implementation("tpu_grouped_matmul")
    with bridge.interpret("fast"):
        check(model, run(model), wanted)


# Layers of every kind ----------------------------------------------------------------------------------


class Layer(nn.Module):
    """Experts as transformers' classes have them."""

    def __init__(self, gate: bool, bias: bool, transposed: bool, norm: bool, parallel: bool) -> None:
        super().__init__()
        hidden, inner, self.num_experts = 6, 5, EXPERTS
        self.has_gate, self.has_bias, self.is_transposed = gate, bias, transposed
        self.has_post_expert_norm, self._is_expert_parallel = norm, parallel
        self.act_fn = nn.SiLU()
        self.post_expert_norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.post_expert_norm.bias)
        up = 2 * inner if gate else inner
        for name, rows, columns in (("gate_up" if gate else "up", hidden, up), ("down", inner, hidden)):
            shape = (rows, columns) if transposed else (columns, rows)
            setattr(self, f"{name}_proj", nn.Parameter(torch.randn(EXPERTS, *shape)))
            if bias:
                setattr(self, f"{name}_proj_bias", nn.Parameter(torch.randn(EXPERTS, columns)))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return (up + 1) * self.act_fn(gate)

    def one_by_one(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same, token by token."""

        def linear(row: torch.Tensor, name: str, expert: int) -> torch.Tensor:
            weight = getattr(self, f"{name}_proj")[expert]
            row = row @ (weight if self.is_transposed else weight.T)
            return row + getattr(self, f"{name}_proj_bias")[expert] if self.has_bias else row

        rows = []
        for token, row in enumerate(x):
            total = torch.zeros_like(row)
            for choice, expert in enumerate(index[token].tolist()):
                if expert >= EXPERTS:
                    continue
                inner = linear(row, "gate_up" if self.has_gate else "up", expert)
                inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
                out = linear(inner, "down", expert)
                out = self.post_expert_norm(out) if self.has_post_expert_norm else out
                total = total + weights[token, choice] * out
            rows.append(total)
        return torch.stack(rows)


INDEX = torch.tensor([[0, 3], [3, 1], [3, 0], [0, 3], [1, 0], [3, 1], [0, 1]])
"""Expert 2 gets nothing."""
OTHERS = INDEX.where(torch.arange(14).view(7, 2) % 3 > 0, EXPERTS)
"""Some are experts of another rank."""


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"gate": True},
        {"bias": True},
        {"norm": True},
        {"gate": True, "bias": True, "transposed": True},
        {"gate": True, "bias": True, "norm": True, "parallel": True},
        {"transposed": True, "parallel": True},
    ],
    ids=lambda kind: " ".join(kind) or "plain",
)
def test_layers(kind: dict[str, bool], device: torch.device) -> None:
    layer = Layer(**{n: n in kind for n in ("gate", "bias", "transposed", "norm", "parallel")})
    index = OTHERS if "parallel" in kind else INDEX
    x, weights = torch.randn(7, 6), torch.rand(7, CHOICES)
    results = []
    for dtype, where, function in (
        (torch.float64, torch.device("cpu"), layer.one_by_one),
        (torch.float32, device, lambda *given: huggingface_experts.experts(layer, *given)),
    ):
        layer.to(where, dtype)
        leaves = [t.to(where, dtype).requires_grad_() for t in (x, weights)]
        output = function(leaves[0], index.to(where), leaves[1])
        used = [*leaves, *(p for n, p in layer.named_parameters() if "norm" in kind or "norm" not in n)]
        gradients = torch.autograd.grad(output.square().sum(), used)
        results.append([t.detach().cpu().double() for t in (output, *gradients)])
    for want, got in zip(*results, strict=True):
        # Some ten sums of at most 14 terms after one another.
        assert (got - want).abs().max() <= 10 * 14 * torch.finfo(torch.float32).eps * want.abs().max()


def test_other_choices_compile_nothing(device: torch.device) -> None:
    layer = Layer(True, False, False, False, False).to(device)
    x, weights = torch.randn(7, 6, device=device), torch.rand(7, CHOICES, device=device)
    huggingface_experts.experts(layer, x, INDEX.to(device), weights)
    before = bridge.stats().compiles
    huggingface_experts.experts(layer, x, INDEX.flip(0).clamp(1).to(device), weights)
    assert bridge.stats().compiles == before


def test_rows_of_another_dtype_than_the_matrices(device: torch.device) -> None:
    """Under autocast, a norm before the experts gives float32."""
    layer = Layer(True, True, False, False, False).to(device, torch.bfloat16)
    x, weights = torch.randn(7, 6, device=device), torch.rand(7, CHOICES, device=device)
    output = huggingface_experts.experts(layer, x, INDEX.to(device), weights)
    want = layer.cpu().double().one_by_one(x.cpu().bfloat16().double(), INDEX, weights.cpu().double())
    assert output.dtype == torch.float32
    # bfloat16 rows between the two products, and its result.
    assert (output.cpu() - want).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * want.abs().max()


# Registration ------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import bridge, torch, tpu_kernels
from tpu_kernels import huggingface
from tpu_kernels.dropins.install import install, uninstall

def known():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    return "tpu_grouped_matmul" in ALL_EXPERTS_FUNCTIONS

install()
assert "transformers" not in sys.modules
import transformers.modeling_utils
assert known()
uninstall()
assert not known()
huggingface.register()
install()
uninstall()
assert known()
"""


@pytest.mark.parametrize(("name", "inside"), [("Mixtral", True), ("Qwen3Moe", True), ("GptOss", False)])
def test_swiglu_is_inside_of_the_kernel(name: str, inside: bool) -> None:
    """transformers' own rule is; a model's own is not, and stays the model's."""
    huggingface.register()
    found = [m for m in make(name).modules() if hasattr(m, "gate_up_proj")]
    assert len(found) == LAYERS and all(huggingface_experts._is_swiglu(m) is inside for m in found)


def test_install_registers_lazily() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_without_an_interface_for_experts_attention_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in older versions."""
    monkeypatch.delattr(moe, "ExpertsInterface")
    huggingface.register()
    assert "tpu_splash" in transformers.AttentionInterface._global_mapping
    huggingface_experts.unregister()
    assert "tpu_grouped_matmul" in moe.ALL_EXPERTS_FUNCTIONS

"""Train a small language model with mixture-of-experts layers on real text, and compare with a loop of
experts in plain torch.

The same model, from the same weights and on the same bytes of Python's own source code, is trained four
times: with a loop over its 8 experts, in float32 and in float64, and on `tpu` with `tpu_kernels.moe_layer`,
eagerly and compiled into one graph. Each token goes to 2 experts. The float64 run shows how far rounding
takes torch's float32 run away from the truth. Ours must stay as close to it, up to a factor; if not, or if
nothing was learnt, the exit status is 1.

    python examples/train_moe.py
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import tpu_kernels

WIDTH, HEADS, LAYERS = 64, 2, 2
EXPERTS, CHOSEN, HIDDEN = 8, 2, 48
SEQUENCE, BATCH, STEPS = 64, 4, 20
LEARNING_RATE = 0.3
SEED = 8
"""One with which no token's second and third expert are so close that rounding could exchange them."""
FACTOR = 8
"""How much farther than torch's float32 run ours may be from the float64 run: both are sums of many
roundings, in another order, so their distances are alike but not equal."""


class Experts(nn.Module):
    """[..., WIDTH] -> [..., WIDTH]: each token through the gated MLPs of its experts, weighted."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)
        self.nearest = float("inf")  # of all tokens, how near second and third expert were

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "loop":
            return self.loop(x.flatten(0, -2)).view_as(x)
        return tpu_kernels.moe_layer(
            x, self.router.weight, self.gate, self.up, self.down, k=CHOSEN, transpose_weights=True
        )

    def loop(self, tokens: torch.Tensor) -> torch.Tensor:
        best, chosen = self.router(tokens).topk(CHOSEN + 1)
        self.nearest = min(self.nearest, (best[:, -2] - best[:, -1]).min().item())
        weights, chosen = best[:, :CHOSEN].softmax(dim=-1), chosen[:, :CHOSEN]
        out = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            token, choice = torch.where(chosen == expert)
            rows = tokens[token]
            hidden = F.silu(rows @ self.gate[expert].T) * (rows @ self.up[expert].T)
            out = out.index_add(0, token, hidden @ self.down[expert].T * weights[token, choice, None])
        return out


class Layer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.attention_norm, self.experts_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, sequence, WIDTH]
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, HEADS, sequence, WIDTH // HEADS]
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.experts(self.experts_norm(x))


class ByteModel(nn.Module):
    """Logits of the next byte at every position: [batch, sequence] -> [batch, sequence, 256]."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.Sequential(*(Layer(how) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.to_logits = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.to_logits(self.layers(self.bytes(text) + self.positions.weight))


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small byte model with mixture-of-experts layers.")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    batches = [random_windows(text) for _ in range(options.steps)]
    model, ours = ByteModel("loop"), ByteModel("moe_layer")
    ours.load_state_dict(model.state_dict())
    ours = ours.to("tpu")
    print(
        f"  text: Python's argparse.py, {len(text):,} bytes; {options.steps} steps of {BATCH} x {SEQUENCE}; "
        f"{EXPERTS} experts, {CHOSEN} for each token"
    )

    wide = copy.deepcopy(model).double()
    exact = train("cpu, loop of experts, float64", wide, wide, batches)
    plain = train("cpu, loop of experts, float32", model, model, batches)
    tpu_kernels.install()
    once = copy.deepcopy(ours)
    eager = train("tpu, moe_layer, float32", ours, ours, batches)
    compiled = train("tpu, moe_layer, compiled", once, torch.compile(once, fullgraph=True), batches)

    print("\n  step     float64       loop  moe_layer   compiled   (loss; differences from the first)")
    for step in sorted({*range(0, options.steps, 5), options.steps - 1}):
        away = (losses[step] - exact[step] for losses in (plain, eager, compiled))
        print(f"  {step:4d}  {exact[step]:10.6f}" + "".join(f" {difference:10.1e}" for difference in away))
    rounding, *differences = (
        max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in (plain, eager, compiled)
    )
    nearest = min(layer.experts.nearest for layer in wide.layers if isinstance(layer, Layer))
    print(f"\n  farthest from float64: loop {rounding:.1e}, moe_layer {max(differences):.1e}")
    print(f"  nearest that a token's second and third expert came to each other: {nearest:.1e}")
    learnt = exact[-1] < exact[0] - 1
    passed = learnt and max(differences) <= FACTOR * rounding
    verdict = "agrees" if passed else "FAILED"
    print(f"  the same loss curve to rounding, from {eager[0]:.3f} to {eager[-1]:.3f}: {verdict}")
    return 0 if passed else 1


def train(what: str, model: ByteModel, call: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """The loss of each step. `call` computes the model."""
    device = model.to_logits.weight.device
    # Plain gradient descent: what divides by the gradient's size would make large differences of rounding.
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    started = time.perf_counter()
    losses = []
    for batch in batches:
        windows = batch.to(device)
        loss = F.cross_entropy(call(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"  {what:<32} {time.perf_counter() - started:5.1f} s")
    return losses


def random_windows(text: torch.Tensor) -> torch.Tensor:
    """BATCH pieces of the text, [BATCH, SEQUENCE + 1]."""
    starts = torch.randint(len(text) - SEQUENCE, (BATCH, 1))
    return text[starts + torch.arange(SEQUENCE + 1)]


if __name__ == "__main__":
    sys.exit(main())

"""Train a small language model on real text with splash attention, forward and backward, and compare with
torch.

The same model, from the same weights and on the same bytes of Python's own source code, is trained three
times: on `tpu`, where `tpu_kernels.install()` lets our kernel compute `F.scaled_dot_product_attention`, and
with plain PyTorch in float32 and in float64. The float64 run shows how far rounding takes torch's float32
run away from the truth. Ours must stay as close to it, up to a factor; if not, or if nothing was learnt,
the exit status is 1.

    python examples/train_with_splash.py
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
SEQUENCE, BATCH, STEPS = 96, 4, 30
LEARNING_RATE = 0.3
FACTOR = 8
"""How much farther than torch's float32 run ours may be from the float64 run: both are sums of many
roundings, in another order, so their distances are alike but not equal."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, sequence, WIDTH]
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, HEADS, sequence, WIDTH // HEADS]
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class ByteModel(nn.Module):
    """Logits of the next byte at every position: [batch, sequence] -> [batch, sequence, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.to_logits = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.to_logits(self.layers(self.bytes(text) + self.positions.weight))


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small byte model with splash attention.")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    batches = [random_windows(text) for _ in range(options.steps)]
    model = ByteModel()
    print(f"  text: Python's argparse.py, {len(text):,} bytes; {options.steps} steps of {BATCH} x {SEQUENCE}")

    exact = train("cpu, torch, float64", copy.deepcopy(model).double(), batches)
    plain = train("cpu, torch, float32", copy.deepcopy(model), batches)
    tpu_kernels.install()
    ours = train("tpu, splash attention, float32", copy.deepcopy(model).to("tpu"), batches)

    print("\n  step     float64      torch     splash   (loss; the last two as differences from the first)")
    for step in sorted({*range(0, options.steps, 5), options.steps - 1}):
        away = (losses[step] - exact[step] for losses in (plain, ours))
        print(f"  {step:4d}  {exact[step]:10.6f}" + "".join(f" {difference:10.1e}" for difference in away))
    rounding = max(abs(a - b) for a, b in zip(plain, exact, strict=True))
    difference = max(abs(a - b) for a, b in zip(ours, exact, strict=True))
    print(f"\n  farthest from float64: torch {rounding:.1e}, splash {difference:.1e}")
    learnt = exact[-1] < exact[0] - 1
    passed = learnt and difference <= FACTOR * rounding
    verdict = "agrees" if passed else "FAILED"
    print(f"  the same loss curve to rounding, from {ours[0]:.3f} to {ours[-1]:.3f}: {verdict}")
    return 0 if passed else 1


def train(what: str, model: ByteModel, batches: list[torch.Tensor]) -> list[float]:
    """The loss of each step."""
    device = model.to_logits.weight.device
    # Plain gradient descent: what divides by the gradient's size would make large differences of rounding.
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    started = time.perf_counter()
    losses = []
    for batch in batches:
        windows = batch.to(device)
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
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

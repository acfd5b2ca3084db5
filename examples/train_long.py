"""Train a small language model on sequences that lie on four ranks, and compare with one rank.

The same model, from the same weights and on the same bytes of Python's own source code, is trained three
times: with plain PyTorch on one rank, in float32 and in float64, and on four ranks on `tpu`, each with a
quarter of every sequence. In `tpu_kernels.context_parallel`, `F.scaled_dot_product_attention` is ring
attention, so that each position sees all before it; each rank's gradients are those of its positions, and are
added up. The float64 run shows how far rounding takes torch's float32 run away from the truth. Ours must stay
as close to it, up to a factor; if not, or if nothing was learnt, the exit status is 1.

    python examples/train_long.py
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bridge import get_pallas_mesh
from bridge.ranks import run
from tpu_kernels import context_parallel

T = TypeVar("T")

RANKS = 4
WIDTH, HEADS, LAYERS = 32, 2, 2
SEQUENCE, BATCH, STEPS = 190, 2, 8
"""Of 190 positions each rank has 48: there are two more, padding, which the loss ignores."""
LEARNING_RATE = 0.3
IGNORED = -100
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, positions of this rank, WIDTH]
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, HEADS, positions, WIDTH // HEADS]
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class ByteModel(nn.Module):
    """Logits of the next byte: [batch, n] and [n] -> [batch, n, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.to_logits = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.to_logits(self.layers(self.bytes(text) + self.places(positions)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small byte model on sequences on four ranks.")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    batches = [random_windows(text) for _ in range(options.steps)]
    model = ByteModel()
    print(f"  text: Python's argparse.py, {len(text):,} bytes; {options.steps} steps of {BATCH} x {SEQUENCE}")

    exact = timed("1 rank, cpu, float64", lambda: train(copy.deepcopy(model).double(), batches))
    plain = timed("1 rank, cpu, float32", lambda: train(copy.deepcopy(model), batches))
    # Ranks that are threads have all objects in common, so each trains a copy.
    on_ranks = timed(
        f"{RANKS} ranks, tpu, ring attention, float32",
        lambda: run(lambda: train_part(copy.deepcopy(model).to("tpu"), batches), RANKS),
    )
    ours = on_ranks[0]

    print("\n  step     float64     1 rank    4 ranks   (loss; the last two as differences from the first)")
    for step in range(options.steps):
        away = (losses[step] - exact[step] for losses in (plain, ours))
        print(f"  {step:4d}  {exact[step]:10.6f}" + "".join(f" {difference:10.1e}" for difference in away))
    # At least that of the loss itself, a float32.
    rounding = max(torch.finfo(torch.float32).eps / 2 * exact[0], farthest(plain, exact))
    difference = farthest(ours, exact)
    print(f"\n  farthest from float64: 1 rank {rounding:.1e}, {RANKS} ranks {difference:.1e}")
    learnt = exact[-1] < exact[0] - 1
    same = all(losses == ours for losses in on_ranks)
    passed = learnt and same and difference <= FACTOR * rounding
    verdict = "agrees" if passed else "FAILED"
    print(f"  the same loss curve to rounding, from {ours[0]:.3f} to {ours[-1]:.3f}: {verdict}")
    return 0 if passed else 1


def train(model: ByteModel, batches: list[torch.Tensor]) -> list[float]:
    """The loss of each step, on one rank."""
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    positions = torch.arange(SEQUENCE)
    losses = []
    for batch in batches:
        loss = F.cross_entropy(model(batch[:, :-1], positions).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def train_part(model: ByteModel, batches: list[torch.Tensor]) -> list[float]:
    """The same on each of several ranks, with its part of every sequence."""
    mesh = get_pallas_mesh("sequence")
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches:
        batch = batch.to("tpu")
        text, labels, positions = batch[:, :-1], batch[:, 1:], torch.arange(SEQUENCE, device="tpu")
        optimiser.zero_grad()
        with context_parallel(
            mesh,
            "sequence",
            buffers=[text, labels, positions],
            buffer_seq_dims=[1, 1, 0],
            buffer_fills=[0, IGNORED, 0],
        ):
            logits = model(text, positions).flatten(0, 1)
            # This rank's share of the mean over all positions.
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
            loss = loss / (BATCH * SEQUENCE)
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimiser.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def timed(what: str, function: Callable[[], T]) -> T:
    started = time.perf_counter()
    result = function()
    print(f"  {what:<40} {time.perf_counter() - started:5.1f} s")
    return result


def farthest(losses: list[float], exact: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, exact, strict=True))


def random_windows(text: torch.Tensor) -> torch.Tensor:
    """BATCH pieces of the text, [BATCH, SEQUENCE + 1]."""
    starts = torch.randint(len(text) - SEQUENCE, (BATCH, 1))
    return text[starts + torch.arange(SEQUENCE + 1)]


if __name__ == "__main__":
    sys.exit(main())

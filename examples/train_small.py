"""Train a small language model on `device="tpu"`, with a Pallas kernel of our own in every layer.

The model predicts the next byte of Python's own source code. Its feed-forward gate, `silu(gate) * up`, is a
Pallas kernel; so is its gradient, joined to it with `jax.custom_vjp`, which the bridge respects. After a few
seconds the model must know more than how often each byte occurs; if not, the exit status is 1.

    python examples/train_small.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
import torch
import torch.nn.functional as F
from jax.experimental import pallas as pl
from torch import nn

import tpu_kernels

WIDTH, HEADS, LAYERS = 64, 4, 2
SEQUENCE, BATCH, STEPS = 64, 16, 60
TILE_ROWS = 128

# ------------------------------------------------------------------------------ the kernel, in JAX


@jax.custom_vjp
def gate_in_jax(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, for two arrays [rows, cols]."""
    return launch(gate_body, gate, up, outputs=1)[0]


def gate_fwd(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return gate_in_jax(gate, up), (gate, up)


def gate_bwd(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, ...]:
    return launch(gate_gradient_body, *saved, g, outputs=2)


gate_in_jax.defvjp(gate_fwd, gate_bwd)


def launch(body, *inputs: jax.Array, outputs: int) -> tuple[jax.Array, ...]:
    """Runs `body` on blocks of TILE_ROWS whole rows; the inputs and the outputs have one shape."""
    rows, cols = inputs[0].shape
    block = pl.BlockSpec((TILE_ROWS, cols), lambda row_block: (row_block, 0))
    shape = jax.ShapeDtypeStruct((rows, cols), inputs[0].dtype)
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, TILE_ROWS),),
        in_specs=[block] * len(inputs),
        out_specs=[block] * outputs,
        out_shape=[shape] * outputs,
    )(*inputs)


def gate_body(gate_ref, up_ref, out_ref) -> None:
    gate = gate_ref[...]
    out_ref[...] = gate * jax.nn.sigmoid(gate) * up_ref[...]


def gate_gradient_body(gate_ref, up_ref, g_ref, d_gate_ref, d_up_ref) -> None:
    gate, g = gate_ref[...], g_ref[...]
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_gate_ref[...] = g * up_ref[...] * (sigmoid + silu * (1 - sigmoid))
    d_up_ref[...] = g * silu


# --------------------------------------------------------------------------- the model, in PyTorch


@torch.tpu.pallas.jax_op("example::gate")
def gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate_in_jax(gate, up)


class RMSNorm(nn.Module):
    """The norm from the catalog; it has kernels for both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tpu_kernels.rms_norm(x, (WIDTH,), self.weight)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = RMSNorm(), RMSNorm()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_and_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, sequence, WIDTH]
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, HEADS, sequence, WIDTH // HEADS]
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gates, ups = self.gate_and_up(self.feed_forward_norm(x)).flatten(0, 1).chunk(2, dim=-1)
        return x + self.down(gate(gates, ups)).view_as(x)


class ByteModel(nn.Module):
    """Logits of the next byte at every position: [batch, sequence] -> [batch, sequence, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)), RMSNorm())
        self.to_logits = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.to_logits(self.layers(self.bytes(text) + self.positions.weight))


# ------------------------------------------------------------------------------------ the training


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small byte model with a Pallas kernel inside.")
    parser.add_argument("--device", default="tpu", help="where tensors live (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    goal = entropy_of_bytes(text)
    model = ByteModel().to(options.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    size = sum(p.numel() for p in model.parameters())
    where = torch.tpu.get_device_name() if options.device == "tpu" else options.device
    print(f"  {size:,} parameters on {where}; text: Python's argparse.py, {len(text):,} bytes")

    losses = []
    start = time.perf_counter()
    for step in range(options.steps):
        inputs, targets = random_windows(text, options.device)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"  step {step:3d}   loss {losses[-1]:.3f}   {'#' * round(10 * losses[-1])}")

    final = sum(losses[-5:]) / len(losses[-5:])
    passed = final < goal
    print(f"  {options.steps} steps in {time.perf_counter() - start:.1f} s")
    print(
        f"  loss {losses[0]:.3f} -> {final:.3f} (mean of the last five); knowing only how often each byte "
        f"occurs gives {goal:.3f}: {'passed' if passed else 'FAILED'}"
    )
    return 0 if passed else 1


def random_windows(text: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """BATCH pieces of the text, and the same pieces one byte on: [BATCH, SEQUENCE] each."""
    starts = torch.randint(len(text) - SEQUENCE, (BATCH, 1))
    windows = text[starts + torch.arange(SEQUENCE + 1)].to(device)
    return windows[:, :-1], windows[:, 1:]


def entropy_of_bytes(text: torch.Tensor) -> float:
    """The loss, in nats, of the best guess that looks at no context."""
    share = torch.bincount(text, minlength=256) / len(text)
    return torch.special.entr(share).sum().item()


if __name__ == "__main__":
    sys.exit(main())

"""A key/value cache on `device="tpu"`, written in place by a Pallas kernel, in a small decode loop.

The op `append` declares `mutates=("keys", "values")`: it writes to its arguments, and PyTorch knows it, in
eager mode and in `torch.compile`. The kernel copies one row by DMA and touches nothing else of the caches,
which on a TPU may be far larger than the chip's VMEM.

A model that reads its cache must give, token by token, the logits that plain PyTorch gives for the whole
text at once. If it does not, the exit status is 1.

    python examples/kv_cache.py
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import jax
import torch
import torch.nn.functional as F
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from torch import nn

import bridge

TOKENS, HEADS, HEAD_DIM, LAYERS = 64, 8, 64, 2
WIDTH = HEADS * HEAD_DIM
POSITIONS = 32  # room in the caches: the prompt and what is generated
PROMPT = [3, 14, 15, 9, 26]

# ------------------------------------------------------------------------------ the kernel, in JAX


@torch.tpu.pallas.jax_op("example::append", mutates=("keys", "values"))
def append(
    keys: jax.Array, values: jax.Array, key: jax.Array, value: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """keys[position] = key; values[position] = value.

    keys, values: [positions, heads, head_dim]; key, value: [heads, head_dim]; position: int32[1]. It is an
    array, since a static `int` would compile once for each token. The function returns the new caches, the
    op returns None.
    """
    scalar = pl.BlockSpec(memory_space=pltpu.SMEM)
    stays = pl.BlockSpec(memory_space=pl.ANY)  # left where it is: no block is copied to VMEM and back
    caches = [jax.ShapeDtypeStruct(keys.shape, keys.dtype), jax.ShapeDtypeStruct(values.shape, values.dtype)]
    return pl.pallas_call(
        append_body,
        in_specs=[scalar, stays, stays, stays, stays],
        out_specs=(stays, stays),
        out_shape=tuple(caches),
        input_output_aliases={3: 0, 4: 1},  # the outputs are the caches themselves, old content included
    )(position, key, value, keys, values)


def append_body(position_ref, key_ref, value_ref, _old_keys, _old_values, keys_ref, values_ref) -> None:
    position = position_ref[0]
    pltpu.sync_copy(key_ref, keys_ref.at[position])
    pltpu.sync_copy(value_ref, values_ref.at[position])


# --------------------------------------------------------------------------- the model, in PyTorch

Cache = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[..., WIDTH] -> queries, keys and values, [..., HEADS, HEAD_DIM] each."""
        return self.query_key_value(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A whole text at once, [length, WIDTH]; no cache."""
        q, k, v = (t.transpose(0, 1) for t in self.heads(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [HEADS, length, HEAD_DIM]
        return x + self.mix(mixed.transpose(0, 1).flatten(1))

    def step(self, x: torch.Tensor, cache: Cache, position: torch.Tensor) -> torch.Tensor:
        """One token, [WIDTH]; earlier ones are read from the cache."""
        q, k, v = self.heads(x)
        keys, values = cache
        append(keys, values, k, v, position)
        seen = torch.arange(POSITIONS, device=x.device) <= position
        q, k, v = q.unsqueeze(1), keys.transpose(0, 1), values.transpose(0, 1)
        return x + self.mix(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).flatten())


class Model(nn.Module):
    """Logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.to_logits = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.to_logits(x)

    def step(self, token: torch.Tensor, caches: list[Cache], position: torch.Tensor) -> torch.Tensor:
        x = self.embedding(token)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.step(x, cache, position)
        return self.to_logits(x)


# ------------------------------------------------------------------------------------- the decode


@torch.no_grad()
def decode(step: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt and what the model says next: (tokens [POSITIONS], logits [POSITIONS, TOKENS])."""
    caches = [(empty_cache(), empty_cache()) for _ in range(LAYERS)]
    tokens, logits = [torch.tensor(token, device="tpu") for token in PROMPT], []
    for i in range(POSITIONS):
        if i == len(tokens):
            tokens.append(logits[-1].argmax())
        position = torch.tensor([i], dtype=torch.int32, device="tpu")
        logits.append(step(tokens[i], caches, position))
    return torch.stack(tokens).cpu(), torch.stack(logits).cpu()


def empty_cache() -> torch.Tensor:
    return torch.zeros(POSITIONS, HEADS, HEAD_DIM, device="tpu")


def rounding_tolerance(logits: torch.Tensor) -> float:
    """How far two correct float32 runs may lie apart at most.

    About sqrt(n) roundings for each sum of n products (two matrices, the scores and the mix in each layer,
    and the last matrix), times the size of what is summed.
    """
    in_layer = 2 * math.sqrt(WIDTH) + math.sqrt(HEAD_DIM) + math.sqrt(POSITIONS)
    return torch.finfo(torch.float32).eps * (LAYERS * in_layer + math.sqrt(WIDTH)) * logits.abs().max().item()


def main() -> int:
    torch.manual_seed(0)
    model = Model()
    in_plain_torch = Model()
    in_plain_torch.load_state_dict(model.state_dict())
    model.to("tpu")

    agree = []
    for what, step in (
        ("eager", model.step),
        ("compiled", torch.compile(model.step, fullgraph=True)),
    ):
        tokens, logits = decode(step)
        with torch.no_grad():
            expected = in_plain_torch(tokens)
        worst, tolerance = (logits - expected).abs().max().item(), rounding_tolerance(expected)
        agree.append(worst <= tolerance)
        print(
            f"  {what:<9} {POSITIONS} tokens; worst difference to plain torch without a cache {worst:.1e} "
            f"(rounding explains up to {tolerance:.1e})"
        )
    stats = bridge.stats()
    print(f"  {stats.calls} calls of append ({POSITIONS} tokens x {LAYERS} layers x 2 runs), of which the")
    print(f"  first compiled it and {stats.cache_hits} used that, since the position is an array")
    print(f"  {torch.tpu.get_device_name()}: {'agrees' if all(agree) else 'DIFFERS'}")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())

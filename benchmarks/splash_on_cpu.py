"""How long splash attention takes here, interpreted on the CPU, beside JAX's own interpreted the same way.

    python benchmarks/splash_on_cpu.py [--rounds 10] [--json FILE]

One sequence of 1024 tokens, 8 heads of 64, float32, forward and forward with gradients. Nothing here says how
long a TPU takes: it is what tests and small experiments cost. Wanted is at most 1.3 times JAX's time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import torch
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as shapes
from timing import Contender, circumstances, measure, median_ratio, write_report

import bridge
import tpu_kernels
from tpu_kernels import masks

RESULTS = Path(__file__).parent / "results" / "splash_on_cpu.json"
LENGTH, HEADS, DIM = 1024, 8, 64
WANTED = 1.3
BLOCKS = (128, 512, 1024)
"""JAX's block sizes. It gets the fastest."""

Tensors = list[torch.Tensor]


def ours(causal: bool, backward: bool, tensors: Tensors) -> Callable[[], Any]:
    """A call of the op, in eager mode."""
    mask = masks.causal() if causal else None
    q, k, v, d_o = tensors
    if not backward:
        return lambda: tpu_kernels.splash_attention(q, k, v, mask=mask)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    return lambda: torch.autograd.grad(tpu_kernels.splash_attention(*inputs, mask=mask), inputs, d_o)


def jax_splash(causal: bool, backward: bool, tensors: Tensors, block: int) -> Callable[[], Any]:
    """A call of the jitted function, with JAX arrays of the same numbers."""
    square = (LENGTH, LENGTH)
    mask: Any = shapes.CausalMask(square) if causal else shapes.FullMask(square)
    sizes = kernels.BlockSizes(
        *(block,) * 3,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        use_fused_bwd_kernel=True,
    )
    attend: Any = kernels.make_splash_mha(
        shapes.MultiHeadMask([mask] * HEADS),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=True,
    )

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q[0] * DIM**-0.5, k[0], v[0])

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_o: jax.Array) -> Any:
        return jax.vjp(forward, q, k, v)[1](d_o[0])

    arrays = [bridge.to_jax(t, copy=True) for t in tensors]
    if backward:
        jitted = jax.jit(both)
        return lambda: jax.block_until_ready(jitted(*arrays))
    jitted = jax.jit(forward)
    return lambda: jax.block_until_ready(jitted(*arrays[:3]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()

    torch.manual_seed(0)
    tensors = [torch.randn(1, HEADS, LENGTH, DIM) for _ in range(4)]
    rows = []
    for causal in (True, False):
        for backward in (False, True):
            contenders = [Contender("ours", ours(causal, backward, tensors))]
            contenders += [
                Contender(f"JAX splash, blocks of {block}", jax_splash(causal, backward, tensors, block))
                for block in BLOCKS
            ]
            times = measure(contenders, options.rounds, calls=1, warm_up=2)
            peer = min((c.name for c in contenders[1:]), key=lambda name: min(times[name]))
            ratio = median_ratio(times, "ours", peer)
            name = f"{'causal' if causal else 'full'}, {'forward and gradients' if backward else 'forward'}"
            mark = "" if ratio <= WANTED else f"  above {WANTED}"
            print(
                f"{name:32} ours {min(times['ours']) / 1e3:8.1f} ms  {peer} {min(times[peer]) / 1e3:8.1f} ms"
                f"  ratio {ratio:.2f}{mark}",
                flush=True,
            )
            rows.append({"case": name, "peer": peer, "ratio": ratio, "microseconds": times})
    report = circumstances()
    report["versions"]["jax"] = jax.__version__
    write_report(options.json, report | {"rows": rows})


if __name__ == "__main__":
    main()

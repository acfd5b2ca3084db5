"""One process of several: `torchrun by_torchrun.py FOLDER` leaves a file for each rank that passed."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import bridge
from bridge import get_pallas_mesh
from tpu_kernels import masks, ring_attention, splash_attention
from tpu_kernels.ring_attention.layouts import positions


def main() -> None:
    """Results and gradients of a few rings, one after the other, also of a group made anew."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 16 * size, 16, generator=generator) for _ in range(3)]
    wide = [t.double().requires_grad_() for t in whole]
    expected = splash_attention(*wide, mask=masks.causal(), impl="reference")
    expected.square().sum().backward()
    at = torch.from_numpy(np.array(positions(rank, size, 16, "zigzag"))).long()
    for mode in ("fast", "tpu"):
        group: Any = dist.new_group(list(range(size)))
        local: Any = [t[:, :, at].clone().to("tpu").requires_grad_() for t in whole]
        with bridge.interpret(mode):
            mesh = get_pallas_mesh("x", process_group=group)
            q, k, v = local
            o = ring_attention(q, k, v, mesh, "x", mask=masks.causal(), layout="zigzag")
            o.square().sum().backward()
        torch.testing.assert_close(o.cpu().double(), expected[:, :, at], rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(local, wide, strict=True):
            assert ours.grad is not None and theirs.grad is not None
            torch.testing.assert_close(ours.grad.cpu().double(), theirs.grad[:, :, at], rtol=1e-4, atol=1e-5)
        dist.destroy_process_group(group)
    (Path(sys.argv[1]) / str(rank)).touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

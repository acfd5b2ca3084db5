"""One process of two that have parts of a sequence. torchrun starts it, with a folder as argument."""

from __future__ import annotations

import datetime
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bridge import get_pallas_mesh
from tpu_kernels import context_parallel, unshard_sequence

LENGTH = 7


def main() -> None:
    """Leave a file if both ways of attention give what one process computes alone, with gradients."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    mesh = get_pallas_mesh("x")
    torch.manual_seed(0)  # the same on both
    x, weights = torch.randn(2, 2, LENGTH, 8), torch.randn(2, 2, LENGTH, 8)
    whole = x.clone().requires_grad_()
    expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), whole)
    for rotate in ("ring", "ulysses"):
        own, factor = x.clone(), weights.clone()
        with context_parallel(mesh, "x", buffers=[own, factor], buffer_seq_dims=[2, 2], rotate=rotate):
            leaf = own.clone().requires_grad_()
            o = F.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True)
            (found,) = torch.autograd.grad((o * factor).sum(), leaf)
        assert torch.equal(own, x)
        # Sums of few terms of size one, in another order.
        allowed = 64 * torch.finfo(torch.float32).eps
        for part, want in ((o.detach(), expected), (found, gradient)):
            torch.testing.assert_close(
                unshard_sequence(part, mesh, "x", 2, LENGTH, "zigzag"), want, rtol=0, atol=allowed
            )
    (Path(sys.argv[1]) / str(dist.get_rank())).touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

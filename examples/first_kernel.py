"""Your first kernel: a Pallas program for TPU becomes a PyTorch op, and runs here without one.

The op caps every value smoothly, `cap * tanh(x / cap)`, as language models do with their logits. The keyword
`reference=` says the same in plain JAX; the gradient is derived from it, since a Pallas call has none itself.

    python examples/first_kernel.py
"""

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl


@torch.tpu.pallas.jax_op("example::softcap", reference=lambda x, cap: cap * jnp.tanh(x / cap))
def softcap(x: jax.Array, cap: float) -> jax.Array:
    def kernel(x_ref, y_ref):
        y_ref[...] = cap * jnp.tanh(x_ref[...] / cap)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def main() -> None:
    x = torch.linspace(-30, 30, steps=8 * 128, device="tpu").reshape(8, 128).requires_grad_()
    expected = plain_softcap(x, 15.0)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), x)

    # Eager: call it like any function of tensors.
    y = softcap(x, 15.0)
    compare("eager", y, expected)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    compare("gradient", gradient, expected_gradient)

    # Compiled: one graph, no break at the kernel.
    compiled = torch.compile(lambda x: softcap(2 * x, 15.0) + 1, fullgraph=True)
    compare("compile", compiled(x), plain_softcap(2 * x, 15.0) + 1)

    # Batched: vmap works over it as over torch's own ops.
    compare("vmap", torch.vmap(lambda row: softcap(row, 15.0))(x), expected)


def plain_softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)


def compare(what: str, ours: torch.Tensor, plain: torch.Tensor) -> None:
    """Prints how far the two lie apart; more than a few roundings is an error."""
    torch.testing.assert_close(ours, plain)
    print(f"{what:<9} worst difference to plain torch {(ours - plain).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
    print(f"ran on {torch.tpu.get_device_name()}")

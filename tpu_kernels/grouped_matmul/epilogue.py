"""What happens to the sums of a grouped matmul before they are written: bias, activation, gating."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Activation = Literal["relu", "silu", "gelu", "gelu_tanh", "sigmoid"]
"""`silu` is x sigmoid(x), also called swish; `gelu` is by the error function, `gelu_tanh` nearly the same.

    gelu(x) = x (1 + erf(x / sqrt 2)) / 2
    gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³))) / 2

Sources: Hendrycks and Gimpel, arXiv:1606.08415; for the gated forms Shazeer, arXiv:2002.05202.
"""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def _gelu(x: jax.Array) -> jax.Array:
    # Not jax.nn.gelu: it uses erfc, which is no operation of kernels.
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": lambda x: jnp.where(x > 0, x, x * 0),  # a NaN stays one
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "sigmoid": jax.nn.sigmoid,
}


def applied(activation: Activation | None, sums: Sequence[jax.Array]) -> jax.Array:
    """`activation(sums[0])`, times `sums[1]` if there is one."""
    first = sums[0] if activation is None else _FUNCTIONS[activation](sums[0])
    return first if len(sums) == 1 else first * sums[1]

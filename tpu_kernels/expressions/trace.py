"""Functions as expressions: `from_torch` and `from_jax`."""

from tpu_kernels.expressions.trace_jax import from_jax as from_jax
from tpu_kernels.expressions.trace_torch import from_torch as from_torch

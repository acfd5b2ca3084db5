"""The list of drop-ins."""

from __future__ import annotations

from tpu_kernels.dropins import (
    causal_bias,
    fast_paths,
    flex_attention,
    grouped_mm,
    huggingface,
    sdpa,
    varlen,
)
from tpu_kernels.dropins.dropin import DropIn

DROP_INS: tuple[DropIn, ...] = (
    sdpa.DROP_IN,
    fast_paths.DROP_IN,
    causal_bias.DROP_IN,
    varlen.DROP_IN,
    flex_attention.DROP_IN,
    grouped_mm.DROP_IN,
    huggingface.DROP_IN,
)
"""In the order in which they are enabled."""

"""Whether the kernels compute a call, and with which tiling."""

from __future__ import annotations

import jax

from tpu_kernels import _select
from tpu_kernels.splash_attention import space
from tpu_kernels.splash_attention.tiling import SplashTiling


def tiling_for(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: str,
    score: str,
    scale: float,
    dropout_p: float,
    tiling: SplashTiling | None,
    impl: str,
    *,
    sums: bool = False,
) -> SplashTiling | None:
    """The tiling to run the kernels with on the present chip, or None for the reference.

    With `sums` the kernels begin with float32 sums over other keys, and give such.

    Raises:
        TypeError: q, k or v is not floating.
        ValueError: `impl` is unknown or cannot compute this, or `tiling` cannot run; with the reasons.
    """
    chosen = _select.select(
        space.problem_of(
            _select.describe(q=q, k=k, v=v),
            mask=mask,
            score=score,
            scale=scale,
            dropout_p=dropout_p,
            sums=sums,
        ),
        impl,
        tiling,
        unsupported_reasons=space.unsupported_reasons,
        illegal_reasons=space.illegal_reasons,
        default_tiling=space.default_tiling,
    )
    # No elements: there is no block to launch a kernel on.
    return None if 0 in (*q.shape, *k.shape, *v.shape) else chosen

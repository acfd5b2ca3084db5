"""Splash attention as a differentiable JAX function.

The kernels see expressions whose loads are aligned and the arrays that these read; how the arrays are made of
captures, and sinks, are plain JAX around them, which differentiates itself. The gradient of the kernels is
computed by kernels, from the arguments and the lse; the gradient of that is the reference's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge.chips import chip
from bridge.interpretation import target_chip
from tpu_kernels._select import Implementation
from tpu_kernels._vmem import vmem_allowed
from tpu_kernels.expressions.expression import Expression, loads, parse, text
from tpu_kernels.expressions.hoist import hoist_all, materialise
from tpu_kernels.splash_attention import backward, folding, kernel, load_gradients, select, space
from tpu_kernels.splash_attention.blocks import AlignedLoad
from tpu_kernels.splash_attention.reference import default_scale, splash_attention_reference
from tpu_kernels.splash_attention.tiles import Formula
from tpu_kernels.splash_attention.tiling import SplashTiling


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    captures: Sequence[jax.Array],
    sinks: jax.Array | None,
    seed: jax.Array | None,
    mask: str = "",
    score: str = "",
    scale: float | None = None,
    dropout_p: float = 0.0,
    tiling: SplashTiling | None = None,
    impl: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention; see `reference.splash_attention_reference` for formula, shapes and results.

    Args:
        tiling: tile sizes of the kernels; by default chosen for the shape.
        impl: `pallas` (the kernels), `reference`, or `auto`.

    Raises:
        ValueError: the chosen implementation cannot compute this, with the reasons.
    """
    if dropout_p == 1:
        # Nothing is kept, and the lse is that without dropout.
        o, lse = splash_attention(
            q, k, v, captures, sinks, None, mask, score, scale, tiling=tiling, impl=impl
        )
        return jnp.zeros_like(o), lse
    if scale is None:
        scale = default_scale(q.shape[-1])
    chosen = select.tiling_for(q, k, v, mask, score, scale, dropout_p, tiling, impl)
    if chosen is None:
        compute = functools.partial(
            splash_attention_reference, mask=mask, score=score, scale=scale, dropout_p=dropout_p
        )
        # The scores are computed again in the backward: only the arguments are kept.
        return jax.checkpoint(compute)(q, k, v, captures, sinks, seed)
    present = chip(target_chip())
    visible, changed = _parsed(mask), _parsed(score)
    shape = q.shape
    if folding.folds(q, k, dropout_p):
        q = folding.fold(q, k.shape[1])
        group = shape[1] // k.shape[1]
        visible, changed = (folding.fold_expression(e, group, shape[2]) for e in (visible, changed))
    (visible, changed), hoisted = hoist_all([visible, changed])
    sizes = {"b": q.shape[0], "h": q.shape[1], "q": q.shape[2], "kv": k.shape[2]}
    arrays = materialise(hoisted, captures, sizes)
    static = _Static(
        axes=tuple(array.axes for array in hoisted),
        mask="" if visible is None else text(visible),
        score="" if changed is None else text(changed),
        scale=scale,
        dropout_p=dropout_p,
        tiling=chosen,
        vmem_limit_bytes=vmem_allowed(present),
        resident_bytes=space.resident_bytes(present),
        # A sink scales the output: it is not rounded twice.
        out_dtype=str(jnp.dtype(jnp.float32 if sinks is not None else q.dtype)),
    )
    o, lse = _as_pair(_attend(static, q, k, v, arrays, seed if dropout_p else None))
    o, lse = o.reshape(*shape[:3], v.shape[-1]), lse.reshape(shape[:3])
    if sinks is not None:
        o, lse = _with_sinks(o, lse, sinks)
    return o.astype(q.dtype), lse


def _with_sinks(o: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The results with one more score in each row's sum: `lse' = log(exp(lse) + exp(sink))`."""
    sink = sinks.astype(lse.dtype)[:, None]
    total = jnp.logaddexp(lse, sink)
    share = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(lse - jnp.where(total == -jnp.inf, 0.0, total)))
    return o * share[..., None], total


# The kernels and their gradient ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Static:
    """All that is no array: the axes of the arrays that `mask` and `score` load from, and the parameters."""

    axes: tuple[tuple[str, ...], ...]
    mask: str
    score: str
    scale: float
    dropout_p: float
    tiling: SplashTiling
    vmem_limit_bytes: int
    resident_bytes: int
    out_dtype: str

    def aligned(self, arrays: Sequence[jax.Array]) -> list[AlignedLoad]:
        return [AlignedLoad(array, axes) for array, axes in zip(arrays, self.axes, strict=True)]

    @property
    def formula(self) -> Formula:
        """What the kernels compute."""
        return Formula(_parsed(self.mask), _parsed(self.score), self.scale, self.dropout_p)


def _parsed(source: str) -> Expression | None:
    return parse(source) if source else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    arrays: list[jax.Array],
    seed: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    o, lse, _ = _forward(static, q, k, v, arrays, seed)
    return o, lse


def _forward(
    static: _Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    arrays: list[jax.Array],
    seed: jax.Array | None,
) -> kernel.Forward:
    return kernel.forward(
        q,
        k,
        v,
        static.aligned(arrays),
        seed,
        formula=static.formula,
        tiles=static.tiling.forward,
        vmem_limit_bytes=static.vmem_limit_bytes,
        out_dtype=jnp.dtype(static.out_dtype),
    )


def _as_pair(results: Any) -> tuple[jax.Array, jax.Array]:
    """What `_attend` returns, which `custom_vjp` declares as any object."""
    return results


def _attend_forward(static, q, k, v, arrays, seed):
    o, lse, correction = _forward(static, q, k, v, arrays, seed)
    return (o, lse), (q, k, v, arrays, seed, o, lse, correction)


def _attend_backward(static, kept, cotangents):
    q, k, v, arrays, seed, o, lse, correction = kept
    d_o, d_lse = cotangents
    gradients: Any = _gradient(static, q, k, v, arrays, seed, o, lse, correction, d_o, d_lse)
    dq, dk, dv, d_arrays = gradients
    return dq, dk, dv, d_arrays, None if seed is None else _no_gradient(seed)


_attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient(static, q, k, v, arrays, seed, o, lse, correction, d_o, d_lse) -> Any:
    """Gradients of q, k, v and each of `arrays`, for the cotangents of o and lse."""
    if correction is not None:
        # The kernels take exp(s - lse) for p. All they compute is linear in a row's p times its cotangents.
        d_o = (d_o * correction[..., None]).astype(d_o.dtype)
        d_lse = d_lse * correction
    given = q, k, v, static.aligned(arrays), seed, o, lse, d_o, d_lse
    common: dict[str, Any] = {
        "formula": static.formula,
        "tiles": static.tiling.backward,
        "vmem_limit_bytes": static.vmem_limit_bytes,
    }
    gradients = backward.backward(
        *given,
        **common,
        scores_stay=static.tiling.backward_scores_stay,
        resident_bytes=static.resident_bytes,
    )
    wanted = _differentiable(static, arrays)
    d_arrays = [
        load_gradients.load_gradient(slot, *given, **common) if slot in wanted else _no_gradient(array)
        for slot, array in enumerate(arrays)
    ]
    return (*gradients, d_arrays)


def _gradient_forward(static, *arguments):
    return _gradient(static, *arguments), arguments


def _gradient_backward(static, arguments, cotangents):
    q, k, v, arrays, seed, o, lse, correction, d_o, d_lse = arguments

    gradient = functools.partial(_reference_gradient, static, seed)
    # o, lse and the correction are functions of the others, and the reference computes them again.
    _, pull_back = jax.vjp(gradient, q, k, v, arrays, d_o, d_lse)
    dq, dk, dv, d_arrays, dd_o, dd_lse = pull_back(cotangents)
    no_seed = None if seed is None else _no_gradient(seed)
    zeros = (None if a is None else jnp.zeros_like(a) for a in (o, lse, correction))
    return dq, dk, dv, d_arrays, no_seed, *zeros, dd_o, dd_lse


_gradient.defvjp(_gradient_forward, _gradient_backward)


def _reference_gradient(static, seed, q, k, v, arrays, d_o, d_lse) -> Any:
    def attend(q, k, v, arrays):
        o, lse = splash_attention_reference(
            q, k, v, arrays, None, seed, static.mask, static.score, static.scale, static.dropout_p
        )
        return o.astype(static.out_dtype), lse

    _, pull_back = jax.vjp(attend, q, k, v, arrays)
    return pull_back((d_o, d_lse))


def _differentiable(static: _Static, arrays: Sequence[jax.Array]) -> set[int]:
    """The slots of the arrays that have a gradient: floats that the score depends on."""
    score = _parsed(static.score)
    used = set() if score is None else {load.slot for load in loads(score)}
    return {slot for slot in used if jnp.issubdtype(arrays[slot].dtype, jnp.floating)}


def _no_gradient(array: jax.Array) -> Any:
    """The gradient of an array that nothing differentiable depends on."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)

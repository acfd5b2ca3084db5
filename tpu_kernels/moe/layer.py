"""A mixture-of-experts layer: routing, the experts, and the sum of what they say."""

from __future__ import annotations

import math
from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import torch

from bridge import jax_op
from tpu_kernels._checks import check_floating, is_number
from tpu_kernels._integers import check_integers
from tpu_kernels._select import Implementation
from tpu_kernels.moe.checks import check_int, check_same_device
from tpu_kernels.moe.mlp import Activation, gated_mlp
from tpu_kernels.moe.permutation import permute, unpermute
from tpu_kernels.moe.routing import GroupScore, Score, route_top_k

_OP = "moe_layer"


class Options(TypedDict, total=False):
    """The keyword arguments of `moe_layer` that say how tokens are routed, and what the experts compute."""

    logits: torch.Tensor | None
    gate_up: torch.Tensor | None
    score: Score
    bias: torch.Tensor | None
    groups: int | None
    top_groups: int | None
    group_score: GroupScore
    renormalize: bool
    scale: float
    capacity: int | None
    capacity_factor: float | None
    activation: Activation
    transpose_weights: bool
    impl: Implementation


@overload
def moe_layer(
    x: torch.Tensor,
    router: torch.Tensor | None,
    gate: torch.Tensor | None,
    up: torch.Tensor | None,
    down: torch.Tensor,
    *,
    k: int,
    return_logits: Literal[False] = False,
    **options: Unpack[Options],
) -> torch.Tensor: ...


@overload
def moe_layer(
    x: torch.Tensor,
    router: torch.Tensor | None,
    gate: torch.Tensor | None,
    up: torch.Tensor | None,
    down: torch.Tensor,
    *,
    k: int,
    return_logits: Literal[True],
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def moe_layer(
    x: torch.Tensor,
    router: torch.Tensor | None,
    gate: torch.Tensor | None,
    up: torch.Tensor | None,
    down: torch.Tensor,
    *,
    k: int,
    logits: torch.Tensor | None = None,
    gate_up: torch.Tensor | None = None,
    score: Score = "softmax",
    bias: torch.Tensor | None = None,
    groups: int | None = None,
    top_groups: int | None = None,
    group_score: GroupScore = "max",
    renormalize: bool = True,
    scale: float = 1.0,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    activation: Activation = "silu",
    transpose_weights: bool = False,
    return_logits: bool = False,
    impl: Implementation = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`out[t] = sum over the k experts e of token t of weight[t, e] * gated_mlp(x[t]) of e`.

    It is `route_top_k`, `permute`, `gated_mlp` and `unpermute` in this order, and no more. The source of such
    layers is Shazeer and others, arXiv 1701.06538.

    Differentiable in all tensors but `bias`, any number of times.

    Args:
        x: [..., D], float16, bfloat16, float32 or float64, on `tpu` or `cpu`.
        router: [E, D], floating: the logits are `x @ router.T`, in float32 (float64 if an argument is), also
            inside `torch.autocast`. None, with `logits`.
        gate, up, down: [E, D, N], [E, D, N] and [E, N, D], of the dtype of `x`; see `gated_mlp`.
        k: experts of each token.
        logits: [..., E], floating, in place of `router`.
        gate_up: [E, D, 2 N], in place of `gate` and `up`.
        score, bias, groups, top_groups, group_score, renormalize, scale: see `route_top_k`.
        capacity: most tokens of one expert; what is over is dropped, as `permute` does.
        capacity_factor: the same as a multiple of what each expert would have if all had the same:
            `capacity = ceil(T * k / E * capacity_factor)` (Switch Transformer, arXiv 2101.03961), to
            six decimal places of the factor.
        activation, transpose_weights, impl: see `gated_mlp`.
        return_logits: whether to return the logits as well, for losses such as `load_balancing_loss`.

    Returns:
        [..., D] in the dtype of `x`; with `return_logits`, that and the logits [..., E]. A token whose
        choices are all dropped is 0.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
        ValueError: `logits` beside `router`, or neither; `capacity` beside `capacity_factor`; what the four
            functions refuse.
    """
    check_floating(_OP, x=x, router=router, logits=logits, down=down)
    if (router is None) == (logits is None):
        raise ValueError(f"{_OP}: give router or logits, one of them")
    if not x.dim():
        raise RuntimeError(f"{_OP}: x must be [..., D], got a tensor without dimensions")
    check_same_device(_OP, x=x, router=router, logits=logits)
    experts = down.shape[0] if down.dim() == 3 else -1
    leading, width = x.shape[:-1], x.shape[-1]
    for name, tensor, expected in (
        ("router", router, (experts, width)),
        ("logits", logits, (*leading, experts)),
    ):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise RuntimeError(
                f"{_OP}: x must be [..., D], {name} {'[E, D]' if name == 'router' else '[..., E]'} and down "
                f"a matrix for each of the E experts, got x {list(x.shape)}, {name} {list(tensor.shape)} and "
                f"down {list(down.shape)}"
            )
    tokens = x.reshape(math.prod(leading), width)
    if router is not None:
        flat_logits = logits_op(tokens, router)
    else:
        assert logits is not None
        flat_logits = logits.reshape(math.prod(leading), experts)
    limit = _capacity(capacity, capacity_factor, tokens.shape[0], k, experts)
    weights, chosen = route_top_k(
        flat_logits,
        k,
        score=score,
        bias=bias,
        groups=groups,
        top_groups=top_groups,
        group_score=group_score,
        renormalize=renormalize,
        scale=scale,
    )
    permuted = permute(tokens, chosen, experts, capacity=limit)
    rows = gated_mlp(
        permuted.tokens,
        gate,
        up,
        down,
        permuted.group_sizes,
        gate_up=gate_up,
        activation=activation,
        transpose_weights=transpose_weights,
        impl=impl,
    )
    out = unpermute(rows, permuted, weights)
    out = out.reshape(*leading, out.shape[1])
    return (out, flat_logits.reshape(*leading, experts)) if return_logits else out


def _capacity(
    capacity: int | None, capacity_factor: float | None, tokens: int, k: int, experts: int
) -> int | None:
    if capacity_factor is None:
        return capacity
    if capacity is not None:
        raise ValueError(f"{_OP}: give capacity or capacity_factor, not both")
    if not is_number(capacity_factor):
        raise TypeError(f"{_OP}: capacity_factor must be a float, got {capacity_factor!r}")
    if not 0 <= capacity_factor < math.inf:
        raise ValueError(f"{_OP}: capacity_factor must be at least 0 and finite, got {capacity_factor}")
    check_int(_OP, "k", k, 1, experts, f", for {experts} experts")
    # In whole numbers: the number of tokens may be symbolic, and 10 * 1.1 is 11.
    millionths = round(min(float(capacity_factor), experts) * 10**6)
    return -(-tokens * k * millionths // (experts * 10**6))


def load_balancing_loss(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """`E * sum over e of f[e] * P[e]`: the smaller, the more evenly tokens are routed.

    f[e] is the part of the T * k choices that are e, and P[e] the mean probability of e, softmax(logits). If
    all experts are chosen as often and as probable, it is 1. The formula is that of the Switch Transformer
    (Fedus and others, arXiv 2101.03961, equations 4 to 6), where k is 1. Hugging Face's is k times as much.

    Differentiable in `logits`, through P alone.

    Args:
        logits: [T, E], floating.
        experts: integers [T, k], such as those of `route_top_k`. Those out of range are none's.

    Returns:
        One number, float32, or float64 for float64; 0 if there are no tokens.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
    """
    name = "load_balancing_loss"
    check_floating(name, logits=logits)
    check_integers(name, "experts", experts)
    if logits.dim() != 2 or experts.dim() != 2 or experts.shape[0] != logits.shape[0]:
        raise RuntimeError(
            f"{name}: logits must be [T, E] and experts [T, k], got {list(logits.shape)} and "
            f"{list(experts.shape)}"
        )
    check_same_device(name, logits=logits, experts=experts)
    return loss_op(logits, experts.clamp(-1, logits.shape[1]).to(torch.int32))


# The ops ------------------------------------------------------------------------------------------


def _logits(tokens: jax.Array, router: jax.Array) -> jax.Array:
    compute = jnp.promote_types(jnp.promote_types(tokens.dtype, router.dtype), jnp.float32)
    # A TPU rounds the operands to bfloat16 otherwise, which changes the choice.
    return jnp.matmul(tokens.astype(compute), router.astype(compute).T, precision=jax.lax.Precision.HIGHEST)


def _load_balancing_loss(logits: jax.Array, experts: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    tokens, number = logits.shape
    chosen = experts.reshape(-1, 1) == jnp.arange(number, dtype=jnp.int32)
    often = jnp.sum(chosen, axis=0, dtype=jnp.int32).astype(logits.dtype)
    probable = jnp.sum(jax.nn.softmax(logits, axis=-1), axis=0)
    return jnp.sum(often * probable) * (number / max(tokens * tokens * experts.shape[1], 1))


logits_op = jax_op("tpu_kernels::moe_logits", _logits)
"""The torch op for the router's logits."""
loss_op = jax_op("tpu_kernels::load_balancing_loss", _load_balancing_loss)
"""The torch op behind `load_balancing_loss`."""

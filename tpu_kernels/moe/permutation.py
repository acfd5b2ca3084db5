"""Rows of tokens sorted by expert, and back: the public functions and their ops."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch

from bridge import jax_op
from tpu_kernels._checks import check_floating
from tpu_kernels._integers import check_integers, int32
from tpu_kernels.moe.checks import check_int, check_same_device
from tpu_kernels.moe.rows import collect, spread


class Permuted(NamedTuple):
    """Tokens sorted by expert, and where each came from. A pair is a token and one of its k choices.

    Attributes:
        tokens: [T * k, D], the token of each pair, those of expert 0 first. Pairs that are dropped are last,
            and their rows are 0.
        group_sizes: int32 [E], the rows of each expert.
        order: int32 [T * k], the number t * k + j of the pair that is in each row.
        places: int32 [T, k], the row of each pair; -1 where it is dropped.
    """

    tokens: torch.Tensor
    group_sizes: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor


def permute(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    first_expert: int = 0,
) -> Permuted:
    """The pairs of tokens and their experts, sorted by expert: `rows[place of (t, j)] = tokens[t]`.

    The sort is stable: within an expert, rows are in the order of tokens. The result has T * k rows, however
    the tokens are routed, so its shapes are no data and other routings compile nothing again.

    A pair is dropped if its expert is out of range, or has as many rows as `capacity` allows: first come,
    first served, in the order of tokens.

    Differentiable in `tokens`, any number of times: a token's gradient is the sum over its rows, in float32
    (float64 for float64), in the order of its choices, and 0 if all are dropped.

    Args:
        tokens: [T, D], float16, bfloat16, float32 or float64, on `tpu` or `cpu`.
        experts: integers [T, k], such as those of `route_top_k`.
        num_experts: E, how many there are.
        capacity: most rows of one expert; None for any number. It is data: others compile nothing again.
        first_expert: for a slice of the experts, as of one rank of many: the number of the first of the E.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
        ValueError: negative numbers.
    """
    name = "permute"
    check_floating(name, tokens=tokens)
    check_integers(name, "experts", experts)
    if tokens.dim() != 2 or experts.dim() != 2 or experts.shape[0] != tokens.shape[0]:
        raise RuntimeError(
            f"{name}: tokens must be [T, D] and experts [T, k], got {list(tokens.shape)} and "
            f"{list(experts.shape)}"
        )
    check_same_device(name, tokens=tokens, experts=experts)
    num_experts = check_int(name, "num_experts", num_experts, 0)
    first_expert = check_int(name, "first_expert", first_expert, 0)
    limit = None
    if capacity is not None:
        most = min(check_int(name, "capacity", capacity, 0), 2**31 - 1)
        limit = torch.full((), most, dtype=torch.int32, device=tokens.device)
    if experts.dtype == torch.int64:  # far out of range is out of range, too
        experts = experts.clamp(-1, first_expert + num_experts)
    group_sizes, order, places = sort_op(int32(experts), limit, num_experts, first_expert)
    return Permuted(permute_op(tokens, order, places), group_sizes, order, places)


def unpermute(rows: torch.Tensor, permuted: Permuted, weights: torch.Tensor | None = None) -> torch.Tensor:
    """`out[t] = sum over j of weights[t, j] * rows[place of (t, j)]`, without pairs that are dropped.

    Pairs that are dropped add 0, whatever is in their rows, and their weights have the gradient 0. Sums are
    in the order of a token's choices: there is nothing that two runs could do in different orders.

    Differentiable in `rows` and `weights`, any number of times.

    Args:
        rows: [T * k, D], float16, bfloat16, float32 or float64, on `tpu` or `cpu`: what the experts have
            made of the rows of `permuted`. D need not be that of the tokens.
        permuted: what `permute` returned.
        weights: [T, k], floating, such as those of `route_top_k`; None for ones.

    Returns:
        [T, D] in the dtype of `rows`, summed in float32, or in float64 if an argument is.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
    """
    name = "unpermute"
    check_floating(name, rows=rows, weights=weights)
    if not isinstance(permuted, Permuted):
        raise TypeError(f"{name}: permuted must be what permute returned, got {type(permuted).__name__}")
    order, places = permuted.order, permuted.places
    if rows.dim() != 2 or rows.shape[0] != order.shape[0]:
        raise RuntimeError(f"{name}: rows must be [{order.shape[0]}, D], got {list(rows.shape)}")
    if weights is not None and weights.shape != places.shape:
        raise RuntimeError(f"{name}: weights must be {list(places.shape)}, got {list(weights.shape)}")
    check_same_device(name, rows=rows, permuted=places, weights=weights)
    return unpermute_op(rows, weights, order, places)


# The ops ------------------------------------------------------------------------------------------


def _sort(
    experts: jax.Array, capacity: jax.Array | None, num_experts: int, first_expert: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """group_sizes, order and places of `Permuted`."""
    numbers = jnp.arange(num_experts, dtype=jnp.int32)
    pair = jnp.arange(experts.shape[0] * experts.shape[1], dtype=jnp.int32)
    expert = experts.reshape(pair.shape) - first_expert
    expert = jnp.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    sizes = jnp.sum(expert[:, None] == numbers, axis=0, dtype=jnp.int32)
    expert, order = jax.lax.sort((expert, pair), num_keys=1, is_stable=True)
    if capacity is not None:
        starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
        starts = jnp.concatenate([starts, jnp.zeros(1, jnp.int32)])
        over = (expert == num_experts) | (pair - starts[expert] >= capacity)
        _, order = jax.lax.sort((over.astype(jnp.int32), order), num_keys=1, is_stable=True)
        sizes = jnp.minimum(sizes, capacity)
    _, places = jax.lax.sort((order, pair), num_keys=1)
    places = jnp.where(places < jnp.sum(sizes, dtype=jnp.int32), places, -1)
    return sizes, order, places.reshape(experts.shape)


def _permute(tokens: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    return spread(tokens, None, order, places)


def _unpermute(rows: jax.Array, weights: jax.Array | None, order: jax.Array, places: jax.Array) -> jax.Array:
    return collect(rows, weights, order, places)


sort_op = jax_op("tpu_kernels::sort_by_expert", _sort)
"""The torch op that finds the order."""
permute_op = jax_op("tpu_kernels::permute", _permute)
"""The torch op that gathers rows in that order."""
unpermute_op = jax_op("tpu_kernels::unpermute", _unpermute)
"""The torch op behind `unpermute`."""

"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import torch

from bridge import jax_op
from tpu_kernels._checks import check_floating, is_number
from tpu_kernels.moe.checks import check_choice, check_int, check_same_device

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]

_OP = "route_top_k"
_TINY = 1e-20
"""Added to the sum that weights are divided by, as DeepSeek's code does: it may be 0."""


def route_top_k(
    logits: torch.Tensor,
    k: int,
    *,
    score: Score = "softmax",
    bias: torch.Tensor | None = None,
    groups: int | None = None,
    top_groups: int | None = None,
    group_score: GroupScore = "max",
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` experts of each token that have the highest `score(logits) + bias`, and their weights.

        scores = softmax(logits) or sigmoid(logits)
        experts = the k highest of scores + bias, in the best groups
        weights = scores[experts]
        weights = weights / sum(weights) * scale            (without the division if not `renormalize`)

    Rules of models, as arguments:

    - Mixtral (arXiv 2401.04088), GPT-OSS (arXiv 2508.10925): the defaults. A softmax over the logits of the
      chosen is the same as a softmax over all, divided by the sum of the chosen.
    - Qwen3-MoE (arXiv 2505.09388): `renormalize` is its `norm_topk_prob`.
    - DeepSeek-V2 (arXiv 2405.04434): `groups`, `top_groups`, `renormalize=False`, `scale`.
    - DeepSeek-V3 (arXiv 2412.19437): `score="sigmoid"`, `bias`, `groups`, `top_groups`,
      `group_score="top2"`, `scale`.
    - Llama 4: `score="sigmoid"`, `renormalize=False`.

    Of equal scores the lower expert comes first, on every device: the order is that of a stable descending
    sort. NaN counts as the highest. Without a bias the logits themselves are compared: that is the order of
    the scores, where rounding has made no two of them equal.

    Differentiable in `logits`, any number of times: the weights are, the choice is not.

    Args:
        logits: [T, E], float16, bfloat16, float32 or float64, on `tpu` or `cpu`.
        k: experts of each token, from 1 to E.
        score: `softmax` over all experts, or `sigmoid` of each.
        bias: [E], added to the scores for the choice alone. It is not in the weights and gets no gradient.
        groups: the experts are in so many groups of equal size, one after another; None for no groups.
        top_groups: how many groups of a token its experts may be in, those of the highest group score.
        group_score: the highest score of the group's experts (`max`), or the sum of the highest two (`top2`),
            bias included.
        renormalize: whether a token's weights are divided by their sum (for `sigmoid`, plus 1e-20).
        scale: the weights are multiplied by it.

    Returns:
        weights [T, k], float32, or float64 for float64 logits, which is what is computed in; and experts
        [T, k], int32, from the highest score down.

    Raises:
        TypeError: dtypes or argument types other than these.
        RuntimeError: shapes or devices that don't belong together.
        ValueError: `k` or numbers of groups that cannot be; a `score` or `group_score` that is none.
    """
    check_floating(_OP, logits=logits, bias=bias)
    if logits.dim() != 2:
        raise RuntimeError(f"{_OP}: logits must be [T, E], got {list(logits.shape)}")
    experts = logits.shape[1]
    if bias is not None and tuple(bias.shape) != (experts,):
        raise RuntimeError(
            f"{_OP}: bias must be [{experts}], one for each expert of logits, got {list(bias.shape)}"
        )
    check_same_device(_OP, logits=logits, bias=bias)
    check_choice(_OP, "score", score, get_args(Score))
    check_choice(_OP, "group_score", group_score, get_args(GroupScore))
    k = check_int(_OP, "k", k, 1, experts, f", for the {experts} experts of logits")
    _check_groups(experts, k, groups, top_groups, group_score)
    if not isinstance(renormalize, bool):
        raise TypeError(f"{_OP}: renormalize must be a bool, got {renormalize!r}")
    if not is_number(scale):
        raise TypeError(f"{_OP}: scale must be a float, got {scale!r}")
    bias = None if bias is None else bias.detach()
    return op(logits, bias, k, score, groups, top_groups, group_score, renormalize, float(scale))


def _check_groups(
    experts: int, k: int, groups: int | None, top_groups: int | None, group_score: GroupScore
) -> None:
    if groups is None and top_groups is None:
        return
    if groups is None or top_groups is None:
        raise ValueError(
            f"{_OP}: groups and top_groups are given together, got groups={groups} and "
            f"top_groups={top_groups}"
        )
    groups = check_int(_OP, "groups", groups, 1, experts, f", for the {experts} experts of logits")
    top_groups = check_int(_OP, "top_groups", top_groups, 1, groups, f", the {groups} groups")
    if experts % groups:
        raise ValueError(f"{_OP}: {experts} experts don't divide into {groups} groups of equal size")
    size = experts // groups
    if k > top_groups * size:
        raise ValueError(
            f"{_OP}: k must be at most {top_groups * size}, the experts of {top_groups} groups of {size}, "
            f"got {k}"
        )
    if group_score == "top2" and size < 2:
        raise ValueError(
            f"{_OP}: group_score 'top2' needs groups of at least 2 experts, got groups of {size}"
        )


def _route(
    logits: jax.Array,
    bias: jax.Array | None,
    k: int,
    score: Score,
    groups: int | None,
    top_groups: int | None,
    group_score: GroupScore,
    renormalize: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)
    biased = scores if bias is None else scores + bias.astype(scores.dtype)
    compared = jax.lax.stop_gradient(logits if bias is None else biased)
    if groups is None or top_groups is None:
        experts = _best(compared, k)
    else:
        size = logits.shape[1] // groups
        by_group = compared.reshape(-1, groups, size)
        if group_score == "max":
            of_group = jnp.max(by_group, axis=-1)
        else:
            summed = _one_zero_one_nan(jax.lax.stop_gradient(biased)).reshape(-1, groups, size)
            of_group = jnp.sum(jax.lax.top_k(summed, 2)[0], axis=-1)
        # Only the experts of these groups are compared, in ascending order, which keeps ties stable. To
        # lower the others' scores instead would not exclude them: those of the chosen may be as low.
        chosen = jnp.sort(_best(of_group, top_groups), axis=-1)
        candidates = jnp.take_along_axis(by_group, chosen[:, :, None], axis=1)
        place = _best(candidates.reshape(-1, top_groups * size), k)
        experts = jnp.take_along_axis(chosen, place // size, axis=1) * size + place % size
    if renormalize and score == "softmax":
        # Where the chosen have small probabilities, because of a bias or groups, their sum may be 0.
        weights = jax.nn.softmax(_of_experts(logits, experts), axis=-1)
    else:
        weights = _of_experts(scores, experts)
        if renormalize:
            # Both sides of the division by the highest of them, which changes nothing but that its
            # derivatives, with powers of the sum, don't divide by 0.
            highest = jax.lax.stop_gradient(jnp.max(weights, axis=-1, keepdims=True))
            unit = jnp.maximum(highest, _TINY)
            weights = weights / unit
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _TINY / unit)
    return weights * scale, experts


def _best(values: jax.Array, k: int) -> jax.Array:
    """The places of the k highest in each row, int32, as a stable descending sort has them."""
    return jax.lax.top_k(_one_zero_one_nan(values), k)[1].astype(jnp.int32)


def _one_zero_one_nan(values: jax.Array) -> jax.Array:
    """What top_k can compare: it goes by bits, where -0 is below 0, and NaN of one sign below all numbers."""
    values = jnp.where(values == 0, jnp.zeros_like(values), values)
    return jnp.where(jnp.isnan(values), jnp.full_like(values, jnp.nan), values)


def _of_experts(values: jax.Array, experts: jax.Array) -> jax.Array:
    """`values[t, experts[t, j]]`. A comparison with all experts, whose gradient is no scatter."""
    number = jnp.arange(values.shape[1], dtype=experts.dtype)
    return jnp.sum(jnp.where(experts[:, :, None] == number, values[:, None, :], 0), axis=-1)


op = jax_op("tpu_kernels::route_top_k", _route)
"""The torch op behind `route_top_k`."""

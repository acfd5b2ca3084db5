"""A mixture-of-experts layer as plain loops, in the dtype that it is given, float64 as a rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x * (x > 0),
}


# Routing --------------------------------------------------------------------------------------------------


def sort_key(value: float) -> float:
    """NaN is the highest, and there is one zero."""
    return -math.inf if math.isnan(value) else -value + 0.0


def best(values: list[float], k: int) -> list[int]:
    """The places of the k highest, of equal ones the first: Python's sort is stable."""
    key = [(not math.isnan(value), sort_key(value)) for value in values]
    return sorted(range(len(values)), key=key.__getitem__)[:k]


def route(
    logits: torch.Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int | None = None,
    top_groups: int | None = None,
    group_score: str = "max",
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts, token by token. The choice compares float64 numbers."""
    scores = logits.softmax(1) if score == "softmax" else 1 / (1 + (-logits).exp())
    number = logits.shape[1]
    weights, experts = [], []
    for t in range(logits.shape[0]):
        # Where rounding makes scores equal, the logits are still in order.
        compared = logits[t] if bias is None else scores[t] + bias
        values: list[float] = compared.double().tolist()
        allowed = list(range(number))
        if groups is not None and top_groups is not None:
            size = number // groups
            biased: list[float] = (scores[t] if bias is None else scores[t] + bias).double().tolist()
            of_group = []
            for g in range(groups):
                members = biased[g * size : (g + 1) * size]
                if group_score == "max":
                    members = values[g * size : (g + 1) * size]
                    of_group.append(members[best(members, 1)[0]])
                else:
                    of_group.append(sum(members[i] for i in best(members, 2)))
            kept = best(of_group, top_groups)
            allowed = [e for e in range(number) if e // size in kept]
        chosen = [allowed[i] for i in best([values[e] for e in allowed], k)]
        weight = torch.stack([scores[t, e] for e in chosen])
        if renormalize:
            weight = weight / (weight.sum() + (1e-20 if score == "sigmoid" else 0))
        weights.append(weight * scale)
        experts.append(chosen)
    if not weights:
        return logits.new_zeros(0, k), torch.zeros(0, k, dtype=torch.int32)
    return torch.stack(weights), torch.tensor(experts, dtype=torch.int32)


# Permutation ----------------------------------------------------------------------------------------------


def places(
    experts: torch.Tensor, number: int, capacity: int | None = None, first: int = 0
) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]]]:
    """The pairs (token, choice) of each expert in order, and those that are dropped."""
    of_expert: list[list[tuple[int, int]]] = [[] for _ in range(number)]
    dropped = []
    for t, row in enumerate(experts.tolist()):
        for j, e in enumerate(row):
            e -= first
            if 0 <= e < number and (capacity is None or len(of_expert[e]) < capacity):
                of_expert[e].append((t, j))
            else:
                dropped.append((t, j))
    return of_expert, dropped


# The layer ------------------------------------------------------------------------------------------------


def mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, activation: str = "silu"
) -> torch.Tensor:
    """One expert, its weights not transposed."""
    return (ACTIVATIONS[activation](x @ gate) * (x @ up)) @ down


def layer(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    capacity: int | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """A loop over experts, and over the pairs of each. x is [T, D]."""
    out = [x.new_zeros(down.shape[2]) for _ in range(x.shape[0])]
    of_expert, _ = places(experts, gate.shape[0], capacity)
    for e, pairs in enumerate(of_expert):
        for t, j in pairs:
            out[t] = out[t] + weights[t, j] * mlp(x[t], gate[e], up[e], down[e], activation)
    return torch.stack(out) if out else x.new_zeros(0, down.shape[2])


# Routers of models, as their published code has them ------------------------------------------------------


def mixtral(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    top, experts = logits.softmax(1).topk(k, dim=1)
    return top / top.sum(1, keepdim=True), experts


def gpt_oss(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    top, experts = logits.topk(k, dim=1)
    return F.softmax(top, dim=1), experts


def qwen3(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """With norm_topk_prob=False."""
    top, experts = logits.softmax(1).topk(k, dim=1)
    return top, experts


def deepseek_v2(
    logits: torch.Tensor, k: int, groups: int, top_groups: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Its topk_method "group_limited_greedy"."""
    scores = logits.softmax(1)
    tokens = scores.shape[0]
    group = scores.view(tokens, groups, -1).max(-1).values.topk(top_groups, dim=-1).indices
    mask = torch.zeros(tokens, groups).scatter_(1, group, 1).bool()
    mask = mask.repeat_interleave(scores.shape[1] // groups, dim=1)
    top, experts = scores.masked_fill(~mask, 0).topk(k, dim=1)
    return top * scale, experts


def deepseek_v3(
    logits: torch.Tensor, k: int, bias: torch.Tensor, groups: int, top_groups: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid()
    choice = scores + bias
    tokens = scores.shape[0]
    group = choice.view(tokens, groups, -1).topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    mask = torch.zeros(tokens, groups).scatter_(1, group, 1).bool()
    mask = mask.repeat_interleave(scores.shape[1] // groups, dim=1)
    experts = choice.masked_fill(~mask, -math.inf).topk(k, dim=1).indices
    weights = scores.gather(1, experts)
    return weights / (weights.sum(1, keepdim=True) + 1e-20) * scale, experts

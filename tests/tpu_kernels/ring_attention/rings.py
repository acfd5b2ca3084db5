"""One call of attention, by a ring of ranks: cut up, computed, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import bridge
from bridge import get_pallas_mesh
from bridge.ranks import run
from tpu_kernels import masks, ring_attention
from tpu_kernels.ring_attention.layouts import Layout, part_length, positions

from ..splash_attention.oracle import Case, Gradients

INPUTS = ("query", "key", "value")


def case(
    *,
    ranks: int,
    length: int,
    heads: int = 2,
    kv_heads: int = 1,
    kv_length: int | None = None,
    head_dim: int = 32,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    mask: masks.Mask | None = None,
    lse: bool = True,
    seed: int = 0,
    segment_ids: torch.Tensor | None = None,
    **options: Any,
) -> Case:
    """Random tensors; `visible` is the mask as a table."""
    del ranks
    kv_length = kv_length or length
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    tensors = {
        "query": draw(batch, heads, length, head_dim),
        "key": draw(batch, kv_heads, kv_length, head_dim),
        "value": draw(batch, kv_heads, kv_length, value_dim or head_dim),
    }
    visible = None
    if mask is not None:
        visible = table(mask, batch, heads, length, kv_length)
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        visible = same if visible is None else visible & same
        options["segment_ids"] = segment_ids
    g = draw(batch, heads, length, value_dim or head_dim)
    g_lse = torch.randn((batch, heads, length), generator=generator) if lse else None
    return Case(tensors, g, g_lse, visible, mask, options)


def table(mask: masks.Mask, batch: int, heads: int, length: int, kv_length: int) -> torch.Tensor:
    """Which scores count, as `masks` defines it."""
    from tpu_kernels.expressions.evaluate import evaluate
    from tpu_kernels.expressions.hoist import load_from

    env: dict[str, Any] = dict(
        zip(
            ("b", "h", "q", "kv"),
            np.ix_(*(np.arange(n, dtype=np.int32) for n in (batch, heads, length, kv_length))),
            strict=True,
        )
    )
    env |= {"q_len": np.int32(length), "kv_len": np.int32(kv_length)}
    captures = [np.asarray(c) for c in mask.captures]
    seen = np.asarray(evaluate(mask.expression, env, load_from(captures, env)))
    return torch.from_numpy(np.broadcast_to(seen, (batch, heads, length, kv_length)).copy())


def attended(
    given: Case,
    ranks: int,
    *,
    layout: Layout = "contiguous",
    mode: str = "fast",
    axes: Mapping[str, int] | None = None,
    device: torch.device | str = "cpu",
    call: Callable[..., Any] = ring_attention,
    **options: Any,
) -> Gradients:
    """o, lse and the gradients of a case, by so many ranks; axes are those of a mesh, the outer one first."""
    lengths = {name: t.shape[2] for name, t in given.tensors.items()}
    padded = {name: ranks * part_length(length, ranks, layout) for name, length in lengths.items()}
    all_options = {**given.options, **options}
    segment_ids = all_options.pop("segment_ids", None)
    if padded["key"] > lengths["key"]:
        all_options["length"] = lengths["key"]

    def part(tensor: torch.Tensor, name: str, rank: int, dim: int = 2) -> torch.Tensor:
        missing = padded[name] - lengths[name]
        pad = [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]
        at = torch.from_numpy(np.array(positions(rank, ranks, padded[name] // ranks, layout))).long()
        return F.pad(tensor, pad).index_select(dim, at).contiguous()

    def program() -> list[torch.Tensor]:
        rank = dist.get_rank()
        names = axes or {"x": ranks}
        mesh = get_pallas_mesh(tuple(names), tuple(names.values()))
        inputs = [part(given.tensors[name], name, rank).to(device).requires_grad_() for name in INPUTS]
        if segment_ids is not None:
            all_options_here = {
                **all_options,
                "q_segment_ids": part(segment_ids, "query", rank, 1).to(device),
            }
        else:
            all_options_here = all_options
        with bridge.interpret(mode):
            axis = next(iter(names)) if len(names) == 1 else tuple(names)
            o, lse = call(
                *inputs, mesh, axis, mask=given.mask, layout=layout, return_lse=True, **all_options_here
            )
            outputs, cotangents = [o], [part(given.g, "query", rank).to(device)]
            if given.g_lse is not None:
                outputs, cotangents = [o, lse], [*cotangents, part(given.g_lse, "query", rank).to(device)]
            gradients = torch.autograd.grad(outputs, inputs, cotangents)
        return [t.detach().cpu() for t in (o, lse, *gradients)]

    parts = run(program, ranks)
    names = ("o", "lse", *INPUTS)
    found = {}
    for i, name in enumerate(names):
        source = "query" if name in ("o", "lse") else name
        at = [
            torch.from_numpy(np.array(positions(rank, ranks, padded[source] // ranks, layout)))
            for rank in range(ranks)
        ]
        order = torch.argsort(torch.cat(at))
        whole = torch.cat([one[i] for one in parts], 2)[:, :, order]
        found[name] = whole[:, :, : lengths[source]].contiguous()
    return found

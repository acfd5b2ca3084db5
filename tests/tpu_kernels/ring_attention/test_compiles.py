"""Ring attention and its gradients for real chips: the TPU compiler takes every kernel of a ring."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from bridge import topology
from tpu_kernels import masks
from tpu_kernels.collectives.links import Line
from tpu_kernels.ring_attention import ops
from tpu_kernels.ring_attention.formula import CAUSAL
from tpu_kernels.splash_attention import terms

WINDOW = (masks.causal() & masks.sliding_window(500)).text
CAP = terms.soft_cap(30.0)

CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": CAUSAL, "layout": "zigzag"},
    "full": {"count": 300},
    "everything": {"mask": WINDOW, "score": CAP, "segments": True, "layout": "zigzag", "head_dim": 64},
    "two axes": {"mask": CAUSAL, "axes": ("a", "b"), "shape": (2, 2)},
    "float32": {"mask": CAUSAL, "dtype": "float32", "head_dim": 192},
    "short": {"mask": CAUSAL, "count": 10},
    "eight": {"mask": CAUSAL, "layout": "zigzag", "shape": (8,)},
    "eight in two axes": {"mask": CAUSAL, "axes": ("a", "b"), "shape": (2, 4)},
}
QUICK = [("causal", "v5e"), ("everything", "tpu7x")]
ALL = [(name, chip) for name in CASES for chip in ("v5e", "v6e", "tpu7x") if (name, chip) not in QUICK]


@pytest.mark.parametrize(
    ("name", "chip"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL)]
)
def test_forward_and_gradients_compile(name: str, chip: str) -> None:
    _compile(chip, **CASES[name])


def _compile(
    chip: str,
    *,
    mask: str = "",
    score: str = "",
    layout: Any = "contiguous",
    count: int = 512,
    heads: int = 2,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    segments: bool = False,
    axes: tuple[str, ...] = ("x",),
    shape: tuple[int, ...] = (4,),
) -> None:
    lines = tuple(Line(axis, size) for axis, size in zip(axes, shape, strict=True))
    mesh, own = topology.mesh(chip, axes, shape), P(axes)
    ranks = mesh.size

    def local(q: Any, k: Any, v: Any, ids: Any) -> Any:
        segment_ids = ids if segments else None

        def attend(q: Any, k: Any, v: Any) -> Any:
            call = ops.RingCall(mask, score, layout, ranks * count - 1, None, None, True, None, "pallas", ())
            ring = ops.attention(lines, q, k, v, [], call)
            return ring.forward(q, k, v, [], segment_ids, segment_ids)

        found, pull_back = jax.vjp(attend, q, k, v)
        return found[0], *pull_back(found)

    def array(heads: int) -> Any:
        return jax.ShapeDtypeStruct((ranks, heads, count, head_dim), jnp.dtype(dtype))

    arrays = [array(heads), array(1), array(1), jax.ShapeDtypeStruct((ranks, count), jnp.int32)]
    program = jax.shard_map(local, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)
    with topology.compile_for(
        program, arrays, chip, mesh=mesh, in_specs=(own,) * 4, out_specs=(own,) * 4
    ) as compiled:
        found = [kernel.name for kernel in compiled.kernels]
    assert sum("forward" in one for one in found) == ranks
    assert sum("backward" in one for one in found) == ranks

"""The kernels of the backward, against float64 within bounds derived from rounding (`oracle.py`)."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import bridge
from bridge.chips import chip
from bridge.topology import compile_for
from tpu_kernels import masks
from tpu_kernels._vmem import vmem_allowed
from tpu_kernels.expressions.expression import Load, Variable, apply
from tpu_kernels.splash_attention import vjp
from tpu_kernels.splash_attention.backward import backward
from tpu_kernels.splash_attention.blocks import AlignedLoad
from tpu_kernels.splash_attention.load_gradients import load_gradient
from tpu_kernels.splash_attention.space import resident_bytes
from tpu_kernels.splash_attention.tiles import Formula
from tpu_kernels.splash_attention.tiling import SplashTiling, Tiles

from . import oracle


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def make_case(
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 32,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    visible: torch.Tensor | None = None,
    mask: Any = None,
    more: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> oracle.Case:
    value_dim = head_dim if value_dim is None else value_dim
    tensors = {
        "query": normal(batch, heads, q_len, head_dim, seed=1, dtype=dtype),
        "key": normal(batch, kv_heads, kv_len, head_dim, seed=2, dtype=dtype),
        "value": normal(batch, kv_heads, kv_len, value_dim, seed=3, dtype=dtype),
        **(more or {}),
    }
    return oracle.Case(
        tensors,
        normal(batch, heads, q_len, value_dim, seed=4, dtype=dtype),
        g_lse=normal(batch, heads, q_len, seed=5),
        visible=visible,
        mask=mask,
        options=options,
    )


def tiling(tile: int = 128, sub: int = 128) -> SplashTiling:
    return SplashTiling(tile, tile, sub, sub, tile, tile, sub, sub)


def check(case: oracle.Case, sizes: SplashTiling | None = None) -> None:
    found = oracle.run(case, impl="pallas", tiling=tiling() if sizes is None else sizes)
    oracle.check(case, found, "pallas")


def distance(q_len: int, kv_len: int) -> torch.Tensor:
    """`q - kv`."""
    return torch.arange(q_len)[:, None] - torch.arange(kv_len)


def causal(q_len: int, kv_len: int, **rest: Any) -> oracle.Case:
    return make_case(q_len, kv_len, visible=distance(q_len, kv_len) >= 0, mask=masks.causal(), **rest)


# Shapes and masks -----------------------------------------------------------------------------------

SEEDS = {"dropout_p": 0.3, "seed": torch.tensor([3, -4], dtype=torch.int32)}

CASES = {
    "one": lambda: make_case(1, 1, heads=1, kv_heads=1, head_dim=1),
    "all visible, not a multiple": lambda: make_case(100, 300, value_dim=48),
    "few queries": lambda: causal(3, 200, heads=4, batch=2),
    "causal, groups": lambda: causal(300, 300, heads=6, kv_heads=2, batch=2, value_dim=16),
    "causal, one head of keys": lambda: causal(257, 129, heads=3, kv_heads=1, dtype=torch.bfloat16),
    "window": lambda: make_case(
        700,
        520,
        heads=1,
        kv_heads=1,
        visible=(distance(700, 520) >= 0) & (distance(700, 520) <= 100),
        mask=masks.sliding_window(100),
    ),
    "rows and keys without sight": lambda: make_case(
        300, 400, visible=distance(300, 400) >= 150, mask=masks.causal(offset=-150)
    ),
    "dropout": lambda: causal(300, 200, heads=4, **SEEDS),
    "dropout, bfloat16": lambda: make_case(130, 260, dtype=torch.bfloat16, **SEEDS),
    "soft cap": lambda: causal(300, 300, soft_cap=2.0),
    "soft cap, bfloat16, scale": lambda: make_case(
        200, 130, dtype=torch.bfloat16, head_dim=80, soft_cap=5.0, scale=-0.3
    ),
    "sinks": lambda: causal(200, 200, heads=4, more={"sinks": normal(4)}),
    "bfloat16, sinks": lambda: causal(200, 200, heads=4, dtype=torch.bfloat16, more={"sinks": normal(4)}),
    "large head": lambda: causal(140, 140, heads=1, kv_heads=1, head_dim=256, value_dim=192),
}


QUICK = ("one", "causal, groups", "causal, one head of keys")
"""Each takes seconds, to compile what is interpreted: the others are slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_gradients(name: str) -> None:
    check(CASES[name]())


@pytest.mark.slow
@pytest.mark.parametrize("tile_q, tile_kv, sub_q, sub_kv", [(128, 512, 128, 256), (512, 128, 256, 128)])
def test_other_tiles(tile_q: int, tile_kv: int, sub_q: int, sub_kv: int) -> None:
    sizes = SplashTiling(256, 256, 128, 128, tile_q, tile_kv, sub_q, sub_kv)
    check(causal(500, 600, heads=1, kv_heads=1), sizes)


@pytest.mark.slow
def test_masks_that_depend_on_arrays() -> None:
    ids = torch.sort(torch.randint(0, 3, (2, 300), generator=torch.Generator().manual_seed(0)))[0]
    same = ids[:, None, :, None] == ids[:, None, None, :]
    check(make_case(300, 300, batch=2, visible=same, mask=masks.segments(ids)))


def test_a_mask_for_each_head_in_groups() -> None:
    visible = torch.rand(1, 4, 200, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[:, 0, :, 128:] = False
    visible[:, 3, :100] = False
    check(make_case(200, 300, heads=4, visible=visible, mask=visible))


@pytest.mark.parametrize(
    "name, scores_stay",
    [
        pytest.param("causal, groups", False, marks=pytest.mark.slow),
        ("dropout", True),
        pytest.param("soft cap", False, marks=pytest.mark.slow),
    ],
)
def test_keys_in_ranges(name: str, scores_stay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if dk and dv of one tile were all that VMEM holds."""
    calls = []

    def in_ranges(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return backward(*arguments, **{**options, "resident_bytes": 1})

    monkeypatch.setattr(vjp.backward, "backward", in_ranges)
    # Sizes that no other test has: what is traced here is neither known from others nor kept for them.
    check(CASES[name](), SplashTiling(128, 256, 128, 256, 128, 128, 128, 128, scores_stay))
    assert calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "bfloat16, sinks", "causal, groups"])
def test_scores_stay(name: str) -> None:
    check(CASES[name](), SplashTiling(128, 128, 128, 128, 128, 256, 128, 128, backward_scores_stay=True))


@pytest.mark.parametrize(
    "name",
    ["causal, one head of keys", pytest.param("rows and keys without sight", marks=pytest.mark.slow)],
)
def test_in_the_tpu_interpreter(name: str) -> None:
    with bridge.interpret("tpu"):
        check(CASES[name]())


# Arrays that the scores depend on ------------------------------------------------------------------------

SHAPES = ((1, 1, 200, 300),)
SLOW_SHAPES = ((1, 1, 1, 1), (2, 4, 1, 1), (1, 4, 200, 1), (2, 1, 1, 300), (2, 4, 200, 300))


@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SLOW_SHAPES)], ids=str
)
def test_bias(shape: tuple[int, ...]) -> None:
    check(causal(200, 300, batch=2, heads=4, more={"bias": normal(*shape)}))


@pytest.mark.slow
def test_bias_of_minus_infinity() -> None:
    bias = normal(1, 2, 200, 300)
    bias[torch.rand(bias.shape, generator=torch.Generator().manual_seed(0)) < 0.3] = -torch.inf
    bias[:, 1, 7] = -torch.inf  # a row that sees nothing
    check(make_case(200, 300, more={"bias": bias}))


@pytest.mark.slow
def test_bias_of_bfloat16_and_dropout() -> None:
    bias = normal(1, 2, 200, 300, dtype=torch.bfloat16)
    check(causal(200, 300, dtype=torch.bfloat16, more={"bias": bias}, **SEEDS))


def test_factors_and_slopes() -> None:
    more = {"weights": normal(4), "alibi_slopes": normal(4).abs() * 0.1}
    check(causal(200, 200, heads=4, kv_heads=2, soft_cap=3.0, more=more))


@pytest.mark.slow
def test_array_in_the_tpu_interpreter() -> None:
    with bridge.interpret("tpu"):
        check(causal(140, 200, heads=1, kv_heads=1, more={"bias": normal(1, 1, 140, 200)}))


# For the compiler ------------------------------------------------------------------------------------

ARRAY = jax.ShapeDtypeStruct
CAUSAL = Variable("kv") <= Variable("q")


def arguments(length: int, heads: int, kv_heads: int, head_dim: int, dtype: Any) -> list[Any]:
    """q, k, v, o, lse, do, dlse."""
    q, k = ARRAY((1, heads, length, head_dim), dtype), ARRAY((1, kv_heads, length, head_dim), dtype)
    row = ARRAY((1, heads, length), jnp.float32)
    return [q, k, k, q, row, q, row]


every_chip = pytest.mark.parametrize(
    "name",
    ["tpu7x", pytest.param("v5e", marks=pytest.mark.slow), pytest.param("v6e", marks=pytest.mark.slow)],
)


@every_chip
@pytest.mark.parametrize(
    "length, heads, kv_heads, head_dim, dtype",
    [
        (1000, 4, 1, 64, jnp.bfloat16),
        pytest.param(700, 1, 1, 128, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_compiles(name: str, length: int, heads: int, kv_heads: int, head_dim: int, dtype: Any) -> None:
    scale, tiles = 1 / math.sqrt(head_dim), Tiles(512, 512, 256, 256)
    capped = Formula(CAUSAL, apply("tanh", Variable("score")), scale, dropout_p=0.1)
    plain = Formula(CAUSAL, None, scale, dropout_p=0.0)
    on = chip(name)
    limits: dict[str, Any] = {"vmem_limit_bytes": vmem_allowed(on), "resident_bytes": resident_bytes(on)}

    def gradients(q, k, v, o, lse, d_o, d_lse, seed):  # pyright: ignore[reportMissingParameterType]
        given = q, k, v, [], seed, o, lse, d_o, d_lse
        without_seed = q, k, v, [], None, o, lse, d_o, d_lse
        return (
            backward(*given, formula=capped, tiles=tiles, **limits),
            backward(*without_seed, formula=plain, tiles=tiles, scores_stay=True, **limits),
        )

    given = arguments(length, heads, kv_heads, head_dim, dtype)
    compiled = compile_for(gradients, [*given, ARRAY((2,), jnp.int32)], name)
    assert len(compiled.kernels) == 2
    for kernel in compiled.kernels:
        assert kernel.vmem_bytes is not None and kernel.vmem_bytes <= chip(name).vmem_limit_bytes


@every_chip
def test_gradients_of_arrays_compile(name: str) -> None:
    axes = (("h",), ("b", "q"), ("h", "kv"), ("q", "kv"))
    variables = {name: Variable(name) for name in ("b", "h", "q", "kv")}
    score = functools.reduce(
        lambda e, slot: e + Load(slot, tuple(variables[a] for a in axes[slot]), "float"),
        range(len(axes)),
        Variable("score"),
    )
    lengths = {"b": 1, "h": 2, "q": 300, "kv": 300}
    arrays = [ARRAY(tuple(lengths[a] for a in names), jnp.float32) for names in axes]

    def gradients(q, k, v, o, lse, d_o, d_lse, *arrays):  # pyright: ignore[reportMissingParameterType]
        aligned = [AlignedLoad(array, names) for array, names in zip(arrays, axes, strict=True)]
        given = q, k, v, aligned, None, o, lse, d_o, d_lse
        formula, tiles = Formula(CAUSAL, score, scale=0.1, dropout_p=0.0), Tiles(256, 256, 128, 128)
        limit = vmem_allowed(chip(name))
        return [
            load_gradient(slot, *given, formula=formula, tiles=tiles, vmem_limit_bytes=limit)
            for slot in range(len(axes))
        ]

    given = arguments(300, 2, 1, 128, jnp.bfloat16)
    compiled = compile_for(gradients, [*given, *arrays], name)
    assert len(compiled.kernels) == len(axes)

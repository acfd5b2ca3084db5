"""Splash attention as tests, benchmarks, documentation and the tuner see it."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autotune.problem import ArraySpec, Problem, numpy_dtype
from autotune.spec import Arrays, Example, KernelSpec
from tpu_kernels._select import Implementation
from tpu_kernels.expressions.evaluate import evaluate
from tpu_kernels.expressions.expression import parse
from tpu_kernels.masks import Mask
from tpu_kernels.splash_attention import api, bounds, space, vjp
from tpu_kernels.splash_attention.reference import default_scale, splash_attention_reference
from tpu_kernels.splash_attention.tiling import SplashTiling

CAUSAL = "ge(q,kv)"
WINDOW = "and(ge(q,kv),le(sub(q,kv),4095))"


def _fn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: str,
    score: str,
    scale: float | None,
    dropout_p: float,
    tiling: SplashTiling | None = None,
    impl: Implementation = "auto",
) -> jax.Array:
    return vjp.splash_attention(q, k, v, (), None, None, mask, score, scale, dropout_p, tiling, impl)[0]


def _reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: str,
    score: str,
    scale: float | None,
    dropout_p: float,
) -> jax.Array:
    return splash_attention_reference(q, k, v, (), None, None, mask, score, scale, dropout_p)[0]


def _torch_call(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tiling: SplashTiling | None = None,
    impl: Implementation = "auto",
) -> torch.Tensor:
    mask = problem.param("mask")
    return api.splash_attention(
        q,
        k,
        v,
        mask=Mask(mask) if mask else None,
        scale=problem.param("scale"),
        tiling=tiling,
        impl=impl,
    )


def _torch_equivalent(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    visible = torch.from_numpy(_visible(problem, q.shape[2], k.shape[2])).to(q.device)
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
        return F.scaled_dot_product_attention(q, k, v, visible, scale=problem.param("scale"), enable_gqa=True)


def _error_bounds(problem: Problem, arrays: Arrays, cotangent: np.ndarray) -> tuple[np.ndarray | None, ...]:
    """Bounds of the errors of o, dq, dk and dv; see `bounds`."""
    q, k, v = arrays
    assert q is not None and k is not None and v is not None
    scale = problem.param("scale")
    scale = default_scale(q.shape[-1]) if scale is None else scale
    dtype = problem.required("q").dtype
    arithmetic = ml_dtypes.finfo("float64" if dtype == "float64" else "float32")
    # The reference, which computes the other dtypes, rounds nothing in between.
    operand = ml_dtypes.finfo(numpy_dtype(dtype)) if dtype in space.KERNEL_DTYPES else arithmetic
    unit = float(operand.eps) / 2
    rounding = bounds.Roundings(
        arithmetic=float(arithmetic.eps) / 2,
        operand=unit,
        output=unit,
        query=unit,
        underflow=max(float(operand.smallest_normal), float(arithmetic.smallest_normal)),
    )
    s = scale * q @ bounds.per_query_head(k, q.shape[1]).swapaxes(-1, -2)
    s = np.where(_visible(problem, *s.shape[2:]), s, -np.inf)
    errors = bounds.attention_errors(
        q,
        k,
        v,
        s,
        bounds.score_errors(q, k, scale, rounding),
        cotangent,
        np.zeros(s.shape[:-1]),
        rounding,
        scale=scale,
    )
    return errors.o, errors.dq, errors.dk, errors.dv


def _visible(problem: Problem, q_len: int, kv_len: int) -> np.ndarray:
    """What the mask lets see, bool [1, 1, L, S]; the problems here have masks of positions alone."""
    if problem.param("score") or problem.param("dropout_p"):
        raise ValueError(f"{problem}: a problem of the catalog has no score changes and no dropout")
    visible = np.ones((1, 1, q_len, kv_len), np.bool_)
    if problem.param("mask"):
        env = {
            "q": np.arange(q_len, dtype=np.int32)[:, None],
            "kv": np.arange(kv_len, dtype=np.int32),
            "q_len": np.int32(q_len),
            "kv_len": np.int32(kv_len),
        }
        visible &= np.asarray(evaluate(parse(problem.param("mask")), env, _no_loads))
    return visible


def _no_loads(load: object) -> object:
    raise ValueError(f"a problem of the catalog loads no arrays, got {load!r}")


_Shape = tuple[int, int, int, int]


def _problem(
    q: _Shape, dtype: str, *, k: _Shape | None = None, v: _Shape | None = None, mask: str = CAUSAL
) -> Problem:
    k = q if k is None else k
    v = k if v is None else v
    arrays = {name: ArraySpec(shape, dtype) for name, shape in (("q", q), ("k", k), ("v", v))}
    return space.problem_of(arrays, mask=mask)


_SMALL: tuple[tuple[Problem, str], ...] = (
    (_problem((1, 1, 128, 128), "float32"), "one sub-block"),
    (_problem((1, 1, 1, 1), "float32"), "a single score"),
    (_problem((2, 3, 37, 16), "bfloat16", mask=""), "less than a register both ways, and no mask"),
    (_problem((1, 4, 130, 64), "bfloat16", k=(1, 2, 130, 64)), "two query heads for each key head; ragged"),
    (_problem((1, 2, 129, 80), "float32", k=(1, 1, 300, 80)), "more keys than queries"),
    (_problem((1, 2, 300, 72), "float32", k=(1, 2, 129, 72)), "more queries than keys"),
    (_problem((1, 1, 140, 192), "bfloat16", v=(1, 1, 140, 128)), "values smaller than keys"),
    (_problem((1, 1, 700, 8), "float32", mask="and(ge(q,kv),le(sub(q,kv),99))"), "a window over two tiles"),
    (_problem((1, 1, 20, 8), "float32", mask="gt(kv,q)"), "a last row that sees nothing"),
    (_problem((0, 2, 20, 8), "float32"), "no batch"),
    (_problem((1, 2, 20, 8), "float16"), "a dtype the kernel does not compute with"),
)

_MODELS: tuple[tuple[Problem, str], ...] = (
    (_problem((1, 32, 8192, 128), "bfloat16", k=(1, 8, 8192, 128)), "Llama 3 8B, 8192 tokens"),
    (_problem((1, 64, 8192, 128), "bfloat16", k=(1, 8, 8192, 128)), "Llama 3 70B, 8192 tokens"),
    (
        _problem((1, 32, 16384, 128), "bfloat16", k=(1, 8, 16384, 128), mask=WINDOW),
        "Mistral 7B, 16384 tokens, window of 4096",
    ),
    (_problem((8, 12, 197, 64), "bfloat16", mask=""), "ViT-B/16, 8 pictures"),
)

SPEC = KernelSpec(
    name="splash_attention",
    summary="Attention with masks and score changes in the kernel; blocks that see nothing are skipped.",
    formula="softmax(scale * q kᵀ where mask) v",
    arguments=("q", "k", "v"),
    implementations=("pallas", "reference"),
    fn=_fn,
    reference=_reference,
    torch_call=_torch_call,
    torch_equivalent=_torch_equivalent,
    tiling_type=SplashTiling,
    make_problem=space.make_problem,
    unsupported_reasons=space.unsupported_reasons,
    space=space.space,
    default_tiling=space.default_tiling,
    costs=space.costs,
    error_bounds=_error_bounds,
    examples=(
        *(Example(problem, reason) for problem, reason in _SMALL),
        *(Example(problem, reason, benchmark=True) for problem, reason in _MODELS),
    ),
)

"""RMS norm as tests, benchmarks, documentation and the tuner see it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autotune.problem import Problem
from autotune.spec import KernelSpec
from tpu_kernels._row_examples import row_examples
from tpu_kernels._rows import RowTiling
from tpu_kernels._select import Implementation
from tpu_kernels.rms_norm import api, reference, space, vjp


def _torch_call(
    problem: Problem,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    tiling: RowTiling | None = None,
    impl: Implementation = "auto",
) -> torch.Tensor:
    return api.rms_norm(x, x.shape[-1:], weight, problem.param("eps"), tiling=tiling, impl=impl)


def _torch_equivalent(problem: Problem, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, problem.param("eps"))


SPEC = KernelSpec(
    name="rms_norm",
    summary="Divide each row by its root mean square.",
    formula="x / sqrt(mean(x²) + eps) * weight",
    arguments=("x", "weight"),
    implementations=("pallas", "reference"),
    fn=vjp.rms_norm,
    reference=reference.rms_norm_reference,
    torch_call=_torch_call,
    torch_equivalent=_torch_equivalent,
    tiling_type=RowTiling,
    make_problem=space.make_problem,
    unsupported_reasons=space.unsupported_reasons,
    space=space.space,
    default_tiling=space.default_tiling,
    costs=space.costs,
    error_bounds=reference.error_bounds,
    examples=row_examples("rms_norm", ("weight",), {"eps": 1e-6}),
)

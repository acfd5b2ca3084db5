"""A sample of torch's own operator database: values and gradients on tpu against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map_only

STRIDE = 9
SAMPLES = 3

# Ops that give other numbers at each call, or uninitialised memory: only what they return is compared.
RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "cauchy")
RANDOM += ("geometric", "empty", "rrelu", "lowrank", "poisson")

NOT_COMPARABLE = {
    "jiterator": "for CUDA only",
    "as_strided.partial_views": "its samples read storage that .to('tpu') does not copy",
    "tensor_split": "takes its indices on the CPU only, as on cuda",
    "sparse": "sparse tensors are refused",
    "masked": "its samples include sparse masks",
}


def _name(op: OpInfo) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


OPS = [op for op in op_db[::STRIDE] if op.dtypes and not any(part in _name(op) for part in NOT_COMPARABLE)]


@pytest.mark.filterwarnings("ignore")  # the database warns about what it tests
@pytest.mark.parametrize("op", OPS, ids=_name)
def test_values_and_gradients(op: OpInfo) -> None:
    dtype = torch.float32 if torch.float32 in op.dtypes else sorted(op.dtypes, key=str)[0]
    differentiable = op.supports_autograd and dtype.is_floating_point
    compared = not any(part in op.name for part in RANDOM)
    for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=differentiable)):
        if number == SAMPLES:
            break
        on_tpu = _on_tpu(sample)  # first: some ops write to their inputs
        expected, wanted = _run(op, sample, differentiable and compared)
        got, gradients = _run(op, on_tpu, differentiable and compared)
        assert len(got) == len(expected)
        if any(isinstance(v, torch.Tensor) for v in tree_leaves((sample.input, sample.args, sample.kwargs))):
            assert all(g.device.type == "tpu" for g in got)
        if compared:
            torch.testing.assert_close([g.cpu() for g in got], expected, equal_nan=True)
            torch.testing.assert_close([g.cpu() for g in gradients], wanted, equal_nan=True)
        else:
            assert [g.shape for g in got] == [e.shape for e in expected]


def _on_tpu(sample: SampleInput) -> SampleInput:
    def move(value: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda t: t.detach().to("tpu").requires_grad_(t.requires_grad), value
        )

    kwargs = {k: torch.device("tpu") if k == "device" else move(v) for k, v in sample.kwargs.items()}
    return SampleInput(move(sample.input), args=move(sample.args), kwargs=kwargs)


def _run(
    op: OpInfo, sample: SampleInput, with_gradients: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    results = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    inputs = [
        t
        for t in tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    roots = [(t.abs() if t.is_complex() else t).sum() for t in tensors if t.requires_grad]
    if not with_gradients or not roots or not inputs:
        return [t.detach() for t in tensors], []
    gradients = torch.autograd.grad(roots, inputs, allow_unused=True)
    return [t.detach() for t in tensors], [g for g in gradients if g is not None]

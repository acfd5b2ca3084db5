"""Verdicts on tensors are kept for as long as nothing can have changed, and no longer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tpu_kernels.dropins.remembered import remembered


def total(*tensors: torch.Tensor, kind: str = "sum") -> float:
    return remembered(tensors, (kind, len(tensors)), lambda: float(sum(t.sum() for t in tensors)))


def test_a_verdict_is_kept_until_a_tensor_is_written_to(tpu: torch.device) -> None:
    a, b = torch.ones(4, device=tpu), torch.ones(4, device=tpu)
    calls = []
    for _ in range(2):
        assert remembered([a, b], "count", lambda: calls.append(1) or 8.0) == 8.0
    assert len(calls) == 1
    for write in (lambda: a.add_(1), lambda: b[:2].zero_(), lambda: torch._foreach_zero_([a])):
        assert total(a, b) == float(a.sum() + b.sum())
        write()
        assert total(a, b) == float(a.sum() + b.sum())


def test_kinds_do_not_push_each_other_out_and_keys_do_not_mix(tpu: torch.device) -> None:
    a = torch.ones(4, device=tpu)
    calls = []
    for _ in range(2):
        for key in (("one", 1), ("two", 1)):
            remembered([a], key, lambda: calls.append(1))
    assert len(calls) == 2
    assert remembered([a], ("one", 2), lambda: "another key") == "another key"


@pytest.mark.parametrize("memory", ["numpy", "inference"])
def test_what_may_change_unnoticed_is_read_each_time(memory: str, tpu: torch.device) -> None:
    array = np.ones(4, np.float32)
    if memory == "numpy":
        tensor = torch.from_numpy(array)
        assert total(tensor) == 4
        array[:] = 2
    else:
        with torch.inference_mode():
            tensor = torch.ones(4, device=tpu)
            assert total(tensor) == 4
            tensor.add_(1)
    assert total(tensor) == 8


def test_other_memory_is_another_tensor(tpu: torch.device) -> None:
    a = torch.ones(4, device=tpu)
    assert total(a) == 4
    a.data = torch.full((4,), 3.0, device=tpu)
    assert total(a) == 12

"""Writes on the tpu device count in the versions of tensors as on the CPU, so that autograd sees them.

test_opinfo.py compares the ops that torch counts itself on every device. Here are those that it does not:
ops on lists, fused optimizers, gradient scaling, and ops of libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


def versions(*values: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def assert_counted_as_on_cpu(function: Callable[[str], Any]) -> Any:
    """The function gives the same for both devices; returns that."""
    expected = function("cpu")
    assert function("tpu") == expected
    return expected


def several(value: float, device: str) -> list[torch.Tensor]:
    return [torch.full((3,), float(value), device=device) for _ in range(2)]


def steps(device: str) -> list[torch.Tensor]:
    return [torch.ones((), device=device) for _ in range(2)]


# -- ops on lists --------------------------------------------------------------------------------

FOREACH: dict[str, Callable[[list[torch.Tensor], str], Any]] = {
    "add_, number": lambda x, d: torch._foreach_add_(x, 1),
    "add_, list": lambda x, d: torch._foreach_add_(x, several(1, d), alpha=2),
    "sub_, numbers": lambda x, d: torch._foreach_sub_(x, [1, 2]),
    "mul_, tensor": lambda x, d: torch._foreach_mul_(x, torch.tensor(2.0, device=d)),
    "div_": lambda x, d: torch._foreach_div_(x, several(2, d)),
    "zero_": lambda x, d: torch._foreach_zero_(x),
    "copy_": lambda x, d: torch._foreach_copy_(x, several(2, d)),
    "copy_, from the CPU": lambda x, d: torch._foreach_copy_(x, several(2, "cpu")),
    "lerp_": lambda x, d: torch._foreach_lerp_(x, several(2, d), 0.5),
    "addcmul_": lambda x, d: torch._foreach_addcmul_(x, several(2, d), several(2, d)),
    "addcdiv_, numbers": lambda x, d: torch._foreach_addcdiv_(x, several(2, d), several(2, d), [1, 2]),
    "sqrt_": lambda x, d: torch._foreach_sqrt_(x),
    "clamp_max_": lambda x, d: torch._foreach_clamp_max_(x, 0.5),
    "add, out": lambda x, d: aten._foreach_add.Scalar_out(several(1, d), 1, out=x),
    "unbind_copy, out": lambda x, d: aten.unbind_copy.int_out(torch.ones(2, 3, device=d), 0, out=x),
    "split_copy, out": lambda x, d: aten.split_copy.Tensor_out(torch.ones(6, device=d), 3, 0, out=x),
}


@pytest.mark.parametrize("name", FOREACH)
def test_ops_on_lists(name: str) -> None:
    def count(device: str) -> list[int]:
        tensors = several(1, device)
        FOREACH[name](tensors, device)
        return versions(tensors)

    assert assert_counted_as_on_cpu(count) == [1, 1]


def test_views_and_their_base_share_a_counter() -> None:
    def count(device: str) -> list[int]:
        base = torch.zeros(4, device=device)
        halves = base[:2], base[2:]
        torch._foreach_add_(list(halves), 1)
        torch._foreach_mul_([base], 2)
        detached = base.detach()
        torch._foreach_add_([detached, detached], 1)
        return versions(base, halves, detached)

    assert assert_counted_as_on_cpu(count) == [5] * 4


def test_a_long_list() -> None:
    def count(device: str) -> list[int]:
        tensors = [torch.zeros(2, device=device) for _ in range(40)]
        torch._foreach_add_([*tensors, *tensors], 1)
        return versions(tensors)

    assert assert_counted_as_on_cpu(count) == [2] * 40


def test_what_was_written_before_an_error_is_counted() -> None:
    def count(device: str) -> list[int]:
        tensors = several(1, device)
        with pytest.raises(RuntimeError, match="must match"):
            torch._foreach_add_(tensors, [torch.ones(3, device=device), torch.ones(2, device=device)])
        return versions(tensors)

    assert assert_counted_as_on_cpu(count) == [1, 0]


# -- optimizers and gradient scaling -------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_before_backward_is_noticed(device: str, options: dict[str, Any], optimizer: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3, device=device))
    weight.grad = torch.ones(3, device=device)
    loss = (weight**2).sum()
    optimizer([weight], lr=1.0, **options).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("op", [torch._fused_adam_, torch._fused_adamw_])
@pytest.mark.parametrize("scaled", [False, True])
def test_fused_adam(op: Any, scaled: bool) -> None:
    def count(device: str) -> list[int]:
        lists = [*(several(value, device) for value in (1, 1, 0, 0, 0)), steps(device)]
        numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
        scaling = {name: torch.ones((), device=device) for name in ("grad_scale", "found_inf") if scaled}
        op(*lists, **numbers, amsgrad=True, maximize=False, **scaling)
        return versions(lists, scaling)

    assert_counted_as_on_cpu(count)


def test_other_fused_optimizers_and_gradient_scaling() -> None:
    def count(device: str) -> list[int]:
        momentum = [several(value, device) for value in (1, 1, 0)]
        torch._fused_sgd_(
            *momentum,
            **{"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0},
            **{"nesterov": False, "maximize": False, "is_first_step": False},
        )
        adagrad = [*(several(value, device) for value in (1, 1, 0)), steps(device)]
        torch._fused_adagrad_(*adagrad, lr=0.1, lr_decay=0.0, weight_decay=0.0, eps=1e-8, maximize=False)
        gradients, found, scale = (
            several(1, device),
            torch.zeros(1, device=device),
            torch.ones(1, device=device),
        )
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
        growth = torch.zeros(1, dtype=torch.int32, device=device)
        torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 1)
        return versions(momentum, adagrad, gradients, found, scale, growth)

    assert_counted_as_on_cpu(count)


# -- ops that write to several arguments, statistics, geometry, random numbers --------------------


def test_ops_that_torch_counts_are_counted_once() -> None:
    def count(device: str) -> list[int]:
        x = torch.arange(12.0, device=device).reshape(4, 3)
        least, most = torch.zeros((), device=device), torch.zeros((), device=device)
        aten.aminmax.out(x.flatten(), dim=0, min=least, max=most)
        put, resized, moved, emptied = (torch.zeros(3, device=device) for _ in range(4))
        aten._index_put_impl_(put, [torch.tensor([0], device=device)], torch.ones(1, device=device))
        resized.resize_(100)
        moved.set_(torch.ones(3, device=device).untyped_storage(), 0, (2,), (1,))
        emptied.set_()  # pyright: ignore[reportCallIssue]
        random = [torch.ones(3, device=device) for _ in range(3)]
        for tensor, fill in zip(random, ("uniform_", "normal_", "exponential_"), strict=True):
            getattr(tensor, fill)()
        statistics = [several(1, device) for _ in range(3)]
        aten.native_batch_norm(x, None, None, *statistics[0], True, 0.1, 1e-5)
        for norm, given, of in (("batch", x, 1), ("instance", torch.ones(2, 3, 4, device=device), 2)):
            getattr(torch.nn.functional, f"{norm}_norm")(given, *statistics[of])
        return versions(least, most, put, resized, moved, emptied, random, statistics)

    assert assert_counted_as_on_cpu(count)[:9] == [1] * 9


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("test_versions", "FRAGMENT") as library:
        yield library


def test_ops_of_libraries(library: torch.library.Library) -> None:
    def change(first: torch.Tensor, others: list[torch.Tensor], last: torch.Tensor | None = None) -> None:
        first.add_(1)
        first.mul_(2)
        for other in others:
            other.zero_()
        if last is not None:
            last.fill_(1)

    library.define("change(Tensor(a!) first, Tensor(b!)[] others, Tensor(c!)? last=None) -> ()")
    library.impl("change", change, "CPU")
    library.define("add_twice_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("add_twice_", lambda x: x.add_(1).add_(1), "CPU")
    library.define("grow(Tensor(a!)[] x) -> ()")
    library.impl("grow", lambda x: [t.resize_(20).fill_(1) for t in x] and None, "CPU")
    custom = torch.library.custom_op(
        "test_versions::custom", change, mutates_args=("first", "others", "last"), device_types="cpu"
    )
    ops = torch.ops.test_versions

    def count(device: str) -> list[int]:
        one, two = ([torch.zeros(3, device=device), several(1, device)] for _ in range(2))
        last = torch.zeros(3, device=device)
        twice = torch.zeros(3, device=device)
        ops.change(*one, last)
        custom(*two)
        ops.add_twice_(twice)
        return versions(one, last, two, twice)

    assert assert_counted_as_on_cpu(count) == [2, 1, 1, 1, 3, 2, 2, 2]
    grown = several(1, "tpu")
    ops.grow(grown)  # pure Python runs it twice
    assert all(t._version >= 2 and t.tolist() == [1] * 20 for t in grown)


# -- modes ---------------------------------------------------------------------------------------


def test_modes() -> None:
    def count(device: str) -> list[int]:
        tensors = several(1, device)
        with torch.no_grad():
            torch._foreach_add_(tensors, 1)
        with torch.inference_mode():
            without = torch.ones(3, device=device)
            torch._foreach_add_([*tensors, without], 1)
            torch._foreach_mul_([without], 1)
            without.add_(1)
            tensors[0].add_(1)
            assert without.is_inference() and without.tolist() == [3] * 3
        return versions(tensors)

    assert assert_counted_as_on_cpu(count) == [3, 2]


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_tensors_without_a_counter_are_not_written_outside_of_inference_mode(device: str) -> None:
    with torch.inference_mode():
        without = torch.ones(3, device=device)
    normal = torch.ones(3, device=device)
    for write in (
        lambda: without.add_(1),
        lambda: torch._foreach_add_([without], 1),
        lambda: torch._foreach_zero_([normal, without]),
    ):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            write()
    torch._foreach_add_([normal], [without])  # it is still read
    assert normal._version == 2

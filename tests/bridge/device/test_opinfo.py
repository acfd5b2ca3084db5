"""torch's own databases of operators (OpInfo) and optimisers as the measure of the tpu device.

Every entry is compared with the CPU.

The inputs come from torch's generators, made on the device. Both devices get their own copy of them, with
the same storages, strides and shared memory. The quick tests take the first samples of every op in one
dtype; the slow ones take all its samples, and the first samples in every dtype that it supports on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal import common_utils
from torch.testing._internal.common_device_type import OpDTypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db, optims
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo import core as opinfo_core
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

from .opinfo_exceptions import FAILURES, MIXED_DEVICES, TOLERANCES, UNDEFINED_VALUES

pytestmark = pytest.mark.filterwarnings("ignore")  # the database warns about what it tests

FEW = 3
ALL = 1_000_000


def _without_torchs_skips(infos: list[OpInfo]) -> list[OpInfo]:
    """The entries without the decorators by which torch leaves ops out of its own tests of a device."""
    bare = [copy.copy(info) for info in infos]
    for info in bare:
        info.decorators = ()
    return bare


op_db = _without_torchs_skips(database.op_db)
foreach_db = _without_torchs_skips(
    [
        *database.foreach_unary_op_db,
        *database.foreach_binary_op_db,
        *database.foreach_pointwise_op_db,
        *database.foreach_reduce_op_db,
        *database.foreach_other_op_db,
    ]
)

Arguments = tuple[Any, Any, Any]  # input, args, kwargs


@pytest.fixture(autouse=True, scope="module")
def _no_walks_through_the_stack() -> Iterator[None]:
    """torch's tests look for the running test in the call stack, several times each: most of their time."""
    with mock.patch.object(common_utils, "extract_test_fn", lambda: None):
        with mock.patch.object(opinfo_core, "extract_test_fn", lambda: None):
            yield


class TestOps(TestCase):
    @ops(op_db, dtypes=OpDTypes.any_one)
    def test_values_gradients_and_views(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with expected_failure(op):
            if not check_function(op, dtype, device, FEW):
                self.skipTest("no sample runs on the CPU")

    @ops(op_db, allowed_dtypes=[torch.complex64])
    def test_complex(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with expected_failure(op):
            check_function(op, dtype, device, 1)

    @ops([op for op in op_db if op.inplace_variant], dtypes=OpDTypes.any_one)
    def test_in_place(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        check_in_place(op, dtype, device, FEW)

    @ops([op for op in op_db if op.supports_out], dtypes=OpDTypes.any_one)
    def test_out(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with expected_failure(op):
            check_out(op, dtype, device, FEW)

    @ops([op for op in op_db if op.error_inputs_func], dtypes=OpDTypes.none)
    def test_errors(self, device: str, op: OpInfo) -> None:
        check_errors(op, device)

    @ops([op for op in op_db if op.full_name not in FAILURES], dtypes=OpDTypes.any_one)
    def test_mixed_devices(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        check_mixed_devices(op, dtype, device, 2 * FEW)

    @ops(foreach_db, dtypes=OpDTypes.any_one)
    def test_foreach(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        check_function(op, dtype, device, FEW)
        check_in_place(op, dtype, device, FEW)

    @optims([info for info in optim_db if not info.only_supports_sparse_grads])
    def test_optimizer(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        for given in optim_info.optim_inputs_func("cpu"):
            choices = [name for name in optim_info.supported_impls if name != "differentiable"]
            for choice in ({}, *({name: True} for name in choices)):
                check_optimizer(optim_info, {**given.kwargs, **choice}, dtype, device)

    @pytest.mark.slow
    @ops([*op_db, *foreach_db], dtypes=OpDTypes.any_one)
    def test_every_sample(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with expected_failure(op):
            check_function(op, dtype, device, ALL)
            check_in_place(op, dtype, device, ALL)
            check_out(op, dtype, device, 10 * FEW)

    @pytest.mark.slow
    @ops([*op_db, *foreach_db], dtypes=OpDTypes.none)
    def test_every_dtype(self, device: str, op: OpInfo) -> None:
        for dtype in sorted(op.supported_dtypes("cpu"), key=str):
            with expected_failure(op):
                check_function(op, dtype, device, FEW)
                check_in_place(op, dtype, device, FEW)
                check_out(op, dtype, device, 1)


instantiate_device_type_tests(TestOps, globals(), only_for="tpu")


def test_at_most_one_op_in_a_hundred_fails() -> None:
    names = {op.full_name for op in op_db}
    assert names >= FAILURES.keys() | MIXED_DEVICES.keys() | UNDEFINED_VALUES | {
        name for name, _ in TOLERANCES
    }
    assert len(FAILURES) <= len(names) / 100


@contextlib.contextmanager
def expected_failure(op: OpInfo) -> Iterator[None]:
    """Lets an op of the list fail in the way listed, and nothing else: not even succeed."""
    failure = FAILURES.get(op.full_name)
    if failure is None:
        yield
        return
    try:
        yield
    except Exception as error:
        assert re.search(failure.error, str(error)), f"fails in another way than listed: {error!r}"
    else:
        raise AssertionError(f"{op.full_name} is listed as failing ({failure.reason}) and does not fail")


# -- what is checked -----------------------------------------------------------------------------


def check_function(op: OpInfo, dtype: torch.dtype, device: str, limit: int) -> int:
    """Results, what they share with the inputs, the inputs afterwards, and gradients.

    Returns how many samples were compared: those that the CPU refuses only have to be refused here, too.
    """
    compared = 0
    differentiable = dtype in op.supported_backward_dtypes("cpu")
    for sample, given in _samples(op, dtype, device, limit, differentiable):
        here, there = _copy(given, device), _copy(given, "cpu")
        expected = _attempt(op, there)
        got = _attempt(op, here)
        if isinstance(expected, Exception):
            _assert_same_error(got, expected)
            continue
        _assert_same(op, got, expected)
        _assert_same(op, here, there)
        assert _versions(here) == _versions(there)
        _assert_on_device(got, here)
        assert _sharing(got, here) == _sharing(expected, there)
        compared += 1
        if not differentiable or op.full_name in UNDEFINED_VALUES:
            continue
        process = sample.output_process_fn_grad or (lambda result: result)
        wanted = _gradients(process(expected), there)
        if not isinstance(wanted, Exception):
            _assert_same(op, _gradients(process(got), here), wanted)
    return compared


def check_in_place(op: OpInfo, dtype: torch.dtype, device: str, limit: int) -> None:
    """The in-place variant: values, the tensor returned, version counters, errors."""
    if op.inplace_variant is None:
        return
    for sample, given in _samples(op, dtype, device, limit):
        if sample.broadcasts_input:  # the result does not fit in the input
            continue
        here, there = _copy(given, device), _copy(given, "cpu")
        expected = _attempt(op.inplace_variant, there)
        got = _attempt(op.inplace_variant, here)
        if isinstance(expected, Exception):
            _assert_same_error(got, expected)
            continue
        _assert_same(op, here, there)
        assert _versions(here) == _versions(there)
        assert (got is here[0]) == (expected is there[0])


def check_out(op: OpInfo, dtype: torch.dtype, device: str, limit: int) -> None:
    """`out=` in every form: values, geometry, warnings, errors."""
    if not op.supports_out:
        return
    for _, given in _samples(op, dtype, device, limit):
        here, there = _copy(given, device), _copy(given, "cpu")
        result = _attempt(op, there)
        if isinstance(result, Exception):
            continue
        for form, make in OUT_FORMS.items():
            out_here, out_there = (_each_tensor(result, make(d)) for d in (device, "cpu"))
            expected, expected_warnings = _with_out(op, there, out_there)
            got, got_warnings = _with_out(op, here, out_here)
            if isinstance(expected, Exception):
                _assert_same_error(got, expected)
                continue
            assert got_warnings == expected_warnings, form
            _assert_same(op, out_here, out_there)
            if form not in RESIZED:
                assert _versions(out_here) == _versions(out_there), form
            assert _same_objects(got, out_here) == _same_objects(expected, out_there), form
        _assert_cpu_out_is_refused(op, here, result)


OUT_FORMS: dict[str, Callable[[str], Callable[[torch.Tensor], torch.Tensor]]] = {
    "as the result": lambda d: lambda t: torch.full(t.shape, 7, device=d).to(t.dtype),
    "no elements": lambda d: lambda t: torch.empty(0, dtype=t.dtype, device=d),
    "strided": lambda d: lambda t: torch.zeros((*t.shape, 2), dtype=t.dtype, device=d)[..., 0],
    "another shape": lambda d: lambda t: torch.zeros((*t.shape, 2), dtype=t.dtype, device=d),
    "another dtype": lambda d: (
        lambda t: torch.zeros(t.shape, dtype=torch.int8 if t.dtype is torch.int32 else torch.int32, device=d)
    ),
}


RESIZED = ("no elements", "another shape")
"""The forms in which some ops resize `out` by an op of its own on tpu: its version is counted once more."""


def _with_out(op: OpInfo, arguments: Arguments, out: Any) -> tuple[Any, set[str]]:
    """The result of the call, or its error, and the warnings given."""
    given, args, kwargs = arguments
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = _attempt(op, (given, args, {**kwargs, "out": out}))
    finally:
        torch.set_warn_always(before)
    # Making a complex32 tensor warns, wherever one is made.
    return result, {str(w.message) for w in caught if "ComplexHalf" not in str(w.message)}


def _assert_cpu_out_is_refused(op: OpInfo, arguments: Arguments, result: Any) -> None:
    if op.full_name == "lu" or not any(not t.is_cpu for t in _tensors(arguments)):
        return  # torch.lu is a Python function that copies into its `out`
    got, _ = _with_out(op, arguments, _each_tensor(result, torch.zeros_like))
    assert isinstance(got, RuntimeError | TypeError), "an output on the CPU is accepted"


def check_errors(op: OpInfo, device: str) -> None:
    """Wrong inputs raise what they raise on the CPU."""
    for wrong in op.error_inputs(device):
        sample = wrong.sample_input
        given = (sample.input, sample.args, sample.kwargs)
        expected = _attempt(op, _copy(given, "cpu"))
        if isinstance(expected, Exception):
            got = _attempt(op, given)
            _assert_same_error(got, expected)
            if re.search(wrong.error_regex, str(expected)):
                assert re.search(wrong.error_regex, str(got))


def check_mixed_devices(op: OpInfo, dtype: torch.dtype, device: str, limit: int) -> None:
    """One CPU tensor with elements and dimensions among tpu tensors is refused, for the ops not listed."""
    accepted = False
    for _, given in _samples(op, dtype, device, limit):
        tensors = [t for t in _tensors(given) if not t.is_cpu]
        if len(tensors) < 2 or not all(t.numel() for t in tensors):
            continue
        if isinstance(_attempt(op, _copy(given, device)), Exception):
            continue
        for tensor in tensors:
            if not tensor.dim():
                continue
            mixed = _each_tensor(given, lambda t, moved=tensor: t.cpu() if t is moved else t)
            got = _attempt(op, mixed)
            if isinstance(got, Exception):
                assert isinstance(got, RuntimeError), got
                assert re.search("[Dd]evice|should be the same", str(got)), got
            else:
                accepted = True
    assert accepted == (op.full_name in MIXED_DEVICES)


def _same_objects(result: Any, out: Any) -> list[bool]:
    return [a is b for a, b in zip(_tensors(result), _tensors(out), strict=False)]


def check_optimizer(info: OptimizerInfo, options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """The parameters after some steps, and the state."""
    make: Any = info.optim_cls

    def run(where: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(where, dtype))
            for shape in ((4, 3), (5, 2), (2, 6))
        ]
        optimizer = make(parameters, **options)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = sum((p.square().sum() + p.sin().sum() for p in parameters), torch.zeros((), device=where))
            value.backward()
            return value

        for _ in range(3):
            loss()
            optimizer.step(loss if info.step_requires_closure else None)
        return [p.detach() for p in parameters], optimizer.state_dict()["state"]

    expected, got = run("cpu"), run(device)
    assert all(not p.is_cpu for p in got[0])
    torch.testing.assert_close(_each_tensor(got, torch.Tensor.cpu), expected)


# -- samples on two devices ----------------------------------------------------------------------


def _samples(
    op: OpInfo, dtype: torch.dtype, device: str, limit: int, requires_grad: bool = False
) -> Iterator[tuple[Any, Arguments]]:
    for number, sample in enumerate(op.sample_inputs(device, dtype, requires_grad=requires_grad)):
        if number == limit:
            return
        yield sample, (sample.input, sample.args, sample.kwargs)


def _copy(value: Any, device: str) -> Any:
    """The value with its tensors, and the device, on this device.

    Tensors keep what lies around them in memory and the memory that they share. CPU tensors that a sample
    has among tpu tensors stay where they are.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.device | str) and str(leaf).startswith("tpu"):
            return device
        if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
            return leaf
        target = "cpu" if leaf.is_cpu else device
        storage = leaf.untyped_storage()
        if storage._cdata not in storages:
            flat = torch.empty(0, dtype=torch.uint8, device=leaf.device)
            flat.set_(storage, 0, (storage.nbytes(),), (1,))
            storages[storage._cdata] = flat.to(target, copy=True).untyped_storage()
        twin = torch.empty(0, dtype=leaf.dtype, device=target)
        with torch.no_grad():
            twin.set_(storages[storage._cdata], leaf.storage_offset(), leaf.size(), leaf.stride())
            twin = twin.conj() if leaf.is_conj() else twin
            twin = torch._neg_view(twin) if leaf.is_neg() else twin
        return twin.requires_grad_(leaf.requires_grad)

    return tree_map(visit, value)


def _attempt(function: Callable[..., Any], arguments: Arguments) -> Any:
    """The result of the call, or its error. Random numbers start from one seed."""
    torch.default_generator.manual_seed(0)
    torch.tpu.manual_seed_all(0)  # type: ignore[attr-defined]
    given, args, kwargs = arguments
    try:
        return function(given, *args, **kwargs)
    except Exception as error:
        return error


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(value)]


def _each_tensor(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def _sharing(results: Any, inputs: Any) -> list[tuple[bool, list[bool]]]:
    """For each result whether it is a view, and which inputs it shares its storage with."""
    return [
        (result._is_view(), [torch._C._is_alias_of(result, tensor) for tensor in _tensors(inputs)])  # type: ignore[attr-defined]
        for result in _tensors(results)
    ]


def _gradients(results: Any, inputs: Any) -> Any:
    """The gradients of the inputs for one random gradient of the results, or the error."""
    roots = [t for t in _tensors(results) if t.requires_grad]
    leaves = [t for t in _tensors(inputs) if t.requires_grad]
    if not roots or not leaves:
        return []
    generator = torch.Generator().manual_seed(1)
    directions = [
        torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.device, t.dtype) for t in roots
    ]
    try:
        return torch.autograd.grad(roots, leaves, directions, allow_unused=True)
    except Exception as error:
        return error


# -- comparing -----------------------------------------------------------------------------------


def _assert_same(op: OpInfo, got: Any, expected: Any) -> None:
    if isinstance(got, Exception):
        raise got
    ours, theirs = tree_leaves(got), tree_leaves(expected)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, torch.Tensor):
            assert type(a) is type(b), (a, b)
            continue
        tolerance = TOLERANCES.get((op.full_name, b.dtype))
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert tolerance or a.stride() == b.stride()
        assert (a.is_conj(), a.is_neg(), a.requires_grad) == (b.is_conj(), b.is_neg(), b.requires_grad)
        if op.full_name not in UNDEFINED_VALUES:
            torch.testing.assert_close(
                a.detach().cpu(), b.detach(), rtol=tolerance, atol=tolerance, equal_nan=True
            )


def _assert_on_device(results: Any, inputs: Arguments) -> None:
    """Results are where the tensors among the arguments are, unless the call names a device."""
    asked = inputs[2].get("device")
    if asked is None and any(not t.is_cpu for t in _tensors(inputs)):
        assert all(not t.is_cpu for t in _tensors(results))


def _assert_same_error(got: Any, expected: Exception) -> None:
    assert isinstance(got, Exception), f"no error, where the CPU raises {expected!r}"
    assert type(got) is type(expected), f"{got!r}, where the CPU raises {expected!r}"

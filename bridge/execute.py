"""One call: from tensors to tensors through a compiled program.

`run` picks the way: straight to `execute` for ordinary tensors, through the dispatcher op `bridge::run`
(see `graph`) where something must see the call (torch.compile, export, a dispatch mode, the profiler).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from bridge import device, fake, platforms
from bridge.arrays import PLAIN, Borrowing, check_readable, from_jax
from bridge.counters import count_copy
from bridge.dtypes import WIDE
from bridge.interpretation import backend_started
from bridge.program import Program
from bridge.ranks import meeting
from bridge.sanitizer.report import current_report

_CPU = torch.device("cpu")
_borrowing = Borrowing()
_orphaned = False  # whether this process was forked from one in which JAX ran


def _after_fork() -> None:
    global _orphaned
    _orphaned = backend_started()


os.register_at_fork(after_in_child=_after_fork)


def run(program: Program, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The results of a program, below autograd."""
    if is_watched() or any(type(t) not in PLAIN for t in tensors):
        return torch.ops.bridge.run(list(tensors), program.name)
    return execute(program, tensors)


def is_watched() -> bool:
    """Whether something wants to see each op: a dispatch or function mode, or the profiler."""
    return (  # all of these are private, and cost well under a microsecond together
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    )


def execute(program: Program, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a program on tensors that have memory here, and wait for it: when this returns, no input is being
    read any more.

    Raises:
        TypeError: a tensor JAX can't read; a float64 tensor where the op declared x64=False.
        RuntimeError: tensors on different devices.
        OverflowError: an int64 value that does not fit where the op declared x64=False.
    """
    if _orphaned:
        raise RuntimeError(
            f"{program.definition.name}: this process was forked after JAX had started, and JAX's threads "
            f'do not survive a fork; start it with multiprocessing.get_context("spawn")'
        )
    wide, on_cpu = program.wide, True
    for tensor in tensors:
        if not tensor.is_cpu:
            on_cpu = False
        if wide is None and tensor.dtype in WIDE:
            wide = True
    place = _CPU if on_cpu and tensors else _device(program, tensors)
    device_type = place.type
    if device_type == "meta":
        return fake.outputs(program, tensors)
    if device_type == "tpu" and not device.is_simulated():
        if wide is False:
            tensors = [_narrowed(program, t) if t.dtype in WIDE else t for t in tensors]
        return platforms.run_on_tpu(program, tensors, bool(wide))
    if program.definition.sharding is not None:
        return meeting.execute(program, tensors, place, bool(wide))
    arrays = []
    owners = []
    for index, tensor in enumerate(tensors):
        if type(tensor) not in PLAIN or not (tensor.is_cpu or device_type == "tpu"):
            check_readable(tensor, program.place(index))
        if wide is False and tensor.dtype in WIDE:
            tensor = _narrowed(program, tensor)
        array, owner = _array(program, index, tensor)
        arrays.append(array)
        owners.append(owner)  # a copy must live until the call has ended
    report = current_report()
    if report is None:
        results = program.call(arrays, bool(wide))
    else:
        from bridge.sanitizer import calls  # only who checks kernels needs it

        results = calls.call(report, program, arrays, bool(wide))
    index = None if device_type == "cpu" else place.index
    return [from_jax(r, index) for r in results]  # exporting a result waits for it


def _array(program: Program, index: int, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    try:
        return _borrowing.array(tensor, program.definition.name)
    except (TypeError, RuntimeError):
        check_readable(tensor, program.place(index))  # say which argument it is
        raise


def _device(program: Program, tensors: Sequence[torch.Tensor]) -> torch.device:
    """Where the tensors are, and the results go: CPU tensors without dimensions go with any others."""
    if not tensors:
        chosen = program.chosen_device()
        return chosen if chosen.index is not None else torch.empty(0, device=chosen).device
    found = tensors[0].device
    for tensor in tensors:
        if tensor.device != found or (tensor.is_cpu and not tensor.dim()):
            return _only_device(program, tensors)
    return found


def _only_device(program: Program, tensors: Sequence[torch.Tensor]) -> torch.device:
    first: dict[torch.device, int] = {}
    for index, tensor in enumerate(tensors):
        if tensor.dim() or not tensor.is_cpu:
            first.setdefault(tensor.device, index)
    if len(first) > 1:
        places = " and ".join(
            f"{device} ({program.place(i).rpartition(' ')[2]})" for device, i in first.items()
        )
        raise RuntimeError(
            f"{program.definition.name}: expected all tensors on one device, got {places}; "
            f"move them with .to(device)"
        )
    return next(iter(first))


def _narrowed(program: Program, tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit tensor for an op that declared x64=False: integers in range, or an error."""
    if tensor.dtype not in (torch.int64, torch.uint64):
        raise TypeError(
            f"{program.definition.name} was declared x64=False and got a {tensor.dtype} tensor; convert it, "
            f"or declare x64=True"
        )
    narrow = torch.int32 if tensor.dtype is torch.int64 else torch.uint32
    if tensor.numel():
        limits = torch.iinfo(narrow)
        low, high = (int(v) for v in torch.aminmax(tensor.to(torch.int64)))
        if low < limits.min or high > limits.max:
            raise OverflowError(
                f"{program.definition.name} was declared x64=False and got a {tensor.dtype} tensor with "
                f"values in [{low}, {high}], which do not fit {narrow}; declare x64=True"
            )
    count_copy("64-bit integers to 32")
    return tensor.to(narrow)

"""torch.distributed on tpu tensors: collectives run over gloo, on the tensors' own memory.

A collective of c10d (`all_reduce`, `send`, ...) that is given tpu tensors is run again on their CPU aliases,
by the backend that the process group has for "tpu". What builds on c10d follows: functional collectives,
DDP, FSDP2, DTensor, device meshes, distributed checkpoints.

Names for the backend, in `torch.distributed.init_process_group(...)`:

    nothing, "gloo"         gloo, for cpu and tpu tensors
    "tpu_dist", "tpu"       gloo, for tpu tensors only: TorchTPU's names, so that its scripts run as they are
    "cpu:gloo,tpu:gloo"     and other pairs, as torch reads them

An asynchronous collective gives torch's own `Work`; in Python its `get_future()` and `result()` hand out the
tpu tensors. In C++ (DDP without a hook) they hand out the aliases, which are the same memory.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from bridge.device import dtensor_random, sync_batch_norm
from bridge.device.storage import CPU_KEYS, DEVICE_TYPE, read_alias, sharing_version

_KEY = "PrivateUse1"
_LIBRARY = "c10d"
_CPU = torch.device("cpu")
_libraries: list[torch.library.Library] = []  # a registration lasts as long as its Library object


def register_distributed() -> None:
    """Register the collectives of the device and the names of its backends. Call once per process."""
    if not torch.distributed.is_available():
        return
    _register_collectives()
    _register_backends()
    sync_batch_norm.register()
    dtensor_random.watch()


# -- backends ------------------------------------------------------------------------------------


def _register_backends() -> None:
    from torch.distributed import distributed_c10d as c10d

    for devices in c10d.Backend.backend_capability.values():
        if "cpu" in devices and DEVICE_TYPE not in devices:
            devices.append(DEVICE_TYPE)
    c10d.Backend.default_device_backend_map.setdefault(DEVICE_TYPE, c10d.Backend.GLOO)
    for name in ("tpu_dist", DEVICE_TYPE):
        c10d.Backend.register_backend(name, _create_gloo, devices=[DEVICE_TYPE])
    _serve_cpu_too(c10d)


def _create_gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """What "tpu_dist" makes here, from the arguments torch gives to a backend that is not its own."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout=timeout)


def _serve_cpu_too(c10d: Any) -> None:
    """Let `init_process_group()` serve cpu tensors as well as tpu tensors.

    Without a backend's name torch serves the accelerator only. This device is there wherever the package is
    installed, and programs that know nothing of it must go on working on the CPU.
    """
    read = c10d.BackendConfig.__init__

    @functools.wraps(read)
    def read_and_add_cpu(self: Any, backend: Any) -> None:
        read(self, backend)
        found = self.device_backend_map
        if str(backend) == c10d.Backend.UNDEFINED and found.keys() == {DEVICE_TYPE}:
            self.device_backend_map = {"cpu": found[DEVICE_TYPE], **found}

    c10d.BackendConfig.__init__ = read_and_add_cpu


# -- collectives ---------------------------------------------------------------------------------


def _register_collectives() -> None:
    """Put a kernel in the place of each one torch has for out-of-tree devices: those hand over the tensors as
    they are, and gloo takes none but the CPU's."""
    library = torch.library.Library(_LIBRARY, "IMPL")
    _libraries.append(library)
    prefix = f"{_LIBRARY}::"
    replaced = [
        set(torch._C._dispatch_get_registrations_for_dispatch_key(key))  # type: ignore[attr-defined]
        for key in ("CPU", _KEY)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in sorted(replaced[0] & replaced[1]):
            if name.startswith(prefix):
                library.impl(name.removeprefix(prefix), _collective(name.removeprefix(prefix)), _KEY)


def _collective(name: str) -> Callable[..., Any]:
    """The kernel of a c10d op for tpu tensors, built at its first call."""

    @functools.cache
    def build() -> Callable[..., Any]:
        return _build_collective(getattr(torch.ops.c10d, name).default)

    return lambda *args: build()(*args)


def _build_collective(op: Any) -> Callable[..., Any]:
    group_at = [argument.name for argument in op._schema.arguments].index("process_group")
    _let_work_hand_out_originals()

    def collective(*args: Any) -> Any:
        inputs = [_aliases(op, a) for a in args]
        inputs[group_at] = _cpu_group(args[group_at])
        return _originals(op.redispatch(CPU_KEYS, *inputs))

    return collective


def _aliases(op: Any, value: Any) -> Any:
    """CPU aliases for the tensors in an argument. Each knows its tpu tensor, wherever torch hands it out."""
    if isinstance(value, torch.Tensor):
        if value.device.type != DEVICE_TYPE:
            raise RuntimeError(
                f"{op._schema.name}: expected all tensors on {DEVICE_TYPE!r}, as some are, got one on "
                f"{str(value.device)!r}. Move it with .to({DEVICE_TYPE!r})."
            )
        alias: Any = sharing_version(read_alias(value), value)  # gloo counts what it copies
        alias._tpu_tensor = value
        return alias
    if isinstance(value, list | tuple):
        return [_aliases(op, v) for v in value]
    return value


def _originals(value: Any) -> Any:
    """The tpu tensors where there are their aliases; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return getattr(value, "_tpu_tensor", value)
    if isinstance(value, list | tuple):
        return type(value)(_originals(v) for v in value)
    return value


@functools.cache
def _let_work_hand_out_originals() -> None:
    """Done at the first collective on tpu tensors, so that processes without one keep torch as it is."""
    from torch.distributed import Work

    future_of, result_of = Work.get_future, Work.result
    Work.get_future = functools.wraps(future_of)(  # type: ignore[method-assign]
        lambda self: future_of(self).then(lambda done: _originals(done.value()))
    )
    Work.result = functools.wraps(result_of)(lambda self: _originals(result_of(self)))  # type: ignore[method-assign]


def _cpu_group(boxed_group: Any) -> Any:
    """The process group with its backend for tpu in the place of the one for cpu (both boxed).

    The CPU kernel asks the group for its cpu backend, which may be another one, or missing. Made anew for
    each call: a twin that outlived the group would hold the last reference to the backend, which waits for
    its threads when it is freed, while they may wait for Python's lock.
    """
    from torch.distributed import ProcessGroup

    group = ProcessGroup.unbox(boxed_group)
    backend = group._get_backend(torch.device(DEVICE_TYPE))
    twin = ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
    twin._register_backend(_CPU, ProcessGroup.BackendType.CUSTOM, backend)
    return twin.boxed()

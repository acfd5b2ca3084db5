"""The simulated `tpu` device: `torch.device("tpu")` with real storage, on a machine without a TPU.

Tensors on it live in host memory and torch's CPU kernels do the arithmetic, through aliases of the
storage; views, in-place writes, autograd and storage sharing are torch's own. `torch.tpu` is the
device's module. When `torch_tpu` serves the device "tpu", this package stays out of the way.
"""

from __future__ import annotations

import importlib
import threading

from bridge import precedence

DEVICE_TYPE = "tpu"
_UNCLAIMED = "privateuseone"  # torch's name for the out-of-tree device before a backend takes it

_lock = threading.Lock()
_registered = False


class DeviceTakenError(RuntimeError):
    """torch has room for one out-of-tree device per process, and another backend has it."""


def register() -> bool:
    """Make `torch.device("tpu")` and `torch.tpu`; safe to call again.

    Returns:
        True when the simulated device serves "tpu", False when it stepped aside: `torch_tpu` has
        registered "tpu", or is installed where there is a TPU and will.

    Raises:
        DeviceTakenError: another backend has taken torch's out-of-tree device under another name, or
            `torch_tpu` was imported where there is no TPU.
    """
    global _registered
    import torch  # not above: torch calls this function at the end of its own import

    with _lock:
        if _registered:
            return True
        name = torch._C._get_privateuse1_backend_name()
        if name == DEVICE_TYPE or real_backend_expected():
            return False
        if precedence.torch_tpu_loaded():
            raise DeviceTakenError(
                f"the simulated {DEVICE_TYPE!r} device cannot be registered: torch_tpu has been imported, "
                "and though this machine has no TPU its kernels now stand in torch's one place for an "
                "out-of-tree device. Import bridge before torch: that keeps torch_tpu from loading where "
                "there is no TPU."
            )
        if name != _UNCLAIMED:
            raise DeviceTakenError(
                f"the simulated {DEVICE_TYPE!r} device cannot be registered: torch holds one out-of-tree "
                f"device per process and it is already {name!r}. Start a process that does not load that "
                "backend (TORCH_DEVICE_BACKEND_AUTOLOAD=0, then bridge.device.register())."
            )
        _register()
        _registered = True
        precedence.close()
        return True


def is_simulated() -> bool:
    """Whether "tpu" in this process is the simulated device."""
    return _registered


def real_backend_expected() -> bool:
    """Whether `torch_tpu` is installed on a machine with a TPU: "tpu" is then its to register."""
    return precedence.torch_tpu_installed() and precedence.tpu_present()


def _register() -> None:
    import torch
    from torch.utils import backend_registration

    from bridge import compiler, precision
    from bridge.device import (
        accelerator,
        autocast,
        distributed,
        extension,
        fallback,
        memory,
        module,
        ops,
        pallas_module,
        processes,
        recurrent,
        serialization,
    )

    processes.before_registration()
    native = extension.loaded()
    if native is None:
        backend_registration._setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=module)
    else:
        backend_registration.rename_privateuse1_backend(DEVICE_TYPE)
        backend_registration.generate_methods_for_privateuse1_backend()
        torch._register_device_module(DEVICE_TYPE, module)
        native.set_device_count(extension.device_count())
        native.register_device()
    accelerator.install()
    ops.register_ops()
    autocast.register_autocast()
    serialization.register_serialization()
    distributed.register_distributed()
    memory.limit_from_environment()
    pallas_module.install()
    compiler.install()  # graphs on tpu go to our backend
    compiler.run_as_is(accelerator, autocast, distributed, fallback, ops, recurrent)
    compiler.run_as_is(processes, and_what_they_call=False)
    precision.when_started(_install_emulated_products)
    processes.install()


def _install_emulated_products() -> None:
    from bridge.device import matmul

    matmul.install()


# Last, and though nothing here uses it: torch's import calls `register`, which needs every module of this
# package. If one of those is what a program imports first, torch must be there before it starts.
importlib.import_module("torch")

"""The simulated `tpu` device: `torch.device("tpu")` with real storage, on a machine without a TPU.

Tensors on it live in host memory and torch's CPU kernels do the arithmetic, through aliases of the
storage; views, in-place writes, autograd and storage sharing are torch's own. `torch.tpu` is the
device's module. When `torch_tpu` serves the device "tpu", this package stays out of the way.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import torch

DEVICE_TYPE = "tpu"
_UNCLAIMED = "privateuseone"  # torch's name for the out-of-tree device before a backend takes it
_GOOGLE_PCI_VENDOR = "0x1ae0"

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
        DeviceTakenError: another backend has taken torch's out-of-tree device under another name.
    """
    global _registered
    with _lock:
        if _registered:
            return True
        name = torch._C._get_privateuse1_backend_name()
        if name == DEVICE_TYPE or real_backend_expected():
            return False
        if name != _UNCLAIMED:
            raise DeviceTakenError(
                f"the simulated {DEVICE_TYPE!r} device cannot be registered: torch holds one out-of-tree "
                f"device per process and it is already {name!r}. Start a process that does not load that "
                "backend (TORCH_DEVICE_BACKEND_AUTOLOAD=0, then bridge.device.register())."
            )
        _register()
        _registered = True
        return True


def is_simulated() -> bool:
    """Whether "tpu" in this process is the simulated device."""
    return _registered


def real_backend_expected() -> bool:
    """Whether `torch_tpu` is installed on a machine with a TPU: "tpu" is then its to register."""
    return importlib.util.find_spec("torch_tpu") is not None and _tpu_present()


def _tpu_present() -> bool:
    """A TPU shows as /dev/accel* or as a PCI device of Google's that is bound to vfio."""
    if any(Path("/dev").glob("accel[0-9]*")):
        return True
    if not Path("/dev/vfio").is_dir():
        return False
    vendors = Path("/sys/bus/pci/drivers/vfio-pci").glob("*/vendor")
    return any(vendor.read_text().strip() == _GOOGLE_PCI_VENDOR for vendor in vendors)


def _register() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from bridge import compiler
    from bridge.device import autocast, module, ops, pallas_module, serialization

    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=module)
    ops.register_ops()
    autocast.register_autocast()
    serialization.register_serialization()
    pallas_module.install()
    compiler.install()  # graphs on tpu go to our backend
    # Backward runs in the thread that asked for it, as for CPU tensors. In the thread that torch keeps for
    # an accelerator it would not see the caller's contexts, and every call would change threads twice.
    torch.autograd.set_multithreading_enabled(False)

"""Which package serves the device "tpu" in this process: `torch_tpu`, or `bridge.device`, which simulates it.

torch holds one out-of-tree device per process. Importing `torch_tpu` (0.2.0) puts its C++ kernels, device
guard and fallback in that place for good, on a machine without a TPU too, where none of them can run. And
`import torch` imports every package of the entry point group "torch.backends", in the order in which they
lie on the disk. So where there is no TPU, `torch_tpu` must not get as far as loading:

- While torch loads its backends, `torch_tpu` is answered with an empty module.
- Once the simulated device is registered, importing `torch_tpu` is an ImportError that says so.

With a TPU, or when `torch_tpu` was imported by hand before, nothing here stands in its way.
This module imports neither torch nor JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

TORCH_TPU = "torch_tpu"
_GOOGLE_PCI_VENDOR = "0x1ae0"
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_VFIO = Path("/dev/vfio")


def tpu_present() -> bool:
    """Whether this machine gives processes a TPU: a PCI device of Google's that is exposed through vfio.

    This is what `torch_tpu` looks for before it registers its device. (Google's network and disk devices
    have the same vendor, and are not exposed so.)
    """
    if not _VFIO.is_dir():
        return False
    return any(map(_is_exposed, _PCI_DEVICES.glob("*/vendor")))


def _is_exposed(vendor: Path) -> bool:
    try:
        if vendor.read_text().strip() != _GOOGLE_PCI_VENDOR:
            return False
        group = (vendor.parent / "iommu_group").readlink().name
    except OSError:
        return False
    return (_VFIO / group).exists()


def torch_tpu_installed() -> bool:
    """Whether `torch_tpu` could be imported, or has been."""
    return TORCH_TPU in sys.modules or _is_on_path()


def _is_on_path() -> bool:
    spec = PathFinder.find_spec(TORCH_TPU)
    return spec is not None and spec.origin is not None  # a mere folder of that name has no origin


def torch_tpu_loaded() -> bool:
    """Whether `torch_tpu`, the real one, has been imported: its kernels are then in torch."""
    return isinstance(sys.modules.get(TORCH_TPU), ModuleType) and not _is_placeholder(TORCH_TPU)


def watch() -> None:
    """Keep `torch_tpu` from loading during `import torch` where there is no TPU. Safe to call again.

    Of use before torch is imported: afterwards it is known which of the two serves.
    """
    if _gate not in sys.meta_path:
        sys.meta_path.insert(0, _gate)


def close() -> None:
    """The simulated device has been registered: from here on `torch_tpu` cannot be imported."""
    watch()
    _gate.closed = True


class _Gate(MetaPathFinder):
    """Finds `torch_tpu` before the file system does, when it must not load."""

    closed = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != TORCH_TPU or torch_tpu_loaded():
            return None
        if not _is_on_path():
            return None
        if _torch_is_loading() and (self.closed or not tpu_present()):
            return spec_from_loader(fullname, _PlaceholderLoader(), is_package=True)
        return spec_from_loader(fullname, _RefusingLoader()) if self.closed else None


def _torch_is_loading() -> bool:
    """Whether `import torch` is under way, of which loading the backends is the last part."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))  # importlib's own mark


class _Placeholder(ModuleType):
    """Stands for a module of `torch_tpu`. Every name in it is a function that does nothing."""

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _leave


def _leave() -> None:
    """What torch calls as the entry point of `torch_tpu`: the placeholders have served and go."""
    for name in [n for n in sys.modules if n.partition(".")[0] == TORCH_TPU and _is_placeholder(n)]:
        del sys.modules[name]


def _is_placeholder(name: str) -> bool:
    return isinstance(sys.modules.get(name), _Placeholder)


class _PlaceholderLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _RefusingLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> Any:
        raise ImportError(
            "torch_tpu is not imported: this machine has no TPU and the 'tpu' device of this process is "
            "the simulated one (bridge.device). The kernels of torch_tpu would take its place, and they "
            "can't run here. To have torch_tpu instead, start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0 "
            "and import torch_tpu before bridge.",
            name=spec.name,
        )

    def exec_module(self, module: ModuleType) -> None:
        """Never called: no module is made."""


_gate = _Gate()

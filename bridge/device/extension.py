"""The C++ part of the simulated device, where it was built; pure Python serves without it.

With it, an op costs about a microsecond more than on the CPU instead of tens, and the device has what Python
can't give it: an allocator (memory statistics and a limit, storages that can be resized), random generators,
pinned memory, streams and events that `torch.accelerator` knows, and more than one device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
from importlib.machinery import ExtensionFileLoader
from types import ModuleType

from bridge.device import building

ENVIRONMENT = "BRIDGE_DEVICE_EXTENSION"
"""Set to 0 to have pure Python where the C++ part was built, to 1 to have an error where it was not."""

_log = logging.getLogger(__name__)


@functools.cache
def loaded() -> ModuleType | None:
    """The C++ module, or None: it was not built for this torch and Python, or the environment says so.

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
        ImportError: the environment variable asks for the C++ part, and it was not built or fails to load.
    """
    wanted = os.environ.get(ENVIRONMENT, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"the environment variable {ENVIRONMENT} must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    try:
        return _load()
    except (ImportError, OSError, building.BuildError) as error:
        if wanted == "1":
            raise ImportError(f"{error}; build it: python -m bridge.device.build") from error
        _log.info("the simulated tpu device runs in pure Python: %s", error)
        return None


def _load() -> ModuleType:
    importlib.import_module("torch")  # whose libraries the module is linked to
    torch = building.torch_folder()
    assert torch is not None  # it is running
    path = building.HERE / building.library_name(torch)
    if not path.exists():
        if any(building.HERE.glob(f"{building.MODULE}-*.so")):
            _log.warning(
                "the C++ part of the simulated tpu device was built from other sources or another torch and "
                "Python, and is not used; build it again: python -m bridge.device.build"
            )
        raise ImportError("the C++ part of the simulated tpu device was not built for this torch and Python")
    loader = ExtensionFileLoader(building.MODULE, str(path))
    spec = importlib.util.spec_from_loader(building.MODULE, loader, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[f"bridge.device.{building.MODULE}"] = module
    return module


def required(what: str) -> ModuleType:
    """The C++ module, for what only it can do.

    Raises:
        NotImplementedError: the device runs in pure Python.
    """
    module = loaded()
    if module is None:
        raise NotImplementedError(
            f"{what} needs the C++ part of the simulated tpu device, and this process runs in pure Python; "
            f"build it (python -m bridge.device.build) and leave the environment variable {ENVIRONMENT} unset"
        )
    return module


def device_count() -> int:
    """How many devices to simulate: BRIDGE_DEVICE_COUNT, or one per process that torchrun started, or 1.

    Raises:
        ValueError: the environment variable is not a number from 1 to 64.
    """
    variable = "BRIDGE_DEVICE_COUNT" if os.environ.get("BRIDGE_DEVICE_COUNT") else "LOCAL_WORLD_SIZE"
    given = os.environ.get(variable) or "1"
    if not (given.isdecimal() and 1 <= int(given) <= 64):
        raise ValueError(f"the environment variable {variable} must be from 1 to 64, got {given!r}")
    return int(given)

"""Builds the C++ part of the simulated device at install, where torch and a compiler are there.

Everything else about the package is in pyproject.toml. Without a compiler the package installs all the same:
the device then runs in pure Python, and `python -m bridge.device.build` makes up for it later.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

_spec = importlib.util.spec_from_file_location("_build", Path(__file__).parent / "bridge/device/building.py")
assert _spec is not None and _spec.loader is not None
_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_build)


_AT_START = 'import importlib.machinery as m; m.PathFinder.find_spec("torch_tpu") and __import__("bridge")\n'
"""What Python runs when it starts. torch loads device packages in the order in which they are
found. Where there is no TPU, torch_tpu must not come first (see bridge/precedence.py);
nothing later could undo it."""


class BuildWithDevice(build_py):
    """Copies the Python files, then compiles the library beside them (in place for an editable install)."""

    def run(self) -> None:
        super().run()
        install = self.get_finalized_command("install")
        root = Path(install.install_lib if self.editable_mode else self.build_lib)  # pyright: ignore
        root.mkdir(parents=True, exist_ok=True)
        (root / "tpu_kernels_sdk.pth").write_text(_AT_START)
        target = _build.HERE if self.editable_mode else Path(self.build_lib, "bridge/device")
        try:
            print(f"built {_build.build(target)}")
        except _build.BuildError as error:
            print(f"the simulated tpu device will run in pure Python: {error}", file=sys.stderr)


class PlatformDistribution(Distribution):
    """A wheel that holds a library is for one platform and one Python."""

    def has_ext_modules(self) -> bool:
        return _build.torch_folder() is not None


setup(cmdclass={"build_py": BuildWithDevice}, distclass=PlatformDistribution)

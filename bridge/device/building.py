"""Building the C++ part of the simulated device.

The library is named after what it was made from (the sources, the versions of torch and Python), so a stale
one is never loaded. This file imports nothing but the standard library: set-up runs it by its path, where
torch may be installed but not importable.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "cpp"
MODULE = "simulated_tpu"
_FLAGS = ["-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall"]


class BuildError(RuntimeError):
    """The C++ part can't be built here; the text says what is missing."""


def torch_folder() -> Path | None:
    """The folder of the installed torch, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        return Path(spec.origin).parent
    # pip builds packages in an environment that hides the one they are installed into.
    folder = Path(sysconfig.get_path("platlib")) / "torch"
    return folder if (folder / "version.py").exists() else None


def library_name(torch: Path) -> str:
    """The file name of the library for these sources, this torch and this Python."""
    version = re.search(r"__version__ = '([^'+]*)", (torch / "version.py").read_text())
    if version is None:
        raise BuildError(f"{torch / 'version.py'} names no version of torch")
    digest = hashlib.sha256(f"{version[1]} {sys.implementation.cache_tag} {platform.machine()}".encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return f"{MODULE}-{digest.hexdigest()[:16]}.so"


def build(target: Path = HERE) -> Path:
    """Compile and link the library into `target`, unless it is there; returns its path.

    Raises:
        BuildError: no torch, no compiler, no Python headers, or the compiler refused; with its output.
    """
    torch = torch_folder()
    if torch is None:
        raise BuildError("torch is not installed; install it first")
    library = target / library_name(torch)
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise BuildError("no C++ compiler was found; install one (on Debian: apt install g++), or set CXX")
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise BuildError(f"Python's headers are not in {python} (on Debian: apt install python3-dev)")
    includes = [f"-I{SOURCES}"]
    for folder in (torch / "include", torch / "include/torch/csrc/api/include", python):
        includes += ["-isystem", str(folder)]
    with tempfile.TemporaryDirectory() as scratch:

        def compiled(source: Path) -> str:
            output = str(Path(scratch, source.stem + ".o"))
            _run([compiler, *_FLAGS, *includes, "-c", str(source), "-o", output])
            return output

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"))))
        linked = Path(scratch, library.name)
        libraries = [f"-l{name}" for name in ("torch_python", "torch", "torch_cpu", "c10")]
        _run([compiler, "-shared", "-s", *objects, f"-L{torch / 'lib'}", *libraries, "-o", str(linked)])
        for stale in target.glob(f"{MODULE}-*.so"):
            stale.unlink()
        partial = library.with_suffix(f".{os.getpid()}")  # a rename is atomic within one file system only
        shutil.copyfile(linked, partial)
        partial.rename(library)
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stderr.strip()[-4000:]}")

"""The process that holds the TPU compiler. `bridge.aot.pool` starts it; nothing imports it.

It is run as a file and imports nothing of the bridge, so that it starts as quickly as JAX does. The pool sets
its environment and libtpu's flags. It reads jobs from a connection and answers each one.

A job is a dict: `module` (MLIR bytecode), `topology` and `chip_config` (libtpu's names), `mesh` (shape of the
device mesh), `options` (compiler options by name), `shardy` (which partitioner the module was lowered for),
`dumps` (folder for the dump files, or None).
An answer is a dict: `hlo` (None if it can be read from a dump only), `memory` and `devices` of the result; or
`error` and `type`, the text and class of what was raised.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import shutil
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HARVESTED = (
    "-packed-bundles-post-ra.txt",
    "-pre-delay_hlo-static-per-bundle-utilization.txt",
    "vmem_report.html",
    "TLP-hlo.txt",
)
"""How the names of the dump files end that are handed out; the rest is deleted."""


def main(descriptor: int, parent: int, directory: str) -> None:
    """Serve jobs until the connection closes. `directory` is the worker's; libtpu dumps to `dumps` in it."""
    watching = _end_with(parent, directory)
    connection = Connection(descriptor)
    try:
        connection.send(_start())
    except Exception as error:
        connection.send({"error": str(error) or repr(error), "type": type(error).__name__})
        return
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            watching.join()  # the parent is ending
            return
        connection.send(_answer(job, Path(directory)))


def _end_with(parent: int, directory: str) -> threading.Thread:
    """End this process when the parent is gone, and delete the files that a killed parent left."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        shutil.rmtree(Path(directory).parent, ignore_errors=True)
        os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def _start() -> dict[str, Any]:
    """Load the compiler; its versions."""
    client = _devices("v5e:2x2", "default")[0].client
    return {
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "libtpu": _library_version(),
        "platform": client.platform_version,
    }


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "unknown"


def _library_version() -> str:
    """The version of the libtpu that was loaded, which need not be the installed one (TPU_LIBRARY_PATH).

    The file does not say it. So it is that of the package that lies beside it and lists it; without one, the
    path of the file is given.
    """
    # Private: what JAX itself asks for the file to load.
    from jax._src.cloud_tpu_init import get_tpu_library_path

    library = get_tpu_library_path()
    if library is None:
        return "unknown"
    loaded = Path(library).resolve()
    for name in ("libtpu", "libtpu-nightly"):
        for package in importlib.metadata.distributions(name=name, path=[str(loaded.parent.parent)]):
            named_so = [file for file in package.files or () if file.name == loaded.name]
            if any(Path(str(package.locate_file(file))).resolve() == loaded for file in named_so):
                return package.version
    return f"unknown, {library}"


def _answer(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    dumped = directory / "dumps"
    _empty(dumped)
    try:
        answer = _compile(job, dumped)
    except Exception as error:
        return {"error": str(error) or repr(error), "type": type(error).__name__}
    if job["dumps"] is not None:
        for file in dumped.iterdir():
            if file.name.endswith(HARVESTED):
                shutil.move(file, job["dumps"])
    _empty(dumped)
    return answer


def _empty(directory: Path) -> None:
    if directory.is_dir():
        for file in directory.iterdir():
            file.unlink()


def _compile(job: dict[str, Any], dumped: Path) -> dict[str, Any]:
    import numpy as np

    # Private: JAX compiles for a topology only from `Lowered.compile`, and a Lowered can't be sent here.
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    devices = _mesh_devices(_devices(job["topology"], job["chip_config"]), job["mesh"])
    with mlir.make_ir_context():
        module = ir.Module.parse(job["module"])
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.array([[device.id for device in devices]]),
            env_options_overrides=job["options"],
        )
        options.executable_build_options.use_shardy_partitioner = job["shardy"]
        client = devices[0].client
        compiled = client.compile(module, _jax.DeviceList(tuple(devices)), options)
    stats = compiled.get_compiled_memory_stats()
    return {
        "hlo": _hlo_text(compiled, dumped),
        "memory": {
            "argument_bytes": stats.argument_size_in_bytes,
            "output_bytes": stats.output_size_in_bytes,
            "alias_bytes": stats.alias_size_in_bytes,
            "temp_bytes": stats.temp_size_in_bytes,
            "code_bytes": stats.generated_code_size_in_bytes,
        },
        "devices": [(d.id, tuple(d.coords), d.core_on_chip) for d in devices],
    }


def _hlo_text(compiled: Any, dumped: Path) -> str | None:
    """The optimised HLO; None if it can be had only from a dump, and this worker does not dump.

    jaxlib cannot read all that libtpu makes: programs for SparseCores, with jaxlib 0.10.2 and libtpu 0.0.52.
    """
    try:
        return "\n".join(module.to_string() for module in compiled.hlo_modules())
    except Exception:
        texts = sorted(dumped.glob("*TLP-hlo.txt"))
        return texts[-1].read_text() if texts else None


def _devices(topology: str, chip_config: str) -> list[Any]:
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chip_config_name=chip_config
    )
    return sorted(description.devices, key=lambda device: device.id)


def _mesh_devices(devices: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """The devices of a mesh of this shape, row by row; neighbours in it are linked where that is possible."""
    from jax.experimental import mesh_utils

    count = math.prod(shape)
    if count == len(devices) and count > 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True).ravel().tolist()
    return devices[:count]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

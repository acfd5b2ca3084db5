"""What the compiler gives: a program for a chip, told by its memory, its kernels, its HLO and its dumps."""

from __future__ import annotations

import os
import re
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.aot.topologies import Topology
from bridge.chips import Chip


@dataclass(frozen=True)
class Memory:
    """What a program needs of the HBM of each device, in bytes.

    Attributes:
        argument_bytes, output_bytes: its arguments and results.
        alias_bytes: results that lie in donated arguments; they count in both of the above.
        temp_bytes: everything it holds besides while it runs.
        code_bytes: the program.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int


@dataclass(frozen=True)
class Kernel:
    """A Pallas kernel in a compiled program.

    Attributes:
        name: name of its instruction, as in the HLO text and in the names of the dump files: `matmul.1`.
        vmem_bytes: VMEM it uses on a core; None if the compiler does not say.
    """

    name: str
    vmem_bytes: int | None


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program compiled for a chip. Made by `compile_for`.

    Use it in a `with` statement, or call `close`, to delete the dump files; they also go with the object.

    Attributes:
        chip: the chip.
        topology: the topology it was compiled for.
        memory: what it needs of a device's HBM.
        kernels: the Pallas kernels in it, in the order of the HLO text.
        hlo: the optimised HLO, as text. The bodies of the kernels, binary, are left out.
        devices: (id, coordinates of the chip, core on the chip) of each device, in the order of the mesh.
        versions: of jax, jaxlib and libtpu, and under `platform` what the compiler says about itself.
        dumps: the folder with the schedule of each kernel, if asked for: the files
            `*-packed-bundles-post-ra.txt`, `*-pre-delay_hlo-static-per-bundle-utilization.txt`,
            `*-vmem_report.html` and `*-TLP-hlo.txt`.
        jaxpr: the traced function, a `jax.core.ClosedJaxpr`.
    """

    chip: Chip
    topology: Topology
    memory: Memory
    kernels: tuple[Kernel, ...]
    hlo: str
    devices: tuple[tuple[int, tuple[int, ...], int], ...]
    versions: Mapping[str, str]
    dumps: Path | None = None
    jaxpr: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.dumps is not None:
            weakref.finalize(self, delete_folder, self.dumps, os.getpid())

    def close(self) -> None:
        """Delete the dump files."""
        if self.dumps is not None:
            delete_folder(self.dumps, os.getpid())

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def delete_folder(folder: Path, owner: int) -> None:
    """Delete a folder with dump files; not in a forked child of its owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def kernels_in(hlo: str) -> tuple[Kernel, ...]:
    """The kernels in HLO text, with the VMEM that the compiler gave each one."""
    found = []
    for line in hlo.splitlines():
        name = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
        if name and 'custom_call_target="tpu_custom_call"' in line:
            found.append(Kernel(name[1], _scoped_vmem(line)))
    return tuple(found)


def _scoped_vmem(instruction: str) -> int | None:
    used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', instruction)
    sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used[1] if used else "")
    return sum(map(int, sizes)) if sizes else None


def without_bodies(hlo: str) -> str:
    """HLO text without the kernels themselves, which are long and not for reading."""
    return re.sub(r'"body":"([^"]*)"', lambda found: f'"body":"<{len(found[1])} bytes>"', hlo)

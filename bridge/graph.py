"""What torch's graphs hold: every derived program as the one op `bridge::run(Tensor[] tensors, str program)`.

The program's name is text, so a compiled or exported graph is valid in another process; `resolve`
builds the program again there, if the op it comes from is registered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from bridge import autodiff, batching, fake
from bridge.execute import execute
from bridge.program import Program, programs_by_name, tables


def resolve(name: str) -> Program:
    """The program of this name.

    Raises:
        RuntimeError: the op is not registered in this process.
        ValueError: the name is not a program's.
    """
    program = programs_by_name.get(name)
    if program is not None and program.definition is tables[program.definition.name].definition:
        return program  # and not one of an op that was replaced since
    match = re.match(r"[\w.]+::[\w.]+", name)
    if match is None:
        raise ValueError(f"not the name of a program: {name!r}")
    table = tables.get(match.group())
    if table is None:
        raise RuntimeError(
            f"the op {match.group()} is not registered in this process; import the module that defines it "
            f"before running a graph that was compiled or exported elsewhere"
        )
    program, rest = table.from_text(name[match.end() :])
    for step in rest.split("|")[1:]:
        kind, _, inside = step.removesuffix(")").partition("(")
        numbers = tuple(None if n == "-" else int(n) for n in inside.split(",")) if inside else ()
        if kind == "vmap":
            program = batching.vmapped(program, numbers)
        else:
            program = autodiff.step(program, kind, [n for n in numbers if n is not None])
    return program


# ---------------------------------------------------------------------------------- the op

_library = torch.library.Library("bridge", "DEF")
_library.define("run(Tensor[] tensors, str program) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


def _run_kernel(tensors: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    program = resolve(name)
    if not torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
        return execute(program, tensors)
    with torch.profiler.record_function(name):  # torch's own event says only "bridge::run"
        return execute(program, tensors)


def _run_autograd(tensors: Sequence[torch.Tensor], name: str) -> Any:
    if autodiff.forward_ad_active() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return list(autodiff.call(resolve(name), tensors))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.bridge.run(tensors, name)


def _run_transformed(tensors: Sequence[torch.Tensor], name: str) -> Any:
    return list(autodiff.call(resolve(name), tensors))


def _run_fake(tensors: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    return fake.outputs(resolve(name), tensors)


_library.impl("run", _run_kernel, "CPU")
_library.impl("run", _run_kernel, "PrivateUse1")
_library.impl("run", _run_autograd, "Autograd")
_library.impl("run", _run_transformed, "FuncTorchDynamicLayerFrontMode")
torch.library.register_fake("bridge::run", _run_fake, lib=_library)

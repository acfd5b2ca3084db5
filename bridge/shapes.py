"""Tracing for shapes alone, where what a kernel computes does not matter.

Shapes of results are asked for much oftener than programs are run: by fake tensors, at dozens of sizes for
one graph with symbolic ones. A kernel's results have the shapes it declares, and tracing its body, most of
the work, tells nothing about them. `pallas_call` leaves the body out while `shapes_only` holds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh

_PLATFORM = "tpu, for shapes only"


def shapes_only() -> contextlib.AbstractContextManager[Any]:
    """A context in which `pallas_call` traces no kernel. Nothing that is traced in it can run.

    It is the name of a platform in JAX's ambient mesh, which is part of the key under which JAX remembers
    traces: what was traced in this context is never found outside of it. Nothing else in a trace depends on
    that name. (An axis of the mesh would do as well, but with one JAX traces some operations otherwise, and
    keeps other arrays for derivatives.) It changes nothing where no chip is traced for, or the mesh has axes.
    """
    mesh = get_abstract_mesh()
    if mesh.axis_names or mesh.abstract_device is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(_renamed(mesh.abstract_device))


@functools.cache
def _renamed(device: Any) -> AbstractMesh:
    named = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform=_PLATFORM)
    return AbstractMesh((), (), abstract_device=named)


def _is_on() -> bool:
    device = get_abstract_mesh().abstract_device
    return device is not None and device.platform == _PLATFORM


def pallas_call(kernel: Callable[..., Any], out_shape: Any, **keywords: Any) -> Callable[..., Any]:
    """`pl.pallas_call`, which within `shapes_only` gives results of `out_shape` without tracing `kernel`."""
    if not _is_on():
        return pl.pallas_call(kernel, out_shape, **keywords)
    shapes = tuple(out_shape) if isinstance(out_shape, list) else out_shape  # as pl.pallas_call does

    def results(*operands: Any) -> Any:
        # With the operands: a vmap over them must be one over the results.
        return jax.pure_callback(_refuse, shapes, *jax.tree.leaves(operands), vmap_method="broadcast_all")

    return results


def _refuse(*operands: Any) -> NoReturn:
    raise RuntimeError("a program that was traced for its shapes alone was run; this is a fault of bridge")

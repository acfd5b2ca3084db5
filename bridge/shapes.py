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
from jax.sharding import AbstractMesh, get_abstract_mesh

_AXIS = "bridge_shapes_only"


def shapes_only() -> contextlib.AbstractContextManager[Any]:
    """A context in which `pallas_call` traces no kernel. Nothing that is traced in it can run.

    It is an axis, of size 1, of JAX's ambient mesh, which is part of the key under which JAX remembers
    traces: what was traced in this context is never found outside of it. Within another mesh that has axes
    (a `shard_map`), it changes nothing.
    """
    mesh = get_abstract_mesh()
    if mesh.axis_names:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(_with_axis(mesh.abstract_device))


@functools.cache
def _with_axis(device: Any) -> AbstractMesh:
    return AbstractMesh((1,), (_AXIS,), abstract_device=device)


def pallas_call(kernel: Callable[..., Any], out_shape: Any, **keywords: Any) -> Callable[..., Any]:
    """`pl.pallas_call`, which within `shapes_only` gives results of `out_shape` without tracing `kernel`."""
    if _AXIS not in get_abstract_mesh().axis_names:
        return pl.pallas_call(kernel, out_shape, **keywords)
    shapes = tuple(out_shape) if isinstance(out_shape, list) else out_shape  # as pl.pallas_call does

    def results(*operands: Any) -> Any:
        # With the operands: a vmap over them must be one over the results.
        return jax.pure_callback(_refuse, shapes, *jax.tree.leaves(operands), vmap_method="broadcast_all")

    return results


def _refuse(*operands: Any) -> NoReturn:
    raise RuntimeError("a program that was traced for its shapes alone was run; this is a fault of bridge")

"""torch.vmap over an op: the program of `jax.vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from bridge.program import Flat, Program


def vmapped(program: Program, in_dims: Sequence[int | None]) -> Program:
    """The program mapped over dimension `in_dims[i]` of input i (None: not mapped), and 0 of each result."""
    axes = tuple(in_dims)
    text = ",".join("-" if d is None else str(d) for d in axes)

    def mapped(fn: Flat) -> Flat:
        def call(*arrays: Any) -> tuple[Any, ...]:
            return tuple(jax.vmap(lambda *xs: tuple(fn(*xs)), in_axes=axes, out_axes=0)(*arrays))

        return call

    return program.derive(f"vmap({text})", mapped)

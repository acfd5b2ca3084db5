"""What JAX is told of a program's inputs before it has any."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np


class Avals(NamedTuple):
    """Abstract inputs: shapes, dtypes, and whether JAX keeps 64 bits.

    For an op over a mesh, shapes are those of whole arrays, and `specs` say how they lie on it.
    """

    shapes: tuple[tuple[Any, ...], ...]
    dtypes: tuple[np.dtype, ...]
    wide: bool
    specs: tuple[Any, ...] = ()

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(s, d) for s, d in zip(self.shapes, self.dtypes, strict=True)]

    def first(self, count: int) -> Avals:
        """Those of the first `count` inputs."""
        return Avals(self.shapes[:count], self.dtypes[:count], self.wide, self.specs[:count])

"""What grouped matmul can do, each feature as a call, and which of it compiles for which chip.

`python -m tpu_kernels.grouped_matmul.features --markdown` compiles every one, forward and gradient, with the
TPU compiler and prints a table. No TPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpu_kernels import _features
from tpu_kernels.grouped_matmul.epilogue import ACTIVATIONS, Activation
from tpu_kernels.grouped_matmul.operands import is_quantized
from tpu_kernels.grouped_matmul.tiling import GroupedTiling
from tpu_kernels.grouped_matmul.vjp import grouped_matmul

M, K, N, GROUPS = 1000, 512, 384, 5
TILING = GroupedTiling(256, 512, 256, 256, 512, 256, 256, 256, 256)
INNER_TILING = GroupedTiling(256, 128, 256, 256, 128, 256, 256, 256, 256)
"""Several tiles along each side; the second along the inner one, too."""

_OF_LHS = ("lhs", "lhs_scale", "existing_out")


@dataclass(frozen=True)
class Feature:
    """A call of the JAX function.

    Attributes:
        name: what it shows, in a few words.
        group: the part of the table it is in.
        sizes: M, K, N.
        lhs, rhs: their dtypes; None for that of the column of the table.
        pair, gated: whether there are two matrices, apart or in one array.
        bias, existing: whether there is one; `existing` is its dtype.
        blocks: of 8-bit operands, how many have factors of their own; 0 for one of each row and column.
        out: dtype of the result.
    """

    name: str
    group: str
    sizes: tuple[int, int, int] = (M, K, N)
    lhs: Any = None
    rhs: Any = None
    transpose_rhs: bool = False
    pair: bool = False
    gated: bool = False
    bias: bool = False
    activation: Activation | None = None
    existing: Any = None
    blocks: int = 0
    offset: bool = False
    out: Any = None
    tiling: GroupedTiling | None = TILING

    def function(self, *, gradient: bool) -> Callable[..., Any]:
        """The call, of `avals`: its result, or the gradients of all that is floating."""

        def call(arrays, group_sizes, group_offset):
            return grouped_matmul(
                arrays["lhs"],
                arrays["rhs"],
                group_sizes,
                group_offset,
                self.transpose_rhs,
                self.out,
                self.tiling,
                "pallas",
                gated=self.gated,
                activation=self.activation,
                **{name: array for name, array in arrays.items() if name not in ("lhs", "rhs")},
            )

        def gradients(arrays, group_sizes, group_offset, cotangent):
            fixed = {name: array for name, array in arrays.items() if is_quantized(array.dtype)}
            floating = {name: array for name, array in arrays.items() if name not in fixed}
            output, pull_back = jax.vjp(lambda f: call(f | fixed, group_sizes, group_offset), floating)
            return pull_back(cotangent.astype(output.dtype))

        return gradients if gradient else call

    def avals(self, dtype: Any, *, gradient: bool) -> tuple[Any, ...]:
        """The arguments of `function`."""
        m, k, n = self.sizes
        wide = 2 * n if self.gated else n
        lhs, rhs = (dtype if own is None else own for own in (self.lhs, self.rhs))
        matrix = (wide, k) if self.transpose_rhs else (k, wide)
        scale = (GROUPS, self.blocks, wide) if self.blocks else (GROUPS, wide)
        shapes = {"lhs": ((m, k), lhs), "rhs": ((GROUPS, *matrix), rhs)}
        if is_quantized(jnp.dtype(lhs)):
            shapes["lhs_scale"] = ((m, self.blocks) if self.blocks else (m,), jnp.float32)
        if is_quantized(jnp.dtype(rhs)):
            shapes["rhs_scale"] = (scale, jnp.float32)
        if self.bias:
            shapes["bias"] = ((GROUPS, wide), dtype)
        if self.existing is not None:
            shapes["existing_out"] = ((m, n), self.existing)
        if self.pair:
            second = {"up": "rhs", "up_bias": "bias", "up_scale": "rhs_scale"}
            shapes |= {name: shapes[like] for name, like in second.items() if like in shapes}
        arrays = {name: jax.ShapeDtypeStruct(*given) for name, given in shapes.items()}
        all_groups = 2 * GROUPS if self.offset else GROUPS
        sizes = jax.ShapeDtypeStruct((all_groups,), jnp.int32)
        offset = jax.ShapeDtypeStruct((), jnp.int32) if self.offset else None
        cotangent = (jax.ShapeDtypeStruct((m, n), dtype),) if gradient else ()
        return (arrays, sizes, offset, *cotangent)


def features() -> tuple[Feature, ...]:
    """All of them."""
    int8, e4m3, e5m2 = jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2
    found = [
        Feature("rows of each group times its matrix", "products"),
        Feature("transposed matrices", "products", transpose_rhs=True),
        Feature("tiles along the inner dimension", "products", tiling=INNER_TILING),
        Feature("a slice of the groups", "products", offset=True),
        Feature("float32 result", "products", out=jnp.float32),
        Feature("default tiling", "products", tiling=None),
    ]
    shapes = {"one row": (1, K, N), "ragged": (333, 200, 300), "one of each": (1, 1, 1)}
    found += [Feature(name, "shapes", sizes, tiling=None) for name, sizes in shapes.items()]
    found += [
        Feature("bias", "epilogues", bias=True),
        *(Feature(name, "epilogues", bias=True, activation=name) for name in ACTIVATIONS),
        Feature("added to a result", "epilogues", existing=jnp.bfloat16),
        Feature("added to a float32 result", "epilogues", existing=jnp.float32, out=jnp.float32),
    ]
    for transpose in (False, True):
        how = ", transposed" if transpose else ""
        found += [
            Feature(
                f"SwiGLU, two matrices{how}", "gated", pair=True, activation="silu", transpose_rhs=transpose
            ),
            Feature(
                f"SwiGLU, one array{how}", "gated", gated=True, activation="silu", transpose_rhs=transpose
            ),
            Feature(
                f"GeGLU, bias, ragged{how}",
                "gated",
                (333, 200, 300),
                gated=True,
                activation="gelu",
                bias=True,
                transpose_rhs=transpose,
                tiling=None,
            ),
        ]
    found.append(
        Feature("SwiGLU, inner tiles", "gated", pair=True, activation="silu", tiling=INNER_TILING, bias=True)
    )
    for dtype in (int8, e4m3, e5m2):
        name = jnp.dtype(dtype).name
        found += [
            Feature(f"{name} matrices", "8 bits", rhs=dtype),
            Feature(f"{name} matrices, blocks of 128", "8 bits", rhs=dtype, blocks=4),
            Feature(f"{name} both", "8 bits", lhs=dtype, rhs=dtype),
            Feature(f"{name} both, blocks of 128", "8 bits", lhs=dtype, rhs=dtype, blocks=4),
            Feature(
                f"{name} both, transposed, inner tiles of half a block",
                "8 bits",
                lhs=dtype,
                rhs=dtype,
                transpose_rhs=True,
                blocks=2,
                tiling=INNER_TILING,
            ),
        ]
    found += [
        Feature("int8 rows, float8 matrices", "8 bits", lhs=int8, rhs=e4m3),
        Feature("int8 rows", "8 bits", lhs=int8),
        Feature("int8 matrices, SwiGLU, bias", "8 bits", rhs=int8, gated=True, activation="silu", bias=True),
    ]
    return tuple(found)


SIZES = f"[{M}, {K}] times {GROUPS} matrices [{K}, {N}]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the names of the features, or the table."""
    _features.main("grouped_matmul", "grouped matmul", SIZES, features(), arguments)


if __name__ == "__main__":
    main()

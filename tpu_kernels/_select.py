"""Which implementation computes a problem, and with which tiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from autotune.problem import ArraySpec, Problem
from bridge.chips import Chip, chip
from bridge.interpretation import target_chip

Implementation = Literal["auto", "pallas", "reference"]
"""`pallas` is the kernel, `reference` the plain JAX of the same operation, which XLA compiles for any size
and dtype. `auto` takes the kernel wherever it can compute the problem, and the reference elsewhere."""
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

FLOATING = ("float16", "bfloat16", "float32", "float64")
"""Dtypes that the implementations compute with, between them."""

T = TypeVar("T")


def select(
    problem: Problem,
    impl: str,
    tiling: T | None,
    *,
    unsupported_reasons: Callable[[Problem, Chip], tuple[str, ...]],
    illegal_reasons: Callable[[Problem, T, Chip], tuple[str, ...]],
    default_tiling: Callable[[Problem, Chip], T],
    integers: tuple[str, ...] = (),
) -> T | None:
    """The tiling to run the kernel with on the present chip, or None for the reference.

    Args:
        integers: names of the arrays that are integers.

    Raises:
        TypeError: an array is not floating.
        ValueError: `impl` is unknown; `impl="pallas"` and the kernel cannot compute the problem;
            `tiling` cannot run on the chip, or is given where the reference is used. The message has the
            reasons.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(
            f"{problem.kernel}: unknown impl {impl!r}; expected one of {', '.join(IMPLEMENTATIONS)}"
        )
    for name, spec in problem.arrays:
        if spec is not None and name not in integers and spec.dtype not in FLOATING:
            raise TypeError(f"{problem}: {name} must be one of {', '.join(FLOATING)}, got {spec.dtype}")
    present = chip(target_chip())
    unsupported = unsupported_reasons(problem, present)
    if impl == "reference" or (unsupported and impl == "auto"):
        if tiling is not None:
            why = "; ".join(unsupported) if impl == "auto" else "impl='reference' was asked for"
            raise ValueError(f"{problem}: got {tiling}, but the reference is used, which has no tiles: {why}")
        return None
    if unsupported:
        raise ValueError(
            f"{problem}: impl='pallas' cannot compute this: {'; '.join(unsupported)}. "
            f"Use impl='auto' or 'reference'"
        )
    if tiling is None:
        return default_tiling(problem, present)
    illegal = illegal_reasons(problem, tiling, present)
    if illegal:
        raise ValueError(
            f"{problem}: {tiling} cannot run: {'; '.join(illegal)}. Use {default_tiling(problem, present)}"
        )
    return tiling


def describe(**arrays: Any) -> dict[str, ArraySpec | None]:
    """The `ArraySpec` of each array by its name, None for None."""
    return {
        name: None if array is None else ArraySpec(tuple(array.shape), str(array.dtype))
        for name, array in arrays.items()
    }

"""The protocol between a kernel and everything that works on kernels in general.

Tests, benchmarks, the documentation and the tuner read `KernelSpec`s and nothing else of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.cache.kernel import Kernel
from autotune.problem import Problem
from bridge.chips import Chip

Arrays = Sequence[np.ndarray | None]
"""One value per array argument of a problem, in its order; None for one left out."""


@dataclass(frozen=True)
class Candidate:
    """One tiling of a space, with what is known about it before anything is compiled.

    Attributes:
        tiling: an instance of the kernel's tiling type.
        vmem_bytes: VMEM the kernel needs with it, estimated; the largest of its phases.
        reasons: why it cannot run on the chip, one sentence each; empty if it can.
    """

    tiling: Any
    vmem_bytes: int
    reasons: tuple[str, ...] = ()

    @property
    def legal(self) -> bool:
        """Whether it can run: nothing speaks against it."""
        return not self.reasons


@dataclass(frozen=True)
class Cost:
    """Work that no tiling can avoid.

    Attributes:
        flops: floating-point operations, those of the matrix units included.
        matmul_flops: operations of the matrix units only.
        bytes_read: bytes that must come from HBM, each array once.
        bytes_written: bytes that must go to HBM, each array once.
    """

    flops: int
    bytes_read: int
    bytes_written: int
    matmul_flops: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Example:
    """A problem worth trying, and why.

    Attributes:
        problem: what to run.
        reason: what this size, dtype or option exercises, in a few words.
        benchmark: a size of real models, for timing; the others are small, for tests.
    """

    problem: Problem
    reason: str
    benchmark: bool = False


def no_values(problem: Problem) -> Mapping[str, np.ndarray]:
    """`KernelSpec.values` of a kernel whose work depends on no values."""
    del problem
    return {}


@dataclass(frozen=True)
class KernelSpec:
    """Everything that tests, benchmarks, documentation and the tuner need to know of a kernel.

    Attributes:
        name: the operation, as in `tpu_kernels.<name>`.
        summary: one sentence.
        formula: what is computed, in text.
        arguments: names of the array arguments, in call order; the first is the one a lone shape describes.
        implementations: values of `impl` besides `auto`.
        fn: the JAX function, `fn(*arrays, **params, tiling=None, impl="auto")`, differentiable.
        reference: plain jnp of the same arguments without `tiling` and `impl`; float64 in, float64 inside.
        torch_call: `torch_call(problem, *tensors, tiling=None, impl="auto")` calls the public torch function.
        torch_equivalent: `torch_equivalent(problem, *tensors)` is plain torch for the same problem.
        tiling_type: frozen dataclass of the tile sizes.
        make_problem: `make_problem(shapes, dtype)` with shapes by argument name; the rest is filled in.
            Raises `ValueError` for shapes that make no problem.
        unsupported_reasons: why no tiling computes a problem on a chip; empty if one does.
        space: all tilings of a problem worth considering on a chip, legal and not.
        default_tiling: what is used on a chip when nobody chose; legal if anything is.
        costs: unavoidable work by phase (`forward`, `backward`).
        error_bounds: `error_bounds(problem, arrays, cotangent)`, all float64: the error that float32
            arithmetic may make in the output and in the gradient of each array, elementwise (None for an
            array left out). Rounding to the result's own dtype comes on top.
        examples: problems for tests, benchmarks and documentation.
        values: `values(problem)` gives, by name, the arrays of integers whose values decide what the kernel
            does, such as sizes of groups. All other arrays are floating, and may hold anything.
        cached_as: what the cache of tuned tilings knows of it; None: what `Kernel.of` makes of the rest.
    """

    name: str
    summary: str
    formula: str
    arguments: tuple[str, ...]
    implementations: tuple[str, ...]
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    torch_call: Callable[..., Any]
    torch_equivalent: Callable[..., Any]
    tiling_type: type
    make_problem: Callable[[Mapping[str, tuple[int, ...]], str], Problem]
    unsupported_reasons: Callable[[Problem, Chip], tuple[str, ...]]
    space: Callable[[Problem, Chip], tuple[Candidate, ...]]
    default_tiling: Callable[[Problem, Chip], Any]
    costs: Callable[[Problem], Mapping[str, Cost]]
    error_bounds: Callable[[Problem, Arrays, np.ndarray], tuple[np.ndarray | None, ...]]
    examples: tuple[Example, ...]
    values: Callable[[Problem], Mapping[str, np.ndarray]] = no_values
    cached_as: Kernel | None = None

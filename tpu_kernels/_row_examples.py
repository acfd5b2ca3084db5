"""Problems that every row-wise kernel is tried on, each for a reason."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.problem import ArraySpec, Problem
from autotune.spec import Example

_SHAPES: tuple[tuple[tuple[int, ...], str, str], ...] = (
    ((8, 128), "float32", "exactly one vector register"),
    ((1, 1), "float32", "a single element"),
    ((3, 1), "float32", "rows of one element: layer norm has variance 0"),
    ((5, 7), "float32", "less than a register both ways"),
    ((13, 127), "bfloat16", "one column short of a register's width"),
    ((300,), "float32", "no leading dimension"),
    ((2, 3, 5, 384), "float32", "several leading dimensions; the width of MiniLM"),
    ((1037, 129), "float32", "many rows, no multiple of any tile; one column more than a register"),
    ((4100, 1), "bfloat16", "more rows than the largest tile, so the last block is part full"),
    ((70, 1000), "bfloat16", "a width that is no multiple of 128"),
    ((66, 4096), "float32", "several blocks of wide rows, the last part full"),
    ((2, 70000), "float32", "rows so wide that only some chips can hold 8 of them"),
    ((0, 128), "float32", "no rows"),
    ((4, 0), "float32", "rows without elements"),
    ((9, 64), "float16", "a dtype the kernel does not compute with"),
)

_MODELS: tuple[tuple[tuple[int, ...], str, str], ...] = (
    ((8 * 128, 384), "float32", "MiniLM, 8 sentences of 128 tokens"),
    ((8192, 4096), "bfloat16", "Llama 3 8B, 8192 tokens"),
    ((8192, 8192), "bfloat16", "Llama 3 70B, 8192 tokens"),
    ((64, 5120), "bfloat16", "Qwen 3 32B, decoding 64 sequences"),
)


def row_examples(kernel: str, vectors: tuple[str, ...], params: Mapping[str, float]) -> tuple[Example, ...]:
    """Examples for `kernel`, which takes x [..., cols] and optional `vectors` [cols]."""

    def problem(shape: tuple[int, ...], dtype: str, given: Mapping[str, str | None] | None = None) -> Problem:
        dtypes = dict.fromkeys(vectors, dtype) if given is None else given
        arrays: dict[str, ArraySpec | None] = {"x": ArraySpec(shape, dtype)}
        for name in vectors:
            vector_dtype = dtypes.get(name)
            arrays[name] = None if vector_dtype is None else ArraySpec(shape[-1:], vector_dtype)
        return Problem.of(kernel, arrays, params)

    optional = [
        Example(problem((20, 33), "float32", {}), "none of the optional arrays"),
        Example(
            problem((20, 33), "bfloat16", dict.fromkeys(vectors, "float32")), "optional arrays wider than x"
        ),
        Example(
            problem((20, 33), "float32", dict.fromkeys(vectors, "bfloat16")),
            "optional arrays narrower than x",
        ),
    ]
    if len(vectors) > 1:
        optional += [
            Example(problem((20, 33), "float32", {name: "float32"}), f"only {name} of the optional arrays")
            for name in vectors
        ]
    return (
        *(Example(problem(shape, dtype), reason) for shape, dtype, reason in _SHAPES),
        *optional,
        *(Example(problem(shape, dtype), reason, benchmark=True) for shape, dtype, reason in _MODELS),
    )

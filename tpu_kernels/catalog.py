"""All kernels. Tests, benchmarks, the documentation and `tpu-autotune` read this list.

`python -m tpu_kernels.catalog --markdown` prints the table in docs/kernels.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from autotune.spec import Example, KernelSpec
from bridge.chips import chip
from tpu_kernels.grouped_matmul.spec import SPEC as GROUPED_MATMUL
from tpu_kernels.layer_norm.spec import SPEC as LAYER_NORM
from tpu_kernels.rms_norm.spec import SPEC as RMS_NORM
from tpu_kernels.splash_attention.spec import SPEC as SPLASH_ATTENTION

CATALOG: tuple[KernelSpec, ...] = (RMS_NORM, LAYER_NORM, SPLASH_ATTENTION, GROUPED_MATMUL)

_CHIPS_SHOWN = ("v5e", "v6e", "tpu7x")


def markdown() -> str:
    """The page of the documentation that lists the kernels."""
    command = "python -m tpu_kernels.catalog --markdown"
    header = f"# Kernels\n\nMade by `{command}`; change `tpu_kernels`, not this page.\n"
    rows = [
        f"| `tpu_kernels.{spec.name}` | {spec.summary} | `{spec.formula}` | "
        f"{', '.join(spec.implementations)} |"
        for spec in CATALOG
    ]
    table = "\n".join(["| Function | What it does | Formula | `impl` |", "|---|---|---|---|", *rows])
    return "\n".join([header, table, "", *map(_section, CATALOG)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the catalog: names, or with `--markdown` the documentation page."""
    parser = argparse.ArgumentParser(
        prog="python -m tpu_kernels.catalog", description="Print the kernel catalog."
    )
    parser.add_argument("--markdown", action="store_true", help="the page docs/kernels.md")
    if parser.parse_args(arguments).markdown:
        print(markdown(), end="")
    else:
        for spec in CATALOG:
            print(f"{spec.name}: {spec.summary}")


def _section(spec: KernelSpec) -> str:
    chips = " | ".join(f"tile, {name}" for name in _CHIPS_SHOWN)
    rows = [_benchmark_row(spec, example) for example in spec.examples if example.benchmark]
    return "\n".join(
        [
            f"## {spec.name}",
            "",
            f"{spec.summary} Arrays: {', '.join(f'`{name}`' for name in spec.arguments)}. Default tilings:",
            "",
            f"| Problem | `{spec.arguments[0]}` | {chips} |",
            "|---|---|" + "---|" * len(_CHIPS_SHOWN),
            *rows,
            "",
        ]
    )


def _benchmark_row(spec: KernelSpec, example: Example) -> str:
    tilings = [spec.default_tiling(example.problem, chip(name)) for name in _CHIPS_SHOWN]
    fields = [", ".join(f"{field}={value}" for field, value in vars(tiling).items()) for tiling in tilings]
    return f"| {example.reason} | {example.problem.array(spec.arguments[0])} | {' | '.join(fields)} |"


if __name__ == "__main__":
    main()

"""Tables of what compiles for which TPU, of any kernel's features. No TPU is needed."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax.numpy as jnp

from bridge.topology import CompileError, compile_for, compiler_versions

CHIPS = ("v5e", "v6e", "tpu7x")
PHASES = ("forward", "gradient")


class Feature(Protocol):
    """One thing that a kernel can do, as a call."""

    @property
    def name(self) -> str:
        """What it shows, in a few words."""
        ...

    @property
    def group(self) -> str:
        """The part of the table it is in."""
        ...

    def function(self, *, gradient: bool) -> Callable[..., Any]:
        """The call, of `avals`, or that of its gradients."""
        ...

    def avals(self, dtype: Any, *, gradient: bool) -> tuple[Any, ...]:
        """Shapes and dtypes of its arguments, where the dtype of numbers is `dtype`."""
        ...


def refusal(feature: Feature, dtype: Any, chip: str, *, gradient: bool) -> str | None:
    """None if it compiles, else why not."""
    try:
        compile_for(feature.function(gradient=gradient), feature.avals(dtype, gradient=gradient), chip)
    except CompileError as error:
        return str(error)
    return None


def markdown(
    features: Sequence[Feature],
    dtypes: Sequence[Any] = (jnp.bfloat16, jnp.float32),
    chips: Sequence[str] = CHIPS,
) -> str:
    """The table: what compiles, of every feature, dtype and chip."""
    columns = list(itertools.product(dtypes, chips))
    wanted = [
        (place, *column, phase) for place in range(len(features)) for column in columns for phase in PHASES
    ]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        reasons = [
            threads.submit(refusal, features[place], dtype, chip, gradient=phase == "gradient")
            for place, dtype, chip, phase in wanted
        ]
        said = {}
        for of, reason in zip(wanted, reasons, strict=True):
            said[of] = reason.result()
            print(f"\r{len(said)} of {len(wanted)} compiled", end="", file=sys.stderr, flush=True)
    head = " | ".join(f"{jnp.dtype(dtype).name}, {chip}" for dtype, chip in columns)
    lines = [f"| | | {head} |", "|---|---|" + "---|" * len(columns)]
    for place, feature in enumerate(features):
        cells = []
        for column in columns:
            refused = [f"{p}: {why}" for p in PHASES if (why := said[(place, *column, p)])]
            cells.append("; ".join(refused) or "yes")
        lines.append(f"| {feature.group} | {feature.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(kernel: str, title: str, sizes: str, table: str) -> str:
    """The page of the documentation with the table of `markdown()`.

    Args:
        kernel: the package, as in `tpu_kernels.<kernel>.features`.
        title: what the kernel is called.
        sizes: those that a call has unless its name says otherwise.
    """
    command = f"python -m tpu_kernels.{kernel}.features --markdown"
    made_with = ", ".join(f"{name} {compiler_versions()[name]}" for name in ("jax", "libtpu"))
    return (
        f"# What of {title} compiles for which TPU\n\nMade by `{command}` with {made_with}; no TPU "
        f"was there. Each feature is a call, by default of {sizes}; *yes*: forward and gradient compile.\n\n"
        f"{table}\n"
    )


def main(
    kernel: str,
    title: str,
    sizes: str,
    features: Sequence[Feature],
    arguments: Sequence[str] | None = None,
) -> None:
    """Print the names of the features, or with `--markdown` the page."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tpu_kernels.{kernel}.features",
        description=f"What {title} can do, and what of it compiles for which TPU.",
    )
    parser.add_argument("--markdown", action="store_true", help="compile everything and print the table")
    if parser.parse_args(arguments).markdown:
        print(page(kernel, title, sizes, markdown(features)), end="")
    else:
        for feature in features:
            print(f"{feature.group}: {feature.name}")

"""What the commands work on: a catalog's kernel at given shapes, or a JAX function with given arguments."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.problem import Problem
from autotune.score.protocol import Workload
from autotune.spec import KernelSpec
from bridge.chips import Chip, chip, chips

DEFAULT_CATALOG = "tpu_kernels.catalog"


class UsageError(Exception):
    """What the user asked for cannot be done; the message says why."""


# Options ------------------------------------------------------------------------------------------


def add_catalog_argument(parser: argparse.ArgumentParser) -> None:
    """`--catalog`."""
    parser.add_argument(
        "--catalog",
        default=DEFAULT_CATALOG,
        metavar="MODULE",
        help="module with CATALOG (default: %(default)s)",
    )


def add_problem_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """`--shape` and `--dtype`, which make a problem of a catalog's kernel."""
    parser.add_argument(
        "--shape",
        action="append",
        required=required,
        default=None if required else [],
        help="sizes such as 8192,4096, of the kernel's first array; or NAME=SIZES, once per array",
    )
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the arrays (default: %(default)s)")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """TARGET, and the options that say what its arguments are."""
    parser.add_argument(
        "target", metavar="TARGET", help="a kernel of the catalog, or a JAX function: path.py:function"
    )
    add_problem_arguments(parser, required=False)
    parser.add_argument(
        "--tile",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="a tile size of a catalog's kernel, once per name (default: the kernel's default tiling)",
    )
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        help="an argument of a function, once for each: an array such as f32[128,4096], or a Python literal",
    )
    add_catalog_argument(parser)


def add_chips_argument(parser: argparse.ArgumentParser) -> None:
    """`--chip v5e,v6e`."""
    parser.add_argument(
        "--chip", default=",".join(chips()), metavar="CHIPS", help="names with commas (default: %(default)s)"
    )


def chosen_chips(options: argparse.Namespace) -> tuple[Chip, ...]:
    """The chips of `--chip`. Raises `UsageError` for a name that is none."""
    try:
        return tuple(chip(name.strip()) for name in options.chip.split(","))
    except ValueError as error:
        raise UsageError(f"--chip: {error}") from error


# Catalogs -----------------------------------------------------------------------------------------


def load_catalog(module: str) -> tuple[KernelSpec, ...]:
    """`CATALOG` of the module called `module`. Raises `UsageError` if there is none."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"cannot import the catalog {module!r}: {error}") from error
    catalog = getattr(found, "CATALOG", None)
    if not isinstance(catalog, tuple) or not all(isinstance(spec, KernelSpec) for spec in catalog):
        raise UsageError(f"{module} must define CATALOG, a tuple of autotune.KernelSpec")
    return catalog


def find_kernel(catalog: Sequence[KernelSpec], name: str) -> KernelSpec:
    """The kernel called `name`. Raises `UsageError` with the names there are."""
    for spec in catalog:
        if spec.name == name:
            return spec
    raise UsageError(
        f"no kernel {name!r}; the catalog has {', '.join(spec.name for spec in catalog) or 'none'}"
    )


def make_problem(spec: KernelSpec, shapes: Sequence[str], dtype: str) -> Problem:
    """The problem that `--shape` and `--dtype` describe. Raises `UsageError` if they describe none."""
    by_name: dict[str, tuple[int, ...]] = {}
    for text in shapes:
        name, _, sizes = text.rpartition("=")
        by_name[name or spec.arguments[0]] = _sizes(sizes)
    try:
        return spec.make_problem(by_name, dtype)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        raise UsageError(f"--shape must be sizes such as 8192,4096, got {text!r}") from None


# Workloads ----------------------------------------------------------------------------------------


def workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    """What TARGET and its options describe: a function; or each phase of a catalog's kernel.

    Raises `UsageError` that says what is wrong with them.
    """
    if ":" in options.target:
        if options.shape or options.tile:
            raise UsageError("--shape and --tile are for kernels of a catalog; a function takes --arg")
        return (_function_workload(options.target, options.arg),)
    if options.arg:
        raise UsageError("--arg is for functions (path.py:function); a kernel of a catalog takes --shape")
    spec = find_kernel(load_catalog(options.catalog), options.target)
    if not options.shape:
        raise UsageError(f"{spec.name} needs its sizes: --shape 8192,4096 (of {spec.arguments[0]})")
    return kernel_workloads(
        spec, make_problem(spec, options.shape, options.dtype), _tiling(spec, options.tile)
    )


def kernel_workloads(spec: KernelSpec, problem: Problem, tiling: Any = None) -> tuple[Workload, ...]:
    """Each phase of a catalog's kernel (`forward`, `backward`) for a problem; the default tiling if None."""
    import jax

    avals = [
        None if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype)
        for _, array in problem.arrays
    ]
    params = dict(problem.params)
    forward = functools.partial(spec.fn, **params, tiling=tiling, impl="pallas")
    known = spec.values(problem)
    values = {place: known[name] for place, (name, _) in enumerate(problem.arrays) if name in known}
    phases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {"forward": (forward, tuple(avals))}
    costs = spec.costs(problem)
    if "backward" in costs:
        out = _output(functools.partial(spec.reference, **params), avals)
        phases["backward"] = (_gradient(forward, avals), (*avals, out))
    return tuple(
        Workload(
            name=f"{spec.name} {phase}",
            fn=fn,
            avals=arguments,
            values=values,
            matmul_flops=cost.matmul_flops,
            flops=cost.flops,
            bytes_read=cost.bytes_read,
            bytes_written=cost.bytes_written,
        )
        for phase, cost in costs.items()
        for fn, arguments in [phases[phase]]
    )


def _output(reference: Callable[..., Any], avals: Sequence[Any]) -> Any:
    import jax

    given = [aval for aval in avals if aval is not None]

    def call(*arrays: Any) -> Any:
        left = iter(arrays)
        return reference(*(None if aval is None else next(left) for aval in avals))

    return jax.eval_shape(call, *given)


def _gradient(forward: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., Any]:
    """A function of the arguments and the output's cotangent: the gradients of all floating arrays."""
    import jax
    import jax.numpy as jnp

    places = [
        place
        for place, aval in enumerate(avals)
        if aval is not None and jnp.issubdtype(aval.dtype, jnp.floating)
    ]

    def gradient(*arguments: Any) -> Any:
        *arrays, cotangent = arguments

        def of_floating(*floating: Any) -> Any:
            complete = list(arrays)
            for place, array in zip(places, floating, strict=True):
                complete[place] = array
            return forward(*complete)

        return jax.vjp(of_floating, *(arrays[place] for place in places))[1](cotangent)

    return gradient


def _tiling(spec: KernelSpec, tiles: Sequence[str]) -> Any:
    if not tiles:
        return None
    try:
        sizes = {name.strip(): int(size) for name, _, size in (tile.partition("=") for tile in tiles)}
        return spec.tiling_type(**sizes)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--tile takes NAME=SIZE, the fields of {spec.name}'s tiling: {error}") from error


def _function_workload(target: str, arguments: Sequence[str]) -> Workload:
    return Workload(
        name=target.rpartition(":")[2],
        fn=_load_function(target),
        avals=tuple(map(_argument, arguments)),
    )


def _argument(text: str) -> Any:
    """An array written as text; else a Python literal."""
    from bridge.aot.avals import is_aval, parse_aval

    try:
        if is_aval(text):
            return parse_aval(text)
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise UsageError(
            f"--arg must be an array such as f32[128,4096], or a Python literal, got {text!r}: {error}"
        ) from error


def _load_function(target: str) -> Callable[..., Any]:
    """`path.py:function` or `package.module:function`."""
    source, _, name = target.rpartition(":")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise UsageError(f"cannot load {source}: {error}") from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found) and not hasattr(found, "fn"):
        raise UsageError(f"{source} has no function {name!r}")
    return found


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # as if it were run: it may import its neighbours
    spec.loader.exec_module(module)
    return module

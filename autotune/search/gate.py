"""Whether a tiling gives right results: the kernel is interpreted, and compared with its reference.

Nothing here needs a TPU. An interpreted kernel says nothing about speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.problem import Problem, numpy_dtype
from autotune.spec import KernelSpec
from bridge.chips import Chip

if TYPE_CHECKING:
    from autotune.search.subject import Check

MOST_BYTES, MOST_FLOPS = 1 << 24, 1 << 31
"""A problem of no more than this is checked as it is: interpreting it takes seconds."""

FLOATS = ("float16", "bfloat16", "float32")

ROUNDINGS = 16
"""Where no bound is known, a result may be off by so many roundings of its dtype, of the largest value."""


# A kernel of a catalog ----------------------------------------------------------------------------


def kernel_check(
    problem: Problem, spec: KernelSpec, chip: Chip, *, gradients: bool, check_on: Problem | None = None
) -> Check | None:
    """A check of a kernel's output, and of its gradients. None if there is no problem to check on.

    Args:
        problem: what is tuned.
        spec: the kernel.
        chip: the chip that tilings are for.
        gradients: whether gradients are checked, too.
        check_on: the problem to run; see `problem_to_check`.
    """
    chosen = problem_to_check(problem, spec, chip) if check_on is None else check_on
    return None if chosen is None else functools.partial(_check_kernel, spec, chosen, chip, gradients)


def problem_to_check(problem: Problem, spec: KernelSpec, chip: Chip) -> Problem | None:
    """`problem` if it is small; else the largest small example of its dtype that the kernel can compute."""
    if _small(problem, spec):
        return problem
    dtypes = {array.dtype for _, array in problem.arrays if array is not None}
    fitting = [
        example.problem
        for example in spec.examples
        if not example.benchmark
        and not spec.unsupported_reasons(example.problem, chip)
        and {array.dtype for _, array in example.problem.arrays if array is not None} == dtypes
    ]
    return max(fitting, key=lambda p: _work(p, spec), default=None)


def _small(problem: Problem, spec: KernelSpec) -> bool:
    flops, moved = _work(problem, spec)
    return flops <= MOST_FLOPS and moved <= MOST_BYTES


def _work(problem: Problem, spec: KernelSpec) -> tuple[int, int]:
    costs = spec.costs(problem).values()
    return sum(cost.flops for cost in costs), sum(cost.bytes_moved for cost in costs)


def _check_kernel(spec: KernelSpec, problem: Problem, chip: Chip, gradients: bool, tiling: Any) -> str:
    import jax

    arrays = _example_arrays(problem, spec)
    kernel = functools.partial(spec.fn, **dict(problem.params), tiling=tiling, impl="pallas")
    # A result that is asked for in a narrow dtype would be rounded in the reference, too.
    wide_params = {name: "float64" if value in FLOATS else value for name, value in problem.params}
    reference = functools.partial(spec.reference, **wide_params)
    try:
        output = _output(functools.partial(spec.reference, **dict(problem.params)), arrays)
        cotangent = np.random.default_rng(1).standard_normal(output.shape).astype(output.dtype)
        wide = [_wide(array) for array in arrays]
        got = _results(kernel, arrays, cotangent, gradients, chip)
        with jax.enable_x64(True):
            expected = _results(reference, wide, _wide(cotangent), gradients, None)
        bounds = _bounds(spec, problem, wide, cotangent)
    except Exception as error:
        return f"run on {problem} it raised {type(error).__name__}: {error}"
    floating = [name for (name, _), a in zip(problem.arrays, arrays, strict=True) if _is_floating(a)]
    names = ["the output", *(f"the gradient of {name}" for name in floating)]
    for name, result, wanted, bound in zip(names, got, expected, bounds, strict=False):
        wrong = difference(result, wanted, bound)
        if wrong:
            return f"run on {problem}, {name} is wrong: {wrong}"
    return ""


def _example_arrays(problem: Problem, spec: KernelSpec) -> list[np.ndarray | None]:
    values = spec.values(problem)
    random = np.random.default_rng(0)
    return [
        values[name]
        if name in values
        else None
        if array is None
        else random.standard_normal(array.shape).astype(numpy_dtype(array.dtype))
        for name, array in problem.arrays
    ]


def _bounds(
    spec: KernelSpec, problem: Problem, wide: Sequence[np.ndarray | None], cotangent: np.ndarray
) -> list[np.ndarray | None]:
    """Errors allowed of the output, and of each gradient; None where the kernel does not know."""
    try:
        output, *of_gradients = spec.error_bounds(problem, wide, np.asarray(_wide(cotangent)))
    except ValueError:
        return [None] * (1 + len(wide))
    return [output, *(b for b, a in zip(of_gradients, wide, strict=True) if _is_floating(a))]


def _results(
    fn: Callable[..., Any],
    arrays: Sequence[np.ndarray | None],
    cotangent: Any,
    gradients: bool,
    chip: Chip | None,
) -> list[np.ndarray]:
    """The output, and the gradients of all floating arrays; interpreted as on `chip` if one is given."""
    import jax

    floating = [place for place, array in enumerate(arrays) if _is_floating(array)]

    def both(g: Any, *present: Any) -> Any:
        given = _with_none(arrays, present)

        def of_floating(*values: Any) -> Any:
            complete = list(given)
            for place, value in zip(floating, values, strict=True):
                complete[place] = value
            return fn(*complete)

        if not gradients:
            return (fn(*given),)
        out, pull_back = jax.vjp(of_floating, *(given[place] for place in floating))
        return (out, *pull_back(g))

    given = (cotangent, *_present(arrays))
    results = jax.jit(both)(*given) if chip is None else interpreted(both, given, chip)
    return [np.asarray(result) for result in results]


def _present(arrays: Sequence[Any]) -> list[Any]:
    return [array for array in arrays if array is not None]


def _with_none(arrays: Sequence[Any], present: Sequence[Any]) -> list[Any]:
    left = iter(present)
    return [None if array is None else next(left) for array in arrays]


def _wide(array: np.ndarray | None) -> np.ndarray | None:
    return array.astype(np.float64) if array is not None and _is_floating(array) else array


def _is_floating(array: np.ndarray | None) -> bool:
    import jax.numpy as jnp

    return array is not None and bool(jnp.issubdtype(array.dtype, jnp.floating))


def _output(reference: Callable[..., Any], arrays: Sequence[np.ndarray | None]) -> Any:
    """Shape and dtype of the result."""
    import jax

    return jax.eval_shape(lambda *present: reference(*_with_none(arrays, present)), *_present(arrays))


# A function ---------------------------------------------------------------------------------------


def function_check(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    example: Sequence[Any],
    chip: Chip,
    tolerance: float | None,
) -> Check:
    """A check of `fn(*arrays, **sizes)` against `reference(*arrays)`; see `function_subject`."""
    return functools.partial(_check_function, fn, reference, example, chip, tolerance)


def _check_function(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    example: Sequence[Any],
    chip: Chip,
    tolerance: float | None,
    tiling: Any,
) -> str:
    import jax

    random = np.random.default_rng(0)
    try:
        arrays = [_example(value, random) for value in example]
        got = jax.tree.leaves(interpreted(functools.partial(fn, **vars(tiling)), arrays, chip))
        expected = jax.tree.leaves(jax.jit(reference)(*arrays))
    except Exception as error:
        return f"run here it raised {type(error).__name__}: {error}"
    if len(got) != len(expected):
        return f"it has {len(got)} results and the reference {len(expected)}"
    for result, wanted in zip(got, expected, strict=True):
        result, wanted = np.asarray(result), np.asarray(wanted)
        allowed = tolerance * float(np.abs(wanted).max(initial=0)) if tolerance is not None else None
        wrong = difference(result, wanted, allowed)
        if wrong:
            return f"its result is wrong: {wrong}"
    return ""


def _example(value: Any, random: np.random.Generator) -> Any:
    """An array for an abstract one, normal values if it is floating; anything else as it is."""
    from bridge.aot.avals import is_aval, to_aval

    if isinstance(value, np.ndarray) or not is_aval(value) or hasattr(value, "__array__"):
        return value
    aval = to_aval(value)
    return random.standard_normal(aval.shape).astype(aval.dtype)


# Both ---------------------------------------------------------------------------------------------


def interpreted(fn: Callable[..., Any], arrays: Sequence[Any], chip: Chip) -> Any:
    """`fn(*arrays)` on this machine, its kernels interpreted, and its tiles those of `chip`."""
    import jax
    from jax.extend.core import jaxpr_as_fun

    from bridge.aot.topologies import abstract_device
    from bridge.interpretation import compiling_for, interpret_kernels, interpreter_lock, needs_lock

    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract_device(chip))
    with compiling_for(chip.name), jax.sharding.use_abstract_mesh(mesh):
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*arrays)
    program = interpret_kernels(jaxpr, "fast")
    run = jax.jit(jaxpr_as_fun(program.jaxpr))
    flat = jax.tree.leaves(list(arrays))
    if needs_lock(program):
        with interpreter_lock():
            leaves = jax.block_until_ready(run(*flat))
    else:
        leaves = run(*flat)
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)


def difference(got: np.ndarray, wanted: np.ndarray, bound: np.ndarray | float | None) -> str:
    """What is wrong with a result, in a sentence; empty if it is within `bound` and half a rounding.

    Without a bound, it may be off by `ROUNDINGS` of the largest value.
    """
    import jax.numpy as jnp

    if got.shape != wanted.shape:
        return f"its shape is {list(got.shape)}, and {list(wanted.shape)} was expected"
    if not got.size:
        return ""
    values, want = got.astype(np.float64), wanted.astype(np.float64)
    same = (values == want) | (np.isnan(values) & np.isnan(want))
    if (np.isnan(values) & ~same).any():
        return f"{int((np.isnan(values) & ~same).sum())} of {got.size} elements are NaN"
    size = np.where(np.isfinite(want), np.abs(want), 0.0)
    allowed = np.zeros(got.shape)
    if jnp.issubdtype(got.dtype, jnp.floating):
        info = jnp.finfo(got.dtype)
        eps, smallest = float(info.eps), float(info.smallest_normal)
        if bound is None:
            allowed += ROUNDINGS * eps * size.max()
        else:
            allowed += bound + eps / 2 * (size + bound + smallest)
    error = np.abs(np.subtract(values, want, out=np.zeros(got.shape), where=~same))
    excess = np.where(np.isnan(error), np.inf, error - allowed)
    worst = np.unravel_index(int(np.argmax(excess)), got.shape)
    if not excess[worst] > 0:
        return ""
    return (
        f"element {[int(place) for place in worst]} is {values[worst]:.6g}, {want[worst]:.6g} was expected, "
        f"off by {error[worst]:.3g} where {allowed[worst]:.3g} is allowed"
    )

"""Every kernel of the catalog against float64, in value and gradient, in every way torch can call it.

The oracle is plain torch in float64. The tolerance is what float32 arithmetic may err by
(`KernelSpec.error_bounds`, derived in each `reference.py`) plus the rounding to the dtype of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import bridge
from autotune import ArraySpec, KernelSpec, Problem
from tpu_kernels._rows import RowTiling
from tpu_kernels.catalog import CATALOG

Tensors = Sequence[torch.Tensor | None]

SLOW = {
    "less than a register both ways, and no mask",
    "more keys than queries",
    "more queries than keys",
    "one sub-block",
}
"""Examples of splash attention whose tiles others have, too: each takes seconds to compile."""
EXAMPLES = [
    pytest.param(
        spec,
        example.problem,
        id=f"{example.problem}: {example.reason}",
        marks=pytest.mark.slow if spec.tiling_type is not RowTiling and example.reason in SLOW else (),
    )
    for spec in CATALOG
    for example in spec.examples
    if not example.benchmark
]
DEVICES = ("cpu", "tpu")

SMALL_SHAPES = {
    "splash_attention": {"q": (1, 2, 37, 40)},
    "grouped_matmul": {"lhs": (37, 40), "rhs": (3, 40, 50)},
}
TINY_SHAPES = {
    "splash_attention": {"q": (1, 1, 3, 2)},
    "grouped_matmul": {"lhs": (4, 2), "rhs": (2, 2, 3)},
}
ROW_WISE = tuple(spec for spec in CATALOG if spec.tiling_type is RowTiling)

every_kernel = pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
every_row_kernel = pytest.mark.parametrize("spec", ROW_WISE, ids=lambda spec: spec.name)
every_device = pytest.mark.parametrize("device", DEVICES)


# The oracle ---------------------------------------------------------------------------------------


def make_tensors(
    problem: Problem, *, seed: int = 0, scale: float = 1.0, offset: float = 0.0
) -> list[torch.Tensor | None]:
    """Normal values around `offset`, rounded to the dtypes of the problem; integers are the kernel's own."""
    (values,) = (spec.values(problem) for spec in CATALOG if spec.name == problem.kernel)
    generator = torch.Generator().manual_seed(seed)

    def make(spec: ArraySpec) -> torch.Tensor:
        values = torch.randn(spec.shape, dtype=torch.float64, generator=generator) * scale + offset
        return values.to(getattr(torch, spec.dtype))

    return [
        torch.from_numpy(values[name]) if name in values else None if spec is None else make(spec)
        for name, spec in problem.arrays
    ]


def small_problem(spec: KernelSpec, dtype: str) -> Problem:
    """No multiple of a register in any dimension."""
    return spec.make_problem(SMALL_SHAPES.get(spec.name, {"x": (37, 130)}), dtype)


def tiny_problem(spec: KernelSpec, dtype: str) -> Problem:
    """For what takes as many calls as there are elements."""
    return spec.make_problem(TINY_SHAPES.get(spec.name, {"x": (3, 5)}), dtype)


def make_cotangent(like: torch.Tensor, *, seed: int = 1) -> torch.Tensor:
    """The gradient of the output `like`: normal, of its shape, dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, dtype=torch.float64, generator=generator).to(like)


def value_and_gradients(
    function: Any, tensors: Tensors, rounded: torch.dtype | None = None
) -> list[torch.Tensor | None]:
    """The output and the gradient of each tensor for `make_cotangent`, on the CPU; None for an absent one.

    The cotangent has the values of one of dtype `rounded`; None for the output's own.
    """
    leaves = [
        None if t is None else t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors
    ]
    output = function(*leaves)
    cotangent = make_cotangent(output.detach().to(rounded or output.dtype)).to(output.dtype)
    present = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    gradients = iter(torch.autograd.grad(output, present, cotangent))
    found = [
        output,
        *(None if leaf is None or not leaf.requires_grad else next(gradients) for leaf in leaves),
    ]
    return [None if t is None else t.detach().cpu() for t in found]


def _wide(tensors: Tensors) -> list[torch.Tensor | None]:
    """In float64, integers as they are."""
    return [None if t is None else t.double() if t.is_floating_point() else t for t in tensors]


def assert_conforms(
    spec: KernelSpec, problem: Problem, actual: Sequence[torch.Tensor | None], tensors: Tensors
) -> None:
    """Output and gradients (for `make_cotangent`) are within the bounds, with the right shapes and dtypes."""
    x = tensors[0]
    assert x is not None
    wide = _wide(tensors)
    expected = value_and_gradients(functools.partial(spec.torch_equivalent, problem), wide, x.dtype)
    assert expected[0] is not None
    cotangent = make_cotangent(expected[0].to(x.dtype))
    arrays = [None if t is None else t.numpy() for t in wide]
    bounds = spec.error_bounds(problem, arrays, cotangent.double().numpy())
    names = ["output", *(f"gradient of {name}" for name, _ in problem.arrays)]
    dtypes = [x.dtype, *(None if t is None else t.dtype for t in tensors)]
    for name, dtype, got, want, bound in zip(names, dtypes, actual, expected, bounds, strict=True):
        if want is None:
            assert got is None, name
            continue
        assert got is not None, name
        assert (got.shape, got.dtype) == (want.shape, dtype), name
        rounding = torch.finfo(got.dtype)
        # Half a unit in the last place of the result, or half the smallest positive number.
        half_ulp = rounding.eps / 2 * (want.abs() + torch.from_numpy(bound) + rounding.smallest_normal)
        error = (got.double() - want).abs()
        allowed = torch.from_numpy(np.asarray(bound)) + half_ulp
        worst = int((error - allowed).argmax()) if error.numel() else 0
        assert bool((error <= allowed).all()), (
            f"{problem}, {name}, element {worst}: got {got.flatten()[worst]}, "
            f"expected {want.flatten()[worst]}, error {error.flatten()[worst]:.3g}, "
            f"allowed {allowed.flatten()[worst]:.3g}"
        )


def run(
    spec: KernelSpec, problem: Problem, tensors: Tensors, device: str = "cpu", **options: Any
) -> list[torch.Tensor | None]:
    """The public torch function on `device`, and its gradients."""
    moved = [None if t is None else t.to(device) for t in tensors]
    return value_and_gradients(functools.partial(spec.torch_call, problem, **options), moved)


# Values and gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "problem"), EXAMPLES)
def test_examples(spec: KernelSpec, problem: Problem) -> None:
    tensors = make_tensors(problem)
    assert_conforms(spec, problem, run(spec, problem, tensors), tensors)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        pytest.param(
            spec,
            dtype,
            id=f"{spec.name}-{dtype}",
            marks=() if spec in ROW_WISE or dtype == "bfloat16" else pytest.mark.slow,
        )
        for spec in CATALOG
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_reference_on_tpu(spec: KernelSpec, dtype: str) -> None:
    problem = small_problem(spec, dtype)
    tensors = make_tensors(problem)
    assert_conforms(spec, problem, run(spec, problem, tensors, "tpu", impl="reference"), tensors)


@every_kernel
def test_kernel_on_tpu_is_the_kernel_on_cpu(spec: KernelSpec) -> None:
    problem = small_problem(spec, "float32")
    tensors = make_tensors(problem)
    for on_cpu, on_tpu in zip(run(spec, problem, tensors), run(spec, problem, tensors, "tpu"), strict=True):
        assert (on_cpu is None) == (on_tpu is None)
        assert on_cpu is None or on_tpu is None or torch.equal(on_cpu, on_tpu)


@pytest.mark.parametrize(
    "spec",
    [  # one kernel's quick: all have the same tiles
        pytest.param(spec, id=spec.name, marks=() if spec is ROW_WISE[0] else pytest.mark.slow)
        for spec in ROW_WISE
    ],
)
@hypothesis.settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
@hypothesis.given(data=st.data())
def test_any_size(spec: KernelSpec, data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(0, 70), "rows"), data.draw(st.integers(0, 300), "cols")
    dtypes = st.sampled_from(["float32", "bfloat16"])
    x = ArraySpec((rows, cols), data.draw(dtypes, "dtype"))
    arrays: dict[str, ArraySpec | None] = {"x": x}
    for name in spec.arguments[1:]:
        dtype = data.draw(st.none() | dtypes, name)
        arrays[name] = None if dtype is None else ArraySpec((cols,), dtype)
    problem = Problem.of(spec.name, arrays, {"eps": data.draw(st.sampled_from([1e-12, 1e-5, 0.1]), "eps")})
    tiling = RowTiling(8 * data.draw(st.integers(1, 10), "tile_rows / 8"))
    scale = data.draw(st.sampled_from([1e-3, 1.0, 1e3]), "scale")
    offset = data.draw(st.sampled_from([0.0, 3.0]), "offset")

    tensors = make_tensors(problem, scale=scale, offset=offset)
    assert_conforms(spec, problem, run(spec, problem, tensors, impl="pallas", tiling=tiling), tensors)


@every_row_kernel
def test_rows_past_the_end_stay_out(spec: KernelSpec) -> None:
    """JAX's TPU interpreter fills what lies past the end with NaN, which a sum over rows would show."""
    problem = spec.make_problem({"x": (11, 130)}, "float32")
    tensors = make_tensors(problem)
    with bridge.interpret("tpu"):
        assert_conforms(spec, problem, run(spec, problem, tensors, tiling=RowTiling(8)), tensors)


@every_row_kernel
def test_a_bad_row_spoils_no_other(spec: KernelSpec) -> None:
    problem = spec.make_problem({"x": (20, 40)}, "float32")
    tensors = make_tensors(problem)
    spoiled = [None if t is None else t.clone() for t in tensors]
    assert spoiled[0] is not None
    spoiled[0][3] = float("nan")
    others = torch.arange(20) != 3
    for good, bad in zip(run(spec, problem, tensors)[:2], run(spec, problem, spoiled)[:2], strict=True):
        assert good is not None and bad is not None
        assert torch.equal(good[others], bad[others])
        assert bad[3].isnan().all()


# Second derivatives -------------------------------------------------------------------------------


@every_row_kernel
def test_double_backward_of_the_kernel(spec: KernelSpec) -> None:
    cols = 33
    problem = spec.make_problem({"x": (9, cols)}, "float32")
    tensors = [t for t in make_tensors(problem) if t is not None]

    def second(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        output = function(problem, *leaves)
        weights = torch.linspace(-1, 1, output.numel(), dtype=dtype).reshape(output.shape)
        first = torch.autograd.grad(output, leaves, weights * output, create_graph=True)
        total = sum((g * g).sum() for g in first)
        assert isinstance(total, torch.Tensor)
        return list(torch.autograd.grad(total, leaves))

    expected = second(spec.torch_equivalent, torch.float64)
    actual = second(functools.partial(spec.torch_call, impl="pallas"), torch.float32)
    # A few sums over rows or columns after one another, of values no larger than the largest result.
    roundings = 16 * (cols + 9)
    for got, want in zip(actual, expected, strict=True):
        error = (got.double() - want).abs().max()
        assert error <= roundings * torch.finfo(torch.float32).eps * want.abs().max()


@pytest.mark.parametrize(
    "spec",
    [  # of splash attention test_transforms.py has it with all arguments
        pytest.param(spec, id=spec.name, marks=() if spec in ROW_WISE else pytest.mark.slow)
        for spec in CATALOG
    ],
)
def test_gradgradcheck(spec: KernelSpec) -> None:
    problem = tiny_problem(spec, "float64")
    tensors = [t.requires_grad_(t.is_floating_point()) for t in make_tensors(problem) if t is not None]
    function = functools.partial(spec.torch_call, problem)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


# Ways to call -------------------------------------------------------------------------------------


@every_device
@every_row_kernel
@pytest.mark.parametrize("optional", [True, False], ids=["all arrays", "x only"])
def test_opcheck(spec: KernelSpec, device: str, optional: bool) -> None:
    problem = spec.make_problem({"x": (11, 40)}, "float32")
    x, *vectors = [None if t is None else t.to(device).requires_grad_() for t in make_tensors(problem)]
    op = getattr(torch.ops.tpu_kernels, spec.name).default
    arguments = (x, *(v if optional else None for v in vectors), problem.param("eps"))
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":
        checks.append("test_autograd_registration")  # torch has not written this check for other devices
    torch.library.opcheck(op, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("spec", "device"),
    [  # of splash attention test_transforms.py has it on the CPU
        pytest.param(
            spec,
            device,
            id=f"{spec.name}-{device}",
            marks=() if spec in ROW_WISE or device == "tpu" else pytest.mark.slow,
        )
        for spec in CATALOG
        for device in DEVICES
    ],
)
def test_compile(spec: KernelSpec, device: str) -> None:
    problem = small_problem(spec, "float32")
    tensors = make_tensors(problem)
    compiled = torch.compile(functools.partial(spec.torch_call, problem), fullgraph=True, backend="aot_eager")
    moved = [None if t is None else t.to(device) for t in tensors]
    assert_conforms(spec, problem, value_and_gradients(compiled, moved), tensors)


@every_row_kernel
def test_compile_with_a_dynamic_number_of_rows(spec: KernelSpec) -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch._dynamo.reset()
    vectors = make_tensors(spec.make_problem({"x": (1, 24)}, "float32"))[1:]
    problem = spec.make_problem({"x": (1, 24)}, "float32")
    compiled = torch.compile(
        functools.partial(spec.torch_call, problem), fullgraph=True, backend=count, dynamic=True
    )
    for rows in (3, 4, 8, 17, 40):
        x = torch.randn(rows, 24)
        assert torch.equal(compiled(x, *vectors), spec.torch_call(problem, x, *vectors))
    assert graphs <= 2


@every_row_kernel
def test_vmap(spec: KernelSpec) -> None:
    problem = spec.make_problem({"x": (5, 3, 40)}, "float32")
    x, *vectors = make_tensors(problem)
    assert x is not None
    function = functools.partial(spec.torch_call, problem)
    in_dims = (0, *(None for _ in vectors))
    mapped = torch.vmap(function, in_dims=in_dims)(x, *vectors)
    looped = torch.stack([function(row, *vectors) for row in x])
    bound = spec.error_bounds(
        problem, [None if t is None else t.double().numpy() for t in (x, *vectors)], np.ones(x.shape)
    )
    assert bool(((mapped - looped).abs() <= 2 * torch.from_numpy(np.asarray(bound[0]))).all())


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def _strided(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((x.shape[0], 2 * x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, ::2] = x
    return wide[:, ::2]


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    flat = torch.full((x.numel() + 1,), float("nan"), dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


@every_device
@every_row_kernel
@pytest.mark.parametrize("layout", [_transposed, _strided, _unaligned])
def test_memory_layouts(spec: KernelSpec, layout: Any, device: str) -> None:
    problem = spec.make_problem({"x": (12, 40)}, "float32")
    tensors = make_tensors(problem)
    leaves = [t.to(device).detach().clone().requires_grad_() for t in tensors if t is not None]
    output = spec.torch_call(problem, layout(leaves[0]), *leaves[1:])
    cotangent = layout(make_cotangent(leaves[0].detach()))
    gradients = torch.autograd.grad(output, leaves, cotangent)
    assert output.is_contiguous()
    assert_conforms(spec, problem, [t.detach().cpu() for t in (output, *gradients)], tensors)


@every_kernel
def test_gradient_of_a_sum(spec: KernelSpec) -> None:
    """The gradient of `sum` is one number seen as a whole array, with strides of 0."""
    problem = small_problem(spec, "float32")
    tensors = [t.requires_grad_(t.is_floating_point()) for t in make_tensors(problem) if t is not None]
    leaves = [t for t in tensors if t.requires_grad]
    output = spec.torch_call(problem, *tensors)
    of_sum = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    of_ones = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert all(torch.equal(a, b) for a, b in zip(of_sum, of_ones, strict=True))

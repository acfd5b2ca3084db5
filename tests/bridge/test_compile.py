"""Ops under torch.compile and torch.export: one graph, right values, few recompilations."""

from __future__ import annotations

import copy
import enum
import importlib
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from bridge import jax_op

# Inductor uses torch.jit, which warns that it is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------- the ops


@jax_op("t_compile::sin")
def sin(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@jax_op("t_compile::gated")
def gated(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    y = x @ w if bias is None else x @ w + bias
    return y * jax.nn.sigmoid(y), y.max(axis=-1)


@jax_op("t_compile::joined")
def joined(xs: Sequence[jax.Array], axis: int) -> jax.Array:
    return jnp.concatenate(xs, axis=axis) * 2


def _add_one(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + 1


@jax_op("t_compile::gridded", reference=lambda x: x + 1)
def gridded(x: jax.Array) -> jax.Array:
    """A kernel over a grid of row blocks, the last one ragged."""
    rows, columns = x.shape
    block = pl.BlockSpec((8, columns), lambda i: (i, 0))
    return pl.pallas_call(
        _add_one,
        grid=(pl.cdiv(rows, 8),),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


@jax_op("t_compile::whole", reference=lambda x: x + 1)
def whole(x: jax.Array) -> jax.Array:
    """A kernel whose only block is the array."""
    return pl.pallas_call(_add_one, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@jax_op("t_compile::checked")
def checked(x: jax.Array) -> jax.Array:
    """Python looks at the size."""
    if x.shape[0] % 8:
        return x * 2
    return x + x


@jax_op("t_compile::padded")
def padded(x: jax.Array) -> jax.Array:
    """Rows rounded up to a multiple of 8."""
    rows = (x.shape[0] + 7) // 8 * 8
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0))) * 2


@jax_op("t_compile::padded_by_python")
def padded_by_python(x: jax.Array) -> jax.Array:
    if x.shape[0] % 8:
        x = jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0)))
    return x * 2


class Activation(enum.Enum):
    RELU = "relu"
    SIN = "sin"


@dataclass(frozen=True)
class Tiling:
    rows: int = 2
    scale: float = 0.5
    activation: Activation = Activation.SIN
    sizes: tuple[int, ...] = (1, 2)
    dtype: torch.dtype | None = None
    name: str = 'it\'s "quoted" | and [bracketed]'


@jax_op("t_compile::configured")
def configured(
    x: jax.Array,
    activation: Activation,
    tiling: Tiling,
    dtype: torch.dtype,
    mode: Literal["up", 1, 2.5] = "up",  # type: ignore[valid-type]  # an op takes a float here, too
    factor: float | None = None,
    shifts: Sequence[int] = (1, 2),
) -> jax.Array:
    y = jnp.sin(x) if activation is Activation.SIN else jax.nn.relu(x)
    y = y * tiling.rows + tiling.scale * sum(tiling.sizes) + len(tiling.name) + sum(shifts)
    if tiling.activation is Activation.RELU:
        y = y * 3
    y = y + {"up": 100, 1: 200, 2.5: 300}[mode]
    return (y if factor is None else y * factor).astype(dtype)  # type: ignore[arg-type]  # JAX functions get NumPy's


def agrees(f: Callable[..., Any], *args: Any, backend: Any = "aot_eager", **options: Any) -> None:
    """The compiled function gives what the plain one gives, gradients included."""
    compiled = torch.compile(f, fullgraph=True, backend=backend, **options)
    got, want = compiled(*args), f(*args)
    torch.testing.assert_close(got, want)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    if leaves:
        flat = lambda r: [t for t in (r if isinstance(r, list | tuple) else [r]) if t.requires_grad]
        weights = [torch.randn_like(t) for t in flat(want)]
        torch.testing.assert_close(
            torch.autograd.grad(flat(got), leaves, weights), torch.autograd.grad(flat(want), leaves, weights)
        )


# ---------------------------------------------------------------------------------- forward and backward


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_backends(backend: str) -> None:
    def model(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y, top = gated(x.relu(), w, b)
        return sin(y) * top.unsqueeze(-1) + gridded(y)

    x, w, b = (torch.randn(*s, requires_grad=True) for s in ((3, 4), (4, 5), (5,)))
    agrees(model, x, w, b, backend=backend)


@pytest.mark.parametrize("backend", ["tpu", "inductor"])
def test_on_the_tpu_device(backend: str, tpu: torch.device) -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return sin(gated(x.relu(), w)[0]) + 1

    x, w = torch.randn(3, 4), torch.randn(4, 5)
    on_tpu = [t.to(tpu).requires_grad_() for t in (x, w)]
    got = torch.compile(model, fullgraph=True, backend=backend)(*on_tpu)
    assert got.device.type == "tpu"
    want = model(x.requires_grad_(), w.requires_grad_())
    torch.testing.assert_close(got.cpu(), want)
    got.sum().backward()
    want.sum().backward()
    for ours, theirs in zip(on_tpu, (x, w), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_through_torch_ops_and_with_the_optional_operand_absent() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    agrees(lambda x, w: torch.ops.t_compile.gated(x, w)[0], x, w)
    agrees(lambda x, w: gated(x, w, bias=None)[1], x, w)


def test_lists() -> None:
    agrees(
        lambda a, b: joined([a, b, a], 1),
        torch.randn(2, 3, requires_grad=True),
        torch.randn(2, 4, requires_grad=True),
    )


def test_only_some_inputs_require_grad() -> None:
    agrees(lambda x, w: gated(x, w)[0], torch.randn(3, 4), torch.randn(4, 5, requires_grad=True))


def test_between_views_and_in_place_writes() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = sin(x.t()[1:]).add_(1)
        z = y.clone()
        z[0] = sin(z[1].clone())
        return sin(z.mul_(2)).transpose(0, 1) + y.sum()

    agrees(model, torch.randn(4, 3, requires_grad=True))


def test_an_input_written_in_place() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = sin(x)
        x.add_(1)
        return y + sin(x)

    x = torch.randn(3)
    a, b = x.clone(), x.clone()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(a), model(b))
    torch.testing.assert_close(a, b)


def test_in_a_module_under_no_grad_and_with_checkpointing() -> None:
    class Block(torch.nn.Module):
        def __init__(self, activation: Callable[..., torch.Tensor] = sin) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4) / 2)
            self.activation = activation

        def forward(self, x: torch.Tensor, norm: Any = sin) -> torch.Tensor:
            return norm(self.activation(gated(x, self.weight)[0]))

    block, x = Block(), torch.randn(3, 4)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x))
    saving = torch.compile(
        lambda x: checkpoint(block, x, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    got, want = saving(x), block(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), block.weight), torch.autograd.grad(want.sum(), block.weight)
    )


def test_vmap_and_grad_inside() -> None:
    agrees(lambda x: torch.vmap(sin, 1, 1)(x), torch.randn(3, 4))
    agrees(lambda x: torch.func.grad(lambda v: sin(v).sum())(x), torch.randn(3))
    agrees(lambda x: torch.vmap(torch.func.grad(lambda v: sin(v).sum()))(x), torch.randn(3, 4))


def test_several_calls_share_compiled_programs() -> None:
    from bridge import reset_stats, stats

    reset_stats()
    agrees(lambda x: sin(sin(sin(x))), torch.randn(7, 11))
    assert stats().compiles["t_compile::sin"] == 1


def test_a_module_that_holds_an_op_can_be_copied_pickled_and_traced() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op = sin

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.op(x) + 1

    block, x = Block(), torch.randn(3)
    assert copy.deepcopy(block).op is sin and pickle.loads(pickle.dumps(sin)) is sin
    torch.testing.assert_close(torch.fx.symbolic_trace(block)(x), block(x))
    torch.testing.assert_close(
        make_fx(block, tracing_mode="symbolic")(x)(torch.ones(5)), block(torch.ones(5))
    )


def test_a_kernel_without_gradient() -> None:
    @jax_op("t_compile::bare", overwrite=True)
    def bare(x: jax.Array) -> jax.Array:
        return pl.pallas_call(_add_one, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    compiled = torch.compile(lambda x: bare(x) * 2, fullgraph=True, backend="aot_eager")
    x = torch.randn(3)
    torch.testing.assert_close(compiled(x), (x + 1) * 2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.clone().requires_grad_()), (x + 1) * 2)
    # A graph with gradients is compiled with its backward, so the refusal comes here and not at backward().
    with pytest.raises(Exception, match="t_compile::bare has no gradient"):
        compiled(x.requires_grad_())


def test_results_without_gradient() -> None:
    @jax_op("t_compile::places", overwrite=True)
    def places(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.argmax(x, axis=-1), x > 0

    agrees(lambda x: [*places(x), sin(x)], torch.randn(3, 4, requires_grad=True))
    assert not any(t.requires_grad for t in places(torch.randn(3, 4, requires_grad=True)))


# ---------------------------------------------------------------------------------- static arguments


@pytest.mark.parametrize(
    "call",
    [
        lambda x: configured(x, Activation.SIN, Tiling(3, 1.5), torch.float64),
        lambda x: configured(x, activation=Activation.RELU, tiling=Tiling(), dtype=torch.bfloat16),
        lambda x: configured(x, "relu", Tiling(activation=Activation.RELU), torch.float32, 2.5, 0.5, [4]),
        lambda x: configured(x, "sin", Tiling(dtype=torch.int8, sizes=()), torch.float32, mode=1, factor=2),
        lambda x: configured(x, "sin", Tiling(), jnp.float32),
    ],
)
def test_static_arguments_made_inside(call: Callable[..., torch.Tensor]) -> None:
    agrees(call, torch.randn(4))


def test_static_arguments_from_outside_are_guarded_by_value() -> None:
    counter = CompileCounterWithBackend("eager")
    call = lambda x, tiling, factor: configured(x, "sin", tiling, torch.float32, factor=factor)
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    x = torch.randn(4)
    for rows, scale, factor in [(1, 0.5, 0.1), (2, 0.5, 0.1), (3, 0.75, 0.1), (1, 0.5, 0.2)]:
        for _ in range(2):  # an equal dataclass, not the same one, compiles nothing
            torch.testing.assert_close(
                compiled(x, Tiling(rows, scale), factor), call(x, Tiling(rows, scale), factor)
            )
    assert counter.frame_count == 4


# ---------------------------------------------------------------------------------- dynamic sizes

SIZES = range(3, 43)


class Counting:
    """A backend that counts graphs, and runs them only while `runs` is true."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs = True

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return lambda *args: graph.forward(*args) if self.runs else (torch.empty(0),)


@pytest.mark.parametrize(
    "op", [sin, gridded, whole, checked, padded, padded_by_python], ids=lambda o: o._name
)
def test_at_most_two_graphs_for_forty_sizes(op: Callable[..., torch.Tensor]) -> None:
    counting = Counting()
    f = lambda x: op(x * 2) + 1
    compiled = torch.compile(f, fullgraph=True, backend=counting, dynamic=True)
    for n in SIZES:
        x = torch.arange(n * 4.0).reshape(n, 4)
        counting.runs = n in (3, 8, 17)  # at each size JAX compiles the function: a few must do
        got = compiled(x)
        if counting.runs:
            torch.testing.assert_close(got, f(x))
    assert counting.graphs <= 2


DERIVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one less": lambda x: x[1:],
    "the product": lambda x: x.reshape(-1),
    "twice": lambda x: torch.cat([x, x]),
    "half": lambda x: x[: x.shape[0] // 2],
}


@pytest.mark.parametrize("op", [sin, whole], ids=lambda op: op.__name__)
@pytest.mark.parametrize("size", DERIVED)
def test_sizes_computed_from_a_dynamic_one(op: Callable[..., torch.Tensor], size: str) -> None:
    counting = Counting()
    f = lambda x: op(DERIVED[size](x)).neg()
    compiled = torch.compile(f, fullgraph=True, backend=counting, dynamic=True)
    for n in (4, 5, 6, 9):
        x = torch.randn(n, 2)
        torch.testing.assert_close(compiled(x), f(x))
    assert counting.graphs <= 2


def test_a_size_as_a_static_argument_is_compiled_for_each_value() -> None:
    @jax_op("t_compile::first_rows", overwrite=True)
    def first_rows(x: jax.Array, n: int) -> jax.Array:
        return x[:n] * 2

    f = lambda x: first_rows(x, x.shape[0] - 2)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (4, 5, 6):
        x = torch.randn(n, 2)
        torch.testing.assert_close(compiled(x), f(x))


def test_sizes_that_no_formula_explains_are_compiled_one_by_one() -> None:
    @jax_op("t_compile::irregular", overwrite=True)
    def irregular(x: jax.Array) -> jax.Array:
        return x[: x.shape[0] // 2] if x.shape[0] % 3 else jnp.concatenate([x, x])

    compiled = torch.compile(lambda x: irregular(x).neg(), fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (4, 5, 6, 9):
        x = torch.randn(n, 2)
        torch.testing.assert_close(compiled(x), irregular(x).neg())


@pytest.mark.parametrize(
    "op", [gridded, pytest.param(whole, marks=pytest.mark.slow), padded], ids=lambda op: op.__name__
)
def test_gradients_at_dynamic_sizes(op: Callable[..., torch.Tensor]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    f = lambda x: op(x * 2) ** 2
    compiled = torch.compile(f, fullgraph=True, backend=counter, dynamic=True)
    for n in (5, 9, 16):
        x = torch.randn(n, 4, requires_grad=True)
        torch.testing.assert_close(
            torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(f(x).sum(), x)
        )
    assert counter.frame_count <= 2


def test_two_dynamic_dimensions_and_a_product_of_them() -> None:
    @jax_op("t_compile::flat_pairs", overwrite=True)
    def flat_pairs(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.concatenate([x.reshape(-1), y.reshape(-1)[::2]])

    counter = CompileCounterWithBackend("eager")
    f = lambda x, y: flat_pairs(x, y).neg()
    compiled = torch.compile(f, fullgraph=True, backend=counter, dynamic=True)
    for n, m in ((3, 5), (4, 7), (6, 6), (9, 4)):
        x, y = torch.randn(n, m), torch.randn(m, n + 1)
        torch.testing.assert_close(compiled(x, y), f(x, y))
    assert counter.frame_count <= 3  # n == m may be a graph of its own


def test_mark_dynamic() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: padded(x), fullgraph=True, backend=counter)
    for n in (5, 9, 17):
        x = torch.randn(n, 4)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), padded(x))
    assert counter.frame_count == 1


def run_python(script: str, *arguments: str, **environment: str) -> str:
    """What a script prints that is run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_export_with_a_dynamic_dimension_runs_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "exported_ops.py"
    module.write_text(
        textwrap.dedent(
            """
            import jax, jax.numpy as jnp
            from bridge import jax_op

            @jax_op("t_exported::padded")
            def padded(x: jax.Array) -> jax.Array:
                rows = (x.shape[0] + 7) // 8 * 8
                return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0))) * 2
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("exported_ops")

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.t_exported.padded(x.sin()) + 1

    shapes = {"x": {0: torch.export.Dim("n", min=2, max=1000)}}
    program = torch.export.export(Model(), (torch.randn(5, 4),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "model.pt2")
    script = textwrap.dedent(
        """
        import sys, warnings
        import torch
        warnings.simplefilter("ignore")
        import exported_ops
        model = torch.export.load(sys.argv[1]).module()
        for n in (3, 8, 50):
            x = torch.randn(n, 4)
            want = torch.nn.functional.pad(x.sin() * 2, (0, 0, 0, -n % 8)) + 1
            torch.testing.assert_close(model(x), want)
        print("ran")
        """
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert run_python(script, str(tmp_path / "model.pt2"), PYTHONPATH=paths) == "ran\n"


# ---------------------------------------------------------------------------------- fake tensors

STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "transposed": lambda: torch.randn(2, 5, 4, 3).transpose(1, 3),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1, 5).expand(2, 3, 4, 5),
    "sliced": lambda: torch.randn(4, 6, 4, 5)[::2, ::2],
    "offset": lambda: torch.randn(2, 3, 4, 6)[..., 1:],
}


@pytest.mark.parametrize("layout", STRIDED)
def test_fake_strides_are_the_real_ones(layout: str, device: torch.device) -> None:
    x = STRIDED[layout]().to(device)
    real = sin(x)
    with FakeTensorMode() as mode:
        fake = sin(mode.from_tensor(x))
    assert (fake.shape, fake.stride(), fake.dtype, fake.device.type) == (
        real.shape,
        real.stride(),
        real.dtype,
        real.device.type,
    )
    assert real.is_contiguous()
    compiled = torch.compile(lambda x: sin(x).as_strided((2, 2), (1, 2)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x).cpu(), real.cpu().as_strided((2, 2), (1, 2)))


def test_fake_tensors_in_fake_tensors_out() -> None:
    with FakeTensorMode():
        y, top = gated(torch.empty(3, 4), torch.empty(4, 5))
        assert type(y).__name__ == "FakeTensor" and y.shape == (3, 5) and top.shape == (3,)
        with pytest.raises(TypeError, match="dot_general"):
            gated(torch.empty(3, 4), torch.empty(3, 5))


def test_meta_tensors() -> None:
    x = torch.empty(3, 4, device="meta")
    for out in (sin(x), torch.ops.t_compile.sin(x), sin(x.requires_grad_())):
        assert out.device.type == "meta" and out.shape == (3, 4)
    out.sum().backward()
    assert x.grad is not None and x.grad.device.type == "meta"


OPCHECKED: dict[str, tuple[Any, Callable[[torch.device], tuple[Any, ...]]]] = {
    "sin": (sin, lambda d: (torch.randn(3, 4, device=d, requires_grad=True),)),
    "sin of a transpose": (sin, lambda d: (torch.randn(4, 3, device=d).t(),)),
    "sin of int64": (checked, lambda d: (torch.arange(6, device=d),)),
    "sin of nothing": (sin, lambda d: (torch.randn(0, 4, device=d),)),
    "optional": (
        gated,
        lambda d: (torch.randn(3, 4, device=d), torch.randn(4, 5, device=d, requires_grad=True)),
    ),
    "list": (joined, lambda d: ([torch.randn(2, 3, device=d), torch.randn(2, 3, device=d)], 0)),
    "kernel": (gridded, lambda d: (torch.randn(11, 4, device=d, requires_grad=True),)),
    "whole block": (whole, lambda d: (torch.randn(5, 4, device=d, requires_grad=True),)),
    "padded": (padded, lambda d: (torch.randn(5, 4, device=d, requires_grad=True),)),
}


@pytest.mark.parametrize("name", OPCHECKED)
def test_opcheck(name: str, device: torch.device) -> None:
    op, arguments = OPCHECKED[name]
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device.type == "cpu":
        tests.append("test_autograd_registration")  # torch has it for its own devices only
    torch.library.opcheck(op, arguments(device), test_utils=tests)


def test_opcheck_of_static_arguments() -> None:
    text = configured._signature.torch_arguments(
        configured._signature.complete((torch.randn(3), Activation.SIN, Tiling(), torch.float32), {})
    )[0]
    torch.library.opcheck(configured, tuple(text))


# ---------------------------------------------------------------------------------- names of programs


def test_a_graph_whose_op_is_not_registered_says_so() -> None:
    with pytest.raises(RuntimeError, match="t_compile::unknown is not registered in this process; import"):
        torch.ops.bridge.run([torch.randn(3)], "t_compile::unknown[[-1],[]]|fwd(0)")
    with pytest.raises(ValueError, match="not the name of a program"):
        torch.ops.bridge.run([torch.randn(3)], "nonsense")


def test_a_program_is_built_again_from_its_name() -> None:
    tiling = Tiling(7, float("inf"), Activation.RELU, (3,), torch.bfloat16)
    signature = configured._signature
    bound = signature.bind((torch.ones(2), "relu", tiling, torch.float32, 2.5, -0.0, (1,)), {})
    name = configured._program(bound).name
    structure, statics = signature.load(name.removeprefix("t_compile::configured"))
    assert structure == bound.structure and statics == bound.statics


def test_an_op_registered_again_serves_graphs_that_name_it() -> None:
    def define(value: float) -> Any:
        @jax_op("t_compile::replaced", overwrite=True)
        def replaced(x: jax.Array) -> jax.Array:
            return x * value

        return replaced

    x = torch.ones(2, requires_grad=True)
    old = define(2.0)
    assert old(x).tolist() == [2.0, 2.0]
    old(x).sum().backward()
    define(3.0)
    name = "t_compile::replaced[[-1],[]]"
    assert torch.ops.bridge.run([x.detach()], name)[0].tolist() == [3.0, 3.0]
    assert torch.ops.bridge.run([x.detach()], name + "|fwd(0)")[0].tolist() == [3.0, 3.0]


@pytest.mark.slow
def test_inductor_s_cache_on_disk_survives_another_process(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, warnings
        warnings.simplefilter("ignore")
        import jax, jax.numpy as jnp, torch
        from bridge import jax_op

        factor = float(sys.argv[1])

        @jax_op("t_cached::scaled")
        def scaled(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.sin(x) * y * factor

        f = torch.compile(lambda x, y: scaled(x + 1, y).cos(), fullgraph=True)
        x, y = torch.randn(5, requires_grad=True), torch.randn(5)
        got, want = f(x, y), (torch.sin(x + 1) * y * factor).cos()
        torch.testing.assert_close(got, want)
        weight = torch.randn(5)
        torch.testing.assert_close(torch.autograd.grad(got, x, weight), torch.autograd.grad(want, x, weight))
        """
    )
    for factor in ("2", "2", "3"):  # the last one: the same graph, another function
        run_python(script, factor, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))

"""`torch.compile` on the tpu device, with the default backend and with "tpu"."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch.utils.checkpoint import checkpoint

from bridge import compiler

# torch's compiler uses torch.jit, which warns that it is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many graphs our backend compiled, one entry a graph."""
    graphs: list[int] = []
    compile_graph = compiler.compile_graph

    def counted(graph, inputs, **options):  # type: ignore[no-untyped-def]
        graphs.append(len(inputs))
        return compile_graph(graph, inputs, **options)

    monkeypatch.setattr(compiler, "compile_graph", counted)
    return graphs


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 16)
        self.qkv = torch.nn.Linear(16, 48)
        self.norm = torch.nn.LayerNorm(16)
        self.dropout = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(16, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(ids))
        batch, length, width = hidden.shape
        q, k, v = self.qkv(hidden).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(F.gelu(self.dropout(hidden + attended.transpose(1, 2).reshape(hidden.shape))))


@pytest.mark.parametrize("dynamic", [None, True])
def test_inference_in_one_graph(compiled_graphs: list[int], dynamic: bool | None) -> None:
    model = Model().eval().to("tpu")
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        compiled(torch.randint(0, 11, (2, 4), device="tpu"))
        first = len(compiled_graphs)  # with dynamic=True torch may start over while it finds what varies
        for length in (5, 6, 7) if dynamic else (4, 4):
            ids = torch.randint(0, 11, (2, length), device="tpu")
            torch.testing.assert_close(compiled(ids), model(ids))
    assert len(compiled_graphs) == first <= 2


def test_training_step_follows_eager(compiled_graphs: list[int]) -> None:
    ids = torch.randint(0, 11, (2, 5), device="tpu")

    def train(compile_it: bool) -> list[float]:
        torch.manual_seed(0)
        model = Model().to("tpu")
        model.dropout.p = 0.0
        optimizer = torch.optim.SGD(model.parameters(), 0.5)

        def loss_of(ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

        step = torch.compile(loss_of, fullgraph=True) if compile_it else loss_of
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = step(ids)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train(False)
    got = train(True)
    assert len(compiled_graphs) == 1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert got[-1] < got[0]


@pytest.mark.parametrize("backend", ["tpu", "eager", "aot_eager"])
def test_backends_by_name(backend: str) -> None:
    compiled = torch.compile(lambda x: x.sin() + x.cos(), backend=backend, fullgraph=True)
    x = torch.randn(4, device="tpu")
    torch.testing.assert_close(compiled(x), x.sin() + x.cos())


def test_mutation_views_and_factories() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.mul_(2)
        y = x[1:] + torch.arange(3, device=x.device)
        y[0] = torch.zeros((), device="tpu")
        return y, x.view(2, 2)

    x = torch.arange(4.0, device="tpu")
    expected_x = x.clone()
    expected = function(expected_x)
    got = torch.compile(function, fullgraph=True)(x)
    torch.testing.assert_close((x, *got), (expected_x, *expected))
    assert got[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_graph_without_tensor_inputs_that_makes_tpu_tensors(compiled_graphs: list[int]) -> None:
    made = torch.compile(lambda: torch.ones(3, device="tpu") * 2, fullgraph=True)()
    assert made.device.type == "tpu" and made.tolist() == [2, 2, 2]
    assert len(compiled_graphs) == 1


def test_graphs_of_other_devices_stay_with_inductor(
    compiled_graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own modules use deprecated parts of torch
        import torch._inductor.compile_fx

    seen: list[object] = []
    monkeypatch.setattr(
        torch._inductor.compile_fx, "compile_fx", lambda graph, *_, **__: seen.append(graph) or graph.forward
    )
    assert torch.compile(lambda x: x + 1)(torch.zeros(2)).tolist() == [1, 1]
    assert len(seen) == 1 and not compiled_graphs


def test_autocast_inside_a_graph() -> None:
    layer = torch.nn.Linear(4, 4, device="tpu")

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("tpu"):
            return layer(x).softmax(-1)

    x = torch.randn(3, 4, device="tpu")
    got, expected = torch.compile(function, fullgraph=True)(x), function(x)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, expected)


# -- ways to ask for a compiler --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("backend", ["inductor", "tpu"])
def test_modes_change_nothing(compiled_graphs: list[int], mode: str, backend: str) -> None:
    x = torch.randn(4, device="tpu")
    assert torch.equal(torch.compile(torch.sin, mode=mode, backend=backend)(x), x.sin())
    assert len(compiled_graphs) == (1 if backend == "inductor" else 0)  # by name: from the entry point


def test_inductor_by_name_is_the_default(compiled_graphs: list[int]) -> None:
    x = torch.randn(4, device="tpu")
    assert torch.equal(torch.compile(torch.sin, backend="inductor")(x), x.sin())
    assert len(compiled_graphs) == 1


def test_options_of_inductor_are_refused() -> None:
    compiled = torch.compile(torch.sin, options={"epilogue_fusion": True})
    with pytest.raises(Exception, match="epilogue_fusion.* does not compile graphs on 'tpu'"):
        compiled(torch.randn(4, device="tpu"))


def test_inductor_past_torch_compile_is_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own modules use deprecated parts of torch
        import torch._inductor

        graph = torch.fx.symbolic_trace(lambda x: x.sin() + 1)
        with pytest.raises(Exception, match="generates no code for the simulated 'tpu' device"):
            torch._inductor.compile(graph, [torch.ones(3, device="tpu")])


def test_options_of_torch_tpu_change_nothing_and_others_are_refused() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    x = torch.ones(2, device="tpu")
    options = {"async_compile": True, "bucket_size": 64}
    assert compiler.compile_graph(graph, [x], options=options)(x)[0].tolist() == [2, 2]
    with pytest.raises(TypeError, match="no option 'speed'; it has those of torch_tpu: async_compile"):
        compiler.compile_graph(graph, [x], options={"speed": 1})
    with pytest.raises(ValueError, match="knows the modes 'default', .* got 'fastest'"):
        compiler.compile_graph(graph, [x], mode="fastest")


# -- what graphs hold ------------------------------------------------------------------------------


def test_sizes_that_vary_compile_twice(compiled_graphs: list[int]) -> None:
    compiled = torch.compile(lambda x: x.softmax(-1) @ x.t())
    for rows in (3, 4, 7, 9):
        x = torch.randn(rows, 5, device="tpu")
        torch.testing.assert_close(compiled(x), x.softmax(-1) @ x.t())
    assert len(compiled_graphs) == 2


def test_sizes_that_depend_on_values_in_one_graph() -> None:
    def positive(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[x > 0] * 2, torch.nonzero(x)

    x = torch.tensor([1.0, -1.0, 3.0], device="tpu")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(positive, fullgraph=True)(x)
    torch.testing.assert_close(found, positive(x))


def test_mutation_of_arguments_and_out() -> None:
    def update(x: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum(0))
        x[1:3] = 0
        torch.mul(x, 2, out=out)
        return x.view(-1)[2:] + 1

    arguments = [torch.randn(4, 8), torch.zeros(8), torch.empty(4, 8)]
    expected = update(*arguments)
    torch.manual_seed(0)
    on_tpu = [torch.randn(4, 8).to("tpu"), torch.zeros(8, device="tpu"), torch.empty(4, 8, device="tpu")]
    found = torch.compile(update, fullgraph=True)(*on_tpu)
    for tensor, right in zip([found, *on_tpu], [expected, *arguments], strict=True):
        torch.testing.assert_close(tensor.cpu(), right)


def test_transfers_inside_a_graph() -> None:
    x = torch.randn(4, device="tpu")
    compiled = torch.compile(lambda x: x.cpu().sin().to("tpu") + x, fullgraph=True)
    torch.testing.assert_close(compiled(x), x.sin() + x)


def test_control_flow_that_depends_on_values() -> None:
    def either(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    compiled = torch.compile(either, fullgraph=True)
    for x in (torch.ones(3, device="tpu"), -torch.ones(3, device="tpu")):
        torch.testing.assert_close(compiled(x), either(x))


def test_transforms_inside_a_graph() -> None:
    gradients = torch.vmap(torch.func.grad(lambda x: x.sin().sum()))
    x = torch.randn(3, 4, device="tpu")
    torch.testing.assert_close(torch.compile(gradients, fullgraph=True)(x), x.cos())


# -- random numbers --------------------------------------------------------------------------------


def draw(x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(x) + torch.randn(4, device=x.device) + torch.randint(9, (4,), device=x.device)
    return F.dropout(x, 0.5) + noise + torch.bernoulli(x.sigmoid())


@pytest.mark.parametrize("backend", ["aot_eager", "tpu"])
def test_random_numbers_are_those_of_eager(backend: str) -> None:
    x = torch.randn(4, device="tpu")
    compiled = torch.compile(draw, backend=backend, fullgraph=True)
    compiled(x)
    torch.manual_seed(3)
    found = [compiled(x), compiled(x)]
    torch.manual_seed(3)
    assert all(map(torch.equal, found, [draw(x), draw(x)]))
    assert not torch.equal(*found)


@pytest.mark.parametrize("backend", ["aot_eager", "tpu"])
def test_checkpointed_dropout_is_the_same_in_backward(backend: str) -> None:
    layer = torch.nn.Linear(64, 64, device="tpu")

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        inner = lambda x: F.dropout(layer(x), 0.5).relu()
        return checkpoint(inner, x, use_reentrant=False).square().sum()  # type: ignore[union-attr]

    def gradient(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(5)
        return torch.autograd.grad(loss_of(x), layer.weight)[0]

    x = torch.randn(8, 64, device="tpu")
    expected = gradient(loss_of)
    torch.testing.assert_close(
        gradient(torch.compile(loss_of, backend=backend, fullgraph=True)), expected, rtol=1e-4, atol=1e-4
    )


# -- training --------------------------------------------------------------------------------------


def test_training_with_batch_norm_and_a_compiled_optimizer_follows_eager() -> None:
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(3, 4, 3, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(36, 2)).to("tpu")
    images = torch.randn(2, 3, 8, 8, device="tpu")

    def train(model: torch.nn.Module, compile_it: bool) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        forward = torch.compile(model) if compile_it else model
        step = torch.compile(optimizer.step) if compile_it else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            forward(images).square().sum().backward()
            step()
        return list(model.state_dict().values())

    found = train(copy.deepcopy(model), True)
    torch.testing.assert_close(found, train(model, False), rtol=1e-4, atol=1e-5)


def test_backward_captured_by_compiled_autograd() -> None:
    w = torch.randn(4, 4, device="tpu", requires_grad=True)

    def step(x: torch.Tensor) -> None:
        (x @ w).relu().sum().backward()

    x = torch.randn(3, 4, device="tpu")
    step(x)
    expected, w.grad = w.grad, None
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step)(x)
    torch.testing.assert_close(w.grad, expected)


# -- what stays outside of graphs ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it
def test_only_the_users_functions_are_compiled_around_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in Python that run between two graphs are not taken for functions to compile."""
    compiled: list[str] = []
    compile_frame = ConvertFrameAssert.__call__

    def recorded(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(frame.f_code.co_filename)
        return compile_frame(self, frame, *args, **kwargs)

    monkeypatch.setattr(ConvertFrameAssert, "__call__", recorded)

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        y.sum().backward()
        return y * 2 if y.sum() > 0 else y.cos()

    for value in (1.0, -1.0):
        x = torch.full((3,), value, device="tpu", requires_grad=True)
        found = torch.compile(broken, backend="eager")(x)
        torch.testing.assert_close(found, x.sin() * 2 if value > 0 else x.sin().cos())
        torch.testing.assert_close(x.grad, x.cos().detach())
    assert compiled and not [name for name in compiled if "bridge/device" in name.removeprefix(__file__)]


# -- export ----------------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 3, device="tpu")
        self.register_buffer("calls", torch.zeros(3, device="tpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.layer(x) + self.calls + torch.arange(3, device=x.device)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch.export's own
def test_export_with_a_varying_size_saved_and_loaded(tmp_path: Path) -> None:
    model = Counting()
    program = torch.export.export(
        model, (torch.randn(2, 8, device="tpu"),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},)
    )
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").run_decompositions()
    x = torch.randn(6, 8, device="tpu")
    torch.testing.assert_close(loaded.module()(x), model(x))

"""`torch.compile` on the tpu device, with the default backend and with "tpu"."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from bridge import compiler


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


def test_options_are_refused() -> None:
    with pytest.raises(TypeError, match="no options, got speed"):
        compiler.compile_graph(torch.fx.symbolic_trace(lambda x: x), [], speed=1)

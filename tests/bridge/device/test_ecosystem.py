"""What people use with torch works on the tpu device: checkpointing, parametrizations, torch.func, the
profiler, Hugging Face. (Files and data loaders: test_serialization.py; processes: test_distributed.py.)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import checkpoint

import bridge

# -- torch.utils.checkpoint ----------------------------------------------------------------------


def _with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.2)).to(
        "tpu"
    )


def _gradients(
    call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of a random function of (4, 8) inputs, and the next random numbers."""
    torch.manual_seed(3)
    x = torch.linspace(-1, 1, 32, device="tpu").view(4, 8).requires_grad_()
    model.zero_grad()
    call(x).square().sum().backward()
    found = [p.grad for p in (x, *model.parameters())]
    assert all(g is not None and g.device.type == "tpu" for g in found)
    return [g.clone() for g in found if g is not None], torch.rand(3, device="tpu")


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> checkpoint.CheckpointPolicy:
    keep = op is torch.ops.aten.addmm.default
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if keep else policy.PREFER_RECOMPUTE


WAYS: dict[str, Callable[[nn.Sequential], Callable[[torch.Tensor], Any]]] = {
    "reentrant": lambda model: partial(checkpoint.checkpoint, model, use_reentrant=True),
    "not reentrant": lambda model: partial(checkpoint.checkpoint, model, use_reentrant=False),
    "some results kept": lambda model: partial(
        checkpoint.checkpoint,
        model,
        use_reentrant=False,
        context_fn=partial(checkpoint.create_selective_checkpoint_contexts, _save_products),
    ),
    "sequence": lambda model: lambda x: checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_checkpointed_layers_draw_the_same_dropout_again(way: str) -> None:
    model = _with_dropout()
    expected, drawn = _gradients(model, model)
    got, drawn_after = _gradients(WAYS[way](model), model)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(drawn_after, drawn), "the generator went on from another state"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_computed_again_under_the_same_autocast(reentrant: bool) -> None:
    dtypes = []

    class Seen(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            dtypes.append(torch.is_autocast_enabled("tpu") and torch.get_autocast_dtype("tpu"))
            return super().forward(input)

    layer = Seen(4, 4, device="tpu")
    x = torch.ones(2, 4, device="tpu", requires_grad=True)
    with torch.autocast("tpu"):
        result: Any = checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    result.float().sum().backward()
    assert dtypes == [torch.bfloat16] * 2
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32


# -- torch.nn.utils ------------------------------------------------------------------------------

PARAMETRIZATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal, matrix_exp": partial(parametrizations.orthogonal, orthogonal_map="matrix_exp"),
    "orthogonal, cayley": partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "orthogonal, householder": partial(parametrizations.orthogonal, orthogonal_map="householder"),
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrized_layers(name: str) -> None:
    on_cpu = PARAMETRIZATIONS[name](nn.Linear(4, 4))
    on_tpu = nn.Linear(4, 4, device="tpu")
    on_tpu = PARAMETRIZATIONS[name](on_tpu)
    on_tpu.load_state_dict(on_cpu.state_dict())
    x = torch.randn(3, 4)
    for _ in range(2):  # spectral_norm iterates in its buffers at every call
        expected, got = on_cpu(x), on_tpu(x.to("tpu"))
        torch.testing.assert_close(got.cpu(), expected)
    expected.square().sum().backward()  # pyright: ignore[reportPossiblyUnboundVariable]
    got.square().sum().backward()  # pyright: ignore[reportPossiblyUnboundVariable]
    for (key, a), b in zip(on_cpu.named_parameters(), on_tpu.parameters(), strict=True):
        assert b.grad is not None and b.grad.device.type == "tpu", key
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-4, atol=1e-5)
    on_tpu.eval()
    on_cpu.eval()
    parametrize.remove_parametrizations(on_tpu, "weight")
    torch.testing.assert_close(on_tpu(x.to("tpu")).cpu(), on_cpu(x))


def test_pruned_layers_and_averaged_models() -> None:
    layer = nn.Linear(4, 4, device="tpu")
    prune.l1_unstructured(layer, "weight", amount=0.5)
    assert (layer.weight == 0).sum().item() == 8 and layer.weight_mask.device.type == "tpu"
    model = nn.Linear(2, 2, device="tpu")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    first = model.weight.detach().clone()
    averaged.update_parameters(model)
    with torch.no_grad():
        model.weight.add_(2)
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged.module.weight, first + 1)


# -- torch.func ----------------------------------------------------------------------------------


def _model_and_batch() -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(5, 3)


def _everywhere(function: Callable[..., Any]) -> tuple[Any, Any]:
    """The results of `function(model, batch)` on the CPU and on the tpu device, moved to the CPU."""
    model, batch = _model_and_batch()
    expected = function(model, batch)
    results = function(copy.deepcopy(model).to("tpu"), batch.to("tpu"))
    leaves = torch.utils._pytree.tree_leaves(results)
    assert leaves and all(leaf.device.type == "tpu" for leaf in leaves)
    return torch.utils._pytree.tree_map(lambda t: t.cpu(), results), expected


def _loss(model: nn.Module, parameters: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, parameters, (x,)).square().mean()


def _per_sample_gradients(model: nn.Module, batch: torch.Tensor) -> Any:
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return torch.func.vmap(torch.func.grad(partial(_loss, model)), (None, 0))(parameters, batch)


def _jacobians(model: nn.Module, batch: torch.Tensor) -> Any:
    reverse = torch.func.jacrev(model)(batch)
    forward = torch.func.jacfwd(model)(batch)
    torch.testing.assert_close(forward, reverse)
    return reverse


def _hessian(model: nn.Module, batch: torch.Tensor) -> Any:
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return torch.func.hessian(lambda w: _loss(model, {**parameters, "0.weight": w}, batch))(
        parameters["0.weight"]
    )


def _ensemble(model: nn.Module, batch: torch.Tensor) -> Any:
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(2)
    stacked, _ = torch.func.stack_module_state([model, other])
    call = torch.func.vmap(lambda parameters: torch.func.functional_call(model, parameters, (batch,)))
    return call(stacked)


def _vector_products(model: nn.Module, batch: torch.Tensor) -> Any:
    pull: Any = torch.func.vjp(model, batch)[1]
    tangent = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))[1]
    return pull(torch.ones(5, 2, device=batch.device)), tangent


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in torch.func.jvp
@pytest.mark.parametrize(
    "function", [_per_sample_gradients, _jacobians, _hessian, _ensemble, _vector_products]
)
def test_function_transforms(function: Callable[..., Any]) -> None:
    got, expected = _everywhere(function)
    torch.testing.assert_close(got, expected)


def test_vmap_draws_random_numbers_as_it_is_told() -> None:
    x = torch.ones(3, 200, device="tpu")
    for randomness, equal in (("same", True), ("different", False)):
        draws = torch.func.vmap(lambda x: nn.functional.dropout(x, 0.5), randomness=randomness)(x)
        assert torch.equal(draws[0], draws[1]) is equal
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(lambda x: nn.functional.dropout(x, 0.5))(x)


# -- torch.profiler ------------------------------------------------------------------------------


def _doubled(x: jax.Array) -> jax.Array:
    from jax.experimental import pallas as pl

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.fixture(scope="module")
def doubled() -> Iterator[Any]:
    yield bridge.jax_op("ecosystem::doubled", _doubled, reference=lambda x: jnp.asarray(x) * 2)


@pytest.mark.parametrize(
    "activities",
    [None, [torch.profiler.ProfilerActivity.CPU], [*torch.profiler.supported_activities()]],
    ids=["default", "cpu", "all"],
)
def test_the_profiler_shows_ops_and_kernels(doubled: Any, activities: Any, tmp_path: Path) -> None:
    x = torch.ones(8, 128, device="tpu", requires_grad=True)
    doubled(x).sum().backward()  # compiled, before it is measured
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        with torch.profiler.record_function("my part"):
            product = x @ x.T
        doubled(product.detach())
        doubled(x).sum().backward()
    events = {event.key: event for event in profile.key_averages()}
    assert {"aten::mm", "aten::sum", "my part"} <= events.keys()
    assert events["ecosystem::doubled"].count == 2
    derived = [name for name in events if name.startswith("ecosystem::doubled[")]
    assert len(derived) == 2, f"expected the forward and backward program of the gradient, got {derived}"
    assert "aten::mm" in profile.key_averages().table(sort_by="cpu_time_total")
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    shapes = [e["args"]["Input Dims"] for e in trace["traceEvents"] if e.get("name") == "aten::mm"]
    assert [[8, 128], [128, 8]] in shapes


# -- Hugging Face --------------------------------------------------------------------------------


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    )


@pytest.fixture(scope="module")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model with random weights, in a folder as Hugging Face writes it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    _llama().save_pretrained(folder)
    return folder


def _loaded(folder: Path, device_map: Any, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, **options)


@pytest.mark.parametrize(
    "device_map", ["tpu", "tpu:0", torch.device("tpu"), {"": "tpu"}, {"": "tpu:0"}], ids=str
)
def test_device_map(saved_llama: Path, device_map: Any) -> None:
    on_cpu, on_tpu = _loaded(saved_llama, None), _loaded(saved_llama, device_map)
    for (name, a), b in zip(on_cpu.state_dict().items(), on_tpu.state_dict().values(), strict=True):
        assert b.device == torch.device("tpu:0") and torch.equal(a, b.cpu()), name


def test_device_map_that_keeps_a_part_of_the_model_on_the_cpu(saved_llama: Path) -> None:
    """Hugging Face moves that part's weights to the device for each call."""
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "tpu", "model.norm": "tpu", "lm_head": "tpu"}
    split = _loaded(saved_llama, {**parts, "model.layers.0": "cpu", "model.layers.1": "tpu"})
    assert {p.device.type for p in split.parameters()} == {"meta", "tpu"}
    ids = torch.randint(1, 64, (2, 7))
    torch.testing.assert_close(split(ids).logits.cpu(), _loaded(saved_llama, None)(ids).logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_training_and_generating_are_those_of_the_cpu(saved_llama: Path, attention: str) -> None:
    runs = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(1)
        ids = torch.randint(1, 64, (3, 9)).to(device)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0  # padded on the left
        model = _loaded(saved_llama, device, attn_implementation=attention).train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses = []
        for _ in range(4):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        greedy = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        beams = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, num_beams=2)
        assert greedy.device.type == device
        runs.append((losses, greedy.cpu(), beams.cpu()))
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-4, atol=1e-5)
    assert runs[1][0][-1] < runs[1][0][0]
    assert torch.equal(runs[1][1], runs[0][1]) and torch.equal(runs[1][2], runs[0][2])


def test_sampling_repeats_with_the_seed(saved_llama: Path) -> None:
    model = _loaded(saved_llama, "tpu").eval()
    samples = []
    for _ in range(2):
        torch.manual_seed(5)
        samples.append(
            model.generate(
                torch.ones(1, 3, dtype=torch.int64, device="tpu"), max_new_tokens=8, do_sample=True
            )
        )
    assert torch.equal(*samples)


def test_saving_a_model_from_the_device(saved_llama: Path, tmp_path: Path) -> None:
    model = _loaded(saved_llama, "tpu", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = _loaded(tmp_path, None)
    assert again.dtype is torch.bfloat16 and again.device.type == "cpu"
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.cpu(), b)


def test_encoder_gradients_are_those_of_the_cpu() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    on_cpu = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=32)).eval()
    on_tpu: Any = copy.deepcopy(on_cpu)
    on_tpu.to("tpu")
    ids, labels = torch.randint(0, 50, (3, 8)), torch.tensor([0, 1, 1])
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    expected = on_cpu(input_ids=ids, attention_mask=mask, labels=labels)
    got = on_tpu(input_ids=ids.to("tpu"), attention_mask=mask.to("tpu"), labels=labels.to("tpu"))
    torch.testing.assert_close(got.logits.cpu(), expected.logits)
    expected.loss.backward()
    got.loss.backward()
    for (name, a), b in zip(on_cpu.named_parameters(), on_tpu.parameters(), strict=True):
        if a.grad is None:
            assert b.grad is None, name
            continue
        assert b.grad is not None, name
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-4, atol=1e-6)

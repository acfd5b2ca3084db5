"""Handing programs to torch_tpu, with a stand-in for its compiler (there is no TPU here)."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

import jax
import pytest
import torch
from jax import export
from jax.sharding import PartitionSpec as P

import bridge
from bridge import device, platforms
from bridge.device.storage import cpu_alias, from_cpu
from bridge.ranks.mesh import mesh_of_ranks

device.register()


class JaxCallable:
    """The constructor and call of torch_tpu 0.2.0's class of this name; runs the function on the CPU."""

    made: list[str] = []

    def __init__(self, name: str, jit_fn: Any, trace_key: str, mesh: Any = None) -> None:
        self.made.append(name)
        self.jit_fn = jit_fn

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arrays = [bridge.to_jax(cpu_alias(t)) for t in tensors]
        exported = export.export(self.jit_fn, platforms=["tpu"])(*arrays)
        assert exported.module_kept_var_idx == tuple(range(len(tensors)))  # each is passed to it
        return tuple(from_cpu(bridge.to_torch(a, copy=True)) for a in self.jit_fn(*arrays))


@pytest.fixture
def real_tpu(monkeypatch: pytest.MonkeyPatch) -> type[JaxCallable]:
    for name in ("torch_tpu", "torch_tpu._internal", "torch_tpu._internal.pallas"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    stub: Any = types.ModuleType("torch_tpu._internal.pallas.pallas")
    stub.JaxCallable = JaxCallable
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(device, "is_simulated", lambda: False)
    JaxCallable.made.clear()
    return JaxCallable


def test_forward_and_gradient_go_to_torch_tpu(real_tpu: type[JaxCallable]) -> None:
    @bridge.jax_op("test_platforms::square")
    def square(x: jax.Array, factor: float) -> jax.Array:
        return x * x * factor

    x = torch.arange(4.0).to("tpu").requires_grad_()
    y = square(x, 3.0)
    y.sum().backward()
    assert torch.equal(y.detach().cpu(), 3 * torch.arange(4.0) ** 2)
    assert x.grad is not None and torch.equal(x.grad.cpu(), 6 * torch.arange(4.0))
    assert ["fwd" in real_tpu.made[0], "bwd" in real_tpu.made[1]] == [True, True]
    square(x, 3.0)
    square(x.detach(), 3.0)
    square(x.detach(), 3.0)
    assert len(real_tpu.made) == 3  # one callable per program, kept


def test_an_argument_that_is_not_read_is_passed_all_the_same(real_tpu: type[JaxCallable]) -> None:
    @bridge.jax_op("test_platforms::first")
    def first(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + 1

    assert first(torch.ones(2).to("tpu"), torch.zeros(3).to("tpu")).tolist() == [2, 2]


def test_64_bits_are_kept_or_narrowed_as_the_op_says(real_tpu: type[JaxCallable]) -> None:
    @bridge.jax_op("test_platforms::wide")
    def wide(x: jax.Array) -> jax.Array:
        return x + 1

    @bridge.jax_op("test_platforms::narrow", x64=False)
    def narrow(x: jax.Array) -> jax.Array:
        return x + 1

    large, small = torch.tensor([2**40]).to("tpu"), torch.tensor([7]).to("tpu")
    assert wide(large).tolist() == [2**40 + 1] and wide(large).dtype is torch.int64
    assert narrow(small).tolist() == [8] and narrow(small).dtype is torch.int32
    with pytest.raises(OverflowError, match="do not fit torch.int32"):
        narrow(large)


def test_programs_that_nothing_uses_are_freed(real_tpu: type[JaxCallable]) -> None:
    @bridge.jax_op("test_platforms::short_lived")
    def short_lived(x: jax.Array) -> jax.Array:
        return x + 1

    short_lived(torch.ones(2).to("tpu"))
    known = lambda: [p.name for p in platforms._callables if p.name.startswith("test_platforms::short_lived")]
    assert known()
    short_lived._table._programs.clear()  # as when many static values have pushed them out
    gc.collect()
    assert not known()


def test_cpu_tensors_stay_here(real_tpu: type[JaxCallable]) -> None:
    @bridge.jax_op("test_platforms::negate")
    def negate(x: jax.Array) -> jax.Array:
        return -x

    assert torch.equal(negate(torch.ones(3)), -torch.ones(3))
    assert not real_tpu.made


def test_an_unknown_torch_tpu_is_named(real_tpu: type[JaxCallable], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tpu._internal.pallas.pallas", types.ModuleType("pallas"))

    @bridge.jax_op("test_platforms::same")
    def same(x: jax.Array) -> jax.Array:
        return x + 0

    with pytest.raises(ImportError, match="knows torch_tpu 0.2"):
        same(torch.ones(3).to("tpu"))


def test_an_op_over_a_mesh_tells_torch_tpu_how_arrays_lie(
    real_tpu: type[JaxCallable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the gradient, too; each rank hands over its part, so there is nothing to gather here."""
    told: list[tuple[Any, ...]] = []

    class Distributed:
        def __init__(
            self,
            name: str,
            jit_fn: Any,
            trace_key: str,
            mesh: Any = None,
            input_partition_specs: Any = None,
            output_partition_specs: Any = None,
        ) -> None:
            told.append((mesh, tuple(input_partition_specs), tuple(output_partition_specs)))
            self.jit_fn = jit_fn

        def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            whole = [
                jax.ShapeDtypeStruct((2 * t.shape[0], *t.shape[1:]), cpu_alias(t).numpy().dtype)
                for t in tensors
            ]
            outs = jax.eval_shape(self.jit_fn, *whole)
            return tuple(from_cpu(torch.zeros(o.shape[0] // 2, *o.shape[1:])) for o in outs)

    stub: Any = sys.modules["torch_tpu._internal.pallas.pallas"]
    monkeypatch.setattr(stub, "JaxCallable", Distributed)
    mesh = mesh_of_ranks([0, 1], "x")

    @bridge.jax_op("test_platforms::shift", mesh=mesh, input_partition_specs=[P("x")])
    def shift(x: jax.Array) -> jax.Array:
        def local(x: jax.Array) -> jax.Array:
            return jax.lax.ppermute(x * x, "x", [(0, 1), (1, 0)])

        return jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)

    x = torch.ones(3, 2).to("tpu").requires_grad_()
    y = shift(x)
    y.sum().backward()
    assert y.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
    assert told == [(mesh, (P("x"),), (P("x"),)), (mesh, (P("x"), P("x")), (P("x"),))]

"""Counters and threads: `bridge.stats()` says what happened, and calls from many threads are right."""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

import bridge
from bridge import device as simulated
from bridge import jax_op
from bridge import program as programs
from bridge.graph import resolve

simulated.register()


def _affine(x: jax.Array, n: int) -> jax.Array:
    return x * n + 1


def _total(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1)


AFFINE = jax_op("test_stats::affine", _affine)
TOTAL = jax_op("test_stats::total", _total)


def _add_kernel(x_ref, y_ref, o_ref) -> None:  # type: ignore[no-untyped-def]
    o_ref[...] = x_ref[...] + y_ref[...]


def _kernel_add(x: jax.Array, y: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_add_kernel, out_shape=shape, name="add_rows")(x, y)


KERNEL = jax_op("test_stats::kernel_add", _kernel_add)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0) ... work(count - 1)` at once; the first error is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(n: int) -> None:
        try:
            barrier.wait()
            work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# ---------------------------------------------------------------------------------- counters


def test_calls_compiles_and_hits(device: torch.device) -> None:
    def fresh(x: jax.Array, n: int) -> jax.Array:
        return x + n

    op = jax_op(f"test_stats::fresh_{device.type}", fresh)
    x = torch.ones(3, device=device)
    bridge.reset_stats()
    for _ in range(5):
        op(x, 1)
    assert (bridge.stats().calls, bridge.stats().compiles, bridge.stats().cache_hits) == (
        5,
        {op._qualname: 1},
        4,
    )
    op(x, 2)  # another value
    op(torch.ones(4, device=device), 1)  # another shape
    op(x.to(torch.bfloat16), 1)  # another dtype
    op(x, 1)
    assert (bridge.stats().calls, bridge.stats().compiles, bridge.stats().cache_hits) == (
        9,
        {op._qualname: 4},
        5,
    )
    assert bridge.stats().copies == {}


def test_the_device_is_not_part_of_a_program() -> None:
    def once(x: jax.Array) -> jax.Array:
        return x + 1

    op = jax_op("test_stats::once", once)
    bridge.reset_stats()
    op(torch.ones(3))
    op(torch.ones(3, device="tpu"))
    assert bridge.stats().compiles == {"test_stats::once": 1}


def test_gradients_are_counted_under_their_op(device: torch.device) -> None:
    x = torch.ones(7, device=device, requires_grad=True)
    bridge.reset_stats()
    for _ in range(3):
        AFFINE(x, 3).sum().backward()
    stats = bridge.stats()
    assert stats.calls == 6  # three forward, three backward
    assert set(stats.compiles) <= {"test_stats::affine"} and sum(stats.compiles.values()) <= 2
    assert stats.cache_hits == 6 - sum(stats.compiles.values())


def test_a_kernel_says_where_it_ran() -> None:
    bridge.reset_stats()
    x = torch.ones(8, 128)
    assert KERNEL(x, x)[0, 0].item() == 2
    (use,) = [k for k in bridge.stats().kernels if k.op == "test_stats::kernel_add"]
    assert use.kernel == "add_rows" and use.how == "fast"
    assert "test_stats::kernel_add: kernel add_rows ran in fast mode" in str(bridge.stats())


def test_a_snapshot_stays_and_reset_forgets() -> None:
    AFFINE(torch.ones(2), 2)
    before = bridge.stats()
    calls = before.calls
    AFFINE(torch.ones(2), 2)
    assert before.calls == calls and bridge.stats().calls == calls + 1
    with pytest.raises(AttributeError):
        before.calls = 0  # type: ignore[misc]
    bridge.reset_stats()
    empty = bridge.stats()
    assert (empty.calls, empty.compiles, empty.cache_hits, empty.copies, empty.kernels) == (0, {}, 0, {}, ())
    assert str(empty) == "calls 0, cache hits 0, compiles 0\ncopies none"
    bridge.reset_stats()
    AFFINE(torch.ones(2), 2)
    assert (bridge.stats().calls, bridge.stats().compiles) == (1, {})  # programs outlive a reset


# ---------------------------------------------------------------------------------- threads


def test_the_same_op_from_eight_threads(device: torch.device) -> None:
    inputs = [torch.full((4, 8), float(n), device=device) for n in range(8)]
    AFFINE(inputs[0], 5)
    bridge.reset_stats()

    def work(n: int) -> None:
        for _ in range(200):
            assert AFFINE(inputs[n], 5).unique().tolist() == [5 * n + 1]

    in_threads(8, work)
    assert (bridge.stats().calls, bridge.stats().compiles) == (1600, {})


def test_first_calls_from_eight_threads_at_once(device: torch.device) -> None:
    def first(x: jax.Array, n: int) -> jax.Array:
        return x + n

    op = jax_op(f"test_stats::first_{device.type}", first)

    def work(n: int) -> None:
        for size in (1, 2, 3):
            for value in (1, 2):
                out = op(torch.full((size,), float(n), device=device), value)
                assert out.tolist() == [n + value] * size

    bridge.reset_stats()
    in_threads(8, work)
    stats = bridge.stats()
    assert stats.calls == 8 * 6
    assert 6 <= stats.compiles[op._qualname] <= 48 and stats.cache_hits == 48 - stats.compiles[op._qualname]
    table = programs.tables[op._qualname]
    assert len(table._programs) == 2
    for program in table._programs.values():
        assert resolve(program.name) is program


def test_different_ops_layouts_and_gradients_from_eight_threads(device: torch.device) -> None:
    base = torch.arange(32.0, device=device).reshape(4, 8)

    def work(n: int) -> None:
        for step in range(40):
            x = (base + n).requires_grad_()
            if n % 4 == 0:
                assert torch.equal(TOTAL(x.detach()), x.detach().sum(-1))
            elif n % 4 == 1:
                AFFINE(x, 2 + step % 3).sum().backward()
                assert x.grad.unique().tolist() == [2 + step % 3]  # type: ignore[union-attr]
            elif n % 4 == 2:
                assert torch.equal(AFFINE(x.detach()[:, ::2], 3), x.detach()[:, ::2] * 3 + 1)
            else:
                assert torch.equal(KERNEL(x.detach(), base), x.detach() + base)

    in_threads(8, work)


def test_modes_belong_to_their_thread() -> None:
    def work(n: int) -> None:
        x = torch.full((8, 128), float(n))
        for _ in range(3):
            with bridge.interpret("tpu" if n % 2 else "fast"):
                assert bridge.current_mode() == ("tpu" if n % 2 else "fast")
                assert KERNEL(x, x).unique().tolist() == [2 * n]

    in_threads(4, work)


def test_programs_are_bounded_while_threads_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 4)

    def bounded(x: jax.Array, n: int) -> jax.Array:
        return x + n

    op = jax_op("test_stats::bounded", bounded)

    def work(n: int) -> None:
        for step in range(12):
            value = (n + step) % 8
            assert op(torch.zeros(1), value).item() == value

    in_threads(4, work)
    assert len(programs.tables["test_stats::bounded"]._programs) <= 4


def test_compiled_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_SHAPES", 4)

    def shapes(x: jax.Array) -> jax.Array:
        return x + 1

    op = jax_op("test_stats::shapes", shapes)
    for _ in range(2):
        for size in range(1, 10):
            assert op(torch.zeros(size)).tolist() == [1.0] * size
    (program,) = programs.tables["test_stats::shapes"]._programs.values()
    (compiled,) = program._compiled.values()
    assert compiled._shapes <= 4
    assert len(program.memo) <= 16

"""Donated and mutated arguments, and ops that replace others."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bridge
from bridge import device as simulated
from bridge import jax_op
from bridge.op import JaxOp

simulated.register()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _update(cache: jax.Array, row: jax.Array) -> jax.Array:
    return cache.at[0].set(row)


def _update_and_sum(cache: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    new = cache.at[0].set(row)
    return new, new.sum()


def _write(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(cache, new, (0, position, 0))


def _both(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return a + 1, b * 2


def _both_badly(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return a + 1, b[None]


def _to_bfloat16(a: jax.Array) -> jax.Array:
    return a.astype(jnp.bfloat16)


DONATING = jax_op("test_donation::update", _update, donate_argnums=(0,))
DONATING_BOTH = jax_op("test_donation::both", _update_and_sum, donate_argnums=(0, 1))
MUTATING = jax_op("test_donation::write", _write, mutates=("cache",))
MUTATING_AND_MORE = jax_op("test_donation::update_sum", _update_and_sum, mutates=("cache",))
MUTATING_TWO = jax_op("test_donation::two", _both, mutates=("a", "b"))
MUTATING_BADLY = jax_op("test_donation::badly", _both_badly, mutates=("a", "b"))
MUTATING_DTYPE = jax_op("test_donation::dtype", _to_bfloat16, mutates=("a",))


def _cache_and_row(device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 3, device=device), torch.arange(3.0, device=device)


# ---------------------------------------------------------------------------------- donation

USES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda t, x: t + 1,
    "radd": lambda t, x: x + t,
    "in-place": lambda t, x: t.add_(1),
    "written to another": lambda t, x: x.copy_(t[0]),
    "keyword": lambda t, x: torch.add(input=x, other=t),
    "list": lambda t, x: torch.cat([t, t]),
    "aten": lambda t, x: torch.ops.aten.add(x, t),
    "out": lambda t, x: torch.add(x, 1, out=t),
    "data_ptr": lambda t, x: t.data_ptr(),
    "storage": lambda t, x: t.untyped_storage(),
    "data": lambda t, x: t.data,
    "detach": lambda t, x: t.detach(),
    "index": lambda t, x: t[0],
    "as index": lambda t, x: x[t],
    "set item": lambda t, x: t.__setitem__(0, x),
    "shape": lambda t, x: t.shape,
    "iterate": lambda t, x: list(t),
    "bool": lambda t, x: bool(t),
    "equal": lambda t, x: t == t,
    "item": lambda t, x: t.item(),
    "cpu": lambda t, x: t.cpu(),
    "to": lambda t, x: t.to("cpu"),
    "numpy": lambda t, x: t.numpy(),
    "array": lambda t, x: np.asarray(t),
    "dlpack": lambda t, x: torch.from_dlpack(t),
    "deepcopy": lambda t, x: copy.deepcopy(t),
    "to_jax": lambda t, x: bridge.to_jax(t),
    "copy_reason": lambda t, x: bridge.copy_reason(t),
    "again": lambda t, x: DONATING(t, x),
    "another op": lambda t, x: MUTATING_AND_MORE(t, x),
    "in a compiled function": lambda t, x: torch.compile(lambda t: t + 1, backend="eager")(t),
}


@pytest.mark.parametrize("use", USES)
def test_a_donated_tensor_refuses_every_use(use: str, device: torch.device) -> None:
    cache, row = _cache_and_row(device)
    out = DONATING(cache, row)
    assert out[0].tolist() == [0, 1, 2]
    with pytest.raises(Exception, match="donated to test_donation::update"):
        USES[use](cache, row)
    assert out.sum().item() == 3


def test_a_donated_tensor_can_be_printed(device: torch.device) -> None:
    cache, row = _cache_and_row(device)
    DONATING(cache, row)
    for text in (str(cache), repr(cache), f"{cache}", f"{cache:>40}", f"{[cache]}"):
        assert "tensor donated to test_donation::update" in text


def test_the_result_is_a_tensor_like_any_other(device: torch.device) -> None:
    cache, row = _cache_and_row(device)
    for step in range(3):
        cache = DONATING(cache, row + step)
    assert cache[0].tolist() == [2, 3, 4] and type(cache) is torch.Tensor


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda t, x: (t[0:2], x), "share|own its memory.*clone"),
        (lambda t, x: (t.t(), torch.zeros(4, device=x.device)), "own its memory"),
        (lambda t, x: (t.detach(), x), "own its memory"),
        (lambda t, x: (t, t[0]), "passed in another argument"),
        (lambda t, x: (t.clone().requires_grad_(), x), "requires grad"),
        (lambda t, x: (torch.nn.Parameter(t.clone()), x), "requires grad"),
        (lambda t, x: (t.clone(), x.clone().requires_grad_()), "requires grad"),
    ],
    ids=["view", "transposed", "detached", "overlapping", "grad", "parameter", "other grad"],
)
def test_a_tensor_still_in_use_is_not_donated(make: Any, says: str, device: torch.device) -> None:
    cache, row = _cache_and_row(device)
    args = make(cache, row)
    with pytest.raises((ValueError, RuntimeError), match=f"test_donation::update.*({says})"):
        DONATING(*args)
    assert (cache + 1).sum().item() == 12 and (args[0] + 1) is not None  # nothing was used up


def test_a_tensor_with_a_view_alive_is_not_donated(device: torch.device) -> None:
    cache, row = _cache_and_row(device)
    for view in (cache[0], cache.t(), cache.detach(), cache.view(12)):
        with pytest.raises(ValueError, match="it is a view, or has views"):
            DONATING(cache, row)
        del view
    DONATING(cache, row)  # the views are gone


def test_the_same_tensor_twice_is_refused(device: torch.device) -> None:
    square = torch.zeros(3, device=device)
    for op in (DONATING_BOTH, DONATING):
        with pytest.raises(ValueError, match="passed in another argument"):
            op(square, square)
    assert square.sum().item() == 0


def test_a_frozen_parameter_and_inference_tensors_can_be_donated(device: torch.device) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 3, device=device), requires_grad=False)
    DONATING(parameter, torch.ones(3, device=device))
    with pytest.raises(RuntimeError, match="donated"):
        parameter.add(1)
    with torch.inference_mode():
        cache, row = _cache_and_row(device)
        assert DONATING(cache, row)[0].tolist() == [0, 1, 2]
        with pytest.raises(RuntimeError, match="donated"):
            cache.add(1)
    with torch.no_grad():
        DONATING(torch.zeros(4, 3, device=device), torch.ones(3, device=device, requires_grad=True))


def test_a_failed_call_uses_nothing_up(device: torch.device) -> None:
    cache = torch.zeros(4, 3, device=device)
    with pytest.raises(Exception, match="."):
        DONATING(cache, torch.ones(5, device=device))  # does not broadcast
    assert cache.sum().item() == 0


def test_a_backward_that_saved_the_tensor_raises(device: torch.device) -> None:
    weight = torch.ones(4, 3, device=device, requires_grad=True)
    cache, row = _cache_and_row(device)
    loss = (weight * cache).sum()
    DONATING(cache, row)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_donation_in_compiled_functions(backend: str, device: torch.device) -> None:
    cache, row = _cache_and_row(device)
    step = torch.compile(lambda cache, row: DONATING(cache, row) * 2, fullgraph=True, backend=backend)
    assert step(cache, row)[0].tolist() == [0, 2, 4]
    with pytest.raises(RuntimeError, match="donated"):
        cache.add(1)

    def reads_it_later(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return DONATING(cache, row) + cache

    cache, row = _cache_and_row(device)
    with pytest.raises(RuntimeError, match="donated"):
        torch.compile(reads_it_later, fullgraph=True, backend=backend)(cache, row)

    def makes_it(row: torch.Tensor) -> torch.Tensor:
        return DONATING(row[None] * torch.ones(4, 1, device=device), row + 1)

    assert torch.compile(makes_it, fullgraph=True, backend=backend)(row)[:2].tolist() == [
        [1, 2, 3],
        [0, 1, 2],
    ]


def test_opcheck_of_a_donating_op(device: torch.device) -> None:
    # The other checks use the arguments again after a call, which is what donation forbids.
    torch.library.opcheck(DONATING, _cache_and_row(device), test_utils="test_autograd_registration")
    with FakeTensorMode():
        cache, row = _cache_and_row(device)
        out = DONATING(cache, row)
    assert out.shape == (4, 3) and out.device.type == device.type and cache.shape == (4, 3)


# ---------------------------------------------------------------------------------- mutation


def _expected(steps: int) -> torch.Tensor:
    cache = torch.zeros(2, 8, 4)
    for i in range(steps):
        cache[:, i] = i + 1
    return cache


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's imports
@pytest.mark.parametrize(
    "way",
    ["call", "ops", "eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow), "tpu"],
)
def test_a_cache_updated_in_place(way: str, device: torch.device) -> None:
    if way in ("inductor", "tpu") and (way == "tpu") != (device.type == "tpu"):
        pytest.skip("the backend of the other device")
    write: Any = torch.ops.test_donation.write if way == "ops" else MUTATING

    def step(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        before = cache.sum()
        assert write(cache, new, position) is None
        return cache.sum() - before

    function = step if way in ("call", "ops") else torch.compile(step, fullgraph=True, backend=way)
    cache = torch.zeros(2, 8, 4, device=device)
    pointer = cache.data_ptr()
    for i in range(3):
        version = cache._version
        new = torch.full((2, 1, 4), i + 1.0, device=device)
        added = function(cache, new, torch.tensor(i, dtype=torch.int32, device=device))
        assert added.item() == 8 * (i + 1)
        assert cache._version > version
    assert cache.data_ptr() == pointer
    assert torch.equal(cache.cpu(), _expected(3))


def test_views_are_written_through(device: torch.device) -> None:
    cache, row = _cache_and_row(device)
    view = cache[1:3]
    version = cache._version
    total = MUTATING_AND_MORE(view, row)
    assert total.item() == 3 and cache.tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 0], [0, 0, 0]]
    assert cache._version > version
    MUTATING_AND_MORE(cache.t()[:3, :2], row[:2])  # strided: read by a copy, written in place
    assert cache[:2].tolist() == [[0, 0, 0], [1, 1, 2]]


def test_arguments_that_overlap_are_read_before_they_are_written(device: torch.device) -> None:
    cache = torch.arange(6.0, device=device).reshape(2, 3)
    MUTATING_AND_MORE(cache, cache[1])
    assert cache.tolist() == [[3, 4, 5], [3, 4, 5]]


def test_two_mutated_arguments(device: torch.device) -> None:
    a, b = torch.ones(3, device=device), torch.ones(3, device=device)
    assert MUTATING_TWO(a, b) is None
    assert a.tolist() == [2, 2, 2] == b.tolist()
    for pair in [(a, a), (a, a[:]), (a, a.detach())]:
        with pytest.raises(
            ValueError, match="test_donation::two writes to a and b, which must not share memory"
        ):
            MUTATING_TWO(*pair)
    assert a.tolist() == [2, 2, 2]


def test_a_new_value_of_another_shape_or_dtype_is_refused_and_nothing_written(device: torch.device) -> None:
    a, b = torch.ones(3, device=device), torch.ones(3, device=device)
    with pytest.raises(
        RuntimeError, match=r"test_donation::badly: the new value of 'b'.*float32 \(3,\).*\(1, 3\)"
    ):
        MUTATING_BADLY(a, b)
    with pytest.raises(RuntimeError, match=r"test_donation::dtype: the new value of 'a'.*bfloat16"):
        MUTATING_DTYPE(a)
    assert a.tolist() == [1, 1, 1] == b.tolist()


def test_memory_that_can_not_be_written_is_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="single memory location"):
        MUTATING_AND_MORE(torch.zeros(1, 3, device=device).expand(4, 3), torch.ones(3, device=device))
    with pytest.raises(RuntimeError, match="test_donation::update_sum writes to.*requires grad"):
        MUTATING_AND_MORE(torch.zeros(4, 3, device=device, requires_grad=True), torch.ones(3, device=device))
    with pytest.raises(NotImplementedError, match="test_donation::update_sum writes to.*torch.func"):
        torch.vmap(MUTATING_AND_MORE)(torch.zeros(2, 4, 3, device=device), torch.ones(2, 3, device=device))


def test_a_backward_that_saved_a_mutated_tensor_raises(device: torch.device) -> None:
    weight = torch.ones(4, 3, device=device, requires_grad=True)
    cache, row = _cache_and_row(device)
    loss = (weight * cache).sum()
    MUTATING_AND_MORE(cache, row)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("op", [MUTATING_AND_MORE, MUTATING_TWO], ids=lambda o: o._name)
def test_opcheck_of_mutating_ops(op: JaxOp, device: torch.device) -> None:
    shapes = [(4, 3), (3,)] if op is MUTATING_AND_MORE else [(3,), (3,)]
    torch.library.opcheck(op, tuple(torch.ones(s, device=device) for s in shapes))


def test_mutates_needs_new_values() -> None:
    def returns_one(a: jax.Array, b: jax.Array) -> jax.Array:
        return a + b

    def returns_list(a: jax.Array) -> list[jax.Array]:
        return [a]

    def optional(a: jax.Array | None) -> jax.Array:
        return a  # type: ignore[return-value]

    for function, names, says in [
        (returns_one, ("a", "b"), "must return their new values first"),
        (returns_list, ("a",), "must return their new values first"),
        (optional, ("a",), "optional or a list"),
        (returns_one, ("c",), "'c', which is not a tensor argument"),
    ]:
        with pytest.raises(ValueError, match=f"test_donation::bad.*{says}"):
            jax_op("test_donation::bad", function, mutates=names)


# ---------------------------------------------------------------------------------- replaced ops


def _sin(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


def _cos(x: jax.Array) -> jax.Array:
    return jnp.cos(x)


def test_overwriting_an_op(device: torch.device) -> None:
    name = f"test_donation::replaced_{device.type}"
    registered = f"replaced_{device.type}"
    first = jax_op(name, _sin)
    x = torch.zeros(3, device=device, requires_grad=True)
    pending = first(x).sum()
    compiled = torch.compile(first, fullgraph=True, backend="eager")
    assert compiled(x).tolist() == [0, 0, 0]
    second = jax_op(name, _cos, overwrite=True)
    for function in (second, getattr(torch.ops.test_donation, registered)):
        assert function(x).tolist() == [1, 1, 1]
    for stale in (first, compiled):
        with pytest.raises(Exception, match="was replaced by a later jax_op|Observed exception"):
            stale(x)
    pending.backward()  # recorded with the first one, so its gradient is the first one's
    assert x.grad.tolist() == [1, 1, 1]  # type: ignore[union-attr]
    torch._dynamo.reset()
    again = torch.compile(second, fullgraph=True, backend="aot_eager")(x)
    assert again.tolist() == [1, 1, 1]
    again.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]  # type: ignore[union-attr]  # minus sin(0) was added


def test_a_refused_replacement_leaves_the_op_alone() -> None:
    op = jax_op("test_donation::kept", _sin)
    for options in ({"mutates": ("nope",)}, {"donate_argnums": (4,)}, {"vjp": 3}):
        with pytest.raises((ValueError, TypeError)):
            jax_op("test_donation::kept", _cos, overwrite=True, **options)  # type: ignore[arg-type]
        assert op(torch.zeros(1)).item() == 0 == torch.ops.test_donation.kept(torch.zeros(1)).item()


def test_names_of_others_are_not_taken() -> None:
    @torch.library.custom_op("test_donation::others", mutates_args=())
    def others(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for name in ("aten::sin", "test_donation::others"):
        for overwrite in (False, True):
            with pytest.raises(ValueError, match="registered already, by another library"):
                jax_op(name, _sin, overwrite=overwrite)
    assert others(torch.zeros(1)).item() == 1


def _register(name: str, n: int, barrier: threading.Barrier, won: list[JaxOp], lost: list[Exception]) -> None:
    def plus(x: jax.Array) -> jax.Array:
        return x + n

    barrier.wait()
    try:
        won.append(jax_op(name, plus))
    except ValueError as error:
        lost.append(error)


@pytest.mark.parametrize("round_", range(5))
def test_of_many_threads_that_register_a_name_exactly_one_wins(round_: int) -> None:
    won: list[JaxOp] = []
    lost: list[Exception] = []
    barrier = threading.Barrier(4)
    name = f"test_donation::race_{round_}"
    threads = [threading.Thread(target=_register, args=(name, n, barrier, won, lost)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 3
    assert all("registered already" in str(error) for error in lost)
    registered = getattr(torch.ops.test_donation, f"race_{round_}")
    assert registered(torch.zeros(1)).item() == won[0](torch.zeros(1)).item()

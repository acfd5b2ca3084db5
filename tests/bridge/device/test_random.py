"""Random numbers of the device: reproducible from its seed, on a generator of its own where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bridge.device import extension

_native = extension.loaded()
needs_extension = pytest.mark.skipif(_native is None, reason="pure Python draws from torch's CPU generator")


def _draw() -> torch.Tensor:
    return torch.rand(8, device="tpu")


@pytest.fixture
def two_devices() -> Iterator[None]:
    assert _native is not None
    before = _native.device_count()
    _native.set_device_count(2)
    yield
    _native.set_device_count(before)


def test_the_same_seed_gives_the_same_numbers() -> None:
    torch.manual_seed(3)
    first = _draw()
    torch.tpu.manual_seed(3)
    second = _draw()
    torch.tpu.manual_seed_all(3)
    third = _draw()
    torch.tpu.manual_seed(4)
    other = _draw()
    assert torch.equal(first, second) and torch.equal(first, third) and not torch.equal(first, other)
    torch.tpu.manual_seed(2**40)
    assert torch.tpu.initial_seed() == 2**40


def test_seeds_from_entropy_differ() -> None:
    seeds = {torch.tpu.seed() for _ in range(3)}
    assert len(seeds) == 3 and torch.tpu.initial_seed() in seeds
    torch.tpu.seed_all()
    assert torch.tpu.initial_seed() not in seeds


def test_a_state_can_be_kept_and_restored() -> None:
    state = torch.tpu.get_rng_state()
    assert state.dtype is torch.uint8 and state.is_cpu
    first = _draw()
    states = torch.tpu.get_rng_state_all()
    second = _draw()
    torch.tpu.set_rng_state(state, "tpu:0")
    assert torch.equal(_draw(), first)
    torch.tpu.manual_seed(0)
    torch.tpu.set_rng_state_all(states)
    assert torch.equal(_draw(), second)
    with pytest.raises(ValueError, match=f"expected {len(states)} states.*got 0"):
        torch.tpu.set_rng_state_all([])
    with pytest.raises((RuntimeError, TypeError), match="state|RNG"):
        torch.tpu.set_rng_state(torch.zeros(3))


@pytest.mark.parametrize("device_type", ["tpu", None])
def test_fork_rng_leaves_no_trace(device_type: str | None) -> None:
    torch.manual_seed(5)
    expected, on_host = _draw(), torch.rand(3)
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[0], device_type=device_type):
        torch.manual_seed(99)
        _draw()
    assert torch.equal(_draw(), expected) and torch.equal(torch.rand(3), on_host)


def test_default_generators_are_those_the_device_draws_from() -> None:
    (generator, *_) = torch.tpu.default_generators
    assert len(torch.tpu.default_generators) == torch.tpu.device_count()
    assert torch.tpu.default_generators is torch.tpu.default_generators
    generator.manual_seed(6)
    first = _draw()
    torch.tpu.manual_seed(6)
    assert torch.equal(_draw(), first)


@pytest.mark.skipif(_native is not None, reason="the extension has generators")
def test_pure_python_says_that_it_has_no_generator() -> None:
    with pytest.raises(NotImplementedError, match="getNewGenerator"):
        torch.Generator(device="tpu")


@needs_extension
def test_the_device_does_not_draw_from_the_cpu_generator() -> None:
    torch.manual_seed(7)
    on_host = torch.rand(3)
    torch.manual_seed(7)
    _draw()
    assert torch.equal(torch.rand(3), on_host)
    torch.tpu.manual_seed(8)
    first = _draw()
    torch.tpu.manual_seed(8)
    torch.rand(3)
    assert torch.equal(_draw(), first)


@needs_extension
def test_a_generator_of_the_device_can_be_made() -> None:
    generator = torch.Generator(device="tpu")
    assert generator.device == torch.device("tpu:0")
    generator.manual_seed(9)
    state = generator.get_state()
    first = torch.randn(5, device="tpu", generator=generator)
    assert torch.equal(torch.randn(5, device="tpu", generator=generator.manual_seed(9)), first)
    generator.set_state(state)
    assert torch.equal(torch.empty(5, device="tpu").normal_(generator=generator), first)
    assert torch.equal(torch.randn(5, device="tpu", generator=generator.manual_seed(9).clone_state()), first)
    dropped = torch.bernoulli(torch.full((50,), 0.5, device="tpu"), generator=generator)
    assert 0 < dropped.sum() < 50
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(5, device="tpu", generator=torch.Generator())


@needs_extension
def test_devices_have_generators_of_their_own(two_devices: None) -> None:
    torch.manual_seed(10)
    states = torch.tpu.get_rng_state_all()
    assert torch.equal(states[0], states[1])
    torch.rand(2, device="tpu:1")
    assert torch.equal(torch.tpu.get_rng_state("tpu:0"), states[0])
    assert not torch.equal(torch.tpu.get_rng_state("tpu:1"), states[1])
    with torch.tpu.device(1):
        torch.tpu.manual_seed(11)
        assert torch.tpu.initial_seed() == 11
    assert torch.tpu.initial_seed() == 10

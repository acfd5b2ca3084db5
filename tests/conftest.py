"""What every test shares: JAX on the CPU, one thread, one seed, and the `device` fixture."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import bridge  # noqa: F401  before torch, which then leaves torch_tpu alone where that is installed

# JAX reads its platform when it starts, so this comes before anything imports it. A chip that is present
# stays out of the way: these tests are about what runs without one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# The tensors here are small: threads that wait for each other cost more than they save, above all when
# pytest-xdist runs one process per core.
torch.set_num_threads(1)


@pytest.fixture(params=["cpu", "tpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that an op must work on: plain CPU tensors, and the simulated `tpu`."""
    return torch.device(request.param)


@pytest.fixture
def tpu() -> torch.device:
    """The simulated `tpu` device, for tests that make sense there only."""
    return torch.device("tpu")


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time() -> None:
    """Every test starts from the same seed, so that a failure can be repeated."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_not_searched_again() -> None:
    """The garbage collector leaves alone what was there before this file's tests.

    After thousands of tests there are so many objects, above all in caches of JAX, that to look at them all
    takes seconds: at every `gc.collect()`, and wherever Python finds it time to.
    """
    gc.collect()
    gc.freeze()


_MOST_MAPPINGS = 25_000


@pytest.fixture(autouse=True, scope="module")
def _programs_do_not_fill_the_address_space() -> Iterator[None]:
    """Compiled programs are let go once there are very many.

    Each is a few mappings of memory, and Linux allows a process 65,530 of them: beyond, XLA ends the process.
    """
    yield
    mappings = Path("/proc/self/maps")
    if "jax" in sys.modules and mappings.exists() and mappings.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()

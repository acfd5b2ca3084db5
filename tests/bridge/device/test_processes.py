"""Threads and forked children of a process that uses the device."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch

import bridge


@bridge.jax_op("test_processes::double")
def double(x: jax.Array) -> jax.Array:
    return x * 2


class _WhereBackwardRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        _threads.append(threading.get_ident())
        return grad_outputs[0]


_threads: list[int] = []


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("start", ["backward", "grad"])
def test_backward_runs_in_the_thread_that_asked_for_it(device: str, start: str) -> None:
    def work() -> None:
        x = torch.ones(3, device=device, requires_grad=True)
        y = _WhereBackwardRuns.apply(x).sum()
        y.backward() if start == "backward" else torch.autograd.grad(y, x)
        _threads.append(threading.get_ident())

    for run in (work, lambda: _in_thread(work)):
        _threads.clear()
        run()
        assert len(_threads) == 2 and len(set(_threads)) == 1


def _in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_threads_compute_side_by_side() -> None:
    errors: list[BaseException] = []
    x = torch.arange(1000.0, device="tpu")

    def work(number: int) -> None:
        try:
            for _ in range(50):
                w = torch.full((1000,), float(number), device="tpu", requires_grad=True)
                (x * w).sum().backward()
                assert w.grad is not None and torch.equal(w.grad, x)
                assert torch.equal(double(w.detach()).cpu(), torch.full((1000,), 2.0 * number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


_FORK = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import jax, torch, bridge

@bridge.jax_op("fork::double")
def double(x: jax.Array) -> jax.Array:
    return x * 2

x = torch.ones(300, 300, device="tpu", requires_grad=True)
(x @ x).sum().backward()
double(x.detach())
child = os.fork()
if child == 0:
    signal.alarm(60)
    y = torch.ones(300, 300, device="tpu", requires_grad=True)
    (y @ y).sum().backward()
    assert torch.equal(y.grad, x.grad) and torch.rand(3, device="tpu").shape == (3,)
    torch.tpu.synchronize()
    with torch.tpu.stream(torch.tpu.Stream()):
        torch.manual_seed(1)
    try:
        double(y.detach())
    except RuntimeError as error:
        assert "forked after JAX had started" in str(error) and "spawn" in str(error), error
        os._exit(0)
    os._exit(3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_a_forked_child_computes_and_is_told_that_kernels_cannot_run() -> None:
    done = _python(_FORK)
    assert done.returncode == 0, (done.returncode, done.stderr)


_FORK_ON_CPU = """
import os, signal, sys, torch
x = torch.ones(3, requires_grad=True)
x.sum().backward()
before = torch.get_num_threads()
child = os.fork()
if child == 0:
    signal.alarm(60)
    x.sum().backward()
    os._exit(0 if x.grad.sum() == 6 and torch.get_num_threads() == before else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_that_uses_the_cpu_is_as_without_the_device() -> None:
    done = _python(_FORK_ON_CPU)
    assert done.returncode == 0, (done.returncode, done.stderr)


_FORK_WHILE_A_THREAD_COMPUTES = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore")
import torch

def compute():
    while not done:
        torch.ones(4, device="tpu") + 1

# Once before the fork: torch sets up each op in its first call, under a lock (a C++ static) that a child
# forked meanwhile finds locked for ever, on the CPU as here.
torch.ones(4, device="tpu") + 1
done, statuses = False, []
thread = threading.Thread(target=compute)
thread.start()
for _ in range(60):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        torch.ones(4, device="tpu") + 1
        os._exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done = True
thread.join()
assert not any(statuses), statuses
"""


def test_a_child_finds_nothing_locked_by_a_thread_of_its_parent() -> None:
    done = _python(_FORK_WHILE_A_THREAD_COMPUTES)
    assert done.returncode == 0, (done.returncode, done.stderr)

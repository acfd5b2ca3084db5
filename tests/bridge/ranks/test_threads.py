"""Ranks that are threads of one process: `bridge.ranks.threads.run`."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from bridge.ranks import threads
from bridge.ranks.threads import RankError, run

from . import collectives
from .collectives import all_collectives, all_reduced, everyone

_SOON = 10.0  # seconds, of which what "ends at once" takes a small part

# What torch itself warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*not support barrier device_ids"),
]


def _draw() -> list[Any]:
    return [torch.rand(2), torch.rand(2, device="tpu").cpu(), np.random.rand(2), random.random()]


def _equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b, strict=True))


# -- collectives ---------------------------------------------------------------------------------


def test_every_collective_gives_what_it_gives_to_processes(tmp_path: Path) -> None:
    files = [tmp_path / f"{rank}.pt" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, collectives.__file__, str(r), "2", str(tmp_path / "store"), str(files[r])]
        )
        for r in range(2)
    ]
    found = {device: run(all_collectives, 2, device) for device in ("cpu", "tpu")}
    assert [process.wait(120) for process in processes] == [0, 0]
    for rank, file in enumerate(files):
        expected = torch.load(file)
        for device in ("cpu", "tpu"):
            pairs = list(zip(found[device][rank], expected[device], strict=True))
            assert len(pairs) == 27
            for number, (ours, theirs) in enumerate(pairs):
                same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
                assert same, (rank, device, number, ours, theirs)


def test_four_ranks(device: torch.device) -> None:
    found = run(all_collectives, 4, device.type)
    assert torch.equal(found[0][0], found[3][0])
    assert [{"rank": rank} for rank in range(4)] in [f for f in found[2] if isinstance(f, list)]


def test_world_of_one() -> None:
    assert run(all_reduced, 1) == [1.0]


def test_results_come_in_the_order_of_ranks_and_are_not_copied() -> None:
    shared = object()
    found = run(lambda x, *, y: (dist.get_rank(), dist.get_world_size(), x, y), 3, shared, y=shared)
    assert [f[:2] for f in found] == [(0, 3), (1, 3), (2, 3)]
    assert all(f[2] is shared and f[3] is shared for f in found)


def test_asynchronous_collectives_let_ranks_go_on() -> None:
    """Rank 0 starts a collective, then sends what rank 1 must receive before it comes to the collective."""

    def program() -> tuple[float, float]:
        tensor, message = torch.ones(2), torch.zeros(1)
        if dist.get_rank() == 0:
            work = dist.all_reduce(tensor, async_op=True)
            dist.send(message + 5, 1)
            assert work is not None
            work.wait()
        else:
            dist.recv(message, 0)
            dist.all_reduce(tensor)
        if dist.get_rank() == 0:
            lazily = functional.all_reduce(torch.ones(2), "sum", everyone())
            dist.send(message + 6, 1)
        else:
            dist.recv(message, 0)
            lazily = functional.all_reduce(torch.ones(2), "sum", everyone())
        return tensor.sum().item(), (lazily + 0).sum().item()

    assert run(program, 2, timeout=30) == [(4.0, 4.0)] * 2


def test_futures_and_polling(device: torch.device) -> None:
    def program() -> tuple[float, float]:
        tensor = torch.ones(2, device=device)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
        again = dist.all_reduce(tensor, async_op=True)
        assert again is not None
        while not again.is_completed():
            pass
        again.wait()
        return doubled.sum().item(), tensor.sum().item()

    assert run(program, 2, timeout=30) == [(8.0, 8.0)] * 2


def test_groups_made_by_some_ranks_only() -> None:
    def program() -> list[float]:
        rank = dist.get_rank()
        half = dist.new_group([0, 2] if rank % 2 == 0 else [1, 3], use_local_synchronization=True)
        tensor = torch.full((1,), float(rank))
        dist.all_reduce(tensor, group=half)
        sub: Any = dist.new_subgroups(2)[0]
        other = torch.full((1,), float(rank))
        dist.all_reduce(other, group=sub)
        dist.destroy_process_group(sub)
        return [tensor.item(), other.item()]

    assert run(program, 4) == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


def test_messages_keep_their_order_and_tags() -> None:
    def program() -> list[float]:
        got = []
        if dist.get_rank() == 0:
            works = [dist.isend(torch.full((1,), float(i)), 1, tag=i % 2) for i in range(6)]
            for work in works:
                assert work is not None
                work.wait()
        else:
            for tag in (1, 1, 0, 0, 0, 1):
                tensor = torch.zeros(1)
                dist.recv(tensor, 0, tag=tag)
                got.append(tensor.item())
        return got

    assert run(program, 2)[1] == [1.0, 3.0, 0.0, 2.0, 4.0, 5.0]


def test_receiving_from_any_rank() -> None:
    def program() -> list[int]:
        if dist.get_rank() > 0:
            dist.send(torch.full((1,), float(dist.get_rank())), 0)
            return []
        tensor, found = torch.zeros(1), []
        for _ in range(3):
            source = dist.recv(tensor)
            assert tensor.item() == source
            found.append(source)
        return sorted(found)

    assert run(program, 4, timeout=30)[0] == [1, 2, 3]


def test_a_rank_that_is_late_every_time() -> None:
    def program() -> float:
        tensor = torch.ones(1)
        for step in range(20):
            if dist.get_rank() == step % 2:
                with threads.blocking() if step % 3 else contextlib.nullcontext():
                    time.sleep(0.2)
            dist.all_reduce(tensor)
        return tensor.item()

    assert run(program, 2) == [2.0**20] * 2


def _disagrees(mistake: str) -> None:
    first, two, three = dist.get_rank() == 0, torch.ones(2), torch.ones(3)
    if mistake == "order":
        dist.all_reduce(two) if first else dist.broadcast(two, 0)
    elif mistake == "size":
        dist.all_reduce(two if first else three)
    elif mistake == "root":
        dist.broadcast(two, 0 if first else 1)
    elif mistake == "gather":
        dist.all_gather(
            [torch.ones(2), torch.ones(2)] if first else [torch.ones(3)] * 2, two if first else three
        )
    elif mistake == "splits":
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [2, 2])
    elif mistake == "message":
        dist.send(three, 1) if first else dist.recv(two, 0)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("order", "rank 0 called allreduce(2 x float32), rank 1 calls broadcast(2 x float32, root 0)"),
        ("size", "rank 0 called allreduce(2 x float32), rank 1 calls allreduce(3 x float32)"),
        ("root", "rank 0 called broadcast(2 x float32, root 0), rank 1 calls broadcast(2 x float32, root 1)"),
        ("gather", "rank 0 called allgather(2 x float32), rank 1 calls allgather(3 x float32)"),
        ("splits", "rank 1 calls alltoall_base(float32, sends [2, 2], receives [1, 3])"),
        ("message", "recv from rank 0 (tag 0, group '0' of ranks [0, 1]): expected room for the 12 bytes"),
    ],
)
def test_calls_that_do_not_fit_together(mistake: str, message: str) -> None:
    """gloo ends the process at some of them, and waits for ever at others."""
    with pytest.raises(RankError, match=re.escape(message)) as caught:
        run(_disagrees, 2, mistake)
    assert caught.value.rank == 1


def test_uneven_splits() -> None:
    def program() -> list[float]:
        rank = dist.get_rank()
        out = torch.empty(4 - 2 * rank, 2)
        given = torch.full((3, 2), float(rank))
        dist.all_to_all_single(out, given, [2 - rank, 2 - rank], [2, 1])
        return out[:, 0].tolist()

    assert run(program, 2) == [[0.0, 0.0, 1.0, 1.0], [0.0, 1.0]]


# -- what belongs to a rank ----------------------------------------------------------------------


def test_random_numbers_are_those_of_a_process_of_its_own() -> None:
    def draw(rank: int, meet: Callable[[], Any]) -> list[Any]:
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        found: list[Any] = []
        for _ in range(4):
            found += [*_draw(), nn.functional.dropout(torch.ones(8)), torch.randn(3)]
            meet()
        return found

    caller = _draw_without_effect()
    found = run(lambda: draw(dist.get_rank(), dist.barrier), 3)
    assert _equal(caller, _draw_without_effect())
    with _random_state_kept():
        for rank in range(3):
            assert _equal(found[rank], draw(rank, lambda: None))
    assert not _equal(found[0][:1], found[1][:1])


def test_ranks_start_with_the_caller_s_random_numbers() -> None:
    expected = _draw_without_effect()

    def program() -> list[Any]:
        dist.barrier()
        return _draw()

    assert all(_equal(expected, found) for found in run(program, 2))
    assert _equal(expected, _draw())


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    from bridge.ranks.baton import RandomState

    state = RandomState()
    yield
    state.restore()


def _draw_without_effect() -> list[Any]:
    with _random_state_kept():
        return _draw()


def test_the_order_of_events_is_the_same_every_time() -> None:
    def program(events: list[Any]) -> None:
        rank = dist.get_rank()
        group: Any = dist.new_group([0, 2])
        for step in range(5):
            events.append((step, rank))
            dist.all_reduce(torch.ones(100))
            if rank != 1:
                events.append(("half", step, rank))
                dist.barrier(group)
            events.append(("after", step, rank))

    orders: list[list[Any]] = []
    for _ in range(5):
        orders.append([])
        run(program, 3, orders[-1])
    assert len(orders[0]) == 40 and all(order == orders[0] for order in orders)


def test_environment_variables() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

    def program() -> list[list[str]]:
        found = []
        for _ in range(3):
            found.append([os.environ[name] for name in names])
            dist.barrier()
        assert os.environ["MASTER_ADDR"] and os.environ["MASTER_PORT"]
        return found

    assert run(program, 2) == [[["0", "0", "2", "2"]] * 3, [["1", "1", "2", "2"]] * 3]


def test_current_rank() -> None:
    assert threads.current_rank() is None and not threads.is_rank_thread()
    inside = run(lambda: (threads.current_rank(), threads.is_rank_thread()), 2)
    assert inside == [(0, True), (1, True)]


def test_one_rank_runs_at_a_time_except_where_one_blocks() -> None:
    channel: queue.Queue[int] = queue.Queue()

    def program() -> int:
        if dist.get_rank() == 1:
            channel.put(7)
            return 0
        with threads.blocking():  # rank 1 would never run else
            return channel.get(timeout=20)

    assert run(program, 2) == [7, 0]


def test_device_for_tensors_that_name_none() -> None:
    assert run(lambda: torch.zeros(1).device.type, 2, device="tpu") == ["tpu", "tpu"]
    assert torch.zeros(1).device.type == "cpu"


# -- what builds on collectives ------------------------------------------------------------------


class _Twice(torch.autograd.Function):
    """Its backward runs a backward of its own, and a collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (x * 2).sum().backward()
        total = torch.ones(1, device=x.device)
        dist.all_reduce(total)
        return grads[0] * x.grad * total


def test_backward_with_reentrance_and_collectives(device: torch.device) -> None:
    def program() -> list[float]:
        x = torch.ones(2, device=device, requires_grad=True)
        assert torch.is_grad_enabled()
        with torch.no_grad():
            dist.barrier()
            assert not torch.is_grad_enabled()
        torch.utils.checkpoint.checkpoint(
            lambda t: _Twice.apply(t).sin(), x, use_reentrant=True
        ).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    expected = [4 * math.cos(2.0)] * 2
    for found in run(program, 2):
        assert found == pytest.approx(expected)


def test_ddp_averages_gradients(device: torch.device) -> None:
    def model() -> nn.Module:
        with _random_state_kept():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).to(device)

    data = torch.arange(32.0).view(8, 4).sin().to(device)

    def program() -> list[torch.Tensor]:
        replica = DistributedDataParallel(model(), bucket_cap_mb=1)
        optimizer = torch.optim.SGD(replica.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            replica(data[dist.get_rank() :: 2]).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in replica.parameters()]

    alone = model()
    gradients = []
    for rank in range(2):
        alone.zero_grad()
        alone(data[rank::2]).square().mean().backward()
        gradients.append([p.grad.clone() for p in alone.parameters() if p.grad is not None])
    mean = [(a + b) / 2 for a, b in zip(*gradients, strict=True)]

    def one_step() -> list[torch.Tensor]:
        replica = DistributedDataParallel(model())
        replica(data[dist.get_rank() :: 2]).square().mean().backward()
        return [p.grad.clone() for p in replica.parameters() if p.grad is not None]

    for found in run(one_step, 2):
        for ours, expected in zip(found, mean, strict=True):
            torch.testing.assert_close(ours, expected)
    first, second = run(program, 2)
    assert _equal(first, second)


def test_device_mesh_and_dtensor(device: torch.device) -> None:
    a, b = torch.arange(32.0).view(4, 8).to(device), torch.arange(24.0).view(8, 3).to(device)

    def program() -> tuple[torch.Tensor, list[int]]:
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "model"))
        left = distribute_tensor(a, mesh["model"], [Shard(1)])
        right = distribute_tensor(b, mesh["model"], [Shard(0)])
        product = left @ right
        assert isinstance(product, DTensor)
        whole = product.redistribute(placements=[Replicate()]).to_local()
        return whole, [mesh.get_local_rank("data"), mesh.get_local_rank("model")]

    found = run(program, 4)
    assert [where for _, where in found] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    for product, _ in found:
        torch.testing.assert_close(product, a @ b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(backend: str) -> None:
    """Each rank's code is its own: its number is a constant in it."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", everyone()) + dist.get_rank()

    compiled = torch.compile(body, backend=backend, fullgraph=True)

    def program() -> list[float]:
        x = torch.full((1,), dist.get_rank() + 1.0)
        return [compiled(x).item() for _ in range(2)]

    for size in (3, 2):
        total = size * (size + 1)
        assert run(program, size) == [[total + rank] * 2 for rank in range(size)]


def test_torch_s_checks_of_collectives_do_not_hang() -> None:
    """torch's debug level DETAIL waits in C++."""
    c10d_c: Any = torch._C._distributed_c10d
    level = c10d_c.get_debug_level()
    c10d_c.set_debug_level(c10d_c.DebugLevel.DETAIL)
    try:
        assert run(all_reduced, 2, timeout=30) == [3.0, 3.0]
        assert c10d_c.get_debug_level() == c10d_c.DebugLevel.DETAIL
    finally:
        c10d_c.set_debug_level(level)


def test_the_store() -> None:
    def program() -> list[Any]:
        store: Any = c10d._get_default_store()
        rank = dist.get_rank()
        if rank == 0:
            store.wait(["from 1"])
        store.set(f"from {rank}", str(rank))
        found = [store.get("from 0"), store.get("from 1"), store.check(["nothing"])]
        store.add("count", 2)
        dist.barrier()
        return [*found, store.add("count", 0), store.compare_set("from 0", "0", "9") in (b"9", b"0")]

    assert run(program, 2) == [[b"0", b"1", False, 4, True]] * 2

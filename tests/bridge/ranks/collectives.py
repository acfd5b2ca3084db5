"""Collectives on whatever ranks there are. As a program, this file is one rank of real processes."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def everyone() -> Any:  # for functional collectives, whose types know no None
    return dist.group.WORLD


def all_reduced() -> float:
    tensor = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return tensor.item()


def all_collectives(device: str) -> list[Any]:
    """What this rank gets from each collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []

    def mine(*shape: int) -> torch.Tensor:  # values whose sum depends on the order of additions
        count = torch.Size(shape).numel()
        return (torch.arange(count, dtype=torch.float32) + 1.1).div(rank + 3).view(shape).to(device)

    def note(*tensors: torch.Tensor) -> None:
        found.extend(tensor.cpu().clone() for tensor in tensors)

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG):
        tensor = mine(1000)
        dist.all_reduce(tensor, op)
        note(tensor)
    tensor = mine(4)
    dist.reduce(tensor, size - 1)
    if rank == size - 1:
        note(tensor)
    tensor = mine(4)
    dist.broadcast(tensor, 1 % size)
    note(tensor)
    parts = [torch.empty(3, device=device) for _ in range(size)]
    dist.all_gather(parts, mine(3))
    note(*parts)
    whole = torch.empty(size * 3, device=device)
    dist.all_gather_into_tensor(whole, mine(3))
    note(whole)
    dist.gather(mine(3), parts if rank == 0 else None, 0)
    note(*parts)
    part = torch.empty(3, device=device)
    dist.scatter(part, [mine(3) * i for i in range(size)] if rank == 0 else None, 0)
    note(part)
    dist.reduce_scatter(part, [mine(3) * (i + 1) for i in range(size)])
    note(part)
    dist.reduce_scatter_tensor(part, mine(size * 3))
    note(part)
    whole = torch.empty(size * 2, device=device)
    dist.all_to_all_single(whole, mine(size * 2))
    note(whole)
    dist.all_to_all(parts, [mine(3) + i for i in range(size)])
    note(*parts)
    dist.barrier()
    dist.monitored_barrier()

    after, before = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(5, device=device)
    exchange = [dist.P2POp(dist.isend, mine(5), after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    note(received)
    if rank == 0:
        dist.send(mine(5), 1, tag=3)
        found.append(dist.recv(received, tag=4))
    elif rank == 1:
        dist.recv(received, 0, tag=3)
        dist.send(received + 1, 0, tag=4)
    note(received)

    tensors = [mine(10) + i for i in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
    note(*tensors)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found.append(objects)
    objects = [f"from {rank}"]
    dist.broadcast_object_list(objects, 0)
    found.append(objects)

    groups: list[Any] = [dist.new_group([i]) for i in range(size)]
    everyone: Any = dist.new_group(list(range(size)))
    note(functional.all_reduce(mine(3), "sum", groups[rank]) + 0)
    note(functional.all_reduce(mine(3), "sum", everyone) + 0)
    note(functional.reduce_scatter_tensor(mine(size), "sum", 0, everyone) + 0)
    return found


def _main() -> None:
    """One rank, a process. Arguments: rank, size, the store's file, the file for the results."""
    rank, size, store, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)  # torch's own renaming of collectives
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    torch.save({device: all_collectives(device) for device in ("cpu", "tpu")}, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()

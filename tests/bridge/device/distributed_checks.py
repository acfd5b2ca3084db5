"""What two processes check together; `test_distributed.py` starts them with torchrun and names the checks.

Each function `check_...` runs in both processes, with the process's rank and its device. What one process
would compute alone, on the CPU, is the oracle.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bridge.device import extension

SIZE = 2
STEPS = 3


def main() -> None:
    """Run the checks that a JSON file names, `{backend: [names]}`, and leave a file for each that passed."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)  # torch's own renaming of collectives
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    torch.tpu.set_device(int(os.environ["LOCAL_RANK"]) % torch.tpu.device_count())
    device = torch.device("tpu", torch.tpu.current_device())
    for number, (backend, names) in enumerate(json.loads((folder / "checks.json").read_text()).items()):
        store = dist.FileStore(
            str(folder / f"store{number}"), SIZE
        )  # torchrun's own would remember the last group
        rank, limit = int(os.environ["RANK"]), datetime.timedelta(seconds=60)
        dist.init_process_group(backend or None, store=store, rank=rank, world_size=SIZE, timeout=limit)
        for name in names:
            torch.manual_seed(0)
            globals()[f"check_{name}"](rank, device)
            (folder / f"{number}.{name}.{rank}").touch()
        dist.destroy_process_group()


def full(rank: int, device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, rank + 1, dtype=dtype, device=device)


def same(tensor: torch.Tensor, device: torch.device, expected: Any) -> None:
    assert tensor.device == device, f"on {tensor.device}, expected {device}"
    assert tensor.tolist() == expected, f"got {tensor.tolist()}, expected {expected}"


# -- collectives ---------------------------------------------------------------------------------


def check_reductions(rank: int, device: torch.device) -> None:
    for operation, expected in (
        (dist.ReduceOp.SUM, 3),
        (dist.ReduceOp.MAX, 2),
        (dist.ReduceOp.MIN, 1),
        (dist.ReduceOp.PRODUCT, 2),
        (dist.ReduceOp.AVG, 1.5),
    ):
        tensor = full(rank, device, 3)
        assert dist.all_reduce(tensor, operation) is None
        same(tensor, device, [expected] * 3)
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        tensor = full(rank, device, 2, dtype=dtype)
        dist.all_reduce(tensor)
        same(tensor, device, [3, 3])
    tensor = full(rank, device, 2)
    dist.reduce(tensor, 1)
    if rank == 1:
        same(tensor, device, [3, 3])


def check_a_part_of_a_tensor(rank: int, device: torch.device) -> None:
    whole = full(rank, device, 3, 4)
    dist.all_reduce(whole[1])
    same(whole, device, [[rank + 1] * 4, [3] * 4, [rank + 1] * 4])


def check_gathers_and_scatters(rank: int, device: torch.device) -> None:
    mine = full(rank, device, 2)
    parts = [torch.zeros(2, device=device) for _ in range(SIZE)]
    dist.all_gather(parts, mine)
    same(torch.stack(parts), device, [[1, 1], [2, 2]])
    joined = torch.zeros(4, device=device)
    dist.all_gather_into_tensor(joined, mine)
    same(joined, device, [1, 1, 2, 2])
    dist.all_gather_into_tensor(joined, joined[2 * rank : 2 * rank + 2])  # in its own place, as FSDP does
    same(joined, device, [1, 1, 2, 2])
    gathered = [torch.zeros(2, device=device) for _ in range(SIZE)] if rank == 0 else None
    dist.gather(mine, gathered, 0)
    if gathered:
        same(torch.stack(gathered), device, [[1, 1], [2, 2]])
    received = torch.zeros(2, device=device)
    dist.scatter(received, [full(i, device, 2) for i in range(SIZE)] if rank == 0 else None, 0)
    same(received, device, [rank + 1] * 2)
    dist.reduce_scatter_tensor(received, torch.arange(4.0, device=device) * (rank + 1))
    same(received, device, [[0, 3], [6, 9]][rank])
    dist.reduce_scatter(received, [full(rank, device, 2), full(rank, device, 2) * 10])
    same(received, device, [[3, 3], [30, 30]][rank])
    dist.broadcast(received, 1)
    same(received, device, [30, 30])


def check_all_to_all(rank: int, device: torch.device) -> None:
    out = torch.zeros(3, device=device)
    sent, received = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    dist.all_to_all_single(out, torch.arange(3.0, device=device) + 10 * rank, received, sent)
    same(out, device, [[0, 10, 11], [1, 2, 12]][rank])
    parts = [torch.zeros(1, device=device) for _ in range(SIZE)]
    dist.all_to_all(parts, [full(rank, device, 1), full(rank, device, 1) * 10])
    same(torch.cat(parts), device, [[1, 2], [10, 20]][rank])


def check_point_to_point(rank: int, device: torch.device) -> None:
    received = torch.zeros(2, device=device)
    if rank == 0:
        dist.send(full(rank, device, 2), 1)
    else:
        assert dist.recv(received) == 0  # from any
        same(received, device, [1, 1])
    exchange = [
        dist.P2POp(dist.isend, full(rank, device, 2), 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    same(received, device, [2 - rank] * 2)


def check_asynchronous_work_hands_out_tensors_of_the_device(rank: int, device: torch.device) -> None:
    tensor = full(rank, device, 2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None and work.wait()
    same(tensor, device, [3, 3])
    (result,) = work.get_future().value()
    assert result is tensor
    parts = [torch.zeros(2, device=device) for _ in range(SIZE)]
    work = dist.all_gather(parts, full(rank, device, 2), async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda done: [t * 2 for t in done.value()]).wait()
    same(torch.stack(doubled), device, [[2, 2], [4, 4]])


def check_the_order_of_many_asynchronous_works(rank: int, device: torch.device) -> None:
    tensors = [torch.full((100,), float(i), device=device) for i in range(50)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in works:
        assert work is not None
        work.wait()
    assert [t.sum().item() for t in tensors] == [200 * i for i in range(50)]


def check_objects_and_barriers(rank: int, device: torch.device) -> None:
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": rank, "tensor": full(rank, device, 1)})
    assert [o["rank"] for o in objects] == [0, 1]
    assert [o["tensor"].item() for o in objects] == [1, 2] and objects[0]["tensor"].device.type == "tpu"
    dist.barrier()
    dist.barrier(device_ids=[device.index])


def check_cpu_tensors_are_served_too(rank: int, device: torch.device) -> None:
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]


def check_cpu_tensors_are_refused(rank: int, device: torch.device) -> None:
    """As by the backend of this name on a TPU."""
    raises(
        RuntimeError,
        "No backend type associated with device type cpu",
        lambda: dist.all_reduce(torch.ones(2)),
    )


def check_mixed_devices_are_refused(rank: int, device: torch.device) -> None:
    parts = [torch.zeros(2) for _ in range(SIZE)]
    raises(
        RuntimeError, "expected all tensors on 'tpu'", lambda: dist.all_gather(parts, full(rank, device, 2))
    )


def raises(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert message in str(error), f"{message!r} not in {str(error)!r}"
    else:
        raise AssertionError(f"expected {kind.__name__}: {message}")


def check_subgroups(rank: int, device: torch.device) -> None:
    alone = [dist.new_group([i]) for i in range(SIZE)][rank]
    tensor = full(rank, device, 2)
    dist.all_reduce(tensor, group=alone)
    same(tensor, device, [rank + 1] * 2)
    both: Any = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=both)
    same(tensor, device, [3, 3])
    dist.destroy_process_group(both)


def check_functional_collectives_and_their_gradients(rank: int, device: torch.device) -> None:
    from torch.distributed import _functional_collectives as functional

    group: Any = dist.group.WORLD
    tensor = full(rank, device, 2)
    same(functional.all_reduce(tensor, "sum", group) + 0, device, [3, 3])
    same(functional.all_gather_tensor(tensor, 0, group) + 0, device, [1, 1, 2, 2])
    same(functional.reduce_scatter_tensor(full(rank, device, 4), "sum", 0, group) + 0, device, [3, 3])
    same(functional.all_to_all_single(tensor, [1, 1], [1, 1], group) + 0, device, [1, 2])
    same(functional.broadcast(tensor, 1, group) + 0, device, [2, 2])
    leaf = full(rank, device, 2).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(leaf, 0, group)
    (gathered * torch.arange(4.0, device=device)).sum().backward()
    assert leaf.grad is not None
    same(leaf.grad, device, [[0, 2], [4, 6]][rank])


def check_collectives_in_compiled_graphs(rank: int, device: torch.device) -> None:
    from torch.distributed import _functional_collectives as functional

    def average(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "avg", dist.group.WORLD) + 1  # type: ignore[arg-type]

    for backend in ("aot_eager", "tpu"):
        compiled = torch.compile(average, backend=backend, fullgraph=True)
        same(compiled(full(rank, device, 2)), device, [4, 4])


# -- training ------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def batches() -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(8, 6, generator=generator)
        yield x, torch.randint(0, 3, (8,), generator=generator)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, part: slice, device: torch.device | str
) -> list[float]:
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[part].to(device)), y[part].to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_alone() -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    train(model, torch.optim.AdamW(model.parameters(), 1e-2), slice(None), "cpu")
    return model


def my_part(rank: int) -> slice:
    return slice(4 * rank, 4 * rank + 4)


def close(parameters: dict[str, torch.Tensor], expected: nn.Module) -> None:
    """Equal up to some float32 roundings: sums have another order, and AdamW divides small numbers."""
    for name, want in expected.named_parameters():
        torch.testing.assert_close(
            parameters[name].detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5, msg=name_in(name)
        )


def name_in(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def check_ddp(rank: int, device: torch.device) -> None:
    ways: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}]
    if extension.loaded():  # torch keeps the records of these in pinned memory
        ways += [{"find_unused_parameters": True}, {"static_graph": True}]
    for options in ways:
        torch.manual_seed(0)
        model: Any = nn.parallel.DistributedDataParallel(Model().to(device), **options)
        train(model, torch.optim.AdamW(model.parameters(), 1e-2), my_part(rank), device)
        close(dict(model.module.named_parameters()), trained_alone())


def check_ddp_communication_hooks(rank: int, device: torch.device) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    group: Any = dist.group.WORLD
    seen: list[torch.device] = []

    def own_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)

        def average(done: Any) -> torch.Tensor:
            seen.append(done.value()[0].device)
            return done.value()[0] / SIZE

        return work.get_future().then(average)

    power = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
    for hook, state, tolerance in (
        (default_hooks.allreduce_hook, group, 1e-5),
        (own_hook, None, 1e-5),
        (default_hooks.fp16_compress_hook, group, 1e-3),
        (powerSGD_hook.powerSGD_hook, power, None),
    ):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Model().to(device))
        model.register_comm_hook(state, hook)
        losses = train(model, torch.optim.SGD(model.parameters(), 1e-2), my_part(rank), device)
        torch.manual_seed(0)
        alone = Model()
        train(alone, torch.optim.SGD(alone.parameters(), 1e-2), slice(None), "cpu")
        assert all(math.isfinite(loss) for loss in losses)
        for parameter in model.module.parameters():
            same(parameter, device, of_rank_0(parameter).tolist())
        if tolerance is not None:
            for a, b in zip(model.module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)
    assert seen and set(seen) == {device}


def of_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    dist.broadcast(copied, 0)
    return copied


def check_ddp_without_synchronisation_accumulates(rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False).to(device))
    x = full(rank, device, 1, 2)
    with model.no_sync():
        model(x).sum().backward()
    assert model.module.weight.grad.tolist() == [[rank + 1] * 2]
    model(x).sum().backward()
    assert model.module.weight.grad.tolist() == [[3.0, 3.0]]


def check_synchronised_batch_norm(rank: int, device: torch.device) -> None:
    """One process that sees the whole batch, with the ordinary layer, is the oracle."""
    for dtype, affine in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
        torch.manual_seed(0)
        alone = nn.BatchNorm2d(3, affine=affine)
        shared = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)).to(device)
        x = torch.randn(5, 3, 2, 2, dtype=dtype).mul(2).add(1)
        mine = slice(0, 2) if rank == 0 else slice(2, 5)  # parts of different sizes
        scale = torch.randn(5, 3, 2, 2, dtype=dtype)
        inputs = x.clone().requires_grad_(), x[mine].to(device).requires_grad_()
        results = alone(inputs[0]), shared(inputs[1])
        (results[0] * scale).sum().backward()
        (results[1] * scale[mine].to(device)).sum().backward()
        assert inputs[0].grad is not None and inputs[1].grad is not None
        torch.testing.assert_close(results[1].cpu(), results[0][mine])
        torch.testing.assert_close(inputs[1].grad.cpu(), inputs[0].grad[mine])
        for name, value in alone.named_buffers():
            torch.testing.assert_close(shared.get_buffer(name).cpu(), value, msg=name_in(name))
        for a, b in zip(alone.parameters(), shared.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            dist.all_reduce(b.grad)
            torch.testing.assert_close(b.grad.cpu(), a.grad)


# -- meshes and DTensor --------------------------------------------------------------------------


def check_dtensor(rank: int, device: torch.device) -> None:
    mesh = init_device_mesh("tpu", (SIZE,), mesh_dim_names=("data",))
    assert mesh.device_type == "tpu" and mesh["data"].get_local_rank() == rank
    a, b = torch.randn(4, 6), torch.randn(6, 4)
    left = distribute_tensor(a.to(device), mesh, [Shard(0)])
    right = distribute_tensor(b.to(device), mesh, [Replicate()])
    product: Any = left @ right
    assert isinstance(product, DTensor) and product.to_local().shape == (2, 4)
    assert product.to_local().device.type == "tpu"
    torch.testing.assert_close(product.full_tensor().cpu(), a @ b)
    moved = product.redistribute(mesh, [Shard(1)])
    torch.testing.assert_close(moved.to_local().cpu(), (a @ b)[:, 2 * rank : 2 * rank + 2])
    leaf = distribute_tensor(a.to(device), mesh, [Shard(0)]).requires_grad_()
    (leaf.sum() ** 2).backward()
    assert isinstance(leaf.grad, DTensor)
    torch.testing.assert_close(leaf.grad.full_tensor().cpu(), torch.full((4, 6), 2 * a.sum().item()))


def check_dtensor_random_numbers(rank: int, device: torch.device) -> None:
    mesh = init_device_mesh("tpu", (SIZE,))
    torch.manual_seed(3)
    whole = torch.distributed.tensor.rand(4, 4, device_mesh=mesh, placements=[Shard(0)])
    parts = whole.full_tensor()
    assert 0 <= parts.min().item() and parts.max().item() < 1
    assert not torch.equal(parts[:2], parts[2:]), "the two ranks drew the same numbers"
    torch.manual_seed(3)
    copies = torch.distributed.tensor.rand(4, 4, device_mesh=mesh, placements=[Replicate()])
    assert torch.equal(of_rank_0(copies.to_local()), copies.to_local()), "copies of one tensor differ"
    after = torch.rand(2, device=device)
    assert torch.equal(of_rank_0(after), after), "the ranks went on with different states"
    half = F.dropout(distribute_tensor(torch.ones(8, 8, device=device), mesh, [Shard(1)]), 0.5)
    values = half.full_tensor()  # type: ignore[attr-defined]
    assert set(values.unique().tolist()) == {0, 2} and not torch.equal(values[:, :4], values[:, 4:])


def check_tensor_parallel_layers(rank: int, device: torch.device) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("tpu", (SIZE,))
    alone = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    shared = parallelize_module(
        copy.deepcopy(alone).to(device), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    x = torch.randn(3, 6)
    expected, got = alone(x), shared(x.to(device))
    torch.testing.assert_close(got.cpu(), expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(alone.parameters(), shared.parameters(), strict=True):
        assert isinstance(b.grad, DTensor) and a.grad is not None
        torch.testing.assert_close(b.grad.full_tensor().cpu(), a.grad)


# -- FSDP2 and checkpoints -----------------------------------------------------------------------


def sharded(device: torch.device, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("tpu", (SIZE,))
    torch.manual_seed(0)
    model = Model().to(device)
    for layer in (model.layers[0], model.layers[2]):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}


def check_fsdp2(rank: int, device: torch.device) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    for options in ({}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy()}):
        model = sharded(device, **options)
        parameters = list(model.parameters())
        assert all(isinstance(p, DTensor) for p in parameters)
        train(model, torch.optim.AdamW(parameters, 1e-2), my_part(rank), device)
        close(whole(model), trained_alone())
    model = sharded(device, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = train(model, optimizer, my_part(rank), device)
    assert model(torch.ones(1, 6, device=device)).dtype is torch.bfloat16
    assert all(loss < 3 for loss in losses)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() > 0 and norm.device.type == "tpu"


def check_fsdp2_from_the_meta_device(rank: int, device: torch.device) -> None:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        layer = nn.Linear(8, 8)
    fully_shard(layer, mesh=init_device_mesh("tpu", (SIZE,)))
    layer.to_empty(device=device)
    layer.reset_parameters()
    weight = whole(layer)["weight"]
    bound = 8**-0.5
    assert 0 < weight.abs().max().item() <= bound and not torch.equal(weight[:4], weight[4:])
    layer(torch.ones(1, 8, device=device)).sum().backward()


def check_distributed_checkpoint(rank: int, device: torch.device) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    path: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(path, 0)
    model = sharded(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer, my_part(rank), device)
    states = get_state_dict(model, optimizer)
    checkpoint.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path[0])

    again = sharded(device)
    fresh = torch.optim.AdamW(again.parameters(), 1e-2)
    model_state, optimizer_state = get_state_dict(again, fresh)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(loaded, checkpoint_id=path[0])
    set_state_dict(again, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for name, value in whole(model).items():
        assert torch.equal(value, whole(again)[name]), name
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        moments = optimizer.state[a]["exp_avg_sq"], fresh.state[b]["exp_avg_sq"]
        assert torch.equal(moments[0].to_local(), moments[1].to_local())
        assert moments[1].to_local().device.type == "tpu"

    plain = Model().state_dict()  # the same file, into one process's model on the CPU
    checkpoint.load({"model": plain}, checkpoint_id=path[0])
    for name, value in whole(model).items():
        assert torch.equal(plain[name], value.cpu()), name


def check_checkpoint_of_plain_tensors(rank: int, device: torch.device) -> None:
    import torch.distributed.checkpoint as checkpoint

    path: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(path, 0)
    state = Model().to(device).state_dict()
    checkpoint.save(state, checkpoint_id=path[0])
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    checkpoint.load(target, checkpoint_id=path[0])
    for name, value in state.items():
        assert target[name].device == device and torch.equal(target[name], value), name


def check_fsdp2_names_the_extension(rank: int, device: torch.device) -> None:
    raises(
        NotImplementedError, "bridge.device.build", lambda: sharded(device)(torch.ones(1, 6, device=device))
    )


if __name__ == "__main__":
    main()

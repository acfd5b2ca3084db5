"""Parts of sequences on several ranks: against indexing by positions, which are written out here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from bridge import get_pallas_mesh
from bridge.ranks import RankError, run
from bridge.ranks.mesh import mesh_of_ranks
from tpu_kernels import sequence_positions, shard_sequence, unshard_sequence
from tpu_kernels.ring_attention.layouts import LAYOUTS, Layout

# What torch itself warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
)  # fmt: skip
OTHER_MESHES = ("permuted", "outer and inner", "inner and outer", "one of two")


def positions_of(place: int, ranks: int, length: int, layout: Layout) -> list[int]:
    """The positions that a rank has, padding included."""
    if layout == "contiguous":
        count = -(-length // ranks)
        return list(range(place * count, (place + 1) * count))
    half = -(-length // (2 * ranks))
    later = 2 * ranks - 1 - place
    return [*range(place * half, (place + 1) * half), *range(later * half, (later + 1) * half)]


def part_of(x: torch.Tensor, dim: int, positions: list[int], fill: float = 0) -> torch.Tensor:
    """The elements at these positions; behind the end there is padding."""
    missing = max(positions, default=-1) + 1 - x.shape[dim]
    shape = list(x.shape)
    shape[dim] = max(missing, 0)
    padded = torch.cat([x, torch.full(shape, fill).to(x)], dim)
    return padded.index_select(dim, torch.tensor(positions, dtype=torch.long, device=x.device))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of which none is like its neighbours, and that need all bits of their dtype."""
    count = torch.Size(shape).numel()
    if dtype.is_floating_point:
        return torch.linspace(-1, 1, count, dtype=torch.float64).exp().to(dtype).view(shape)
    if dtype == torch.int64:
        return (torch.arange(count) * (2**33 + 12345) - 2**40).view(shape)
    return torch.randint(-9, 10, shape).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_parts_and_positions(size: int, layout: Layout) -> None:
    """They are cut without communication, so all lengths are quick to look at."""

    def check() -> None:
        place, mesh = dist.get_rank(), get_pallas_mesh("x")
        for length in range(20):
            expected = positions_of(place, size, length, layout)
            got = sequence_positions(length, mesh, "x", layout)
            assert (got.dtype, got.tolist()) == (torch.int64, expected)
            x = torch.arange(2 * length * 3).view(2, length, 3)
            for fill in (0, -100):
                part = shard_sequence(x, mesh, "x", -2, layout, fill=fill)
                assert torch.equal(part, part_of(x, 1, expected, fill)), (length, fill)
                assert part.is_contiguous()

    run(check, size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_there_and_back(size: int, layout: Layout, device: torch.device) -> None:
    def check() -> None:
        mesh = get_pallas_mesh("x")
        for i, dtype in enumerate(DTYPES):
            x, dim = numbers(3, 13, 2, dtype=dtype).to(device), (1, 0, 2)[i % 3]
            part = shard_sequence(x, mesh, "x", dim, layout)
            whole = unshard_sequence(part, mesh, "x", dim, x.shape[dim], layout)
            assert (whole.dtype, whole.device.type) == (dtype, device.type)
            assert whole.is_contiguous()
            assert torch.equal(whole, x), dtype

    run(check, size)


def _mesh(which: str) -> tuple[Any, Any, int, int]:
    """A mesh of four ranks, an axis, and this rank's place among how many along it."""
    rank = dist.get_rank()
    if which == "permuted":
        order = [2, 0, 3, 1]
        return DeviceMesh("cpu", order, mesh_dim_names=("a",)), "a", order.index(rank), 4
    mesh = get_pallas_mesh(("a", "b"), (2, 2))
    if which == "outer and inner":
        return mesh, ("a", "b"), rank, 4
    if which == "inner and outer":
        return mesh, ("b", "a"), 2 * (rank % 2) + rank // 2, 4
    return mesh, "b", rank % 2, 2


@pytest.mark.parametrize("which", OTHER_MESHES)
def test_meshes(which: str) -> None:
    def check() -> None:
        mesh, axis, place, size = _mesh(which)
        x = numbers(2, 13)
        expected = positions_of(place, size, 13, "zigzag")
        assert sequence_positions(13, mesh, axis, "zigzag").tolist() == expected
        part = shard_sequence(x, mesh, axis, 1, "zigzag")
        assert torch.equal(part, part_of(x, 1, expected))
        assert torch.equal(unshard_sequence(part, mesh, axis, 1, 13, "zigzag"), x)

    run(check, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout: Layout, dtype: torch.dtype) -> None:
    """Of unshard: the sum of all ranks' cotangents. Of shard: zero but for this rank's part. And second ones.

    Numbers are small and whole, so that sums are exact.
    """
    size, length = 2, 7

    def check() -> None:
        place, mesh = dist.get_rank(), get_pallas_mesh("x")
        own = positions_of(place, size, length, layout)
        weights = [torch.randint(-3, 4, (2, length)).to(dtype) for _ in range(size)]  # the same on each
        x = torch.randint(-3, 4, (2, length)).to(dtype).requires_grad_()
        part = shard_sequence(x, mesh, "x", 1, layout)
        whole = unshard_sequence(part, mesh, "x", 1, length, layout)
        loss = (whole**2 * weights[place]).sum()
        of_part, of_x = torch.autograd.grad(loss, (part, x), create_graph=True)
        expected = 2 * x.detach() * sum(weights)
        assert torch.equal(of_part.detach(), part_of(expected, 1, own))
        here = torch.zeros(length, dtype=torch.bool)
        here[[p for p in own if p < length]] = True
        assert torch.equal(of_x.detach(), expected * here)
        # Each rank's gradient depends on the cotangents of all.
        (second,) = torch.autograd.grad(of_part.sum(), x)
        assert torch.equal(second, 2 * sum(weights) * here)

    run(check, size)


def test_a_part_is_no_memory_of_the_whole() -> None:
    def check() -> None:
        x = torch.zeros(8)
        for layout in LAYOUTS:
            shard_sequence(x, get_pallas_mesh("x"), "x", 0, layout).add_(1)
        assert not x.any()

    run(check, 2)


def test_one_process_without_a_group() -> None:
    mesh = mesh_of_ranks([0], "x")
    x = numbers(5, 2)
    part = shard_sequence(x, mesh, "x", 0, "zigzag")
    assert torch.equal(part, torch.cat([x, torch.zeros(1, 2)]))
    assert torch.equal(unshard_sequence(part, mesh, "x", 0, 5, "zigzag"), x)


def test_compiled() -> None:
    """The rank's place is a constant of the graph, and each rank has its own."""

    def check() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))

        def step(x: torch.Tensor) -> torch.Tensor:
            part = shard_sequence(x, mesh, "x", 0, "zigzag")
            part = part * (1 + sequence_positions(7, mesh, "x", "zigzag"))
            return unshard_sequence(part, mesh, "x", 0, 7, "zigzag")

        x = torch.arange(7.0)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), x * (1 + torch.arange(7)))
        y = x.clone().requires_grad_()
        compiled(y).sum().backward()
        assert y.grad is not None
        assert torch.equal(y.grad, step_gradient(dist.get_rank()))

    def step_gradient(place: int) -> torch.Tensor:
        here = torch.tensor([p for p in positions_of(place, 2, 7, "zigzag") if p < 7])
        return torch.zeros(7).index_copy(0, here, 2 * (1 + here).float())

    run(check, 2)


def _mistakes(mesh: Any) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    x = torch.zeros(4, 6)
    nothing: Any = None
    wrong: Any = "striped"
    return [
        (
            lambda: shard_sequence(nothing, mesh, "x", 0, layout="zigzag"),
            TypeError,
            "torch.Tensor, got NoneType",
        ),
        (
            lambda: shard_sequence(x, nothing, "x", 0, layout="zigzag"),
            TypeError,
            "get_pallas_mesh, or a DeviceMesh",
        ),
        (
            lambda: shard_sequence(x, mesh, "z", 0, layout="zigzag"),
            ValueError,
            "one of the mesh's axes, 'x', .* got 'z'",
        ),
        (lambda: shard_sequence(x, mesh, ("x", "x"), 0, layout="zigzag"), ValueError, "two of them; got"),
        (
            lambda: shard_sequence(x, mesh, nothing, 0, layout="zigzag"),
            TypeError,
            r"\(outer, inner\); got None",
        ),
        (lambda: shard_sequence(x, mesh, "x", 2, layout="zigzag"), ValueError, r"shape \[4, 6\], got 2"),
        (
            lambda: shard_sequence(x, mesh, "x", True, layout="zigzag"),
            TypeError,
            "dim must be an int, got True",
        ),
        (lambda: shard_sequence(x, mesh, "x", 0, wrong), ValueError, "'contiguous', 'zigzag', got 'striped'"),
        (
            lambda: unshard_sequence(x, mesh, "x", 0, 9, layout="zigzag"),
            ValueError,
            "each of 2 ranks has 6 positions .*got",
        ),
        (
            lambda: unshard_sequence(x, mesh, "x", 0, -1, layout="zigzag"),
            ValueError,
            "length must be 0 or more, got -1",
        ),
        (
            lambda: unshard_sequence(x, mesh, "x", 0, nothing, layout="zigzag"),
            TypeError,
            "length must be an int, got None",
        ),
        (lambda: sequence_positions(3, mesh, "x", wrong), ValueError, "got 'striped'"),
    ]


def test_mistakes() -> None:
    def check() -> None:
        for call, error, text in _mistakes(get_pallas_mesh("x")):
            with pytest.raises(error, match=text):
                call()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        whole = DTensor.from_local(torch.zeros(4), mesh, [Replicate()])
        with pytest.raises(TypeError, match=r"got a DTensor; pass x.to_local\(\)"):
            shard_sequence(whole, mesh, "x", 0, layout="zigzag")
        with pytest.raises(ValueError, match="a DeviceMesh must have names"):
            shard_sequence(torch.zeros(4), DeviceMesh("cpu", [0, 1]), "x", 0, layout="zigzag")

    run(check, 2)


def test_a_rank_that_is_not_in_the_mesh() -> None:
    def check() -> None:
        group: Any = dist.new_group([0])
        mesh = mesh_of_ranks(dist.get_process_group_ranks(group) if dist.get_rank() == 0 else [0], "x")
        shard_sequence(torch.zeros(4), mesh, "x", 0, layout="zigzag")

    with pytest.raises(RankError, match=r"the mesh has the ranks \(0,\), and not this one, 1"):
        run(check, 2)


@pytest.mark.parametrize("differing", ["layout", "length"])
def test_ranks_that_put_together_other_wholes(differing: str) -> None:
    def check() -> None:
        first = dist.get_rank() == 0
        length = 8 if differing == "layout" or first else 7
        layout: Any = "zigzag" if differing == "layout" and first else "contiguous"
        unshard_sequence(torch.zeros(4), get_pallas_mesh("x"), "x", 0, length, layout)

    with pytest.raises(RankError, match="the ranks of a mesh must make the same calls"):
        run(check, 2)

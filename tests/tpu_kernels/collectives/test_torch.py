"""The collectives as torch calls them: against torch.distributed, and what one process computes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import bridge
from bridge import get_pallas_mesh
from bridge.ranks import RankError, run
from tpu_kernels.collectives import api

# What torch itself warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

SIZES = [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)]
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "ppermute")


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers so small that sums of eight are exact in each dtype, in any order."""
    drawn = np.random.default_rng(seed).integers(-15, 16, shape)
    return torch.from_numpy(drawn).to(dtype)


def ours(kind: str, x: torch.Tensor, mesh: Any, axis: str, *options: int) -> torch.Tensor:
    return getattr(api, kind)(x, mesh, axis, *options)


def torchs(kind: str, x: torch.Tensor, *options: int) -> torch.Tensor:
    """The same by torch.distributed over all ranks, with its own gradient."""
    world: Any = dist.group.WORLD
    if kind == "all_gather":
        return functional.all_gather_tensor_autograd(x, options[0], world)
    if kind == "reduce_scatter":
        return functional.reduce_scatter_tensor_autograd(x, "sum", options[0], world)
    size = dist.get_world_size()
    if kind == "all_to_all":
        split_dim, concat_dim = options
        parts = torch.stack(x.chunk(size, split_dim)) if x.numel() else x.new_zeros(0)
        moved = functional.all_to_all_single_autograd(parts, None, None, world)
        return torch.cat(moved.unbind(), concat_dim)
    everything = functional.all_gather_tensor_autograd(x[None].contiguous(), 0, world)
    return everything[(dist.get_rank() - options[0]) % size]


def alone(kind: str, parts: Sequence[torch.Tensor], place: int, *options: int) -> torch.Tensor:
    """What one process computes for the rank at a place of the axis, from all ranks' tensors there."""
    size = len(parts)
    if kind == "all_gather":
        return torch.cat(list(parts), options[0])
    if kind == "reduce_scatter":
        return (
            sum(part.chunk(size, options[0])[place] for part in parts[1:])
            + parts[0].chunk(size, options[0])[place]
        )
    if kind == "all_to_all":
        return torch.cat([part.chunk(size, options[0])[place] for part in parts], options[1])
    return parts[(place - options[0]) % size]


def cases(size: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Kinds, shapes and options; sizes are odd where they may be."""
    return [
        ("all_gather", (3, 5), (0,)),
        ("all_gather", (2, 1, 3), (-1,)),
        ("all_gather", (7,), (0,)),
        ("reduce_scatter", (3 * size, 5), (0,)),
        ("reduce_scatter", (2, 3, size), (2,)),
        ("reduce_scatter", (size,), (0,)),
        ("all_to_all", (3 * size, 5), (0, 0)),
        ("all_to_all", (3, 2 * size, 1), (1, -1)),
        ("all_to_all", (size,), (0, 0)),
        ("ppermute", (3, 5), (1,)),
        ("ppermute", (1, 129), (-2,)),
        ("ppermute", (3,), (2 * size,)),
    ]


@pytest.mark.parametrize("size", SIZES)
def test_results_and_gradients_are_those_of_torch(size: int, device: torch.device) -> None:
    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh("x")
        for kind, shape, options in cases(size):
            x = numbers(rank, *shape).to(device).requires_grad_()
            y = numbers(rank, *shape).requires_grad_()
            got, expected = ours(kind, x, mesh, "x", *options), torchs(kind, y, *options)
            assert got.device.type == device.type
            assert got.is_contiguous()
            assert torch.equal(got.cpu(), expected), (kind, shape)
            weights = numbers(100 + rank, *expected.shape)
            got.backward(weights.to(device))
            expected.backward(weights)
            assert x.grad is not None and y.grad is not None
            assert torch.equal(x.grad.cpu(), y.grad), (kind, shape)

    run(check, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_other_dtypes(size: int, dtype: torch.dtype) -> None:
    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh("x")
        for kind, shape, options in cases(size)[::3]:
            parts = [numbers(r, *shape, dtype=dtype) for r in range(size)]
            got = ours(kind, parts[rank], mesh, "x", *options)
            assert torch.equal(got, alone(kind, parts, rank, *options)), (kind, shape)

    run(check, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    """Of n terms: n - 1 additions in float32, and one rounding to the dtype."""
    size = 4

    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh("x")
        torch.manual_seed(0)
        parts = torch.randn(size, size * 5, 33).to(dtype)
        got = api.reduce_scatter(parts[rank], mesh, "x").double()
        own = parts.double().chunk(size, 1)[rank]
        exact, magnitude = own.sum(0), own.abs().sum(0)
        u = torch.finfo(torch.float32).eps / 2
        in_float32 = (size - 1) * u * magnitude * (1 + size * u)
        rounding = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps / 2
        assert bool(((got - exact).abs() <= in_float32 + rounding * (exact.abs() + in_float32)).all())

    run(check, size)


@pytest.mark.slow
def test_parts_of_several_tiles() -> None:
    """The last tiles are smaller, in both dimensions."""

    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh("x")
        for shape in ((2 * 1030, 130), (2, 2500), (2 * 70, 2500)):
            for dtype in (torch.float32, torch.bfloat16):
                parts = [numbers(r, *shape, dtype=dtype) for r in range(2)]
                got = api.reduce_scatter(parts[rank], mesh, "x")
                assert torch.equal(got, alone("reduce_scatter", parts, rank, 0))

    run(check, 2)


def test_nothing_and_numbers() -> None:
    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh("x")
        assert api.all_gather(torch.zeros(0, 3), mesh, "x", 1).shape == (0, 6)
        assert api.reduce_scatter(torch.zeros(4, 0), mesh, "x").shape == (2, 0)
        assert api.all_to_all(torch.zeros(4, 0), mesh, "x", 0, 1).shape == (2, 0)
        assert api.ppermute(torch.zeros(0), mesh, "x").shape == (0,)
        moved = api.ppermute(torch.tensor(float(rank)), mesh, "x")
        assert (moved.shape, moved.item()) == ((), 1.0 - rank)
        x = torch.ones(3)
        same = api.ppermute(x, mesh, "x", 4)
        assert torch.equal(same, x)
        assert same.data_ptr() != x.data_ptr()

    run(check, 2)


def _meshes(which: str) -> tuple[Any, list[list[int]]]:
    """A mesh of four ranks, and the ranks along each axis."""
    order = {"permuted": [0, 2, 1, 3], "2x2": [[0, 1], [2, 3]], "2x2 permuted": [[3, 0], [1, 2]]}[which]
    if which == "2x2":
        return get_pallas_mesh(("a", "b"), (2, 2)), np.array(order).tolist()
    names = ("a", "b")[: np.array(order).ndim]
    return DeviceMesh("cpu", order, mesh_dim_names=names), np.array(order).tolist()


@pytest.mark.parametrize("which", ["permuted", "2x2", pytest.param("2x2 permuted", marks=pytest.mark.slow)])
def test_axes_of_meshes(which: str) -> None:
    def check() -> None:
        mesh, order = _meshes(which)
        places = np.array(order)
        me = tuple(int(i[0]) for i in np.where(places == dist.get_rank()))
        for number, axis in enumerate(("a", "b")[: places.ndim]):
            line = [int(r) for r in np.moveaxis(places, number, -1)[tuple(np.delete(me, number))].flat]
            size, place = len(line), me[number]
            for kind, shape, options in cases(size)[::3]:
                parts = [numbers(r, *shape).requires_grad_() for r in line]
                weights = [numbers(10 + r, *alone(kind, parts, 0, *options).shape) for r in line]
                total = torch.zeros(())
                for i, weight in enumerate(weights):
                    total = total + (alone(kind, parts, i, *options) * weight).sum()
                total.backward()
                x = parts[place].detach().clone().requires_grad_()
                got = ours(kind, x, mesh, axis, *options)
                assert torch.equal(got, alone(kind, parts, place, *options)), (kind, axis)
                got.backward(weights[place])
                expected = parts[place].grad
                assert x.grad is not None and expected is not None
                assert torch.equal(x.grad, expected), (kind, axis)

    run(check, 4)


def _with_halo(
    parts: Sequence[torch.Tensor], place: int, options: tuple[int, int, int, bool]
) -> torch.Tensor:
    """What one process computes alone."""
    before, after, dim, wrap = options
    size, n = len(parts), parts[0].shape[dim]
    left = parts[(place - 1) % size].narrow(dim, n - before, before)
    right = parts[(place + 1) % size].narrow(dim, 0, after)
    left = left if wrap or place > 0 else torch.zeros_like(left)
    right = right if wrap or place < size - 1 else torch.zeros_like(right)
    return torch.cat([left, parts[place], right], dim)


@pytest.mark.parametrize("size", SIZES)
def test_halos(size: int, device: torch.device) -> None:
    cases: list[tuple[tuple[int, ...], tuple[int, int, int, bool]]] = [
        ((5, 3), (2, 1, 0, False)),
        ((2, 3, 4), (1, 3, 1, True)),
        ((3,), (0, 2, 0, False)),
        ((3, 2), (1, 0, -2, True)),
        ((3, 2), (0, 0, 0, False)),
    ]

    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh("x")
        for shape, options in cases:
            parts = [numbers(r, *shape).requires_grad_() for r in range(size)]
            results = [_with_halo(parts, r, options) for r in range(size)]
            weights = [numbers(100 + r, *result.shape) for r, result in enumerate(results)]
            torch.autograd.backward(results, weights)
            x = numbers(rank, *shape).to(device).requires_grad_()
            before, after, dim, wrap = options
            got = api.halo_exchange(x, mesh, "x", before, after, dim, wrap=wrap)
            assert torch.equal(got.cpu(), results[rank]), (shape, options)
            with bridge.interpret("reference"):
                same = api.halo_exchange(x.detach(), mesh, "x", before, after, dim, wrap=wrap)
            assert torch.equal(same, got)
            got.backward(weights[rank].to(device))
            expected = parts[rank].grad
            assert x.grad is not None and expected is not None
            assert torch.equal(x.grad.cpu(), expected), (shape, options)

    run(check, size)


def test_second_gradients() -> None:
    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh("x")
        x = numbers(rank, 2, 3).requires_grad_()
        cube = api.all_gather(x, mesh, "x") ** 3
        (first,) = torch.autograd.grad(cube.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.equal(first.detach(), 2 * 3 * x.detach() ** 2)  # on each of two ranks
        assert second is not None
        assert torch.equal(second, 2 * 6 * x.detach())

    run(check, 2)


def test_many_calls_of_two_collectives_in_turns() -> None:
    size = 4

    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh("x")
        x, y = numbers(rank, 2, 3), numbers(rank, size, 3)
        for _ in range(20):
            x = api.ppermute(x, mesh, "x")
            y = api.all_to_all(y, mesh, "x")
        assert torch.equal(x, numbers((rank - 20) % size, 2, 3))
        assert torch.equal(y, numbers(rank, size, 3))  # there and back, ten times

    run(check, size)


def test_compiled() -> None:
    def check() -> None:
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))

        def step(x: torch.Tensor) -> torch.Tensor:
            y = api.all_gather(x * 2, mesh, "x").sin()
            z = api.all_to_all(y, mesh, "x", 0, 1)
            return api.reduce_scatter(y, mesh, "x").sum() + (api.ppermute(z, mesh, "x", -1) ** 2).sum()

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        x = numbers(rank, 2, 3).requires_grad_()
        y = x.detach().clone().requires_grad_()
        got, expected = compiled(x), step(y)
        torch.testing.assert_close(got, expected)
        got.backward()
        expected.backward()
        torch.testing.assert_close(x.grad, y.grad)

    run(check, 2)


def test_reference_mode() -> None:
    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh("x")
        for kind, shape, options in cases(2)[::3]:
            parts = [numbers(r, *shape) for r in range(2)]
            with bridge.interpret("reference"):
                got = ours(kind, parts[rank], mesh, "x", *options)
            assert torch.equal(got, alone(kind, parts, rank, *options)), kind

    run(check, 2)


def _mistakes(mesh: Any) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    x = torch.zeros(3, 4)
    doubles = x.double()
    nothing: Any = None
    return [
        (
            lambda: api.all_gather(doubles, mesh, "x"),
            TypeError,
            "x must be float32, bfloat16, int32, got float64",
        ),
        (lambda: api.all_gather(nothing, mesh, "x"), TypeError, "torch.Tensor, got NoneType"),
        (lambda: api.all_gather(x, mesh, "z"), ValueError, "one of the mesh's axes, 'x', got 'z'"),
        (
            lambda: api.all_gather(x, nothing, "x"),
            TypeError,
            "get_pallas_mesh, or a DeviceMesh, got NoneType",
        ),
        (lambda: api.all_gather(x, mesh, "x", 2), ValueError, r"dim must be from -2 to 1, .*\[3, 4\], got 2"),
        (lambda: api.all_gather(x[0, 0], mesh, "x"), ValueError, r"got a number; pass x\[None\]"),
        (lambda: api.all_gather(x, mesh, "x", 0.5), TypeError, "dim must be an int, got 0.5"),  # pyright: ignore
        (
            lambda: api.reduce_scatter(x, mesh, "x"),
            ValueError,
            r"multiple of 2, .*got shape \[3, 4\]; pad it",
        ),
        (lambda: api.all_to_all(x, mesh, "x", 0, 1), ValueError, "along split_dim=0 must be a multiple of 2"),
        (lambda: api.all_to_all(x, mesh, "x", 1, -3), ValueError, "concat_dim must be from -2 to 1"),
        (lambda: api.halo_exchange(x, mesh, "x", 4, 0), ValueError, "before must be from 0 to 3, .* got 4"),
        (lambda: api.halo_exchange(x, mesh, "x", 0, -1), ValueError, "after must be from 0 to 3, .* got -1"),
        (lambda: api.ppermute(x, mesh, "x", True), TypeError, "shift must be an int, got True"),
    ]


def test_mistakes() -> None:
    def check() -> None:
        mesh = get_pallas_mesh("x")
        for call, error, text in _mistakes(mesh):
            with pytest.raises(error, match=text):
                call()
        unnamed = DeviceMesh("cpu", [0, 1])
        with pytest.raises(ValueError, match="a DeviceMesh must have names"):
            api.all_gather(torch.zeros(2), unnamed, "x")
        named = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        whole = DTensor.from_local(torch.zeros(2), named, [Replicate()])
        with pytest.raises(TypeError, match=r"got a DTensor; pass x.to_local\(\)"):
            api.all_gather(whole, named, "x")

    run(check, 2)


def test_ranks_that_disagree() -> None:
    def check() -> None:
        rows = 2 + dist.get_rank()
        api.all_gather(torch.zeros(rows, 2), get_pallas_mesh("x"), "x")

    with pytest.raises(RankError, match="the ranks of a mesh must make the same calls"):
        run(check, 2)


def test_an_op_for_each_mesh_and_axis() -> None:
    """Made once, by whichever rank; the names are the same in another run."""

    def check() -> list[int]:
        square = get_pallas_mesh(("a", "b"), (2, 2))
        line = get_pallas_mesh("a")
        found = [
            api._prepared("ppermute", torch.zeros(1), *at)[0]
            for at in ((square, "a"), (square, "b"), (line, "a"))
        ]
        return [id(op) for op in found]

    first, second = run(check, 4), run(check, 4)
    assert len(set(first[0])) == 3
    assert all(found == first[0] for found in itertools.chain(first, second))

"""Rows in numbers that are data, as torch calls it: against one process alone, and torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import bridge
from bridge import get_pallas_mesh
from bridge.ranks import RankError, run
from tpu_kernels import ragged_all_to_all

# What torch itself warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

SIZES = [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)]
Counts = list[list[int]]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-99, 100, shape)).to(dtype)


def split_up(seed: int, size: int, rows: int) -> Counts:
    """Counts of some of `rows` rows at each rank, many of them 0."""
    random = np.random.default_rng(seed)
    return [
        np.diff(np.sort(random.integers(0, random.integers(1, rows + 2), size)), prepend=0).tolist()
        for _ in range(size)
    ]


def alone(
    xs: Sequence[torch.Tensor], counts: Counts, place: int, output_rows: int
) -> tuple[torch.Tensor, list[int]]:
    """What the rank at a place gets, from all ranks' rows."""
    parts = [x[: sum(own)].split(own)[place] for x, own in zip(xs, counts, strict=True)]
    rows = torch.cat(parts)
    rest = rows.new_zeros(output_rows - len(rows), *rows.shape[1:])
    return torch.cat([rows, rest]), [own[place] for own in counts]


def check_rows(
    counts: Counts, shape: tuple[int, ...], output_rows: int, device: str, dtype: torch.dtype = torch.float32
) -> None:
    """On a rank: rows, counts and gradients are the same bit for bit, as nothing is computed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = [numbers(r, *shape, dtype=dtype) for r in range(size)]
    floating = dtype.is_floating_point
    leaves = [x.clone().requires_grad_(floating) for x in xs]
    results = [alone(leaves, counts, r, output_rows) for r in range(size)]
    x = xs[rank].clone().to(device).requires_grad_(floating)
    own = torch.tensor(counts[rank], device=device)
    y, received = ragged_all_to_all(x, own, get_pallas_mesh("x"), "x", output_rows)
    assert (y.dtype, y.device.type, received.dtype) == (dtype, device, torch.int32)
    assert torch.equal(y.detach().cpu(), results[rank][0].detach())
    assert received.tolist() == results[rank][1]
    if floating:
        weights = [numbers(100 + r, *results[0][0].shape, dtype=dtype) for r in range(size)]
        torch.autograd.backward([result for result, _ in results], weights)
        y.backward(weights[rank].to(device))
        expected = leaves[rank].grad
        assert x.grad is not None and expected is not None
        assert torch.equal(x.grad.cpu(), expected)


@pytest.mark.parametrize("size", SIZES)
def test_rows_counts_and_gradients(size: int) -> None:
    def check() -> None:
        cases = [
            ((7, 5), torch.float32, "tpu"),
            ((9,), torch.int32, "cpu"),
            ((6, 2, 128), torch.bfloat16, "cpu"),
        ]
        for seed, (shape, dtype, device) in enumerate(cases if size < 4 else cases[:2]):
            check_rows(split_up(seed, size, shape[0]), shape, size * shape[0], device, dtype)

    run(check, size)


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(st.integers(0, 2**31))
def test_any_counts(seed: int) -> None:
    """They are data: all examples are one compiled program."""
    run(check_rows, 2, split_up(seed, 2, 13), (13, 3), 26, "cpu")


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from([2, 4]), st.integers(0, 2**31))
def test_any_counts_at_length(size: int, seed: int) -> None:
    run(check_rows, size, split_up(seed, size, 37), (37, 3), 37 * size, "cpu")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_extremes(size: int) -> None:
    """Nothing at all; everything to one rank, which has just enough room; everything to itself."""
    nothing = [[0] * size] * size
    to_first = [[5] + [0] * (size - 1)] * size
    to_last = [[0] * (size - 1) + [5]] * size
    to_itself = [[5 * (i == j) for j in range(size)] for i in range(size)]

    def check() -> None:
        for counts in (nothing, to_first, to_last, to_itself):
            check_rows(counts, (5, 2), 5 * size, "cpu")

    run(check, size)


def test_other_counts_compile_nothing() -> None:
    def check() -> list[int]:
        mesh, x, compiles = get_pallas_mesh("x"), torch.ones(9, 2), []
        for step in range(4):
            ragged_all_to_all(x, torch.tensor([step, 2 * step]), mesh, "x", 18)
            dist.barrier()  # one rank compiles for all
            compiles.append(sum(bridge.stats().compiles.values()))
        return compiles

    first, *others = run(check, 2)[0]
    assert others == [first] * 3


def test_as_torch_does_it() -> None:
    """Against `all_to_all_single` with split sizes, which must be known to the host."""
    counts = [[2, 3], [4, 0]]

    def check() -> None:
        rank = dist.get_rank()
        x, y = numbers(rank, 5, 3).requires_grad_(), numbers(rank, 5, 3).requires_grad_()
        got, received = ragged_all_to_all(x, torch.tensor(counts[rank]), get_pallas_mesh("x"), "x", 8)
        takes, gives = [own[rank] for own in counts], counts[rank]
        world: Any = dist.group.WORLD
        expected = functional.all_to_all_single_autograd(y[: sum(gives)], takes, gives, world)
        total = int(received.sum())
        assert torch.equal(got[:total], expected)
        (got**2).sum().backward()
        (expected**2).sum().backward()
        assert x.grad is not None and y.grad is not None
        assert torch.equal(x.grad, y.grad)

    run(check, 2)


def test_second_gradients() -> None:
    def check() -> None:
        rank = dist.get_rank()
        x = numbers(rank, 4, 2).requires_grad_()
        counts = torch.tensor([1, 2])
        cube = ragged_all_to_all(x, counts, get_pallas_mesh("x"), "x", 6)[0] ** 3
        (first,) = torch.autograd.grad(cube.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        sent = torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None]
        assert torch.equal(first.detach(), 3 * x.detach() ** 2 * sent)
        assert torch.equal(second, 36 * x.detach() ** 3 * sent)

    run(check, 2)


def test_compiled() -> None:
    """Counts that are wrong do no harm where they can't be checked: in a compiled function, too."""

    def check() -> None:
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))

        def step(x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, received = ragged_all_to_all(x * 2, counts, mesh, "x", 5)
            return y.sin(), received

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for counts in ([1, 2], [2, 0]):
            x, y = numbers(rank, 3, 2).requires_grad_(), numbers(rank, 3, 2).requires_grad_()
            got, expected = compiled(x, torch.tensor(counts)), step(y, torch.tensor(counts))
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
            got[0].sum().backward()
            expected[0].sum().backward()
            assert x.grad is not None and y.grad is not None
            assert torch.equal(x.grad, y.grad)

        # Of each rank's rows, all go to rank 0; one finds no room there, and has a gradient of 0.
        x = numbers(rank, 3, 2).requires_grad_()
        y, received = compiled(x, torch.tensor([2**31 - 1, 7], dtype=torch.int32))
        assert received.tolist() == ([3, 3] if rank == 0 else [0, 0])
        everything = torch.cat([numbers(0, 3, 2), numbers(1, 3, 2)])[:5]
        assert torch.equal(y, (everything * 2).sin() if rank == 0 else torch.zeros(5, 2))
        y.sum().backward()
        kept = torch.tensor([[1.0], [1.0], [1.0 - rank]])
        assert x.grad is not None
        torch.testing.assert_close(x.grad, (2 * x.detach()).cos() * 2 * kept)
        y, received = compiled(x, torch.tensor([-4, 2]))
        assert received.tolist() == ([0, 0] if rank == 0 else [2, 2])

    run(check, 2)


def test_an_axis_of_a_mesh() -> None:
    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh(("a", "b"), (2, 2))
        for axis, line in (("a", [rank % 2, rank % 2 + 2]), ("b", [rank // 2 * 2, rank // 2 * 2 + 1])):
            pairs = [split_up(r, 2, 6)[0] for r in range(4)]
            got, received = ragged_all_to_all(numbers(rank, 6, 2), torch.tensor(pairs[rank]), mesh, axis, 12)
            xs = [numbers(r, 6, 2) for r in line]
            expected, takes = alone(xs, [pairs[r] for r in line], line.index(rank), 12)
            assert torch.equal(got, expected)
            assert received.tolist() == takes

    run(check, 4)


def test_reference_mode() -> None:
    def check() -> None:
        with bridge.interpret("reference"):
            check_rows(split_up(5, 2, 7), (7, 2), 14, "tpu", torch.bfloat16)

    run(check, 2)


def test_nothing() -> None:
    def check() -> None:
        mesh, rank = get_pallas_mesh("x"), dist.get_rank()
        x = torch.zeros(0, 3, requires_grad=True)
        y, received = ragged_all_to_all(x, torch.tensor([0, 0]), mesh, "x", 4)
        assert torch.equal(y, torch.zeros(4, 3))
        assert received.tolist() == [0, 0]
        y.sum().backward()
        y, received = ragged_all_to_all(torch.zeros(5, 0), torch.tensor([rank, 2]), mesh, "x", 4)
        assert y.shape == (4, 0)
        assert received.tolist() == ([0, 1] if rank == 0 else [2, 2])
        x = torch.ones(5, 2, requires_grad=True)
        y, received = ragged_all_to_all(x, torch.tensor([0, 0]), mesh, "x", 0)
        assert y.shape == (0, 2)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros(5, 2))

    run(check, 2)


def _mistakes(mesh: Any) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    x, counts = torch.zeros(3, 4), torch.tensor([1, 2])
    anything: Any = 2.5
    return [
        (
            lambda: ragged_all_to_all(x.double(), counts, mesh, "x", 4),
            TypeError,
            "x must be float32, bfloat16, int32, got float64",
        ),
        (
            lambda: ragged_all_to_all(x, counts.float(), mesh, "x", 4),
            TypeError,
            "send_counts must be integers, got torch.float32",
        ),
        (lambda: ragged_all_to_all(x, anything, mesh, "x", 4), TypeError, "torch.Tensor, got float"),
        (
            lambda: ragged_all_to_all(x, torch.tensor([1, 2, 0]), mesh, "x", 4),
            ValueError,
            r"send_counts must be \[2\], a count for each rank along 'x', got \[3\]",
        ),
        (lambda: ragged_all_to_all(x, counts.to("tpu"), mesh, "x", 4), ValueError, "on one device, got cpu"),
        (lambda: ragged_all_to_all(x, counts, mesh, "x", anything), TypeError, "output_rows must be an int"),
        (lambda: ragged_all_to_all(x, counts, mesh, "x", -1), ValueError, "not be negative, got -1"),
        (lambda: ragged_all_to_all(x[0, 0], counts, mesh, "x", 4), ValueError, "got a number; pass x"),
        (lambda: ragged_all_to_all(x, counts, mesh, "z", 4), ValueError, "the mesh's axes, 'x', got 'z'"),
        (
            lambda: ragged_all_to_all(x, torch.tensor([-1, 2]), mesh, "x", 4),
            ValueError,
            r"send_counts must not be negative, got \[-1, 2\]",
        ),
        (
            lambda: ragged_all_to_all(x, torch.tensor([3, 2]), mesh, "x", 4),
            ValueError,
            r"sum to at most the 3 rows of x, got 5: \[3, 2\]",
        ),
    ]


def test_mistakes() -> None:
    def check() -> None:
        for call, error, text in _mistakes(get_pallas_mesh("x")):
            with pytest.raises(error, match=text):
                call()

    run(check, 2)


def test_more_rows_than_there_is_room_for() -> None:
    def check() -> None:
        ragged_all_to_all(torch.zeros(3, 2), torch.tensor([3, 0]), get_pallas_mesh("x"), "x", 5)

    with pytest.raises(RankError, match=r"there are 6 rows for this rank, \[3, 3\] from each"):
        run(check, 2)

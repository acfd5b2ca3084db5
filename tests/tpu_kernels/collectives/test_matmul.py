"""Collectives that multiply, as torch calls them: against float64 in one process.

A sum of n products in float32 errs by at most gamma(n) = n u / (1 - n u) times the sum of their magnitudes,
in any order, and sums over ranks are more terms of it. Then comes one rounding to the dtype of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import bridge
from bridge import get_pallas_mesh
from bridge.ranks import RankError, run
from tpu_kernels import MatmulTiling, all_gather_matmul, matmul_reduce_scatter

# What torch itself warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

SIZES = [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)]
Shape = tuple[int, ...]


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that do not depend on which rank draws them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Case:
    """One product of several ranks, with all ranks' operands and cotangents.

    Attributes:
        function: what each rank calls.
        xs, ws, cotangents: one of each for each rank.
    """

    def __init__(
        self,
        gathers: bool,
        size: int,
        rows: Shape,
        k: int,
        n: int,
        dim: int = 0,
        transpose_w: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.function: Callable[..., torch.Tensor] = all_gather_matmul if gathers else matmul_reduce_scatter
        self.gathers, self.size, self.dim, self.transpose_w, self.dtype = (
            gathers,
            size,
            dim,
            transpose_w,
            dtype,
        )
        place = dim % (len(rows) + 1)
        whole = tuple(r * size if i == place else r for i, r in enumerate(rows))
        given, made = (rows, whole) if gathers else (whole, rows)
        self.k, self.n, self.whole = k, n, whole
        self.xs = [drawn(r, *given, k, dtype=dtype) for r in range(size)]
        w = (n, k) if transpose_w else (k, n)
        self.ws = [drawn(100 + r, *w, dtype=dtype) for r in range(size)]
        self.cotangents = [drawn(200 + r, *made, n, dtype=dtype) for r in range(size)]

    def alone(self, magnitudes: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Results and gradients of all ranks in float64; of magnitudes, with which errors are bounded."""

        def wide(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [t.double().abs() if magnitudes else t.double() for t in tensors]

        xs = [x.requires_grad_() for x in wide(self.xs)]
        ws = [w.requires_grad_() for w in wide(self.ws)]
        matrices = [w.T if self.transpose_w else w for w in ws]
        if self.gathers:
            ys = [torch.cat(xs, self.dim) @ w for w in matrices]
        else:
            total = torch.stack([x @ w for x, w in zip(xs, matrices, strict=True)]).sum(0)
            ys = list(total.chunk(self.size, self.dim))
        torch.autograd.backward(ys, wide(self.cotangents))
        return [y.detach() for y in ys], [_grad(x) for x in xs], [_grad(w) for w in ws]

    def check(self, rank: int, device: str = "cpu", tiling: MatmulTiling | None = None) -> None:
        """What a rank gets is within the bounds."""
        x = self.xs[rank].clone().to(device).requires_grad_()
        w = self.ws[rank].clone().to(device).requires_grad_()
        mesh = get_pallas_mesh("x")
        y = self.function(x, w, mesh, "x", self.dim, transpose_w=self.transpose_w, tiling=tiling)
        assert (y.dtype, y.device.type, y.is_contiguous()) == (self.dtype, device, True)
        y.backward(self.cotangents[rank].to(device))
        rows = torch.Size(self.whole).numel()
        terms = (self.k * self.size, self.n * self.size, rows)
        got = (y.detach(), _grad(x), _grad(w))
        for name, tensor, of, exact, magnitude in zip(
            ("y", "dx", "dw"), got, terms, self.alone(False), self.alone(True), strict=True
        ):
            within(tensor, exact[rank], magnitude[rank], of + self.size, name)


def _grad(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


def within(
    got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int, name: str = ""
) -> None:
    """A sum of so many terms in float32, rounded once to the dtype of `got`."""
    u = torch.finfo(torch.float32).eps / 2
    summed = terms * u / (1 - terms * u) * magnitude
    rounding = 0.0 if got.dtype is torch.float32 else torch.finfo(got.dtype).eps / 2
    allowed = summed + rounding * (exact.abs() + summed)
    error = (got.cpu().double() - exact).abs()
    assert got.shape == exact.shape, name
    assert bool((error <= allowed).all()), (name, (error - allowed).max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gathers", [True, False], ids=["gathers", "scatters"])
def test_results_and_gradients(gathers: bool, size: int) -> None:
    cases = [
        Case(gathers, size, (3, 2), 5, 7),
        Case(gathers, size, (2, 3), 9, 4, dim=1, transpose_w=True, dtype=torch.bfloat16),
        Case(gathers, size, (1,), 1, 1),
    ]

    def check() -> None:
        for case, device in zip(cases if size < 4 else cases[:2], ("cpu", "tpu", "cpu"), strict=False):
            case.check(dist.get_rank(), device)

    run(check, size)


shapes = st.tuples(
    st.booleans(),
    st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 3), st.integers(1, 5))),
    st.integers(1, 140),
    st.integers(1, 140),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


def _any_shape(size: int, drawn_case: tuple[bool, Shape, int, int, bool, torch.dtype]) -> None:
    gathers, rows, k, n, transpose_w, dtype = drawn_case
    case = Case(gathers, size, rows, k, n, -2, transpose_w, dtype)
    run(lambda: case.check(dist.get_rank()), size)


@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(shapes)
def test_any_shape(drawn_case: tuple[bool, Shape, int, int, bool, torch.dtype]) -> None:
    _any_shape(2, drawn_case)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5])
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(drawn_case=shapes)
def test_any_shape_at_length(size: int, drawn_case: tuple[bool, Shape, int, int, bool, torch.dtype]) -> None:
    _any_shape(size, drawn_case)


@pytest.mark.parametrize(
    ("gathers", "dtype"),
    [
        (True, torch.float32),
        (False, torch.bfloat16),
        pytest.param(True, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(False, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_several_tiles_each_way(gathers: bool, dtype: torch.dtype) -> None:
    """The last tiles are smaller, in all three dimensions."""
    case = Case(gathers, 2, (131,), 259, 130, transpose_w=gathers, dtype=dtype)
    run(lambda: case.check(dist.get_rank(), tiling=MatmulTiling(128, 128, 128)), 2)


def test_what_needs_no_gradient_gets_none() -> None:
    def check() -> None:
        rank = dist.get_rank()
        for gathers in (True, False):
            case = Case(gathers, 2, (3,), 5, 7)
            _, dxs, dws = case.alone(False)
            for wanted, exact in (("x", dxs), ("w", dws)):
                x, w = case.xs[rank].clone(), case.ws[rank].clone()
                one = x if wanted == "x" else w
                one.requires_grad_()
                case.function(x, w, get_pallas_mesh("x"), "x").backward(case.cotangents[rank])
                torch.testing.assert_close(_grad(one).double(), exact[rank], atol=1e-5, rtol=1e-5)

    run(check, 2)


def _block(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, mesh: Any) -> torch.Tensor:
    """A tensor and sequence parallel MLP."""
    hidden = torch.tanh(all_gather_matmul(x, first, mesh, "x", transpose_w=True))
    return matmul_reduce_scatter(hidden, second, mesh, "x", transpose_w=True)


def _whole_block(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return drawn(1, 3 * size, 2, 4).double(), drawn(2, 6 * size, 4).double(), drawn(3, 4, 6 * size).double()


def _parts(size: int, rank: int) -> list[torch.Tensor]:
    x, first, second = _whole_block(size)
    parts = x.chunk(size)[rank], first.chunk(size)[rank], second.chunk(size, 1)[rank]
    return [part.float().contiguous().requires_grad_() for part in parts]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_block_is_the_whole_mlp_to_second_gradients(size: int) -> None:
    """The loss is the sum of all ranks'; penalties on gradients are, too."""

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y**3).sum()

    def check() -> None:
        rank = dist.get_rank()
        mine = _parts(size, rank)
        y = _block(mine[0], mine[1], mine[2], get_pallas_mesh("x"))
        gradients = torch.autograd.grad(loss(y), mine, create_graph=True)
        torch.stack([(g**2).sum() for g in gradients]).sum().backward()

        whole = [t.requires_grad_() for t in _whole_block(size)]
        x, first, second = whole
        expected = torch.tanh(x @ first.T) @ second.T
        exact = torch.autograd.grad(loss(expected), whole, create_graph=True)
        torch.stack([(g**2).sum() for g in exact]).sum().backward()

        def part(number: int, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(size, 1 if number == 2 else 0)[rank].detach()

        def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
            scale = float(wanted.abs().max())
            torch.testing.assert_close(got.detach().double(), wanted, rtol=0, atol=1e-5 * scale)

        near(y, part(0, expected))
        for number in range(3):
            near(gradients[number], part(number, exact[number]))
            near(_grad(mine[number]), part(number, _grad(whole[number])))

    run(check, size)


def test_compiled() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        compiled = torch.compile(_block, fullgraph=True, backend="aot_eager")
        mine, same = _parts(2, dist.get_rank()), _parts(2, dist.get_rank())
        got, expected = compiled(mine[0], mine[1], mine[2], mesh), _block(same[0], same[1], same[2], mesh)
        assert torch.equal(got, expected)
        got.sum().backward()
        expected.sum().backward()
        for one, other in zip(mine, same, strict=True):
            assert torch.equal(_grad(one), _grad(other))

    run(check, 2)


def test_an_axis_of_a_mesh() -> None:
    def check() -> None:
        rank, mesh = dist.get_rank(), get_pallas_mesh(("a", "b"), (2, 2))
        for axis, line in (("a", (rank % 2, rank % 2 + 2)), ("b", (rank // 2 * 2, rank // 2 * 2 + 1))):
            xs, ws = [drawn(r, 4, 3) for r in range(4)], [drawn(10 + r, 3, 2) for r in range(4)]
            got = all_gather_matmul(xs[rank], ws[rank], mesh, axis)
            torch.testing.assert_close(got, torch.cat([xs[r] for r in line]) @ ws[rank])
            got = matmul_reduce_scatter(xs[rank], ws[rank], mesh, axis)
            total = xs[line[0]] @ ws[line[0]] + xs[line[1]] @ ws[line[1]]
            torch.testing.assert_close(got, total.chunk(2)[line.index(rank)])

    run(check, 4)


def test_reference_mode() -> None:
    def check() -> None:
        with bridge.interpret("reference"):
            for gathers in (True, False):
                Case(gathers, 2, (3, 2), 5, 7, 1, gathers, torch.bfloat16).check(dist.get_rank())

    run(check, 2)


def test_nothing() -> None:
    """Of no rows, no columns, and sums of no products."""

    def check() -> None:
        mesh = get_pallas_mesh("x")
        for m, k, n in ((0, 3, 2), (2, 3, 0), (2, 0, 3)):
            x, w = torch.ones(m, k, requires_grad=True), torch.ones(k, n, requires_grad=True)
            y = all_gather_matmul(x, w, mesh, "x")
            assert torch.equal(y, torch.zeros(2 * m, n))
            z = matmul_reduce_scatter(x, w, mesh, "x")
            assert torch.equal(z, torch.zeros(m // 2, n))
            (y.sum() + z.sum()).backward()
            assert torch.equal(_grad(x), torch.zeros(m, k))
            assert torch.equal(_grad(w), torch.zeros(k, n))

    run(check, 2)


def _mistakes(mesh: Any) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    x, w = torch.zeros(3, 4), torch.zeros(4, 5)
    anything: Any = "a text"
    return [
        (
            lambda: all_gather_matmul(x.int(), w, mesh, "x"),
            TypeError,
            "x must be float32, bfloat16, got int32",
        ),
        (lambda: all_gather_matmul(x, anything, mesh, "x"), TypeError, "w must be a torch.Tensor, got str"),
        (
            lambda: all_gather_matmul(x, w.bfloat16(), mesh, "x"),
            TypeError,
            "same dtype, got torch.float32 and",
        ),
        (lambda: all_gather_matmul(x, w.to("tpu"), mesh, "x"), ValueError, "on one device, got cpu and tpu"),
        (lambda: all_gather_matmul(x, w.T, mesh, "x"), ValueError, r"w \[k, n\], got \[3, 4\] and \[5, 4\]"),
        (lambda: all_gather_matmul(x[0], w, mesh, "x"), ValueError, r"x must be \[..., m, k\]"),
        (
            lambda: all_gather_matmul(x, w, mesh, "x", 1),
            ValueError,
            "from 0 to 0, got 1, the one that is summed",
        ),
        (lambda: all_gather_matmul(x, w, mesh, "x", 2), ValueError, "dim must be from -2 to 1"),
        (lambda: all_gather_matmul(x, w, mesh, "z"), ValueError, "one of the mesh's axes, 'x', got 'z'"),
        (
            lambda: all_gather_matmul(x, w, mesh, "x", tiling=anything),
            TypeError,
            "tiling must be a MatmulTiling or None, got str",
        ),
        (
            lambda: matmul_reduce_scatter(x, w, mesh, "x"),
            ValueError,
            r"multiple of 2, .*got shape \[3, 4\]; pad it",
        ),
    ]


def test_mistakes() -> None:
    def check() -> None:
        for call, error, text in _mistakes(get_pallas_mesh("x")):
            with pytest.raises(error, match=text):
                call()
        named = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        whole = DTensor.from_local(torch.zeros(2, 2), named, [Replicate()])
        with pytest.raises(TypeError, match=r"w must be a rank's own .* pass w.to_local\(\)"):
            all_gather_matmul(torch.zeros(2, 2), whole, named, "x")

    run(check, 2)


def test_ranks_that_disagree() -> None:
    def check() -> None:
        w = torch.zeros(2, 2 + dist.get_rank())
        all_gather_matmul(torch.zeros(2, 2), w, get_pallas_mesh("x"), "x")

    with pytest.raises(RankError, match="the ranks of a mesh must make the same calls"):
        run(check, 2)


def test_tilings() -> None:
    with pytest.raises(ValueError, match="tile_k must be a positive multiple of 128, got 100"):
        MatmulTiling(128, 100, 128)
    with pytest.raises(TypeError, match="tile_n must be an int, got True"):
        MatmulTiling(128, 128, True)
    assert MatmulTiling.of(5, 300, 7, 4) == MatmulTiling(128, 384, 128)
    assert MatmulTiling.of(8192, 8192, 8192, 2) == MatmulTiling(1024, 512, 1024)
    assert MatmulTiling.of(8192, 8192, 8192, 4) == MatmulTiling(512, 2048, 512)
    assert MatmulTiling.of(8192, 4096, 8192, 2) == MatmulTiling(1024, 4096, 256)
    for m, k, n in ((8192, 8192, 8192), (100_000, 100_000, 100_000), (1, 100_000, 1), (1, 1, 100_000)):
        for itemsize in (2, 4):
            tiling = MatmulTiling.of(m, k, n, itemsize)
            # All chips have 64 MiB or more, of which an eighth is the compiler's.
            assert tiling.vmem_limit_bytes(m, k, n, itemsize) <= 56 * 2**20


@pytest.mark.parametrize("product", [all_gather_matmul, matmul_reduce_scatter])
def test_compiled_with_a_tiling(product: Any) -> None:
    def check() -> None:
        mesh, tiling = get_pallas_mesh("x"), MatmulTiling(128, 256, 128)
        x, w = torch.randn(4, 8), torch.randn(8, 4)
        compiled = torch.compile(
            lambda x, w: product(x, w, mesh, "x", tiling=tiling), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(compiled(x, w), product(x, w, mesh, "x", tiling=tiling))

    run(check, 2)

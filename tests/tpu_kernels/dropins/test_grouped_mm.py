"""`torch.nn.functional.grouped_mm` by grouped matmul: torch's rules, more strides and dtypes, and no number
that nobody has computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import bridge
from tpu_kernels.dropins import grouped_mm
from tpu_kernels.dropins.install import install, overrides, uninstall

# Taken before anything is overridden, as programs do.
from torch.nn.functional import grouped_mm as taken_earlier  # isort: skip

M, K, N, GROUPS = 11, 6, 10, 4
ENDS = [3, 3, 8, 9]
"""Of the groups: one has nothing, and what follows the last belongs to none."""

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "2d3d": ((M, K), (GROUPS, K, N)),
    "3d2d": ((GROUPS, K, N), (N, M)),
    "2d2d": ((K, M), (M, N)),
    "3d3d": ((GROUPS, M, K), (GROUPS, K, N)),
}
"""In each, offsets split the M."""
TERMS = {"2d3d": (K, N, M), "3d2d": (N, M, M), "2d2d": (M, N, K), "3d3d": (K, N, M)}
"""The most products that are summed for a number of the result and of both gradients."""

every_mode = pytest.mark.parametrize("mode", SHAPES)


def slowly(*values: Any) -> list[Any]:
    """Parameters of tests that show what others show in part."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


on_tpu = pytest.mark.parametrize("device", ["tpu", *slowly("cpu")], indirect=True)


def loop(mat_a: torch.Tensor, mat_b: torch.Tensor, ends: list[int] | None) -> torch.Tensor:
    """The same, group by group; 0 where torch leaves what there was."""
    if ends is None:
        return torch.stack([a @ b for a, b in zip(mat_a, mat_b, strict=True)])
    groups = list(zip([0, *ends], ends, strict=False))
    if mat_a.dim() == 2 and mat_b.dim() == 2:
        empty = mat_a.new_zeros(0, mat_a.shape[0], mat_b.shape[1])
        return torch.cat([empty, *((mat_a[:, i:j] @ mat_b[i:j])[None] for i, j in groups)])
    if mat_a.dim() == 2:
        parts = [mat_a[i:j] @ mat_b[g] for g, (i, j) in enumerate(groups)]
        return torch.cat([*parts, mat_a.new_zeros(mat_a.shape[0] - ends[-1], mat_b.shape[2])])
    parts = [mat_a[g] @ mat_b[:, i:j] for g, (i, j) in enumerate(groups)]
    return torch.cat([*parts, mat_b.new_zeros(mat_a.shape[1], mat_b.shape[1] - ends[-1])], 1)


@dataclass
class Ours:
    """Calls torch's function on a device, where ours stands in for it."""

    device: torch.device
    calls: list[str] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved: list[Any] = [self.moved(a) for a in args]
        with self.standing_in():
            return taken_earlier(*moved, **{n: self.moved(a) for n, a in kwargs.items()})

    def moved(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def offs(self, ends: list[int] = ENDS) -> torch.Tensor:
        return torch.tensor(ends, dtype=torch.int32, device=self.device)

    def standing_in(self) -> contextlib.AbstractContextManager[Any]:
        return overrides() if self.device.type == "cpu" else contextlib.nullcontext()

    def used(self) -> list[str]:
        """Which of our functions have computed since the last time this was asked."""
        names = self.calls.copy()
        self.calls.clear()
        return names


@pytest.fixture
def interpretation() -> str:
    """How kernels run. Torch's rules come before the kernel; its reference compiles sooner."""
    return "reference"


@pytest.fixture
def ours(device: torch.device, interpretation: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ours]:
    result = Ours(device)

    def counted(name: str) -> Callable[..., Any]:
        compute = getattr(grouped_mm, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                result.calls.append(name)
            return compute(*args, **kwargs)

        return call

    for name in ("grouped_matmul", "transposed_grouped_matmul", "_batched"):
        monkeypatch.setattr(grouped_mm, name, counted(name))
    torch.compiler.reset()  # all tests compile one function, and the limit is 8
    if device.type == "tpu":
        install()
    with bridge.interpret(interpretation):
        yield result
    uninstall()
    assert F.grouped_mm is taken_earlier


USED = {
    "2d3d": "grouped_matmul",
    "3d2d": "grouped_matmul",
    "2d2d": "transposed_grouped_matmul",
    "3d3d": "_batched",
}


def matrices(mode: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES[mode]]


def ends_of(mode: str) -> list[int] | None:
    return None if mode == "3d3d" else ENDS


def offs_of(mode: str) -> torch.Tensor | None:
    return None if mode == "3d3d" else torch.tensor(ENDS, dtype=torch.int32)


def check(ours: Ours, mode: str, given: list[torch.Tensor], out_dtype: torch.dtype | None = None) -> None:
    """The result and both gradients are as near to the exact ones as sums in float32, rounded once, may be.

    A sum of n products errs by at most n u times the sum of their magnitudes, u the unit roundoff of float32
    (of float64 for float64), in whatever order it is summed. Cotangents are in the dtype of the result.
    """
    dtype, ends = given[0].dtype, ends_of(mode)
    leaves = [ours.moved(t).detach().requires_grad_() for t in given]
    output = ours(*leaves, offs=offs_of(mode), out_dtype=out_dtype)
    assert ours.used() == [USED[mode]] and output.is_contiguous() and output.device.type == ours.device.type
    cotangent = torch.randn(output.shape).to(dtype)
    found = [output.detach(), *torch.autograd.grad(output, leaves, cotangent.to(output))]

    def with_gradients(values: list[torch.Tensor], cotangent: torch.Tensor) -> list[torch.Tensor]:
        values = [t.detach().requires_grad_() for t in values]
        output = loop(values[0], values[1], ends)
        return [output.detach(), *torch.autograd.grad(output, values, cotangent)]

    exact = with_gradients([t.double() for t in given], cotangent.double())
    sums = with_gradients([t.double().abs() for t in given], cotangent.double().abs())
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    dtypes = [out_dtype or dtype, dtype, dtype]
    for got, want, size, terms, each in zip(found, exact, sums, TERMS[mode], dtypes, strict=True):
        assert (got.shape, got.dtype) == (want.shape, each)
        # u twice: float64's own rounding of the oracle, where that is what is checked.
        bound = 2 * (terms + 2) * unit * size
        rounding = torch.finfo(each)
        bound = bound + rounding.eps / 2 * (want.abs() + bound) + rounding.smallest_normal
        assert bool(((got.cpu().double() - want).abs() <= bound).all())


# Values ------------------------------------------------------------------------------------------------


@every_mode
def test_values(ours: Ours, mode: str) -> None:
    check(ours, mode, matrices(mode))


DTYPES = (torch.bfloat16, torch.float16, torch.float64)


@on_tpu
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        *zip(("2d3d", "2d2d", "3d2d"), DTYPES, strict=True),
        *(pytest.param(mode, dtype, marks=pytest.mark.slow) for mode in SHAPES for dtype in DTYPES),
    ],
)
def test_dtypes(ours: Ours, mode: str, dtype: torch.dtype) -> None:
    check(ours, mode, matrices(mode, dtype))


@on_tpu
@pytest.mark.parametrize("mode", ["2d2d", "3d3d", *slowly("2d3d", "3d2d")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float16)])
def test_results_wider_than_operands(ours: Ours, mode: str, dtype: torch.dtype) -> None:
    check(ours, mode, matrices(mode, dtype), torch.float32)


@pytest.mark.parametrize("interpretation", ["fast"])
@on_tpu
@pytest.mark.parametrize("mode", ["3d2d", *slowly("2d3d", "2d2d")])
def test_values_in_the_kernel(ours: Ours, mode: str) -> None:
    check(ours, mode, matrices(mode))


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :1].expand(tensor.shape)


@every_mode
@pytest.mark.parametrize("layout", [transposed, every_other, expanded])
def test_strides(ours: Ours, mode: str, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """torch asks for multiples of 16 bytes, and for no gaps. K, M and N here are no such multiples either."""
    mat_a, mat_b = matrices(mode)
    mat_a, mat_b = ours.moved(mat_a), ours.moved(mat_b)
    offs, ends = offs_of(mode), ends_of(mode)
    for given in ((layout(mat_a), mat_b), (mat_a, layout(mat_b)), (layout(mat_a), layout(mat_b))):
        found = ours(*given, offs=offs)
        want = loop(given[0].cpu().double(), given[1].cpu().double(), ends)
        torch.testing.assert_close(found.cpu().double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["2d3d", "3d2d", "2d2d"])
def test_transposed_matrices_are_not_copied(ours: Ours, mode: str) -> None:
    """Matrices [G, N, K] of linear layers, seen as [G, K, N], and rows seen as columns."""
    mat_a, mat_b = (ours.moved(t) for t in matrices(mode))
    mat_a = mat_a if mode == "2d3d" else transposed(mat_a)
    mat_b = mat_b if mode == "2d2d" else transposed(mat_b)
    offs = ours.offs()
    mat_a, mat_b = (t.clone(memory_format=torch.preserve_format) for t in (mat_a, mat_b))
    ours(mat_a, mat_b, offs=offs)
    before = bridge.stats().copies.get("stride", 0)
    ours(mat_a, mat_b, offs=offs)
    assert bridge.stats().copies.get("stride", 0) == before


def test_cotangents_that_are_expanded(ours: Ours) -> None:
    """Of a sum: torch's own backward refuses them."""
    mat_a, mat_b = (ours.moved(t).requires_grad_() for t in matrices("2d3d"))
    ours(mat_a, mat_b, offs=ours.offs()).sum().backward()
    assert mat_a.grad is not None and mat_b.grad is not None
    ones = torch.ones(M, N, dtype=torch.float64)
    ones[ENDS[-1] :] = 0
    begin = [0, *ENDS]
    for group, (i, j) in enumerate(zip(begin, ENDS, strict=False)):
        want = mat_a.detach().cpu().double()[i:j].T @ ones[i:j]
        torch.testing.assert_close(mat_b.grad[group].cpu().double(), want, rtol=0, atol=1e-5)
    assert not mat_b.grad[1].any() and not mat_a.grad[ENDS[-1] :].any()


@pytest.mark.parametrize("interpretation", ["reference", "fast"])
@pytest.mark.parametrize("mode", ["2d3d", "3d2d", "2d2d"])
def test_what_follows_the_last_group_does_not_matter(ours: Ours, mode: str) -> None:
    """torch returns what was in memory there. NaN in operands and cotangent stays where it is."""
    results = []
    for value in (0.0, float("nan")):
        torch.manual_seed(0)
        leaves = matrices(mode)
        end = ENDS[-1]
        for tensor, name in zip(leaves, mode.split("d"), strict=False):
            if name == "2":
                split = {"2d3d": 0, "3d2d": 1, "2d2d": 1 if tensor is leaves[0] else 0}[mode]
                tensor.narrow(split, end, M - end).fill_(value)
        leaves = [ours.moved(t).requires_grad_() for t in leaves]
        output = ours(*leaves, offs=offs_of(mode))
        cotangent = torch.randn_like(output)
        if mode != "2d2d":
            cotangent.narrow(0 if mode == "2d3d" else 1, end, M - end).fill_(value)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, cotangent)])
    for without, with_nan in zip(*results, strict=True):
        assert torch.equal(without, with_nan) and with_nan.isfinite().all()
    if mode != "2d2d":
        assert not results[1][0].narrow(0 if mode == "2d3d" else 1, ENDS[-1], M - ENDS[-1]).any()


@on_tpu
@pytest.mark.parametrize(
    ("a", "b", "ends"),
    [
        ((0, 4), (3, 4, 5), [0, 0, 0]),
        ((8, 4), (3, 4, 5), [0, 0, 0]),
        ((8, 0), (3, 0, 5), [1, 4, 8]),
        ((8, 4), (3, 4, 0), [1, 4, 8]),
        ((4, 0), (0, 5), [0, 0]),
        ((4, 8), (8, 5), [0, 0, 0]),
        ((3, 4, 5), (5, 0), [0, 0, 0]),
        ((3, 4, 0), (0, 8), [2, 2, 8]),
    ],
)
def test_nothing_to_multiply(ours: Ours, a: tuple[int, ...], b: tuple[int, ...], ends: list[int]) -> None:
    leaves = [torch.randn(shape).to(ours.device).requires_grad_() for shape in (a, b)]
    output = ours(*leaves, offs=ours.offs(ends))
    assert len(ours.used()) == 1
    want = loop(leaves[0].cpu(), leaves[1].cpu(), ends)
    assert output.shape == want.shape and not output.any()
    output.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_no_groups(ours: Ours) -> None:
    assert not ours(torch.randn(8, 4), torch.randn(0, 4, 5), offs=ours.offs([])).any()
    assert ours(torch.randn(4, 8), torch.randn(8, 5), offs=ours.offs([])).shape == (0, 4, 5)


@on_tpu
@pytest.mark.parametrize("mode", ["2d2d", *slowly("2d3d", "3d2d")])
def test_second_derivatives(ours: Ours, mode: str) -> None:
    leaves = [ours.moved(t).requires_grad_() for t in matrices(mode, torch.float64)]

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ours(a, b, offs=offs_of(mode))

    # Fast: along one direction. The full matrix is the kernels' own tests' affair.
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_autocast_changes_nothing(ours: Ours) -> None:
    """As with torch's own."""
    for mode in SHAPES:
        with torch.autocast(ours.device.type, torch.bfloat16):
            assert ours(*matrices(mode), offs=offs_of(mode)).dtype == torch.float32


# Rules -------------------------------------------------------------------------------------------------

ALIGNED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "2d3d": ((8, 16), (4, 16, 8)),
    "3d2d": ((4, 8, 16), (16, 8)),
    "2d2d": ((8, 16), (16, 8)),
    "3d3d": ((4, 8, 16), (4, 16, 8)),
}
OFFS = torch.tensor([2, 2, 5, 8], dtype=torch.int32)


def wrong_calls() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    a, b = torch.randn(8, 16), torch.randn(4, 16, 8)
    batches = torch.randn(4, 8, 16)
    offs = {"offs": OFFS}
    return {
        "int64 offsets": (a, b, {"offs": OFFS.long()}),
        "floating offsets": (a, b, {"offs": OFFS.float()}),
        "offsets of two dimensions": (a, b, {"offs": OFFS[None]}),
        "no offsets": (a, b, {}),
        "offsets of another number of groups": (a, b, {"offs": OFFS[:3]}),
        "the same, columns": (batches, a.T.contiguous(), {"offs": OFFS[:3]}),
        "offsets with two batches": (batches, b, offs),
        "batches of different sizes": (batches, b[:3], {}),
        "inner sizes differ": (a, torch.randn(4, 12, 8), offs),
        "inner sizes of batches differ": (batches, torch.randn(4, 12, 8), {}),
        "one dimension": (a[0], b, offs),
        "four dimensions": (a[None, None], b, offs),
        "dtypes differ": (a, b.bfloat16(), offs),
        "integers": (a.int(), b.int(), offs),
        "a bias": (a, b, {**offs, "bias": torch.randn(8)}),
        "a narrower result": (a, b, {**offs, "out_dtype": torch.bfloat16}),
        "an integer result": (a, b, {**offs, "out_dtype": torch.int32}),
        "no tensor": (a, 1.0, offs),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_errors_are_torchs(ours: Ours, name: str) -> None:
    mat_a, mat_b, kwargs = wrong_calls()[name]
    errors: list[Exception] = []
    for function in (taken_earlier, ours):
        with pytest.raises((RuntimeError, TypeError)) as raised:
            function(mat_a, mat_b, **kwargs)
        errors.append(raised.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]).splitlines()[0] == str(errors[1]).splitlines()[0]
    assert not ours.used()


def test_arguments_that_the_function_does_not_have(ours: Ours) -> None:
    a, b = (ours.moved(torch.randn(shape)) for shape in ALIGNED["3d3d"])
    with ours.standing_in():
        for call in (
            lambda: torch._grouped_mm(a),  # type: ignore[call-arg]
            lambda: torch._grouped_mm(a, b, offsets=None),  # type: ignore[call-arg]
            lambda: torch._grouped_mm(a, b, mat2=b),  # type: ignore[call-arg]
        ):
            with pytest.raises(TypeError, match="_grouped_mm\\(\\)"):
                call()


@pytest.mark.parametrize("mode", ALIGNED)
def test_right_calls_give_what_torch_gives(ours: Ours, mode: str) -> None:
    given = [torch.randn(shape) for shape in ALIGNED[mode]]
    offs = None if mode == "3d3d" else OFFS
    want = taken_earlier(*given, offs=offs)
    found = ours(*given, offs=offs)
    assert (found.shape, found.stride(), found.dtype) == (want.shape, want.stride(), want.dtype)
    torch.testing.assert_close(found.cpu(), want, rtol=0, atol=1e-5)
    assert ours.used() == [USED[mode]]


@pytest.mark.parametrize("mode", ["2d3d", "3d2d", "2d2d"])
def test_offsets_out_of_order(ours: Ours, mode: str) -> None:
    """torch's kernel for the GPU would read past the end."""
    given = [ours.moved(t) for t in matrices(mode)]
    for ends in ([3, 2, 8, 9], [-1, 3, 8, 9], [3, 3, 8, 12]):
        with pytest.raises(
            ValueError, match=f"offs must not decrease, and be between 0 and {M}, .*{ends[1]}"
        ):
            ours(*given, offs=ours.offs(ends))
    assert not ours.used()


@on_tpu
@pytest.mark.parametrize("mode", ["2d3d", "3d2d", "2d2d"])
def test_offsets_that_nobody_checks_are_clamped(ours: Ours, mode: str) -> None:
    """In a compiled function, say."""
    given = [ours.moved(t) for t in matrices(mode)]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for ends, safe in (([3, 2, 8, 9], [3, 3, 8, 9]), ([-(2**31), 5, 2**31 - 1, 9], [0, 5, M, M])):
        found = compiled(*given, offs=ours.offs(ends))
        want = loop(given[0].cpu(), given[1].cpu(), safe)
        torch.testing.assert_close(found.cpu(), want, rtol=0, atol=1e-5)


# Ways to call ------------------------------------------------------------------------------------------


def test_every_name(ours: Ours) -> None:
    a, b = (ours.moved(t) for t in matrices("2d3d"))
    offs = ours.offs()
    want = loop(a.cpu(), b.cpu(), ENDS)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: F.grouped_mm(a, mat_b=b, offs=offs),
        lambda: torch._grouped_mm(a, b, offs=offs),
        lambda: torch._grouped_mm(input=a, mat2=b, offs=offs),  # type: ignore[call-arg]
        lambda: torch.ops.aten._grouped_mm(a, b, offs),
        lambda: torch.ops.aten._grouped_mm.default(self=a, mat2=b, offs=offs),
    ]
    for call in calls:
        with ours.standing_in():
            torch.testing.assert_close(call().cpu(), want, rtol=0, atol=1e-5)
        assert ours.used() == ["grouped_matmul"]
    with torch.inference_mode(), ours.standing_in():
        inference = [t.clone() for t in (a, b, offs)]
        torch.testing.assert_close(
            F.grouped_mm(inference[0], inference[1], offs=inference[2]).cpu(), want, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("mode", ["2d3d", *slowly("3d2d", "2d2d", "3d3d")])
def test_compiled_with_gradients(ours: Ours, mode: str) -> None:
    """In float32, for which torch's own has no shapes."""
    leaves = [ours.moved(t).requires_grad_() for t in matrices(mode)]
    offs = ours.moved(offs_of(mode))
    found = []
    for function in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        output = function(*leaves, offs=offs)
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-4)
    with torch.inference_mode():
        inside = torch.compile(ours, fullgraph=True, backend="aot_eager")(
            *(t.detach() for t in leaves), offs=offs
        )
        torch.testing.assert_close(inside, found[0][0], rtol=0, atol=1e-5)


@on_tpu
def test_any_number_of_tokens_in_one_graph(ours: Ours) -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    _, b = (ours.moved(t) for t in matrices("2d3d"))
    compiled = torch.compile(ours, fullgraph=True, backend=count, dynamic=True)
    for tokens in (9, 12, 40, 17):
        ends = [2, tokens - 5, tokens - 5, tokens - 1]
        a = torch.randn(tokens, K).to(ours.device)
        found = compiled(a, b, offs=ours.offs(ends))
        torch.testing.assert_close(found.cpu(), loop(a.cpu(), b.cpu(), ends), rtol=0, atol=1e-5)
    assert graphs == 1


def test_exported(ours: Ours) -> None:
    class Module(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(a, b, offs=offs)

    a, b = (ours.moved(t) for t in matrices("2d3d"))
    tokens = torch.export.Dim("tokens", min=2, max=1000)
    with ours.standing_in():
        program = torch.export.export(
            Module(), (a, b, ours.offs()), dynamic_shapes={"a": {0: tokens}, "b": None, "offs": None}
        ).module()
        longer = torch.cat([a, a])
        found = program(longer, b, ours.offs())
    torch.testing.assert_close(found.cpu(), loop(longer.cpu(), b.cpu(), ENDS), rtol=0, atol=1e-5)


def test_vmap_and_grad(ours: Ours) -> None:
    a, b = torch.randn(2, M, K), torch.randn(2, GROUPS, K, N)
    ends = [ENDS, [1, 5, 5, M]]
    offs = torch.tensor(ends, dtype=torch.int32)

    def call(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(a, b, offs=offs)

    def loss(*given: torch.Tensor) -> torch.Tensor:
        return call(*given).square().sum()

    moved = [t.to(ours.device) for t in (a, b, offs)]
    with ours.standing_in():
        found = torch.vmap(call)(*moved)
        shared = torch.vmap(call, in_dims=(0, None, None))(moved[0], moved[1][0], moved[2][0])
        gradient = torch.func.grad(loss, argnums=1)(moved[0][0], moved[1][0], moved[2][0])
    for i in (0, 1):
        torch.testing.assert_close(found[i].cpu(), loop(a[i], b[i], ends[i]), rtol=0, atol=1e-5)
        torch.testing.assert_close(shared[i].cpu(), loop(a[i], b[0], ENDS), rtol=0, atol=1e-5)
    leaf = b[0].clone().requires_grad_()
    loop(a[0], leaf, ENDS).square().sum().backward()
    torch.testing.assert_close(gradient.cpu(), leaf.grad, rtol=0, atol=1e-4)


# Where it holds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_overrides_ends(ours: Ours) -> None:
    given = [torch.randn(shape) for shape in ALIGNED["2d3d"]]
    F.grouped_mm(*given, offs=OFFS)
    assert not ours.used()
    with overrides():
        F.grouped_mm(*(t.to("tpu") for t in given), offs=OFFS.to("tpu"))
        assert ours.used() == ["grouped_matmul"]

    def both(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with overrides():
            inside = F.grouped_mm(a, b, offs=offs)
        return inside, F.grouped_mm(a, b, offs=offs)

    targets = []

    def look(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        targets.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.compile(both, fullgraph=True, backend=look)(given[0].bfloat16(), given[1].bfloat16(), OFFS)
    assert sum("grouped_matmul" in name for name in targets) == 1
    assert sum("_grouped_mm" in name for name in targets) == 1


def test_install_leaves_the_dispatcher_as_it_was() -> None:
    def dump() -> str:
        return torch._C._dispatch_dump("aten::_grouped_mm")

    before = dump()
    given = [torch.randn(shape).to("tpu") for shape in ALIGNED["2d3d"]]
    want = F.grouped_mm(*given, offs=OFFS.to("tpu"))
    install()
    assert "grouped_mm.py" in dump()
    uninstall()
    assert dump() == before
    assert torch.equal(F.grouped_mm(*given, offs=OFFS.to("tpu"))[:8], want[:8])


@pytest.mark.parametrize("device", ["tpu"], indirect=True)
def test_install_is_of_the_device(ours: Ours) -> None:
    """Tensors of other devices get torch's own, under transforms too."""
    a, b = (torch.randn(shape) for shape in ALIGNED["2d3d"])
    F.grouped_mm(a, b, offs=OFFS)
    torch.func.grad(lambda a: F.grouped_mm(a, b, offs=OFFS).square().sum())(a)
    assert not ours.used()

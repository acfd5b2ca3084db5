"""`tpu_kernels.context_parallel`: torch's attention on parts of a sequence, against the whole on one rank."""

from __future__ import annotations

# Tests call with wrong types on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tpu_kernels
from bridge import get_pallas_mesh
from bridge.ranks import RankError, run
from tpu_kernels import context_parallel, sequence_positions, shard_sequence, unshard_sequence
from tpu_kernels.context_parallel.region import Rotate
from tpu_kernels.ring_attention.layouts import Layout

from .splash_attention import oracle
from .splash_attention.oracle import Case, Gradients

# What torch itself warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

_SCRIPT = Path(__file__).with_name("context_parallel_process.py")
_SECONDS = 120
SLOW = pytest.mark.slow


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


# Numbers ------------------------------------------------------------------------------------------------


def make(length: int, heads: int, kv_heads: int, dtype: torch.dtype, *, is_causal: bool) -> Case:
    q = torch.randn(2, heads, length, 8).to(dtype)
    k, v = (torch.randn(2, kv_heads, length, 8).to(dtype) for _ in range(2))
    visible = torch.ones(length, length, dtype=torch.bool).tril() if is_causal else None
    return Case({"query": q, "key": k, "value": v}, torch.randn(q.shape).to(dtype), None, visible)


def spread(case: Case, device: str, layout: Layout, rotate: Rotate) -> Gradients:
    """What one rank has of the result and gradients. The loss is that of rank 0, over the whole."""
    mesh, length = get_pallas_mesh("x"), case.scores[2]

    def function(q: Any, k: Any, v: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (shard_sequence(t, mesh, "x", 2, layout) for t in (q, k, v))
        with context_parallel(mesh, "x", length=length, layout=layout, rotate=rotate):
            o = sdpa(*parts, is_causal=case.visible is not None, enable_gqa=True)
        whole = unshard_sequence(o, mesh, "x", 2, length, layout)
        return whole, torch.zeros(())

    return oracle.run(
        case if dist.get_rank() == 0 else replace(case, g=torch.zeros_like(case.g)),
        function=function,
        device=device,
    )


@pytest.mark.parametrize(
    ("size", "device", "layout", "rotate", "sizes", "dtype", "is_causal"),
    [
        (1, "cpu", "zigzag", "ring", (7, 2, 2), torch.float32, True),
        (2, "tpu", "zigzag", "ring", (13, 4, 2), torch.float32, True),
        (2, "cpu", "zigzag", "ulysses", (13, 4, 2), torch.float32, False),
        (4, "cpu", "zigzag", "ring", (21, 2, 1), torch.bfloat16, True),
        pytest.param(2, "cpu", "contiguous", "ring", (13, 2, 2), torch.float32, False, marks=SLOW),
        pytest.param(4, "tpu", "contiguous", "ulysses", (21, 4, 4), torch.bfloat16, False, marks=SLOW),
        pytest.param(2, "tpu", "zigzag", "ring", (9, 4, 2), torch.float64, True, marks=SLOW),
        pytest.param(8, "cpu", "zigzag", "ring", (50, 2, 2), torch.float32, True, marks=SLOW),
    ],
)
def test_results_and_gradients(
    size: int,
    device: str,
    layout: Layout,
    rotate: Rotate,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    is_causal: bool,
) -> None:
    case = make(*sizes, dtype, is_causal=is_causal)
    found = run(lambda: spread(case, device, layout, rotate), size)
    assert all(torch.equal(one["o"], found[0]["o"]) for one in found)
    total = {name: torch.stack([one[name] for one in found]).sum(0) for name in ("query", "key", "value")}
    lse = oracle.expected(case)["lse"]  # torch's attention has none
    oracle.check(
        case, total | {"o": found[0]["o"], "lse": lse if dtype == torch.float64 else lse.float()}, "pallas"
    )


@pytest.mark.slow
@pytest.mark.parametrize("rotate", ["ring", "ulysses"])
@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a")])
def test_two_axes(axis: tuple[str, str], rotate: Rotate) -> None:
    """Whose ranks are one line: positions, parts and attention agree on it."""
    x = torch.randn(1, 4, 13, 8)

    def check() -> None:
        mesh, own = get_pallas_mesh(("a", "b"), (2, 2)), x.clone()
        with context_parallel(mesh, axis, buffers=[own], buffer_seq_dims=[2], rotate=rotate):
            o = sdpa(own, own, own, is_causal=True)
        close(unshard_sequence(o, mesh, axis, 2, 13, "zigzag"), sdpa(x, x, x, is_causal=True))

    run(check, 4)


class Model(nn.Module):
    """A layer of torch's own, and attention over [B, H, n, D] that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hint = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.layer(x + self.places(positions), src_mask=hint, is_causal=True)
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        # Without a copy only if the output lies in memory as the query does, as torch's kernels have it.
        return sdpa(q, k, v, is_causal=True, scale=0.3).transpose(1, 2).view(*x.shape)


def _difference(one: Any, other: Any, reference: Any) -> tuple[float, float]:
    """How far both are from the reference, at most."""
    far = [
        max(float((a.double() - b).abs().max()) for a, b in zip(x, reference, strict=True))
        for x in (one, other)
    ]
    return far[0], far[1]


FACTOR = 8
"""How much farther than torch's float32 ours may be from float64: both are sums of as many roundings, in
another order, so their distances are alike but not equal."""


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model(compiled: bool) -> None:
    """Its loss and the gradients of its parameters, by buffers; with padding, and compiled into one graph."""
    length = 11
    model, x = Model(), torch.randn(2, length, 16)
    weights = torch.randn(2, length, 16)

    def alone(dtype: torch.dtype) -> list[torch.Tensor]:
        here = Model().to(dtype)
        here.load_state_dict(model.state_dict())
        loss = (here(x.to(dtype), torch.arange(length)) * weights.to(dtype)).sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in here.parameters() if p.grad is not None)]

    def check() -> list[torch.Tensor]:
        mesh, here = get_pallas_mesh("x"), Model()
        here.load_state_dict(model.state_dict())
        call: Any = torch.compile(here, fullgraph=True, backend="aot_eager") if compiled else here
        own = [x.clone(), weights.clone(), torch.arange(length)]
        with context_parallel(mesh, "x", buffers=own, buffer_seq_dims=[1, 1, 0]):
            assert own[0].shape == (2, 6, 16)
            assert torch.equal(
                own[2] % length, sequence_positions(length, mesh, "x", layout="zigzag") % length
            )
            loss = (call(own[0], own[2]) * own[1]).sum()
            loss.backward()
        return [loss.detach(), *(p.grad for p in here.parameters() if p.grad is not None)]

    exact, plain = alone(torch.float64), alone(torch.float32)
    ours = [sum(parts) for parts in zip(*run(check, 2), strict=True)]
    assert len(ours) == len(exact) > 10
    far, rounding = _difference(ours, plain, exact)
    assert 0 < far <= FACTOR * rounding


# Buffers ------------------------------------------------------------------------------------------------


def test_buffers_are_as_before() -> None:
    """Contents, memory and strides; also of tensors that share memory, after an exception, and twice."""

    def check() -> None:
        mesh = get_pallas_mesh("x")
        base = torch.arange(24).view(2, 12)
        text, labels = base[:, :-1], base[:, 1:]
        table = torch.arange(22.0).view(2, 11).T
        before = [(t.clone(), t.data_ptr(), t.stride()) for t in (text, labels, table)]
        for error in (False, True):
            try:
                with context_parallel(
                    mesh,
                    "x",
                    buffers=[text, labels, table],
                    buffer_seq_dims=[1, -1, 0],
                    buffer_fills=[0, -100, 0.5],
                ):
                    positions = sequence_positions(11, mesh, "x", layout="zigzag")
                    last = positions == 11
                    assert bool(last.any()) == (dist.get_rank() == 0)
                    for t, (whole, _, _), dim in zip((text, labels, table), before, (1, 1, 0), strict=True):
                        assert t.shape[dim] == 6
                        kept = positions[~last]
                        assert torch.equal(
                            t.index_select(dim, torch.arange(6)[~last]), whole.index_select(dim, kept)
                        )
                    assert (labels[:, last] == -100).all() and (table[last] == 0.5).all()
                    text.zero_()
                    if error:
                        raise KeyError("inside")
            except KeyError:
                assert error
            for t, (whole, pointer, stride) in zip((text, labels, table), before, strict=True):
                assert torch.equal(t, whole)
                assert (t.data_ptr(), t.stride()) == (pointer, stride)

    run(check, 2)


def test_buffers_on_tpu_and_some_that_are_kept() -> None:
    def check() -> None:
        mesh = get_pallas_mesh("x")
        x, y = torch.arange(5.0, device="tpu"), torch.arange(5.0, device="tpu")
        with torch.inference_mode():
            z = torch.arange(5.0)
        with context_parallel(
            mesh, "x", buffers=[x, y, z], buffer_seq_dims=[0, 0, 0], no_restore_buffers={y}
        ):
            parts = [t.tolist() for t in (x, y, z)]
        assert parts == [[[0, 1, 0, 0], [2, 3, 4, 0]][dist.get_rank()]] * 3
        assert (x.tolist(), y.tolist(), z.tolist()) == ([0, 1, 2, 3, 4], parts[0], [0, 1, 2, 3, 4])

    run(check, 2)


def test_backward_outside_is_refused() -> None:
    """What it needs of a buffer is not there any more."""

    def check() -> None:
        mesh = get_pallas_mesh("x")
        x, w = torch.randn(4), torch.randn((), requires_grad=True)
        with context_parallel(mesh, "x", buffers=[x], buffer_seq_dims=[0]):
            loss = (x * w).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run(check, 1)


def test_a_buffer_of_two_ranks() -> None:
    shared = torch.zeros(4)

    def check() -> None:
        with context_parallel(get_pallas_mesh("x"), "x", buffers=[shared], buffer_seq_dims=[0]):
            dist.barrier()

    with pytest.raises(RankError, match=r"is cut already, .*clone it on each"):
        run(check, 2)
    assert shared.shape == (4,)
    run(check, 1)


# Where it holds -----------------------------------------------------------------------------------------


def test_it_holds_in_its_thread_and_block_alone() -> None:
    """Also beside install() and inside of overrides(); the innermost region counts."""
    x = torch.randn(1, 2, 4, 8)
    expected = sdpa(x, x, x)
    found: list[torch.Tensor] = []

    def check() -> None:
        mesh = get_pallas_mesh("x")
        other = threading.Thread(target=lambda: found.append(sdpa(x, x, x)))
        whole = torch.randn(1, 2, 8, 8)
        part = shard_sequence(whole, mesh, "x", 2, "zigzag")
        with tpu_kernels.overrides(), context_parallel(mesh, "x", length=8):
            inside = sdpa(part, part, part)
            if dist.get_rank() == 0:
                other.start()
                other.join()
            with context_parallel(mesh, "x", length=7), pytest.raises(ValueError, match="of a sequence of 7"):
                sdpa(part[:, :, 1:], part[:, :, 1:], part[:, :, 1:])
        assert torch.equal(sdpa(x, x, x), expected)
        close(unshard_sequence(inside, mesh, "x", 2, 8, "zigzag"), sdpa(whole, whole, whole))

    run(check, 2)
    assert torch.equal(found[0], expected)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of few terms of size one, in float32, in another order."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=64 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    """The forward that runs in backward is inside, too."""

    def check() -> None:
        mesh = get_pallas_mesh("x")

        def square(x: torch.Tensor) -> torch.Tensor:
            return sdpa(x, x, x, is_causal=True).square()

        x, y = (
            shard_sequence(torch.ones(1, 6, 4).cumsum(1), mesh, "x", 1, "zigzag").requires_grad_()
            for _ in range(2)
        )
        with context_parallel(mesh, "x", length=6):
            square(x).sum().backward()
            checkpoint(square, y, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None and y.grad is not None
        assert torch.equal(x.grad, y.grad)

    run(check, 2)


def test_one_graph_for_equal_regions_and_others_for_others() -> None:
    def check() -> None:
        mesh = get_pallas_mesh("x")
        counted: Any = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(lambda x: sdpa(x, x, x, is_causal=True), fullgraph=True, backend=counted)
        whole = torch.randn(2, 2, 8, 8)
        close(compiled(whole), sdpa(whole, whole, whole, is_causal=True))
        for graphs, length, layout in (
            (2, 8, "zigzag"),
            (2, 8, "zigzag"),
            (3, 8, "contiguous"),
            (4, 7, "zigzag"),
        ):
            x = whole[:, :, :length]
            part = shard_sequence(x, mesh, "x", 2, layout)
            with context_parallel(get_pallas_mesh("x"), "x", length=length, layout=layout):
                o = compiled(part)
            close(unshard_sequence(o, mesh, "x", 2, length, layout), sdpa(x, x, x, is_causal=True))
            assert counted.frame_count == graphs

    run(check, 2)


def test_other_shapes_and_backends() -> None:
    """Dimensions that broadcast by torch's rules, and whatever kernel torch was told to take."""

    def check() -> None:
        mesh = get_pallas_mesh("x")
        q, k = torch.randn(2, 3, 7, 4), torch.randn(3, 7, 4)
        for a, b in ((q, q[:, :1]), (k[0], k[0]), (q[None], k)):
            parts = [shard_sequence(t, mesh, "x", t.dim() - 2, "zigzag") for t in (a, b, b)]
            with context_parallel(mesh, "x", length=7), sdpa_kernel(SDPBackend.MATH):
                o = sdpa(*parts)
            close(unshard_sequence(o, mesh, "x", o.dim() - 2, 7, "zigzag"), sdpa(a, b, b))

    run(check, 2)


# Processes ----------------------------------------------------------------------------------------------


def test_processes(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*launch, str(_SCRIPT), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"BRIDGE_RANKS_TIMEOUT": "60", "OMP_NUM_THREADS": "1"},
    )
    try:
        output = process.communicate(timeout=_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes then
        output = process.communicate()[0]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}, output[-3000:]

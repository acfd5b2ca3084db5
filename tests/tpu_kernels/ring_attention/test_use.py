"""Ring attention as people use it: compiled, differentiated twice, on the device, by torchrun; mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import bridge
from bridge import get_pallas_mesh
from bridge.ranks import run
from tpu_kernels import (
    SplashTiling,
    all_gather,
    masks,
    ring_attention,
    shard_sequence,
    splash_attention,
    ulysses_attention,
    unshard_sequence,
)
from tpu_kernels.ring_attention import vjp
from tpu_kernels.ring_attention.layouts import LAYOUTS, positions

from ..splash_attention.oracle import check
from .rings import attended, case

CAUSAL = masks.causal()
TILING = SplashTiling(128, 128, 128, 128, 128, 256, 128, 128, True)
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def part(x: torch.Tensor, layout: Any = "contiguous", dim: int = 2) -> torch.Tensor:
    """This rank's part of a tensor that can be divided."""
    size = dist.get_world_size()
    at = torch.from_numpy(positions(dist.get_rank(), size, x.shape[dim] // size, layout)).long()
    return x.index_select(dim, at).contiguous()


def qkv(length: int, heads: int = 1, dim: int = 16, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, heads, length, dim, generator=generator).to(dtype) for _ in range(3)]


def test_on_the_device(tpu: torch.device) -> None:
    one = case(ranks=2, length=50, mask=CAUSAL)
    check(one, attended(one, 2, device=tpu, mode="tpu"), "pallas")


def test_the_backward_is_in_the_mode_of_the_forward() -> None:
    """On the tpu device it runs in a thread of torch's own, for which no mode is set."""
    modes: list[str] = []

    def program() -> None:
        from tpu_kernels.ring_attention import vjp

        q, k, v = (part(t).to("tpu").requires_grad_() for t in qkv(20))
        gradient = vjp.gradient

        def seen(*args: Any) -> Any:
            modes.append(bridge.current_mode())
            return gradient(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vjp, "gradient", seen)
            with bridge.interpret("tpu"):
                o = ring_attention(q, k, v, get_pallas_mesh("x"), "x", soft_cap=1.0)
            o.sum().backward()

    run(program, 2)
    assert set(modes) == {"tpu"}


def test_compiled_with_the_same_results(device: torch.device) -> None:
    def program() -> None:
        mesh = get_pallas_mesh("x")
        given = [part(t).to(device) for t in qkv(24)]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return ring_attention(q * 2, k, v, mesh, "x", mask=masks.causal(), tiling=TILING) + 1

        inputs, others = ([t.clone().requires_grad_() for t in given] for _ in range(2))
        want, got = attend(*inputs), torch.compile(attend, fullgraph=True, backend="aot_eager")(*others)
        torch.testing.assert_close(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
        for one, other in zip(inputs, others, strict=True):
            torch.testing.assert_close(other.grad, one.grad)

    run(program, 2)


def test_second_derivatives() -> None:
    """Of a function of the gradients, against those of attention on one rank."""
    q, k, v = qkv(12, dim=8)
    weights = torch.randn(3, generator=torch.Generator().manual_seed(2))

    def second(attend: Any, inputs: list[torch.Tensor], total: Any) -> list[torch.Tensor]:
        first = torch.autograd.grad(total(attend(*inputs).square().sum()), inputs, create_graph=True)
        mixed = sum(
            (w * g.square().sum() for w, g in zip(weights, first, strict=True)), start=torch.zeros(())
        )
        return list(torch.autograd.grad(total(mixed), inputs))

    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want = second(lambda *t: splash_attention(*t, mask=CAUSAL), wide, lambda loss: loss)

    def program() -> None:
        mesh = get_pallas_mesh("x")
        local = [part(t).requires_grad_() for t in (q, k, v)]
        got = second(
            lambda q, k, v: ring_attention(q, k, v, mesh, "x", mask=CAUSAL), local, lambda loss: loss
        )
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), part(other), rtol=1e-4, atol=1e-5)

    run(program, 2)


def test_batches_and_a_device_mesh() -> None:
    """Any batch dimensions; a mesh of torch's own, with an axis for the batch, too."""
    q, k, v = (torch.randn(2, 3, 2, 20, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    want = splash_attention(q, k, v, mask=CAUSAL)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
        data, place = mesh.get_local_rank("data"), mesh.get_local_rank("sequence")

        def mine(x: torch.Tensor) -> torch.Tensor:
            return x[data : data + 1, :, :, 10 * place : 10 * place + 10].contiguous()

        got, lse = ring_attention(mine(q), mine(k), mine(v), mesh, "sequence", mask=CAUSAL, return_lse=True)
        torch.testing.assert_close(got, mine(want))
        assert lse.shape == got.shape[:-1]

    run(program, 4)


def test_what_a_score_mod_holds() -> None:
    """Tensors of the whole sequence, and numbers, are looked up by positions."""
    table, factor = torch.linspace(-1, 1, 40), torch.tensor(0.7)
    q, k, v = qkv(40)

    def change(score: Any, b: Any, h: Any, position: Any, kv: Any) -> Any:
        return score * factor + table[kv] * table[position]

    want = splash_attention(q, k, v, score_mod=change, mask=CAUSAL)

    def program() -> None:
        for layout in LAYOUTS:
            given = (part(q, layout), part(k, layout), part(v, layout))
            mesh = get_pallas_mesh("x")
            got = ring_attention(*given, mesh, "x", score_mod=change, mask=CAUSAL, layout=layout)
            torch.testing.assert_close(got, part(want, layout))

    run(program, 2)


def test_autocast_and_no_grad() -> None:
    def program() -> None:
        local: Any = [part(t).requires_grad_() for t in qkv(16)]
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            o = ring_attention(local[0], local[1], local[2], get_pallas_mesh("x"), "x")
        assert o.dtype == torch.bfloat16 and not o.requires_grad

    run(program, 2)


def test_by_processes(tmp_path: Path) -> None:
    _launch(2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [4, 8])
def test_by_many_processes(processes: int, tmp_path: Path) -> None:
    _launch(processes, tmp_path)


def _launch(processes: int, folder: Path) -> None:
    program = Path(__file__).parent / "by_torchrun.py"
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, str(processes), str(program), str(folder)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list(folder.iterdir())) == processes


# Faults that people reported of other rings ------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "tpu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_the_future(layout: Any, mode: str) -> None:
    """A token that changes moves nothing before it, on any rank, in results or gradients."""
    length, at = 64, 50

    def outcome(given: list[torch.Tensor]) -> torch.Tensor:
        def program() -> torch.Tensor:
            local: Any = [part(t, layout).requires_grad_() for t in given]
            q, k, v = local
            with bridge.interpret(mode):
                o = ring_attention(q, k, v, get_pallas_mesh("x"), "x", mask=CAUSAL, layout=layout)
                before = torch.from_numpy(positions(dist.get_rank(), 4, length // 4, layout)) < at
                (o * before[:, None]).square().sum().backward()
            return torch.cat([o.detach(), *(t.grad for t in local if t.grad is not None)], -1)

        places = torch.cat([torch.from_numpy(positions(rank, 4, length // 4, layout)) for rank in range(4)])
        return torch.cat(run(program, 4), 2)[:, :, torch.argsort(places)]

    given = qkv(length)
    changed = [t.clone() for t in given]
    for tensor in changed:
        tensor[:, :, at:] = 1e3
    first, second = outcome(given), outcome(changed)
    assert torch.equal(first[:, :, :at], second[:, :, :at])
    assert not torch.equal(first[:, :, at:], second[:, :, at:])


def test_errors_do_not_grow_with_the_ring() -> None:
    """bfloat16, eight layers one on the other: of eight ranks at most 1.5 times the error of one."""
    length, layers = 256, 8

    def stacked(attend: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            x = x + attend(x, x.flip(-1), x)
        return x

    x = qkv(length, dim=32)[0].bfloat16()
    want = stacked(lambda *t: splash_attention(*t, mask=CAUSAL), x.double())

    def error(ranks: int) -> float:
        def program() -> torch.Tensor:
            mesh = get_pallas_mesh("x")

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return ring_attention(q, k, v, mesh, "x", mask=CAUSAL)

            return stacked(attend, part(x))

        return float((torch.cat(run(program, ranks), 2).double() - want).norm())

    alone = error(1)
    assert alone > 0
    for ranks in (2, 4, 8):
        assert error(ranks) <= 1.5 * alone


@pytest.mark.parametrize("calls", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_many_calls_two_rings_and_a_rank_that_is_late(calls: int) -> None:
    """One after the other, each on the results of the one before, on two rings in turn."""
    given = qkv(32)

    def chained(attend: Any) -> torch.Tensor:
        x = given[0]
        for i in range(calls):
            x = attend(i, x, given[1], given[2])
        return x

    want = chained(lambda _, *t: splash_attention(*t, mask=CAUSAL))

    def program() -> None:
        rings = [(get_pallas_mesh("x"), "x"), (get_pallas_mesh(("a", "b"), (2, 2)), ("a", "b"))]
        x, k, v = map(part, given)
        with bridge.interpret("tpu"):
            for i in range(calls):
                if i == 7 and dist.get_rank() == 2:
                    time.sleep(0.2)
                x = ring_attention(x, k, v, *rings[i % 2], mask=CAUSAL)
        torch.testing.assert_close(x, part(want))

    run(program, 4)


def test_a_ring_of_one_is_attention() -> None:
    def program() -> None:
        q, k, v = qkv(20)
        got = ring_attention(q, k, v, get_pallas_mesh("x"), "x", mask=CAUSAL, layout="zigzag")
        assert torch.equal(got, splash_attention(q, k, v, mask=CAUSAL))

    run(program, 1)


# Mistakes ----------------------------------------------------------------------------------------------


def _mistakes(mesh: Any) -> list[tuple[dict[str, Any], type[Exception], str]]:
    def change(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + weight

    weight = torch.zeros((), requires_grad=True)
    return [
        ({"axis": "y"}, ValueError, "axis must be one of the mesh's axes, 'x', or two of them; got 'y'"),
        ({"axis": ("x", "x")}, ValueError, "or two of them"),
        ({"mesh": 3}, TypeError, "mesh must be from bridge.get_pallas_mesh, or a DeviceMesh, got int"),
        ({"layout": "spiral"}, ValueError, "layout must be one of 'contiguous', 'zigzag', got 'spiral'"),
        ({"layout": "zigzag"}, RuntimeError, "two pieces of equal length, got 5 positions of query"),
        ({"length": 4}, ValueError, "has 2 positions on each of 2 ranks .* got 5 keys"),
        ({"length": True}, TypeError, "length must be an int or None"),
        ({"mask": torch.ones(5, 5) > 0}, TypeError, r"masks.tensor\(visible\) makes one"),
        ({"mask": masks.tensor(torch.ones(5, 5) > 0)}, ValueError, "10"),
        ({"bidirectional": True}, ValueError, "needs more than 128 keys on each rank"),
        ({"score_mod": change}, ValueError, "one of them requires grad; detach it"),
        ({"kv_segment_ids": torch.zeros(5, dtype=torch.int32)}, RuntimeError, "without q_segment_ids"),
        (
            {"q_segment_ids": torch.zeros(10, dtype=torch.int32)},
            RuntimeError,
            r"must have the shape \[1, 5\]",
        ),
        ({"soft_cap": -1.0}, ValueError, "soft_cap must be positive"),
        ({"impl": "cuda"}, Exception, "unknown impl 'cuda'"),
        ({"tiling": 128}, TypeError, "tiling must be a SplashTiling or None, got 128"),
        ({"key": torch.zeros(1, 1, 5, 3)}, RuntimeError, "same last dimension"),
        (
            {"query": torch.zeros(1, 1, 5, 16, dtype=torch.int32)},
            TypeError,
            "ring_attention: query must be float16, .* got torch.int32",
        ),
    ]


def test_mistakes() -> None:
    def check() -> None:
        mesh = get_pallas_mesh("x")
        for changed, error, message in _mistakes(mesh):
            given: dict[str, Any] = {
                **dict(zip(("query", "key", "value"), (part(t) for t in qkv(10)), strict=True)),
                "mesh": mesh,
                "axis": "x",
            }
            with pytest.raises(error, match=message):
                ring_attention(**{**given, **changed})
        named = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        whole = DTensor.from_local(torch.zeros(1, 1, 5, 4), named, [Replicate()])
        with pytest.raises(TypeError, match=r"query must be a rank's own tensor, got a DTensor"):
            ring_attention(whole, whole, whole, mesh, "x")

    run(check, 2)


# Found by trying to break it ---------------------------------------------------------------------------


def test_a_compiled_ring_follows_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph does not keep whether keys travel inside of the kernels: what the sanitizer must see."""
    fused: list[bool] = []
    attend = vjp.attend

    def seen(problem: vjp.RingProblem, *arrays: Any) -> Any:
        fused.append(problem.fused)
        return attend(problem, *arrays)

    monkeypatch.setattr(vjp, "attend", seen)

    def program() -> None:
        mesh = get_pallas_mesh("x")
        x = part(qkv(18)[0])
        compiled = torch.compile(
            lambda x: ring_attention(x, x, x, mesh, "x", mask=CAUSAL, soft_cap=7.0),
            fullgraph=True,
            backend="aot_eager",
        )
        compiled(x)
        for mode, wanted in (("tpu", True), ("fast", False)):
            x = torch.cat([x, x], 1)  # other shapes: programs that are not there yet
            dist.barrier()
            fused.clear()
            dist.barrier()
            with bridge.interpret(mode):
                compiled(x)
                dist.barrier()
            assert set(fused) == {wanted}
            dist.barrier()

    run(program, 2)


@pytest.mark.parametrize("impl", ["pallas", "reference"])
def test_padding_may_hold_anything(impl: Any) -> None:
    """NaN in padding, and in the gradient for it, stays there: results for it are zeros."""

    def program() -> None:
        mesh, rank = get_pallas_mesh("x"), dist.get_rank()
        x = qkv(7)[0]
        want_of = x.clone().requires_grad_()
        want = splash_attention(want_of, want_of, want_of)
        want.square().sum().backward()
        padded = torch.cat([x, torch.full((1, 1, 1, 16), torch.nan)], 2)
        local = part(padded).requires_grad_()
        o, lse = ring_attention(local, local, local, mesh, "x", length=7, return_lse=True, impl=impl)
        weights = torch.where(o == 0, torch.nan, 2 * o).detach()  # of the square; NaN for padding
        (gradient,) = torch.autograd.grad(o, local, weights)
        assert want_of.grad is not None
        rows = slice(4 * rank, min(4 * rank + 4, 7))
        torch.testing.assert_close(o[:, :, : 3 + (rank == 0)], want[:, :, rows])
        torch.testing.assert_close(gradient[:, :, : 3 + (rank == 0)], want_of.grad[:, :, rows])
        if rank == 1:
            assert not o[:, :, 3].any() and not lse[:, :, 3].any() and not gradient[:, :, 3].any()

    run(program, 2)


def test_masks_of_the_whole_sequence_without_padding() -> None:
    q, k, v = qkv(13)
    table = torch.rand(13, 13, generator=torch.Generator().manual_seed(3)) > 0.4
    want = splash_attention(q, k, v, mask=masks.tensor(table))

    def program() -> None:
        mesh = get_pallas_mesh("x")
        q_part, k_part, v_part = (shard_sequence(t, mesh, "x", 2, "zigzag") for t in (q, k, v))
        options: Any = {"mask": masks.tensor(table), "layout": "zigzag", "length": 13}
        for attend in (ring_attention, ulysses_attention):
            o = attend(q_part, k_part, v_part, mesh, "x", **options)
            torch.testing.assert_close(unshard_sequence(o, mesh, "x", 2, 13, "zigzag"), want)

    run(program, 1)


def test_results_may_be_written_to() -> None:
    """No result is a view, to which autograd lets nobody write; on no rank."""

    def program() -> None:
        mesh, rank = get_pallas_mesh("x"), dist.get_rank()
        x = part(qkv(8)[0]).requires_grad_()
        whole = all_gather(x, mesh, "x", 2)
        whole.mul_(rank + 1.0).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 3.0))
        o = ring_attention(x, x, x, mesh, "x")
        assert not o._is_view()
        with torch.no_grad():
            o.mul_(3)

    run(program, 2)


def test_nothing_to_attend() -> None:
    def program() -> None:
        mesh = get_pallas_mesh("x")
        x, empty = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 0, 4)
        assert ring_attention(empty, empty, empty, mesh, "x").shape == empty.shape
        o, lse = ring_attention(x, empty, empty, mesh, "x", return_lse=True)
        assert not o.any() and bool((lse == -torch.inf).all())

    run(program, 2)

"""Ring attention beside gathering all keys first: predicted time, and how much of the copies is hidden.

    python benchmarks/ring_attention.py [--chips v5e,v6e,tpu7x] [--ranks 4] [--match TEXT] [--backward]
        [--simulate] [--seconds 600] [--json FILE]

Computing is predicted by the TPU compiler's schedule, copies between chips by the bandwidth of the links that
the table of chips has (published, or a guess: it says which). Nothing runs on a TPU. bfloat16, one sequence,
8 heads of 128. *copies* is how long the busiest link is busy; *hidden* the share of that for which no kernel
waits. The rival is
`all_gather` of keys and values, then splash attention over all of them, on the same scorer. `--simulate`
measures how long the simulation takes on this machine instead: 4 ranks, 2048 positions.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import torch
from jax.sharding import PartitionSpec as P

import bridge
from autotune.score import Score, Workload
from autotune.score.schedule import ScheduleScorer, compile_with_dumps
from bridge import get_pallas_mesh, topology
from bridge.chips import Chip, chip
from bridge.ranks import run
from bridge.topology import compiler_versions
from tpu_kernels import masks, ring_attention
from tpu_kernels._vmem import vmem_allowed
from tpu_kernels.collectives import kernel as collectives
from tpu_kernels.collectives.links import Line
from tpu_kernels.collectives.shipment import Shipment
from tpu_kernels.expressions.expression import Variable, parse, select, text
from tpu_kernels.ring_attention import fused, vjp
from tpu_kernels.ring_attention.formula import CAUSAL
from tpu_kernels.ring_attention.ring import Ring, cut_of
from tpu_kernels.splash_attention import select as tilings
from tpu_kernels.splash_attention import space
from tpu_kernels.splash_attention.tiles import Formula
from tpu_kernels.splash_attention.vjp import splash_attention

RESULTS = Path(__file__).parent / "results" / "ring_attention.json"
HEADS, HEAD_DIM = 8, 128


@dataclass(frozen=True)
class Case:
    """Self-attention of a sequence of `length` tokens on `ranks` devices; causal ones lie in zigzag."""

    length: int
    ranks: int
    causal: bool
    kv_heads: int
    backward: bool = False

    def __str__(self) -> str:
        mask = "causal, zigzag" if self.causal else "full"
        passes = "gradients" if self.backward else "forward"
        return f"{self.length} on {self.ranks}, {mask}, {HEADS}:{self.kv_heads} heads, {passes}"

    @property
    def count(self) -> int:
        """Positions on each rank."""
        return self.length // self.ranks

    def scale(self) -> float:
        """Of the products."""
        return HEAD_DIM**-0.5


def cases(ranks: int, backward: bool) -> Iterator[Case]:
    """The problems. Gradients of a causal mask depend on values that no schedule knows."""
    for length in (8192, 32768, 131072):
        for kv_heads in (8, 2):
            for causal in (False,) if backward else (True, False):
                yield Case(length, ranks, causal, kv_heads, backward)


# The programs ---------------------------------------------------------------------------------------


def problem_of(case: Case, on: Chip, q: jax.Array, k: jax.Array, v: jax.Array) -> vjp.RingProblem:
    ring = Ring(
        (Line("x", case.ranks),),
        "zigzag" if case.causal else "contiguous",
        case.count,
        case.count,
        cut_of(case.count, case.ranks, None),
    )
    tiling = tilings.tiling_for(q, k, v, "", "", case.scale(), 0.0, None, "pallas", sums=True)
    assert tiling is not None
    return vjp.RingProblem(
        ring=ring,
        batch=1,
        heads=HEADS,
        mask="",
        score="",
        lengths=(case.length, case.length),
        scale=case.scale(),
        tiling=tiling,
        vmem_limit_bytes=vmem_allowed(on),
        resident_bytes=space.resident_bytes(on),
        fused=True,
    )


def by_ring(case: Case, on: Chip) -> Callable[..., Any]:
    """Ring attention, with masks that a schedule can follow.

    In zigzag, keys of an earlier rank are seen in their first half by all queries, and those of a later rank
    by the second half of the queries: the same work. Here all hops but the first are of the first kind.
    """

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        problem = problem_of(case, on, q, k, v)
        if not case.causal:
            found: Any = vjp.attend(problem, q, k, v, [], None, None)
            return found[0]
        sums: Any = None
        common: Any = {"tiles": problem.tiling.forward, "vmem_limit_bytes": problem.vmem_limit_bytes}
        for hop in problem.ring.hops():
            mask = CAUSAL if hop.behind is None else text(Variable("kv") < case.count // 2)
            formula = Formula(parse(mask), None, problem.scale, 0.0)
            if hop.onward is None:
                last: Any = {"formula": formula, "before": sums, "out_dtype": q.dtype, **common}
                return fused.finish(q, k, v, [], None, **last).o
            shipment = Shipment((k, v), problem.ring.route(hop.onward, 2))
            sums, (k, v) = fused.advance(
                q, k, v, [], formula=formula, before=sums, shipment=shipment, **common
            )
        raise AssertionError("a ring ends")

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        o, pull_back = jax.vjp(forward, q, k, v)
        return pull_back(o)

    return gradients if case.backward else forward


def by_gathering(case: Case) -> Callable[..., Any]:
    """All keys and values on all ranks, then splash attention; of a causal mask, the first rank's share."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (collectives.all_gather(array, "x", case.ranks, 2) for array in (k, v))
        mask = ""
        if case.causal:
            index, half = Variable("q"), case.count // 2
            later = (2 * case.ranks - 2) * half
            mask = text(index + select(index >= half, later, 0) >= Variable("kv"))
        return splash_attention(q, k, v, (), None, None, mask=mask, impl="pallas")[0]

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def whole(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return splash_attention(q, k, v, (), None, None, impl="pallas")[0]

        gathered = [collectives.all_gather(array, "x", case.ranks, 2) for array in (k, v)]
        o, pull_back = jax.vjp(whole, q, *gathered)
        dq, dk, dv = pull_back(o)
        return dq, *(collectives.reduce_scatter(array, "x", case.ranks, 2) for array in (dk, dv))

    return gradients if case.backward else forward


# Predictions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The prediction for one case on one chip, milliseconds."""

    case: str
    chip: str
    ring: float
    waiting: float
    copies: float
    gathering: float
    confidence: str

    @property
    def hidden(self) -> float:
        """The share of the copies' time that nothing waits for."""
        return 1 - min(self.waiting / self.copies, 1)

    @property
    def ratio(self) -> float:
        """The ring's time by that of gathering first."""
        return self.ring / self.gathering


def score(case: Case, on: Chip, name: str, fn: Callable[..., Any], seconds: float) -> Score:
    mesh, own = topology.mesh(on, "x", case.ranks), P("x")
    program = jax.shard_map(fn, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)
    q, kv = (
        jax.ShapeDtypeStruct((case.ranks, heads, case.count, HEAD_DIM), jnp.bfloat16)
        for heads in (HEADS, case.kv_heads)
    )
    outs = (own,) * 3 if case.backward else own
    work = Workload(name, program, (q, kv, kv), mesh=mesh, in_specs=(own,) * 3, out_specs=outs)
    return ScheduleScorer(on, lambda *a, **k: compile_with_dumps(*a, **{**k, "timeout": seconds})).score(work)


def predicted(case: Case, chip_name: str, seconds: float) -> Row:
    """Both ways."""
    on = chip(chip_name)
    ring = score(case, on, f"ring, {case}", by_ring(case, on), seconds)
    gathering = score(case, on, f"gathering, {case}", by_gathering(case), seconds)
    return Row(
        str(case),
        chip_name,
        ring.time_s * 1e3,
        ring.breakdown["stalled_on_remote"] * 1e3,
        ring.units["ici"] * ring.time_s * 1e3,
        gathering.time_s * 1e3,
        ring.confidence,
    )


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| | chip | ring, ms | copies, ms | hidden | gathering first, ms | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.case} | {row.chip} | {row.ring:.3f} | {row.copies:.3f} | {row.hidden:.0%} | "
        f"{row.gathering:.3f} | {row.ratio:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


# The simulation -------------------------------------------------------------------------------------


def simulated(mode: str, heads: int) -> list[float]:
    """Seconds of three calls, one after the other; the first one compiles."""

    def program() -> list[float]:
        mesh = get_pallas_mesh("x")
        q, k, v = (torch.randn(1, heads, 512, HEAD_DIM, dtype=torch.bfloat16) for _ in range(3))
        found = []
        with bridge.interpret(mode):
            for _ in range(3):
                begin = time.perf_counter()
                ring_attention(q, k, v, mesh, "x", mask=masks.causal(), layout="zigzag")
                found.append(time.perf_counter() - begin)
        return found

    return run(program, 4)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chips", default="v5e,v6e,tpu7x", help="names with commas")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--backward", action="store_true", help="the forward and the gradients together")
    parser.add_argument("--simulate", action="store_true", help="time the simulation on this machine")
    parser.add_argument("--seconds", type=float, default=600, help="that a compile may take")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.simulate:
        for mode in ("fast", "tpu"):
            for heads in (1, HEADS):
                times = ", ".join(f"{seconds:.2f}" for seconds in simulated(mode, heads))
                print(f"4 ranks, 2048 positions, {heads} heads, mode {mode}: {times} s")
        return
    rows: list[Row] = []
    for case in cases(options.ranks, options.backward):
        if options.match not in str(case):
            continue
        for name in options.chips.split(","):
            rows.append(predicted(case, name, options.seconds))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            write(options.json, rows)
    print(table(rows))


def write(path: Path, rows: list[Row]) -> None:
    """The report so far."""
    versions = {name: compiler_versions()[name] for name in ("jax", "libtpu")}
    path.parent.mkdir(exist_ok=True)
    report = {"versions": versions, "dtype": "bfloat16", "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Our splash attention beside JAX's splash attention and Tokamax's attention, each at its best tiles.

    python benchmarks/splash_vs_peers.py [--chips v5e,v6e,tpu7x] [--all] [--backward] [--match TEXT]
        [--seconds 600] [--json FILE]

Scored by the TPU compiler's schedule, the same scorer for all; nothing runs on a TPU. bfloat16, one sequence.
*ratio* is our time over that of the best peer: below 1, ours is faster. `--all` takes every length with every
head dimension; without it, a selection. `--backward` scores the forward together with the gradients.
Tokamax takes part if it is installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from autotune.score import Score, Workload
from autotune.score.roofline import RooflineScorer
from autotune.score.schedule import ScheduleScorer, compile_with_dumps
from bridge.chips import chip
from bridge.topology import compiler_versions
from tpu_kernels import masks
from tpu_kernels.splash_attention.tiling import SplashTiling
from tpu_kernels.splash_attention.vjp import splash_attention

RESULTS = Path(__file__).parent / "results" / "splash_vs_peers.json"


@dataclass(frozen=True)
class Case:
    """One problem: self-attention of `length` tokens."""

    length: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    heads: int = 8
    kv_heads: int = 8

    def __str__(self) -> str:
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        heads = (
            f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads} heads"
        )
        return f"{self.length} {mask}, D={self.head_dim}, {heads}"

    @property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        n, w = self.length, self.window
        if w:
            return n * w - w * (w - 1) // 2
        return n * (n + 1) // 2 if self.causal else n * n


def selection(everything: bool) -> list[Case]:
    """The problems."""
    if everything:
        lengths, dims = (1024, 4096, 8192, 32768), (64, 128, 256)
        cases = [Case(n, d, causal) for n, d, causal in itertools.product(lengths, dims, (True, False))]
    else:
        cases = [Case(n, 128, causal) for n in (1024, 4096, 8192) for causal in (True, False)]
        cases += [Case(4096, 64), Case(4096, 256), Case(32768, 128, heads=2, kv_heads=2)]
    return [*cases, Case(4096, 128, kv_heads=1), Case(8192, 128, window=1024)]


@dataclass(frozen=True)
class Candidate:
    """One kernel with one choice of tiles."""

    kernel: str
    tiles: str
    attend: Callable[..., Any]
    layout: str = "BHTD"


# The kernels ----------------------------------------------------------------------------------------


def candidates(case: Case, backward: bool) -> Iterator[Candidate]:
    """Every kernel with tiles worth trying."""
    yield from ours(case, backward)
    yield from jax_splash(case, backward)
    if importlib.util.find_spec("tokamax"):
        yield from tokamax(case, backward)


def ours(case: Case, backward: bool) -> Iterator[Candidate]:
    tiles = [(2048, 2048, 512, 512), (2048, 2048, 512, 1024), (1024, 2048, 512, 512), (1024, 1024, 256, 512)]
    if case.window:
        tiles += [(2048, 2048, 256, 256), (1024, 1024, 256, 256)]
    gradients = [(1024, 1024, 256, 256), (2048, 2048, 256, 256)]
    if backward and case.window:
        gradients += [(512, 1024, 256, 256)]
    mask = masks.full()
    if case.causal:
        mask = masks.causal()
    if case.window:
        mask = masks.sliding_window(case.window - 1, 0)
    pairs = itertools.product(tiles[:1], gradients) if backward else ((size, gradients[0]) for size in tiles)
    for forward, gradient in pairs:
        tiling = SplashTiling(*forward, *gradient)
        attend = functools.partial(
            splash_attention,
            captures=(),
            sinks=None,
            seed=None,
            mask="" if mask.text == masks.full().text else mask.text,
            tiling=tiling,
            impl="pallas",
        )
        name = "/".join(map(str, gradient if backward else forward))
        yield Candidate("ours", name, lambda q, k, v, attend=attend: attend(q, k, v)[0])


def jax_splash(case: Case, backward: bool) -> Iterator[Candidate]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as shapes

    square = (case.length, case.length)
    mask: Any = shapes.CausalMask(square) if case.causal else shapes.FullMask(square)
    if case.window:
        mask = shapes.LocalMask(square, (case.window - 1, 0), 0)
    sizes = [
        (512, 512, 512),
        (1024, 1024, 512),
        (1024, 1024, 1024),
        (2048, 1024, 512),
        (2048, 2048, 512),
        (1024, 2048, 512),
    ]
    # Of the gradients, 2048 x 2048 takes minutes to compile, and was not the best at 4096 tokens.
    for block_q, block_kv, compute in sizes[1:4] if backward else sizes:
        if max(block_q, block_kv) > case.length:
            continue
        gradients: dict[str, Any] = {}
        if backward:
            gradients = {
                "block_q_dkv": block_q,
                "block_kv_dkv": block_kv,
                "block_kv_dkv_compute": compute,
                "use_fused_bwd_kernel": True,
            }
            block_q, block_kv, compute = min(1024, case.length), min(1024, case.length), 512
        blocks = kernels.BlockSizes(block_q, block_kv, compute, **gradients)
        group = case.heads // case.kv_heads
        make = kernels.make_splash_mha if group == 1 else kernels.make_splash_mqa
        attend = make(
            shapes.MultiHeadMask([mask] * (case.heads if group == 1 else group)),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
        )
        scale = case.head_dim**-0.5

        def call(q, k, v, attend=attend, group=group, scale=scale):
            q = q * scale
            if group == 1:
                return attend(q[0], k[0], v[0])
            grouped = q[0].reshape(k.shape[1], group, *q.shape[2:])
            return jax.vmap(attend)(grouped, k[0], v[0])

        tiles = (
            [gradients[name] for name in list(gradients)[:3]] if backward else [block_q, block_kv, compute]
        )
        yield Candidate("JAX splash", "/".join(map(str, tiles)), call)


def tokamax(case: Case, backward: bool) -> Iterator[Candidate]:
    # Private: the public function asks the device for its kind, and there is none.
    from tokamax._src.ops.attention import pallas_mosaic_tpu as attention  # pyright: ignore[reportMissingImports]
    from tokamax._src.ops.attention import pallas_mosaic_tpu_vjp as gradient  # pyright: ignore[reportMissingImports]

    class Attention(attention.PallasMosaicTpuFlashAttention):
        """The op, on a device that is not there."""

        def supported_on(self, device: object) -> bool:
            return True

    class Gradient(gradient.PallasMosaicTpuFlashAttentionVjp):
        """The gradient, too."""

        def supported_on(self, device: object) -> bool:
            return True

    if case.window:
        return  # its public attention refuses windows
    minor = attention.splash.QKVLayout.HEAD_DIM_MINOR
    blocks = [(1024, 1024, 512), (1024, 1024, 1024), (2048, 1024, 512), (2048, 2048, 512)]
    for block_q, block_kv, compute in blocks[:3] if backward else blocks:
        if max(block_q, block_kv) > case.length:
            continue
        sizes = (
            (min(1024, case.length), min(1024, case.length), 512)
            if backward
            else (block_q, block_kv, compute)
        )
        config = attention.Config(
            block_q=sizes[0],
            block_kv=sizes[1],
            block_kv_compute=sizes[2],
            q_layout=minor,
            k_layout=minor,
            v_layout=minor,
            use_experimental_scheduler=True,
        )
        derived = (
            Gradient(
                config=gradient.Config(
                    block_q_dkv=block_q, block_kv_dkv=block_kv, block_kv_dkv_compute=compute
                )
            )
            if backward
            else None
        )
        attend = functools.partial(Attention(config=config, vjp=derived), is_causal=case.causal)
        yield Candidate(
            "Tokamax",
            f"{block_q}/{block_kv}/{compute}",
            lambda q, k, v, attend=attend: attend(q, k, v),
            "BTHD",
        )


# Scores ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The prediction for one kernel with its best tiles."""

    case: str
    chip: str
    kernel: str
    tiles: str
    milliseconds: float
    teraflops: float
    roofline_share: float
    bound: str
    mxu: float
    confidence: str


def workload(case: Case, candidate: Candidate, backward: bool) -> Workload:
    """A call, or a call and its gradients. Useful operations: two products, or seven with the gradients."""

    def shape(heads: int) -> tuple[int, ...]:
        inner = (case.length, heads) if candidate.layout == "BTHD" else (heads, case.length)
        return (1, *inner, case.head_dim)

    q = jax.ShapeDtypeStruct(shape(case.heads), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct(shape(case.kv_heads), jnp.bfloat16)
    flops = 2 * case.heads * case.visible * case.head_dim * (7 if backward else 2)
    name = f"{candidate.kernel} {candidate.tiles}, {case}"

    def both(q, k, v, d_o):
        o, pull_back = jax.vjp(candidate.attend, q, k, v)
        return (o, *pull_back(d_o.reshape(o.shape)))

    if backward:
        return Workload(name, both, (q, kv, kv, q), matmul_flops=flops)
    return Workload(
        name,
        candidate.attend,
        (q, kv, kv),
        matmul_flops=flops,
        bytes_read=sum(a.size * 2 for a in (q, kv, kv)),
        bytes_written=q.size * 2,
    )


def best(case: Case, chip_name: str, backward: bool, seconds: float) -> list[Row]:
    """The row of each kernel, at the tiles that score best; kernels that can't do the case are left out."""
    on = chip(chip_name)
    in_time = functools.partial(compile_with_dumps, timeout=seconds)
    found: dict[str, tuple[Score, Candidate, Workload]] = {}
    for candidate in candidates(case, backward):
        work = workload(case, candidate, backward)
        try:
            score = ScheduleScorer(on, in_time).score(work)
        except Exception as error:  # one choice of tiles that does not compile must not hide the others
            print(f"no prediction: {chip_name} {work.name}: {type(error).__name__}: {str(error)[:120]}")
            continue
        if candidate.kernel not in found or score.time_s < found[candidate.kernel][0].time_s:
            found[candidate.kernel] = (score, candidate, work)
    rows = []
    for kernel, (score, candidate, work) in found.items():
        flops = work.matmul_flops or 0
        least = flops / on.bf16_flops_per_second * on.tensor_cores / on.cores_per_device
        if not backward:
            least = RooflineScorer(on).score(work).time_s * on.tensor_cores / on.cores_per_device
        rows.append(
            Row(
                str(case),
                chip_name,
                kernel,
                candidate.tiles,
                score.time_s * 1e3,
                flops / score.time_s / 1e12,
                least / score.time_s,
                score.bound,
                score.units.get("mxu", 0.0),
                score.confidence,
            )
        )
    return rows


def show(rows: list[Row]) -> None:
    """The rows of one case on one chip, and how ours compares."""
    for row in rows:
        print(
            f"{row.case:36} {row.chip:6} {row.kernel:11} {row.tiles:20} {row.milliseconds:9.3f} ms "
            f"{row.teraflops:6.1f} Tflop/s  {row.roofline_share:6.1%} of roofline  mxu {row.mxu:4.0%}  "
            f"bound: {row.bound}" + ("" if row.confidence != "low" else " (low confidence)")
        )
    times = {row.kernel: row.milliseconds for row in rows}
    peers = [time for kernel, time in times.items() if kernel != "ours"]
    if peers and "ours" in times:
        print(f"{'':36} {rows[0].chip:6} ratio {times['ours'] / min(peers):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chips", default="v5e,v6e,tpu7x", help="names with commas")
    parser.add_argument("--all", action="store_true", help="every length with every head dimension")
    parser.add_argument("--backward", action="store_true", help="the forward and the gradients together")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=600, help="that a compile may take")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    del sys.argv[1:]  # Tokamax reads the command line, too, and stumbles over what it does not know

    cases = [case for case in selection(options.all) if options.match in str(case)]
    wanted = list(itertools.product(cases, options.chips.split(",")))
    rows: list[Row] = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for found in threads.map(
            lambda pair: best(pair[0], pair[1], options.backward, options.seconds), wanted
        ):
            show(found)
            rows += found
            write(options.json, rows, options.backward)  # after each case: a whole run takes an hour or two
    summarise(rows)


def write(path: Path, rows: list[Row], backward: bool) -> None:
    """The report so far."""
    versions = {name: compiler_versions()[name] for name in ("jax", "libtpu")}
    if importlib.util.find_spec("tokamax"):
        versions["tokamax"] = importlib.metadata.version("tokamax")
    report = {
        "versions": versions,
        "dtype": "bfloat16",
        "backward": backward,
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def summarise(rows: list[Row]) -> None:
    """In how many cases ours is fastest, and by how much."""
    ratios = []
    for key in dict.fromkeys((row.case, row.chip) for row in rows):
        times = {row.kernel: row.milliseconds for row in rows if (row.case, row.chip) == key}
        peers = [time for kernel, time in times.items() if kernel != "ours"]
        if peers and "ours" in times:
            ratios.append(times["ours"] / min(peers))
    if ratios:
        print(
            f"{len(ratios)} cases: ours is fastest in {sum(r < 1 for r in ratios)}, by 10% or more in "
            f"{sum(r <= 0.9 for r in ratios)}; ratios {min(ratios):.2f} to {max(ratios):.2f}"
        )


if __name__ == "__main__":
    main()

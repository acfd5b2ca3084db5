"""Predicted times of kernels that others wrote, at standard shapes: the mark for our own.

    python benchmarks/peers_predicted.py [--chips v5e,v6e,tpu7x] [--json FILE]

JAX's splash attention, flash attention and grouped matmul; with Tokamax installed, its ragged_dot and
attention. Scored by the TPU compiler's schedule; nothing runs on a TPU. *roofline* is the least time for the
useful operations and the bytes, as a share of the predicted time.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
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
import numpy as np

from autotune.score import Workload
from autotune.score.roofline import RooflineScorer
from autotune.score.schedule import ScheduleScorer
from bridge.chips import chip
from bridge.topology import compiler_versions

RESULTS = Path(__file__).parent / "results" / "peers_predicted.json"
HEADS, SEQUENCE, HEAD_DIM = 8, 4096, 128
ROWS, GROUPS, INNER, OUTER = 8192, 8, 4096, 4096


@dataclass(frozen=True)
class Row:
    """The prediction for one kernel on one chip."""

    kernel: str
    chip: str
    milliseconds: float
    teraflops: float
    roofline_share: float
    bound: str
    confidence: str


def attention_work(
    name: str, fn: Callable[..., jax.Array], avals: tuple[jax.ShapeDtypeStruct, ...]
) -> Workload:
    """Causal attention: half of the scores and of their products with the values are useful."""
    nbytes = HEADS * SEQUENCE * HEAD_DIM * 2
    flops = 2 * 2 * HEADS * SEQUENCE * (SEQUENCE + 1) // 2 * HEAD_DIM
    return Workload(name, fn, avals, matmul_flops=flops, bytes_read=3 * nbytes, bytes_written=nbytes)


def grouped_work(name: str, fn: Callable[..., jax.Array]) -> Workload:
    """A grouped matmul of groups of equal size."""
    sizes = np.full(GROUPS, ROWS // GROUPS, np.int32)
    avals = (
        jax.ShapeDtypeStruct((ROWS, INNER), jnp.bfloat16),
        jax.ShapeDtypeStruct((GROUPS, INNER, OUTER), jnp.bfloat16),
        jax.ShapeDtypeStruct((GROUPS,), jnp.int32),
    )
    return Workload(
        name,
        fn,
        avals,
        {2: sizes},
        matmul_flops=2 * ROWS * INNER * OUTER,
        bytes_read=2 * (ROWS * INNER + GROUPS * INNER * OUTER),
        bytes_written=2 * ROWS * OUTER,
    )


def workloads() -> Iterator[Workload]:
    """The kernels of every peer that is installed."""
    shape = jax.ShapeDtypeStruct((HEADS, SEQUENCE, HEAD_DIM), jnp.bfloat16)
    yield attention_work("JAX splash attention, 1024/1024/512", splash(), (shape,) * 3)
    batched = jax.ShapeDtypeStruct((1, HEADS, SEQUENCE, HEAD_DIM), jnp.bfloat16)
    yield attention_work("JAX flash attention, default blocks", flash, (batched,) * 3)
    yield grouped_work("JAX megablox gmm, 512/1024/1024", megablox)
    if importlib.util.find_spec("tokamax"):
        yield from tokamax_workloads()


def splash() -> Callable[..., Any]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    sizes = kernels.BlockSizes(block_q=1024, block_kv=1024, block_kv_compute=512)
    mask = masks.MultiHeadMask([masks.CausalMask((SEQUENCE, SEQUENCE))] * HEADS)
    attend = kernels.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    return lambda q, k, v: attend(q, k, v)


def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return flash_attention(q, k, v, causal=True)


def megablox(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    return gmm(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16, tiling=(512, 1024, 1024))


def tokamax_workloads() -> Iterator[Workload]:
    # Private: the public functions ask the device for its kind, and there is none.
    from tokamax._src.ops.attention import pallas_mosaic_tpu as attention  # pyright: ignore[reportMissingImports]
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as ragged  # pyright: ignore[reportMissingImports]

    class Attention(attention.PallasMosaicTpuFlashAttention):
        """The op, on a device that is not there."""

        def supported_on(self, device: object) -> bool:
            return True

    minor = attention.splash.QKVLayout.HEAD_DIM_MINOR
    config = attention.Config(
        block_q=1024,
        block_kv=1024,
        block_kv_compute=512,
        q_layout=minor,
        k_layout=minor,
        v_layout=minor,
        use_experimental_scheduler=True,
    )
    op = Attention(config=config)
    shape = jax.ShapeDtypeStruct((1, SEQUENCE, HEADS, HEAD_DIM), jnp.bfloat16)
    attend = functools.partial(op, is_causal=True)
    yield attention_work("Tokamax attention, 1024/1024/512", lambda q, k, v: attend(q, k, v), (shape,) * 3)

    def ragged_dot(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        precision = (jax.lax.Precision.DEFAULT,) * 2
        return ragged.gmm(
            lhs, rhs, group_sizes=sizes, precision=precision, out_dtype=jnp.bfloat16, tiling=(512, 1024, 1024)
        )

    yield grouped_work("Tokamax ragged_dot, 512/1024/1024", ragged_dot)


def predict(workload: Workload, chip_name: str) -> Row | str:
    """The row of one kernel on one chip; or why there is none."""
    on = chip(chip_name)
    try:
        score = ScheduleScorer(on).score(workload)
    except Exception as error:  # one kernel that does not compile must not hide the others
        return f"{chip_name} {workload.name}: {type(error).__name__}: {str(error)[:160]}"
    least = RooflineScorer(on).score(workload).time_s * on.tensor_cores / on.cores_per_device
    flops = workload.matmul_flops or 0
    return Row(
        workload.name,
        chip_name,
        score.time_s * 1e3,
        flops / score.time_s / 1e12,
        least / score.time_s,
        score.bound,
        score.confidence,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chips", default="v5e,v6e,tpu7x", help="names with commas")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    del sys.argv[1:]  # Tokamax reads the command line, too, and stumbles over what it does not know

    wanted = [(workload, name) for workload in workloads() for name in options.chips.split(",")]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = list(threads.map(lambda pair: predict(*pair), wanted))
    rows = [row for row in results if isinstance(row, Row)]
    print(f"{'kernel':38} {'chip':6} {'ms':>8} {'Tflop/s':>8} {'roofline':>8}  bound")
    for row in rows:
        print(
            f"{row.kernel:38} {row.chip:6} {row.milliseconds:8.3f} {row.teraflops:8.1f} "
            f"{row.roofline_share:8.1%}  {row.bound}"
            + ("" if row.confidence != "low" else " (low confidence)")
        )
    for failure in (result for result in results if isinstance(result, str)):
        print(f"no prediction: {failure}")
    versions = {name: compiler_versions()[name] for name in ("jax", "libtpu")}
    if importlib.util.find_spec("tokamax"):
        versions["tokamax"] = importlib.metadata.version("tokamax")
    report = {
        "versions": versions,
        "attention": {"heads": HEADS, "sequence": SEQUENCE, "head_dim": HEAD_DIM, "mask": "causal"},
        "grouped_matmul": {"rows": ROWS, "groups": GROUPS, "inner": INNER, "outer": OUTER},
        "dtype": "bfloat16",
        "rows": [asdict(row) for row in rows],
    }
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

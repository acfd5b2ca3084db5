"""What a bridged call costs beyond the work itself, on 8x128 float32 tensors, in microseconds per call.

    python benchmarks/bridge_overhead.py [--rounds 300] [--calls 20] [--json FILE]

See benchmarks/README.md for how to read the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch
from timing import Call, Contender, Times, circumstances, measure, median_ratio, time_calls, write_report

import bridge
from bridge import execute
from bridge.arrays import Borrowing, from_jax

SHAPE = (8, 128)
GROWTH_CALLS, GROWTH_WINDOW = 10_000, 1_000
RESULTS = Path(__file__).parent / "results" / "bridge_overhead.json"


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """The work: too small to matter, so that the time is the way there and back."""
    return x + y


bridged_add = bridge.jax_op("bench::add", add)


# ------------------------------------------------------------------------------------ contenders


def make_contenders() -> list[Contender]:
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    x_grad, y_grad = x.clone().requires_grad_(), y.clone().requires_grad_()
    x_tpu, y_tpu = x.to("tpu"), y.to("tpu")
    x_tpu_grad, y_tpu_grad = x_tpu.clone().requires_grad_(), y_tpu.clone().requires_grad_()
    cotangent, cotangent_tpu = torch.ones(SHAPE), torch.ones(SHAPE, device="tpu")
    jitted = jax.jit(add)
    x_jax, y_jax = jax.device_put(np.asarray(x)), jax.device_put(np.asarray(y))
    library_op, custom_op = empty_library_op(), empty_custom_op()

    def with_backward(op: Callable, a: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> Call:
        return lambda: torch.autograd.grad(op(a, b), (a, b), g)

    return [
        Contender(JAX, lambda: jitted(x_jax, y_jax).block_until_ready()),
        Contender(LIBRARY, lambda: library_op(x, y)),
        Contender(CUSTOM_OP, lambda: custom_op(x, y)),
        Contender(NUMPY, lambda: torch.from_numpy(np.array(jitted(x.numpy(), y.numpy())))),
        Contender(EAGER, lambda: bridged_add(x, y)),
        Contender(EAGER_GRAD, lambda: bridged_add(x_grad, y_grad)),
        Contender(BACKWARD, with_backward(bridged_add, x_grad, y_grad, cotangent)),
        Contender(TORCH_BACKWARD, with_backward(torch.add, x_grad, y_grad, cotangent)),
        Contender(TPU, lambda: bridged_add(x_tpu, y_tpu)),
        Contender(TPU_GRAD, lambda: bridged_add(x_tpu_grad, y_tpu_grad)),
        Contender(TPU_BACKWARD, with_backward(bridged_add, x_tpu_grad, y_tpu_grad, cotangent_tpu)),
    ]


JAX = "(a) jitted JAX call on JAX arrays"
LIBRARY = "(b) empty op, Library.define + impl"
CUSTOM_OP = "(b') empty op, torch.library.custom_op"
NUMPY = "(d) through numpy, result copied"
EAGER = "bridge, cpu, no grad"
EAGER_GRAD = "bridge, cpu, requires_grad, forward"
BACKWARD = "bridge, cpu, forward + backward"
TORCH_BACKWARD = "torch.add, cpu, forward + backward"
TPU = "bridge, tpu, no grad"
TPU_GRAD = "bridge, tpu, requires_grad, forward"
TPU_BACKWARD = "bridge, tpu, forward + backward"


def empty_library_op() -> Callable:
    """The least a torch op can cost: the dispatcher, and a Python function that hands out one tensor."""
    result = torch.empty(SHAPE)
    library = torch.library.Library("bench", "FRAGMENT")
    _alive.append(library)  # its registrations end with it
    library.define("nothing(Tensor x, Tensor y) -> Tensor")
    library.impl("nothing", lambda x, y: result, "CPU")
    return torch.ops.bench.nothing.default


def empty_custom_op() -> Callable:
    """The same through torch's decorator, which adds its checks."""
    result = torch.empty(SHAPE)

    @torch.library.custom_op("bench::nothing_custom", mutates_args=())
    def nothing_custom(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return result

    return nothing_custom


_alive: list[object] = []


# ----------------------------------------------------------------------------------- measurement


@dataclass(frozen=True)
class Line:
    """Microseconds per call over the rounds, and how many times the floor (a)+(b) that is."""

    name: str
    minimum_us: float
    median_us: float
    times_floor: float


def summarise(times: Times) -> list[Line]:
    return [
        Line(name, min(us), statistics.median(us), median_ratio(times, name, JAX, LIBRARY))
        for name, us in times.items()
    ]


def measure_stages(rounds: int, calls: int) -> Times:
    """The whole of one eager call, then what it is made of, each measured alone."""
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    signature, table = bridged_add._signature, bridged_add._table
    bound = signature.bind((x, y), {})
    program = table.get(bound.key, bound.structure, bound.statics)
    borrowing = Borrowing()
    arrays = [borrowing.array(t, "bench")[0] for t in (x, y)]
    jitted = jax.jit(add)

    def find_program() -> object:
        bound = signature.bind((x, y), {})
        return table.get(bound.key, bound.structure, bound.statics)

    stages = [
        Contender("the whole call", lambda: bridged_add(x, y)),
        Contender("  bind arguments, find the program", find_program),
        Contender("  execute the program on tensors", lambda: execute.execute(program, (x, y))),
        Contender("    to JAX, addresses seen before", lambda: [borrowing.array(t, "bench") for t in (x, y)]),
        Contender("    compiled program", lambda: program.call(arrays, False)),
        Contender("      of which a bare jit call", lambda: jitted(*arrays)),
        Contender(
            "    compiled program, result to torch", lambda: from_jax(program.call(arrays, False)[0], None)
        ),
        Contender(
            "(beside it) to JAX, new addresses", lambda: [Borrowing().array(t, "bench") for t in (x, y)]
        ),
        Contender("(beside it) the call through torch.ops", lambda: torch.ops.bench.add(x, y)),
    ]
    return measure(stages, rounds, calls)


# ----------------------------------------------------------------------------------------- growth


@dataclass(frozen=True)
class Growth:
    """Time and memory of each thousand of 10,000 calls; the lists must not climb."""

    us_per_call: list[float]
    rss_kib: list[int]


def measure_growth() -> Growth:
    """Forward and backward calls on fresh tensors, after a thousand that fill what is bounded."""
    cotangent = torch.ones(SHAPE)

    def call() -> None:
        x = torch.randn(SHAPE).requires_grad_()
        torch.autograd.grad(bridged_add(x, x.detach()), x, cotangent)

    time_calls(call, GROWTH_WINDOW)
    us_per_call, rss_kib = [], []
    for _ in range(GROWTH_CALLS // GROWTH_WINDOW):
        us_per_call.append(time_calls(call, GROWTH_WINDOW))
        gc.collect()
        rss_kib.append(resident_kib())
    return Growth(us_per_call, rss_kib)


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


# ---------------------------------------------------------------------------------------- torchax

TORCHAX_PROGRAM = """
import json, time, torch, jax, torchax, torchax.interop as interop
torchax.enable_globally()
x, y = torch.randn(8, 128).to("jax"), torch.randn(8, 128).to("jax")
jitted = jax.jit(lambda a, b: a + b)
call = lambda: interop.call_jax(jitted, x, y)
for _ in range(20): call()
times = []
for _ in range(30):
    start = time.perf_counter_ns()
    for _ in range(200): call()
    times.append((time.perf_counter_ns() - start) / 200e3)
print(json.dumps([min(times), sorted(times)[15]]))
"""


def measure_torchax() -> list[float] | str:
    """[minimum, median] of torchax's interop call on its own arrays, or why there is none.

    It runs in a process of its own: torchax gives PrivateUse1, the key of our `tpu` device, the name `jax`.
    """
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", TORCHAX_PROGRAM], capture_output=True, text=True, env=environment, timeout=300
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout.splitlines()[-1])


# ----------------------------------------------------------------------------------------- report


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a bridged call costs.")
    parser.add_argument("--rounds", type=int, default=300, help="turns that each gets (default 300)")
    parser.add_argument("--calls", type=int, default=20, help="calls in one turn (default 20)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the report")
    options = parser.parse_args()
    torch.set_num_threads(1)

    bridge.reset_stats()
    times = measure(make_contenders(), options.rounds, options.calls)
    lines = summarise(times)
    stages = {name: min(t) for name, t in measure_stages(options.rounds, options.calls).items()}
    growth = measure_growth()
    torchax = measure_torchax()
    ratios = {
        "eager / ((a)+(b))": median_ratio(times, EAGER, JAX, LIBRARY),
        "eager / numpy way": median_ratio(times, EAGER, NUMPY),
        "forward+backward / forward": median_ratio(times, BACKWARD, EAGER_GRAD),
        "forward+backward / forward without grad": median_ratio(times, BACKWARD, EAGER),
        "tpu: eager / ((a)+(b))": median_ratio(times, TPU, JAX, LIBRARY),
        "tpu: forward+backward / forward": median_ratio(times, TPU_BACKWARD, TPU_GRAD),
        "tpu: forward+backward / forward without grad": median_ratio(times, TPU_BACKWARD, TPU),
    }

    print(f"{'us per call, two 8x128 float32 tensors':<46}{'min':>8}{'median':>8}  x ((a)+(b))")
    for line in lines:
        print(f"{line.name:<46}{line.minimum_us:8.1f}{line.median_us:8.1f}{line.times_floor:10.2f}")
    if isinstance(torchax, str):
        print(f"(c) torchax: skipped ({torchax})")
    else:
        print(f"{'(c) torchax interop.call_jax (other process)':<46}{torchax[0]:8.1f}{torchax[1]:8.1f}")
    print("\nRatios within a round, median")
    for name, ratio in ratios.items():
        print(f"  {name:<44}{ratio:8.2f}")
    print("\nOne eager call on cpu and its parts, minimum us")
    for name, us in stages.items():
        print(f"  {name:<44}{us:8.1f}")
    print(
        f"\nGrowth over {GROWTH_CALLS:,} forward+backward calls on fresh tensors: first thousand "
        f"{growth.us_per_call[0]:.1f} us per call, last {growth.us_per_call[-1]:.1f}; "
        f"memory {growth.rss_kib[-1] - growth.rss_kib[0]:+d} KiB"
    )
    print(f"\n{bridge.stats()}")

    here = circumstances()
    here["versions"]["jax"] = jax.__version__
    report = here | {
        "rounds": options.rounds,
        "calls": options.calls,
        "lines": [asdict(line) for line in lines],
        "ratios": ratios,
        "stages_us": stages,
        "growth": asdict(growth),
        "torchax": torchax,
    }
    write_report(options.json, report)


if __name__ == "__main__":
    main()

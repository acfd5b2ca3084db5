"""`tpu-autotune check`: does it compile for a chip, and if not, why."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from autotune.score.protocol import Workload
from autotune.targets import add_chips_argument, add_target_arguments, chosen_chips, workloads
from bridge.chips import Chip
from bridge.topology import TIMEOUT


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("check", help="whether a kernel compiles for each chip, and if not, why")
    parser.set_defaults(run=run)
    add_target_arguments(parser)
    add_chips_argument(parser)
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, help="seconds for each (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Compile TARGET for each chip. Returns 0 if it compiles for all of them, else 1."""
    results = check(workloads(options), chosen_chips(options), options.timeout)
    compiles = all(result["compiles"] for result in results)
    if options.json:
        print(json.dumps({"target": options.target, "compiles": compiles, "results": results}, indent=2))
    else:
        print("\n".join(_text(result) for result in results))
    return 0 if compiles else 1


def check(
    targets: Sequence[Workload], for_chips: Sequence[Chip], timeout: float = TIMEOUT
) -> list[dict[str, Any]]:
    """One record for each workload and chip: whether it compiles, and what it uses or why not."""
    from bridge.aot.pool import shared

    with ThreadPoolExecutor(shared().size) as threads:
        tasks = [
            threads.submit(_check_one, target, target_chip, timeout)
            for target in targets
            for target_chip in for_chips
        ]
        try:
            return [task.result() for task in tasks]
        except KeyboardInterrupt:  # do not wait for the compilers
            threads.shutdown(wait=False, cancel_futures=True)
            shared().close()
            raise


def _check_one(target: Workload, on: Chip, timeout: float) -> dict[str, Any]:
    from bridge.topology import CompileError, CompilerMissing, compile_for

    record: dict[str, Any] = {"name": target.name, "chip": on.name}
    try:
        with compile_for(target.fn, target.avals, on, timeout=timeout) as compiled:
            return record | {
                "compiles": True,
                "kernels": [dataclasses.asdict(kernel) for kernel in compiled.kernels],
                "memory": dataclasses.asdict(compiled.memory),
                "vmem_limit_bytes": on.vmem_limit_bytes,
                "versions": dict(compiled.versions),
            }
    except CompilerMissing:
        raise
    except CompileError as error:
        return record | {"compiles": False, "error": _compile_error(error)}
    except Exception as error:  # the function's own: it did not get as far as the compiler
        return record | {"compiles": False, "error": _python_error(error)}


def _compile_error(error: Any) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "what": error.what,
        "kernel": error.kernel,
        "where": error.where,
        "advice": error.advice,
        "details": error.details,
    }


def _python_error(error: Exception) -> dict[str, Any]:
    from bridge.aot.explain import user_frame

    return {
        "type": type(error).__name__,
        "what": f"tracing it raised {type(error).__name__}: {error}",
        "kernel": "",
        "where": user_frame(error),
        "advice": "",
        "details": "\n".join(getattr(error, "__notes__", [])),
    }


def _text(result: dict[str, Any]) -> str:
    head = f"{result['chip']:6} {result['name']}:"
    if result["compiles"]:
        return f"{head} compiles. {_use(result)}"
    error = result["error"]
    verdict = "no answer" if error["type"] in ("CompileTimeout", "CompilerCrashed") else "does not compile"
    lines = [f"{head} {verdict}: {error['what']}"]
    if error["kernel"]:
        lines.append(f"         kernel: {error['kernel']}")
    if error["where"]:
        lines.append(f"         where:  {error['where']}")
    if error["advice"]:
        lines.append(f"         do:     {error['advice']}")
    return "\n".join(lines)


def _use(result: dict[str, Any]) -> str:
    memory, limit = result["memory"], _mebibytes(result["vmem_limit_bytes"])
    hbm = memory["argument_bytes"] + memory["output_bytes"] + memory["temp_bytes"] - memory["alias_bytes"]
    parts = [
        f"{kernel['name']} uses {_mebibytes(kernel['vmem_bytes'])} of VMEM (usual limit {limit})"
        for kernel in result["kernels"]
        if kernel["vmem_bytes"] is not None
    ]
    parts += [] if result["kernels"] else ["no Pallas kernel in it"]
    return ", ".join([*parts, f"{_mebibytes(hbm)} of HBM"])


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"

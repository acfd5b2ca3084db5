"""torch.distributed on the tpu device: two processes, started with torchrun, check together.

One launch runs every check of `distributed_checks.py`, for each way to name the backend; each test here asks
whether both processes passed one of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.device import extension

_SCRIPT = Path(__file__).with_name("distributed_checks.py")
_SIZE = 2
_SECONDS = 240

COLLECTIVES = [
    "reductions",
    "a_part_of_a_tensor",
    "gathers_and_scatters",
    "all_to_all",
    "point_to_point",
    "asynchronous_work_hands_out_tensors_of_the_device",
    "the_order_of_many_asynchronous_works",
    "objects_and_barriers",
    "subgroups",
    "functional_collectives_and_their_gradients",
    "collectives_in_compiled_graphs",
    "mixed_devices_are_refused",
]
LIBRARIES = [
    "ddp",
    "ddp_communication_hooks",
    "ddp_without_synchronisation_accumulates",
    "synchronised_batch_norm",
    "dtensor",
    "dtensor_random_numbers",
    "tensor_parallel_layers",
    "checkpoint_of_plain_tensors",
]
FSDP2 = (  # it resizes storages
    ["fsdp2", "fsdp2_from_the_meta_device", "distributed_checkpoint"]
    if extension.loaded()
    else ["fsdp2_names_the_extension"]
)
CHECKS = {
    "": [*COLLECTIVES, "cpu_tensors_are_served_too", *LIBRARIES, *FSDP2],
    "gloo": ["reductions", "gathers_and_scatters", "cpu_tensors_are_served_too"],
    "cpu:gloo,tpu:tpu_dist": ["reductions", "gathers_and_scatters", "cpu_tensors_are_served_too"],
    "tpu_dist": ["reductions", "subgroups", "cpu_tensors_are_refused"],
}


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], str]:
    """The checks that passed, as "backend.name.rank", and what the processes printed."""
    folder = tmp_path_factory.mktemp("checks")
    (folder / "checks.json").write_text(json.dumps(CHECKS))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_SIZE)]
    process = subprocess.Popen(
        [*launch, str(_SCRIPT), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output = process.communicate(timeout=_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes then
        output = f"not done after {_SECONDS} seconds\n{process.communicate()[0]}"
    return {path.name for path in folder.iterdir()}, output


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(number, name, id=f"{backend or 'no name'}-{name}")
        for number, (backend, names) in enumerate(CHECKS.items())
        for name in names
    ],
)
def test_two_processes(passed: tuple[set[str], str], number: int, name: str) -> None:
    files, output = passed
    missing = [rank for rank in range(_SIZE) if f"{number}.{name}.{rank}" not in files]
    assert not missing, f"not passed in rank {missing}; the processes printed:\n{output[-6000:]}"


def test_every_check_runs() -> None:
    written = {
        line.removeprefix("def check_").partition("(")[0]
        for line in _SCRIPT.read_text().splitlines()
        if line.startswith("def check_")
    }
    needs_other_build = {"fsdp2", "fsdp2_from_the_meta_device", "distributed_checkpoint"}
    needs_other_build.add("fsdp2_names_the_extension")
    assert written - needs_other_build <= {name for names in CHECKS.values() for name in names}

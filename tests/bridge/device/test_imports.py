"""In what order torch, JAX and bridge are imported does not matter, and `import torch` brings no JAX."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHECK = """
import torch
x = torch.ones(2, device="tpu")
assert (x + x).tolist() == [2.0, 2.0]
assert torch.tpu.is_simulated()
"""


def run(code: str, **environment: str) -> None:
    """Run code in a new process; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_import_torch_alone_brings_the_device_and_no_jax() -> None:
    heavy = ("jax", "jaxlib", "torch._dynamo", "torch._inductor", "bridge.jax_op", "numpy.testing")
    run(f"{CHECK}\nimport sys\nassert not [m for m in {heavy} if m in sys.modules]")


@pytest.mark.parametrize(
    "first",
    [
        "import bridge, torch",
        "import jax, torch",
        "import bridge.device.ops",
        "from bridge import device, to_jax",
    ],
)
def test_import_orders(first: str) -> None:
    run(first + CHECK)


def test_without_autoload_the_device_is_registered_by_hand() -> None:
    run(
        "import torch\nassert not hasattr(torch, 'tpu')\n"
        "import bridge.device\nassert not hasattr(torch, 'tpu')\n"
        "assert bridge.device.register()" + CHECK,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_pallas_namespace_is_the_bridge() -> None:
    run(
        "import torch, bridge, sys\nassert 'jax' not in sys.modules\n"
        "assert torch.tpu.pallas.jax_op is bridge.jax_op\n"
        "from torch.tpu.pallas import jax_op\nimport torch.tpu.pallas"
    )


def test_another_backend_in_the_only_place_does_not_break_import() -> None:
    run(
        "import torch\ntorch.utils.rename_privateuse1_backend('other')\n"
        "from bridge import device, namespace\nnamespace.autoload()\nassert not device.is_simulated()\n"
        "try: device.register()\nexcept device.DeviceTakenError as error: assert \"'other'\" in str(error)\n"
        "else: raise AssertionError",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )

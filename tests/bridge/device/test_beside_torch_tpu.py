"""The simulated device and `torch_tpu` both want the name "tpu": which serves, and what the other does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from bridge import precedence

HERE = Path(__file__).parent
STUB = HERE / "stub_torch_tpu"
CHECKS = HERE / "with_torch_tpu.py"

_runs_at_start = Path(sysconfig.get_path("purelib"), "tpu_kernels_sdk.pth").exists()
_installed = PathFinder.find_spec("torch_tpu") is not None
needs_wheel = pytest.mark.skipif(
    not _installed,
    reason="needs the package torch_tpu and what it depends on: pip install torch_tpu==0.2.0",
)

needs_no_wheel = pytest.mark.skipif(_installed, reason="torch_tpu is installed here, in the stand-in's place")

OURS_SERVES = """
import torch
assert (torch.ones(2, device="tpu") + 1).tolist() == [2, 2]
assert torch.tpu.is_simulated()
import sys
assert not [name for name in sys.modules if name.startswith("torch_tpu")]
"""
A_TPU = "from bridge import precedence\nprecedence.tpu_present = lambda: True\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with the stand-in for `torch_tpu` installed."""
    folder = tmp_path / "site"
    shutil.copytree(STUB, folder)
    information = folder / "torch_tpu-0.2.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\ntorch_tpu = torch_tpu._loader:load\n")
    return folder


def run(*command: str, site: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, outside of the checkout; `site` is searched first."""
    settings = os.environ | {"JAX_PLATFORMS": "cpu", "BRIDGE_DEVICE_EXTENSION": "0"} | environment
    if site is not None:
        settings["PYTHONPATH"] = str(site)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:bridge", *command],
        env=settings,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


def searched_last(site: Path) -> str:
    return f"import sys\nsys.path.append({str(site)!r})\n"


# -- no TPU --------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not _runs_at_start, reason="the installation is older than tpu_kernels_sdk.pth: pip install -e ."
)
def test_installed_ours_serves_wherever_torch_tpu_is_found(site: Path) -> None:
    run("-c", OURS_SERVES, site=site)


@needs_no_wheel
def test_found_before_torch_tpu_ours_serves(site: Path) -> None:
    run("-c", searched_last(site) + OURS_SERVES)


def test_imported_before_torch_ours_serves(site: Path) -> None:
    run("-c", "import bridge\n" + OURS_SERVES, site=site)
    run("-c", "import tpu_kernels\n" + OURS_SERVES, site=site)


def test_torch_tpu_cannot_be_imported_beside_ours(site: Path) -> None:
    refused = """
for name in ("torch_tpu", "torch_tpu._internal.pallas.pallas"):
    try:
        __import__(name)
    except ImportError as error:
        assert "no TPU" in str(error) and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in str(error), error
    else:
        raise AssertionError(f"{name} was imported")
"""
    run("-c", "import bridge\n" + OURS_SERVES + refused, site=site)


@needs_no_wheel
def test_found_after_torch_tpu_import_works_and_the_log_says_what_to_do(site: Path) -> None:
    refused = """
import torch
from bridge import device
assert not device.is_simulated()
try:
    device.register()
except device.DeviceTakenError as error:
    assert "Import bridge before torch" in str(error), error
else:
    raise AssertionError("registered over the kernels of torch_tpu")
"""
    found_first = f"import sys\nsys.path.insert(0, {str(site)!r})\n"
    assert "Import bridge before torch" in run("-c", found_first + refused).stderr


def test_torch_tpu_imported_by_hand_is_left_alone(site: Path) -> None:
    code = "import bridge, torch_tpu._loader\nassert torch_tpu._loader.load.__module__ == 'torch_tpu._loader'"
    run("-c", code, site=site, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@needs_no_wheel
def test_without_torch_tpu_importing_it_fails_as_always() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch_tpu'"):
        __import__("torch_tpu")


@needs_no_wheel
def test_a_folder_named_torch_tpu_is_not_the_package(tmp_path: Path) -> None:
    (tmp_path / "torch_tpu").mkdir()
    run(
        "-c",
        "import bridge\n" + OURS_SERVES + "import torch_tpu\nassert torch_tpu.__file__ is None",
        site=tmp_path,
    )


# -- with a TPU ----------------------------------------------------------------------------------


@needs_no_wheel
def test_with_a_tpu_ours_steps_aside_wherever_it_is_found(site: Path) -> None:
    theirs_serves = """
import torch
from bridge import device
assert device.register() is False and not device.is_simulated()
assert torch.ones(2, device="tpu").device.type == "tpu" and not hasattr(torch.tpu, "is_simulated")
import torch_tpu._internal
"""
    run("-c", A_TPU + searched_last(site) + theirs_serves, STUB_TPU="1")
    run("-c", A_TPU + theirs_serves, site=site, STUB_TPU="1")


def test_with_a_tpu_every_kernel_goes_through_torch_tpu(site: Path) -> None:
    code = (
        A_TPU
        + f"import runpy, sys\nsys.argv[1:] = ['stub']\nrunpy.run_path({str(CHECKS)!r}, run_name='__main__')"
    )
    run("-c", code, site=site, STUB_TPU="1", STUB_TPU_NAME="TPU v5e")


def test_a_tpu_is_what_vfio_exposes_of_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, vfio = tmp_path / "devices", tmp_path / "vfio"
    monkeypatch.setattr(precedence, "_PCI_DEVICES", devices)
    monkeypatch.setattr(precedence, "_VFIO", vfio)

    def add(name: str, vendor: str, group: str) -> None:
        (devices / name).mkdir(parents=True)
        (devices / name / "vendor").write_text(vendor + "\n")
        (devices / name / "iommu_group").symlink_to(tmp_path / "iommu_groups" / group)

    assert not precedence.tpu_present()
    vfio.mkdir()
    (vfio / "7").touch()
    add("network", "0x1ae0", "3")  # Google's, not exposed
    add("other", "0x10de", "7")  # exposed, not Google's
    (devices / "broken").mkdir()
    assert not precedence.tpu_present()
    add("tpu", "0x1ae0", "7")
    assert precedence.tpu_present()


# -- the real package, which needs no TPU to trace and export ------------------------------------


@needs_wheel
def test_the_real_torch_tpu_takes_every_kernel() -> None:
    """Its `jax_op` takes the signatures and gives the same shapes, and it exports every derived program."""
    printed = run("-W", "ignore", str(CHECKS), "wheel", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout
    assert "layer_norm: handed over to torch_tpu" in printed


@needs_wheel
def test_beside_the_real_torch_tpu_ours_serves() -> None:
    run("-c", "import bridge\n" + OURS_SERVES)
    if _runs_at_start:
        run("-c", OURS_SERVES)

"""The C++ part: when it is used, and what only it can do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge.device import building, extension

needs_extension = pytest.mark.skipif(extension.loaded() is None, reason="this process runs in pure Python")


def run(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- building and choosing -----------------------------------------------------------------------


@pytest.mark.skipif(
    os.environ.get(extension.ENVIRONMENT) == "0" or not (os.environ.get("CXX") or shutil.which("c++")),
    reason="pure Python was asked for, or there is no compiler",
)
def test_it_is_in_use_where_a_compiler_is() -> None:
    assert extension.loaded() is not None


def test_the_environment_chooses() -> None:
    code = "from bridge.device import extension; print(extension.loaded() is None)"
    assert run(code, BRIDGE_DEVICE_EXTENSION="0") == "True"
    if extension.loaded() is not None:
        assert run(code, BRIDGE_DEVICE_EXTENSION="1") == "False"
    wrong = "import bridge.device.extension as e\ntry: e.loaded()\nexcept ValueError as error: print(error)"
    # `import torch` would load it: torch reports the error of a backend and goes on without.
    told = run(wrong, BRIDGE_DEVICE_EXTENSION="yes", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert told == "the environment variable BRIDGE_DEVICE_EXTENSION must be 0 or 1, got 'yes'"


def test_a_library_is_named_after_all_it_was_made_from(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    torch_folder = tmp_path / "torch"
    torch_folder.mkdir()
    (torch_folder / "version.py").write_text("__version__ = '9.1.0+cpu'\n")
    name = building.library_name(torch_folder)
    (torch_folder / "version.py").write_text("__version__ = '9.1.0+cu130'\n")
    assert building.library_name(torch_folder) == name  # the same headers
    (torch_folder / "version.py").write_text("__version__ = '9.2.0'\n")
    assert building.library_name(torch_folder) != name
    (torch_folder / "version.py").write_text("__version__ = '9.1.0'\n")
    shutil.copytree(building.SOURCES, tmp_path / "cpp")
    with (tmp_path / "cpp/ops.cpp").open("a") as source:
        source.write("// changed\n")
    monkeypatch.setattr(building, "SOURCES", tmp_path / "cpp")
    assert building.library_name(torch_folder) != name


def test_without_a_compiler_or_with_bad_source_it_says_what_is_wrong(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    broken = tmp_path / "cpp"
    broken.mkdir()
    (broken / "module.cpp").write_text("this is no C++;\n")
    monkeypatch.setattr(building, "SOURCES", broken)
    monkeypatch.delenv("CXX", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(building.BuildError, match="no C\\+\\+ compiler was found"):
            building.build(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        with pytest.raises(building.BuildError, match="no-such-compiler could not be run"):
            building.build(tmp_path)
    if shutil.which("c++"):
        with pytest.raises(building.BuildError, match="module.cpp"):
            building.build(tmp_path)
    assert not list(tmp_path.glob("*.so"))


def test_pure_python_names_what_needs_the_extension() -> None:
    code = (
        "from bridge.device import extension\n"
        "try: extension.required('a memory limit')\n"
        "except NotImplementedError as error: print(error)"
    )
    told = run(code, BRIDGE_DEVICE_EXTENSION="0")
    assert told.startswith("a memory limit needs the C++ part") and "python -m bridge.device.build" in told


# -- storages ------------------------------------------------------------------------------------


@needs_extension
def test_a_grown_tensor_still_shares_its_storage_with_its_views() -> None:
    x = torch.arange(4.0, device="tpu")
    view = x[1:3]
    x.resize_(1000)
    x[:4] = 7
    assert x.data_ptr() + 4 == view.data_ptr() and view.tolist() == [7, 7]


@needs_extension
def test_storages_can_be_freed_and_given_back() -> None:
    x = torch.arange(4.0, device="tpu")
    view = x[2:]
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(16)
    x.fill_(3)
    assert view.tolist() == [3, 3]
    storage.resize_(8)
    storage.resize_(16)
    assert x[:2].tolist() == [3, 3]  # what both sizes hold is kept


@needs_extension
def test_an_out_argument_that_is_an_input_is_the_result() -> None:
    x = torch.arange(3.0, device="tpu")
    assert torch.add(x, 1, out=x) is x and x.tolist() == [1, 2, 3]
    many = [torch.full((2,), float(i), device="tpu") for i in range(40)]
    results = torch._foreach_add([*many, *many], 1)
    assert [r.tolist() for r in results] == [[i + 1.0] * 2 for i in [*range(40), *range(40)]]


@needs_extension
def test_set_gives_a_tensor_another_storage() -> None:
    x, y = torch.arange(3.0, device="tpu"), torch.arange(5.0, device="tpu")
    x.set_(y)  # type: ignore[call-overload]
    assert x.data_ptr() == y.data_ptr() and x.shape == (5,)
    x.set_()  # type: ignore[call-overload]
    assert x.shape == (0,) and x.device.type == "tpu" and y.tolist() == [0, 1, 2, 3, 4]


@needs_extension
def test_a_tensor_of_zeros_without_memory_can_be_copied() -> None:
    zeros = torch._efficientzerotensor((2, 3), device="tpu")
    assert zeros.cpu().tolist() == [[0.0] * 3] * 2
    assert torch.zeros(2, 3, device="tpu").copy_(zeros).tolist() == [[0.0] * 3] * 2


# -- several devices -----------------------------------------------------------------------------

SEVERAL = """
import torch
a, b = torch.arange(3.0, device="tpu:0"), torch.arange(3.0, device="tpu:1")
assert torch.tpu.device_count() == torch.accelerator.device_count() == 3
assert b.device.index == 1 and (b * 2).device.index == 1 and b.to("tpu:2").device.index == 2
assert a.copy_(b + 5).tolist() == [5, 6, 7] and a.device.index == 0
for mix in (lambda: a + b, lambda: a.add_(b), lambda: torch.cat([a, b])):
    try: mix()
    except RuntimeError as error: assert "tpu:0 and tpu:1" in str(error), error
    else: raise AssertionError("devices were mixed")
assert (b + torch.tensor(1.0)).tolist() == [1, 2, 3]
with torch.tpu.device(2):
    assert torch.empty(1, device="tpu").device.index == 2 and torch.randn(1, device="tpu").device.index == 2
assert torch.empty(1, device="tpu").device.index == 0
w = torch.ones(3, device="tpu:1", requires_grad=True)
(w * b).sum().backward()
assert w.grad.device.index == 1 and w.grad.tolist() == [0, 1, 2]
lstm = torch.nn.LSTM(2, 3).to("tpu:1")
assert lstm(torch.ones(4, 2, device="tpu:1"))[0].device.index == 1
try: torch.empty(1, device="tpu:3")
except RuntimeError as error: assert "device_count() is 3" in str(error)
else: raise AssertionError("a device that does not exist was given")
torch.manual_seed(1)
draws = [torch.rand(2, device=f"tpu:{i}").tolist() for i in range(3)]
assert draws[0] == draws[1] == draws[2]

import jax
from jax.experimental import pallas as pl
def double(x_ref, o_ref): o_ref[...] = 2 * x_ref[...]
@torch.tpu.pallas.jax_op("several::double")
def op(x: jax.Array) -> jax.Array:
    return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
assert op(b).device.index == 1 and op(b).tolist() == [0, 2, 4]
print("passed")
"""


@needs_extension
def test_several_devices_are_kept_apart() -> None:
    assert run(SEVERAL, BRIDGE_DEVICE_COUNT="3", JAX_PLATFORMS="cpu") == "passed"


def test_a_wrong_number_of_devices_is_refused() -> None:
    code = (
        "from bridge.device import extension\n"
        "try: extension.device_count()\n"
        "except ValueError as error: print(error)"
    )
    for given in ("0", "65", "two"):
        told = run(code, BRIDGE_DEVICE_COUNT=given, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert told == f"the environment variable BRIDGE_DEVICE_COUNT must be from 1 to 64, got {given!r}"


# -- settings that are not the device's -----------------------------------------------------------


def test_autocast_of_the_cpu_does_not_reach_tpu_tensors() -> None:
    x = torch.randn(3, 3, device="tpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.float32

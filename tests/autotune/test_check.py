"""`tpu-autotune check` and `doctor`: does it compile for a chip, and does the compiler work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.cli import main
from bridge.chips import chips

MODULE = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

def scaled(x, factor, negate=False):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * (-factor if negate else factor)
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="scaled")(x)

def sorted_rows(x):
    def body(x_ref, o_ref):
        o_ref[...] = jnp.sort(x_ref[...], axis=-1)
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="sorted_rows")(x)

def broken(x):
    return x[:, None, ...] + undefined

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))  # undoes what loading the file adds
    path = tmp_path / "user_kernels_for_check.py"
    path.write_text(MODULE)
    return path


def test_check_of_a_catalog_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "rms_norm", "--shape", "64,256", "--chip", "v5e,v6e"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split() for line in lines] == [
        [chip, "rms_norm", phase] for phase in ("forward", "backward") for chip in ("v5e", "v6e")
    ]
    assert all("compiles." in line and "MiB of VMEM" in line and "MiB of HBM" in line for line in lines)


def test_check_takes_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    used = []
    for rows in (8, 256):
        arguments = ["check", "rms_norm", "--shape", "4096,1024", "--chip", "v5e", "--json"]
        assert main([*arguments, "--tile", f"tile_rows={rows}"]) == 0
        results = json.loads(capsys.readouterr().out)["results"]
        used.append(results[0]["kernels"][0]["vmem_bytes"])
    assert used[1] > 8 * used[0]


def test_check_of_a_function(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{module}:scaled"
    arguments = ["--arg", "f32[8,128]", "--arg", "2.5", "--arg", "True", "--chip", "tpu7x", "--json"]
    assert main(["check", target, *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["compiles"] is True and record["target"] == target
    (result,) = record["results"]
    assert (result["name"], result["chip"]) == ("scaled", "tpu7x")
    assert [kernel["name"] for kernel in result["kernels"]] == ["scaled.1"]
    assert result["memory"]["argument_bytes"] == 8 * 128 * 4
    assert result["versions"]["libtpu"]


def test_check_says_why_not_and_exits_with_1(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", f"{module}:sorted_rows", "--arg", "f32[8,128]", "--chip", "v5e,v4"]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert printed.count("does not compile: Pallas has no `sort` for TPU kernels") == 2
    assert "kernel: sorted_rows" in printed
    assert f"where:  {module}:13" in printed
    assert "do:     Compute it outside of the kernel" in printed
    assert main([*arguments, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["compiles"] is False
    error = record["results"][0]["error"]
    assert error["type"] == "KernelRefused" and "sort" in error["details"]


def test_check_of_a_function_that_raises(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{module}:broken", "--arg", "f32[8,128]", "--chip", "v5e"]) == 1
    printed = capsys.readouterr().out
    assert "tracing it raised NameError: name 'undefined' is not defined" in printed
    assert f"where:  {module}:17" in printed


def test_check_says_what_a_catalog_kernel_can_not_do(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "rms_norm", "--shape", "8,128", "--dtype", "float16", "--chip", "v5e"]
    assert main(arguments) == 1
    assert "x is float16 and the kernel computes with bfloat16 and float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["softmax", "--shape", "8,128"], ["no kernel 'softmax'"]),
        (["rms_norm"], ["--shape 8192,4096", "of x"]),
        (["rms_norm", "--arg", "f32[8,128]"], ["--arg is for functions"]),
        (["rms_norm", "--shape", "8,128", "--chip", "v9"], ["--chip", "unknown chip 'v9'", "v4, v5e"]),
        (["rms_norm", "--shape", "8,128", "--tile", "rows=8"], ["--tile", "rows"]),
        (["rms_norm", "--shape", "8,128", "--tile", "tile_rows=9"], ["--tile", "multiple of 8, got 9"]),
        (["FILE:nothing", "--arg", "f32[8]"], ["has no function 'nothing'"]),
        (["FILE:number", "--arg", "f32[8]"], ["has no function 'number'"]),
        (["FILE:scaled", "--shape", "8,128"], ["--shape and --tile are for kernels"]),
        (["FILE:scaled", "--arg", "f33[8]"], ["unknown dtype 'f33'"]),
        (["FILE:scaled", "--arg", "x + 1"], ["Python literal", "'x + 1'"]),
        (["no_such_file.py:scaled"], ["there is no file no_such_file.py"]),
        (["no_such_module:scaled"], ["cannot load no_such_module"]),
    ],
)
def test_refusals(
    arguments: list[str], words: list[str], module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *(a.replace("FILE", str(module)) for a in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(word in printed.err for word in words), printed.err


def test_doctor_finds_everything_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "BAD" not in printed and "all good" in printed
    assert all(f"a kernel for {name}: compiles" in printed for name in chips())


def test_doctor_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    assert main(["doctor", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["good"] is False
    (bad,) = [finding for finding in record["findings"] if not finding["good"]]
    assert bad["what"] == "libtpu library" and "unset it" in bad["fix"]

    monkeypatch.delenv("TPU_LIBRARY_PATH")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 1
    assert "pip install libtpu" in capsys.readouterr().out

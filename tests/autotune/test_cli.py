"""`tpu-autotune list` and `show`, on our catalog and on a user's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import main
from tpu_kernels.catalog import CATALOG


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(spec.name in printed and spec.formula in printed for spec in CATALOG)


def test_list_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert [kernel["name"] for kernel in kernels] == [spec.name for spec in CATALOG]
    for kernel, spec in zip(kernels, CATALOG, strict=True):
        assert kernel["tiling"] == [field.name for field in dataclasses.fields(spec.tiling_type)]


def test_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["show", "rms_norm", "--shape", "8192,4096", "--dtype", "float32", "--chip", "v5e", "--json"])
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert record["problem"] == "rms_norm(x=float32[8192,4096], weight=float32[4096], eps=1e-06)"
    assert record["default"] in [entry["tiling"] for entry in record["legal"]]
    assert all(entry["vmem_bytes"] <= record["vmem_limit_bytes"] for entry in record["legal"])
    assert all(entry["vmem_bytes"] > record["vmem_limit_bytes"] for entry in record["illegal"])
    assert all(entry["reasons"] for entry in record["illegal"])
    forward = record["phases"]["forward"]
    moved = 2 * 8192 * 4096 * 4 + 4096 * 4
    assert forward["bytes_read"] + forward["bytes_written"] == moved
    assert forward["source"] == "roofline"
    assert forward["time_ms"] == pytest.approx(moved / 819e9 * 1e3)
    assert record["chip_provenance"]["hbm_bytes_per_second"].startswith("published: ")


def test_show_text_marks_the_default_and_says_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "layer_norm", "--shape", "x=64x384"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("<- default") == 1
    assert "on v6e" in printed
    assert "no measurement" in printed


def test_show_says_why_nothing_is_legal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "rms_norm", "--shape", "8,128", "--dtype", "float64"]) == 0
    printed = capsys.readouterr().out
    assert "none is legal" in printed
    assert "x is float64" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "softmax", "--shape", "8,128"], ["no kernel 'softmax'", "rms_norm, layer_norm"]),
        (["show", "rms_norm", "--shape", "8,wide"], ["--shape", "'8,wide'"]),
        (["show", "rms_norm", "--shape", "y=8,128"], ["one shape, of x"]),
        (["show", "rms_norm", "--shape", "-8,128"], ["must not be negative"]),
        (["show", "rms_norm", "--shape", "8,128", "--dtype", "bf17"], ["unknown dtype 'bf17'"]),
        (["list", "--catalog", "no_such_module"], ["cannot import", "no_such_module"]),
        (["list", "--catalog", "json"], ["json must define CATALOG"]),
    ],
)
def test_refusals(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shape = [
        f"--shape={b}" if a == "--shape" else b for a, b in zip(["", *arguments], arguments, strict=False)
    ]
    assert main([argument for argument in shape if argument != "--shape"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(word in printed.err for word in words), printed.err


def test_unknown_chip_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["show", "rms_norm", "--shape", "8,128", "--chip", "v9"])
    assert caught.value.code == 2
    assert "v6e" in capsys.readouterr().err


def test_a_users_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_kernels.py").write_text(
        "import dataclasses\n"
        "from tpu_kernels.catalog import CATALOG as ALL\n"
        "CATALOG = (dataclasses.replace(ALL[0], name='mine'),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["list", "--catalog", "my_kernels"]) == 0
    assert capsys.readouterr().out.startswith("mine ")


def test_importing_autotune_imports_neither_torch_nor_jax() -> None:
    check = "import sys, autotune; assert not {'torch', 'jax'} & set(sys.modules), 'imported too much'"
    subprocess.run([sys.executable, "-c", check], check=True)

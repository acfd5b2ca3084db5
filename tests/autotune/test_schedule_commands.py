"""`tpu-autotune explain` and `compare`."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.score import Score

FUNCTIONS = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def _kernel(x_ref, o_ref):
    o_ref[...] = jnp.exp(x_ref[...])


def exp(x, tile=512):
    spec = pl.BlockSpec((tile, 128), lambda i: (i, 0))
    return pl.pallas_call(
        _kernel, grid=(x.shape[0] // tile,), in_specs=[spec], out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="exp",
    )(x)


def exp_small_tiles(x):
    return exp(x, 8)


def wrong(x):
    return exp(x, 7)


def blocks(counts, x):
    def body(counts_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

        def double(_, carry):
            o_ref[...] = o_ref[...] * 2
            return carry

        jax.lax.fori_loop(0, counts_ref[pl.program_id(0)], double, 0)

    spec = pl.BlockSpec((512, 128), lambda i, counts: (i, 0))
    return pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="blocks",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(4,), in_specs=[spec], out_specs=spec
        ),
    )(counts, x)
"""
ARRAY = ["--arg", "f32[16384,128]", "--chip", "v5e"]
BYTES = 16384 * 128 * 4


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def compiler() -> None:
    pytest.importorskip("libtpu", reason="needs the TPU compiler, libtpu")


@pytest.mark.usefixtures("compiler")
def test_explain_json(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{functions}:exp", *ARRAY, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["source"] == "schedule"
    assert record["bound"] == "hbm"
    assert record["confidence"] == "high"
    assert record["unknowns"] == []
    assert record["dma_bytes"] == 2 * BYTES
    assert record["vmem_bytes"] == 2 * 2 * 512 * 128 * 4
    assert record["mxu_utilization"] == 0
    assert record["time_ms"] > 2 * BYTES / 819e9 * 1e3
    assert Score.from_json(json.dumps(record["score"])).grid_steps == 32


class Page(html.parser.HTMLParser):
    """Counts elements and checks that all are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.usefixtures("compiler")
def test_explain_prints_what_a_person_asks_and_writes_a_page(
    functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.html"
    assert main(["explain", f"{functions}:exp", *ARRAY, "--report", str(report)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "exp on v5e:",
        "high confidence",
        "nothing ran on a TPU",
        "bound: hbm",
        "HBM channel",
        "exp.1",
    ):
        assert words in printed
    page = Page()
    written = report.read_text()
    page.feed(written)
    assert page.open == []
    assert page.count["svg"] == 4
    assert page.count["rect"] > 50
    assert not re.search(r"(src|href)=|@import|https?://(?!www\.w3\.org/2000/svg)", written)
    assert "NaN" not in written and "inf" not in written.replace("info", "")


@pytest.mark.usefixtures("compiler")
def test_explain_takes_the_values_that_decide_what_runs(
    functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explain", f"{functions}:blocks", "--arg", "s32[4]", "--arg", "f32[2048,128]", "--json"]
    times = []
    for value in ("0=[0,0,0,0]", "0=[9,9,9,9]"):
        assert main([*arguments, "--value", value]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["confidence"] == "high"
        times.append(record["time_ms"])
    assert times[0] < times[1]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["confidence"] == "low"


@pytest.mark.usefixtures("compiler")
def test_explain_a_kernel_of_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    for phase, arrays in (("forward", 2), ("backward", 3)):
        arguments = ["explain", "rms_norm", "--shape", "1024,1024", "--dtype", "float32", "--phase", phase]
        assert main([*arguments, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["name"] == f"rms_norm {phase}"
        assert record["confidence"] == "high", record["reasons"]
        assert record["dma_bytes"] >= arrays * 1024 * 1024 * 4


@pytest.mark.usefixtures("compiler")
def test_explain_a_kernel_whose_work_depends_on_values(capsys: pytest.CaptureFixture[str]) -> None:
    """The catalog has values to go by, `--value` gives others. Shared tiles are visited for each group."""
    arguments = ["explain", "grouped_matmul", "--shape", "lhs=1024,256", "--shape", "rhs=4,256,256", "--json"]
    arguments += ["--tile", "tile_m=256"]
    for name in ("tile_k", "tile_n", *(f"{p}_tile_{d}" for p in ("dlhs", "drhs") for d in "mkn")):
        arguments += ["--tile", f"{name}=256"]
    steps = []
    for values in ([], ["--value", "2=[256,256,256,256]"], ["--value", "2=[128,384,384,128]"]):
        assert main([*arguments, *values]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["confidence"] == "high", record["reasons"]
        steps.append(record["score"]["grid_steps"])
    assert steps[1:] == [4, 6] and steps[0] > 4


@pytest.mark.usefixtures("compiler")
def test_compare(functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{functions}:exp", f"{functions}:exp_small_tiles"]
    report = tmp_path / "report.html"
    assert main(["compare", *names, *ARRAY, "--json", "--report", str(report)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["faster"] == names[0]
    assert record["second_over_first"] > 2
    assert [result["target"] for result in record["results"]] == names
    assert report.read_text().count("<h1>") == 2
    assert main(["compare", "rms_norm[tile_rows=64]", "rms_norm[tile_rows=64]", "--shape", "512,512"]) == 0
    assert "too close to tell" in capsys.readouterr().out


@pytest.mark.usefixtures("compiler")
def test_what_does_not_compile_has_no_score(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{functions}:wrong", *ARRAY]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "wrong has no score" in printed.err


def test_a_roofline_needs_no_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "rms_norm", "--shape", "8192,4096", "--dtype", "float32", "--chip", "v5e"]
    assert main([*arguments, "--source", "roofline", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    moved = 2 * 8192 * 4096 * 4 + 4096 * 4
    assert (record["source"], record["dma_bytes"]) == ("roofline", moved)
    assert record["time_ms"] == pytest.approx(moved / 819e9 * 1e3)
    assert main([*arguments, "--source", "roofline"]) == 0
    assert "a roofline is a lower bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rms_norm", "--shape", "8,128", "--phase", "sideways"], "--phase must be one of forward, backward"),
        (["rms_norm", "--shape", "8,128", "--value", "7=1"], "there are 2 arguments"),
        (["rms_norm", "--shape", "8,128", "--value", "x"], "--value must be PLACE=VALUE"),
        (["rms_norm", "--shape", "8,128", "--source", "roofline", "--report", "x.html"], "--report needs"),
        (["jax.numpy:sin", "--arg", "f32[8,128]", "--source", "roofline"], "declares none"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err


@pytest.mark.usefixtures("compiler")
def test_a_report_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = str(tmp_path / "nowhere" / "report.html")
    assert main(["explain", "rms_norm", "--shape", "64,128", "--report", report]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_compare_refuses_a_target_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "rms_norm[", "rms_norm", "--shape", "8,128"]) == 2
    assert "rms_norm[tile_rows=64]" in capsys.readouterr().err

"""The catalog, and the documentation made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

import tpu_kernels
from autotune import KernelSpec
from tpu_kernels.catalog import CATALOG, main, markdown

ROOT = Path(__file__).parents[2]


def test_documentation_is_current() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert page == markdown(), "run: python -m tpu_kernels.catalog --markdown > docs/kernels.md"


def test_command_prints_the_page_or_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--markdown"])
    assert capsys.readouterr().out == markdown()
    main([])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        spec.name for spec in CATALOG
    ]


@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_entries_are_whole(spec: KernelSpec) -> None:
    folder = ROOT / "tpu_kernels" / spec.name
    expected = {"__init__.py", "api.py", "kernel.py", "reference.py", "space.py", "spec.py", "vjp.py"}
    assert expected <= {path.name for path in folder.glob("*.py")}
    assert callable(getattr(tpu_kernels, spec.name))
    assert {"forward", "backward"} == set(spec.costs(spec.examples[0].problem))
    assert any(example.benchmark for example in spec.examples)
    for example in spec.examples:
        assert example.problem.kernel == spec.name
        assert tuple(name for name, _ in example.problem.arrays) == spec.arguments


def test_names_and_problems_are_unique() -> None:
    problems = [str(example.problem) for spec in CATALOG for example in spec.examples]
    assert len(set(problems)) == len(problems)


def test_kernels_are_written_for_tpu_only() -> None:
    """How a kernel is interpreted where no TPU is, is the bridge's business."""
    for path in (ROOT / "tpu_kernels").rglob("*.py"):
        assert "interpret=" not in path.read_text(), path

"""The device in pure Python passes the tests that the C++ part passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.device import extension

HERE = Path(__file__).parent
QUICK = ("indexing", "module", "ops", "random", "serialization", "storage", "versions")
"""The files that are most about what the C++ part does, and take little time: one process does."""


@pytest.mark.skipif(extension.loaded() is None, reason="all tests run in pure Python already")
@pytest.mark.parametrize(
    ("files", "processes"),
    [
        pytest.param([f"test_{name}.py" for name in QUICK], 0, id="some"),
        pytest.param(["."], 2, id="all", marks=pytest.mark.slow),
    ],
)
def test_the_other_tests_of_this_folder_pass_in_pure_python(files: list[str], processes: int) -> None:
    # pytest-xdist starts a file with few tests last, when the other process has nothing left to do.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow"]
    command += ["-n", str(processes), "--dist", "loadfile"]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        [*command, *(str(HERE / file) for file in files)],
        env={**environment, extension.ENVIRONMENT: "0"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout

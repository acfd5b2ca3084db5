"""The device in pure Python passes the tests that the C++ part passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.device import extension

HERE = Path(__file__).parent


@pytest.mark.skipif(extension.loaded() is None, reason="all tests run in pure Python already")
def test_the_other_tests_of_this_folder_pass_in_pure_python() -> None:
    # pytest-xdist starts a file with a single test last, when the other process has nothing left to do.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", "-m", "not slow"]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        [*command, str(HERE)],
        env={**environment, extension.ENVIRONMENT: "0"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout

"""`python -m bridge.sanitize`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("script.py")


def run(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "bridge.sanitize", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_findings_as_text() -> None:
    done = run("--seeds", "1", str(SCRIPT), "2", "no barrier")
    assert done.returncode == 1, done.stderr
    assert done.stdout == "the script has ['2', 'no barrier']\n"
    assert "missing_barrier: kernel send_right of planted::sent_right_no_barrier_2, ranks 0, 1" in done.stderr
    assert "\n  Fix: At the start of the kernel, signal" in done.stderr
    assert done.stderr.endswith("\n1 finding in 1 kernel, 2 runs\n")


def test_findings_as_json() -> None:
    done = run("--json", "--seeds", "1", str(SCRIPT), "1", "8")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    (finding,) = report["findings"]
    assert finding["kind"] == "out_of_bounds_read"
    assert finding["line"].startswith(str(SCRIPT.with_name("planted.py")))
    assert not report["ok"] and report["kernels"][0]["name"] == "read_beyond"
    assert "the script has" in done.stderr and "Traceback" in done.stderr  # the call raises in the script


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("3", 3),
        pytest.param("0", 0, marks=pytest.mark.slow),
        pytest.param("a message", 1, marks=pytest.mark.slow),
    ],
)
def test_the_scripts_own_status(status: str, expected: int) -> None:
    done = run("--seeds", "1", str(SCRIPT), status)
    assert done.returncode == expected, done.stderr
    assert "no findings in 1 kernel, 2 runs" in done.stderr
    assert ("a message\n" in done.stderr) == (status == "a message")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.py",), "no such script: nowhere.py"),
        (("--seeds", "0", str(SCRIPT)), "--seeds must be at least 1, got 0"),
        ((), "the following arguments are required: script"),
    ],
)
def test_bad_use(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr and not done.stdout


def test_the_name_is_a_function() -> None:
    code = """
import bridge
try:
    import bridge.sanitize
except ImportError as error:
    print("from bridge import sanitize" in str(error))
from bridge import sanitize
print(callable(bridge.sanitize), sanitize is bridge.sanitize)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\nTrue True\n", done.stderr


@pytest.mark.slow
def test_under_torchrun() -> None:
    """The first rank of the mesh has the report, and fails."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run("--seeds", "1", str(SCRIPT), "2", "no barrier", launcher=launcher)
    assert done.returncode == 1
    assert done.stderr.count("-- bridge.sanitize --") == 1
    assert "missing_barrier: kernel send_right" in done.stderr
    assert run("--seeds", "1", str(SCRIPT), "2", "none", launcher=launcher).returncode == 0

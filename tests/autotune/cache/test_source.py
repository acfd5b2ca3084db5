"""Digests of a kernel's code: they change with the code, and with nothing else."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cache.source import UNREADABLE, digest

FILES = {
    "__init__.py": '"""A kernel."""\n',
    "kernel.py": '"""Its body."""\n\nLANES = 128\n"""Columns."""\n\n\ndef body(x, y):\n'
    '    """Add."""\n    # as one does\n    return x + y * f"{LANES!r:>4}".count("1")\n',
    "inner/__init__.py": "",
    "inner/tiles.py": "def tiles(n: int) -> int:\n    return -n // 2 if n else 0\n",
}
CODE = FILES["kernel.py"]


@pytest.fixture
def of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The digest of a package with these files, in a folder of its own each time."""

    def make(changes: dict[str, str] | None = None, modules: tuple[str, ...] = ("made_kernel",)) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in {**FILES, **(changes or {})}.items():
            (folder / "made_kernel" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "made_kernel" / name).write_text(text, encoding="utf-8")
        for name in [name for name in sys.modules if name.partition(".")[0] == "made_kernel"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        importlib.invalidate_caches()
        digest.cache_clear()
        return digest(modules)

    return make


UNIMPORTANT = {
    "a comment": CODE.replace("as one does", "for no reason"),
    "no comment": CODE.replace("    # as one does\n", ""),
    "docstrings": CODE.replace("Add.", "Sum.").replace("Columns.", "Lanes.").replace("Its body.", "B"),
    "no docstrings": CODE.replace('    """Add."""\n', "").replace('"""Columns."""\n', ""),
    "spaces": CODE.replace("x + y", "x  +  y").replace("body(x, y)", "body(\n    x,\n    y,\n)"),
    "parentheses": CODE.replace("x + y", "(x) + (y)"),
    "quotes": CODE.replace('"1"', "'1'"),
    "line ends": CODE.replace("\n", "\r\n"),
}
IMPORTANT = {
    "a number": CODE.replace("128", "256"),
    "a type of number": CODE.replace("128", "128.0"),
    "an operator": CODE.replace("x + y", "x - y"),
    "a name": CODE.replace("LANES", "WIDTH"),
    "a default": CODE.replace("y):", "y=1):"),
    "a string": CODE.replace('"1"', '"2"'),
    "a format": CODE.replace(">4", ">5"),
    "order": CODE.replace("x + y", "y + x"),
    "a statement": CODE + "body = None\n",
}


@pytest.mark.parametrize("text", UNIMPORTANT.values(), ids=UNIMPORTANT.keys())
def test_what_does_not_matter(of: Callable[..., str], text: str) -> None:
    assert text != CODE
    assert of({"kernel.py": text}) == of()


@pytest.mark.parametrize("text", IMPORTANT.values(), ids=IMPORTANT.keys())
def test_what_matters(of: Callable[..., str], text: str) -> None:
    assert text != CODE
    assert of({"kernel.py": text}) != of()


def test_all_modules_of_a_package_matter_and_others_do_not(of: Callable[..., str]) -> None:
    assert of({"inner/tiles.py": "def tiles(n):\n    return n\n"}) != of()
    assert of({"more.py": "x = 1\n"}) != of()
    one = ("made_kernel.kernel",)
    assert of({"inner/tiles.py": ""}, one) == of({}, one)
    assert of({}, ("made_kernel.kernel", "made_kernel.inner")) == of({}, ("made_kernel.inner", *one))


def test_the_folder_and_the_process_do_not_matter(of: Callable[..., str], tmp_path: Path) -> None:
    expected = of()
    (tmp_path / "cwd").mkdir()
    program = "from autotune.cache.source import digest; print(digest(('made_kernel',)))"
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path / "cwd",
            env={**os.environ, "PYTHONPATH": str(tmp_path / "0"), "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert out.strip() == expected


def test_the_digest_is_the_same_with_every_python(of: Callable[..., str]) -> None:
    # Shipped tilings hold with any of them. If this fails after a change of the digest, they are all void.
    assert of() == "da8685538b2d6e74"


def test_a_script(tmp_path: Path) -> None:
    digests = set()
    program = "from autotune.cache.source import digest\nSIZE = 8  # rows\nprint(digest(('__main__',)))\n"
    for name, text in (("a.py", program), ("b.py", program.replace("rows", "columns"))):
        (tmp_path / name).write_text(text)
        command = [sys.executable, str(tmp_path / name)]
        digests.add(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(digests) == 1 and UNREADABLE not in digests.pop()


@pytest.mark.parametrize("text", [None, "def ("], ids=["no module", "no Python"])
def test_code_that_cannot_be_read(
    of: Callable[..., str], caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    with caplog.at_level(logging.WARNING):
        found = of({"kernel.py": text} if text else {}, ("made_kernel" if text else "made_kernel.absent",))
    assert found == UNREADABLE
    assert "no tuned tilings for it" in caplog.text

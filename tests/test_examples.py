"""Every example, and the code in the documentation, runs as a newcomer would run it: in a process of its own,
with nothing on stderr and exit status 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

CLOSING_WORDS = {
    "first_kernel.py": "simulated",
    "kv_cache.py": "agrees",
    "train_long.py": "agrees",
    "train_moe.py": "agrees",
    "train_small.py": "passed",
    "train_with_splash.py": "agrees",
    "minilm_on_tpu.py": "agrees",
}
"""For each example, a word that its last line holds when everything went well."""

SLOW = {"minilm_on_tpu.py", "train_moe.py"}
"""Examples that load or compile a whole model; ./scripts/demo runs them too."""

PAGES = [
    "README.md",
    "docs/collectives.md",
    "docs/context_parallel.md",
    "docs/device.md",
    "docs/dropins.md",
    "docs/grouped_matmul.md",
    "docs/jax_op.md",
    "docs/moe.md",
    "docs/precision.md",
    "docs/ranks.md",
    "docs/ring_attention.md",
    "docs/sanitizer.md",
    "docs/splash_attention.md",
    "docs/tpu_compiler.md",
]
"""The pages whose Python blocks are, from top to bottom, one program."""


def run(path: Path, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=cwd)


def test_every_example_is_listed_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CLOSING_WORDS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in sorted(CLOSING_WORDS)]
)
def test_example_passes(name: str, tmp_path: Path) -> None:
    done = run(EXAMPLES / name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert CLOSING_WORDS[name] in done.stdout.splitlines()[-1]
    assert not done.stderr


def test_training_that_learns_nothing_fails() -> None:
    """One step can't beat the frequencies of bytes: the example must say so, or its check means nothing."""
    done = run(EXAMPLES / "train_small.py", "--steps", "1")
    assert done.returncode == 1
    assert "FAILED" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("page", PAGES)
def test_code_on_a_page_runs(page: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(python_in(ROOT / page))
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr


def test_every_page_with_code_is_listed_here() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert {str(page.relative_to(ROOT)) for page in pages if "```python" in page.read_text()} == set(PAGES)


def python_in(page: Path) -> str:
    """The Python blocks of a page as one program. Its other lines are empty, so that the line numbers in a
    traceback are those of the page."""
    lines = []
    inside = False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        if fence:
            inside = line == "```python"
    return "\n".join(lines) + "\n"


def test_readme_example_is_the_first_kernel() -> None:
    """The ten lines in the README stand, word for word, in the example that is run above."""
    readme = (ROOT / "README.md").read_text()
    block = readme.split("```python\n", 1)[1].split("```", 1)[0]
    kernel = block[block.index("@torch.tpu") : block.index("\n\n\n")]
    assert kernel in (EXAMPLES / "first_kernel.py").read_text()

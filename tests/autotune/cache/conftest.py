"""A kernel to tune, entries of it, and a folder for the user's files that nothing was read from yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune import cache
from autotune.cache import find, notices, user
from autotune.problem import ArraySpec, Problem
from bridge.chips import Chip, chip


@dataclass(frozen=True)
class Tiling:
    """Rows that are a multiple of eight, and one switch."""

    rows: int
    stay: bool = False

    def __post_init__(self) -> None:
        if self.rows % 8:
            raise ValueError(f"rows must be a multiple of 8, got {self.rows}")


def illegal_reasons(problem: Problem, tiling: Tiling, on: Chip) -> tuple[str, ...]:
    """No tiling has more rows than the problem."""
    del on
    rows = problem.required("x").shape[0]
    return (f"{tiling.rows} rows are more than {rows}",) if tiling.rows > rows else ()


class Making:
    """What tests work with: a kernel, its problems and entries."""

    Tiling = Tiling
    kernel = cache.Kernel("op", Tiling, modules=("autotune.problem",), illegal_reasons=illegal_reasons)
    v5e = chip("v5e")
    v6e = chip("v6e")

    @staticmethod
    def problem(rows: int = 1024, **params: Any) -> Problem:
        """A problem of so many rows."""
        arrays = {"x": ArraySpec((rows, 128), "bfloat16"), "mask": None}
        return Problem.of("op", arrays, {"causal": True, "eps": 1e-6, **params})

    @classmethod
    def entry(
        cls,
        rows: int | None = 256,
        time_s: float | None = 1e-3,
        *,
        problem: Problem | None = None,
        on: Chip | None = None,
        source: str = "schedule",
        **kwargs: Any,
    ) -> cache.Entry:
        """An entry made here and now; with `rows=None` one whose tilings all failed."""
        return cache.new_entry(
            cls.kernel,
            problem or cls.problem(),
            on or cls.v5e,
            source,
            None if rows is None else Tiling(rows),
            None if rows is None else time_s,
            **kwargs,
        )

    @classmethod
    def rows(cls, problem: Problem | None = None, on: Chip | None = None, **kwargs: Any) -> int | None:
        """Rows of the tiling that a lookup gives; None if there is none."""
        found = cache.lookup(cls.kernel, problem or cls.problem(), on or cls.v5e, **kwargs)
        return None if found is None else found.tiling.rows


@pytest.fixture
def making() -> type[Making]:
    """See `Making`."""
    return Making


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's files, which does not exist yet."""
    path = tmp_path / "tilings"
    monkeypatch.setenv("BRIDGE_TILINGS", str(path))
    return path


@pytest.fixture(autouse=True)
def new_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Forget everything that a process remembers, now and when called."""

    def forget() -> None:
        monkeypatch.setattr(user, "_user", {})
        monkeypatch.setattr(find, "_logged", set())
        monkeypatch.setattr(notices, "_given", set())
        cache.reload()

    forget()
    yield forget
    monkeypatch.undo()
    forget_found_of_tests()


def forget_found_of_tests() -> None:
    """The next tests read what is theirs."""
    user._user.clear()
    cache.reload()

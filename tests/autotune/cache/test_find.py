"""Lookup: what comes first, what is never used for something else, and what happens at a miss."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import cache
from autotune.cache import conditions, find, shipped
from autotune.problem import ArraySpec, Problem
from autotune.spec import Candidate, KernelSpec


@pytest.fixture(autouse=True)
def _versions_are_asked_for_anew(
    new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)  # JAX sets it when it starts
    conditions.compiler_version.cache_clear()
    yield
    conditions.compiler_version.cache_clear()


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the kernel's package ship entries."""

    def set_layer(*entries: cache.Entry) -> None:
        monkeypatch.setattr(
            shipped, "layer", lambda package, chip: cache.find.Layer("shipped", None, entries)
        )

    return set_layer


# Layers -------------------------------------------------------------------------------------------


def test_contexts_come_before_the_user_and_the_user_before_what_is_shipped(
    making: Any, ship: Callable[..., None]
) -> None:
    # Whatever the times are: they are no reason to prefer one layer to another.
    assert making.rows() is None
    ship(making.entry(8, 1e-6))
    cache.reload()
    assert making.rows() == 8
    cache.store([making.entry(16, 1e-3)])
    assert making.rows() == 16
    with cache.use([making.entry(32, 1.0)]):
        assert making.rows() == 32
        with cache.use([making.entry(64, 2.0)]):
            assert making.rows() == 64
            with cache.use([making.entry(128, problem=making.problem(128))]):
                assert making.rows() == 64
        assert making.rows() == 32
    assert making.rows() == 16
    with cache.use([], alone=True):
        assert making.rows() is None
        with cache.use([making.entry(64)]):
            assert making.rows() == 64
    found = [
        (seen.kind, seen.tiling.rows) for seen in find.considered(making.kernel, making.problem(), making.v5e)
    ]
    assert found == [("user", 16), ("shipped", 8)]


def test_a_context_can_be_a_file_or_a_folder(making: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(cache.to_text("v5e", [making.entry(32)]))
    (tmp_path / "v6e.json").write_text(cache.to_text("v6e", [making.entry(64, on=making.v6e)]))
    with cache.use(file):
        assert (making.rows(), making.rows(on=making.v6e)) == (32, None)
    with cache.use(str(tmp_path)):
        assert (making.rows(), making.rows(on=making.v6e)) == (None, 64)
    file.write_text("{")
    with pytest.raises(cache.BadFile, match="mine.json: "), cache.use(file):
        pass
    assert file.exists()
    with pytest.raises(FileNotFoundError), cache.use(tmp_path / "none.json"):
        pass
    (tmp_path / "v5e.json").write_text(cache.to_text("v6e", []))
    with pytest.raises(cache.BadFile, match="expected tilings for v5e"), cache.use(tmp_path):
        pass


def test_contexts_are_of_a_thread(making: Any) -> None:
    seen: list[int | None] = []
    with cache.use([making.entry(32)]):
        assert making.rows() == 32
        thread = threading.Thread(target=lambda: seen.append(making.rows()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_package_ships_files(
    making: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]
) -> None:
    data = tmp_path / "made_package" / "data" / "tilings"
    data.mkdir(parents=True)
    (tmp_path / "made_package" / "__init__.py").touch()
    (tmp_path / "made_package" / "tiling.py").write_text(
        "import dataclasses\n\n\n@dataclasses.dataclass(frozen=True)\nclass Tiling:\n    rows: int\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from made_package.tiling import Tiling  # pyright: ignore[reportMissingImports]

    try:
        kernel = cache.Kernel("op", Tiling)
        assert cache.lookup(kernel, making.problem(), making.v5e) is None
        entry = cache.new_entry(kernel, making.problem(), making.v5e, "schedule", Tiling(64), 1e-3)
        (data / "v5e.json").write_text(cache.to_text("v5e", [entry]))
        new_process()
        found = cache.lookup(kernel, making.problem(), making.v5e)
        assert found is not None
        assert (found.tiling, found.kind, found.path) == (Tiling(64), "shipped", str(data / "v5e.json"))
        # A package's file is never renamed.
        (data / "v5e.json").write_text("{")
        new_process()
        with pytest.warns(cache.TilingsWarning, match="shipped in .*v5e.json are not used"):
            assert cache.lookup(kernel, making.problem(), making.v5e) is None
        assert [path.name for path in data.iterdir()] == ["v5e.json"]
    finally:
        for name in ("made_package", "made_package.tiling"):
            sys.modules.pop(name, None)


# Sources and chips --------------------------------------------------------------------------------


def test_sources_are_ranked_and_never_their_times(making: Any) -> None:
    cache.store([making.entry(8, 1e-9, source="roofline")])
    assert making.rows() == 8
    cache.store([making.entry(16, 1e-6, source="schedule")])
    assert making.rows() == 16
    cache.store([making.entry(32, 1.0, source="measured")])
    assert making.rows() == 32
    for source, rows in (("roofline", 8), ("schedule", 16), ("measured", 32)):
        assert making.rows(source=source) == rows
        found = cache.tuned(making.kernel, making.problem(), making.v5e, source)
        assert found is not None and found.tiling is not None and found.tiling["rows"] == rows
    with pytest.raises(ValueError, match="source must be one of"):
        making.rows(source="guess")


def test_a_layer_comes_before_a_source(making: Any, ship: Callable[..., None]) -> None:
    ship(making.entry(8, source="measured"))
    cache.store([making.entry(16, source="roofline")])
    assert making.rows() == 16
    assert making.rows(source="measured") == 8


def test_chips_share_nothing(making: Any, folder: Path, new_process: Callable[[], None]) -> None:
    cache.store([making.entry(256)])
    assert making.rows(on=making.v6e) is None
    assert cache.tuned(making.kernel, making.problem(), making.v6e, "schedule") is None
    # Nor do files that somebody has copied.
    (folder / "v6e.json").write_bytes((folder / "v5e.json").read_bytes())
    with pytest.warns(cache.TilingsWarning, match="expected tilings for v6e, got some for 'v5e'"):
        new_process()
        assert making.rows(on=making.v6e) is None
    assert making.rows() == 256


# The key ------------------------------------------------------------------------------------------


def with_array(problem: Problem, name: str, spec: ArraySpec | None) -> Problem:
    return dataclasses.replace(
        problem, arrays=tuple((n, spec if n == name else s) for n, s in problem.arrays)
    )


PROBLEM_CHANGES: dict[str, Callable[[Problem], Problem]] = {
    "a size": lambda p: with_array(p, "x", ArraySpec((1024, 256), "bfloat16")),
    "a dimension": lambda p: with_array(p, "x", ArraySpec((1, 1024, 128), "bfloat16")),
    "a dtype": lambda p: with_array(p, "x", ArraySpec((1024, 128), "float32")),
    "an optional array": lambda p: with_array(p, "mask", ArraySpec((1024, 128), "bool")),
    "a flag": lambda p: dataclasses.replace(p, params=(("causal", False), *p.params[1:])),
    "a window": lambda p: dataclasses.replace(p, params=(*p.params, ("window", 128))),
    "a number": lambda p: dataclasses.replace(p, params=(p.params[0], ("eps", 1e-5))),
}


@pytest.mark.parametrize("change", PROBLEM_CHANGES.values(), ids=PROBLEM_CHANGES.keys())
def test_another_problem_is_a_miss(making: Any, change: Callable[[Problem], Problem]) -> None:
    cache.store([making.entry()])
    assert making.rows() == 256
    assert making.rows(change(making.problem())) is None


@pytest.mark.parametrize("package", ["jax", "jaxlib", "libtpu"])
def test_another_compiler_is_a_miss(
    making: Any, monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None], package: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    cache.store([making.entry()])
    assert making.rows() == 256
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.1" if name == package else "1.0")
    conditions.compiler_version.cache_clear()
    new_process()
    assert making.rows() is None
    assert cache.tuned(making.kernel, making.problem(), making.v5e, "schedule") is None
    # Both are kept: another environment may still have the other compiler.
    cache.store([making.entry(512)])
    assert making.rows() == 512
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    conditions.compiler_version.cache_clear()
    new_process()
    assert making.rows() == 256


def test_a_compiler_that_a_variable_names(
    making: Any, monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]
) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/opt/one/libtpu.so")
    cache.store([making.entry()])
    assert making.rows() == 256
    conditions.compiler_version.cache_clear()
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/opt/two/libtpu.so")
    new_process()
    assert making.rows() is None


def test_the_version_is_the_same_before_and_after_jax_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    libtpu = pytest.importorskip("libtpu")
    before = conditions.compiler_version("libtpu")
    monkeypatch.setenv("TPU_LIBRARY_PATH", libtpu.get_library_path())
    conditions.compiler_version.cache_clear()
    assert conditions.compiler_version("libtpu") == before == importlib.metadata.version("libtpu")


def test_without_a_compiler_its_version_is_not_asked_for(
    making: Any, monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]
) -> None:
    entry = making.entry(versions={"jax": "0.1", "libtpu": "0.2", "platform": "what it says of itself"})
    assert (entry.conditions["jax"], entry.conditions["libtpu"]) == ("0.1", "0.2")
    assert "platform" not in entry.conditions

    def version(name: str) -> str:
        if name.startswith("libtpu"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    conditions.compiler_version.cache_clear()
    cache.store([dataclasses.replace(entry, conditions={**entry.conditions, "jaxlib": "0.1"})])
    assert making.rows() == 256


def test_another_scorer_is_a_miss(
    making: Any, monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]
) -> None:
    cache.store([making.entry(256), making.entry(8, source="roofline")])
    monkeypatch.setattr(conditions, "SCORERS", {**conditions.SCORERS, "schedule": "2"})
    new_process()
    assert making.rows() == 8


@pytest.mark.parametrize("limit", ["vmem_bytes", "vmem_limit_bytes", "tensor_cores"])
def test_another_limit_of_the_chip_is_a_miss(making: Any, limit: str) -> None:
    cache.store([making.entry(256), making.entry(128, source="measured")])
    other = dataclasses.replace(making.v5e, **{limit: getattr(making.v5e, limit) * 2})
    assert making.rows(on=other) is None


def test_another_rate_of_the_chip_makes_predictions_void_and_no_measurement(making: Any) -> None:
    other = dataclasses.replace(making.v5e, hbm_efficiency=making.v5e.hbm_efficiency / 2)
    cache.store([making.entry(256)])
    assert making.rows(on=other) is None
    cache.store([making.entry(128, source="measured")])
    assert making.rows(on=other) == 128
    assert making.rows(on=dataclasses.replace(making.v5e, provenance=())) == 128


def test_another_kernel_is_a_miss(making: Any) -> None:
    cache.store([making.entry()])
    other = cache.Kernel("op", making.Tiling, modules=("autotune.spec",))
    assert cache.lookup(other, making.problem(), making.v5e) is None
    with pytest.raises(ValueError, match="expected a problem of other"):
        cache.lookup(cache.Kernel("other", making.Tiling), making.problem(), making.v5e)


def test_where_a_process_runs_is_no_part_of_the_key(making: Any, folder: Path, tmp_path: Path) -> None:
    cache.store([making.entry()])
    program = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import conftest
print(conftest.Making.rows())
"""
    out = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "UNRELATED": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert out.strip() == "256"


def test_code_that_cannot_be_read_gives_nothing(making: Any) -> None:
    cache.store([making.entry()])
    kernel = cache.Kernel("op", making.Tiling, modules=("no_such_module",))
    assert cache.lookup(kernel, making.problem(), making.v5e) is None
    with pytest.raises(ValueError, match="its source cannot be read"):
        cache.new_entry(kernel, making.problem(), making.v5e, "schedule", making.Tiling(8), 1.0)


def test_a_condition_of_a_later_release_does_not_hold(making: Any) -> None:
    entry = making.entry()
    cache.store([dataclasses.replace(entry, conditions={**entry.conditions, "moon": "full"})])
    assert making.rows() is None


def test_an_entry_that_names_no_conditions_holds(making: Any) -> None:
    cache.store([making.entry().without_conditions("jax", "jaxlib", "libtpu", "kernel", "chip", "scorer")])
    assert making.rows() == 256


def test_stale_entries_are_told_once(
    making: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.store([making.entry(rows, problem=making.problem(rows)) for rows in (8, 16)])
    monkeypatch.setattr(conditions, "SCORERS", dict.fromkeys(conditions.SCORERS, "2"))
    with caplog.at_level(logging.INFO, "autotune.cache"):
        for rows in (8, 16, 8):
            assert making.rows(making.problem(rows)) is None
    (record,) = caplog.records
    assert "made with scorer 1, and here it is 2" in record.getMessage()


# Legality and failures ----------------------------------------------------------------------------


def test_an_illegal_tiling_is_passed_over_with_one_line(
    making: Any, ship: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    small = making.problem(64)
    ship(making.entry(32, problem=small))
    cache.store([making.entry(256, problem=small)])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert making.rows(small) == 32
        cache.reload()
        assert making.rows(small) == 32
    (record,) = caplog.records
    assert "256 rows are more than 64" in record.getMessage()


@pytest.mark.parametrize("fields", [{"rows": 12}, {"columns": 8}, {"rows": "8"}, {}])
def test_a_tiling_that_its_type_refuses(
    making: Any, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    cache.store([dataclasses.replace(making.entry(), tiling=fields)])
    with caplog.at_level(logging.WARNING):
        assert making.rows() is None
    assert "Tiling does not take it" in caplog.text


def test_failures_are_kept_and_not_tried_again(making: Any, new_process: Callable[[], None]) -> None:
    failures = {making.Tiling(512): "wrong numbers", making.Tiling(1024): "does not compile"}
    cache.store([making.entry(256, failures=failures)])
    new_process()
    known = cache.known_failures(making.kernel, making.problem(), making.v5e, "schedule")
    assert {text: json.loads(text)["rows"] for text in known} == dict(zip(known, (1024, 512), strict=True))
    assert known[cache.tiling_text(cache.tiling_fields(making.Tiling(512)))] == "wrong numbers"
    for other in (
        cache.known_failures(making.kernel, making.problem(), making.v5e, "measured"),
        cache.known_failures(making.kernel, making.problem(8), making.v5e, "schedule"),
        cache.known_failures(making.kernel, making.problem(), making.v6e, "schedule"),
    ):
        assert other == {}


def test_when_every_tiling_failed_there_is_no_winner(making: Any, new_process: Callable[[], None]) -> None:
    failures = {making.Tiling(rows): "returns NaN" for rows in (8, 16)}
    cache.store([making.entry(None, failures=failures)])
    new_process()
    assert making.rows() is None
    found = cache.tuned(making.kernel, making.problem(), making.v5e, "schedule")
    assert found is not None and found.status == "failed"
    assert len(cache.known_failures(making.kernel, making.problem(), making.v5e, "schedule")) == 2


def test_what_failed_is_not_taken_from_elsewhere(
    making: Any, ship: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    ship(making.entry(256, 1e-6))
    cache.store([making.entry(None, failures={making.Tiling(256): "wrong numbers"}, source="measured")])
    with caplog.at_level(logging.WARNING):
        assert making.rows() is None
    assert "it failed for this problem: wrong numbers" in caplog.text


# Buckets ------------------------------------------------------------------------------------------


def power_of_two(problem: Problem) -> Problem:
    rows = problem.required("x").shape[0]
    return with_array(problem, "x", ArraySpec((1 << (rows - 1).bit_length(), 128), "bfloat16"))


def test_buckets(making: Any, caplog: pytest.LogCaptureFixture) -> None:
    kernel = dataclasses.replace(making.kernel, bucket=power_of_two)

    def rows(size: int) -> tuple[int, bool] | None:
        found = cache.lookup(kernel, making.problem(size), making.v5e)
        return None if found is None else (found.tiling.rows, found.exact)

    odd = Problem.of("op", {"y": None})  # of an earlier release: it has no bucket
    other = Problem.of("other", {"x": ArraySpec((1000, 128), "bfloat16")})
    cache.store([making.entry(8, problem=odd), making.entry(8, problem=other)])
    assert rows(1000) is None
    cache.store([making.entry(16, problem=making.problem(600))])
    assert rows(1000) == (16, False)
    cache.store([making.entry(32, problem=making.problem(900))])
    assert rows(1000) == (32, False)
    cache.store([making.entry(64, problem=making.problem(1024))])
    assert rows(1000) == (64, False)
    cache.store([making.entry(128, problem=making.problem(1000))])
    assert rows(1000) == (128, True)
    assert rows(1025) is None
    assert making.rows(making.problem(1001)) is None, "without buckets, sizes are exact"
    # What fits the bucket need not fit the problem.
    cache.store([making.entry(256, problem=making.problem(256))])
    with caplog.at_level(logging.WARNING):
        assert rows(200) is None
    assert "tuned for op(x=bfloat16[256,128]" in caplog.text


# Warm lookups -------------------------------------------------------------------------------------


def test_what_was_found_is_not_looked_for_again(making: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store([making.entry()])
    assert making.rows() == 256
    assert making.rows(making.problem(8)) is None
    monkeypatch.setattr(find, "considered", lambda *arguments: pytest.fail("looked again"))
    first = cache.lookup(making.kernel, making.problem(), making.v5e)
    assert first is cache.lookup(making.kernel, making.problem(), making.v5e)
    assert making.rows(making.problem(8)) is None


def test_memory_has_an_end(making: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_REMEMBERED", 4)
    for rows in range(1, 20):
        assert making.rows(making.problem(rows)) is None
    (table,) = cache.contexts.stack.get().warm.values()
    assert len(table.found) <= 4


# Specs --------------------------------------------------------------------------------------------


def test_every_spec_is_cached_as_something(making: Any) -> None:
    def no(*arguments: Any) -> Any:
        raise AssertionError(f"called with {arguments}")

    spec = KernelSpec(
        name="op",
        summary="",
        formula="",
        arguments=("x",),
        implementations=("pallas",),
        fn=no,
        reference=no,
        torch_call=no,
        torch_equivalent=no,
        tiling_type=making.Tiling,
        make_problem=no,
        unsupported_reasons=no,
        space=lambda problem, on: (
            Candidate(making.Tiling(256), 0),
            Candidate(making.Tiling(512), 0, ("too large",)),
        ),
        default_tiling=no,
        costs=no,
        error_bounds=lambda problem, arrays, cotangent: (np.zeros(()),),
        examples=(),
    )
    kernel = cache.Kernel.of(spec)
    assert cache.Kernel.of(spec) is kernel
    assert (kernel.name, kernel.tiling_type) == ("op", making.Tiling)
    assert kernel.illegal_reasons is not None
    illegal = [
        kernel.illegal_reasons(making.problem(), making.Tiling(rows), making.v5e) for rows in (256, 512, 8)
    ]
    assert illegal == [(), ("too large",), ("the kernel's space does not have it",)]
    named = dataclasses.replace(spec, cached_as=making.kernel)
    assert cache.Kernel.of(named) is making.kernel
    with pytest.raises(TypeError, match="tiling_type must be a dataclass"):
        cache.Kernel("op", int)


def test_nothing_large_is_imported() -> None:
    program = "import autotune.cache, sys; print([name for name in ('jax', 'torch') if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"

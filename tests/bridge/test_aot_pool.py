"""The pool of compiler processes: time limits, crashes, threads, forks, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from bridge.aot import pool, worker
from bridge.aot.errors import CompileError, CompilerCrashed, CompilerMissing, CompileTimeout, VmemExceeded
from bridge.aot.lowering import lower
from bridge.aot.pool import Job, Pool
from bridge.chips import chip
from bridge.topology import compile_for, mesh

ROOT = Path(__file__).parents[2]

FAKE_WORKER = """
import os, signal, sys, time
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
connection.send({"jax": "fake", "pid": os.getpid()})
while True:
    try:
        job = connection.recv()
    except EOFError:
        break
    match job["module"]:
        case b"hang":
            time.sleep(600)
        case b"abort":
            print("the last words", file=sys.stderr, flush=True)
            os.abort()
        case b"killed":
            os.kill(os.getpid(), signal.SIGKILL)
    print("about an earlier job", file=sys.stderr, flush=True)
    connection.send({"hlo": "", "pid": os.getpid()})
"""


def job(module: bytes, dumps: Path | None = None) -> Job:
    return Job(module, "v5e:2x2", "default", (), {}, True, dumps)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool of two workers that do as they are told and need no compiler."""
    file = tmp_path / "fake_worker.py"
    file.write_text(FAKE_WORKER)
    monkeypatch.setattr(pool, "worker_file", SimpleNamespace(__file__=str(file)))
    with Pool(2) as made:
        yield made


def gone(pid: int) -> bool:
    """Whether no process has this id, not even as a zombie."""
    return not Path(f"/proc/{pid}").exists()


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


# With workers that need no compiler ---------------------------------------------------------------


def test_workers_stay_warm(fake: Pool) -> None:
    assert fake.run(job(b""), 30)["pid"] == fake.run(job(b""), 30)["pid"]


def test_worker_that_takes_too_long_is_ended_and_replaced(fake: Pool) -> None:
    first = fake.run(job(b""), 30)["pid"]
    with pytest.raises(CompileTimeout, match=r"more than 0.2 s to compile, and was ended.*timeout="):
        fake.run(job(b"hang"), 0.2)
    assert gone(first)
    assert fake.run(job(b""), 30)["pid"] != first


def test_crash_gives_the_last_words_of_this_job_and_a_new_worker(fake: Pool) -> None:
    first = fake.run(job(b""), 30)["pid"]
    with pytest.raises(CompilerCrashed, match="signal 6") as caught:
        fake.run(job(b"abort"), 30)
    assert caught.value.details == "the last words"
    assert gone(first)
    assert fake.run(job(b""), 30)["pid"] != first


def test_killed_worker_names_memory_as_the_likely_reason(fake: Pool) -> None:
    with pytest.raises(CompilerCrashed, match="signal 9.*memory ran out"):
        fake.run(job(b"killed"), 30)


def test_worker_that_ended_while_idle_is_replaced_without_a_word(fake: Pool) -> None:
    first = fake.run(job(b""), 30)["pid"]
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: Path(f"/proc/{first}/stat").read_text().split()[2] == "Z")
    assert fake.run(job(b""), 30)["pid"] != first


def test_worker_is_replaced_after_many_jobs(fake: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "JOBS_PER_WORKER", 2)
    pids = [fake.run(job(b""), 30)["pid"] for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert gone(pids[0])


def test_threads_share_the_workers_and_never_more_than_the_size(fake: Pool) -> None:
    with ThreadPoolExecutor(8) as threads:
        pids = set(threads.map(lambda _: fake.run(job(b""), 60)["pid"], range(40)))
    assert 1 <= len(pids) <= 2


def test_worker_is_used_only_with_the_library_it_has_loaded(
    fake: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    installed = fake.run(job(b""), 30)["pid"]
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/another/libtpu.so")
    other = fake.run(job(b""), 30)["pid"]
    assert other != installed and fake.run(job(b""), 30)["pid"] == other
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    assert fake.run(job(b""), 30)["pid"] == installed


def test_version_is_that_of_the_library_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, alone = tmp_path / "older" / "libtpu" / "libtpu.so", tmp_path / "libtpu.so"
    for file in (library, alone):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    package = tmp_path / "older" / "libtpu-0.0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: libtpu\nVersion: 0.0.1\n")
    (package / "RECORD").write_text("libtpu/libtpu.so,,\n")

    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    assert worker._library_version() == "0.0.1"
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(alone))
    assert worker._library_version() == f"unknown, {alone}"
    (package / "RECORD").write_text("libtpu/another.so,,\n")  # what lies beside it need not be its own
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    assert worker._library_version() == f"unknown, {library}"


def test_idle_worker_that_does_not_dump_makes_way_to_one_that_does(fake: Pool, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        plain = set(threads.map(lambda _: fake.run(job(b""), 60)["pid"], range(10)))
    dumping = fake.run(job(b"", dumps=tmp_path), 30)["pid"]
    assert dumping not in plain
    assert sum(not gone(pid) for pid in {*plain, dumping}) <= 2
    assert fake.run(job(b"", dumps=tmp_path), 30)["pid"] == dumping


def test_worker_that_dumps_also_does_jobs_without(fake: Pool, tmp_path: Path) -> None:
    dumping = fake.run(job(b"", dumps=tmp_path), 30)["pid"]
    assert fake.run(job(b""), 30)["pid"] == dumping
    assert fake.run(job(b"", dumps=tmp_path), 30)["pid"] == dumping


def test_closing_ends_workers_and_running_calls_and_deletes_files(fake: Pool) -> None:
    idle = fake.run(job(b""), 30)["pid"]
    errors: list[BaseException] = []

    def hang() -> None:
        try:
            fake.run(job(b"hang"), 600)
        except BaseException as error:
            errors.append(error)

    folder = fake.folder()
    thread = threading.Thread(target=hang)
    thread.start()
    assert eventually(lambda: bool(fake._busy))
    fake.close()
    thread.join(20)
    assert [type(error) for error in errors] == [CompilerCrashed]
    assert gone(idle)
    assert not folder.exists() and not fake.directory.exists()
    with pytest.raises(RuntimeError, match="was closed"):
        fake.run(job(b""), 30)


def test_time_limits_and_sizes_that_make_no_sense_are_refused(
    fake: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="positive number of seconds, got 0"):
        fake.run(job(b""), 0)
    with pytest.raises(ValueError, match="at least one worker, got size=-1"):
        Pool(-1)
    monkeypatch.setenv("BRIDGE_COMPILE_WORKERS", "many")
    with pytest.raises(ValueError, match="BRIDGE_COMPILE_WORKERS must be a number.*got 'many'"):
        Pool()
    monkeypatch.setenv("BRIDGE_COMPILE_WORKERS", "3")
    with Pool() as made:
        assert made.size == 3


def test_worker_that_can_not_load_the_compiler_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_a_library = tmp_path / "libtpu.so"
    not_a_library.write_text("no library")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(not_a_library))
    with Pool(1) as made, pytest.raises(CompilerMissing, match="tpu-autotune doctor") as caught:
        made.run(job(b""), 30)
    assert str(not_a_library) in caught.value.details


def test_errors_survive_the_way_to_another_process() -> None:
    import pickle

    error = VmemExceeded("too much", chip="v5e", kernel="k", where="a.py:1", space="vmem", needed=2, limit=1)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is VmemExceeded and str(copy) == str(error)
    assert (copy.needed, copy.limit, copy.where) == (2, 1, "a.py:1")
    assert isinstance(copy, CompileError)


# With the compiler --------------------------------------------------------------------------------


def test_abort_of_the_compiler_is_reported_and_survived(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # This estimator of libtpu's, asked for on a v4, ends the process.
    lowered = lower(jnp.tanh, ["f32[8,128]"], chip("v4"), mesh("v4", "x", 1))
    asked = Job(lowered.module, "v4:2x2x1", "megacore", (), {}, lowered.shardy, None)
    with Pool(1) as made:
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--no_such_flag_of_libtpu={tmp_path}")
        with pytest.raises(CompilerCrashed) as caught:
            made.run(asked, 60)
        assert "no_such_flag_of_libtpu" in caught.value.details
        monkeypatch.delenv("LIBTPU_INIT_ARGS")
        assert "tanh" in made.run(asked, 60)["hlo"]


def test_compiling_in_threads_gives_each_its_own_result() -> None:
    def compile_one(columns: int) -> str:
        return compile_for(lambda x: x + 1, [f"f32[8,{columns}]"], "v5e").hlo

    widths = [128 * (i + 1) for i in range(6)]
    with ThreadPoolExecutor(3) as threads:
        for width, hlo in zip(widths, threads.map(compile_one, widths), strict=True):
            assert (
                f"(x: f32[8,{width}])" in hlo or f"f32[8,{width}]" in hlo.split("entry_computation_layout")[1]
            )


SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")  # JAX warns of forks
os.environ["JAX_PLATFORMS"] = "cpu"
from bridge.aot import pool, worker
from bridge.topology import compile_for

def compile_one(width):
    return f"f32[8,{width}]" in compile_for(lambda x: x + 1, [f"f32[8,{width}]"], "v5e").hlo

assert compile_one(128)
directory = pool.shared().directory
pids = [worker._process.pid for worker in pool._alive]
"""


def run_script(rest: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT + rest]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_nothing_is_left_when_the_process_exits() -> None:
    done = run_script("print(directory, *pids)")
    assert done.returncode == 0, done.stderr
    directory, *pids = done.stdout.split()
    assert pids and all(gone(int(pid)) for pid in pids)
    assert not Path(directory).exists()


def test_nothing_is_left_when_the_process_is_killed() -> None:
    done = run_script("print(directory, *pids, flush=True); os.kill(os.getpid(), 9)")
    assert done.returncode == -9
    directory, *pids = done.stdout.split()
    assert pids and eventually(lambda: all(gone(int(pid)) for pid in pids))
    assert eventually(lambda: not Path(directory).exists())


def test_forked_child_has_a_pool_of_its_own_and_leaves_the_parents_alone() -> None:
    done = run_script(
        """
from bridge.aot.lowering import lower
from bridge.chips import chip
from bridge.topology import mesh
lowered = lower(lambda x: x * 3, ["f32[8,128]"], chip("v5e"), mesh("v5e", "x", 1))
job = pool.Job(lowered.module, "v5e:2x2", "default", (), {}, lowered.shardy, None)
def in_child():
    assert pool._shared is None and not pool._alive
    with pool.shared() as own:
        assert "multiply" in own.run(job, 60)["hlo"]
        assert own.directory != directory
    try:
        compile_one(256)
    except RuntimeError as error:
        return "spawn" in str(error)

child = os.fork()
if child == 0:
    os._exit(0 if in_child() else 1)  # as multiprocessing does: JAX can't be taken down in a fork
assert os.waitpid(child, 0)[1] == 0
assert directory.exists()
assert compile_one(384)
assert [worker._process.pid for worker in pool._alive] == pids
"""
    )
    assert done.returncode == 0, done.stderr

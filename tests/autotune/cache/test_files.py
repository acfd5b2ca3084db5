"""The user's files: where they lie, what happens to bad ones, and folders and disks that take nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune import cache
from autotune.cache import files

BAD = b'{"schema": 1, "chip": "v5e", "entr'


def names(folder: Path) -> set[str]:
    """Files there, without locks."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


# Where --------------------------------------------------------------------------------------------


def test_what_is_stored_is_found_here_and_by_the_next_process(
    making: Any, folder: Path, new_process: Callable[[], None]
) -> None:
    assert making.rows() is None
    assert cache.store([making.entry(256), making.entry(512, on=making.v6e)]) == (
        folder / "v5e.json",
        folder / "v6e.json",
    )
    for _ in range(2):
        assert making.rows() == 256
        assert making.rows(on=making.v6e) == 512
        new_process()
    found = cache.lookup(making.kernel, making.problem(), making.v5e)
    assert found is not None
    assert (found.kind, found.path, found.exact) == ("user", str(folder / "v5e.json"), True)


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/cache"}, "/cache/tpu-kernels-sdk/tilings"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/tpu-kernels-sdk/tilings"),
        ("linux", {}, "/home/me/.cache/tpu-kernels-sdk/tilings"),
        ("darwin", {}, "/home/me/Library/Caches/tpu-kernels-sdk/tilings"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/tpu-kernels-sdk/tilings"),
        ("win32", {}, "/home/me/AppData/Local/tpu-kernels-sdk/tilings"),
        ("linux", {"XDG_CACHE_HOME": "/cache", "BRIDGE_TILINGS": "/mine"}, "/mine"),
        ("linux", {"BRIDGE_TILINGS": "~/mine"}, "/home/me/mine"),
    ],
)
def test_the_folder_is_where_platforms_keep_caches(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BRIDGE_TILINGS", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache.user_directory() == Path(expected)


def test_without_a_home_tilings_are_kept_in_memory(making: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BRIDGE_TILINGS")
    monkeypatch.setattr(Path, "home", no_home)
    assert making.rows() is None
    with pytest.warns(cache.TilingsWarning, match="no folder"):
        assert cache.store([making.entry()]) == ()
    assert making.rows() == 256


def test_files_have_the_rights_that_files_have(making: Any, folder: Path) -> None:
    before = os.umask(0o027)
    try:
        cache.store([making.entry()])
        assert (folder / "v5e.json").stat().st_mode & 0o777 == 0o640
        (folder / "v5e.json").chmod(0o664)
        cache.store([making.entry(512, 1e-4)])
        assert (folder / "v5e.json").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_what_is_known_already_writes_nothing(making: Any, folder: Path) -> None:
    entry = making.entry()
    cache.store([entry])
    before = (folder / "v5e.json").stat()
    cache.store([entry])
    assert (folder / "v5e.json").stat().st_ino == before.st_ino


def test_what_other_processes_stored_is_found_after_reload_or_store(
    making: Any, folder: Path, new_process: Callable[[], None]
) -> None:
    assert making.rows() is None
    files.update(folder / "v5e.json", "v5e", [making.entry()])
    assert making.rows() is None
    cache.reload()
    assert making.rows() == 256
    files.update(folder / "v5e.json", "v5e", [making.entry(512, 1e-4)])
    cache.store([making.entry(problem=making.problem(8), rows=8)])
    assert making.rows() == 512


def test_what_killed_processes_leave_is_removed(making: Any, folder: Path) -> None:
    folder.mkdir()
    for name in (".v5e.json.1-2.tmp", ".v6e.json.1-2.tmp", "notes.tmp"):
        (folder / name).write_text("{")
    cache.store([making.entry()])
    assert names(folder) == {"v5e.json", ".v6e.json.1-2.tmp", "notes.tmp"}


# Bad files ----------------------------------------------------------------------------------------


def test_bad_files_are_set_aside_and_kept(making: Any, folder: Path, new_process: Callable[[], None]) -> None:
    folder.mkdir()
    for number in (1, 2):
        (folder / "v5e.json").write_bytes(BAD + bytes([number]))
        new_process()
        with pytest.warns(cache.TilingsWarning, match=rf"v5e\.json\.bad-{number}: ") as told:
            assert making.rows() is None
            assert making.rows(making.problem(8)) is None
        assert len(told) == 1
    assert names(folder) == {"v5e.json.bad-1", "v5e.json.bad-2"}
    assert (folder / "v5e.json.bad-2").read_bytes() == BAD + b"\2"
    cache.store([making.entry()])
    new_process()
    assert making.rows() == 256


def test_a_file_that_goes_bad_later_is_set_aside_by_store(making: Any, folder: Path) -> None:
    cache.store([making.entry()])
    (folder / "v5e.json").write_bytes(b"")
    with pytest.warns(cache.TilingsWarning, match="bad-1"):
        cache.store([making.entry(512, problem=making.problem(512))])
    assert names(folder) == {"v5e.json", "v5e.json.bad-1"}


def test_a_good_file_that_came_meanwhile_is_not_set_aside(
    making: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    file = folder / "v5e.json"
    file.write_bytes(BAD)
    locked = files._locked

    def other_process_first(path: Path) -> Any:
        monkeypatch.setattr(files, "_locked", locked)
        os.rename(file, folder / "v5e.json.bad-1")
        files.update(file, "v5e", [making.entry()])
        return locked(path)

    monkeypatch.setattr(files, "_locked", other_process_first)
    assert making.rows() == 256
    assert names(folder) == {"v5e.json", "v5e.json.bad-1"}


def test_a_folder_in_place_of_a_file(making: Any, folder: Path) -> None:
    (folder / "v5e.json").mkdir(parents=True)
    with pytest.warns(cache.TilingsWarning, match="are not used: IsADirectoryError"):
        assert making.rows() is None
    with pytest.warns(cache.TilingsWarning, match="cannot be saved"):
        assert cache.store([making.entry()]) == ()
    assert making.rows() == 256
    assert names(folder) == {"v5e.json"}


# Folders and disks that take nothing --------------------------------------------------------------


def no_space(*arguments: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_then_no_space() -> Callable[[int, Any], int]:
    write, calls = os.write, iter(range(100))
    return lambda descriptor, data: no_space() if next(calls) else write(descriptor, bytes(data[:100]))


FAILING: dict[str, Callable[[], tuple[str, Any]]] = {
    "nothing can be written": lambda: ("write", no_space),
    "half can be written": lambda: ("write", half_then_no_space()),
    "it does not reach the disk": lambda: ("fsync", no_space),
    "it cannot take the old one's place": lambda: ("replace", no_space),
    "no file can be made": lambda: ("open", no_space),
}


@pytest.mark.parametrize("failing", FAILING.values(), ids=FAILING.keys())
def test_a_full_disk(
    making: Any,
    folder: Path,
    new_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    failing: Callable[[], tuple[str, Any]],
) -> None:
    cache.store([making.entry()])
    before = (folder / "v5e.json").read_bytes()
    with monkeypatch.context() as full:
        full.setattr(os, *failing())
        with pytest.warns(cache.TilingsWarning, match="cannot be saved.*No space left") as told:
            assert cache.store([making.entry(512, 1e-4)]) == ()
            assert cache.store([making.entry(512, problem=making.problem(512))]) == ()
        assert len(told) == 1
        assert making.rows() == 512
        assert making.rows(making.problem(512)) == 512
        cache.reload()
        assert making.rows() == 512
    assert names(folder) == {"v5e.json"}
    assert (folder / "v5e.json").read_bytes() == before
    # With space again, the next call writes what the earlier ones could not.
    cache.store([making.entry(8, problem=making.problem(8))])
    new_process()
    assert making.rows() == making.rows(making.problem(512)) == 512
    assert making.rows(making.problem(8)) == 8


LIMITED = """
import os, resource, sys, warnings
sys.path.insert(0, sys.argv[1])
import writer
from autotune import cache
entries = [writer.entry(1, 8), writer.entry(2, 8)]  # before Python itself cannot be read
if sys.argv[2] == "small":
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
else:
    os.setuid(65534)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    saved = cache.store(entries[:1])
    cache.store(entries[1:])
(only,) = told
found = {e.problem for e in cache.user.layer("v5e").entries}
print(saved, len(found), only.message)
"""


def run_limited(limit: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", LIMITED, str(Path(__file__).parent), limit],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_file_that_the_system_does_not_let_grow(folder: Path) -> None:
    out = run_limited("small")
    assert out.startswith("() 2 ") and "File too large" in out
    assert names(folder) == set()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="takes rights away from root")
def test_a_folder_of_somebody_else(
    making: Any, new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        monkeypatch.setenv("BRIDGE_TILINGS", folder)
        new_process()
        cache.store([making.entry()])
        Path(folder).chmod(0o755)
        out = run_limited("nobody")
        assert out.startswith("() 3 ") and "Permission denied" in out
        assert names(Path(folder)) == {"v5e.json"}


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all were on a file system that is mounted so."""
    real = os.open

    def opened(path: Any, flags: int, *arguments: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", opened)


def test_a_read_only_folder_is_read(
    making: Any, folder: Path, new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store([making.entry()])
    new_process()
    with monkeypatch.context() as mounted:
        read_only(mounted)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert making.rows() == 256
        with pytest.warns(cache.TilingsWarning, match="Read-only file system"):
            cache.store([making.entry(512, 1e-4)])
        assert making.rows() == 512


def test_a_bad_file_in_a_read_only_folder(making: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "v5e.json").write_bytes(BAD)
    with monkeypatch.context() as mounted:
        read_only(mounted)
        with pytest.warns(cache.TilingsWarning, match="cannot be renamed"):
            assert making.rows() is None
    assert names(folder) == {"v5e.json"}


def test_a_folder_that_vanishes_is_made_again(making: Any, folder: Path) -> None:
    cache.store([making.entry()])
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    cache.store([making.entry(512, problem=making.problem(512))])
    assert names(folder) == {"v5e.json"}
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("a file in its place")
    with pytest.warns(cache.TilingsWarning, match="cannot be saved"):
        cache.store([making.entry(8, problem=making.problem(8))])
    assert making.rows(making.problem(8)) == 8


# Locks --------------------------------------------------------------------------------------------


@pytest.fixture
def held(folder: Path) -> Iterator[threading.Event]:
    """Somebody holds the lock until the event."""
    folder.mkdir()
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with files._locked(folder / "v5e.json"):
            taken.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(60)
    yield release
    release.set()
    holder.join()


def test_a_lock_is_waited_for(making: Any, held: threading.Event, new_process: Callable[[], None]) -> None:
    threading.Timer(0.1, held.set).start()
    cache.store([making.entry()])
    assert held.is_set()
    new_process()
    assert making.rows() == 256


def test_a_lock_that_nobody_gives_back(
    making: Any, held: threading.Event, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.05)
    with pytest.warns(cache.TilingsWarning, match="held by another process for 0.05 seconds"):
        assert cache.store([making.entry()]) == ()
    assert making.rows() == 256
    assert names(folder) == set()


def test_without_locks_files_are_written_all_the_same(
    making: Any, folder: Path, new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    folder.mkdir()
    (folder / ".v5e.json.1-2.tmp").touch()  # perhaps of a process that is writing
    monkeypatch.setattr(files, "_try_lock", unsupported)
    cache.store([making.entry()])
    new_process()
    assert making.rows() == 256
    assert names(folder) == {"v5e.json", ".v5e.json.1-2.tmp"}

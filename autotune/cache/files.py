"""Files that several processes read and write at once, and that any of them may leave in the middle.

Who writes holds a lock, reads the file, merges, writes another one beside it and puts that in its place. So
readers need no lock and see the old or the new file, and a killed process loses only what it was writing.
The lock is a file of its own, which stays: to remove it would let two processes hold two locks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from autotune.cache.entry import Entry, Identity, merged
from autotune.cache.text import BadFile, from_text, to_text

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK_SECONDS = 60.0
"""How long to wait for the lock. A write takes milliseconds, but a stopped process may hold it forever."""

_PAUSE_SECONDS = 0.005


def read(path: Path, chip: str) -> tuple[dict[Identity, Entry], str | None]:
    """The entries of a file, none if there is no file; and what is to be told to the user.

    A bad file is set aside, if its folder allows. Raises `OSError` if the file cannot be read.
    """
    try:
        return _entries(path, chip), None
    except BadFile as error:
        bad = error
    try:
        with _locked(path):
            return _read_or_set_aside(path, chip)  # anew: another process may have done it in the meantime
    except OSError as error:
        return {}, f"{path} holds no tilings that can be used: {bad}. It cannot be renamed: {error}"


def update(
    path: Path, chip: str, new: Iterable[Entry], *, replace: bool = False
) -> tuple[dict[Identity, Entry], str | None]:
    """Merge entries into a file. Returns what it then holds, and what is to be told to the user.

    When this returns, the entries are on the disk. Raises `OSError` if they could not be written; the file
    is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as alone:
        if alone:
            _remove_leftovers(path)
        old, told = _read_or_set_aside(path, chip)
        result = merged(old, new, replace=replace)
        if result != old:
            _write(path, to_text(chip, result.values()).encode())
    return result, told


def _entries(path: Path, chip: str) -> dict[Identity, Entry]:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {entry.identity: entry for entry in from_text(data, chip)[1]}


def _read_or_set_aside(path: Path, chip: str) -> tuple[dict[Identity, Entry], str | None]:
    """Under the lock, so that no good file is taken for the bad one that was there before."""
    try:
        return _entries(path, chip), None
    except BadFile as error:
        number = 1
        while os.path.lexists(aside := path.with_name(f"{path.name}.bad-{number}")):
            number += 1
        os.rename(path, aside)
        return {}, f"{path} holds no tilings that can be used, so it is now {aside.name}: {error}"


# Writing ------------------------------------------------------------------------------------------


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    # Not by tempfile, whose files nobody else may read: a folder may be that of a team.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        try:
            with contextlib.suppress(OSError, AttributeError):
                os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode))  # as somebody may have set it
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # the entry in the folder; not every system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_leftovers(path: Path) -> None:
    """Of processes that were killed. Who holds the lock knows that nobody is writing."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            left.unlink()


# The lock -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds the lock of a file; false where the file system has no locks.

    Without locks the file is still whole at any time, but of two writers at once one may lose.
    Raises `OSError` if the lock cannot be had.
    """
    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                _try_lock(descriptor)
                alone = True
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"{lock} has been held by another process for {LOCK_SECONDS:g} seconds"
                    ) from None
                time.sleep(_PAUSE_SECONDS)
            except OSError:
                alone = False
                break
        yield alone
    finally:
        os.close(descriptor)  # which gives the lock back, as the end of the process would


def _try_lock(descriptor: int) -> None:
    """Raises `BlockingIOError` or `PermissionError` while somebody else holds it."""
    if sys.platform == "win32":
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

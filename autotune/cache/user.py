"""The user's own tilings: one file for each chip, and what could not be written to it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from autotune.cache import contexts, files, notices, shipped
from autotune.cache.entry import Entry, Identity, merged
from autotune.cache.layer import Layer
from autotune.cache.source import digest
from autotune.cache.text import BadFile

VARIABLE = "BRIDGE_TILINGS"
"""Environment variable with the folder of the user's files."""


def user_directory() -> Path | None:
    """The folder of the user's files: $BRIDGE_TILINGS, else a folder in the cache of the platform's user.

    None if there is no such user.
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(os.path.expanduser(chosen)).absolute()
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        cache = os.environ.get("LOCALAPPDATA") or str(home / "AppData" / "Local")
    elif sys.platform == "darwin":
        cache = str(home / "Library" / "Caches")
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or ""
        if not os.path.isabs(cache):  # as the standard of that variable demands
            cache = str(home / ".cache")
    return Path(cache) / "tpu-kernels-sdk" / "tilings"


class _UserTilings:
    """The user's tilings for one chip: what the file held when it was read, and what it could not take."""

    def __init__(self, chip: str) -> None:
        self.chip = chip
        directory = user_directory()
        self.path = None if directory is None else directory / f"{chip}.json"
        self.entries: dict[Identity, Entry] = {}
        self.told: list[str] = []
        if self.path is not None:
            try:
                self.entries, told = files.read(self.path, chip)
                self.told += [told] if told else []
            except (OSError, BadFile) as error:
                self.told.append(f"tilings in {self.path} are not used: {notices.message_of(error)}")
        self._unsaved: list[Entry] = []
        self._layer: Layer | None = None

    def store(self, new: Iterable[Entry], replace: bool) -> Path | None:
        """The file that holds them now; None if they are in memory only."""
        new = list(new)
        self._layer = None
        if self.path is not None:
            try:
                # Whatever earlier calls could not write is merged, even where these replace.
                saved, told = self.entries, None
                if self._unsaved:
                    saved, told = files.update(self.path, self.chip, self._unsaved)
                    self.told += [told] if told else []
                    self._unsaved = []
                saved, told = files.update(self.path, self.chip, new, replace=replace)
                self.told += [told] if told else []
                self.entries = saved
                return self.path
            except OSError as error:
                self.told.append(
                    f"tilings cannot be saved in {self.path}, and are kept until this process ends: "
                    f"{notices.message_of(error)}"
                )
        else:
            self.told.append("there is no folder for tilings, so they are kept until this process ends")
        self._unsaved += new
        self.entries = merged(self.entries, new, replace=replace)
        return None

    @property
    def layer(self) -> Layer:
        if self._layer is None:
            path = None if self.path is None else str(self.path)
            self._layer = Layer("user", path, self.entries.values())
        return self._layer

    def again(self) -> _UserTilings:
        """As the file is now, with what it could not take."""
        new = _UserTilings(self.chip)
        new._unsaved = self._unsaved
        new.entries = merged(new.entries, self._unsaved)
        return new


_user: dict[str, _UserTilings] = {}
_lock = threading.RLock()


def layer(chip: str) -> Layer:
    """The user's tilings for a chip, read once in a process."""
    with _lock:
        found = _user_tilings(chip).layer
    _warn(_user[chip])
    return found


def store(entries: Iterable[Entry], *, replace: bool = False) -> tuple[Path, ...]:
    """Add entries to the user's files, and use them in this process from now on.

    An entry that is there already, with the same problem, chip, source and conditions, is merged: see
    `entry.merge`. Where a file cannot be written, there is one warning, and the entries hold in this process.

    Args:
        replace: entries take the place of those that are there, failures included.

    Returns:
        The files that were written, or held everything already.
    """
    by_chip: dict[str, dict[Identity, Entry]] = {}
    for entry in entries:
        by_chip[entry.chip] = merged(by_chip.get(entry.chip, {}), [entry])
    written = []
    with _lock:
        for chip, new in by_chip.items():
            written.append(_user_tilings(chip).store(new.values(), replace))
        contexts.forget_found()
    for chip in by_chip:
        _warn(_user[chip])
    return tuple(path for path in written if path is not None)


def reload() -> None:
    """Forget what was read and found. The next lookup reads files, code and $BRIDGE_TILINGS anew.

    What could not be written is kept.
    """
    with _lock:
        for chip, tilings in list(_user.items()):
            _user[chip] = tilings.again()
        shipped.forget()
        digest.cache_clear()
        notices.forget()
        contexts.forget_found()


def _user_tilings(chip: str) -> _UserTilings:
    if chip not in _user:
        _user[chip] = _UserTilings(chip)
    return _user[chip]


def _warn(tilings: _UserTilings) -> None:
    """Outside of the lock and after the work: a warning may be an error."""
    with _lock:
        told, tilings.told = tilings.told, []
    for message in told:
        notices.warn_once(message)

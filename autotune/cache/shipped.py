"""Tilings that packages with kernels ship."""

from __future__ import annotations

import sys
import threading
from importlib import resources

from autotune.cache import notices
from autotune.cache.layer import Layer
from autotune.cache.text import BadFile, from_text

_layers: dict[tuple[str, str], Layer] = {}
_lock = threading.Lock()


def layer(package: str, chip: str) -> Layer:
    """What `package` ships for a chip, in `data/tilings/CHIP.json`; read once in a process."""
    with _lock:
        found = _layers.get((package, chip))
        if found is None:
            found = _layers[package, chip] = _read(package, chip)
    return found


def forget() -> None:
    """Read files anew."""
    with _lock:
        _layers.clear()


def _read(package: str, chip: str) -> Layer:
    if not hasattr(sys.modules.get(package), "__path__"):
        return Layer("shipped", None, ())
    file = resources.files(package) / "data" / "tilings" / f"{chip}.json"
    try:
        return Layer("shipped", str(file), from_text(file.read_bytes(), chip)[1])
    except (FileNotFoundError, NotADirectoryError):
        return Layer("shipped", str(file), ())
    except (OSError, BadFile) as error:
        # It belongs to the package, so it stays where it is.
        notices.warn_once(f"tilings shipped in {file} are not used: {notices.message_of(error)}")
        return Layer("shipped", str(file), ())

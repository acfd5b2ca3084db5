"""Warnings that are given once."""

from __future__ import annotations

import warnings

_given: set[str] = set()


class TilingsWarning(RuntimeWarning):
    """A file of tilings is bad, or cannot be written."""


def warn_once(message: str) -> None:
    """A warning, unless it was given before."""
    if message not in _given:
        _given.add(message)
        warnings.warn(message, TilingsWarning, stacklevel=2)


def message_of(error: Exception) -> str:
    """What is told of an error: the same for the same cause, so without names of temporary files."""
    what = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {what or error}"


def forget() -> None:
    """Give them once more."""
    _given.clear()

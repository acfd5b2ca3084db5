"""Contexts in which certain tilings come first."""

from __future__ import annotations

import contextlib
import contextvars
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from autotune.cache.entry import Entry, merged
from autotune.cache.layer import Layer
from autotune.cache.text import BadFile, from_text
from bridge.chips import chips


class Stack:
    """The contexts that hold somewhere, innermost first, and what was found there before.

    Attributes:
        layers: of the contexts.
        below: kinds of the layers that come after them.
        warm: results of `find.lookup`. To forget them, another dict takes its place: a lookup in another
            thread that is still about to write then writes to the old one.
    """

    def __init__(self, layers: tuple[Layer, ...] = (), below: tuple[str, ...] = ("user", "shipped")) -> None:
        self.layers = layers
        self.below = below
        self.warm: dict[Any, Any] = {}
        _stacks.add(self)


_stacks: weakref.WeakSet[Stack] = weakref.WeakSet()
_base = Stack()
stack: contextvars.ContextVar[Stack] = contextvars.ContextVar("autotune_tilings", default=_base)
"""What holds in this thread or task."""


@contextlib.contextmanager
def use(tilings: Iterable[Entry] | str | os.PathLike[str], *, alone: bool = False) -> Iterator[None]:
    """Within this context, these tilings come before all others: those of outer contexts, the user's, and
    shipped ones.

    Contexts nest. They hold in the thread (or asyncio task) that enters them, and in threads that copy its
    `contextvars` context.

    Args:
        tilings: entries; or a file of them, or a folder with one file for each chip.
        alone: nothing else is looked at, so that results depend on no user's files.

    Raises:
        OSError: the file cannot be read.
        BadFile: it holds no tilings.
    """
    if isinstance(tilings, str | os.PathLike):
        layer = _context_layer(Path(tilings))
    else:
        layer = Layer("context", None, merged({}, tilings).values())
    outer = stack.get()
    with entered(Stack((layer,), ()) if alone else Stack((layer, *outer.layers), outer.below)):
        yield


@contextlib.contextmanager
def entered(inner: Stack) -> Iterator[None]:
    """Within this context, `inner` is the stack."""
    token = stack.set(inner)
    try:
        yield
    finally:
        stack.reset(token)


def forget_found() -> None:
    """Forget results of lookups, everywhere."""
    for other in list(_stacks):
        other.warm = {}


def _context_layer(path: Path) -> Layer:
    paths = [path]
    if path.is_dir():
        paths = [file for chip in chips() if (file := path / f"{chip}.json").exists()]
    found: list[Entry] = []
    for file in paths:
        try:
            found += from_text(file.read_bytes(), file.stem if path.is_dir() else None)[1]
        except BadFile as error:
            raise BadFile(f"{file}: {error}") from error
    return Layer("context", str(path), found)

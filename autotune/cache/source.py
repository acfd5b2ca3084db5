"""Digests of source code, the same as long as the code does the same as far as its text tells.

Hashed are the names of the modules and their syntax trees without positions, comments and docstrings. So
comments, formatting, where the files lie and who reads them make no difference; everything else does.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import logging
import pkgutil
import sys
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

UNREADABLE = "unreadable"
"""In place of the digest of code whose source cannot be read; never equal to one."""

_DIGITS = 16
_log = logging.getLogger(__name__)


@functools.cache
def digest(modules: tuple[str, ...]) -> str:
    """The digest of modules, and of all modules in those that are packages; `UNREADABLE` without source.

    It is made once in a process; `digest.cache_clear()` forgets it.
    """
    hashed = hashlib.sha256()
    try:
        for name, source in sorted({name: text for root in modules for name, text in _sources(root)}.items()):
            hashed.update(f"\n{name}\n".encode())
            _write(ast.parse(source), lambda text: hashed.update(text.encode("utf-8", "backslashreplace")))
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        _log.warning("no digest of %s, so no tuned tilings for it: %s", ", ".join(modules), error)
        return UNREADABLE
    return hashed.hexdigest()[:_DIGITS]


def _sources(name: str) -> Iterator[tuple[str, str]]:
    """(name, source) of a module and what is in it. Raises `ImportError` if there is no source."""
    if name == "__main__":  # what was started as a script has no spec
        with tokenize.open(getattr(sys.modules[name], "__file__", None) or "") as file:
            yield name, file.read()
        return
    spec = importlib.util.find_spec(name)
    get_source = getattr(spec.loader, "get_source", None) if spec else None
    source = get_source(name) if get_source else None
    if spec is None or source is None:
        raise ImportError(f"no source of {name}")
    yield name, source
    for module in pkgutil.iter_modules(spec.submodule_search_locations or ()):
        yield from _sources(f"{name}.{module.name}")


def _write(node: Any, write: Callable[[str], None]) -> None:
    """A syntax tree as text. `ast.dump` differs from one release of Python to the next; this does not."""
    if isinstance(node, ast.Constant):
        write(f"({type(node.value).__name__} {node.value!r})")
    elif isinstance(node, ast.AST):
        write(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            # Later releases add fields, which are empty in code that knows nothing of them.
            if value is not None and value != [] and name not in ("type_ignores", "type_comment"):
                write(f" {name}=")
                _write(value, write)
        write(")")
    elif isinstance(node, list):
        write("[")
        for item in node:
            if not _is_docstring(item):
                _write(item, write)
        write("]")
    else:
        write(repr(node))


def _is_docstring(node: Any) -> bool:
    """A string that stands as a statement: a docstring, of whatever."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )

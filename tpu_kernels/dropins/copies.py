"""Copies of torch's Python functions in which a name means something else."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def with_names(function: Any, **names: Any) -> FunctionType:
    """The same function with other values for some of the global names it uses.

    While a `TorchFunctionMode` handles a call it is off, and does not see what the function calls in turn.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"expected a function written in Python, got {function!r}")
    missing = names.keys() - set(function.__code__.co_names)
    if missing:
        raise ImportError(f"{function.__qualname__} of this torch does not use {', '.join(sorted(missing))}")
    values = {**function.__globals__, **names}
    copy = FunctionType(
        function.__code__, values, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy

"""What torch.compile makes of calls to `torch.tpu` in the code it traces.

Traced into, they end in C++ functions that it does not know, with a warning for each. So they are either
constants to it, or run as they are between two graphs, as `torch.compiler.disable` does. That one would
import the compiler at once, which takes as long as importing torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Private, as are the attributes set below.
_set_tracer: Any = torch._C._dynamo.eval_frame.set_eval_frame  # pyright: ignore[reportAttributeAccessIssue]


def constant(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The result is a constant of the graph: it does not change while the process runs."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The graph ends before the call, which runs untraced, and another begins after it."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tracer = _set_tracer(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_tracer(tracer)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = "it asks the device"  # type: ignore[attr-defined]
    return run

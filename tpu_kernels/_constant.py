"""Functions of numbers and texts whose results a compiled graph takes as constants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from bridge.device import tracing

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, computed once for each set of arguments, also while torch.compile traces.

    Arguments and results must be immutable and hashable. Graphs hold the result; for other arguments they are
    made again.
    """
    remembered = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, remembered(*args, **kwargs))

    # torch.compiler.assume_constant_result would import the compiler with this module.
    return tracing.constant(call)

"""torch.compile on ranks that are threads: code for each, as the rank's number is a constant in it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from bridge.device.imports import after_import
from bridge.ranks.thread_rank import current

_DYNAMO = "torch._dynamo.eval_frame"
_SET_REGION = "set_eval_frame_isolate_recompiles_id"
_compile: Any = torch.compile
_live = False
_set_region: Any = None


@functools.cache
def _watch_dynamo() -> None:
    after_import(_DYNAMO, lambda _: _enter_regions() if _live else None)


def _enter_regions() -> None:
    global _set_region
    module = sys.modules.get(_DYNAMO)
    if module is None or _set_region is not None:
        return
    original = getattr(module, _SET_REGION, None)
    if original is None:  # torch.compile is refused
        return
    _set_region = original

    def set_region(region: int) -> int:
        rank = current()
        return original(region if rank is None else rank.compiled_in(region))

    setattr(module, _SET_REGION, set_region)


@functools.wraps(_compile)
def _compile_apart(*args: Any, **kwargs: Any) -> Any:
    if current() is not None and not hasattr(importlib.import_module(_DYNAMO), _SET_REGION):
        raise NotImplementedError(
            f"torch.compile on a rank that is a thread: torch {torch.__version__} cannot keep the code of "
            "several ranks apart; 2.13 can. Use processes (torchrun), or leave out torch.compile."
        )
    return _compile(*args, **kwargs)


@contextlib.contextmanager
def compiled_code() -> Iterator[None]:
    """Keep what torch.compile makes apart by rank, by the ids that it has for that purpose."""
    global _live, _set_region
    _watch_dynamo()
    _live = True
    _enter_regions()
    torch.compile = _compile_apart
    try:
        yield
    finally:
        _live = False
        torch.compile = _compile
        if _set_region is not None:
            setattr(sys.modules[_DYNAMO], _SET_REGION, _set_region)
            _set_region = None

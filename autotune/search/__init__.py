"""Searches of tile spaces. None compiles, runs or measures: `autotune.tune` asks a scorer for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.search.model import ModelSearch as ModelSearch
from autotune.search.space import Space as Space
from autotune.search.strategies import LocalSearch as LocalSearch
from autotune.search.strategies import Strategy as Strategy
from autotune.search.strategies import exhaustive as exhaustive
from autotune.search.strategies import random as random
from autotune.search.subject import Subject as Subject
from autotune.search.subject import field_groups as field_groups
from autotune.search.subject import function_subject as function_subject
from autotune.search.subject import kernel_subject as kernel_subject

STRATEGIES: Mapping[str, Callable[[Space, int], Strategy]] = {
    "model": ModelSearch,
    "local": LocalSearch,
    "random": random,
    "exhaustive": exhaustive,
}
"""Strategies by name, each made of a space and a seed."""

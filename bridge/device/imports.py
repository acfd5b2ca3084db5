"""Something to do as soon as a module has been imported, for modules that must not be imported for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def after_import(name: str, action: Action) -> None:
    """Call `action` with the module of this full name: now if it is imported, else as soon as it is."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    _finder.actions[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    """Finds the modules where they lie, to act on them once they are loaded."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.actions)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, actions: dict[str, Action]) -> None:
        self._loader, self._actions = loader, actions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader  # what the module keeps
        self._loader.exec_module(module)
        action = self._actions.pop(module.__name__, None)
        if action is not None:
            action(module)

    def __getattr__(self, name: str) -> Any:  # what else the module's own loader can: get_source, ...
        return getattr(self._loader, name)


_finder = _Finder()

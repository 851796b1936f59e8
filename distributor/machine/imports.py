"""Call a function with a module as soon as this process has imported the module, if that ever happens."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _OnImport(importlib.abc.MetaPathFinder):
    """An import hook that calls a function once a module has been executed, before the ``import`` statement returns."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._then = then
        self._seen = False  # whether it was used; a used hook stays in sys.meta_path, over which threads may iterate

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._seen:
            return None
        self._seen = True
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == self._name:  # all modules of a zip have the same loader
                    self._then(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def on_import(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call ``then`` with a module once this process has imported the module, or immediately if it is already loaded."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        then(loaded)
    else:
        sys.meta_path.insert(0, _OnImport(name, then))

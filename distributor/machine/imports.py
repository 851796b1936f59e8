"""Acts when this process imports a module, if that ever happens."""

from __future__ import annotations

import gc
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_Execute = Callable[[ModuleType], None]


class _OnImport(importlib.abc.MetaPathFinder):
    """An import hook that lets a function execute a module. The function gets the loader's own, and the module."""

    def __init__(self, name: str, execute: Callable[[_Execute, ModuleType], None]) -> None:
        self._name = name
        self._execute = execute
        self._seen = False  # whether it was used; a used hook stays in sys.meta_path, over which threads may iterate

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._seen:
            return None
        others = [getattr(other, "find_spec", None) for other in sys.meta_path[sys.meta_path.index(self) + 1 :]]
        spec: ModuleSpec | None = next(filter(None, (find(name, path, target) for find in others if find)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_in_turn(module: ModuleType) -> None:
                # All modules of a zip have the same loader. A spec may be asked for without an import.
                if module.__name__ == self._name and not self._seen:
                    self._seen = True
                    self._execute(execute, module)
                else:
                    execute(module)

            spec.loader.exec_module = execute_in_turn  # type: ignore[method-assign]
        return spec


def on_import(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call ``then`` with a module once this process has imported the module, or immediately if it is already loaded."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        then(loaded)
        return

    def execute_and_call(execute: _Execute, module: ModuleType) -> None:
        execute(module)
        then(module)

    sys.meta_path.insert(0, _OnImport(name, execute_and_call))


def import_quickly(name: str) -> None:
    """Keep the garbage collector off while this process imports a module: a large one takes a sixth less time."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _OnImport(name, _execute_uncollected))


def _execute_uncollected(execute: _Execute, module: ModuleType) -> None:
    was_on = gc.isenabled()
    gc.disable()
    try:
        execute(module)
    finally:
        if was_on:
            gc.enable()

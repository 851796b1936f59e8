"""Acts when this process imports a module, if that ever happens."""

from __future__ import annotations

import gc
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

_Around = Callable[[ModuleType], AbstractContextManager[object]]


class _OnImport(importlib.abc.MetaPathFinder):
    """An import hook: a module is executed inside the context that ``around`` returns."""

    def __init__(self, name: str, around: _Around) -> None:
        self._name = name
        self._around = around
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
                    with self._around(module):
                        execute(module)
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

    @contextmanager
    def call(module: ModuleType) -> Iterator[None]:
        yield
        then(module)

    around_import(name, call)


def around_import(name: str, around: _Around) -> None:
    """Execute a module inside a context of its own, if this process imports the module and has not yet."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _OnImport(name, around))


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector off: a large import takes a sixth less time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

"""Where Python modules come from: found without importing them, and the user's own told apart from installed ones."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def find(name: str, folders: Sequence[str] = ()) -> ModuleSpec | None:
    """A module's spec, ``None`` if there is no such module. Imports nothing, not even the packages that it is in.

    Where that is more than can be known without importing them, it is the spec of the innermost one that is there.

    Args:
        name: dotted.
        folders: where to look before Python's own path.

    Example:
        >>> find("json.decoder").name
        'json.decoder'
        >>> find("json.no_such_module") is None
        True
    """
    importlib.invalidate_caches()
    spec = None
    path: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        partial = ".".join(parts[:depth])
        first = PathFinder.find_spec(partial, list(folders)) if depth == 1 and folders else None
        try:
            spec = first or _ask_finders(partial, path)
        except KeyError:  # a folder without __init__.py within a package: nobody can tell without importing that
            return spec
        if spec is None:
            return None
        if spec.submodule_search_locations is None:  # a module, in which there are no others
            return spec if depth == len(parts) else None
        path = list(spec.submodule_search_locations)
    return spec


def is_installed(path: str) -> bool:
    """Whether a file or folder belongs to Python or to an installed package."""
    return os.path.realpath(path).startswith(_installed_roots())


def own_modules() -> list[ModuleType]:
    """Loaded modules that the user wrote: those with a source file outside of every installed package.

    ``__main__`` is left out, since cloudpickle always pickles it by value, and so is this package, which ships itself.
    """
    roots = _installed_roots()
    own = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or name.partition(".")[0] == "distributor" or not isinstance(file, str):
            continue
        # sys.modules may hold a module under a second name; cloudpickle looks modules up by __name__.
        if getattr(module, "__name__", None) != name or not file.endswith((".py", ".pyc")):
            continue
        if not os.path.realpath(file).startswith(roots):
            own.append(module)
    return own


def _ask_finders(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """As ``import`` asks them: packages that are installed in place have finders of their own."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find_spec is None else find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _installed_roots() -> tuple[str, ...]:
    return tuple(
        os.path.realpath(path) + os.sep
        for path in {
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *(path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")),
            *(path for path in sys.path if path.endswith((".zip", ".egg"))),
        }
        if path
    )

"""Finds Python modules without importing them, and distinguishes the user's own modules from installed ones."""

from __future__ import annotations

import csv
import functools
import glob
import importlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, NamespaceLoader, PathFinder
from types import ModuleType


def find(name: str, folders: Sequence[str] = ()) -> ModuleSpec | None:
    """Return a module's spec, or ``None`` if there is no such module. Nothing is imported, not even parent packages.

    If a parent package would have to be imported to tell whether the module exists, return the spec of the innermost
    package that can be found without an import. ``folders`` are searched before ``sys.path``.

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
        try:
            next_spec = _ask_finders(partial, path, folders)
        except KeyError:  # a folder without __init__.py in a package has no known path until the package is imported
            return spec
        if next_spec is None:
            return spec if spec is not None and _moves(spec) else None
        spec = next_spec
        if spec.submodule_search_locations is None:  # a module, not a package: it contains no modules
            return spec if depth == len(parts) else None
        path = list(spec.submodule_search_locations)
    return spec


def is_installed(path: str) -> bool:
    """Return whether a file or folder belongs to Python or to an installed package."""
    return _is_in_environment(path) or target_folder(path) is not None


def _is_in_environment(path: str) -> bool:
    return os.path.realpath(path).startswith(_installed_roots())


def target_folder(path: str) -> str | None:
    """Return the folder on Python's path into which pip has installed a file or folder (``pip install --target``).

    ``None`` if no package's ``RECORD`` lists it
    (https://packaging.python.org/specifications/recording-installed-packages), or if it is in one of Python's own
    folders, such as ``site-packages``.
    """
    return None if _is_in_environment(path) else _target_folder(os.path.realpath(path))


def _target_folder(real: str) -> str | None:
    for entry in search_path():
        folder = os.path.realpath(entry)
        if real.startswith(folder + os.sep) and os.path.relpath(real, folder) in _recorded(folder, _changed(folder)):
            return folder
    return None


@functools.lru_cache(maxsize=64)
def _recorded(folder: str, changed: float) -> frozenset[str]:
    """Return the files in the ``RECORD`` of a folder's packages, and their folders; ``changed`` renews the cache."""
    paths: set[str] = set()
    for record in glob.glob(os.path.join(glob.escape(folder), "*.dist-info", "RECORD")):
        with suppress(OSError), open(record, encoding="utf-8", errors="replace", newline="") as file:
            for row in csv.reader(file):
                path = os.path.normpath(row[0]) if row else ""
                while path and path not in paths and not path.startswith(os.pardir):
                    paths.add(path)
                    path = os.path.dirname(path)
    return frozenset(paths)


def _changed(folder: str) -> float:
    try:
        return os.stat(folder).st_mtime
    except OSError:
        return 0.0


def own_modules() -> list[ModuleType]:
    """Return the loaded modules that belong neither to Python nor to an installed package.

    ``__main__`` is left out, because cloudpickle always pickles it by value, and this package, which is shipped apart.
    """
    roots = _installed_roots()
    users = []
    for name, module in list(sys.modules.items()):
        # A second name of a module in sys.modules is skipped: cloudpickle looks modules up by __name__.
        if name == "__main__" or name.partition(".")[0] == "distributor" or getattr(module, "__name__", None) != name:
            continue
        found = list(map(_real, places(module)))
        if found and not any(real.startswith(roots) or _target_folder(real) is not None for real in found):
            users.append(module)
    return users


#: Of files from which modules were loaded: a thousand modules take 12,000 system calls, in each start of a run.
_real = functools.lru_cache(maxsize=1 << 14)(os.path.realpath)


def places(module: ModuleType) -> list[str]:
    """Return the path of a module's Python file or, of a package without ``__init__.py``, its folders."""
    file = getattr(module, "__file__", None)
    if file is None and isinstance(getattr(module, "__loader__", None), NamespaceLoader):
        return list(module.__path__)
    # An import gives an absolute path. ``torch.ops``, which is no file's module, has another.
    is_file = isinstance(file, str) and os.path.isabs(file) and file.endswith((".py", ".pyc"))
    return [str(file)] if is_file else []


def search_path() -> list[str]:
    """Return ``sys.path`` without entries that are not strings, which ``import`` ignores too."""
    return [path for path in sys.path if isinstance(path, str)]


def archives() -> list[str]:
    """Return the zip files and eggs on Python's path."""
    return [path for path in search_path() if path.endswith((".zip", ".egg"))]


def _ask_finders(name: str, path: Sequence[str] | None, folders: Sequence[str]) -> ModuleSpec | None:
    """Ask all of Python's import finders for a module. Editable installs of packages may add finders of their own."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        where = [*folders, *search_path()] if finder is PathFinder and path is None else path
        spec: ModuleSpec | None = find_spec(name, where, None)
        if spec is not None:
            return spec
    return None


def _moves(package: ModuleSpec) -> bool:
    """Return whether a package may change its search path on import, because its source contains ``__path__``."""
    try:
        with open(package.origin or "", encoding="utf-8", errors="replace") as file:
            return "__path__" in file.read()
    except OSError:
        return False


def _installed_roots() -> tuple[str, ...]:
    known = search_path()
    return tuple(
        os.path.realpath(path) + os.sep
        for path in {
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *(path for path in known if os.path.basename(path) in ("site-packages", "dist-packages")),
            *archives(),
        }
        if path
    )

"""Give a rank the ``__main__`` of the user's function, by which pickles name what a notebook or script defines.

Without it, ``torch.save`` of a whole model, ``all_gather_object`` and process pools would look in vain for the classes
and functions that came with the function. Processes that multiprocessing starts anew run :data:`_SOURCE` as their
``__main__`` (``multiprocessing.spawn._fixup_main_from_path``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from distributor.machine.imports import on_import
from distributor.shipping import pickling
from distributor.values import layout

_writing = threading.Lock()  # threads may start processes at once

_SOURCE = "from distributor.rank import main_module\nglobals().update(main_module.names_in({path!r}))\n"


def become(function: Callable[..., Any], folder: str, local_rank: int) -> None:
    """Replace this process's ``__main__`` by a module with the names that came with a function."""
    main = ModuleType("__main__")
    # Without file and specification, PySpark believes that its own doctests run, and may end the process with code 0
    # (pyspark.sql.connect.utils.check_dependencies). With a name, mpi4py's pools would import the main module in their
    # workers (mpi4py.futures._core.import_main).
    main.__spec__ = ModuleSpec("__main__", None)
    main.__spec__.name = None  # type: ignore[assignment]
    vars(main).update(_names(function))
    sys.modules["__main__"] = main
    source, call = Path(folder, f"main-{local_rank}.py"), layout.call(folder)
    on_import("multiprocessing.spawn", lambda module: _tell_children(module, main, source, call))


def names_in(path: str) -> dict[str, Any]:
    """In a process that a rank has started anew, return the names of the rank's ``__main__``."""
    return _names(pickling.load_function(path)[0])


def _names(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the global names that came with a function, and its classes and functions by their own names."""
    names: dict[str, Any] = {}
    for each in _of_main(function):
        if isinstance(each, FunctionType):
            names |= {name: value for name, value in each.__globals__.items() if not name.startswith("__")}
        if "." not in each.__qualname__:
            names.setdefault(each.__qualname__, each)
    return names


def _of_main(function: Any) -> Iterator[FunctionType | type]:
    """Yield the functions and classes of the driver's ``__main__`` that came with a function."""
    while (inner := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
        function = inner
    for each in (function, *pickling.classes_by_value()):
        members = vars(each).values() if isinstance(each, type) else ()
        for found in (each, *members):
            found = getattr(found, "__func__", found)  # of a static method or a class method
            if isinstance(found, FunctionType | type) and found.__module__ == "__main__":
                yield found


def _tell_children(spawn: Any, main: ModuleType, source: Path, call: Path) -> None:
    """Let ``multiprocessing`` start processes that have the names of ``main``."""
    prepare: Callable[[str], dict[str, Any]] = spawn.get_preparation_data

    def with_main(name: str) -> dict[str, Any]:
        if sys.modules["__main__"] is not main:
            return prepare(name)
        with _writing:
            if not source.exists():
                source.write_text(_SOURCE.format(path=str(call)))
            main.__file__ = str(source)
            try:
                return prepare(name)
            finally:
                del main.__file__

    spawn.get_preparation_data = with_main

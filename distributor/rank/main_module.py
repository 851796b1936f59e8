"""Give a rank the ``__main__`` of the user's function, by which pickles name what a notebook or script defines.

Without it, ``torch.save`` of a whole model, ``all_gather_object`` and process pools would look in vain for the classes
and functions that came with the function. Processes that multiprocessing starts anew run :data:`_SOURCE` as their
``__main__`` (``multiprocessing.spawn._fixup_main_from_path``).
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from distributor.machine.imports import on_import
from distributor.rank import sent_modules
from distributor.rank.sent_modules import Sent
from distributor.shipping import pickling
from distributor.values import layout

_writing = threading.Lock()  # threads may start processes at once

_SOURCE = "from distributor.rank import main_module\nglobals().update(main_module.names_in({path!r}))\n"


def anew() -> ModuleType:
    """Replace this process's ``__main__`` by an empty module.

    It stays when its code has ended: exit callbacks and threads may pickle what it defines. What processes of
    multiprocessing send back is looked up in ``__mp_main__``.
    """
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    return main


def become(folder: str, local_rank: int) -> None:
    """Replace this process's ``__main__`` by a module with the names that came with the call it has unpickled."""
    main = anew()
    # Without file and specification, PySpark believes that its own doctests run, and may end the process with code 0
    # (pyspark.sql.connect.utils.check_dependencies). With a name, mpi4py's pools would import the main module in their
    # workers (mpi4py.futures._core.import_main).
    main.__spec__ = ModuleSpec("__main__", None)
    main.__spec__.name = None  # type: ignore[assignment]
    vars(main).update(_take_names())
    source, call = Path(folder, f"main-{local_rank}.py"), layout.call(folder)
    on_import("multiprocessing.spawn", lambda module: _tell_children(module, main, source, call))


def names_in(path: str) -> dict[str, Any]:
    """In a process that a rank has started anew, return the names of the rank's ``__main__``."""
    pickling.load_function(path)
    return _take_names()


def _take_names() -> dict[str, Any]:
    """Return the names of the driver's ``__main__``, and let this process find the user's other modules."""
    sent = _sent()
    main = sent.pop("__main__", Sent())
    sent_modules.find_last(sent)
    held = {name: value for names in main.held for name, value in names.items() if not name.startswith("__")}
    return {**main.defined, **held}


def _sent() -> dict[str, Sent]:
    """Return what this process has unpickled by value, by module."""
    sent: dict[Any, Sent] = defaultdict(Sent)
    functions, whole = [*pickling.functions_by_value], [*pickling.modules_by_value]
    pickling.functions_by_value.clear()  # which may hold much data
    pickling.modules_by_value.clear()
    for function in functions:
        held = sent[function.__globals__.get("__name__")].held
        if not any(names is function.__globals__ for names in held):
            held.append(function.__globals__)
    for module in whole:
        sent[module.__name__].whole = module
    defined: list[Any] = [*functions, *pickling.classes_by_value()]
    for each in defined:
        if "." not in each.__qualname__:
            sent[each.__module__].defined.setdefault(each.__qualname__, each)
    return {name: held for name, held in sent.items() if isinstance(name, str) and name}


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

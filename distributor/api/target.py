"""Finds and checks what a run executes: a callable, a script or a module, and its arguments."""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributor.errors import ConfigurationError, PayloadError
from distributor.shipping import modules, pickling, project
from distributor.values.checks import is_module_name
from distributor.values.job import Function, Module, Script, Target


def find_target(
    train_object: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    working_dir: Path | None,
    local: bool,
    python_path: str = "",
) -> Target:
    """Return what each rank runs, checked and ready to be sent.

    For ``local`` ranks, modules must exist, also on the ``python_path`` that the user gives them, and functions of
    modules that can be imported are pickled by reference.
    """
    if isinstance(train_object, Module):
        if local:
            _check_module(train_object.name, working_dir, python_path)
        return train_object
    if isinstance(train_object, (str, os.PathLike)):
        if kwargs:
            raise ConfigurationError(
                f"a script takes no keyword arguments ({', '.join(kwargs)}): pass them as '--name', 'value'"
            )
        return _read_script(find_script(train_object, working_dir), args, working_dir)
    if callable(train_object):
        check_call(train_object, args, kwargs)
        pickled = pickling.dump_function(train_object, args, kwargs, by_value=not local)
        return Function(pickling.name_of(train_object), pickled)
    raise ConfigurationError(
        f"train_object must be a callable or the path of a script, not {type(train_object).__name__} {train_object!r}"
    )


def named_module(module: Any, args: Sequence[Any]) -> Module:
    """Return a module to run, with its arguments. It need not exist."""
    if not is_module_name(module):
        raise ConfigurationError(f"module must be a dotted name such as 'pkg.train', not {module!r}")
    return Module(module, check_argv(args))


def find_script(script: str | os.PathLike[str], working_dir: Path | None) -> Path:
    """Return the path of a script, found in ``working_dir`` or else in the current directory."""
    path = Path(script)
    places = {"": Path()} if path.is_absolute() else places_of(working_dir)
    for folder in places.values():
        if os.path.exists(folder / path):
            return folder / path
    where = "" if path.is_absolute() else f" in {' or '.join(places)}"
    module = str(path) if path.suffix != ".py" and is_module_name(str(path)) else ""
    instead = f": for a module, use run_module({module!r}), or -m {module} in a shell" if module else ""
    raise PayloadError(f"there is no script {str(path)!r}{where}{instead}")


def places_of(working_dir: Path | None) -> dict[str, Path]:
    """Return the folders to search for scripts and modules, in order, each by its description in errors."""
    here = project.current_folder()
    first = {} if working_dir is None else {f"working_dir {working_dir}": here / working_dir}
    return {**first, f"the current directory {here}": here}


def check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that the function can be called with these arguments. If not, every rank would fail."""
    runs_later = _runs_later(function)
    if runs_later is not None:
        kind, remedy = runs_later
        raise ConfigurationError(
            f"{pickling.name_of(function)} is {kind} function, and calling it runs nothing: pass a function that "
            f"{remedy}"
        )
    try:
        # A decorated function may take other arguments than the function that it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        shown = signature.replace(parameters=plain, return_annotation=signature.empty)
        raise ConfigurationError(
            f"{pickling.name_of(function)}{shown} cannot be called with these arguments: {error}"
        ) from None


def _runs_later(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Return the kind of a function whose call does not run its body, and what to pass instead."""
    called = function
    while isinstance(called, functools.partial):
        called = called.func
    # Calling an instance runs its class's __call__.
    for candidate in (called, inspect.getattr_static(type(called), "__call__", None)):
        if inspect.iscoroutinefunction(candidate):
            return "a coroutine", "runs it with asyncio.run"
        if inspect.isasyncgenfunction(candidate):
            return "an asynchronous generator", "iterates over it inside asyncio.run and returns the result"
        if inspect.isgeneratorfunction(candidate):
            return "a generator", "iterates over it and returns the result, such as a list"
    return None


def check_argv(args: Sequence[Any]) -> tuple[str, ...]:
    """Return arguments of a script or module as command-line strings. Numbers, paths and enums pass through ``str``."""
    for index, arg in enumerate(args, start=1):
        is_number = hasattr(arg, "__float__") and not hasattr(arg, "__len__")  # an array or a tensor is not a number
        if not is_number and not isinstance(arg, (str, os.PathLike, enum.Enum)):
            raise ConfigurationError(
                f"arguments of a script or module must be strings, numbers, paths or enums, but argument {index} is "
                f"{arg!r} ({type(arg).__name__})"
            )
    return tuple(map(str, args))


def _read_script(path: Path, args: Sequence[Any], working_dir: Path | None) -> Script:
    try:
        piped = not path.is_file() or _is_descriptor(path)
        source = path.read_bytes()
    except OSError as error:
        raise PayloadError(f"the script {str(path)!r} cannot be read: {error.strerror}") from error
    if path.suffix != ".py" and not piped and not _is_python(source):
        raise PayloadError(f"{str(path)!r} is not a Python script: pass the path of a Python script, or a callable")
    inside = None
    if working_dir is not None and not piped:  # a script there runs there, beside the modules that it imports
        with suppress(ValueError):
            inside = str(path.resolve().relative_to(project.absolute(working_dir).resolve()))
    return Script(str(path.absolute()), source, check_argv(args), inside, piped)


def _is_descriptor(path: Path) -> bool:
    """Return whether a path leads to an open file of this process, as ``/dev/stdin`` and ``/dev/fd/63`` do."""
    while path.is_symlink():
        folder = path.parent.resolve()
        if folder.is_relative_to("/proc"):
            return True
        path = folder / path.readlink()
    return False


def _is_python(source: bytes) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def _check_module(name: str, working_dir: Path | None, python_path: str) -> None:
    """Check that ranks on this machine can run a module: that it exists, and is not a package without ``__main__``."""
    places = places_of(working_dir)
    here, *others = places.values()
    folders = [str(folder) for folder in (here, *others, *(here / path for path in python_path.split(os.pathsep)))]
    spec = modules.find(name, folders)
    if spec is None:
        path = ", ".join(modules.search_path())
        raise PayloadError(f"there is no module {name!r} in {', '.join(places)} or on Python's path: {path}")
    if spec.submodule_search_locations is not None and modules.find(f"{name}.__main__", folders) is None:
        raise PayloadError(
            f"{name!r} is a package without a module __main__, so it cannot be run: name one of its modules"
        )

"""Checks of what a run executes: a callable, a script or a module, and its arguments."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributor.errors import ConfigurationError, PayloadError
from distributor.shipping import payload
from distributor.values.job import Script


def find_script(script: str | os.PathLike[str], working_dir: Path | None) -> Path:
    """Return the path of a script, found in ``working_dir`` or else in the current directory.

    Raises:
        PayloadError: the script is in neither, or is not a ``.py`` file.
    """
    path = Path(script)
    if path.suffix != ".py":
        raise PayloadError(
            f"{str(path)!r} is not a .py file: pass the path of a Python script, a callable, "
            "or use run_module('pkg.train') for a module"
        )
    places = {"": Path()} if path.is_absolute() else places_of(working_dir)
    found = next((folder / path for folder in places.values() if os.path.exists(folder / path)), None)
    if found is None:
        where = "" if path.is_absolute() else f" in {' or '.join(places)}"
        raise PayloadError(f"there is no script {str(path)!r}{where}")
    return found


def places_of(working_dir: Path | None) -> dict[str, Path]:
    """Return the folders that are searched for scripts and modules, in order, by a readable name for messages."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise ConfigurationError("the driver's current directory does not exist any more: change to one") from None
    first = {} if working_dir is None else {f"working_dir {working_dir}": working_dir.absolute()}
    return {**first, f"the current directory {here}": here}


def check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that the function can be called with these arguments, since otherwise every rank would fail at once."""
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{payload.name_of(function)} is a coroutine function, whose call does nothing yet: pass a function that "
            "runs it, with asyncio.run"
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
        told = signature.replace(parameters=plain, return_annotation=signature.empty)
        raise ConfigurationError(f"{payload.name_of(function)}{told} cannot be called like that: {error}") from None


def check_argv(args: Sequence[Any]) -> tuple[str, ...]:
    """Return a script's arguments as command-line strings; numbers and paths become text, as in PySpark."""
    for index, arg in enumerate(args, start=1):
        if not isinstance(arg, (str, os.PathLike)) and not hasattr(arg, "__float__"):
            raise ConfigurationError(
                f"arguments of a script have to be strings, numbers or paths; argument {index} is {arg!r} "
                f"({type(arg).__name__})"
            )
    return tuple(map(str, args))


def within(script: Script, folder: Path) -> Script:
    """Return a script that runs inside ``folder``, beside the modules it imports, if the script lies in there."""
    try:
        inside = Path(script.path).resolve().relative_to(folder.resolve())
    except ValueError:
        return script
    return Script(script.path, script.source, script.argv, str(inside))

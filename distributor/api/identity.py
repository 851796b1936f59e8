"""Describes what a run trains, to compare it with what a later run of the same name trains."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributor.values.claims import Identity, Resume
from distributor.values.job import Function, Module, Script, Target

#: Matches memory addresses in the ``repr`` of objects: they differ from process to process.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")

#: Maximum number of characters of an argument in a warning.
_LONGEST = 60

#: Maximum number of levels of nested lists, dicts and sets that are compared.
_DEEPEST = 20


def identify(
    name: str, resume: Resume, target: Target, train_object: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Identity:
    """Return the identity of a named run: a description of what the run trains.

    Args:
        name: the run's name.
        resume: whether the user wants to continue an earlier run of that name: ``"auto"``, ``"must"`` or ``"never"``.
        target: what ranks run.
        train_object: the function, script or module as the user has passed it. A function's source code is part of the
            identity.
        args, kwargs: the function's arguments, if ``train_object`` is a function.

    Example:
        >>> identify("digits", "auto", Module("pkg.train", ("--lr", "0.1")), None, (), {}).shown
        {'argument 1': "'--lr'", 'argument 2': "'0.1'"}
    """
    match target:
        case Function(name=called):
            code, given = _source_of(train_object), _named(train_object, args, kwargs)
        case Script(path=path, source=source, argv=argv):
            called, code, given = os.path.basename(path), source, _numbered(argv)
        case Module(name=called, argv=argv):
            code, given = b"", _numbered(argv)
    texts = _unlimited()
    shown = {key: _ADDRESS.sub("0x...", texts.repr(value)) for key, value in given.items()}
    digests = {key: _digest(text.encode()) for key, text in shown.items()}
    short = {key: text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for key, text in shown.items()}
    return Identity(name, resume, called, _digest(code), digests, short)


def _source_of(function: Callable[..., Any]) -> bytes:
    """Return a function's source code, or its byte code if there is no source, or ``b""`` if there is neither."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return inspect.getsource(inspect.unwrap(function)).encode()
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return b"" if code is None else bytes(code.co_code)


def _named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's arguments by the names of their parameters, or by number if the function has no signature."""
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**_numbered(args), **kwargs}


def _numbered(args: Sequence[Any]) -> dict[str, Any]:
    return {f"argument {number}": value for number, value in enumerate(args, start=1)}


def _unlimited() -> reprlib.Repr:
    """Return an object whose ``repr`` shortens nothing, and sorts sets, whose order differs from process to process."""
    made = reprlib.Repr()
    for limit in ("list", "tuple", "dict", "set", "frozenset", "deque", "array", "string", "long", "other"):
        setattr(made, f"max{limit}", sys.maxsize)
    made.maxlevel = _DEEPEST
    return made


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

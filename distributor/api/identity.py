"""Describes what a run trains, to compare it with what a later run of the same name trains."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributor.shipping import pickling
from distributor.text.secret import is_secret
from distributor.values.job import Function, Module, Script, Target
from distributor.values.lease_record import Identity, Resume

#: Matches memory addresses in the ``repr`` of objects: they differ from process to process.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")

#: Maximum number of characters of an argument in a warning.
_LONGEST = 60


def identify(
    name: str, resume: Resume, target: Target, train_object: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Identity:
    """Return what a named run trains. A function's source code is part of it.

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
    shown = {key: _ADDRESS.sub("0x...", _text(value)) for key, value in given.items()}
    digests = {key: _digest(text.encode()) for key, text in shown.items()}
    before = ["", *(value if isinstance(value, str) and value.startswith("-") else "" for value in given.values())]
    secret = {key for key, option in zip(given, before) if is_secret(f"{key} {option}", given[key])}
    short = {key: text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for key, text in shown.items()}
    return Identity(name, resume, called, _digest(code), digests, {**short, **dict.fromkeys(secret, "***")})


def target_name(train_object: Any) -> str:
    """Return the name of a function, or the file name of a script, as :func:`identify` does.

    >>> target_name("/home/me/train.py"), target_name(print)
    ('train.py', 'print')
    """
    is_script = isinstance(train_object, (str, os.PathLike))
    return os.path.basename(train_object) if is_script else pickling.name_of(train_object)


def _source_of(function: Callable[..., Any]) -> bytes:
    """Return a function's source code, or else its byte code, or else ``b""``."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return inspect.getsource(inspect.unwrap(function)).encode()
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return b"" if code is None else bytes(code.co_code)


def _named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's arguments by the names of their parameters, or by number if it has no signature."""
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**_numbered(args), **kwargs}


def _numbered(args: Sequence[Any]) -> dict[str, Any]:
    return {f"argument {number}": value for number, value in enumerate(args, start=1)}


def _text(value: Any) -> str:
    """Return the ``repr`` of a value, but with the items of sets in order: their own order differs between processes.

    >>> _text([{"b", "a"}, (1,), {"c": frozenset({2})}])
    "[{'a', 'b'}, (1,), {'c': frozenset({2})}]"
    """
    text = _repr(value)
    try:
        return _ordered(value, frozenset()) if "{" in text else text  # without a brace, there is no set to order
    except RecursionError:
        return text


def _ordered(value: Any, outer: frozenset[int]) -> str:
    """Return the text of a value; ``outer`` has the IDs of the objects that contain it."""
    kind = type(value)
    if kind not in (dict, list, tuple, set, frozenset) or not value:
        return _repr(value)
    if id(value) in outer:
        return "..."
    outer |= {id(value)}
    if kind is dict:
        return f"{{{', '.join(f'{_ordered(key, outer)}: {_ordered(item, outer)}' for key, item in value.items())}}}"
    items = [_ordered(item, outer) for item in value]
    if kind is list:
        return f"[{', '.join(items)}]"
    if kind is tuple:
        return f"({', '.join(items)}{',' * (len(items) == 1)})"
    braces = f"{{{', '.join(sorted(items))}}}"
    return braces if kind is set else f"frozenset({braces})"


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # the object's own __repr__ may raise any exception
        return f"<{type(value).__name__}>"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

"""Selects the arguments of a run that may be shown and kept: plain values that do not look like secrets."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distributor.text.secret import is_secret
from distributor.text.wording import printable
from distributor.values.job import Function, Target

Plain = str | int | float | bool | None

_LONGEST = 500  # characters of a text

_MOST = 200  # arguments

_OPTION = re.compile(r"(?:--|-(?=[A-Za-z]\w))([^=]+)(=?)")  # --lr, and what argparse takes too: -lr


def arguments_of(target: Target, train_object: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Plain]:
    """Return the plain arguments of a target by name, with the defaults of a function.

    >>> from distributor.values.job import Module
    >>> arguments_of(Module("train", ("--lr", "0.1", "--api-key=x", "data", "--fast")), None, (), {})
    {'lr': '0.1', 'argument 4': 'data', 'fast': True}
    """
    given = _of_function(train_object, args, kwargs) if isinstance(target, Function) else _of_options(target.argv)
    plain: dict[str, Plain] = {}
    for name, value in given:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(value, Plain) and not is_secret(name, value) and len(plain) < _MOST:
            plain[name] = printable(value[:_LONGEST]) if isinstance(value, str) else value
    return plain


def _of_function(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # some callables written in C have no signature
        yield from ((f"argument {number}", value) for number, value in enumerate(args, start=1))
        yield from kwargs.items()
        return
    bound.apply_defaults()
    for name, parameter in bound.signature.parameters.items():
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from value.items()
        elif parameter.kind is parameter.VAR_POSITIONAL:
            yield from ((f"{name}.{number}", each) for number, each in enumerate(value))
        else:
            yield name, value


def _of_options(argv: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Return a command line's options by name, and its other words by number."""
    words = list(enumerate(argv, start=1))
    while words:
        number, word = words.pop(0)
        option = _OPTION.match(word)
        if option is None:
            yield f"argument {number}", word
            continue
        name, equals = option.groups()
        if equals:
            yield name, word[option.end() :]
        elif words and words[0][1] != "--" and _OPTION.match(words[0][1]) is None:
            yield name, words.pop(0)[1]
        else:
            yield name, True

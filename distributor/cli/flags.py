"""The options of ``distributor run``, made from the declarations of the API's options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich_click as click

from distributor.api.parameters import OPTIONS
from distributor.values.options import PANELS, Flag, Kind, Option

Decorator = Callable[[Any], Any]

#: An option of the command: its panel in the help, and the decorator that adds it.
Entry = tuple[str, Decorator]


def own(panel: str, *names: str, **settings: Any) -> Entry:
    """Return an option that only the command line has."""
    return panel, click.option(*names, panel=panel, **settings)


def declared(own_options: Mapping[str, Sequence[Entry]], without: str | None = None) -> Decorator:
    """Return a decorator that adds the API's options, each followed by its ``own_options``, after those of ``""``."""
    entries = [*own_options.get("", ())]
    for name, option in OPTIONS.items():
        if option.flag is not None and name != without:
            entries.append((option.flag.panel, _click_option(name, option, option.flag)))
        entries += own_options.get(name, ())
    entries.sort(key=lambda entry: PANELS.index(entry[0]))

    def decorate(command: Any) -> Any:
        for _, decorator in reversed(entries):  # Python too applies the last decorator first
            command = decorator(command)
        return command

    return decorate


def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the API's arguments for the values of the command's options. Options that the API lacks are left out."""
    return {
        name: _READERS[name](value) if name in _READERS else value for name, value in given.items() if name in OPTIONS
    }


def pairs(option: str, settings: Sequence[str]) -> dict[str, str]:
    """Return settings of the form ``NAME=VALUE`` as a dict.

    >>> pairs("--env", ["A=1", "B=x=y"])
    {'A': '1', 'B': 'x=y'}
    """
    named = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{option} takes NAME=VALUE, not {setting!r}")
        named[name] = value
    return named


def words(choices: Sequence[str]) -> str:
    """Return choices as the help shows them. A line may end at a space, but not within a word."""
    return " | ".join(choices)


def _click_option(name: str, option: Option, flag: Flag) -> Decorator:
    settings: dict[str, Any] = {"metavar": flag.metavar, "panel": flag.panel, "help": option.help}
    if isinstance(flag.kind, tuple):
        settings["metavar"] = words(flag.kind)
    if flag.several:
        settings["multiple"] = True
    elif flag.kind == "switch":
        settings["default"] = option.default
        if not flag.names:  # click sees from names such as --a/--no-a that it is a switch
            settings["is_flag"] = True
    else:
        settings |= {"type": _type(flag.kind), "default": option.default, "show_default": option.default is not None}
    return click.option(*(flag.names or (f"--{name.replace('_', '-')}",)), name, **settings)


def _type(kind: Kind) -> Any:
    if isinstance(kind, tuple):
        return click.Choice(kind)
    types = {"text": str, "integer": int, "range": _Range(), "number": float, "path": click.Path()}
    return types.get(kind, click.Path(exists=True, file_okay=False))


class _Range(click.ParamType[int | tuple[int, int]]):
    """The type of options that take a whole number, or two with a colon between them."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | tuple[int, int]:
        match = re.fullmatch(r"(-?\d+)(?::(\d+))?", str(value))
        if match is None:
            self.fail(f"{value!r} is not a number, nor a range such as 4:16", param, ctx)
        return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


def _logs(text: str) -> str | list[int]:
    return [int(rank) for rank in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else text


def _ports(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise click.UsageError(f"--driver-ports takes a port or a range such as 4700-4710, not {text!r}")
    return int(match[1]), int(match[2] or match[1])


_READERS: dict[str, Callable[[Any], Any]] = {
    "env": lambda settings: pairs("--env", settings),
    "logs": _logs,
    "driver_ports": _ports,
}

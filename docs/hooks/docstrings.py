"""Has Griffe read this package's docstrings: it knows fewer forms than people do."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: ``:class:`StallError```, with or without ``~`` and a path before the name.
_ROLE = re.compile(r":(?:class|func|meth|mod):`~?([\w.]+)`")

#: ``rank, host: where it failed`` as an entry of a section.
_SEVERAL = re.compile(r"^( {4})(\w+(?:, \w+)+): ", re.MULTILINE)

#: A table of reStructuredText with two columns and no heading, between two lines of ``=``.
_TABLE = re.compile(r"^=+  =+\n(.*?)\n=+  =+$", re.DOTALL | re.MULTILINE)


class Docstrings(griffe.Extension):
    """Changes docstrings before they are parsed: examples, roles, entries of several names, tables."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by Griffe for each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value, obj)


def readable(text: str, obj: griffe.Object) -> str:
    """A docstring as Griffe and Markdown understand it."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = _ROLE.sub(lambda role: _link(role.group(1), obj), text)
    text = _TABLE.sub(lambda table: _markdown_table(table.group(1)), text)
    return _SEVERAL.sub(lambda entry: _one_each(entry, text), text)


def _link(name: str, obj: griffe.Object) -> str:
    """A cross-reference: to a member of the same class, to what the module has, or to the path as it is."""
    scope: Any = obj
    while scope is not None and name.partition(".")[0] not in scope.members:
        scope = scope.parent
    path = name if scope is None or name.startswith("distributor.") else f"{scope.path}.{name}"
    return f"[`{name.rpartition('.')[2]}`][{path}]"


def _one_each(entry: re.Match[str], text: str) -> str:
    """The same words for each name; what follows on further lines belongs to the last one."""
    indent, names = entry.group(1), entry.group(2).split(", ")
    rest = text[entry.end() :].partition("\n")[0]
    return "".join(f"{indent}{name}: {rest}\n" for name in names[:-1]) + f"{indent}{names[-1]}: "


def _markdown_table(rows: str) -> str:
    cells = [re.split(r"  +", row.strip(), maxsplit=1) for row in rows.splitlines()]
    return "\n".join(["| | |", "|---|---|", *(f"| `{name}` | {words} |" for name, words in cells)])

"""Parses the command line of an Azure job: one program with its arguments, run without a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributor.errors import ConfigurationError

_SHELL = re.compile(r"[|&;<>`\n]|\$")  # what only a shell understands, once ``${{inputs.NAME}}`` is replaced

#: Where these are plain characters, and to ``shlex`` too.
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:[^"\\`$]|\\["\\])*\"""", re.DOTALL)

_OUTPUT = re.compile(r"\$\{\{\s*outputs\.(\w+)\s*\}\}")  # the path of an output, which Azure uploads after the job

_INPUT = re.compile(r"\$\{\{\s*inputs\.(\w+)\s*\}\}")


@dataclass(frozen=True)
class Program:
    """A script or a module, and its arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


def parse(command: str, inputs: Mapping[str, Any]) -> Program:
    """Return the program that a command line runs, with the values of ``inputs`` for ``${{inputs.NAME}}``.

    ConfigurationError if it is not ``python SCRIPT ...`` or ``python -m MODULE ...``, needs a shell, names an output,
    or lacks an input.

    >>> parse("python -m pkg.train --data ${{inputs.data}}", {"data": "/mnt/my data"})
    Program(name='pkg.train', arguments=('--data', '/mnt/my data'), is_module=True)
    """
    if not isinstance(command, str) or not command.strip():
        raise ConfigurationError(f"command must be a line such as 'python train.py --lr 0.1', not {command!r}")
    if match := _OUTPUT.search(command):
        raise ConfigurationError(
            f"command names the output {match[1]!r}, but nothing is uploaded: write a path instead of {match[0]}; to "
            'get new files back, pass options={"output_dir": ...} to run()'
        )
    marked = _INPUT.sub(r"\0\1\0", command.strip().replace("\\\n", " "))
    if match := _SHELL.search(_QUOTED.sub("", marked)):
        raise ConfigurationError(
            f"command uses {match[0]!r}, which only a shell or Azure understands, but no shell runs the command: pass "
            f"one program with its arguments, not {command!r}"
        )
    try:
        words = shlex.split(marked)
    except ValueError as error:
        raise ConfigurationError(
            f"command cannot be split into words ({error}): check the quotation marks and backslashes in {command!r}"
        ) from None
    # Ranks write each line at once, with or without ``-u``.
    words = [word for index, word in enumerate(words) if not (index == 1 and word == "-u")]
    if not re.fullmatch(r"python(3(\.\d+)?)?", words[0]) or len(words) < 2 + (words[1:2] == ["-m"]):
        raise ConfigurationError(
            f"command must be 'python SCRIPT ...' or 'python -m MODULE ...', not {command!r}: the run starts the ranks "
            "itself, so leave out torchrun, mpirun and other launchers"
        )
    values = {name: _text(name, value) for name, value in inputs.items()}
    filled = [re.sub(r"\0(\w+)\0", lambda match: _value(match[1], values), word) for word in words[1:]]
    if filled[0] == "-m":
        return Program(filled[1], tuple(filled[2:]), is_module=True)
    if filled[0].startswith("-"):
        raise ConfigurationError(
            f"command passes the option {filled[0]!r} to Python, but the run starts Python itself, without options: "
            "write 'python SCRIPT ...' or 'python -m MODULE ...'"
        )
    return Program(filled[0], tuple(filled[1:]))


def _value(name: str, values: Mapping[str, str]) -> str:
    if name not in values:
        there = ", ".join(values) or "none"
        raise ConfigurationError(f"command names the input {name!r}, but inputs has {there}: add the input to inputs")
    return values[name]


def _text(name: str, value: Any) -> str:
    """Return an input's value, or the ``path`` of an object, as text."""
    value = getattr(value, "path", value)
    if not isinstance(value, (str, int, float)):
        raise ConfigurationError(f"input {name!r} must be text, a number or an object with a path, not {value!r}")
    return str(value)

"""Python programs in processes of their own, which find the modules of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import watch

_PATH = os.pathsep.join(str(folder) for folder in (Path(__file__).parent, Path(__file__).parents[1]))


def start(folder: Path, code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Starts a program, whose script is written into a folder; ``options`` are those of Popen."""
    script = folder / "driver.py"
    script.write_text(textwrap.dedent(code))
    env = {**os.environ, "PYTHONPATH": _PATH, **options.pop("env", {})}
    return subprocess.Popen([sys.executable, str(script), *map(str, arguments)], text=True, env=env, **options)


def run(folder: Path, code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a program prints, and how it ends."""
    with start(folder, code, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as program:
        out, errors = program.communicate(timeout=3 * watch.DEADLINE)
    return subprocess.CompletedProcess(program.args, program.returncode, out, errors)

"""Which files processes have open for writing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from distributor.machine import open_files


def test_files_that_a_process_writes(tmp_path: Path) -> None:
    """Not those that it reads, nor those elsewhere."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/read").touch()
    code = "import sys; files = [open(p, m) for p, m in (('in/read', 'r'), ('in/w', 'w'), ('in/a', 'a'), ('out', 'w'))]"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print('ready', flush=True); sys.stdin.read()"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        folder = os.path.realpath(tmp_path / "in")
        found = open_files.written([process.pid, 2**22 + 1], folder)
        assert found == {f"{folder}/w": process.pid, f"{folder}/a": process.pid}
        process.kill()

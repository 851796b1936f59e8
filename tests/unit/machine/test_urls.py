"""Folders behind URLs, and which files processes have open for writing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributor.machine import open_files
from distributor.machine.urls import Remote


def test_a_folder_behind_a_url(tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/run/")
    assert remote.sizes() == {}
    (tmp_path / "a").write_text("content")
    remote.put(str(tmp_path / "a"), "b/c.txt")
    remote.copy("b/c.txt", "copy")
    remote.move("copy", "moved")
    assert remote.sizes() == {"b/c.txt": 7, "moved": 7}
    remote.get("moved", str(tmp_path / "back/a"))
    assert (tmp_path / "back/a").read_text() == "content"
    for _ in range(2):
        remote.remove("moved")
    remote.check("probe")
    assert remote.sizes() == {"b/c.txt": 7}
    assert (remote.has("moved"), remote.has("b/c.txt")) == (False, True)


def test_all_errors_are_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(f"file://{tmp_path}")
    with pytest.raises(OSError):
        remote.get("absent", str(tmp_path / "target"))

    def refuse(*_: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(remote._fs, "rm_file", refuse)
    remote.remove("a")  # there is none
    (tmp_path / "a").touch()
    with pytest.raises(OSError, match="RuntimeError: no credentials"):
        remote.remove("a")


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(OSError, match="fsspec is not installed"):
        Remote("file:///tmp")


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

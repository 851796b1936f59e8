"""What tests look for after a run is found, and what belongs to others is not."""

from __future__ import annotations

import mmap
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from leftovers import Leftovers

RUN = secrets.token_hex(6)

SLEEP = "import sys; print(flush=True); sys.stdin.read()"


def a_process_with_its_name(folder: Path) -> list[str]:
    return [sys.executable, "-c", SLEEP, f"--temp-dir=/tmp/distributor-{RUN}-x"]


def a_process_in_its_folder(folder: Path) -> list[str]:
    return [sys.executable, "-c", f"import os; os.chdir({str(folder)!r}); os.rmdir({str(folder)!r}); {SLEEP}"]


@pytest.mark.parametrize("command", [a_process_with_its_name, a_process_in_its_folder])
def test_a_process_without_a_mark_is_found(command: Callable[[Path], list[str]], tmp_path: Path) -> None:
    folder = tmp_path / f"distributor-{RUN}-x"
    folder.mkdir()
    leftovers = Leftovers()
    with subprocess.Popen(command(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = leftovers.of(RUN)  # other tests may leave something meanwhile
        assert [each for each in found if each.startswith(f"{process.pid}: ")]
        with pytest.raises(AssertionError, match=f"left behind 0.1 s after the end.*{process.pid}: "):
            leftovers.gone(RUN, 0.1)
        process.kill()
    leftovers.gone(RUN)


@pytest.mark.parametrize("name", ["distributor-{}-x", "dr-{}-x", "ompi.host", "prte.x", "pmix-x", "hydra_x", "ray"])
def test_a_folder_is_found(name: str) -> None:
    leftovers = Leftovers()
    path = Path(tempfile.gettempdir(), name.format(RUN))
    path.mkdir()
    try:
        assert str(path) in leftovers.of(RUN)  # other tests may leave something meanwhile
        assert str(path) not in Leftovers().of("another")
    finally:
        path.rmdir()


def test_shared_memory_is_found_unless_a_living_process_uses_it() -> None:
    before = Leftovers()
    path = Path("/dev/shm", f"sm_segment.{os.getpid()}")
    path.write_bytes(b"x" * mmap.PAGESIZE)
    try:
        assert str(path) in before.of(RUN)
        assert str(path) not in Leftovers().of(RUN)  # it was there before
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
            assert str(path) not in before.of(RUN)
        assert str(path) in before.of(RUN)
    finally:
        path.unlink()

"""What a run of any launch path may leave behind, looked for from outside: processes, temporary files, shared memory.

Other processes run tests beside this one. Their processes and temporary files have the names of other runs, or lie in
their own temporary folders; shared memory that a living process uses is not a leftover of a run that has ended.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import watch

from distributor.values import layout

#: What Open MPI, MPICH and Ray call files and folders that do not have a run's name.
_NAMES = ("ompi.*", "openmpi*", "prte*", "pmix*", "hydra_*", "mpich*", "ray", "ray_*")


def processes(run: str) -> list[psutil.Process]:
    """All living processes of a run: by their mark, or by its name in their command lines, folders or open files.

    Ray's DashboardAgent and RuntimeEnvAgent, for example, lose the environment and with it the mark.
    """
    by_pid = {process.pid: process for process in watch.processes(run)}
    for process in psutil.process_iter():
        if process.pid not in (*by_pid, os.getpid()) and any(run in name for name in _names(process)):
            by_pid[process.pid] = process
    return [*by_pid.values()]


def _names(process: psutil.Process) -> Iterator[str]:
    with suppress(psutil.Error):
        yield " ".join(process.cmdline())
    yield from _links(Path("/proc", str(process.pid)), "cwd", "fd/*")


def _links(process: Path, *patterns: str) -> Iterator[str]:
    """Where some of a process's links lead."""
    with suppress(OSError):  # it has ended meanwhile
        for link in [path for pattern in patterns for path in process.glob(pattern)]:
            with suppress(OSError):
                yield os.readlink(link)


class Leftovers:
    """Tells what is left of runs. Remembers which files are there when it is made, before the runs begin.

    Args:
        temporary: further folders for temporary files, such as those of other hosts.
        memory: further folders of shared memory.
    """

    def __init__(self, temporary: Iterable[Path] = (), memory: Iterable[Path] = ()) -> None:
        self._temporary = {Path("/tmp"), Path(tempfile.gettempdir()), *temporary}
        self._memory = {Path("/dev/shm"), *memory}
        self._before = {*self._files(), *self._segments()}

    def of(self, run: str) -> list[str]:
        """What is left of a run now: each process with the end of its command line, and each path."""
        left = []
        for process in processes(run):
            with suppress(psutil.Error):
                left.append(f"{process.pid}: {' '.join(process.cmdline()[-3:])}")
        files = self._files() - self._before
        files |= {path for folder in self._temporary for path in folder.glob(f"*{run}*")}
        segments = {segment for segment in self._segments() - self._before if not _of_another(segment.name, run)}
        used = _in_use() if segments else set()
        return left + sorted(map(str, [*files, *(segment for segment in segments if segment.name not in used)]))

    def gone(self, run: str) -> None:
        """Asserts that nothing of a run is left soon."""
        end = time.monotonic() + watch.DEADLINE
        while left := self.of(run):
            assert time.monotonic() < end, f"left behind {watch.DEADLINE} s after the end: {left}"
            time.sleep(0.05)  # a poll, with a deadline

    def _files(self) -> set[Path]:
        return {path for folder in self._temporary for name in _NAMES for path in folder.glob(name)}

    def _segments(self) -> set[Path]:
        return {path for folder in self._memory for path in folder.glob("*")}


def _of_another(name: str, run: str) -> bool:
    """Whether a folder in shared memory has the name of another run, which may be going on."""
    return name.startswith(layout.PREFIX) and not name.startswith(f"{layout.PREFIX}{run}")


def _in_use() -> set[str]:
    """The names of shared memory that living processes have mapped or open."""
    names = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            names |= {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
        names |= {link.partition("/dev/shm/")[2] for link in _links(process, "fd/*")}
    return names

"""What a run may leave behind, looked for from outside: processes, files, descriptors."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from distributor.control import FOLDER_PREFIX
from distributor.processes import NODE_ID

#: Seconds after which waiting for something that should be quick is a failure: generous, for busy machines.
DEADLINE = 30.0

#: Seconds from a failure to its exception on the driver, and from there until no process of the run is left.
FAILURE_DEADLINE = 5.0

#: Seconds from a kill to its exception: a node that ends without a word has some to come back, ranks to save.
KILL_DEADLINE = 10.0

#: Seconds from any kill until no process of the run is left.
ORPHAN_DEADLINE = 15.0

T = TypeVar("T")


def processes(run_id: str = "") -> list[psutil.Process]:
    """Live processes of a run: its agents, launchers, ranks and whatever ranks started; of any run by default."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            mark = process.environ().get(NODE_ID, "")
            agent = is_agent(process) and (not run_id or run_id in _agents_run(process))
            if agent or (mark and mark.startswith(run_id)):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def is_agent(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return len(command) > 4 and "distributor." in command[2] and command[4] == "agent"


def is_launcher(process: psutil.Process) -> bool:
    command = process.cmdline()
    return len(command) > 4 and "distributor." in command[2] and command[4] == "launcher" and not _is_rank(process)


def _is_rank(process: psutil.Process) -> bool:
    """Ranks are forks of their launcher, with its command line."""
    parent = process.parent()
    return parent is not None and parent.cmdline() == process.cmdline()


def _agents_run(process: psutil.Process) -> str:
    """An agent's run, by its launcher's mark."""
    return " ".join(child.environ().get(NODE_ID, "") for child in process.children())


def folders() -> set[Path]:
    """Private folders of nodes that exist now."""
    return set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], T], deadline: float = DEADLINE) -> T:
    """Waits for a condition with a deadline; returns what it returned."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline} s"
        time.sleep(0.02)  # a poll, with a deadline
    return value


def gone(run_id: str = "", deadline: float = FAILURE_DEADLINE) -> None:
    """Asserts that no process of a run is left soon."""
    end = time.monotonic() + deadline
    while left := processes(run_id):
        assert time.monotonic() < end, f"left behind: {[(p.pid, p.cmdline()[-3:]) for p in left]}"
        time.sleep(0.02)  # a poll, with a deadline
